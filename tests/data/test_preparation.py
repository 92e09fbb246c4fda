"""What the next call makes of a folder that an earlier one has left: it goes on, begins anew or refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from gdn2.data.prepare import Progress, prepare
from gdn2.data.sources import open_parts
from tests.data.samples import TEXTS, save_json, save_lines, save_sentencepiece


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def stop(progress: Progress) -> None:
    if progress.documents == 2:
        raise KeyboardInterrupt


def begin(given: str, out: Path, finished: bool) -> None:
    """Prepare a folder, or only its first shard."""
    try:
        prepare(
            [given], out, workers=1, shard_tokens=50, report=(lambda _: None) if finished else stop
        )
    except KeyboardInterrupt:
        assert not finished
    assert (out / "00000.tokens").exists()
    assert (out / "index.json").exists() == finished


def test_an_attempt_without_shards_may_be_corrected(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"content": "x"}\n')
    with pytest.raises(ValueError, match=r"no field 'text'"):
        prepare([str(file)], tmp_path / "out", workers=1)
    changes: dict[str, Any] = {"field": "content", "shard_tokens": 9, "workers": 1}
    for out in ("out", "new"):
        assert prepare([str(file)], tmp_path / out, **changes).documents == 1
    assert content(tmp_path / "out") == content(tmp_path / "new")


def test_a_corrected_tokenizer_is_alone(tmp_path: Path) -> None:
    """Of several in a folder, the first would be taken for that of the shards."""
    save_lines(tmp_path / "a.jsonl")
    wrong, right = save_json(tmp_path / "tokenizer.json"), save_sentencepiece(tmp_path / "b.model")
    given, out = str(tmp_path / "a.jsonl"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare([given], out, tokenizer=str(wrong), workers=1, report=stop)
    assert (out / "tokenizer.json").exists()
    for folder in (out, tmp_path / "new"):
        prepare([given], folder, tokenizer=str(right), workers=1)
    assert content(out) == content(tmp_path / "new")


@pytest.mark.parametrize("finished", [True, False])
def test_other_content_of_the_same_name_and_size_is_refused(tmp_path: Path, finished: bool) -> None:
    """And the same content is known again, wherever it lies."""
    texts = {"a": TEXTS, "copy": TEXTS, "b": [text.swapcase() for text in TEXTS]}
    for folder, chosen in texts.items():
        (tmp_path / folder).mkdir()
        save_lines(tmp_path / folder / "x.jsonl", chosen)
    out = tmp_path / "out"
    options: dict[str, Any] = {"workers": 1, "shard_tokens": 50}
    begin(str(tmp_path / "a" / "x.jsonl"), out, finished)
    before = content(out)
    said = r"^out: .*out was prepared with inputs {'name': 'x.jsonl', .*}, got {.*}; expected the"
    with pytest.raises(ValueError, match=said):
        prepare([str(tmp_path / "b" / "x.jsonl")], out, **options)
    assert content(out) == before
    done = prepare([str(tmp_path / "copy" / "x.jsonl")], out, **options)
    assert done.documents == len(list(filter(None, TEXTS)))


@pytest.mark.parametrize("finished", [True, False])
def test_folders_of_before_there_were_checksums_go_on(tmp_path: Path, finished: bool) -> None:
    given, out = str(save_lines(tmp_path / "a.jsonl")), tmp_path / "out"
    begin(given, out, finished)
    record = out / ("index.json" if finished else "progress.json")
    old = json.loads(record.read_text())
    for entry in old["inputs"]:
        del entry["checksum"]
    record.write_text(json.dumps(old))
    done = prepare([given], out, workers=1, shard_tokens=50)
    assert done == prepare([given], tmp_path / "new", workers=1, shard_tokens=50)
    with pytest.raises(
        ValueError, match=r"^out: .* was prepared with inputs no more, got {'name': 'a"
    ):
        prepare([given, given], out, workers=1, shard_tokens=50)


@pytest.mark.parametrize("size", [0, 1, 4, 7, 8, 9, 100])
def test_a_checksum_is_of_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("gdn2.data.parts.END", 4)
    file, data = tmp_path / "a.txt", bytes(range(size))

    def checksum(content: bytes) -> str | None:
        file.write_bytes(content)
        return open_parts([str(file)])[0].checksum

    own = checksum(data)
    assert own == checksum(data)
    for place in {*range(size)[:4], *range(size)[-4:]}:
        assert checksum(data[:place] + b"\xff" + data[place + 1 :]) != own


def test_a_folder_within_the_input_is_no_input(tmp_path: Path) -> None:
    """Neither when it is begun, nor when it goes on, nor when it is finished."""
    save_lines(tmp_path / "a.jsonl")
    out = tmp_path / "shards"
    begin(str(tmp_path), out, finished=False)
    done = prepare([str(tmp_path)], out, workers=1, shard_tokens=50)
    assert done == prepare([str(tmp_path)], out, workers=1, shard_tokens=50)
    assert done.documents == len(list(filter(None, TEXTS)))
    with pytest.raises(ValueError, match=r"^out: got .* in it, expected a new folder"):
        prepare([str(tmp_path)], tmp_path, workers=1)
