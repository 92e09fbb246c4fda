"""The kernel of AdamW's step, interpreted, against torch's AdamW, and what the optimiser does with it."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gdn2.ops.triton import adamw as kernel
from gdn2.ops.triton import checks
from gdn2.training import optimiser as training
from gdn2.training.optimiser import ClippingAdamW
from tests.closeness import assert_close
from tests.training.spawn import alone_on_a_mesh
from tests.training.tiny import build, losses

BLOCK, PART = kernel.BLOCK, kernel.PART
SHAPES = [(1,), (3, 5), (PART - 1,), (BLOCK,), (BLOCK + 1,), (2, BLOCK + 7), (0, 4)]
STEPS = 4
LR, EPS = 1e-2, 1e-8
Moved = list[int]  # how many tensors each launch moved


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    """Let the optimiser take the CPU for a GPU, and note what it gives the kernel."""
    launches: Moved = []

    def noted(*columns: Sequence[Tensor], **options: Any) -> None:
        adamw(*columns, **options)
        launches.append(len(columns[0]))

    adamw = kernel.adamw
    monkeypatch.setattr(kernel, "adamw", noted)
    monkeypatch.setattr(training, "why_not", lambda *arguments, **options: None)
    return launches


def draw(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rand = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=rand).to(dtype) for shape in SHAPES]


def groups_of(params: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Some that decay and some that do not."""
    return [
        {"params": params[::2], "weight_decay": weight_decay},
        {"params": params[1::2], "weight_decay": 0.0},
    ]


def clipping(params: list[Tensor], **options: Any) -> ClippingAdamW:
    return ClippingAdamW(groups_of(params, 0.1), fused=True, **{"lr": LR, "eps": EPS} | options)


def set_gradients(params: list[Tensor], grads: list[Tensor], but: Sequence[int] = ()) -> None:
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        p.grad = None if i in but else grad.to(p.dtype)


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.requires_grad_() for x in draw(99, dtype)]


def snapshot(optimiser: ClippingAdamW, params: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for p in params for x in (p, *optimiser.state[p].values())]


def assert_alike(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, tolerance: float
) -> None:
    """Parameters, moments and step counts."""
    pairs = [
        (p, q)
        for ours_group, theirs_group in zip(ours.param_groups, theirs.param_groups, strict=True)
        for p, q in zip(ours_group["params"], theirs_group["params"], strict=True)
    ]
    for p, q in pairs:
        assert_close(f"parameter {tuple(p.shape)}", p, q, tolerance)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, x in ours.state[p].items():
            y = theirs.state[q][name]
            assert_close(f"{name} {tuple(p.shape)}", x, y, 0 if name == "step" else tolerance)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("clip", [1.0, 1e6])
def test_steps_are_those_of_torch(betas: tuple[float, float], clip: float, moved: Moved) -> None:
    """In fp64, with gradients divided beforehand; some parameters have none now and then."""
    ours, theirs = leaves(), [x.detach().double().requires_grad_() for x in leaves()]
    optimiser = clipping(ours, betas=betas)
    exact = torch.optim.AdamW(groups_of(theirs, 0.1), lr=LR, betas=betas, eps=EPS, foreach=False)
    for step in range(STEPS):
        grads, but = draw(step), {1: [2, 3], 2: [4]}.get(step, [])
        set_gradients(ours, grads, but)
        norm = torch.tensor(7.0)
        optimiser.step_clipped(LR, norm, clip, norm.isfinite())
        scale = max(1.0, (7 + 1e-6) / clip)
        set_gradients(theirs, [grad.double() / scale for grad in grads], but)
        exact.step()
    assert_alike(optimiser, exact, 1e-6)
    assert {float(state["step"]) for state in optimiser.state.values()} == {3.0, 4.0}
    assert moved == [4, 3, 3, 2, 3, 3, 4, 3]


def test_bf16_is_rounded_once(moved: Moved) -> None:
    """Each step is off by one rounding from the same step in fp64; the interpreter rounds towards zero."""
    ours = leaves(torch.bfloat16)
    optimiser = clipping(ours)
    for step in range(STEPS):
        theirs = [x.detach().double().requires_grad_() for x in ours]
        exact = torch.optim.AdamW(groups_of(theirs, 0.1), lr=LR, eps=EPS)
        exact.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        set_gradients(ours, draw(step, torch.bfloat16))
        set_gradients(theirs, draw(step, torch.bfloat16))
        optimiser.step()
        exact.step()
        for p, q in zip(ours, theirs, strict=True):
            pairs = [(p, q), *((x, exact.state[q][n]) for n, x in optimiser.state[p].items())]
            for x, y in pairs:
                torch.testing.assert_close(x.double(), y.double(), rtol=2**-7, atol=1e-7)
    assert moved == [4, 3] * STEPS


def test_nothing_moves_where_a_number_is_none(moved: Moved) -> None:
    params = leaves()
    optimiser = clipping(params)
    set_gradients(params, draw(0))
    norm = torch.tensor(2.0)
    optimiser.step_clipped(LR, norm, 1.0, norm.isfinite())
    before = snapshot(optimiser, params)
    set_gradients(params, [torch.full_like(p, torch.nan) for p in params])
    norm = torch.tensor(torch.nan)
    optimiser.step_clipped(LR, norm, 1.0, norm.isfinite())
    assert all(map(torch.equal, snapshot(optimiser, params), before))
    set_gradients(params, draw(1))
    norm = torch.tensor(2.0)
    optimiser.step_clipped(LR, norm, 1.0, norm.isfinite())
    assert {float(state["step"]) for state in optimiser.state.values()} == {2.0}
    assert len(moved) == 6


@pytest.mark.parametrize("first", ["ours", "torch"])
def test_states_go_in_and_out(first: str, moved: Moved) -> None:
    """One optimiser goes on where the other stopped, and the other way round."""
    params = leaves()
    optimisers = {
        "ours": clipping(params),
        "torch": torch.optim.AdamW(groups_of(params, 0.1), lr=LR, eps=EPS, fused=True),
    }
    (second,) = optimisers.keys() - {first}
    expected = leaves()
    whole = torch.optim.AdamW(groups_of(expected, 0.1), lr=LR, eps=EPS, fused=True)
    for step in range(STEPS):
        now = optimisers[second if step >= STEPS // 2 else first]
        if step == STEPS // 2:
            now.load_state_dict(copy.deepcopy(optimisers[first].state_dict()))
        set_gradients(params, draw(step))
        set_gradients(expected, draw(step))
        now.step()
        whole.step()
    assert_alike(now, whole, 1e-6)
    assert len(moved) == STEPS


def misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_what_does_not_suit_the_kernel_is_left_to_torch(moved: Moved) -> None:
    """Tensor by tensor: not where it should be, not side by side, of another dtype."""

    def parameters() -> list[Tensor]:
        rand = torch.Generator().manual_seed(0)
        params = [torch.randn(6, 4, generator=rand) for _ in range(5)]
        params[2], params[3] = params[2].T, params[3].double()
        return [x.requires_grad_() for x in params]

    ours, theirs = parameters(), parameters()
    grads = [x.detach().cos() for x in theirs]
    set_gradients(theirs, grads)
    grads[1] = misaligned(grads[1])
    set_gradients(ours, grads)
    assert not ours[2].is_contiguous()
    optimiser = ClippingAdamW(ours, lr=LR, fused=True)
    whole = torch.optim.AdamW(theirs, lr=LR, fused=True)
    for _ in range(2):
        optimiser.step()
        whole.step()
    assert moved == [2, 2]
    assert_alike(optimiser, whole, 1e-6)


def test_dtypes_and_groups_are_moved_apart(moved: Moved) -> None:
    params = [torch.ones(n).requires_grad_() for n in (3, 4, 5)]
    params += [torch.ones(6, dtype=torch.bfloat16).requires_grad_()]
    optimiser = clipping(params)  # every other one in the same group
    set_gradients(params, [torch.ones_like(p) for p in params])
    versions = [p._version for p in params]
    kernel.program_map.cache_clear()
    for _ in range(3):
        optimiser.step()
    assert moved == [2, 1, 1] * 3
    assert kernel.program_map.cache_info().misses == 3
    assert all(p._version > old for p, old in zip(params, versions, strict=True))


def test_other_kinds_of_adam_are_left_to_torch(moved: Moved) -> None:
    unusual: tuple[dict[str, Any], ...] = ({"amsgrad": True}, {"maximize": True}, {"fused": False})
    for options in unusual:
        params = leaves()
        set_gradients(params, draw(0))
        ClippingAdamW(params, **{"fused": True} | options).step()
    assert moved == []


def test_a_kernel_that_cannot_run_has_changed_nothing(
    moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(kernel, "adamw_kernel", Failing())
    ours, theirs = leaves(), leaves()
    optimiser, whole = clipping(ours), torch.optim.AdamW(groups_of(theirs, 0.1), lr=LR, fused=True)
    set_gradients(ours, draw(0))
    set_gradients(theirs, draw(0))
    with pytest.warns(UserWarning, match="gdn2 leaves AdamW to torch: no compiler") as said:
        optimiser.step()
        optimiser.step()
    assert len(said) == 1
    whole.step()
    whole.step()
    assert_alike(optimiser, whole, 0)
    assert moved == []


def test_shards_are_moved_in_place(moved: Moved) -> None:
    """What FSDP gives a process; its gradients begin anywhere."""
    with alone_on_a_mesh() as world:
        model, optimiser = build(world, torch.bfloat16)
        assert any(isinstance(p, DTensor) for p in model.parameters())
        curve = losses(world, model, optimiser, 0, 3)
        assert sum(moved) > 3 * 10
        moved.clear()
        other, plain = build(world, torch.bfloat16)
        plain._failed = True
        assert losses(world, other, plain, 0, 3) == pytest.approx(curve, rel=1e-4)
        assert not moved
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert optimiser.state[p].keys() == plain.state[q].keys()
            assert {type(x) for x in optimiser.state[p].values()} == {
                type(x) for x in plain.state[q].values()
            }


class Larger:
    """The kernel with every number that it is given off by a tenth."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            larger = (1.1 * x if isinstance(x, float) else x for x in arguments)
            self.kernel[grid](*larger, **options)

        return run


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "adamw_kernel", Larger(kernel.adamw_kernel))
    found = checks.check_kernel("adamw", torch.device("cpu"), "fp32")
    assert any(not check.passed for check in found)
