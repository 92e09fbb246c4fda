"""A model as a folder: config.json, safetensors, and the files of its tokenizer, under Hugging Face's names."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from gdn2.models.config import CONVENTIONAL, ModelConfig
from gdn2.models.files import new_folder, read_json, standing, write_json
from gdn2.models.initialisation import parameter_value
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import preset, preset_names
from gdn2.models.weights import read_weights, write_weights
from gdn2.ops.arguments import require, whole

CONFIG, GENERATION = "config.json", "generation_config.json"
MODEL_TYPE, ARCHITECTURE = "gdn2", "Gdn2ForCausalLM"
SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = ("tokenizer*", "special_tokens*")
# what a tokenizer's file is called in a model's folder
TOKENIZER_NAMES = {".json": "tokenizer.json", ".model": "tokenizer.model"}
PARTS = "model-?????-of-?????.safetensors"
REPLACEABLE = (CONFIG, GENERATION, "model.safetensors", PARTS, "model.safetensors.index.json")
WRITTEN_BESIDE = ("architectures", "model_type", "dtype")  # the fields of ModelConfig
BY_TRANSFORMERS = "transformers_version"  # in every file it wrote, and in none of ours


def save_model(
    model: LanguageModel,
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    stop_ids: Iterable[int] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model folder, in place of an older one; a write that is interrupted leaves the older one.

    Args:
        model: its parameters keep their dtypes.
        path: the folder; one that holds anything but a model is refused.
        tokenizer: its file, a tokenizer.json or .model of any name, or a folder, whose files are copied; an older
            model's are kept.
        stop_ids: tokens that end a text; an older model's are kept.
        shard_bytes: larger models are cut into files of at most this size.
    """
    path = Path(path)
    require(shard_bytes >= 1, "shard_bytes", shard_bytes, "at least 1")
    listed = isinstance(stop_ids, Iterable) and not isinstance(stop_ids, str)
    require(listed, "stop_ids", repr(stop_ids), "a list of tokens")
    given, size = [whole("stop_ids", token) for token in stop_ids], model.config.vocab_size
    for token in given:
        require(0 <= token < size, "stop_ids", token, f"0 to {size - 1}, a token of the model")
    older = standing(path)
    _check_replaceable(older)
    copied = _tokenizer_files(older if tokenizer is None else Path(tokenizer))
    expected = "a tokenizer.json or .model, or a folder with one"
    require(tokenizer is None or bool(copied), "tokenizer", tokenizer, expected)
    ends = given or load_stop_ids(older)
    with new_folder(path) as folder:
        write_json(folder / CONFIG, _to_json(model))
        if ends:
            write_json(folder / GENERATION, {"eos_token_id": ends})
        write_weights(folder, dict(model.named_parameters()), shard_bytes)
        for name, file in copied.items():
            shutil.copyfile(file, folder / name)


def load_model(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> LanguageModel:
    """Read a model folder, with parameters in the dtypes they were written in, or cast to `dtype`.

    Tensors that are missing or unexpected are a ValueError that names them. Without `strict` they are a warning, and
    what is missing gets its first value.
    """
    folder = standing(Path(path))
    config = load_config(folder)
    where = torch.get_default_device() if device is None else find_device(device)
    here = where.type != "meta" and (where.type != "cuda" or torch.cuda.is_available())
    require(here, "device", where, "one that is here and holds values")
    with torch.device("meta"):
        model = LanguageModel(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = read_weights(folder, expected, where, strict)
    for name, shape in expected.items():
        if name not in found:
            found[name] = parameter_value(name, torch.Size(shape), config, seed=0).to(where)
    model.load_state_dict(found, assign=True)
    return model if dtype is None else model.cast(dtype)


def find_device(device: torch.device | str) -> torch.device:
    """The device; of a CPU there is one, whatever number it is given."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: got {device!r}, expected cpu or cuda") from None
    return torch.device("cpu") if found.type == "cpu" else found


def load_config(path: str | Path) -> ModelConfig:
    """The config of a model folder."""
    file = Path(path) / CONFIG
    data = read_json(file)
    kind, inside = data.get("model_type"), Path(path) / "model"
    is_run = kind is None and (inside / CONFIG).is_file()
    require(not is_run, f"{path}", "the folder of a run", f"a model's, such as {inside}")
    require(kind == MODEL_TYPE, f"{file}: model_type", repr(kind), repr(MODEL_TYPE))
    try:
        return read_config(data)
    except ValueError as mistake:
        raise ValueError(f"{file}: {mistake}") from None


def read_config(data: Mapping[str, Any]) -> ModelConfig:
    """The config in what a config.json holds, whose conventional names must agree with its cell.

    Other names are mistakes, unless transformers wrote the file: it adds what it likes.
    """
    own = {name: value for name, value in data.items() if name not in WRITTEN_BESIDE}
    said = {name: own.pop(name) for name in CONVENTIONAL if name in own}
    if BY_TRANSFORMERS in own:
        own = {field.name: own[field.name] for field in fields(ModelConfig) if field.name in own}
    config = ModelConfig.from_dict(own)
    expected = config.conventional
    for name, value in said.items():
        derived = expected.get(name)
        require(value == derived, name, value, f"{derived}, as its cell says")
    return config


def load_stop_ids(path: str | Path) -> list[int]:
    """The tokens that end a text of the model in a folder; none where it does not say."""
    file = Path(path) / GENERATION
    said = read_json(file).get("eos_token_id") if file.exists() else None
    ids = said if isinstance(said, list) else [] if said is None else [said]
    fits = all(type(token) is int for token in ids)  # true is an int, too
    expected = "an integer or a list of integers"
    require(fits, f"{file}: eos_token_id", repr(said), expected)
    return ids


def open_model(
    name: str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> LanguageModel:
    """The model in a folder or, with random weights, the preset of this name."""
    if standing(Path(name)).is_dir():
        return load_model(name, device=device, dtype=dtype)
    model = LanguageModel(config_of(name)).to(device)
    return model if dtype is None else model.cast(dtype)


def config_of(name: str) -> ModelConfig:
    """The config of the model in a folder, or of the preset of this name."""
    folder = standing(Path(name))
    if folder.is_dir():
        return load_config(folder)
    known = name in preset_names()
    require(known, "model", repr(name), "a folder with a model, or a name that `gdn2 show` lists")
    return preset(name)


def _to_json(model: LanguageModel) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
        **model.config.to_dict(),
        **model.config.conventional,
    }


def _tokenizer_files(place: Path) -> dict[str, Path]:
    """The files of a tokenizer, by their names in a model's folder."""
    if place.is_file():
        name = TOKENIZER_NAMES.get(place.suffix)
        if name is None or (place.suffix == ".json" and "model" not in read_json(place)):
            return {}
        return {name: place}
    files = sorted(place.iterdir()) if place.is_dir() else []
    return {file.name: file for file in files if _matches(file, TOKENIZER_FILES)}


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace what this module did not write: a mistyped path must not cost anybody's files."""
    require(folder.is_dir() or not folder.exists(), "path", f"the file {folder}", "a folder")
    for file in sorted(folder.iterdir()) if folder.exists() else []:
        ours = _matches(file, (*REPLACEABLE, *TOKENIZER_FILES))
        require(ours, "path", f"{folder} with {file.name} in it", "a new folder, or a model's")


def _matches(file: Path, patterns: Iterable[str]) -> bool:
    return file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns)
