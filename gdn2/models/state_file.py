"""States on disk: one safetensors file, with what is needed to know whose they are and how they lie."""

import json
from pathlib import Path

import torch
from torch import Tensor

from gdn2.models.files import read_header, read_tensors, write_tensors
from gdn2.models.language_model import LanguageModel
from gdn2.models.state import ModelState
from gdn2.ops.arguments import require
from gdn2.ops.kv_cache import KVCache

FORMAT = "gdn2-state-1"
AXES = "rows first; memory is rows, heads, key width, value width; keys and values rows, slots, heads, width"


def save_state(state: ModelState, path: str | Path) -> None:
    """Write a state; its metadata say which config it belongs to, its rows, their tokens and every shape."""
    tensors = _named(state)
    metadata = {
        "format": FORMAT,
        "config": state.config,
        "rows": str(state.rows),
        "seen": json.dumps(state.seen.tolist()),
        "shapes": json.dumps({name: list(x.shape) for name, x in tensors.items()}),
        "axes": AXES,
    }
    write_tensors(Path(path), tensors, metadata)


def load_state(path: str | Path, model: LanguageModel) -> ModelState:
    """Read a state for a model on its device; a state of another model is a ValueError."""
    path, empty = Path(path), model.new_state(0)
    shapes, metadata = read_header(path)
    found = metadata.get("format")
    require(found == FORMAT, f"{path}", f"format {found}", FORMAT)
    theirs = metadata.get("config")
    expected = f"{empty.config}, the model's"
    require(theirs == empty.config, f"{path}", f"a state of config {theirs}", expected)
    expected_tensors = _named(empty)
    strange = sorted(shapes.keys() ^ expected_tensors.keys())
    require(not strange, f"{path}", f"no match for {', '.join(strange[:3])}", "the model's tensors")
    tensors = read_tensors(path, empty.seen.device)
    for name, like in expected_tensors.items():
        _check(f"{path}: {name}", tensors[name], like, len(tensors["seen"]), _is_cached(name))
    layers = tuple(
        type(layer)(*(tensors[f"blocks.{i}.{field}"] for field in layer._fields))
        for i, layer in enumerate(empty.layers)
    )
    for i, layer in enumerate(layers):
        if isinstance(layer, KVCache):
            keys, values = layer.keys.dtype, layer.values.dtype
            require(values == keys, f"{path}: blocks.{i}.values", values, f"{keys}, as its keys")
    return ModelState(layers, tensors["seen"], empty.config)


def _named(state: ModelState) -> dict[str, Tensor]:
    tensors = {
        f"blocks.{i}.{field}": x
        for i, layer in enumerate(state.layers)
        for field, x in zip(layer._fields, layer, strict=True)
    }
    return {**tensors, "seen": state.seen}


def _is_cached(name: str) -> bool:
    """Whether it is the keys or the values of attention, whose slots and dtype depend on the tokens seen."""
    return name.endswith(tuple(f".{field}" for field in KVCache._fields[:2]))


def _check(where: str, found: Tensor, like: Tensor, rows: int, cached: bool) -> None:
    made_under_autocast = cached and found.dtype in (torch.bfloat16, torch.float16)
    right = found.dtype == like.dtype or made_under_autocast
    require(right, where, found.dtype, f"{like.dtype}, as in the model")
    fixed = 2 if cached else 1
    shape = (rows, *found.shape[1:fixed], *like.shape[fixed:])
    require(tuple(found.shape) == shape, where, ("shape", found), shape)
