"""A checkpoint's folder: there is one whole, with the sums of its files, or there is none.

It is written as `.step-00000100.partial`. Once every file is on the disk and `checksums.json` beside them, it gets the
name `step-00000100`.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path

from gdn2.models.files import read_json
from gdn2.models.run_folder import step_of

CHECKSUMS = "checksums.json"
SHARD = re.compile(r"__(\d+)_\d+\.distcp")  # DCP's name for what a process writes


def partial(path: Path) -> Path:
    """Where a folder is while it is written or deleted."""
    return path.with_name(f".{path.name}.partial")


def steps_in(folder: Path) -> list[int]:
    """Steps that have a folder, whole or not, the newest first."""
    steps = map(step_of, folder.iterdir())
    return sorted((step for step in steps if step is not None), reverse=True)


def seal(folder: Path, rank: int) -> dict[str, str]:
    """Bring the files that a process wrote to the disk and return their sums; all but shards are the main one's."""
    mine = [path for path in folder.rglob("*") if path.is_file() and _writer(path) == rank]
    return {path.relative_to(folder).as_posix(): _sum(path, sync=True) for path in mine}


def publish(path: Path, checksums: dict[str, str]) -> None:
    """Give the finished folder its name, in place of a damaged one of that name."""
    written = partial(path)
    sums = written / CHECKSUMS
    sums.write_text(json.dumps(checksums, indent=2) + "\n")
    _sum(sums, sync=True)
    for inside in (written, *(entry for entry in written.rglob("*") if entry.is_dir())):
        _sync_folder(inside)
    if path.exists():
        shutil.rmtree(path)
    written.rename(path)
    _sync_folder(path.parent)


def damage(path: Path, part: str = "") -> str | None:
    """What is wrong with a checkpoint, or with what lies in one folder of it; None if all is what was written."""
    try:
        expected = read_json(path / CHECKSUMS)
    except (ValueError, OSError) as mistake:
        return str(mistake)
    if not expected:  # every checkpoint has files
        return f"{CHECKSUMS} names no file"
    looked_at = [name for name in expected if name.startswith(part)]
    with ThreadPoolExecutor() as threads:
        found = threads.map(lambda name: _mismatch(path / name, expected[name]), looked_at)
        return next((wrong for wrong in found if wrong), None)


def begin(path: Path) -> None:
    """Make an empty folder to write the checkpoint in."""
    abandon(path)
    partial(path).mkdir()


def abandon(path: Path) -> None:
    """Delete what was written of a checkpoint."""
    shutil.rmtree(partial(path), ignore_errors=True)


def discard(path: Path) -> None:
    """Delete a checkpoint, which is none from the first moment on; one that resists stays."""
    with suppress(OSError):
        path.rename(partial(path))
        abandon(path)


def sweep(folder: Path) -> None:
    """Make the folder of checkpoints, and delete what a killed process has left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)


def superfluous(steps: Iterable[int], keep: int, milestones: int | None) -> list[int]:
    """Steps to delete: all but the `keep` newest and the multiples of `milestones`."""
    older = sorted(steps, reverse=True)[keep:]
    return [step for step in older if milestones is None or step % milestones]


def _writer(path: Path) -> int:
    shard = SHARD.fullmatch(path.name)
    return int(shard[1]) if shard else 0


def _sum(path: Path, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return file_digest(file, "sha256").hexdigest()


def _mismatch(path: Path, expected: str) -> str | None:
    try:
        same = _sum(path) == expected
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None if same else f"{path.name} other than it was written"


def _sync_folder(path: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
