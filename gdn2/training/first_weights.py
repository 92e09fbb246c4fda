"""The weights of a model folder as the first ones of a run: `run.init_from`.

The folder is read when the run begins. Once there is a checkpoint nobody needs it any more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gdn2.layers.plain import leaves
from gdn2.models.config import ModelConfig
from gdn2.models.files import each_tensor, standing
from gdn2.models.folder import load_config
from gdn2.models.language_model import LanguageModel
from gdn2.models.weights import check_weights, checksum, weight_files
from gdn2.ops.arguments import require
from gdn2.training.shard import place

INIT_FROM = "run.init_from"
UNUSED = ("initializer_range", "init_scheme")  # by a model that has its weights


def model_in(folder: str) -> ModelConfig:
    """The config of the model in a folder."""
    with _named():
        return load_config(_standing(folder))


def check_fits(folder: str, config: ModelConfig) -> None:
    """Raise ValueError, with the first field that differs, where a folder's model is not of this config."""
    theirs, ours = (dict(leaves(model.to_dict())) for model in (model_in(folder), config))
    for name in [*ours, *theirs]:
        got, expected = ours.get(name), theirs.get(name)
        if name not in UNUSED and got != expected:
            raise ValueError(
                f"model.{name}: got {got!r}, expected {expected!r}, as in {folder}, which {INIT_FROM} names"
            )


def weights_digest(folder: str) -> str:
    """What a folder's weights are known by, wherever they lie."""
    with _named():
        return checksum(_standing(folder))


def load_first_weights(folder: str, model: LanguageModel) -> None:
    """Give every parameter, or the part of it that this process has, its value in the folder."""
    parameters = dict(model.named_parameters())
    with _named():
        path = _standing(folder)
        check_weights(path, {name: tuple(x.shape) for name, x in parameters.items()}, strict=True)
        for file in weight_files(path):
            for name, value in each_tensor(file, torch.device("cpu")):
                require(value.is_floating_point(), name, value.dtype, "floating point")
                place(parameters[name], value)


@contextmanager
def _named() -> Iterator[None]:
    """Say of every mistake which value of the config it is about."""
    try:
        yield
    except ValueError as mistake:
        raise ValueError(f"{INIT_FROM}: {mistake}") from None
    except OSError as reason:
        raise ValueError(f"{INIT_FROM}: got {reason}, expected a model to read") from None


def _standing(folder: str) -> Path:
    path = standing(Path(folder))
    if not path.is_dir():
        raise ValueError(f"got {folder!r}, expected a folder with a model")
    return path
