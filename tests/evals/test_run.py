"""Whole evaluations over rows of our own: resumed, limited, and answered elsewhere."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn2.evals import run
from gdn2.evals.request import Request
from gdn2.evals.run import Progress, Subject, answer_requests, evaluate, save_requests
from gdn2.evals.scoring import Scorer
from gdn2.evals.suites import CARRIED, COLUMNS, SUITES, columns, tasks_of
from gdn2.models.config import ModelConfig
from tests.evals.cases import essay
from tests.evals.subjects import furnish, sources, subject

pytest.importorskip("lm_eval")
TASKS = ["lambada_openai", "boolq", "swde"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return furnish(tmp_path)


class KilledError(Exception):
    pass


def test_results_say_whose_they_are_and_how_they_were_found(place: Path) -> None:
    seen: list[Progress] = []
    tasks = [*TASKS, "wikitext", CARRIED]
    record = evaluate(subject(place), tasks, sources(place), place / "out", report=seen.append)
    assert record == json.loads((place / "out/results.json").read_text())
    assert record["model"]["step"] == 120
    config = subject(place).scorer.model.config
    assert record["model"]["config"] == config.digest
    assert ModelConfig.from_dict(record["config"]) == config
    assert record["libraries"]["torch"] == torch.__version__
    assert record["tasks"]["boolq"]["version"] == "2.0"
    assert record["tasks"]["boolq"]["samples"] == 2
    assert "swde.jsonl, which need not be" in record["tasks"]["swde"]["protocol"]
    assert "windows of 16 tokens" in record["tasks"]["wikitext"]["protocol"]
    assert "state is carried" in record["tasks"][CARRIED]["protocol"]
    perplexities = [record["tasks"][n]["metrics"]["word_perplexity"] for n in ("wikitext", CARRIED)]
    assert perplexities[0] != perplexities[1]
    assert record["columns"]["Wiki. ppl"] == perplexities[0]
    asked = {task["asked"]["window"] for task in record["tasks"].values()}
    assert asked == {sources(place).window}
    other = evaluate(subject(place), ["boolq"], replace(sources(place), window=9), place / "out")
    assert other["tasks"]["boolq"]["asked"]["window"] == 9
    assert other["tasks"]["wikitext"] == record["tasks"]["wikitext"]
    assert seen[-1] == Progress("wikitext", 2, 2)
    assert [p.done for p in seen if p.task == "boolq"] == [0, 1, 2, 3, 4]


def test_a_killed_evaluation_goes_on_where_it_was(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evaluate(subject(place), TASKS, sources(place), place / "whole")

    def kill(progress: Progress) -> None:
        if (progress.task, progress.done) == ("boolq", 3):
            raise KilledError

    with pytest.raises(KilledError):
        evaluate(subject(place), TASKS, sources(place), place / "out", report=kill)
    kept = json.loads((place / "out/results.json").read_text())
    assert list(kept["tasks"]) == ["lambada_openai"]
    asked: list[int] = []
    real = Scorer.answers

    def counted(self: Scorer, requests: list[Request]) -> Any:
        asked.append(len(requests))
        return real(self, requests)

    monkeypatch.setattr(Scorer, "answers", counted)
    again = evaluate(subject(place), TASKS, sources(place), place / "out")
    assert asked == [1, 3]  # the last of boolq's, and swde's
    for name in TASKS:
        assert again["tasks"][name]["metrics"] == expected["tasks"][name]["metrics"]


def test_finished_results_need_no_weights(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate(subject(place), TASKS, sources(place), place / "out")
    monkeypatch.setattr(run, "open_model", None)
    again = evaluate(subject(place), ["boolq"], sources(place), place / "out")
    assert again["tasks"]["boolq"]["metrics"] == first["tasks"]["boolq"]["metrics"]
    assert list(again["tasks"]) == TASKS  # the others' results are kept


def test_answers_from_elsewhere_give_the_same_results(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved here, answered without lm-eval or data, and joined here, without a model."""
    tasks = [*TASKS, "wikitext", "niah_single_1"]
    asked = sources(place, lengths=(800,))
    expected = evaluate(subject(place), tasks, asked, place / "whole", limit=2)
    saved = save_requests(
        subject(place), [*tasks, "niah_single_2"], asked, place / "requests.jsonl", limit=2
    )
    assert set(saved.skipped) == {"niah_single_2"}
    with monkeypatch.context() as bare:
        for module in (
            "lm_eval",
            "lm_eval.tasks",
            "lm_eval.evaluator",
            "gdn2.evals.adapter",
            "nltk",
        ):
            bare.setitem(sys.modules, module, None)
        assert (
            answer_requests(subject(place), place / "requests.jsonl", place / "gpu")
            == saved.requests
        )
    monkeypatch.setattr(run, "open_model", None)
    answers = place / "gpu/answers.jsonl"
    joined = evaluate(subject(place), tasks, asked, place / "out", limit=2, answers=answers)
    assert (joined["model"], joined["config"]) == (expected["model"], expected["config"])
    for name in tasks:
        assert joined["tasks"][name]["metrics"] == expected["tasks"][name]["metrics"]
    more = evaluate(subject(place), ["piqa"], asked, place / "out", answers=answers)
    assert "4 of 4 requests of piqa without an answer" in more["failed"]["piqa"]


def test_requests_of_other_tasks_are_saved_beside_damaged_data(place: Path) -> None:
    whole = save_requests(subject(place), ["boolq"], sources(place), place / "requests.jsonl")
    next(place.rglob("piqa*.jsonl")).write_text('{"goal": 1')
    saved = save_requests(
        subject(place), ["piqa", "boolq"], sources(place), place / "requests.jsonl"
    )
    assert (saved.requests, saved.skipped) == (whole.requests, {})
    assert saved.failed["piqa"].startswith("piqa: ")
    assert "line 1: got" in saved.failed["piqa"]


def test_a_length_shorter_than_the_question_fails(place: Path) -> None:
    asked = sources(place, lengths=(140,))
    record = evaluate(subject(place), ["niah_single_1", "boolq"], asked, place / "out", limit=1)
    assert "length: got 140, expected at least" in record["failed"]["niah_single_1"]
    assert list(record["tasks"]) == ["boolq"]


def test_another_vocabulary_is_refused_at_once(place: Path) -> None:
    wrong = subject(place, tokenizer_name="bytes")
    (place / "small.json").write_text("{}")
    preset = Subject(name="gdn2-1m", device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(
        ValueError, match="tokenizer: got bytes of 256 tokens, expected the model's"
    ):
        evaluate(preset, ["boolq"], sources(place), place / "out")
    assert wrong.tokenizer.vocab_size == 256
    assert not (place / "out/results.json").exists()


def test_names_of_tasks() -> None:
    assert tasks_of(["lm"]) == ["wikitext", "lambada_openai"]
    assert tasks_of(["lm", "lm"], ["boolq", "wikitext"]) == ["wikitext", "lambada_openai", "boolq"]
    assert len(SUITES["all"]) == 20 == len(set(SUITES["all"]))
    with pytest.raises(ValueError, match="suite: got 'comonsense', expected commonsense"):
        tasks_of(["comonsense"])
    with pytest.raises(ValueError, match="tasks: got none, expected a suite"):
        tasks_of([])


def test_an_unknown_task_is_answered_with_the_nearest(place: Path) -> None:
    record = evaluate(subject(place), ["hellaswg", "boolq"], sources(place), place / "out")
    assert record["failed"]["hellaswg"] == "hellaswg: task: got 'hellaswg', expected hellaswag"
    assert list(record["tasks"]) == ["boolq"]


def test_averages_are_those_of_the_paper() -> None:
    """Table 2's row of the recurrent Gated DeltaNet-2; its average leaves both perplexities out."""
    row = [15.90, 11.41, 48.09, 72.80, 56.84, 57.85, 72.43, 38.23, 31.60, 40.58, 59.54]
    tasks: dict[str, dict[str, Any]] = {}
    for (task, metric), value in zip(list(COLUMNS.values())[:11], row, strict=True):
        tasks.setdefault(task, {"metrics": {}})["metrics"][metric] = value
    found = columns(tasks)
    assert round(found["Avg. of Table 2"], 2) == 53.11
    assert "Avg. of Table 4" not in found
    tasks["boolq"]["limit"] = 100  # as of an earlier call
    assert columns(tasks) == {k: v for k, v in found.items() if k != "Avg. of Table 2"}
    del tasks["boolq"]
    assert "Avg. of Table 2" not in columns(tasks)


def test_recall_at_other_lengths_has_no_average() -> None:
    tasks: dict[str, dict[str, Any]] = {
        task: {"metrics": {metric: float(i)}, "limit": 5}
        for i, (task, metric) in enumerate(list(COLUMNS.values())[11:])
    }
    assert columns(tasks)["Avg. of Table 4"] == 2.5
    tasks["drop"]["asked"] = {"recall_length": 2048}  # as where nobody said
    assert columns(tasks)["Avg. of Table 4"] == 2.5
    tasks["drop"]["asked"] = {"recall_length": 512}
    assert "Avg. of Table 4" not in columns(tasks) and columns(tasks)["DROP"] == 5.0
    for task in tasks.values():
        task["asked"] = {"recall_length": 512}
    assert columns(tasks)["Avg. of Table 4"] == 2.5


def test_other_protocols_are_other_requests(place: Path) -> None:
    """Nothing of the usual protocol's answers is taken for them, and the results say which it was."""
    task = "niah_single_1"
    ways: dict[str, dict[str, Any]] = {
        "ruler": {"lengths": (900,)},
        "lm_eval": {"lengths": (900,), "needle_fit": "lm_eval"},
        "1998 tokens": {},
        "70 tokens": {"recall_length": 120},
    }
    protocols, lines = set(), 0
    for said, options in ways.items():
        name = task if "lengths" in options else "swde"
        record = evaluate(subject(place), [name], sources(place, **options), place / "out", limit=1)
        protocols.add(record["tasks"][name]["protocol"])
        assert said in record["tasks"][name]["protocol"]
        before, lines = lines, len((place / "out/answers.jsonl").read_text().splitlines())
        assert lines > before or said == "70 tokens"  # which the document has not
    assert len(protocols) == 4


def test_needles_in_essays(place: Path) -> None:
    pytest.importorskip("nltk")
    (place / "essays.txt").write_text(essay(800))
    asked = sources(place, lengths=(4096,), essays=place / "essays.txt")
    record = evaluate(subject(place), ["niah_single_2"], asked, place / "out", limit=1)
    if record["failed"]:
        assert "nltk_data: got" in record["failed"]["niah_single_2"]  # they are not everywhere
    else:
        assert record["tasks"]["niah_single_2"]["samples"] == 1
