"""`gdn2 prepare` on the command line: what it writes and says, and that a kill costs nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn2.cli import app
from gdn2.data.shards import TokenFolder
from tests.data.samples import TEXTS, save_json, save_lines


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["prepare", *map(str, words)])


def test_text_becomes_shards(tmp_path: Path) -> None:
    lines, name = save_lines(tmp_path / "a.jsonl"), save_json(tmp_path / "tokenizer.json")
    out = tmp_path / "out"
    options = ["--tokenizer", name, "--eos", "auto", "--workers", 1, "--shard-tokens", 300]
    result = run(lines, lines, "--out", out, *options)
    assert result.exit_code == 0, result.output
    folder = TokenFolder(out, verify=True)
    assert folder.documents == 2 * (len(TEXTS) - 1)
    assert result.stdout == f"{out}: {folder.tokens:,} tokens in {folder.documents} documents\n"
    index = json.loads((out / "index.json").read_text())
    assert (index["bos_id"], index["eos_id"], index["shard_tokens"]) == (0, 0, 300)
    assert run(lines, lines, "--out", out, *options).stdout == result.stdout  # already there


def test_checksums_are_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    lines, out = save_lines(tmp_path / "a.jsonl"), tmp_path / "out"
    words = [lines, "--out", out, "--workers", 1]
    assert run(*words, "--verify").stdout.endswith(" documents, as their checksums say\n")
    file = out / "00000.tokens"
    file.write_bytes(file.read_bytes()[::-1])
    assert run(*words).exit_code == 0
    result = run(*words, "--verify")
    assert result.exit_code == 2
    expected = f"error: {file}: damaged, its checksum is not that of index.json"
    assert expected in result.stderr.splitlines()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "x"}\n{"body": 3}\n')
    result = run(file, "--out", tmp_path / "out", "--field", "body", "--workers", 1)
    assert result.exit_code == 2
    message = f"error: {file}, line 2: field 'body': got int, expected a string"
    assert message in result.stderr.splitlines()
    said = run(file, "--out", file).stderr
    assert said.startswith("error: out: got ") and said.endswith("expected a folder to write to\n")
    fixed = ["--field", "body", "--workers", 1, "--skip-bad"]
    result = run(file, "--out", tmp_path / "out", *fixed)
    assert result.stdout == f"{tmp_path / 'out'}: 1 tokens in 1 documents, 1 bad lines skipped\n"


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    """Killed once a shard is whole: its processes are gone, and the same command gives the same files."""
    lines = save_lines(tmp_path / "a.jsonl", TEXTS * 400)
    name = save_json(tmp_path / "tokenizer.json")
    options = ["--tokenizer", name, "--workers", 2, "--shard-tokens", 20_000]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "gdn2", "prepare", lines, "--out", out, *options]
    started = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    while not (out / "00001.tokens").exists() and started.poll() is None:
        time.sleep(0.01)
    workers = children(started.pid)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert workers
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "processes outlive the command"
        time.sleep(0.05)
    assert not (out / "index.json").exists()
    assert run(lines, "--out", out, *options[:2], "--workers", 1, *options[4:]).exit_code == 0
    whole = tmp_path / "whole"
    assert run(lines, "--out", whole, *options[:2], "--workers", 1, *options[4:]).exit_code == 0
    names = sorted(os.listdir(whole))
    assert names == sorted(os.listdir(out))
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)


def children(pid: int) -> list[str]:
    """The processes that a process has started."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for thread in threads for child in thread.read_text().split()]


def test_an_interrupted_command_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gdn2.data.prepare.prepare", interrupted)
    result = run("python", "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr == "Ctrl-C: finished shards are kept, the same command goes on\n"
