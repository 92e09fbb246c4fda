"""Every kind of input gives the same texts, from any place on; bad lines are named or counted."""

import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gdn2.data.corpus import documents as library_documents
from gdn2.data.sources import Place, open_parts, read_documents
from tests.data.samples import TEXTS, save_lines

START = Place(0, 0)


def texts(*inputs: object, start: Place = START, **options: Any) -> list[str]:
    parts = open_parts([str(one) for one in inputs], **options)
    return [document.text for document in read_documents(parts, start)]


def save_parquet(file: Path, column: Any, name: str = "text") -> Path:
    pyarrow, parquet = (pytest.importorskip(n) for n in ("pyarrow", "pyarrow.parquet"))
    table = pyarrow.table({"id": list(range(len(column))), name: column})
    parquet.write_table(table, file, row_group_size=3)
    return file


def save(folder: Path, kind: str) -> Path:
    """The sample texts in a file of a kind."""
    lines = save_lines(folder / "plain.jsonl").read_bytes()
    match kind:
        case "gz":
            file = folder / "a.jsonl.gz"
            file.write_bytes(gzip.compress(lines[:100]) + gzip.compress(lines[100:]))
        case "zst":  # three frames, one of them without its size
            file = folder / "a.json.zst"
            zstandard = pytest.importorskip("zstandard")
            pack = zstandard.ZstdCompressor()
            stream = zstandard.ZstdCompressor().compressobj()
            frame = stream.compress(lines[400:]) + stream.flush()
            file.write_bytes(pack.compress(lines[:77]) + pack.compress(lines[77:400]) + frame)
        case "parquet":
            file = save_parquet(folder / "a.parquet", TEXTS)
        case "large strings":
            pyarrow = pytest.importorskip("pyarrow")
            file = save_parquet(folder / "a.parquet", pyarrow.array(TEXTS, pyarrow.large_string()))
        case "blank lines":
            file = folder / "a.ndjson"
            file.write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n\n \n"))
        case _:
            file = folder / "plain.jsonl"
    return file


@pytest.mark.parametrize("kind", ["plain", "gz", "zst", "parquet", "large strings", "blank lines"])
def test_texts_are_read_from_any_place_on(tmp_path: Path, kind: str) -> None:
    file = save(tmp_path, kind)
    parts = open_parts([str(file), str(file)])
    found = list(read_documents(parts, START))
    assert [document.text for document in found] == TEXTS * 2
    for number, document in enumerate(found):
        rest = list(read_documents(parts, document.after))
        assert rest == found[number + 1 :]
    assert all(a.read <= b.read for a, b in pairwise(found))
    assert 0 <= 2 * file.stat().st_size - found[-1].read <= 3  # blank lines may follow


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    text = "first\r\nsecond é\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "c.txt.zst").write_bytes(zstandard.compress(text.encode()))
    assert texts(tmp_path) == [text] * 3
    assert texts(tmp_path, start=Place(1, 1)) == [text]


def test_folders_are_searched_in_order(tmp_path: Path) -> None:
    names = ["z.txt", "a/b.txt", "a/a.jsonl", "a-b.TXT", "README.md", ".cache/x.txt", "b/c/d.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if "json" in name else name)
    order = ["a-b.TXT", "a/a.jsonl", "a/b.txt", "b/c/d.txt", "z.txt"]
    assert texts(tmp_path) == order
    assert [part.name for part in open_parts([str(tmp_path)])] == order
    assert [part.name for part in open_parts([str(tmp_path / "a/b.txt")])] == ["b.txt"]


def test_a_search_passes_over_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a/b/c.txt", "a/b/d/e.txt", "a/bc.txt", "a/bc/d.txt", "c/a/b/d.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert texts(".", without=Path("a/b")) == texts(tmp_path, without=Path("a/b")) == names[2:]
    assert texts(".", without=tmp_path / "nowhere") == names
    assert texts("a/b/c.txt", without=Path("a/b")) == names[:1]  # asked for by name
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert texts("link", without=Path("a/b")) == ["a/bc.txt", "a/bc/d.txt"]


def test_the_standard_library_is_an_input() -> None:
    own = list(library_documents())
    assert texts("python") == own
    assert texts("python", start=Place(0, 7)) == own[7:]


def test_other_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1, "content": "x"}\n{"content": "y"}\n')
    save_parquet(tmp_path / "b.parquet", ["z"], "content")
    assert texts(tmp_path, field="content") == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "got invalid JSON"),
        (b"nonsense", "got invalid JSON"),
        (b"[" * 100_000, "got invalid JSON"),
        (b"[1]", "got list, expected an object"),
        (b'{"title": "x"}', "no field 'text', expected it among 'title'"),
        (b'{"text": null}', "field 'text': got NoneType, expected a string"),
        (b'{"text": 3}', "field 'text': got int, expected a string"),
        (b'{"text": "\xff"}', "got text that is not UTF-8"),
        (b'{"text": "\\ud83d"}', "got text that is not UTF-8"),
    ],
)
def test_bad_lines_are_named_or_counted(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "x"}\n\n' + line + b'\n{"text": "y"}\n' + line)
    parts = open_parts([str(file)])
    with pytest.raises(ValueError, match=f"a.jsonl, line 3: {message}") as mistake:
        list(read_documents(parts, START))
    assert "\n" not in str(mistake.value)
    found = list(read_documents(parts, START, 5, skip_bad=True))
    assert [(document.text, document.skipped) for document in found] == [
        ("x", 5), ("", 6), ("y", 6), ("", 7)
    ]  # fmt: skip


def test_bad_text_files_and_cells(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x\ny\nz\xff")
    with pytest.raises(ValueError, match=r"a.txt, line 3: got text that is not UTF-8"):
        texts(tmp_path / "a.txt")
    rows = save_parquet(tmp_path / "a.parquet", ["x", None, "y", "z", None])
    with pytest.raises(ValueError, match=r"a.parquet, row 2: field 'text': got NoneType"):
        texts(rows)
    found = list(read_documents(open_parts([str(rows)]), Place(0, 1), 1, skip_bad=True))
    assert [document.text for document in found] == ["", "y", "z", ""]
    assert found[-1].skipped == 3
    with pytest.raises(ValueError, match=r"no column 'body', expected one of id, text$"):
        texts(rows, field="body")


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
@pytest.mark.parametrize("how", ["short", "flipped"])
def test_damaged_files_are_named(tmp_path: Path, kind: str, how: str) -> None:
    file = save(tmp_path, kind)
    data = bytearray(file.read_bytes())
    data[2 if kind != "parquet" else -2] ^= 0xFF
    file.write_bytes(data if how == "flipped" else file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"{file.name}: damaged \(.+\), expected a"):
        texts(file)


def test_damage_inside_a_table_is_named_too(tmp_path: Path) -> None:
    """Wherever it is, the library says it in one way or another."""
    file = save(tmp_path, "parquet")
    whole, found = file.read_bytes(), texts(file)
    for at in range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 0xFF
        file.write_bytes(data)
        try:
            assert len(texts(file)) == len(found)  # flips that nobody can see
        except ValueError as said:
            assert str(said).startswith(f"{file}") and "\n" not in str(said)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.zst", "a.jsonl.zst"])
def test_empty_archives_are_damaged(tmp_path: Path, name: str) -> None:
    """A whole one has a header, even of nothing; bad lines may be skipped, but not this."""
    file = tmp_path / name
    file.touch()
    parts = open_parts([str(file)])
    with pytest.raises(ValueError, match=rf"{name}: damaged \(it is empty\), expected a whole"):
        list(read_documents(parts, START, skip_bad=True))
    pack = gzip if name.endswith(".gz") else pytest.importorskip("zstandard")
    file.write_bytes(pack.compress(b""))
    assert not any(texts(file))


def test_unknown_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.parquet.gz").touch()
    for name in ("a.csv", "b.parquet.gz", "."):
        with pytest.raises(ValueError, match=r"no file of a known kind, expected .txt, .jsonl"):
            open_parts([str(tmp_path / name)])
    with pytest.raises(ValueError, match=r"input '.*nowhere': no such file or folder"):
        open_parts([str(tmp_path / "nowhere")])


@pytest.mark.parametrize("given", ["", "hf://"])
def test_inputs_without_a_name_are_refused(given: str) -> None:
    """As a path, nothing at all is the current folder."""
    with pytest.raises(
        ValueError, match=rf"^inputs: got '{given}', expected a file, a folder, hf:"
    ):
        open_parts(["python", given])


@pytest.mark.parametrize(
    ("module", "kind"), [("zstandard", "zst"), ("pyarrow", "parquet"), ("datasets", "hub")]
)
def test_missing_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, kind: str
) -> None:
    given = "hf://some/name" if kind == "hub" else save(tmp_path, kind)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"needs the library {module}, .*gdn2\[data\]"):
        texts(given)


def test_datasets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads a local folder as it reads one of the hub."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    save_lines(tmp_path / "data" / "train.jsonl")
    given = f"hf://{tmp_path / 'data'}"
    assert texts(given) == TEXTS
    assert texts(given, start=Place(0, 5)) == TEXTS[5:]
    with pytest.raises(ValueError, match=r"hf://.*data.*, row 1: no field 'body', expected it"):
        texts(given, field="body")
    with pytest.raises(ValueError, match=r"hf://.*data.* test: .*split") as mistake:
        texts(given, split="test")
    assert "\n" not in str(mistake.value)
