"""Reads a checkpoint that may be somebody else's: no code of its files is executed.

torch.distributed.checkpoint keeps its metadata as a pickle, which may call any function there is, and its reader lets
it. Tensors it reads without executing anything.
"""

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from torch.serialization import _get_layout

from gdn2.training.checkpoint_files import SHARD

# All that metadata of tensors consist of. BytesStorageMetadata are left out on purpose: they stand for objects, which
# torch would unpickle.
PARTS: dict[tuple[str, str], Any] = {
    (part.__module__, part.__qualname__): part
    for part in (
        *(Metadata, StorageMeta, MetadataIndex, TensorStorageMetadata, ChunkStorageMetadata),
        *(TensorProperties, _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, _get_layout),
    )
}
# Where it was written: nobody goes there, and a path of another system cannot be made on this one.
for _module in ("pathlib", "pathlib._local"):
    PARTS |= dict.fromkeys([(_module, "PosixPath"), (_module, "WindowsPath")], PurePath)
EXPECTED = "metadata of tensors and no code"


class CheckpointReader(FileSystemReader):
    """torch's reader of a checkpoint's folder; what is no tensor, or no metadata of tensors, is a ValueError."""

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """The metadata; a file for each rank, which `kwargs` may ask for, is never written here."""
        file = Path(self.path, ".metadata")
        try:
            with file.open("rb") as content:
                metadata = _Unpickler(content).load()
        # Any: bytes that are no pickle may be taken for any of its commands.
        except Exception as reason:
            line = " ".join(str(reason).split()) or type(reason).__name__
            raise ValueError(f"{file}: got {line}, expected {EXPECTED}") from None
        if not isinstance(metadata, Metadata):
            kind = type(metadata).__name__
            raise ValueError(f"{file}: got a {kind}, expected {EXPECTED}")
        _check_tables(file, metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read tensors into those of the plan."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:  # torch's words on it advise to read the file without care
            raise ValueError("something other than tensors, or code, which is not run") from None


def _check_tables(file: Path, metadata: Metadata) -> None:
    """Raise ValueError unless they are tables, and name shards beside this file: nobody has checksums of others."""
    kinds = {"state_dict_metadata": TensorStorageMetadata, "storage_data": _StorageInfo}
    for name, kind in kinds.items():
        table = getattr(metadata, name, None)
        if not isinstance(table, dict) or not all(isinstance(x, kind) for x in table.values()):
            raise ValueError(f"{file}: got another kind of {name}, expected {EXPECTED}")
    places = metadata.storage_data.values()
    for path in {str(getattr(place, "relative_path", "")) for place in places}:
        if SHARD.fullmatch(path) is None:
            raise ValueError(f"{file}: got {path!r}, expected the name of a file beside it")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PARTS:
            return PARTS[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name}")
