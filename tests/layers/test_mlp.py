"""The MLP, which in training keeps what its activation is made of and not the activation itself."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gdn2.layers.mlp import SwiGLU
from gdn2.ops.swiglu import swiglu_linear
from tests.closeness import assert_close
from tests.layers.cases import WIDTH, Doubling, inputs, scramble

INNER = 14
EXACT = 1e-12
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"
        ),
    ),
]


def make() -> SwiGLU:
    made = SwiGLU(WIDTH, INNER).double()
    scramble(made)
    return made


def activation(made: SwiGLU, x: Tensor) -> Tensor:
    return silu(x @ made.gate_proj.weight.T) * (x @ made.up_proj.weight.T)


def plain(made: SwiGLU) -> Callable[[Tensor], Tensor]:
    return lambda x: activation(made, x) @ made.down_proj.weight.T


def differentiated(made: nn.Module, call: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """The result, and the gradients of inputs and all weights that have one."""
    leaves = {"x": inputs(2, 5).requires_grad_()}
    y = call(leaves["x"])
    leaves |= {name: x for name, x in made.named_parameters() if x.requires_grad}
    grads = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert_close(name, x, expected[name], EXACT)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each activation that is not kept."""
    seen: list[int] = []

    def counted(*operands: Tensor) -> Tensor:
        seen.append(1)
        return swiglu_linear(*operands)

    monkeypatch.setattr("gdn2.layers.mlp.swiglu_linear", counted)
    return seen


def test_training_and_inference_compute_the_formula(calls: list[int]) -> None:
    made = make()
    assert_same(differentiated(made, made), differentiated(made, plain(made)))
    assert calls == [1]
    x = inputs(2, 5)
    with torch.no_grad():
        assert_close("inference", made(x), plain(made)(x), EXACT)
    assert calls == [1]


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj"])
def test_frozen_maps(frozen: str) -> None:
    made = make()
    made.get_submodule(frozen).requires_grad_(False)
    assert_same(differentiated(made, made), differentiated(made, plain(made)))


def test_gradient_checkpointing(calls: list[int]) -> None:
    made = make()
    again = differentiated(made, lambda x: checkpoint(made, x, use_reentrant=False))
    assert len(calls) == 2
    assert_same(again, differentiated(made, plain(made)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph(backend: str) -> None:
    made = make()
    torch._dynamo.reset()
    with fresh_cache():
        compiled = torch.compile(made, fullgraph=True, backend=backend)
        assert_same(differentiated(made, compiled), differentiated(made, made))


def keeps_activation(made: SwiGLU, call: Callable[[Tensor], Any]) -> bool:
    """Whether something that is kept for the backward has the activation's numbers, in whatever order."""
    x = inputs(2, 5).requires_grad_()
    wanted, kept = activation(made, x).detach().flatten().sort().values, []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.detach().clone())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(x).sum().backward()
    assert any(x.numel() == wanted.numel() for x in kept)  # what it is made of
    alike = (x.flatten().sort().values for x in kept if x.numel() == wanted.numel())
    return any(torch.allclose(x, wanted) for x in alike)


def test_the_activation_is_not_kept() -> None:
    made = make()
    assert keeps_activation(made, plain(made))
    assert not keeps_activation(made, made)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiler_does_not_keep_the_activation(backend: str) -> None:
    made = make()
    torch._dynamo.reset()
    with fresh_cache():
        assert keeps_activation(made, torch.compile(plain(made), fullgraph=True, backend=backend))
        assert not keeps_activation(made, torch.compile(made, fullgraph=True, backend=backend))


class Adapted(nn.Linear):
    """As an adapter that adds to a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_an_adapter_is_called(calls: list[int]) -> None:
    made = make()
    adapted = Adapted(INNER, WIDTH, bias=False)
    adapted.weight, made.down_proj = made.down_proj.weight, adapted
    expected = differentiated(made, lambda x: plain(made)(x) + 1)
    assert_same(differentiated(made, made), expected)
    assert calls == []


def test_an_adapter_without_a_weight_is_called(calls: list[int]) -> None:
    made, base = make(), make()
    made.load_state_dict(base.state_dict())
    made.down_proj = Doubling(made.down_proj)  # type: ignore[assignment]
    x = torch.randn(3, WIDTH, dtype=base.down_proj.weight.dtype)
    assert_close("y", made(x), 2 * plain(base)(x), EXACT)
    assert calls == []


def test_a_bias_is_added(calls: list[int]) -> None:
    made = make()
    made.down_proj.bias = bias = nn.Parameter(torch.ones(WIDTH).double())
    expected = differentiated(made, lambda x: plain(made)(x) + bias)
    assert_same(differentiated(made, made), expected)
    assert calls == []


@pytest.mark.parametrize(
    "hook",
    ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"],
)
def test_hooks_are_called(hook: str, calls: list[int]) -> None:
    made, seen = make(), []
    handle = getattr(made.down_proj, f"register_{hook}")(lambda *given: seen.append(given))
    expected = differentiated(made, plain(made))
    assert_same(differentiated(made, made), expected)
    assert (len(seen), calls) == (1, [])
    handle.remove()
    assert_same(differentiated(made, made), expected)
    assert (len(seen), calls) == (1, [1])


class Wide(nn.Linear):
    """As an adapter that computes in its own dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


@pytest.mark.parametrize("kind", [nn.Linear, Wide])
def test_autocast_stays_with_torch(kind: type[nn.Linear], calls: list[int]) -> None:
    made, x = make().float(), inputs(2, 5).float()
    for name in ("gate_proj", "up_proj"):
        setattr(made, name, kind(WIDTH, INNER, bias=False))
    with torch.autocast("cpu", torch.bfloat16):
        y = made.down_proj(silu(made.gate_proj(x)) * made.up_proj(x))
        found = made(x)
    assert torch.equal(found, y)
    for loss in (y, found):
        made.zero_grad()
        loss.sum().backward()
        gradient = made.down_proj.weight.grad
        assert gradient is not None and gradient.abs().sum() > 0
    assert calls == []


def test_mixed_dtypes_stay_with_torch(calls: list[int]) -> None:
    made, x = make().float(), inputs(2, 5).float()
    made.down_proj.double()
    with pytest.raises(RuntimeError, match="dtype"):
        made(x)
    assert calls == []


def test_meta_tensors_pass_through() -> None:
    made, x = make().to("meta"), inputs(2, 5).to("meta").requires_grad_()
    made(x).sum().backward()
    for leaf in (x, *made.parameters()):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape


def test_no_flops_are_lost() -> None:
    """Three products of tokens, width and inner width; each has two gradients."""
    made = make()
    with FlopCounterMode(display=False) as counter:
        y = made(inputs(2, 5).requires_grad_())
        assert counter.get_total_flops() == 2 * 10 * 3 * WIDTH * INNER
        y.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 3 * WIDTH * INNER
