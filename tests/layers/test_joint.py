"""Maps of one input give the same, joined or not, and nobody's change to one of them is overlooked."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn.modules.module import register_module_forward_hook

from gdn2.layers import joint as module
from gdn2.layers.joint import joint, lay_in_blocks, lay_side_by_side, single
from gdn2.layers.mlp import SwiGLU
from gdn2.ops.maps import side_by_side
from tests.closeness import assert_close
from tests.layers.cases import MIXERS, Doubling
from tests.models.cases import config, make, tokens

EXACT = 1e-12


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3, bias=False), nn.Linear(5, 4, bias=False)
        self.other = nn.Linear(7, 2, bias=False)
        self.c = nn.Linear(5, 1, bias=False)
        self.double()

    @property
    def joint_maps(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.a, self.b, self.c


def row(*shape: int) -> Tensor:
    return torch.randn(*shape, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def joins(three: Three, x: Tensor) -> bool:
    """Whether the maps of x are views of one product; they are right in any case."""
    found = joint(x, *three.joint_maps)
    for y, map_ in zip(found, three.joint_maps, strict=True):
        assert_close("map", y, x @ map_.weight.t(), EXACT)
    return found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_a_single_row_is_one_product() -> None:
    three = Three()
    before = [parameter.clone() for parameter in three.parameters()]
    with torch.no_grad():
        assert not joins(three, row(1, 1))
        lay_side_by_side(three)
        assert all(torch.equal(a, b) for a, b in zip(three.parameters(), before, strict=True))
        assert joins(three, row(1, 1))
        assert not joins(three, row(2, 1))
    assert not joins(three, row(1, 1))  # gradients go to the parameters


def test_gradients_reach_every_weight() -> None:
    three = Three()
    lay_side_by_side(three)
    sum(y.sum() for y in joint(row(1, 1), *three.joint_maps)).backward()  # type: ignore[union-attr]
    for map_ in three.joint_maps:
        assert map_.weight.grad is not None
        assert_close("gradient", map_.weight.grad, row(1, 1)[0].expand_as(map_.weight), EXACT)


class Adapted(nn.Linear):
    """As an adapter that adds to a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda three: setattr(three.b.weight, "data", three.b.weight.data.clone()),
        lambda three: setattr(three.b.weight, "data", three.b.weight.data.contiguous()),
        lambda three: three.load_state_dict(Three().state_dict(), assign=True),
        lambda three: three.load_state_dict(Three().state_dict()),
        lambda three: three.b.weight.data.mul_(3),
        lambda three: three.float().double(),
    ],
)
def test_changed_weights_are_seen(change: Callable[[Three], object]) -> None:
    three = Three()
    lay_side_by_side(three)
    change(three)
    with torch.no_grad():
        joins(three, row(1, 1))


def test_other_kinds_of_maps_are_called() -> None:
    three = Three()
    three.b = Adapted(5, 4, bias=False).double()
    lay_side_by_side(three)
    with torch.no_grad():
        found = joint(row(1, 1), *three.joint_maps)
    assert_close("adapted", found[1], row(1, 1) @ three.b.weight.t() + 1, EXACT)
    biased = nn.Linear(5, 4).double()
    with torch.no_grad():
        assert_close("biased", joint(row(1, 1), biased)[0], biased(row(1, 1)), EXACT)


def test_hooks_are_called() -> None:
    three, seen = Three(), []
    lay_side_by_side(three)
    three.b.register_forward_hook(lambda *given: seen.append(given))
    three.other.register_forward_pre_hook(lambda *given: seen.append(given))
    with torch.no_grad():
        joint(row(1, 1), *three.joint_maps)
        single(three.other, torch.ones(1, 7, dtype=torch.float64))
    assert len(seen) == 2


def test_a_model_laid_out_for_steps_computes_the_same() -> None:
    model, ids = make(), tokens(1, 9)
    expected = model(ids).logits
    lay_side_by_side(model)
    assert model.head.weight.t().is_contiguous()
    with torch.no_grad():
        state = model.reserve(model(ids[:, :4], model.new_state(1)).state, 5)
        for t in range(4, 9):
            logits = model(ids[:, t : t + 1], state, inplace=True).logits
            assert_close(f"token {t}", logits[:, 0], expected[:, t], 1e-10)


@pytest.mark.parametrize("name", ["gdn2", "attention"])
def test_a_mixer_laid_in_blocks_trains_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(config(MIXERS[name])), tokens(2, 9)
    model(ids, targets=ids).loss.backward()
    expected: dict[str, Any] = {name: x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    before = {name: x.clone() for name, x in model.named_parameters()}
    lay_in_blocks(model)
    for other, parameter in model.named_parameters():
        assert torch.equal(parameter, before[other])
        assert parameter.is_contiguous()
    mixer: Any = model.blocks[0].mixer
    assert mixer.laid
    monkeypatch.setattr(module, "_adds_gradients", lambda x: True)
    model(ids, targets=ids).loss.backward()
    for other, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(other, parameter.grad, expected[other], 1e-10)
    first, second, *_ = (map_.weight.grad for map_ in mixer.joint_maps)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_odd_weights_stay_where_they_are() -> None:
    """Kernels load 16 bytes at once."""

    def lies_together(widths: tuple[int, int, int], *dtypes: torch.dtype) -> bool:
        three = Three()
        three.a, three.b, three.c = (nn.Linear(5, width, bias=False) for width in widths)
        for map_, dtype in zip(three.joint_maps, dtypes, strict=True):
            map_.to(dtype)
        lay_in_blocks(three)
        assert [map_.weight.dtype for map_ in three.joint_maps] == [*dtypes]
        assert not hasattr(three, "laid")
        return side_by_side([map_.weight for map_ in three.joint_maps], 0) is not None

    assert lies_together((2, 4, 8), *[torch.float64] * 3)
    assert not lies_together((3, 4, 1), *[torch.float64] * 3)
    assert not lies_together((8, 8, 8), torch.bfloat16, torch.float32, torch.bfloat16)


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products add gradients to one another here as on a GPU."""
    monkeypatch.setattr(module, "_adds_gradients", lambda x: True)


def adds(three: Three, x: Tensor) -> bool:
    """Whether one sum is the gradient of x."""
    first, second, _ = joint(x, *three.joint_maps)
    return first.grad_fn is not None and first.grad_fn is second.grad_fn


def test_gradients_add_to_one_another_on_a_gpu_only() -> None:
    assert not adds(Three(), row(2, 3))


def ones(three: Three) -> list[Tensor]:
    return [torch.ones(2, 3, len(map_.weight), dtype=torch.float64) for map_ in three.joint_maps]


@pytest.mark.usefixtures("adding")
def test_gradients_that_add_to_one_another_are_the_same() -> None:
    three, x = Three(), row(2, 3).requires_grad_()
    assert adds(three, x)
    inputs = [x, *(map_.weight for map_ in three.joint_maps)]
    found = torch.autograd.grad(joint(x, *three.joint_maps), inputs, ones(three))
    apart = [map_(x) for map_ in three.joint_maps]
    for actual, other in zip(found, torch.autograd.grad(apart, inputs, ones(three)), strict=True):
        assert_close("gradient", actual, other, EXACT)


@pytest.mark.usefixtures("adding")
def test_without_gradients_nothing_adds() -> None:
    with torch.no_grad():
        assert not adds(Three(), row(2, 3))


@pytest.mark.usefixtures("adding")
def test_a_map_by_itself_is_called() -> None:
    (y,) = joint(row(2, 3), Three().a)
    assert y.grad_fn is not None
    assert "Maps" not in y.grad_fn.name()


class Doubled(Tensor):
    """A weight that is not what lies in memory, as a quantised or a distributed one."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        return 2 * result if function is nn.functional.linear else result


def nothing(*_: object) -> None:
    """A hook that changes nothing."""


@pytest.mark.usefixtures("adding")
@pytest.mark.parametrize(
    "change",
    [
        lambda three: three.b.register_forward_hook(nothing),
        lambda three: three.b.register_forward_pre_hook(nothing),
        lambda three: three.b.register_full_backward_hook(nothing),
        lambda three: three.b.register_full_backward_pre_hook(nothing),
        lambda three: setattr(three, "b", nn.Linear(5, 4).double()),
        lambda three: setattr(three, "b", Adapted(5, 4, bias=False).double()),
        lambda three: setattr(three, "b", Doubling(nn.Linear(5, 4).double())),
        lambda three: setattr(three.b, "forward", lambda x: x @ three.b.weight.t()),
        lambda three: setattr(
            three.b, "weight", nn.Parameter(three.b.weight.detach().as_subclass(Doubled))
        ),
    ],
    ids=[
        *("forward hook", "forward pre-hook", "backward hook", "backward pre-hook"),
        *("bias", "other class", "no weight", "other forward", "other weight"),
    ],
)
def test_what_is_more_than_a_product_is_called(change: Callable[[Three], object]) -> None:
    three = Three()
    change(three)
    assert not adds(three, row(2, 3))
    for y, map_ in zip(joint(row(2, 3), *three.joint_maps), three.joint_maps, strict=True):
        assert torch.equal(y, map_(row(2, 3)))


@pytest.mark.usefixtures("adding")
def test_hooks_of_all_modules_are_called() -> None:
    three, seen = Three(), []
    hook = register_module_forward_hook(lambda called, *_: seen.append(called))
    try:
        joint(row(2, 3), *three.joint_maps)
    finally:
        hook.remove()
    assert seen == [*three.joint_maps]


@pytest.mark.usefixtures("adding")
def test_backward_hooks_are_called() -> None:
    three, seen = Three(), []
    three.b.register_full_backward_hook(lambda *given: seen.append(given))
    x = row(2, 3).requires_grad_()
    torch.autograd.backward(joint(x, *three.joint_maps), ones(three))
    assert len(seen) == 1


@pytest.mark.usefixtures("adding")
def test_autocast_and_other_dtypes_are_left_to_torch() -> None:
    three, x = Three().float(), row(2, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert not adds(three, x)
        assert joint(x, *three.joint_maps)[0].dtype == torch.bfloat16
    assert adds(three, x)
    three.b.double()
    with pytest.raises(RuntimeError, match="dtype"):
        joint(x, *three.joint_maps)
    assert not module._are_alike(x, three.joint_maps)


def sums(backward: Callable[[], object]) -> bool:
    """Whether a backward makes gradients of inputs by products that add."""
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        backward()
    return any(event.name == "gdn2::input_gradient" for event in profile.function_events)


@pytest.mark.usefixtures("adding")
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(
                shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"
            ),
        ),
    ],
)
def test_a_layer_compiles_to_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    layer = SwiGLU(5, 7).double()
    x = row(2, 3).requires_grad_()
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    with fresh_cache():
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        assert sums(compiled(x).square().sum().backward)
    for actual, other in zip((t.grad for t in inputs), expected, strict=True):
        assert actual is not None
        assert_close("gradient", actual, other, EXACT)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3)])
def test_inference_compiles_to_one_graph(shape: tuple[int, int]) -> None:
    """Of a single row too, whose weights are otherwise looked for side by side."""
    torch._dynamo.reset()
    model, ids = make(config(MIXERS["gdn2"], MIXERS["attention"])), tokens(*shape)
    lay_side_by_side(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close("logits", compiled(ids).logits, model(ids).logits, EXACT)


@pytest.mark.parametrize(("other", "checkpointed"), [("attention", False), ("kda", True)])
def test_blocks_compile_to_one_graph_each(
    other: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model, ids = make(config(MIXERS["gdn2"], MIXERS[other])), tokens(2, 9)
    model(ids, targets=ids).loss.backward()
    expected: dict[str, Any] = {name: x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    model.checkpoint_blocks(checkpointed)
    monkeypatch.setattr(module, "_adds_gradients", lambda x: True)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    loss = model(ids, targets=ids).loss
    assert loss is not None
    assert sums(loss.backward)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(name, parameter.grad, expected[name], 1e-10)
