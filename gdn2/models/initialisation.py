"""The first values of a language model's parameters, the same bits wherever it is built."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gdn2.layers.initialisation import initial_value
from gdn2.models.config import ModelConfig

Place = Callable[[nn.Parameter, Tensor], None]


def parameter_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The first value, in fp32 on the CPU, of the parameter `name` of full shape `shape`."""
    inside = re.match(r"blocks\.(\d+)\.mixer\.", name)
    return initial_value(
        name,
        shape,
        seed=seed,
        mixer=config.mixers[int(inside[1])] if inside else None,
        depth=config.num_hidden_layers,
        std=config.initializer_range,
        scheme=config.init_scheme,
    )


def copy_into(parameter: nn.Parameter, value: Tensor) -> None:
    """Put a whole value into a parameter that is whole."""
    parameter.data.copy_(value)


def initialise(model: nn.Module, config: ModelConfig, seed: int, place: Place = copy_into) -> None:
    """Give every parameter its first value; `place` puts it into a parameter that holds only a shard of it."""
    for name, parameter in model.named_parameters():
        place(parameter, parameter_value(name, parameter.shape, config, seed))
