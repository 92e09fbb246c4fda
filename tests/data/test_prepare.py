"""Prepared shards hold the tokens of the texts, the same ones however often the work was interrupted."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gdn2.data.prepare import Progress, prepare
from gdn2.data.shard_writer import ShardWriter
from gdn2.data.shards import TokenFolder
from gdn2.data.tokenizers import load_tokenizer
from tests.data.samples import TEXTS, save_json, save_lines, save_sentencepiece, save_tokenizer


def save_input(folder: Path) -> str:
    """Four files: two of JSON lines, a text, and an empty one."""
    place = folder / "input"
    place.mkdir()
    save_lines(place / "a.jsonl")
    save_lines(place / "c.jsonl", TEXTS[::-1])
    (place / "b.txt").write_text("a text\nof two lines", newline="")
    (place / "d.txt").touch()
    return str(place)


EXPECTED = [text for text in [*TEXTS, "a text\nof two lines", *TEXTS[::-1]] if text]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def read_back(folder: Path) -> list[list[int]]:
    opened = TokenFolder(folder, verify=True)
    stream = opened.read(0, opened.tokens).tolist()
    edges = [*opened.starts(0, opened.tokens).tolist(), opened.tokens]
    return [stream[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("kind", ["bytes", "json", "sentencepiece"])
@pytest.mark.parametrize(
    ("bos", "eos"), [("auto", "none"), ("none", "auto"), ("auto", "auto"), ("none", "none")]
)
def test_documents_are_whole(tmp_path: Path, kind: str, bos: str, eos: str) -> None:
    name = save_tokenizer(tmp_path, kind)
    tokenizer = load_tokenizer(name)
    out = tmp_path / "made" / "out"
    done = prepare(
        [save_input(tmp_path)], out, tokenizer=name, bos=bos, eos=eos, workers=1, shard_tokens=300
    )
    before = [tokenizer.bos_id] if bos == "auto" and kind != "bytes" else []
    after = [tokenizer.eos_id] if eos == "auto" and kind != "bytes" else []
    encoded = [ids.tolist() for ids in tokenizer.encode_texts(EXPECTED)]
    assert read_back(out) == [[*before, *ids, *after] for ids in encoded]
    folder = TokenFolder(out)
    assert (folder.vocab_size, folder.documents) == (tokenizer.vocab_size, len(EXPECTED))
    assert (done.tokens, done.documents, done.skipped) == (folder.tokens, folder.documents, 0)
    assert len(list(out.glob("*.tokens"))) > 2
    again = load_tokenizer(out)
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)


def test_tokens_may_be_named(tmp_path: Path) -> None:
    name = str(save_sentencepiece(tmp_path / "tokenizer.model"))
    options: dict[str, Any] = {"tokenizer": name, "workers": 1}
    prepare([save_input(tmp_path)], tmp_path / "o", bos="</s>", eos="<s>", **options)
    assert [(ids[0], ids[-1]) for ids in read_back(tmp_path / "o")] == [(2, 1)] * len(EXPECTED)
    with pytest.raises(ValueError, match=r"^eos: got '<e>', expected auto, none or a token"):
        prepare([save_input(tmp_path / "o")], tmp_path / "p", eos="<e>", **options)


def test_two_processes_write_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdn2.data.encoding.BATCH", 100)
    name, given = str(save_json(tmp_path / "tokenizer.json")), save_input(tmp_path)
    for workers in (1, 2):
        prepare([given], tmp_path / str(workers), tokenizer=name, workers=workers, shard_tokens=300)
    assert content(tmp_path / "1") == content(tmp_path / "2")


class Killed(BaseException):
    """Stands for a kill: nothing of the package catches it."""


def call_until_done(call: Callable[[], object], most: int) -> int:
    """How often a call was killed before it went through."""
    for kills in range(most):
        try:
            call()
        except Killed:
            continue
        return kills
    raise AssertionError(f"killed {most} times and not done")


@pytest.mark.parametrize("patience", [1, 2, 3, 5, 8])
def test_a_preparation_killed_at_any_write_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    """Each run is killed before its n-th rename or end; the runs after that go on."""
    given = save_input(tmp_path)
    options: dict[str, Any] = {"workers": 1, "shard_tokens": 600}
    prepare([given], tmp_path / "whole", **options)
    rename, unlink = Path.rename, Path.unlink
    left = 0

    def count(act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return act(*arguments, **named)

        return counted

    monkeypatch.setattr(Path, "rename", count(rename))
    monkeypatch.setattr(Path, "unlink", count(unlink))
    monkeypatch.setattr(ShardWriter, "close", lambda self: None)  # nobody tidies up after a kill

    runs = 0

    def run() -> None:
        nonlocal left, runs
        runs += 1
        left = patience + runs // 3
        prepare([given], tmp_path / "killed", **options)

    assert call_until_done(run, 200) > 0
    monkeypatch.undo()
    prepare([given], tmp_path / "killed", **options)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_finished_shards_are_not_made_again(tmp_path: Path) -> None:
    given, seen = save_input(tmp_path), []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.documents == 9:
            raise Killed

    options: dict[str, Any] = {"workers": 1, "shard_tokens": 600}
    with pytest.raises(Killed):
        prepare([given], tmp_path / "out", report=stop, **options)
    record = json.loads((tmp_path / "out" / "progress.json").read_text())
    kept = sum(shard["documents"] for shard in record["shards"])
    assert 0 < kept < 9
    times = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("0*.tokens")}
    seen.clear()
    done = prepare([given], tmp_path / "out", report=seen.append, **options)
    assert [progress.documents for progress in seen[:2]] == [kept, kept + 1]
    assert (seen[-1].read, seen[-1].tokens) == (seen[-1].size, done.tokens)
    for name, moment in times.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == moment
    assert prepare([given], tmp_path / "out", **options) == done  # nothing left to do


def test_bad_lines_stop_or_are_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    good = '{"text": "' + "x" * 50 + '"}\n'
    file.write_text(good * 3 + "bad\n" + good * 2 + "bad\n")
    options: dict[str, Any] = {"workers": 1, "shard_tokens": 100}
    with pytest.raises(ValueError, match=r"a.jsonl, line 4: got invalid JSON"):
        prepare([str(file)], tmp_path / "out", **options)
    assert not (tmp_path / "out" / "index.json").exists()
    done = prepare([str(file)], tmp_path / "out", skip_bad=True, **options)
    assert (done.skipped, done.documents, done.tokens) == (2, 5, 250)
    prepare([str(file)], tmp_path / "again", skip_bad=True, **options)
    assert content(tmp_path / "out") == content(tmp_path / "again")


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos": "<|endoftext|>"}, "eos_id None, got 0"),
        ({"tokenizer": "bytes"}, "tokenizer {'name': 'tokenizer.json', .*got {'name': 'bytes'"),
        ({"shard_tokens": 9}, "shard_tokens 300, got 9"),
        ({"field": "body"}, "field text, got body"),
        ({"inputs": ["python"]}, r"inputs {'name': 'a.jsonl', .*}, got {'name': 'python'"),
        ({"inputs": 2}, r"inputs no more, got {'name': 'a.jsonl'"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, finished: bool
) -> None:
    name, given = str(save_json(tmp_path / "tokenizer.json")), save_input(tmp_path)
    settings: dict[str, Any] = {"inputs": [given], "tokenizer": name, "shard_tokens": 300}

    def stop(progress: Progress) -> None:
        if progress.documents == 8 and not finished:
            raise Killed

    try:
        prepare(out=tmp_path / "out", workers=1, report=stop, **settings)
    except Killed:
        assert not finished
    before = content(tmp_path / "out")
    if changes.get("inputs") == 2:
        changes = {"inputs": [given, given]}
    with pytest.raises(ValueError, match=f"^out: .*out was prepared with {message}.*; expected"):
        prepare(out=tmp_path / "out", workers=1, **{**settings, **changes})
    assert content(tmp_path / "out") == before


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    given, out = save_input(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    with pytest.raises(ValueError, match=r"^out: got .*out with tokenizer.json in it, expected"):
        prepare([given], out, workers=1)
    assert content(out) == {"tokenizer.json": b"mine"}
    with pytest.raises(ValueError, match=r"^out: got .*tokenizer.json', expected a folder"):
        prepare([given], out / "tokenizer.json", workers=1)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    given, out = save_input(tmp_path), tmp_path / "out"
    out.mkdir()
    lock = os.open(out, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"^out: .*out is being written by another process"):
        prepare([given], out, workers=1)
    os.close(lock)
    assert prepare([given], out, workers=1).documents == len(EXPECTED)


def test_one_input_is_given_in_a_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^inputs: got 'notes.txt', expected a list of them$"):
        prepare("notes.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = save_input(tmp_path)
    options: dict[str, Any] = {"workers": 1, "shard_tokens": 600}
    prepare([given], tmp_path / "whole", **options)
    fsync, left = os.fsync, 12

    def fill(file: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(ValueError, match=r"out: No space left on device; finished shards are kept"):
        prepare([given], tmp_path / "out", **options)
    monkeypatch.undo()
    assert (tmp_path / "out" / "00000.tokens").exists()
    prepare([given], tmp_path / "out", **options)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers: got 0, expected at least 1"),
        ({"shard_tokens": -1}, "shard_tokens: got -1, expected at least 1"),
        ({"inputs": []}, "inputs: got no text at all, expected at least one document"),
        ({"tokenizer": "nowhere"}, "tokenizer: got 'nowhere', expected"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = {"inputs": [save_input(tmp_path)], "out": tmp_path / "out", "workers": 1}
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(**{**settings, **changes})
    assert not (tmp_path / "out" / "index.json").exists()


def test_texts_without_tokens_are_no_documents(tmp_path: Path) -> None:
    save_lines(tmp_path / "a.jsonl", ["", "", ""])
    with pytest.raises(ValueError, match=r"^inputs: got no text at all"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", workers=1)
