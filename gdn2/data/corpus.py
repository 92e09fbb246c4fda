"""The corpus that is always there: the source text of the running Python's standard library."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_OF = 20  # one file in so many, chosen by a hash of its path

Split = Literal["train", "validation"]


def library_files(split: Split | None = None) -> list[Path]:
    """The library's modules in the order of their paths: those of one split, or all."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(file.relative_to(root).as_posix() for file in _modules(root))
    files = [root / name for name in names if split in (None, _split_of(name))]
    if not files:
        raise ValueError(f"{root}: got no .py file, expected Python's standard library")
    return files


def documents(split: Split | None = None) -> Iterator[str]:
    """The modules' texts; a file that is not UTF-8, or empty, is passed over."""
    for file in library_files(split):
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield text


def _modules(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - LEFT_OUT  # not even entered
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _split_of(name: str) -> Split:
    digest = hashlib.sha256(name.encode()).digest()
    return "validation" if int.from_bytes(digest[:8]) % VALIDATION_OF == 0 else "train"
