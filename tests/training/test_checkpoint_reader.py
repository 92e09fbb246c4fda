"""Checkpoints of others are read without executing anything that they hold."""

import io
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import file_digest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from gdn2.training.checkpoint_reader import CheckpointReader
from gdn2.training.checkpoints import Checkpoints
from gdn2.training.loop import train
from tests.training.runs import config
from tests.training.spawn import alone, in_processes
from tests.training.test_checkpoints import leg, loaded_step, save
from tests.training.tiny import build

Pickled = Callable[[Metadata, Path], bytes]


class Bomb:
    """What a pickle that executes code looks like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def dotted(_: Metadata, harm: Path) -> bytes:
    """A function by way of a module that a known one imports."""
    name = b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n"
    return b"\x80\x04" + name + b"(V" + str(harm).encode() + b"\ntR."


def with_other(good: Metadata, **parts: Any) -> bytes:
    return pickle.dumps(replace(good, **parts))


REFUSED: dict[str, tuple[Pickled, str]] = {
    "code alone": (lambda _, harm: pickle.dumps(Bomb(harm)), f"{os.name}.mkdir"),
    "code inside": (
        lambda good, harm: pickle.dumps(replace(good, planner_data=Bomb(harm))),
        f"{os.name}.mkdir",
    ),
    "a module's module": (dotted, "torch.distributed.checkpoint.metadata.os.mkdir"),
    "builtins": (lambda *_: b"cbuiltins\neval\n(V1\ntR.", "builtins.eval"),
    "objects, which torch would unpickle": (
        lambda good, _: pickle.dumps(replace(good, state_dict_metadata={"a": BytesStorageMetadata()})),
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    ),
    "something of torch": (lambda *_: b"ctorch\nload\n.", "torch.load"),
    "another table": (lambda *_: pickle.dumps({"a": 1}), "a dict"),
    "no table": (lambda good, _: with_other(good, state_dict_metadata=None), "another kind of stat.*"),
    "a list": (lambda good, _: with_other(good, storage_data=[1]), "another kind of storage_data"),
    "no pickle": (lambda *_: b"no pickle", r"\S.*"),
    "nothing": (lambda *_: b"", "Ran out of input"),
}  # fmt: skip


def rewrite(file: Path, content: bytes) -> None:
    """Change a checkpoint's file and its sum, as somebody who wants it to be read."""
    file.write_bytes(content)
    sums = file.parent / "checksums.json"
    table = json.loads(sums.read_text())
    with file.open("rb") as opened:
        table[file.name] = file_digest(opened, "sha256").hexdigest()
    sums.write_text(json.dumps(table))


@pytest.mark.parametrize("kind", REFUSED)
def test_a_pickle_is_never_executed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, found = REFUSED[kind]
    harm, file = tmp_path / "harm", tmp_path / "run" / "step-00000002" / ".metadata"
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path / "run", world, keep=2)
        for step in (1, 2):
            save(checkpoints, step, *run)
        rewrite(file, make(FileSystemReader(file.parent).read_metadata(), harm))
        with pytest.raises(
            ValueError, match=rf"\.metadata: got {found}, expected metadata of tensors and no code$"
        ) as caught:
            CheckpointReader(file.parent).read_metadata()
        assert "\n" not in str(caught.value)
        assert loaded_step(checkpoints, *run) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "expected a whole checkpoint; the one before is taken" in said
    assert not harm.exists()


def test_code_among_the_data_is_not_executed(tmp_path: Path) -> None:
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path / "run", world, keep=2)
        save(checkpoints, 1, *run)
        newest = checkpoints.newest()
        assert newest is not None
        (file,) = newest.path.glob("*.distcp")
        bomb = io.BytesIO()
        torch.save(Bomb(tmp_path / "harm"), bomb)
        metadata = FileSystemReader(newest.path).read_metadata()
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(bomb.getvalue())
        rewrite(file, bomb.getvalue())
        rewrite(newest.path / ".metadata", pickle.dumps(metadata))
        with pytest.raises(
            ValueError, match=r"step-00000001: got something other than tensors, or code, .* whole"
        ) as caught:
            checkpoints.load(newest, *run)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "harm").exists()


def test_a_run_with_code_alone_does_not_go_on(tmp_path: Path) -> None:
    train(config(tmp_path / "run"), until=1)
    file = tmp_path / "run" / "checkpoints" / "step-00000001" / ".metadata"
    whole = file.read_bytes()
    rewrite(file, pickle.dumps(Bomb(tmp_path / "harm")))
    with pytest.raises(RuntimeError, match=r"^no checkpoint in .* is whole; move that folder away"):
        train(config(tmp_path / "run"))
    assert not (tmp_path / "harm").exists()
    rewrite(file, whole)
    assert train(config(tmp_path / "run"), until=2).step == 2


@pytest.mark.parametrize("place", ["../../../elsewhere", "/elsewhere", "model/elsewhere", ".."])
def test_files_elsewhere_are_not_read(place: str, tmp_path: Path) -> None:
    """Nobody has their checksums."""
    train(config(tmp_path / "run"), until=1)
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = place
    rewrite(path / ".metadata", pickle.dumps(metadata))
    message = f"{path}/.metadata: got {place!r}, expected the name of a file beside it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CheckpointReader(path).read_metadata()
    with pytest.raises(RuntimeError, match=r"^no checkpoint in .* is whole; move that folder away"):
        train(config(tmp_path / "run"))


@pytest.mark.parametrize("name", ["ema.norm.weight", "optimiser.nobody.exp_avg"])
def test_tensors_of_another_kind_are_named(name: str, tmp_path: Path) -> None:
    train(config(tmp_path / "run"), until=1)
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    metadata = FileSystemReader(path).read_metadata()
    tensors = metadata.state_dict_metadata
    tensors[name] = tensors["optimiser.norm.weight.exp_avg"]
    rewrite(path / ".metadata", pickle.dumps(metadata))
    message = f"{path}: got {name}, expected the model and its optimiser alone"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train(config(tmp_path / "run"))


def test_a_place_of_another_kind_is_named(tmp_path: Path) -> None:
    train(config(tmp_path / "run"), until=1)
    file = tmp_path / "run" / "checkpoints" / "step-00000001" / "extra.json"
    place = json.loads(file.read_text())
    wrong = {"more": ": unknown name, expected ", "skips": ": got '0', expected an integer"}
    for name, said in wrong.items():
        rewrite(file, json.dumps({**place, name: "0"}).encode())
        with pytest.raises(ValueError, match=f"^{re.escape(f'{file}.{name}{said}')}"):
            train(config(tmp_path / "run"))


@pytest.mark.parametrize(("processes", "replicate"), [(1, 1), (2, 1), (4, 2)])
def test_whole_metadata_are_what_torch_reads(
    processes: int, replicate: int, tmp_path: Path
) -> None:
    if processes == 1:
        with alone() as world:
            leg(world, tmp_path, 0, 1)
    else:
        in_processes(processes, leg, tmp_path, 0, 1, replicate=replicate)
    ours, theirs = (
        reader(tmp_path / "step-00000001").read_metadata()
        for reader in (CheckpointReader, FileSystemReader)
    )
    assert replace(ours, storage_meta=None) == replace(theirs, storage_meta=None)


def test_dtypes_and_paths_of_other_systems(tmp_path: Path) -> None:
    """Every dtype is a name of torch; paths are never followed."""
    dtypes = [torch.bfloat16, torch.int64, torch.float8_e4m3fn]
    for module in (b"pathlib", b"pathlib._local"):
        path = b"c" + module + b"\nWindowsPath\n(VC:\ntR."
        (tmp_path / ".metadata").write_bytes(path)
        with pytest.raises(ValueError, match=r"got a Pure\w+Path, expected metadata"):
            CheckpointReader(tmp_path).read_metadata()
    written = Metadata({}, dtypes, {}, storage_meta=StorageMeta(checkpoint_id=tmp_path))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    assert CheckpointReader(tmp_path).read_metadata().planner_data == dtypes
