"""What is written to shards is read back, over their borders, and damage is named."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn2.data.shard_writer import ShardWriter
from gdn2.data.shards import FORMAT, TokenFolder, dtype_for

LENGTHS = [5, 1, 64, 63, 2, 130, 1, 1, 9]


def write(folder: Path, documents: list[np.ndarray], dtype: str = "uint16") -> list[dict[str, Any]]:
    writer = ShardWriter(folder, dtype, shard_tokens=65)
    shards = [writer.add(document) for document in documents]
    shards.append(writer.finish())
    writer.close()
    listed = [asdict(shard) for shard in shards if shard is not None]
    index = {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": 70000,
        "bos_id": None,
        "eos_id": 3,
        "skipped": 0,
        "tokens": sum(map(len, documents)),
        "documents": len(documents),
        "shards": listed,
    }
    (folder / "index.json").write_text(json.dumps(index))
    return listed


def random_documents(dtype: str) -> list[np.ndarray]:
    most = min(np.iinfo(dtype).max, 69_999)
    generator = np.random.default_rng(0)
    return [generator.integers(0, most, length, dtype, endpoint=True) for length in LENGTHS]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_range_is_read_back(tmp_path: Path, dtype: str) -> None:
    documents = random_documents(dtype)
    shards = write(tmp_path, documents, dtype)
    assert [shard["documents"] for shard in shards] == [3, 2, 1, 3]  # a shard ends once it has 65
    stream = np.concatenate(documents)
    starts = np.cumsum([0, *LENGTHS[:-1]])
    folder = TokenFolder(tmp_path, verify=True)
    assert (folder.tokens, folder.documents, folder.vocab_size) == (276, 9, 70000)
    assert (folder.bos_id, folder.eos_id) == (None, 3)
    for start in range(0, 277, 3):
        for count in {0, 1, 2, 63, 65, 130, 276 - start}:
            if start + count <= 276:
                read = folder.read(start, count)
                assert read.dtype == dtype
                assert np.array_equal(read, stream[start : start + count])
                inside = starts[(starts >= start) & (starts < start + count)] - start
                assert np.array_equal(folder.starts(start, count), inside)


def test_files_are_raw_little_endian(tmp_path: Path) -> None:
    documents = random_documents("uint16")
    shards = write(tmp_path, documents)
    first = b"".join(int(i).to_bytes(2, "little") for ids in documents[:3] for i in ids)
    assert (tmp_path / "00000.tokens").read_bytes() == first
    assert shards[0]["tokens_sha256"] == hashlib.sha256(first).hexdigest()
    starts = b"".join(place.to_bytes(8, "little") for place in (0, 5, 6))
    assert (tmp_path / "00000.starts").read_bytes() == starts
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint16"), (2**16, "uint16"), (65537, "uint32")])
def test_ids_fit_their_type(size: int, dtype: str) -> None:
    assert dtype_for(size) == dtype
    assert np.iinfo(dtype).max >= size - 1


@pytest.mark.parametrize("asked", [(-1, 2), (0, 277), (276, 1), (3, -1)])
def test_ranges_outside_are_refused(tmp_path: Path, asked: tuple[int, int]) -> None:
    write(tmp_path, random_documents("uint16"))
    with pytest.raises(ValueError, match=r"got tokens .*, expected at most 0 … 276$"):
        TokenFolder(tmp_path).read(*asked)


def damage(folder: Path, what: str) -> None:
    index = json.loads((folder / "index.json").read_text())
    match what:
        case "no index":
            (folder / "index.json").unlink()
        case "half an index":
            (folder / "index.json").write_text("{")
        case "format":
            (folder / "index.json").write_text(json.dumps({**index, "format": 9}))
        case "entry":
            (folder / "index.json").write_text(json.dumps({**index, "dtype": "int8"}))
        case "sum":
            (folder / "index.json").write_text(json.dumps({**index, "tokens": 5}))
        case "short":
            (folder / "00001.tokens").write_bytes(b"12")
        case "missing":
            (folder / "00001.starts").unlink()
        case "flipped":
            data = bytearray((folder / "00002.tokens").read_bytes())
            data[7] ^= 1
            (folder / "00002.tokens").write_bytes(data)
        case "starts":
            data = bytearray((folder / "00000.starts").read_bytes())
            (folder / "00000.starts").write_bytes(data[::-1])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "no index",
            "index.json: No such file or directory, expected a folder made by gdn2 prepare",
        ),
        ("half an index", "index.json: damaged, expected JSON"),
        ("format", "index.json: got another format, expected version 1"),
        ("entry", r"index.json: got a wrong entry \('int8'\)"),
        ("sum", "index.json: got 5 tokens, expected their sum"),
        ("short", "00001.tokens: got 2 bytes, expected 130 bytes"),
        ("missing", "00001.starts: got no file, expected 16 bytes"),
        ("flipped", "00002.tokens: damaged, its checksum is not that of index.json"),
        ("starts", "00000.starts: damaged, expected starts that ascend from 0"),
    ],
)
def test_damage_is_named(tmp_path: Path, what: str, message: str) -> None:
    write(tmp_path, random_documents("uint16"))
    damage(tmp_path, what)
    with pytest.raises(ValueError, match=message):
        TokenFolder(tmp_path, verify=what == "flipped").starts(0, 3)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [np.array([1, 2, 3], "uint32"), np.array([4, 70000], "uint32")], "uint32")
    folder = TokenFolder(tmp_path)
    assert folder.read(0, 4).tolist() == [1, 2, 3, 4]
    message = r"tokens 3 … 4: got id 70000, expected at most 69999$"
    with pytest.raises(ValueError, match=message):
        folder.read(3, 2)


def test_an_empty_range_and_an_unfinished_shard_leave_nothing(tmp_path: Path) -> None:
    write(tmp_path, random_documents("uint16"))
    folder = TokenFolder(tmp_path)
    assert folder.read(276, 0).tolist() == folder.starts(40, 0).tolist() == []
    before = sorted(file.name for file in tmp_path.iterdir())
    writer = ShardWriter(tmp_path, "uint16", 65, first=4)
    assert writer.add(np.arange(3)) is None
    writer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == before
