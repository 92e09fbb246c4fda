"""Files of tensors and folders of files: read with every mistake in one line, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gdn2.ops.arguments import require

Shape = tuple[int, ...]


class Header(NamedTuple):
    """What a file of tensors holds, without its data."""

    shapes: dict[str, Shape]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Names, shapes and metadata; a file that is cut short, or no safetensors, is a ValueError."""
    with _opened(path, "cpu") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return Header(shapes, file.metadata() or {})


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own.

    Those of the library lie in the file's memory map at any multiple of eight bytes, where products round differently.
    """
    return {name: tensor.clone() for name, tensor in each_tensor(path, device)}


def each_tensor(path: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file one after the other, to be copied: on a CPU they lie in the file's memory map."""
    with _opened(path, str(device)) as file:
        for name in file.keys():  # noqa: SIM118
            try:
                tensor = file.get_tensor(name)
            except SafetensorError as reason:  # of numbers that torch does not have
                raise ValueError(f"{path}: {name}: got {reason}, expected a tensor") from None
            yield name, tensor


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file beside its place and move it there, so that no reader finds half of one."""
    require(path.parent.is_dir(), "path", path, "a file in a folder that exists")
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        written.touch()
        # That of any new file; the library lets nobody else read its own.
        readers = written.stat().st_mode
        save_file(own, written, metadata)
        written.chmod(readers)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: got no such file, expected JSON") from None
    except (ValueError, RecursionError) as reason:
        raise ValueError(f"{path}: got {reason}, expected JSON") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: got a {type(data).__name__}, expected a table")
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def replace_file(path: Path, content: str) -> None:
    """Write a file beside its place, all of it to the disk, and move it there; one that says the same stays."""
    if path.is_file() and path.read_bytes() == content.encode():
        return
    written = path.with_name(f".{path.name}")
    written.write_text(content)
    to_disk(written)
    written.replace(path)


def to_disk(path: Path) -> None:
    """What a power cut after this leaves of a file is all of it."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` at the end; a failure leaves what was there.

    The old folder steps aside first, for there is no exchange of two names. Killed just then, it is still where
    `standing` finds it.
    """
    path = path.resolve()  # a link stays one
    own = "another folder: this one is the process's own and would be removed"
    require(path != Path.cwd(), "path", path, own)
    new, old = _beside(path, "new"), _beside(path, "old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for file in new.rglob("*"):
            if file.is_file():
                to_disk(file)
        if path.exists():
            path.rename(old)
        new.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def standing(path: Path) -> Path:
    """The folder called `path`, or the one that was being replaced when its writer was killed."""
    path = path.resolve()
    old = _beside(path, "old")
    return old if old.exists() and not path.exists() else path


def _beside(path: Path, which: str) -> Path:
    return path.with_name(f".{path.name}.{which}")


def _opened(path: Path, device: str) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: got no such file, expected a safetensors file")
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as reason:
        line = " ".join(str(reason).split())
        raise ValueError(f"{path}: got {line}, expected a whole safetensors file") from None
