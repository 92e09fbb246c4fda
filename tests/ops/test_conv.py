"""The short convolution against a literal loop over sequences and tokens."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from gdn2.ops import conv
from gdn2.ops.conv import Activation, short_convolution, short_convolution_step
from tests.closeness import assert_close

EXACT = 1e-12
PACKINGS = [[1], [0], [2], [3, 1], [0, 0], [0, 2, 0, 5, 1, 0], [63, 1, 65, 3], [4, 0, 130]]


def make(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def literal(
    sequence: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence [length, channels], token by token, with its state [channels, width - 1]."""
    width = weight.shape[1]
    history = [state[:, i] for i in range(width - 1)]
    outputs = [sequence[:0]]
    for token in sequence:
        history.append(token)
        y = torch.zeros_like(token) if bias is None else bias
        for lag in range(width):
            y = y + weight[:, width - 1 - lag] * history[-1 - lag]
        outputs.append((y / (1 + torch.exp(-y)) if activation == "silu" else y)[None])
    last = history[len(history) - width + 1 :]
    return torch.cat(outputs), torch.stack(last, dim=1) if last else state


def offsets(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def compare(
    x: Tensor, lengths: list[int], width: int, bias: bool, activation: Activation, packed: bool
) -> None:
    """Values and all gradients, also through the final state, for dense or packed x."""
    channels = x.shape[2]
    operands = [x, make(channels, width), make(len(lengths), channels, width - 1)]
    operands += [make(channels)] if bias else []
    leaves = [t.clone().requires_grad_() for t in operands]
    copies = [t.clone().requires_grad_() for t in operands]
    y, final = short_convolution(
        leaves[0],
        leaves[1],
        leaves[3] if bias else None,
        activation=activation,
        initial_state=leaves[2],
        output_final_state=True,
        cu_seqlens=offsets(lengths, torch.int32) if packed else None,
    )
    rows = torch.split(copies[0][0], lengths) if packed else copies[0].unbind()
    results = [
        literal(row, copies[1], copies[3] if bias else None, activation, state)
        for row, state in zip(rows, copies[2].unbind(), strict=True)
    ]
    outputs = [r[0] for r in results]
    y_literal = torch.cat(outputs)[None] if packed else torch.stack(outputs)
    final_literal = torch.stack([r[1] for r in results])
    assert final is not None
    assert_close("y", y, y_literal, EXACT)
    assert_close("final state", final, final_literal, EXACT)

    dy, d_final = make(*y.shape, seed=1), make(*final.shape, seed=2)
    grads = torch.autograd.grad((y * dy).sum() + (final * d_final).sum(), leaves)
    expected = torch.autograd.grad(
        (y_literal * dy).sum() + (final_literal * d_final).sum(), copies, materialize_grads=True
    )
    for name, a, b in zip(("x", "weight", "state", "bias"), grads, expected, strict=False):
        assert_close(f"gradient of {name}", a, b, EXACT)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 65])
def test_dense_equals_the_loop(length: int, width: int, activation: Activation) -> None:
    compare(make(2, length, 5), [length] * 2, width, length % 2 == 1, activation, packed=False)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("lengths", PACKINGS)
def test_packed_equals_the_loop(lengths: list[int], width: int) -> None:
    compare(make(1, sum(lengths), 3), lengths, width, width == 4, "silu", packed=True)


@pytest.mark.parametrize("lengths", [None, [0, 4, 1]])
@pytest.mark.parametrize("l2_width", [1, 3, 6])
def test_heads_are_normalised(l2_width: int, lengths: list[int] | None) -> None:
    """Each by its own norm, after the activation; a head of zeros stays zero and has finite gradients."""
    x, weight = make(1, 5, 6), make(6, 2)
    x[:, 1:4, :l2_width] = 0
    x, weight = x.requires_grad_(), weight.requires_grad_()
    cu_seqlens = None if lengths is None else offsets(lengths)
    y, _ = short_convolution(x, weight, activation="silu", l2_width=l2_width, cu_seqlens=cu_seqlens)
    plain, _ = short_convolution(x, weight, activation="silu", cu_seqlens=cu_seqlens)
    heads = plain.split(l2_width, -1)
    squares = [(head * head).sum(-1, keepdim=True) for head in heads]
    expected = torch.cat([h / (s + 1e-6).sqrt() for h, s in zip(heads, squares, strict=True)], -1)
    assert_close("y", y, expected, EXACT)
    assert torch.equal(y[:, 2:4, :l2_width], torch.zeros(1, 2, l2_width, dtype=torch.float64))
    dy = make(*y.shape, seed=1)
    actual = torch.autograd.grad(y, (x, weight), dy)
    for name, a, b in zip(
        ("x", "weight"), actual, torch.autograd.grad(expected, (x, weight), dy), strict=True
    ):
        assert_close(f"gradient of {name}", a, b, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalised_heads_round_once(dtype: torch.dtype) -> None:
    x, weight = make(2, 9, 6, dtype=dtype), make(6, 4, dtype=dtype)
    y, _ = short_convolution(x, weight, activation="silu", l2_width=3)
    wide, _ = short_convolution(x.float(), weight.float(), activation="silu", l2_width=3)
    assert torch.equal(y, wide.to(dtype))


@pytest.mark.parametrize("inplace", [False, True])
def test_steps_normalise_heads(inplace: bool) -> None:
    x, weight = make(2, 4, 6), make(6, 3)
    whole, _ = short_convolution(x, weight, activation="silu", l2_width=2)
    state, outputs = torch.zeros(2, 6, 2, dtype=torch.float64), []
    for token in x.split(1, 1):
        y, state = short_convolution_step(
            token, weight, activation="silu", l2_width=2, state=state, inplace=inplace
        )
        outputs.append(y)
    assert_close("y", torch.cat(outputs, 1), whole, EXACT)


def test_taps_are_those_of_conv1d() -> None:
    x, weight, bias = make(2, 63, 7), make(7, 4), make(7)
    padded = F.pad(x.mT, (3, 0))
    expected = F.conv1d(padded, weight[:, None], bias, groups=7).mT
    assert_close("y", short_convolution(x, weight, bias)[0], expected, EXACT)


@pytest.mark.parametrize("lengths", [None, [0, 1, 4]])
def test_gradcheck(lengths: list[int] | None) -> None:
    count = 1 if lengths is None else 3
    operands = (make(1, 5, 2), make(2, 3), make(2), make(count, 2, 2))
    leaves = tuple(t.requires_grad_() for t in operands)

    def call(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        return short_convolution(
            x,
            weight,
            bias,
            activation="silu",
            initial_state=state,
            output_final_state=True,
            cu_seqlens=None if lengths is None else offsets(lengths),
        )

    assert gradcheck(call, leaves)


def test_without_a_state_the_past_is_zero() -> None:
    x, weight = make(2, 2, 3), make(3, 4)
    zeros = torch.zeros(2, 3, 3, dtype=torch.float64)
    y, final = short_convolution(x, weight, output_final_state=True)
    expected, carried = short_convolution(x, weight, initial_state=zeros, output_final_state=True)
    assert final is not None
    assert carried is not None
    assert torch.equal(y, expected)
    assert torch.equal(final, torch.cat([zeros[:, :, :1], x.mT], dim=2))
    assert torch.equal(final, carried)
    assert short_convolution(x, weight)[1] is None
    empty, untouched = short_convolution(x[:, :0], weight, output_final_state=True)
    assert empty.shape == (2, 0, 3)
    assert untouched is not None
    assert torch.equal(untouched, zeros)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("split", range(8))
def test_prefill_and_steps_equal_the_whole(split: int, inplace: bool) -> None:
    x, weight, bias = make(2, 7, 5), make(5, 4), make(5)
    whole, last = short_convolution(x, weight, bias, activation="silu", output_final_state=True)
    y, state = short_convolution(
        x[:, :split], weight, bias, activation="silu", output_final_state=True
    )
    assert state is not None
    assert last is not None
    outputs = [y]
    for token in torch.split(x[:, split:], 1 + split % 2, dim=1):
        before = state.clone()
        y, after = short_convolution_step(
            token, weight, bias, activation="silu", state=state, inplace=inplace
        )
        assert (after is state) == inplace
        assert inplace or torch.equal(before, state)
        outputs.append(y)
        state = after
    assert_close("y", torch.cat(outputs, dim=1), whole, EXACT)
    assert torch.equal(state, last)


def test_what_needs_no_gradient_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = make(2, 5, 6), make(6, 4), make(6).requires_grad_()
    recorded, _ = short_convolution(x, weight, bias, activation="silu")
    assert recorded.requires_grad
    monkeypatch.delattr(conv._Convolution, "setup_context")
    monkeypatch.delattr(conv._Convolution, "backward")
    with torch.no_grad():
        assert torch.equal(short_convolution(x, weight, bias, activation="silu")[0], recorded)
    detached, _ = short_convolution(x, weight, bias.detach(), activation="silu")
    assert torch.equal(detached, recorded) and not detached.requires_grad


def test_steps_carry_gradients() -> None:
    x, weight, state = (t.requires_grad_() for t in (make(1, 4, 2), make(2, 3), make(1, 2, 2)))
    y, _ = short_convolution(x, weight, initial_state=state)
    expected = torch.autograd.grad(y.square().sum(), (x, weight, state))
    pieces, carried = [], state
    for token in torch.split(x, 1, dim=1):
        y, carried = short_convolution_step(token, weight, state=carried)
        pieces.append(y)
    actual = torch.autograd.grad(torch.cat(pieces, dim=1).square().sum(), (x, weight, state))
    for name, a, b in zip(("x", "weight", "state"), actual, expected, strict=True):
        assert_close(name, a, b, EXACT)


@pytest.mark.parametrize("cut", [0, 1, 30, 62])
@pytest.mark.parametrize("packed", [False, True])
def test_the_future_and_the_neighbours_change_no_bit(cut: int, packed: bool) -> None:
    x, weight = make(1, 63, 9, dtype=torch.float32), make(9, 4, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, cut, 63]) if packed else None
    changed = x.clone()
    changed[:, cut:] = 1e9
    y, z = (
        short_convolution(t, weight, activation="silu", cu_seqlens=cu_seqlens)[0]
        for t in (x, changed)
    )
    assert torch.equal(y[:, :cut], z[:, :cut])
    if packed:
        changed = x.clone()
        changed[:, :cut] = torch.nan
        z, _ = short_convolution(changed, weight, activation="silu", cu_seqlens=cu_seqlens)
        assert torch.equal(y[:, cut:], z[:, cut:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
def test_half_types_round_once(dtype: torch.dtype, packed: bool) -> None:
    x, weight, state = (make(1, 65, 16), make(16, 4), make(2 if packed else 1, 16, 3))
    cu_seqlens = torch.tensor([0, 2, 65]) if packed else None
    halves = [t.to(dtype).requires_grad_() for t in (x, weight, state)]
    floats = [t.detach().float().requires_grad_() for t in halves]
    results = []
    for operands in (halves, floats):
        y, final = short_convolution(
            operands[0],
            operands[1],
            activation="silu",
            initial_state=operands[2],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        assert final is not None
        results.append((y, final, *torch.autograd.grad(y.float().square().sum(), operands)))
    for name, a, b in zip(("y", "final", "x", "weight", "state"), *results, strict=True):
        assert a.dtype == dtype
        # The loss sees y rounded, so the gradients are rounded twice.
        assert_close(name, a, b, torch.finfo(dtype).eps)
    assert torch.equal(results[0][0], results[1][0].to(dtype))
    assert torch.equal(results[0][1], results[1][1].to(dtype))


@pytest.mark.parametrize("packed", [False, True])
def test_wider_weights_and_states_stay_wide(packed: bool) -> None:
    x = make(1, 2, 3, dtype=torch.bfloat16)
    weight, bias, state = (t.float() for t in (make(3, 4), make(3), make(1, 3, 3)))
    cu_seqlens = torch.tensor([0, 2]) if packed else None
    y, final = short_convolution(
        x, weight, bias, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
    )
    expected, _ = short_convolution(x.float(), weight, bias, initial_state=state)
    assert final is not None
    assert final.dtype == torch.float32
    assert torch.equal(y, expected.to(torch.bfloat16))
    assert torch.equal(final, torch.cat([state[:, :, 2:], x.float().mT], dim=2))


def test_operands_and_gradients_may_be_strided() -> None:
    x, weight, state = make(3, 65, 2).mT.mT[:2], make(4, 2).mT, make(2, 3, 2).mT
    x = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y, final = short_convolution(x, weight, initial_state=state, output_final_state=True)
    expected, last = short_convolution(
        x.contiguous(),
        weight.contiguous(),
        initial_state=state.contiguous(),
        output_final_state=True,
    )
    assert final is not None
    assert last is not None
    assert_close("y", y, expected, EXACT)
    assert torch.equal(final, last)
    dy = make(2, 65, 2).mT.contiguous().mT
    (strided,) = torch.autograd.grad(y, x, dy)
    (plain,) = torch.autograd.grad(expected, x, dy.contiguous())
    assert_close("gradient of x", strided, plain, EXACT)


def test_compiles_to_one_graph() -> None:
    x, weight, bias, state = (make(2, 9, 4), make(4, 3), make(4), make(2, 4, 2))
    operands = [t.requires_grad_() for t in (x, weight, bias, state)]

    def loss(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        y, final = short_convolution(
            x, weight, bias, activation="silu", initial_state=state, output_final_state=True
        )
        assert final is not None
        return y.square().sum() + final.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close("loss", compiled(*operands), loss(*operands), EXACT)
    actual = torch.autograd.grad(compiled(*operands), operands)
    for a, b in zip(actual, torch.autograd.grad(loss(*operands), operands), strict=True):
        assert_close("gradient", a, b, EXACT)


X, WEIGHT, META = torch.zeros(2, 5, 3), torch.zeros(3, 4), torch.device("meta")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X[0]}, r"^x is torch\.float32 \(5, 3\), expected floating point \[batch"),
        ({"x": X.long()}, r"^x is torch\.int64 \(2, 5, 3\), expected floating point"),
        ({"weight": WEIGHT[0]}, r"^weight has shape \(4,\), expected \(3, width of 1 or more\)"),
        ({"weight": WEIGHT[:, :0]}, r"^weight has shape \(3, 0\), expected"),
        ({"weight": WEIGHT.mT}, r"^weight is .* \(4, 3\) .* expected floating point \(3, 3\)"),
        ({"weight": WEIGHT.int()}, r"^weight is torch\.int32 \(3, 4\)"),
        ({"weight": WEIGHT.to(META)}, r"^weight is .* on meta, expected .* on cpu"),
        ({"bias": torch.zeros(4)}, r"^bias is .* \(4,\) .* expected floating point \(3,\)"),
        ({"bias": torch.zeros(3, device=META)}, r"^bias is .* on meta"),
        ({"activation": "gelu"}, r"^activation is 'gelu', expected None or 'silu'"),
        ({"l2_width": 2}, r"^l2_width is 2, expected a divisor of the 3 channels"),
        ({"l2_width": 0}, r"^l2_width is 0, expected a divisor of the 3 channels"),
        ({"l2_width": -3}, r"^l2_width is -3, expected a divisor"),
        ({"initial_state": torch.zeros(2, 3, 4)}, r"^initial_state .* expected .* \(2, 3, 3\)"),
        ({"initial_state": torch.zeros(1, 3, 3)}, r"^initial_state is .* \(1, 3, 3\)"),
        ({"initial_state": torch.zeros(2, 3, 3).long()}, r"^initial_state is torch\.int64"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"^cu_seqlens was given with a batch of 2"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 4])}, r"^cu_seqlens ends at 4, expected"),
        (
            {
                "x": X[:1],
                "cu_seqlens": torch.tensor([0, 2, 5]),
                "initial_state": torch.zeros(1, 3, 3),
            },
            r"^initial_state is .* \(1, 3, 3\) on cpu, expected floating point \(2, 3, 3\)",
        ),
    ],
)
def test_bad_operands_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": WEIGHT, **changes}
    with pytest.raises(ValueError, match=message) as caught:
        short_convolution(**arguments)
    assert "\n" not in str(caught.value)


def test_bad_states_of_a_step_are_named() -> None:
    leaf = torch.zeros(2, 3, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"^inplace is True for a state that requires grad"):
        short_convolution_step(X, WEIGHT, state=leaf, inplace=True)
    with pytest.raises(ValueError, match=r"^state is .* \(2, 3, 2\) .* expected .* \(2, 3, 3\)"):
        short_convolution_step(X, WEIGHT, state=leaf[..., 1:])
    with pytest.raises(ValueError, match=r"^x is .* \(5, 3\), expected"):
        short_convolution_step(X[0], WEIGHT, state=leaf)
    with pytest.raises(ValueError, match=r"^l2_width is 2, expected a divisor of the 3 channels"):
        short_convolution_step(X, WEIGHT, l2_width=2, state=leaf)


@pytest.mark.parametrize("spoiled", ["x", "state"])
def test_a_nan_reaches_no_gradient_of_another_sequence(spoiled: str) -> None:
    """Rows of the stream across the seam have no gradient, and SiLU's slope at NaN must not give them one."""
    x, weight = make(1, 12, 4).requires_grad_(), make(4, 4)
    state = make(2, 4, 3).requires_grad_()
    here, there = slice(0, 5), slice(5, 12)
    with torch.no_grad():
        if spoiled == "x":  # the end of the first sequence, whose neighbour is asked about
            x[0, 4], here, there = torch.nan, there, here
        else:
            state[1] = torch.nan
    y, _ = short_convolution(
        x, weight, activation="silu", initial_state=state, cu_seqlens=offsets([5, 7])
    )
    dx, d_state = torch.autograd.grad(y[:, here].sum(), [x, state])
    assert y[:, here].isfinite().all() and dx.isfinite().all() and d_state.isfinite().all()
    assert not dx[:, there].any() and dx[:, here].all()


@pytest.mark.parametrize("inplace", [True, False])
def test_autocast_moves_no_bit_of_a_step(inplace: bool) -> None:
    x, weight, state = (
        make(*shape, dtype=torch.float32) for shape in [(2, 1, 6), (6, 4), (2, 6, 3)]
    )
    plain = short_convolution_step(x, weight, state=state.clone(), inplace=inplace)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = short_convolution_step(x, weight, state=state.clone(), inplace=inplace)
    for actual, expected in zip(found, plain, strict=True):
        assert torch.equal(actual, expected)
