"""Kernels around the triangles of a window, interpreted, against torch; what the doctor sees of cuDNN's windows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops import window_attention as op
from gdn2.ops.cuda import band
from gdn2.ops.triton import checks, window
from tests.closeness import assert_close
from tests.ops.attention_cases import literal
from tests.ops.test_band import gradients, scores_of

SHAPES = [(1, 1, 1, 1, 16), (2, 2, 5, 3, 16), (1, 3, 33, 2, 32), (3, 1, 64, 1, 64)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for a block."""
    monkeypatch.setattr(window, "TILE", 256)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def one_more(x: Tensor, first: bool) -> Tensor:
    """The same as a part of a tensor with another block, before or after it."""
    whole = x.new_full((x.shape[0], x.shape[1] + 1, *x.shape[2:]), torch.nan)
    part = whole[:, 1:] if first else whole[:, :-1]
    return part.copy_(x)


@pytest.mark.parametrize("keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_turned(shape: Sequence[int], keys: bool) -> None:
    x, y = draw(0, *shape), torch.full(tuple(shape), torch.nan, dtype=torch.float64)
    window.turn(one_more(x, keys), y, keys, add=False)
    assert torch.equal(y, op._turned(x, keys))
    again = torch.full_like(y, torch.nan)
    window.turn(y, again, keys, add=False)
    assert torch.equal(again, x)


@pytest.mark.parametrize("keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_turned_rows_are_added(keys: bool, dtype: torch.dtype) -> None:
    """And rounded once."""
    x, y = draw(0, 2, 2, 5, 3, 16, dtype=dtype), draw(1, 2, 2, 5, 3, 16, dtype=dtype)
    part = one_more(y, keys)
    window.turn(x, part, keys, add=True)
    assert torch.equal(part, (y.double() + op._turned(x, keys).double()).to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_joined(shape: Sequence[int], dtype: torch.dtype) -> None:
    batch, blocks, rows, heads, _ = shape
    own, before = draw(0, *shape, dtype=dtype), draw(1, *shape, dtype=dtype)
    logs = (batch, blocks, heads, rows)
    own_log, before_log = 9 * draw(2, *logs, dtype=dtype), 9 * draw(3, *logs, dtype=dtype)
    y, log = one_more(own, True), one_more(own_log, True)
    window.join(y, log, before, before_log)
    op._join(own, own_log, before, before_log)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert_close("y", y, own, tolerance)
    assert_close("log", log, own_log, tolerance)


def test_a_row_that_sees_nothing_does_not_count() -> None:
    """The last of a block, whatever is there."""
    own, log = draw(0, 1, 1, 4, 1, 16), draw(1, 1, 1, 1, 4)
    before, before_log = draw(2, 1, 1, 4, 1, 16), draw(3, 1, 1, 1, 4)
    before_log[..., -1] = 1e6
    y, y_log = own.clone(), log.clone()
    window.join(y, y_log, before, before_log)
    assert torch.equal(y[:, :, -1], own[:, :, -1])
    assert torch.equal(y_log[..., -1], log[..., -1])
    assert not torch.equal(y[:, :, :-1], own[:, :, :-1])


@pytest.mark.parametrize("way", ["right", "wrong", "refused"])
def test_the_doctor_looks_at_both_widths(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without help of triangles."""

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Any:
        q, k, v = (x.double() for x in (q, k, v))
        y = literal(q, k, v, window, scale) * (1.1 if way == "wrong" else 1)
        return None if way == "refused" else (y, scores_of(q, k, window, scale).logsumexp(-1))

    def differentiate(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        y, *others = rest
        return gradients(q.double(), k.double(), v.double(), y, dy.double(), *others)

    cpu = torch.device("cpu")
    assert not [*checks.check_kernel("band", cpu, "bf16")]  # cuDNN is not asked there
    monkeypatch.setattr(band, "lack", lambda device: None)
    monkeypatch.setattr(band, "attend", attend)
    monkeypatch.setattr(band, "differentiate", differentiate)
    assert not [*checks.check_kernel("band", cpu, "fp32")]
    if way == "refused":
        with pytest.raises(ValueError, match="cuDNN refuses windows of heads of 64"):
            list(checks.check_kernel("band", cpu, "bf16"))
        return
    found = {check.quantity: check.passed for check in checks.check_kernel("band", cpu, "bf16")}
    assert found["y of width 64"] == found["dq of width 128"] == (way == "right")
    assert found["dv of width 128"] and len(found) == 8
