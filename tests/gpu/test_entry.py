"""Mixers laid out for training on a GPU, beside the same ones in fp64 on the CPU, eagerly and compiled."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.layers.joint import lay_in_blocks
from gdn2.layers.layout import Layout
from gdn2.layers.mixers import Mixer, build_mixer
from tests.closeness import relative_error
from tests.gpu.test_kernels import COMPILED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU, and kernels that are compiled"),
]
WIDTH, BATCH, LENGTH = 96, 2, 256
CONFIGS: dict[str, Any] = {
    "delta": DeltaConfig(num_heads=2, key_head_dim=64, value_head_dim=64, gate_rank=16),
    "attention": AttentionConfig(num_heads=2, head_dim=64, window=128),
}


def step(
    run: Callable[[Tensor], Tensor], mixer: Mixer, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Output, and the gradients of a random loss."""
    rand = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(BATCH, LENGTH, WIDTH, generator=rand).bfloat16() for _ in range(2))
    x = x.to(device, dtype).requires_grad_()
    y = run(x)
    return [y, *torch.autograd.grad(y, [x, *mixer.parameters()], dy.to(y))]


def runs(mixer: Mixer, layout: Layout) -> Callable[[Tensor], Tensor]:
    return lambda x: mixer(x, None, layout)[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "packed"), [("delta", False), ("delta", True), ("attention", False)]
)
def test_results_and_gradients(name: str, packed: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    mixer = build_mixer(CONFIGS[name], WIDTH, 1e-5)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(parameter.bfloat16().float() if parameter.ndim > 1 else parameter)
    exact = copy.deepcopy(mixer).double()
    mixer = mixer.cuda()
    for parameter_name, parameter in mixer.named_parameters():
        wide = parameter_name.endswith(("decay_log_rate", "decay_bias"))
        parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    lay_in_blocks(mixer)
    lengths = torch.tensor([0, 100, 101, 512], dtype=torch.int32)
    layouts = [
        Layout.packed(lengths.to(device), 512) if packed else Layout.dense(BATCH, LENGTH)
        for device in ("cpu", "cuda")
    ]

    def shaped(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: run(x.reshape(1, 512, WIDTH)).reshape(x.shape) if packed else run(x)

    expected = step(shaped(runs(exact, layouts[0])), exact, torch.float64, "cpu")
    run = runs(mixer, layouts[1])
    torch._dynamo.reset()
    run = shaped(torch.compile(run) if compiled else run)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        found = step(run, mixer, torch.bfloat16, "cuda")
    operators = {event.name for event in profiler.events()}
    assert ("gdn2::entry_gradient" if name == "delta" else "gdn2::rotated_gradient") in operators
    names = ["y", "x", *(n for n, _ in mixer.named_parameters())]
    for quantity, a, b in zip(names, found, expected, strict=True):
        error = relative_error(a.cpu(), b)
        assert error < 3e-2, (quantity, error)
