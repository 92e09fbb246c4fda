"""The tensors of a model and its optimiser under the parameters' names, which any number of processes can read."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from gdn2.ops.arguments import require
from gdn2.training.checkpoint_reader import CheckpointReader
from gdn2.training.shard import reshard

MODEL, OPTIMISER = "model.", "optimiser."
State = dict[str, Tensor]


def train_state(model: nn.Module, optimiser: Optimizer) -> State:
    """`model.NAME` and `optimiser.NAME.KEY`, as they lie in the model and its optimiser."""
    reshard(model)
    state: State = {}
    for name, parameter in model.named_parameters():
        state[MODEL + name] = parameter.detach()
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"{OPTIMISER}{name}.{key}"] = value
    return state


def staged(state: State) -> State:
    """Copies on the CPU, which the next step of training leaves alone."""
    return {name: x.detach().to("cpu", copy=True) for name, x in state.items()}


def blank_state(path: Path, model: nn.Module) -> State:
    """The model's own parameters, and empty tensors for the optimiser's: what a checkpoint can be read into."""
    reshard(model)
    parameters = dict(model.named_parameters())
    metadata = CheckpointReader(path).read_metadata().state_dict_metadata
    stored = {name: x for name, x in metadata.items() if isinstance(x, TensorStorageMetadata)}
    state = {MODEL + name: parameter.detach() for name, parameter in parameters.items()}
    names = {name for name in stored if name.startswith(MODEL)}
    differing = sorted(names ^ state.keys())
    require(not differing, f"{path}: parameters", ", ".join(differing[:3]), "those of the model")
    for name in names:
        shape, expected = tuple(stored[name].size), tuple(state[name].shape)
        require(shape == expected, f"{path}: {name}", f"shape {shape}", expected)
    for name in sorted(stored.keys() - names):
        owner = name.removeprefix(OPTIMISER).rpartition(".")[0]
        known = name.startswith(OPTIMISER) and owner in parameters
        require(known, str(path), name, "the model and its optimiser alone")
        state[name] = _blank(stored[name], parameters[owner])
    return state


def restore_optimiser(optimiser: Optimizer, model: nn.Module, state: State) -> None:
    """Give the optimiser the tensors that were read; its hyper-parameters stay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    values: dict[str, dict[str, Tensor]] = {}
    for path, tensor in state.items():
        if path.startswith(OPTIMISER):
            name, _, key = path.removeprefix(OPTIMISER).rpartition(".")
            values.setdefault(name, {})[key] = tensor
    by_index: dict[int, Any] = {
        index: values[names[parameter]]
        for index, parameter in enumerate(order)
        if names[parameter] in values
    }
    groups = optimiser.state_dict()["param_groups"]
    optimiser.load_state_dict({"state": by_index, "param_groups": groups})


def _blank(stored: TensorStorageMetadata, parameter: nn.Parameter) -> Tensor:
    """A moment is spread as its parameter is; what has another shape, a count of steps, is whole everywhere."""
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(stored.size, dtype=dtype)
