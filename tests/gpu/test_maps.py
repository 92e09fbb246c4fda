"""Maps of one input on a GPU: their gradients added by products, against fp64."""

import pytest
import torch
from torch import Tensor

from gdn2.layers import joint
from gdn2.layers.mlp import SwiGLU
from gdn2.ops.maps import maps
from tests.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cuda")


@pytest.mark.parametrize("outputs", [(96,), (64, 128, 8), (128,) * 5 + (16, 16)], ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_gradients(outputs: tuple[int, ...], joined: bool) -> None:
    """Errors of bf16 are at most those of gradients that autograd adds."""
    torch.manual_seed(0)
    leaves = [draw(4, 100, 192), *(draw(width, 192) / 14 for width in outputs)]
    leaves = [t.bfloat16() for t in leaves]
    dys = [draw(4, 100, width).bfloat16() for width in outputs]

    def run(together: bool, dtype: torch.dtype) -> list[Tensor]:
        x, *weights = (t.to(dtype, copy=True) for t in leaves)
        if joined:
            weights = [*torch.cat(weights).split(outputs)]
        x, *weights = (t.requires_grad_() for t in (x, *weights))
        if together:
            ys = maps(x, weights, one_output=joined, one_gradient=joined)
        else:
            ys = tuple(x @ weight.t() for weight in weights)
        grads = torch.autograd.grad(ys, [x, *weights], [dy.to(dtype) for dy in dys])
        return [*ys, *grads]

    right = run(False, torch.float64)
    ours, usual = run(True, torch.bfloat16), run(False, torch.bfloat16)
    for a, b, r in zip(ours, usual, right, strict=True):
        assert relative_error(a.double(), r) <= 1.1 * relative_error(b.double(), r)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_mlp_takes_them(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mlp = SwiGLU(256, 704).to("cuda", torch.bfloat16)
    x, dy = draw(2, 300, 256).bfloat16(), draw(2, 300, 256).bfloat16()

    def run() -> list[Tensor]:
        torch.compiler.reset()
        call = torch.compile(mlp, fullgraph=True) if compiled else mlp
        leaf = x.clone().requires_grad_()
        return list(torch.autograd.grad(call(leaf), [leaf, *mlp.parameters()], dy))

    taken: list[int] = []

    def counted(x: Tensor, weights: list[Tensor], **how: bool) -> tuple[Tensor, ...]:
        taken.append(len(weights))
        return maps(x, weights, **how)

    monkeypatch.setattr(joint, "together", counted)
    ours = run()
    assert taken == [2]
    monkeypatch.setattr(joint, "_adds_gradients", lambda x: False)
    for a, b in zip(ours, run(), strict=True):
        assert relative_error(a.double(), b.double()) < 6e-3
    assert taken == [2]
