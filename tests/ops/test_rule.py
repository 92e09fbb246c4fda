"""The public operator: broadcasting, splitting, edges, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2 import gated_delta_rule
from gdn2.ops.backends import why_not
from tests.closeness import assert_close
from tests.ops.cases import Case, operands, rule

EXACT = 1e-12
BACKENDS = ["torch", "reference"]


def leaves(case: Case) -> dict[str, Tensor]:
    return {n: x.requires_grad_() for n, x in operands(case).items()}


def gradients(outputs: tuple[Tensor, Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss in which every entry of output and state counts differently."""
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
    grads = torch.autograd.grad(outputs, list(x.values()), weights)
    return dict(zip(x, grads, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(T=20, d_k=6, d_v=5, heads=(1, 4, 2, 4), widths=("one", "one", "one")),
        Case(T=20, d_k=6, d_v=5, heads=(2, 6, 3, 1), widths=("full", "one", "full")),
        Case(T=20, d_k=6, d_v=5, heads=(4, 4, 1, 2), widths=("one", "full", "one")),
    ],
    ids=str,
)
def test_broadcast_gradients_are_sums(case: Case, backend: str) -> None:
    """Eq. 48: what an operand is broadcast over, its gradient is summed over."""
    x = leaves(case)
    heads = {n: case.heads[1] // x[n].shape[2] for n in "qkvgbw"}
    widths = {n: {"v": 5, "w": 5}.get(n, 6) // x[n].shape[3] for n in "qkvgbw"}
    wide = {
        n: x[n].detach().repeat_interleave(heads[n], 2).repeat(1, 1, 1, widths[n]) for n in heads
    }
    wide = {n: y.requires_grad_() for n, y in wide.items()}
    wide["initial_state"] = x["initial_state"].detach().requires_grad_()
    outputs, expanded = (rule(y, backend=backend, chunk_size=16) for y in (x, wide))
    assert_close("o", outputs[0], expanded[0], EXACT)
    actual, expected = gradients(outputs, x), gradients(expanded, wide)
    for n, group in heads.items():
        summed = expected[n].unflatten(2, (-1, group)).sum(3)
        summed = summed.unflatten(3, (widths[n], -1)).sum(3)
        assert_close(f"d{n}", actual[n], summed, EXACT)


def test_a_tied_gate_sums_both_of_its_gradients() -> None:
    """Eqs. 47, 48: β used for erase and write is KDA, and collects from both."""
    x = leaves(Case(T=20, widths=("full", "one", "one")))
    beta = x.pop("w")
    x["b"] = beta.detach().clone().requires_grad_()
    tied = gradients(rule({**x, "b": beta, "w": beta}), {"beta": beta})
    apart = {**x, "w": beta.detach().clone().requires_grad_()}
    parts = gradients(rule(apart), apart)
    assert_close("dβ", tied["beta"], parts["b"] + parts["w"], EXACT)


def test_offsets_may_be_int32() -> None:
    case = Case(lengths=(3, 0, 30))
    x, cu_seqlens = operands(case), case.cu_seqlens
    assert cu_seqlens is not None
    narrow = rule(x, cu_seqlens=cu_seqlens.int())
    for actual, expected in zip(narrow, rule(x, cu_seqlens=cu_seqlens), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["b", "w"])
def test_an_absent_gate_is_zero_or_one(name: str) -> None:
    x = operands(Case(T=40))
    neutral = torch.zeros_like(x["b"]) if name == "b" else torch.ones_like(x["w"])
    for actual, expected in zip(rule({**x, name: None}), rule({**x, name: neutral}), strict=True):
        assert_close(f"without {name}", actual, expected, EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_carries_a_sequence_on(backend: str) -> None:
    """Two halves through the state are the whole, and so are their gradients."""
    x = leaves(Case(T=70, d_k=7, d_v=5, heads=(1, 2, 2, 1)))
    parts, state = [], x["initial_state"]
    for tokens in (slice(0, 33), slice(33, 70)):
        half = {n: x[n][:, tokens] for n in "qkvgbw"}
        o, state = rule({**half, "initial_state": state}, backend=backend, chunk_size=16)
        parts.append(o)
    whole = rule(x, backend=backend, chunk_size=16)
    halves = torch.cat(parts, 1), state
    for actual, expected in zip(halves, whole, strict=True):
        assert_close("halves", actual, expected, EXACT)
    expected_grads = gradients(whole, x)
    for name, actual in gradients(halves, x).items():
        assert_close(f"d{name}", actual, expected_grads[name], EXACT)


def test_scale_multiplies_the_output() -> None:
    x = operands(Case(T=20, d_k=9))
    o, state = rule(x)
    unscaled, same_state = rule(x, scale=1)
    assert_close("o", o, unscaled / 3, EXACT)
    assert torch.equal(state, same_state)


def test_the_final_state_is_returned_on_request() -> None:
    x: dict[str, Any] = operands(Case())
    o, state = gated_delta_rule(**x)
    assert state is None
    assert torch.equal(o, rule(x)[0])


def test_auto_is_torch_on_a_cpu() -> None:
    x = operands(Case(dtype=torch.float32))
    for automatic, chosen in zip(rule(x), rule(x, backend="torch"), strict=True):
        assert torch.equal(automatic, chosen)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [Case(T=0), Case(lengths=(0, 0)), Case(B=0, T=3)], ids=str)
def test_nothing_leaves_the_state_alone(case: Case, backend: str) -> None:
    """No tokens: an empty output, the state as it was, and its gradient passed straight through."""
    x = leaves(case)
    o, state = rule(x, cu_seqlens=case.cu_seqlens, backend=backend)
    assert o.shape == x["v"].shape
    assert torch.equal(state, x["initial_state"])
    weight = torch.randn_like(state)
    grads = torch.autograd.grad(state, list(x.values()), weight, allow_unused=True)
    assert torch.equal(grads[-1], weight)
    for operand, grad in zip(x.values(), grads, strict=True):
        assert grad is None or grad.shape == operand.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_argument_is_modified(backend: str) -> None:
    case = Case(lengths=(17, 0, 30), heads=(1, 2, 2, 1))
    x = leaves(case)
    cu_seqlens = case.cu_seqlens
    assert cu_seqlens is not None
    given = {"cu_seqlens": cu_seqlens, **x}
    copies = {n: y.detach().clone() for n, y in given.items()}
    versions = {n: y._version for n, y in given.items()}
    outputs = rule(x, cu_seqlens=cu_seqlens, backend=backend)
    gradients(outputs, x)
    for name, y in given.items():
        assert torch.equal(y, copies[name]), name
        assert y._version == versions[name], name
        assert all(out.untyped_storage().data_ptr() != y.data_ptr() for out in outputs), name


def test_gradients_are_only_made_for_what_asks() -> None:
    x = operands(Case(T=20))
    x["k"].requires_grad_()
    o, state = rule(x)
    (only,) = torch.autograd.grad([o.sum() + state.sum()], [x["k"]])
    everything = leaves(Case(T=20))
    o, state = rule(everything)
    (one_of_all,) = torch.autograd.grad([o.sum() + state.sum()], [everything["k"]])
    assert torch.equal(only, one_of_all)
    with torch.no_grad():
        assert not rule(x)[0].requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_moves_no_bit(backend: str) -> None:
    """The operator keeps its own precision inside a mixed-precision region."""
    x = leaves(Case(T=40, heads=(1, 2, 2, 1), dtype=torch.float32))
    expected = rule(x, backend=backend)
    d_expected = gradients(expected, x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = rule(x, backend=backend)
    # the loop's backward is autograd's, which rounds where it is run; ours does not
    with torch.autocast("cpu", torch.bfloat16, enabled=backend == "torch"):
        d_actual = gradients(actual, x)
    for one, other in zip(
        (*actual, *d_actual.values()), (*expected, *d_expected.values()), strict=True
    ):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


BAD: list[tuple[dict[str, Any], str]] = [
    # shapes
    ({"q": zeros(2, 6, 8)}, r"q: got shape \(2, 6, 8\), expected \[batch, length, heads, width\]"),
    ({"k": zeros(2, 6, 2, 7)}, r"k: got shape \(2, 6, 2, 7\), expected q's shape \(2, 6, 2, 8\)"),
    ({"k": zeros(2, 6, 4, 8)}, r"k: got shape \(2, 6, 4, 8\), expected q's shape"),
    ({"k": zeros(3, 6, 2, 8)}, r"k: got shape \(3, 6, 2, 8\), expected .*batch.* length"),
    ({"v": zeros(2, 5, 4, 8)}, r"v: got shape \(2, 5, 4, 8\), expected .*batch.* length"),
    ({"g": zeros(2, 6, 4, 3)}, "g: got width 3, expected width 8 or 1"),
    ({"b": zeros(2, 6, 4, 5)}, "b: got width 5, expected width 8 or 1"),
    ({"w": zeros(2, 6, 4, 8)}, "w: got width 8, expected width 5 or 1"),
    ({"q": zeros(2, 6, 2, 0), "k": zeros(2, 6, 2, 0)}, "q: got width 0, expected a width from 1"),
    ({"v": zeros(2, 6, 4, 0)}, "v: got width 0, expected a width from 1 to 256"),
    ({n: zeros(2, 6, 2, 257) for n in "qk"}, "q: got width 257, expected a width from 1 to 256"),
    ({"v": zeros(2, 6, 4, 257)}, "v: got width 257, expected a width from 1 to 256"),
    # heads
    ({n: zeros(2, 6, 3, 8) for n in "qk"}, "q: got 3 heads, expected a divisor of v's 4 heads"),
    ({"g": zeros(2, 6, 3, 8)}, "g: got 3 heads, expected a divisor of v's 4 heads"),
    ({"b": zeros(2, 6, 8, 8)}, "b: got 8 heads, expected a divisor of v's 4 heads"),
    ({"w": zeros(2, 6, 2, 5)}, "w: got 2 heads, expected v's 4 heads"),
    ({"b": zeros(2, 6, 0, 8)}, "b: got 0 heads, expected a divisor of v's 4 heads"),
    # dtypes and devices
    ({"q": zeros(2, 6, 2, 8, dtype=torch.int64)}, r"q: got torch\.int64, expected fp64, fp32"),
    ({"k": zeros(2, 6, 2, 8, dtype=torch.float64)}, r"k: got torch\.float64, expected q's dtype"),
    ({"v": zeros(2, 6, 4, 5, dtype=torch.bfloat16)}, r"v: got torch\.bfloat16, expected q's dtype"),
    ({"g": zeros(2, 6, 4, 8, dtype=torch.bfloat16)}, r"g: got torch\.bfloat16, expected"),
    ({"b": zeros(2, 6, 4, 8, dtype=torch.float64)}, r"b: got torch\.float64, expected"),
    ({"w": zeros(2, 6, 4, 5, dtype=torch.float16)}, r"w: got torch\.float16, expected"),
    ({"k": zeros(2, 6, 2, 8, device="meta")}, "k: got device meta, expected q's device cpu"),
    ({"w": zeros(2, 6, 4, 5, device="meta")}, "w: got device meta, expected q's device cpu"),
    ({"v": [1.0]}, "v: got list, expected a tensor"),
    # values
    (
        {"g": zeros(2, 6, 4, 8) + 0.5},
        r"g: got largest entry 0\.5, expected log-decays of at most 0",
    ),
    # states
    ({"initial_state": zeros(2, 4, 5, 8)}, r"initial_state: got shape .*, expected \(2, 4, 8, 5\)"),
    ({"initial_state": zeros(1, 4, 8, 5)}, r"initial_state: got shape \(1, 4, 8, 5\), expected"),
    (
        {"initial_state": zeros(2, 4, 8, 5, dtype=torch.float64)},
        r"initial_state: got torch\.float64, expected torch\.float32",
    ),
    (
        {"initial_state": zeros(2, 4, 8, 5, device="meta")},
        "initial_state: got device meta, expected q's device cpu",
    ),
    # options
    ({"chunk_size": 64.0}, r"chunk_size: got 64\.0, expected one of \(16, 32, 64, 128\)"),
    ({"chunk_size": 48}, r"chunk_size: got 48, expected one of \(16, 32, 64, 128\)"),
    ({"scale": "half"}, "scale: got 'half', expected a finite number"),
    ({"scale": "0.5"}, "scale: got '0.5', expected a finite number"),
    ({"scale": 10**400}, "scale: got 10{400}, expected a finite number"),
    ({"scale": torch.tensor(1j)}, r"scale: got tensor\(.*1\.j\), expected a finite number"),
    ({"scale": float("nan")}, "scale: got nan, expected a finite number"),
    ({"scale": (1, 2)}, r"scale: got \(1, 2\), expected a finite number"),
    ({"solve_precision": "fp8"}, r"solve_precision: got 'fp8', expected one of \('ieee', 'tf32'\)"),
    ({"backend": "cuda"}, "backend: got 'cuda', expected one of auto, triton, torch, reference"),
    ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens .* batch of 2, expected a batch of 1"),
]
BAD_OFFSETS = [
    (torch.tensor([0, 4, 3, 6]), "falls from 4 to 3 at entry 2, expected no decrease"),
    (torch.tensor([1, 6]), "starts at 1, expected 0"),
    (torch.tensor([0, 5]), "ends at 5, expected the length 6"),
    (torch.tensor([0.0, 6.0]), r"is torch\.float32 \(2,\), expected int32 or int64"),
    (torch.tensor([[0, 6]]), r"\(1, 2\), expected int32 or int64 of one dimension"),
    (torch.tensor([0]), "has 1 entries, expected at least 2"),
    (torch.tensor([0, 6], device="meta"), "is on meta, expected cpu"),
]


def good() -> dict[str, Any]:
    x = {n: zeros(2, 6, 2, 8) for n in "qk"} | {n: zeros(2, 6, 4, 5) for n in "vw"}
    return x | {n: zeros(2, 6, 4, 8) for n in "gb"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "message"), BAD, ids=[m.split(",")[0] for _, m in BAD])
def test_mistakes_are_named(change: dict[str, Any], message: str, backend: str) -> None:
    rule(good())
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        gated_delta_rule(**({"backend": backend} | good() | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_what_must_be_there_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got NoneType, expected a tensor"):
        gated_delta_rule(**(good() | {name: None}))


def test_a_backend_that_cannot_run_says_why() -> None:
    reason = why_not("triton", torch.device("cpu"))
    if reason is None:
        pytest.skip("the kernels run on this machine's CPU")
    with pytest.raises(ValueError, match=r"^backend: got 'triton', but .*; expected") as caught:
        gated_delta_rule(**good(), backend="triton")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("cu_seqlens", "message"), BAD_OFFSETS, ids=[m for _, m in BAD_OFFSETS])
def test_wrong_offsets_are_named(cu_seqlens: Tensor, message: str) -> None:
    x = {n: y[:1] for n, y in good().items()}
    rule(x, cu_seqlens=torch.tensor([0, 4, 6]))
    with pytest.raises(ValueError, match=f"^cu_seqlens .*{message}") as caught:
        gated_delta_rule(**x, cu_seqlens=cu_seqlens)
    assert "\n" not in str(caught.value)


def test_a_packed_state_has_one_row_per_sequence() -> None:
    x = {n: y[:1] for n, y in good().items()}
    with pytest.raises(ValueError, match=r"^initial_state: .* expected \(2, 4, 8, 5\)"):
        rule({**x, "initial_state": zeros(1, 4, 8, 5)}, cu_seqlens=torch.tensor([0, 4, 6]))


def test_tangents_are_refused_but_by_the_loop() -> None:
    x = operands(Case(T=5))

    def output(q: Tensor, backend: str) -> Tensor:
        return rule(x | {"q": q}, backend=backend)[0]

    with pytest.raises(ValueError, match="backend 'torch': got operands with tangents"):
        torch.func.jvp(lambda q: output(q, "torch"), (x["q"],), (x["q"],))
    found = torch.func.jvp(lambda q: output(q, "reference"), (x["q"],), (x["q"],))
    o, tangent = found[0], found[1]
    assert_close("linear in q", tangent, o, 1e-14)
    assert_close("o", o, output(x["q"], "torch"), 1e-12)


def test_meta_operands_by_the_loop() -> None:
    x = {n: t.to("meta") for n, t in operands(Case(T=5)).items()}
    o, state = rule(x, backend="reference")
    assert o.is_meta and o.shape == x["v"].shape
    assert state.shape == x["initial_state"].shape
