"""How every parameter begins, in one function.

A value depends on the seed and on the parameter's name and full shape alone, and is drawn in fp32 on the CPU. So one
seed gives the same bits on every device, for a model made on the meta device and filled later, and for a shard of it.
"""

import hashlib
import math
from typing import Literal

import torch
from torch import Tensor, nn

from gdn2.layers.config import DeltaConfig, Mamba2Config, MixerConfig

# How linear maps begin: as in the released code, as the paper says, as Hugging Face's models do.
InitScheme = Literal["released", "paper", "normal"]
FP32 = torch.float32  # whatever the default is
XAVIER_GAIN = 2**-2.5
STEP_SIZES = (1e-3, 1e-1)  # of Δ at the start, spread evenly in the logarithm
LARGEST_RATE, SMALLEST_RATE = 16.0, 1e-4


def initial_value(
    name: str,
    shape: torch.Size,
    *,
    seed: int,
    mixer: MixerConfig | None = None,
    depth: int | None = None,
    std: float = 0.02,
    scheme: InitScheme = "released",
) -> Tensor:
    """The first value of the parameter `name`, where `mixer` is the mixer it belongs to, if any; always on the CPU.

    An embedding is normal with `std`. Linear maps of the delta family are Xavier-uniform with gain 2^−2.5; others are
    uniform within 1/√inputs, and those that end a residual branch are divided by √(2 · depth) in a model of `depth`
    blocks. By the scheme "paper" all maps are as those of the delta family, by "normal" as the embedding. Nothing else
    depends on the scheme.
    """
    random = _generator(seed, name)
    owner, kind = ("", *name.split("."))[-2:]

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(shape, dtype=FP32).uniform_(low, high, generator=random)

    def normal() -> Tensor:
        return torch.empty(shape, dtype=FP32).normal_(0, std, generator=random)

    with torch.device("cpu"):  # whatever the default is where a model is made
        match owner, kind:
            case "embedding", _:
                value = normal()
            case _, "weight" if owner.endswith("norm"):
                value = torch.ones(shape, dtype=FP32)
            case _, "weight" | "bias" if owner.endswith("conv"):
                assert isinstance(mixer, DeltaConfig | Mamba2Config)
                bound = mixer.conv_width**-0.5
                value = uniform(-bound, bound)
            case _, "bias":
                value = torch.zeros(shape, dtype=FP32)
            case _, "decay_log_rate":
                # Gated DeltaNet draws from 0 on, where a logarithm has no end.
                lowest = 0.0 if isinstance(mixer, DeltaConfig) and mixer.decay == "head" else 1.0
                value = uniform(lowest, LARGEST_RATE).clamp(min=SMALLEST_RATE).log()
            case _, "decay_bias" | "step_bias":
                value = _inverse_softplus(uniform(*map(math.log, STEP_SIZES)).exp())
            case _, "skip" | "key_bias" | "query_bias" | "mimo_gate":
                value = torch.ones(shape, dtype=FP32)
            case _, "mimo_value" | "mimo_out":
                value = torch.full(shape, 1 / shape[1], dtype=FP32)
            case _, _ if scheme == "normal":
                value = normal()
            case _, _:
                small = scheme == "paper" or isinstance(mixer, DeltaConfig)
                bound = _xavier_bound(shape) if small else _fan_in_bound(owner, shape, depth)
                value = uniform(-1, 1) * bound
    return value


def _xavier_bound(shape: torch.Size) -> float:
    outputs, inputs = shape
    return XAVIER_GAIN * math.sqrt(6 / (inputs + outputs))


def _fan_in_bound(owner: str, shape: torch.Size, depth: int | None) -> float:
    ends_a_branch = owner in ("out_proj", "down_proj")
    return shape[1] ** -0.5 / (math.sqrt(2 * depth) if depth and ends_a_branch else 1)


def fill(module: nn.Module, mixer: MixerConfig) -> None:
    """Give a mixer that stands alone its first values; on the meta device there is nothing to fill."""
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            parameter.data.copy_(initial_value(name, parameter.shape, seed=0, mixer=mixer))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + (-torch.expm1(-x)).log()
