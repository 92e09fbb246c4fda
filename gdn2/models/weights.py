"""A model's tensors in one safetensors file, or in several with an index."""

import warnings
from collections.abc import Collection, Mapping
from hashlib import file_digest, sha256
from pathlib import Path

import torch
from torch import Tensor

from gdn2.models.files import (
    Shape,
    read_header,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from gdn2.ops.arguments import require

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = {"format": "pt"}  # transformers refuses files without it


def write_weights(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Write tensors into a folder, in files of at most `shard_bytes` where a tensor is not larger itself."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, shards[0], METADATA)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / file, shard, METADATA)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def read_weights(
    folder: Path, expected: Mapping[str, Shape], device: torch.device, strict: bool
) -> dict[str, Tensor]:
    """The expected tensors; those missing or unexpected are a ValueError, or a warning unless `strict`.

    All headers are checked before the first tensor is read.
    """
    check_weights(folder, expected, strict)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors |= {n: x for n, x in read_tensors(file, device).items() if n in expected}
    for name, tensor in tensors.items():
        require(tensor.is_floating_point(), f"{folder}: {name}", tensor.dtype, "floating point")
    return tensors


def check_weights(folder: Path, expected: Mapping[str, Shape], strict: bool) -> None:
    """Compare the headers of a folder's files with the expected tensors, as `read_weights` does."""
    files = weight_files(folder)
    found: dict[str, Shape] = {}
    for file in files:
        found |= read_header(file).shapes
    for name, shape in expected.items():
        same = found.get(name, shape) == shape
        require(same, f"{folder}: {name}", f"shape {found.get(name)}", shape)
    differences = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys(),
    }
    if any(differences.values()):
        got = " and ".join(f"{kind} {some(names)}" for kind, names in differences.items() if names)
        line = f"{folder}: got {got}, expected what its config says"
        if strict:
            raise ValueError(line)
        warnings.warn(line, stacklevel=4)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's tensors."""
    index, whole = folder / INDEX, folder / WEIGHTS
    if not index.exists():
        return [whole]
    places = read_json(index).get("weight_map")
    names = places.values() if isinstance(places, dict) else [None]
    inside = all(isinstance(name, str) and Path(name).name == name for name in names)
    require(inside, f"{index}: weight_map", places, "the file in this folder of each tensor")
    # Saved later, by transformers, which reads it first and leaves the index of an earlier save.
    if whole.exists():
        return [whole]
    return [folder / name for name in sorted(set(names))]


def checksum(folder: Path) -> str:
    """SHA-256 of all weights, in the order of their files; `gdn2 eval` records it with its results."""
    whole = sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as content:
            whole.update(file_digest(content, "sha256").digest())
    return whole.hexdigest()


def some(names: Collection[str]) -> str:
    """The first three names, and how many more there are."""
    first = sorted(names)[:3]
    return ", ".join(first) + f" and {len(names) - 3} more" * (len(names) > 3)
