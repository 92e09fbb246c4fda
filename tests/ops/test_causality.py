"""Bits that must not move: of the past, of neighbours, and from run to run."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2.ops.chunk_op import chunk_forward
from tests.ops.cases import THRESHOLD, Case, Result, at_the_threshold, operands, rule, run


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def assert_same_bits(actual: Result, expected: Result) -> None:
    others = expected.named()
    for name, x in actual.named().items():
        assert torch.equal(bits(x), bits(others[name])), name


def tokens_after(x: dict[str, Tensor], other: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    """Operands of x up to token t, of another case after it."""
    return {n: torch.cat([x[n][:, : t + 1], other[n][:, t + 1 :]], 1) for n in "qkvgbw"}


def kept_forward(x: dict[str, Tensor], chunk_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Output and kept residuals and matrices, a row per token, and the states at chunk starts."""
    q, k, v, g, b, w = (x.get(n) for n in "qkvgbw")
    assert q is not None and k is not None and v is not None and g is not None
    options = (1.0, chunk_size, "ieee", "states", "torch")
    o, _, (starts, *rows) = chunk_forward(q, k, v, g, b, w, x.get("initial_state"), None, *options)
    names = ("R", "A_qk", "A") if b is not None else ("R", "A_qk")
    tokens = {n: y.transpose(1, 2).flatten(0, 1) for n, y in zip(names, rows, strict=True)}
    return {"o": o[0], **tokens}, starts


def assert_past_unmoved(
    x: dict[str, Tensor], other: dict[str, Tensor], t: int, chunk_size: int
) -> None:
    """Nothing up to token t, and no chunk's start up to token t + 1, may tell the two apart."""
    (rows, starts), (moved_rows, moved_starts) = (kept_forward(y, chunk_size) for y in (x, other))
    for name, past in rows.items():
        assert torch.equal(bits(past[: t + 1]), bits(moved_rows[name][: t + 1])), (name, t)
    assert not torch.equal(rows["o"][t + 1 :], moved_rows["o"][t + 1 :]), t
    known = (t + 1) // chunk_size + 1
    assert torch.equal(bits(starts[:known]), bits(moved_starts[:known])), t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [-1e-3, "mild", "uneven", -20.0, "mixed"])
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_later_tokens_move_no_bit(chunk_size: int, decay: float | str, dtype: torch.dtype) -> None:
    case = Case(T=200, B=1, heads=(1, 2, 2, 1), decay=decay, erase_range=2.0, dtype=dtype)
    x = operands(case)
    for seed, t in enumerate((0, 14, 15, 16, 62, 63, 64, 100, 127, 128, 198), start=1):
        other = operands(replace(case, decay="mixed" if seed % 2 else -1e-3, seed=seed))
        moved = {**tokens_after(x, other, t), "initial_state": x["initial_state"]}
        assert_past_unmoved(x, moved, t, chunk_size)


NEAR_THRESHOLD = [THRESHOLD * (1 + i * 2**-24) for i in (-1000, -20, -4, -1, 0, 1, 4, 20, 1000)]


@pytest.mark.parametrize("decay", [-0.5, -1.0, *NEAR_THRESHOLD, -4.0, -20.0, "uneven"])
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("widths", [("full", "full", "full"), ("one", "none", "one")], ids=str)
def test_a_deep_future_moves_no_bit(
    widths: tuple[str, str, str], chunk_size: int, decay: float | str
) -> None:
    """Whether rows take the block or halving is their own choice: the future may be deep or not."""
    case = Case(T=144, B=1, decay=decay, widths=widths, dtype=torch.float32)
    x = operands(case)
    for t in (0, 5, 15, 16, 30, 31, 47, 63, 77, 127, 130):
        deep, shallow = ({**x, "g": x["g"].clone()} for _ in range(2))
        deep["g"][:, t + 1 :], shallow["g"][:, t + 1 :] = -1000.0, 0.0
        assert_past_unmoved(deep, shallow, t, chunk_size)


@pytest.mark.parametrize("still", [0, 1, 3, 4, 8])
def test_rounding_at_the_threshold_moves_no_bit(still: int) -> None:
    """A sum of logs and a product of decays round apart, so only one of them may decide.

    One head at a time, since another one might be deep.
    """
    rand = torch.Generator().manual_seed(still)
    x = operands(Case(T=80, d_k=1, d_v=1, B=1, heads=(1, 1, 1, 1), dtype=torch.float32))
    for head in at_the_threshold(50, still, rand).split(1, 2):
        deep, shallow = ({**x, "g": F.pad(head, (0, 0, 0, 0, 0, 16), value=g)} for g in (-1e3, 0))
        assert_past_unmoved(deep, shallow, 63, chunk_size=32)
        assert_past_unmoved(deep, shallow, 63, chunk_size=128)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_neighbours_move_no_bit(poison: float) -> None:
    """What one packed sequence holds, even NaN, reaches no other in outputs, states or gradients."""
    case = Case(lengths=(17, 40, 3), d_k=8, d_v=8, decay="uneven", dtype=torch.float32)
    x = operands(case)
    spoiled_operands = "qkvgbw" if math.isnan(poison) else "qkvbw"  # g may not be positive
    results = []
    for spoil in (False, True):
        leaves = {n: y.clone() for n, y in x.items()}
        if spoil:
            for n in spoiled_operands:
                leaves[n][:, 17:57] = poison
        leaves = {n: y.requires_grad_() for n, y in leaves.items()}
        o, state = rule(leaves, cu_seqlens=case.cu_seqlens, chunk_size=16)
        weight = torch.ones_like(o)
        grads = torch.autograd.grad([o, state], list(leaves.values()), [weight, state.detach()])
        outside = [o[:, :17], o[:, 57:], state[[0, 2]], grads[-1][[0, 2]]]
        results.append(
            [*outside, *(d[:, :17] for d in grads[:-1]), *(d[:, 57:] for d in grads[:-1])]
        )
    for clean, spoiled in zip(*results, strict=True):
        assert torch.equal(bits(clean), bits(spoiled))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [True, False])
def test_two_runs_give_the_same_bits(recompute: bool, dtype: torch.dtype) -> None:
    case = Case(lengths=(65, 1, 130), heads=(1, 4, 4, 2), recompute=recompute, dtype=dtype)
    assert_same_bits(run(case, "torch"), run(case, "torch"))


def test_recomputing_gives_the_same_bits() -> None:
    case = Case(T=130, heads=(1, 2, 2, 1), chunk_size=32, dtype=torch.float32)
    assert_same_bits(run(case, "torch"), run(replace(case, recompute=False), "torch"))
