"""Kernels that only inference uses, interpreted, against the torch operations they stand for."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from gdn2.ops import linear
from gdn2.ops.conv import short_convolution_step
from gdn2.ops.norm import L2_EPS, rms_norm
from gdn2.ops.triton import norm
from gdn2.ops.triton.delta_inputs import delta_inputs
from gdn2.ops.triton.matvec import matvec
from gdn2.ops.triton.swiglu import swiglu
from tests.closeness import assert_close

SINGLE = 1e-6


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "heads", "widths", "taps"),
    [
        (1, (1, 1), (16, 16), 4),
        (3, (2, 4), (24, 5), 3),
        (2, (3, 3), (1, 33), 2),
        (2, (1, 2), (8, 8), 1),
    ],
)
def test_operands_of_a_step(
    rows: int, heads: tuple[int, int], widths: tuple[int, int], taps: int
) -> None:
    (H, HV), (DK, DV) = heads, widths
    channels = (H * DK, H * DK, HV * DV, H * DK, HV * DV, H * DK)
    # what a joint product leaves: parts of one row
    maps = list((3 * draw(0, rows, 1, sum(channels))).split(channels, -1))
    weights = [draw(i + 1, c, taps) for i, c in enumerate(channels[:3])]
    states = [draw(i + 4, rows, c, taps - 1) for i, c in enumerate(channels[:3])]
    bias, log_rate = draw(7, H * DK), draw(8, H)
    expected = [
        short_convolution_step(x, w, activation="silu", l2_width=d, state=s.clone())
        for x, w, s, d in zip(maps[:3], weights, states, (DK, DK, None), strict=True)
    ]
    found = delta_inputs(maps, weights, states, bias, log_rate, HV, 1.5, L2_EPS)
    g = -log_rate.exp()[:, None] * softplus(maps[5] + bias).unflatten(-1, (H, -1))
    right = [
        *(y.unflatten(-1, (h, -1)) for (y, _), h in zip(expected, (H, H, HV), strict=True)),
        g,
        1.5 * maps[3].sigmoid().unflatten(-1, (H, -1)),
        maps[4].sigmoid().unflatten(-1, (HV, -1)),
    ]
    for name, actual, wanted in zip("qkvgbw", found, right, strict=True):
        assert_close(name, actual, wanted, SINGLE)
    for name, state, (_, wanted) in zip("qkv", states, expected, strict=True):
        assert torch.equal(state, wanted), name


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 1025), (2, 64)])
def test_swiglu_of_parts_of_one_product(rows: int, width: int) -> None:
    gate, up = (3 * draw(0, rows, 1, 2 * width)).chunk(2, -1)
    assert_close("y", swiglu(gate, up), silu(gate) * up, SINGLE)


@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 2, 64), (70, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_of_a_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta, weight = (
        draw(0, *shape).to(dtype),
        draw(1, *shape).to(dtype),
        draw(2, shape[-1]).to(dtype),
    )
    total, y, _ = norm.add(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert_close(
        "y", y, rms_norm(x + delta, weight, 1e-5), SINGLE if dtype == torch.float32 else 1e-13
    )


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (9, 130), (33, 1025), (16, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_product_of_a_row(outputs: int, inputs: int, bias: bool) -> None:
    x, weight = draw(0, 1, 1, inputs), draw(1, outputs, inputs)
    b = draw(2, outputs) if bias else None
    right = x @ weight.T + (0 if b is None else b)
    assert_close("y", matvec(x, weight, b), right, SINGLE)


def test_the_kernel_is_not_asked_for_what_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the width of the weights alone: of a longer row it would read a part, of a shorter one more than all."""
    monkeypatch.setattr(linear, "why_not", lambda *arguments: None)
    x, weight = draw(0, 1, 1, 8).half(), draw(1, 4, 8).half()
    assert linear._kernel_takes([x, weight])
    for wrong in (x[..., :6].contiguous(), torch.cat([x, x], -1)):
        assert not linear._kernel_takes([wrong, weight])
