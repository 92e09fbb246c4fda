"""Mamba-3's ranks that read each other on a GPU, at full size against fp64, in a compiled layer too."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gdn2.layers.config import Mamba3Config
from gdn2.layers.layout import Layout
from gdn2.layers.mamba3 import Mamba3Mixer
from gdn2.ops import ranks as op
from gdn2.ops.ranks import kernels_take, rank_reads
from tests.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("ranks", "heads", "width"), [(1, 64, 128), (4, 64, 64), (3, 5, 96)])
def test_reads_and_gradients(ranks: int, heads: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lead = (2, 301)
    shapes = [(*lead, ranks, heads, width)] * 3 + [(*lead, heads)]
    shapes += [*shapes[1:]] if ranks > 1 else []
    drawn = [torch.randn(s, device="cuda") for s in shapes]
    drawn = [t if t.ndim == 3 else t.to(dtype) for t in drawn]
    assert kernels_take(drawn[0], drawn[2])
    do = torch.randn_like(drawn[2])

    def run(backend: str, given: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in given]
        q, k, v, weight, *old = leaves
        o = rank_reads(q, k, v, weight, (old[0], old[1], old[2]) if old else None, backend)
        return [o, *torch.autograd.grad(o, leaves, do.to(o.dtype))]

    found, again = run("auto", drawn), run("auto", drawn)
    right = run("torch", [t.double() for t in drawn])
    for a, b, r in zip(found, again, right, strict=True):
        assert torch.equal(a, b)
        assert relative_error(a.double(), r) < BOUNDS[dtype]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_takes_them(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = Mamba3Config(inner_size=256, rank=4)
    mixer = Mamba3Mixer(config, 256).to("cuda", torch.bfloat16)
    x, dy = (torch.randn(2, 130, 256, device="cuda").bfloat16() for _ in range(2))
    layout = Layout.dense(2, 130)

    def run() -> list[Tensor]:
        torch.compiler.reset()
        call = torch.compile(mixer, fullgraph=True) if compiled else mixer
        leaf = x.clone().requires_grad_()
        y, _ = call(leaf, None, layout)
        return [y, *torch.autograd.grad(y, [leaf, *mixer.parameters()], dy)]

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        ours = run()
    names = {event.name for event in seen.events()}
    assert {"rank_reads_kernel", "rank_reads_gradient_kernel"} <= names
    monkeypatch.setattr(op, "kernels_take", lambda *_: False)
    for a, b in zip(ours, run(), strict=True):
        assert relative_error(a.double(), b.double()) < 2e-2
