"""`gdn2 eval`: from the command line to results, in one place or by way of a file of requests."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn2.cli import app
from gdn2.layers.config import DeltaConfig
from gdn2.models.config import ModelConfig
from gdn2.models.folder import save_model
from gdn2.models.language_model import LanguageModel
from tests.data.samples import save_json
from tests.evals.cases import SHARED
from tests.evals.rows import write_folder

pytest.importorskip("lm_eval")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model and data."""
    save_json(tmp_path / "tokenizer.json")
    config = ModelConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        cell=(DeltaConfig(num_heads=1, key_head_dim=8, value_head_dim=8),),
        vocab_size=400,
    )
    save_model(LanguageModel(config), tmp_path / "model", tokenizer=tmp_path / "tokenizer.json")
    write_folder(tmp_path / "data")
    return tmp_path


def words(place: Path, *options: object) -> list[str]:
    given = ["eval", place / "model", "--data", place / "data", "--device", "cpu", *options]
    return [str(word) for word in given]


def run(place: Path, *options: object) -> Any:
    return CliRunner().invoke(app, words(place, *options))


def metrics(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "results.json").read_text())
    return {name: task["metrics"] for name, task in record["tasks"].items()}


def test_suites_and_what_they_lack(place: Path) -> None:
    options = ["--suite", "lm", "--suite", "commonsense", "--suite", "recall", "--window", 16]
    result = run(place, *options, "--out", place / "out", "--batch-size", 3, "--carry-state")
    assert result.exit_code == 0, result.output
    found = metrics(place / "out")
    assert len(found) == 11
    assert found["wikitext"] != found["wikitext_carried"]
    assert "Avg. of Table 2" in result.stdout
    accuracy = found["hellaswag"]["acc"]
    assert re.search(rf"hellaswag +│ 2 +│ acc {accuracy:.2f}, acc_norm", result.stdout)
    assert result.stderr.count("skipped: ") == 6
    assert "skipped: swde: " in result.stderr


def test_by_way_of_a_file(place: Path) -> None:
    tasks = ["--tasks", "boolq,wikitext", "--window", 16, "--limit", 1]
    assert run(place, *tasks, "--out", place / "whole").exit_code == 0
    file = place / "requests.jsonl.gz"
    saved = run(place, *tasks, "--suite", "recall", "--save-requests", file)
    assert saved.exit_code == 0, saved.output
    assert saved.stderr.count("skipped: ") == 6
    assert f"{file}: 3 requests" in saved.stdout
    answered = run(place, "--from-requests", file, "--out", place / "gpu")
    assert answered.exit_code == 0, answered.output
    answers = place / "gpu/answers.jsonl"
    joined = run(place, *tasks, "--answers", answers, "--out", place / "out")
    assert joined.exit_code == 0, joined.output
    assert metrics(place / "out") == metrics(place / "whole")


def test_needles_and_their_picture(place: Path) -> None:
    picture = place / "needles.png"
    options = ["--tasks", "niah_single_1", "--lengths", "800,1000", "--limit", 2]
    result = run(place, *options, "--out", place / "out", "--heat-map", picture)
    assert result.exit_code == 0, result.output
    assert "800: 0.0, 1000: 0.0" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "comonsense"], "error: suite: got 'comonsense', expected commonsense"),
        ([], "error: tasks: got none, expected a suite or names of tasks"),
        (["--tasks", "boolq", "--batch-size", "0"], "error: batch-size: got '0', expected auto"),
        (["--tasks", "boolq", "--lengths", "1k"], "error: lengths: got '1k', expected numbers"),
        (
            ["--tasks", "boolq", "--lengths", "9" * 20],
            f"error: lengths: got {'9' * 20}, expected 1",
        ),
        (["--tasks", "boolq", "--limit", "0"], "error: limit: got 0, expected a positive number"),
        (["--tasks", "boolq", "--tokenizer", "bytes"], "error: tokenizer: got bytes of 256 tokens"),
        (["--tasks", "boolqq"], "failed: boolqq: task: got 'boolqq', expected boolq"),
        (["--tasks", "boolq", "--answers", "nowhere"], "error: nowhere: got No such file"),
        (["--tasks", "boolq", "--data", "nowhere"], "error: data: got no nowhere, expected a path"),
        (["--suite", "niah", "--essays", "none"], "error: essays: got no none, expected a path"),
        (["--tasks", "boolq", "--window", "0"], "error: window: got 0, expected at least 1"),
        (
            ["--tasks", "swde", "--recall-length", "50"],
            "error: recall_length: got 50, expected more",
        ),
        (
            ["--tasks", "boolq", "--needle-fit", "lmeval"],
            "error: needle_fit: got 'lmeval', expecte",
        ),
        (["--tasks", "boolq", "--heat-map", "a.png"], "error: heat map: got no results, expected"),
        (
            ["--suite", "niah", "--heat-map", "a.pdf"],
            "error: heat map: got 'a.pdf', expected a name",
        ),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, place: Path) -> None:
    result = run(place, "--out", place / "out", *options)
    assert result.exit_code == 2
    (said,) = [line for line in result.stderr.splitlines() if "expected" in line]
    assert said.startswith(message)


def test_results_of_another_model_stay(place: Path) -> None:
    first, other = place / "first", place / "other"
    assert run(place, "--out", first, "--tasks", "boolq").exit_code == 0
    before = (first / "results.json").read_text()
    answers = other / "answers.jsonl"
    assert run(place, "--out", other, "--tasks", "boolq").exit_code == 0
    head, *lines = answers.read_text().splitlines()
    changed = json.loads(head)
    changed["model"]["step"] = 7
    answers.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
    result = run(place, "--out", first, "--tasks", "boolq", "--answers", answers)
    assert result.exit_code == 2
    assert "first/results.json: got results of another model, expected none or" in result.stderr
    assert (first / "results.json").read_text() == before


def test_a_picture_of_nothing_is_refused(place: Path) -> None:
    result = run(place, "--suite", "niah", "--save-requests", place / "r.gz", "--heat-map", "a.png")
    assert result.exit_code == 2
    assert "a.png beside --save-requests, which has no results to draw" in result.stderr


def test_a_folder_that_cannot_be_written_is_one_line(place: Path) -> None:
    result = run(place, "--tasks", "boolq", "--out", place / "tokenizer.json")
    assert result.exit_code == 2
    (said,) = [line for line in result.stderr.splitlines() if line]
    assert said.startswith("error: got [Errno 17] File exists: ")


def test_a_model_that_is_not_there_is_one_line(place: Path) -> None:
    result = CliRunner().invoke(app, ["eval", "gdn2-15n", "--suite", "lm", "--out", str(place)])
    assert result.exit_code == 2
    (said,) = [line for line in result.stderr.splitlines() if line]
    assert said.startswith(
        "error: model: got 'gdn2-15n', expected a folder with a model, or a name"
    )


def test_git_and_others_are_not_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """lm-eval asks git where it is, which complains past Python's standard error."""
    monkeypatch.chdir(place)
    assert run(place, "--tasks", "boolq", "--out", place / "out").exit_code == 0
    assert "git" not in capfd.readouterr().err


def test_a_killed_process_loses_nothing(place: Path) -> None:
    """Killed while it answers, whenever that is; the same command then finds what an undisturbed one does."""
    tasks = ["--suite", "commonsense", "--window", 16]
    assert run(place, *tasks, "--out", place / "whole").exit_code == 0
    command = [sys.executable, "-m", "gdn2", *words(place, *tasks, "--out", place / "out")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    answers = place / "out/answers.jsonl"
    for _ in range(600):
        if answers.exists() and answers.stat().st_size > 2000:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = answers.read_bytes()
    assert len(kept) > 2000
    assert run(place, *tasks, "--out", place / "out").exit_code == 0
    assert metrics(place / "out") == metrics(place / "whole")
    assert answers.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")
def test_everything_offline(tmp_path: Path) -> None:
    """A model of the 15M size, five samples of each task; under five minutes on two cores."""
    from dataclasses import replace  # noqa: PLC0415

    from gdn2.models.presets import preset  # noqa: PLC0415

    tokenizer = SHARED / "data/tokenizers/gpt_neox_olmo/tokenizer.json"
    config = replace(preset("gdn2-15m-hybrid"), vocab_size=50280)
    save_model(LanguageModel(config), tmp_path / "model", tokenizer=tokenizer)
    data, essays = SHARED / "data/eval", SHARED / "data/haystack/PaulGrahamEssays.json.gz"
    options = ["--suite", "all", "--limit", 5, "--lengths", "1024,2048", "--data", data]
    given = ["eval", tmp_path / "model", *options, "--essays", essays, "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(word) for word in given])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out/results.json").read_text())
    assert set(record["skipped"]) == {"triviaqa"}
    assert len(record["tasks"]) == 19
    assert not record["failed"]
