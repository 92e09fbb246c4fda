"""The chunked loss against torch's cross entropy of whole logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gdn2.ops.loss import linear_cross_entropy
from tests.closeness import assert_close

REDUCTIONS = ["mean", "sum", "none"]


def operands(
    tokens: int, vocabulary: int = 37, width: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    logits = hidden.double() @ weight.double().T
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
    return loss.reshape(targets.shape) if options.get("reduction") == "none" else loss


def gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum, so that each token of an unreduced loss counts differently."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(loss.shape, generator=generator, dtype=torch.float64)
    return torch.autograd.grad((loss * weights.to(loss.device)).sum(), inputs)


def largest_allocation(function: Callable[[], object]) -> int:
    """The most bytes that one operator asked for, counted inside custom operators too."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        function()
    return max(int(event.self_cpu_memory_usage) for event in profile.function_events)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("tokens", [1, 63, 65, 130])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 64])
def test_values_and_gradients(tokens: int, reduction: str, chunk_tokens: int | None) -> None:
    hidden, weight, targets = operands(tokens)
    targets[1::3] = -100
    loss = linear_cross_entropy(
        hidden, weight, targets, reduction=reduction, chunk_tokens=chunk_tokens
    )
    expected = whole(hidden, weight, targets, reduction=reduction)
    assert loss.dtype == torch.float64
    assert_close("loss", loss, expected, 1e-12)
    inputs = (hidden, weight)
    for name, x, z in zip(
        ("hidden", "weight"), gradients(loss, inputs), gradients(expected, inputs), strict=True
    ):
        assert_close(f"gradient of {name}", x, z, 1e-12)


def test_any_leading_shape_and_ignore_index() -> None:
    hidden, weight, targets = operands(24)
    # Also an ignored token within the vocabulary, a transposed hidden and a strided weight.
    batch = hidden.reshape(4, 6, 16).transpose(0, 1)
    strided = weight.T.contiguous().T
    for reduction in REDUCTIONS:
        options = {"ignore_index": 5, "reduction": reduction}
        loss = linear_cross_entropy(batch, strided, targets.reshape(6, 4), **options)  # type: ignore[arg-type]
        expected = whole(batch, strided, targets.reshape(6, 4), **options)
        assert_close(reduction, loss, expected, 1e-12)
        for x, z in zip(
            gradients(loss, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True
        ):
            assert_close(f"gradient for {reduction}", x, z, 1e-12)


def test_gradcheck() -> None:
    hidden, weight, targets = operands(7, vocabulary=5, width=3)
    targets[2] = -100
    for reduction in REDUCTIONS:

        def run(hidden: Tensor, weight: Tensor, reduction: str = reduction) -> Tensor:
            return linear_cross_entropy(
                hidden, weight, targets, reduction=reduction, chunk_tokens=2
            )

        assert torch.autograd.gradcheck(run, (hidden, weight))


@pytest.mark.parametrize("count", [0, 5])
def test_nothing_to_predict_is_zero(count: int) -> None:
    hidden, weight, targets = operands(count)
    targets[:] = -100
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert not gradient.any()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)],
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    # The tolerance is that of rounding to the dtype, which the loss itself escapes.
    hidden, weight, targets = operands(2000, vocabulary=300, dtype=dtype)
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = whole(inputs[0], inputs[1], targets)
    d_hidden, d_weight = torch.autograd.grad(exact, inputs)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=128)
    assert loss.dtype == torch.float32
    assert_close("loss", loss, exact, 1e-6)
    actual = torch.autograd.grad(1024 * loss, (hidden, weight))
    assert [x.dtype for x in actual] == [dtype, dtype]
    assert_close("gradient of hidden", actual[0] / 1024, d_hidden, tolerance)
    assert_close("gradient of weight", actual[1] / 1024, d_weight, tolerance)


def test_small_probabilities_survive_fp16() -> None:
    # Each is 1 / 300, and 4e-7 in a mean over 8000 tokens, where fp16 has steps of 6e-8.
    hidden, weight, targets = operands(8000, vocabulary=300, dtype=torch.float16)
    hidden = (1 + hidden.detach()).requires_grad_()
    weight = (0.01 * weight.detach().float()).half().float().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    (actual,) = torch.autograd.grad(loss, weight)
    (exact,) = torch.autograd.grad(whole(hidden, weight, targets), weight)
    assert_close("gradient of weight", actual, exact, 1e-3)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = operands(9, dtype=torch.float32)
    hidden = (1e4 * hidden.detach()).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    expected = whole(hidden, weight, targets)
    assert_close("loss", loss, expected, 1e-6)
    for x, z in zip(
        gradients(loss, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True
    ):
        assert_close("gradient", x, z, 1e-5)


def test_autocast_runs_in_its_dtype() -> None:
    hidden, weight, targets = operands(65, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
        inside = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    outside = torch.autograd.grad(loss, (hidden, weight))
    rounded = whole(hidden.bfloat16(), weight.bfloat16(), targets)
    assert_close("loss", loss, rounded, 1e-6)
    for x, y, z in zip(
        inside, outside, torch.autograd.grad(rounded, (hidden, weight)), strict=True
    ):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)
        assert_close("gradient", x, z, 5e-3)


def test_ignored_tokens_poison_nothing() -> None:
    """Whatever gradient comes to them, infinite or far larger than the others'."""
    hidden, weight, targets = operands(9)
    targets[3] = -100
    results = [
        torch.autograd.grad(loss(hidden, weight, targets, reduction="none").sqrt().mean(), weight)[
            0
        ]
        for loss in (linear_cross_entropy, whole)
    ]
    assert results[0].isfinite().all()
    kept = targets != -100
    losses = whole(hidden, weight, targets, reduction="none")[kept].sqrt().sum() / 9
    assert_close("gradient", results[0], torch.autograd.grad(losses, weight)[0], 1e-12)
    hidden, weight, _ = operands(9, dtype=torch.float16)
    weights = torch.where(kept, 1.0, 1e9)
    found = (linear_cross_entropy(hidden, weight, targets, reduction="none") * weights).sum()
    right = (whole(hidden, weight, targets, reduction="none") * weights).sum()
    actual, exact = (torch.autograd.grad(x, weight)[0] for x in (found, right))
    assert_close("fp16", actual, exact, 2e-3)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets = operands(5)
    loss = linear_cross_entropy(hidden, weight, targets)
    for wanted in (loss, loss.square()):
        with pytest.raises(RuntimeError, match="create_graph=True, expected none"):
            torch.autograd.grad(wanted, hidden, create_graph=True)


def test_tangents_are_refused() -> None:
    hidden, weight, targets = (x.detach() for x in operands(5))
    with pytest.raises(ValueError, match="linear_cross_entropy: got operands with tangents"):
        torch.func.jvp(lambda x: linear_cross_entropy(x, weight, targets), (hidden,), (hidden,))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_rounded_once(reduction: str) -> None:
    """Whatever the loss is multiplied by."""
    hidden, weight, targets = operands(500, vocabulary=300, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = whole(inputs[0], inputs[1], targets, reduction=reduction)
    right = torch.autograd.grad(exact / 3, inputs)
    for x, z in zip(torch.autograd.grad(loss / 3, (hidden, weight)), right, strict=True):
        assert_close("gradient", x, z, 2.1e-3)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_operand_costs_no_gradient(frozen: str) -> None:
    hidden, weight, targets = operands(65)
    learned = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, targets)
    expected = whole(hidden, weight, targets)
    actual, exact = (torch.autograd.grad(x, learned)[0] for x in (loss, expected))
    assert_close("gradient", actual, exact, 1e-12)


def test_logits_are_never_whole() -> None:
    tokens, vocabulary, chunk = 2048, 4000, 32
    hidden, weight, targets = operands(tokens, vocabulary, 8, torch.float32)

    def train() -> None:
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk)
        torch.autograd.grad(loss, (hidden, weight))

    # Whole logits would be 64 times as much.
    assert largest_allocation(train) <= 4 * chunk * vocabulary
    whole_logits = largest_allocation(lambda: hidden.detach() @ weight.detach().T)
    assert whole_logits == 4 * tokens * vocabulary


def test_compiles_whole() -> None:
    hidden, weight, targets = operands(65, dtype=torch.float32)

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(2 * hidden, weight, targets, chunk_tokens=16)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for tokens in (65, 63, 130):
        hidden, weight, targets = operands(tokens, dtype=torch.float32)
        loss, expected = compiled(hidden, weight, targets), whole(2 * hidden, weight, targets)
        assert_close("loss", loss, expected, 1e-6)
        for x, z in zip(
            gradients(loss, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True
        ):
            assert_close("gradient", x, z, 1e-5)


def test_operator_registration() -> None:
    hidden, weight, targets = operands(5)
    torch.library.opcheck(torch.ops.gdn2.linear_cross_entropy, (hidden, weight, targets, -100, 2))
    hidden, weight = hidden.detach(), weight.detach()
    operands_of_both = (hidden, weight, targets, -100, 2, True, False)
    torch.library.opcheck(torch.ops.gdn2.linear_cross_entropy_and_gradients, operands_of_both)
    torch.library.opcheck(torch.ops.gdn2.scaled, (hidden, torch.tensor(0.5), torch.bfloat16))


def test_flops_are_counted() -> None:
    hidden, weight, targets = operands(65)
    with FlopCounterMode(display=False) as counter:
        for head in (weight, weight.detach()):
            linear_cross_entropy(hidden, head, targets).backward()
        linear_cross_entropy(hidden, weight, targets, reduction="none").sum().backward()
    # Logits and two gradients, for a frozen head one; unreduced also logits again.
    assert counter.get_total_flops() == (3 + 2 + 4) * 2 * 65 * 37 * 16


def test_bad_input_is_refused() -> None:
    hidden, weight, targets = operands(6)
    outside = targets.clone()
    outside[3] = 37
    cases: list[tuple[str, tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = [
        ("hidden is torch.int64 .6, 16., expected", (hidden.long(), weight, targets), {}),
        ("weight is .*37, 15.*, expected .*, 16.", (hidden, weight[:, 1:], targets), {}),
        ("weight is .*0, 16.*, expected", (hidden, weight[:0], targets), {}),
        ("targets are .*5,.*, expected torch.int64 .6,.", (hidden, weight, targets[1:]), {}),
        ("targets are torch.int32", (hidden, weight, targets.int()), {}),
        ("weight is on meta, expected cpu", (hidden, weight.to("meta"), targets), {}),
        ("reduction is 'max', expected one of", (hidden, weight, targets), {"reduction": "max"}),
        ("chunk_tokens is 0, expected", (hidden, weight, targets), {"chunk_tokens": 0}),
        ("targets hold 37, expected 0 to 36 or", (hidden, weight, outside), {}),
        ("targets hold -100, expected", (hidden, weight, targets - 100), {"ignore_index": -1}),
    ]
    cases[-1][1][2][0] = -100
    for message, (a, b, c), options in cases:
        with pytest.raises(ValueError, match=message) as raised:
            linear_cross_entropy(a, b, c, **options)
        assert "\n" not in str(raised.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    hidden, weight, targets = operands(700, vocabulary=300, dtype=dtype)
    hidden, weight = (x.detach().cuda().requires_grad_() for x in (hidden, weight))
    targets[1::7] = -100
    targets = targets.cuda()[:, None].repeat(1, 3)[:, 1]  # not side by side
    for reduction in REDUCTIONS:
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_tokens=128)
        expected = whole(hidden, weight, targets, reduction=reduction)
        assert_close("loss", loss, expected, 1e-5)
        for x, z in zip(
            gradients(loss, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True
        ):
            assert_close(reduction, x, z, 1e-5 if dtype == torch.float32 else 5e-3)
