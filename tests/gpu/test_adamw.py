"""AdamW's step by the compiled kernel on a GPU, against torch's fused AdamW there."""

import os

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gdn2.training.optimiser import ClippingAdamW
from gdn2.training.step import Reading
from tests.closeness import assert_close

COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU, and kernels that are compiled"),
]
BLOCK = 8192  # of the kernel, which must not be imported before others have chosen to interpret it
SHAPES = [(1,), (3, 5), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (300, 1001), (0, 4)]
STEPS = 5


class TorchAdamW(ClippingAdamW):
    """Without the kernel."""

    _failed = True


def draw(seed: int, dtype: torch.dtype) -> list[Tensor]:
    rand = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(s, generator=rand, device="cuda").to(dtype) for s in SHAPES]


def run(kind: type[ClippingAdamW], dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """Parameters and their state after some steps, one of them not taken."""
    params = [x.to(wide).requires_grad_() for x in draw(99, dtype)]
    for p in params:
        p.grad_dtype = None  # any
    optimiser = kind(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(STEPS):
        for i, (p, grad) in enumerate(zip(params, draw(step, dtype), strict=True)):
            p.grad = None if i == step else grad
        norm = torch.tensor(torch.inf if step == 2 else 3.0 * step, device="cuda")
        optimiser.step_clipped(1e-2, norm, 1.0, norm.isfinite())
    return [x.detach() for p in params for x in (p, *optimiser.state[p].values())]


@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2e-3),
        (torch.bfloat16, torch.float32, 1e-6),
    ],
    ids=str,
)
def test_steps_are_those_of_torch(
    dtype: torch.dtype, wide: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients of a dtype; in bf16 a few numbers are rounded the other way."""
    theirs = run(TorchAdamW, dtype, wide)
    monkeypatch.setattr(torch, "_fused_adamw_", None)  # not to be called
    ours = run(ClippingAdamW, dtype, wide)
    assert len(ours) == len(theirs)
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(str(i), x, y, tolerance)
    same = torch.cat([(x == y).flatten() for x, y in zip(ours, theirs, strict=True)])
    assert wide == torch.float32 or same.float().mean() > 0.98


def test_nothing_waits_for_the_gpu() -> None:
    """Not after the first step, in which the kernel is compiled and the programs are laid out: nothing is read back."""
    params = [x.requires_grad_() for x in draw(0, torch.bfloat16)]
    optimiser = ClippingAdamW(params, lr=1e-2, fused=True)
    norm, finite = torch.ones((), device="cuda"), torch.ones((), device="cuda", dtype=torch.bool)
    for p, grad in zip(params, draw(1, torch.bfloat16), strict=True):
        p.grad = grad
    optimiser.step_clipped(1e-2, norm, 1.0, finite)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        optimiser.step_clipped(1e-2, norm, 1.0, finite)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    assert "adamw_kernel" in names
    assert not [name for name in names if "DtoH" in name]
    assert optimiser.state[params[0]]["step"].item() == 2


def test_numbers_on_their_way_to_the_host() -> None:
    numbers = torch.tensor([1.5, -3.0], device="cuda")
    found = Reading(numbers)
    numbers.zero_()
    assert found.wait() == [1.5, -3.0]
