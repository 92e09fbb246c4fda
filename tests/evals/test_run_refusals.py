"""What an evaluation does not take: data that are missing or damaged, and answers or requests of another model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn2.evals.local_data import SOURCES
from gdn2.evals.run import Subject, answer_requests, evaluate, save_requests
from gdn2.evals.suites import CARRIED
from tests.evals.cases import write_rows
from tests.evals.rows import ROWS
from tests.evals.subjects import MODEL, furnish, sources, subject

pytest.importorskip("lm_eval")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return furnish(tmp_path)


def test_missing_data_are_skipped_and_wrong_ones_fail(place: Path) -> None:
    for file in (*place.glob("data/piqa*"), *place.glob("data/wikitext*")):
        file.unlink()
    (place / "data/swde.jsonl").write_text('{"text": "A film."}\n')
    tasks = ["piqa", "swde", "niah_single_2", "boolq", "wikitext", CARRIED]
    record = evaluate(subject(place), tasks, sources(place), place / "out")
    assert list(record["tasks"]) == ["boolq"]
    assert set(record["skipped"]) == {"piqa", "niah_single_2", "wikitext", CARRIED}
    assert "got no essays" in record["skipped"]["niah_single_2"]
    assert "row 1: got fields text, expected also 'key'" in record["failed"]["swde"]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("wikitext", {"page": ""}, "row 1, field 'page': got '', expected some text"),
        ("piqa", ROWS["piqa"][0] | {"label": -1}, "field 'label': got -1, expected 0 or 1"),
        (
            "nq",
            {"context": "x", "question": "y", "answers": ["zz"], "alt_answers": None},
            "field 'alt_answers': got None, expected strings in a list",
        ),
        (
            "triviaqa",
            {"context": "x", "question": "y", "answers": [""]},
            "field 'answers': got [''], expected strings with text",
        ),
    ],
)
def test_a_damaged_row_fails_its_task_alone(
    name: str, row: dict[str, Any], message: str, place: Path
) -> None:
    stem = SOURCES[name].stems[0] if name in SOURCES else name
    for file in place.glob(f"data/{stem}*"):
        file.unlink()
    write_rows(place / f"data/{stem}.jsonl", [row])
    record = evaluate(subject(place), [name, "boolq"], sources(place), place / "out")
    assert message in record["failed"][name]
    assert list(record["tasks"]) == ["boolq"]


def test_requests_of_another_tokenizer_are_refused(place: Path) -> None:
    save_requests(subject(place), ["boolq"], sources(place), place / "requests.jsonl")
    (place / "other").mkdir()
    text = (place / "tokenizer.json").read_text() + "\n"
    (place / "other/tokenizer.json").write_text(text)
    other = subject(place, tokenizer_name=str(place / "other"))
    with pytest.raises(ValueError, match=r"tokenizer: got one with checksum .*, expected .* as in"):
        answer_requests(other, place / "requests.jsonl", place / "gpu")


def test_results_of_another_model_keep_their_folder(place: Path) -> None:
    """No answers are begun beside them, which would keep their own model out."""
    evaluate(subject(place), ["boolq"], sources(place), place / "first")
    out, answers = place / "out", place / "first/answers.jsonl"
    evaluate(subject(place), ["boolq"], sources(place), out, answers=answers)
    other = shutil.copytree(place / MODEL, place / "other")
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match=r"results\.json: got results of another model"):
        evaluate(subject(place, name="other"), ["boolq"], sources(place), out)
    assert [path.name for path in out.iterdir()] == ["results.json"]
    evaluate(subject(place), ["boolq"], sources(place), out)


def test_answers_of_another_model_are_refused(place: Path) -> None:
    """Another config, other weights, another tokenizer; a folder without weights is enough to join them."""
    evaluate(subject(place), ["boolq"], sources(place), place / "first")
    answers = place / "first/answers.jsonl"

    def join(**others: Any) -> dict[str, Any]:
        asked = subject(place, **others)
        return evaluate(asked, ["boolq"], sources(place), place / "out", answers=answers)

    given = place / "run/checkpoints/step-00000120/model"
    other = shutil.copytree(given, place / "other")
    (other / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"got answers of a model with weights \w+, expected"):
        join(name="other")
    (other / "model.safetensors").unlink()
    assert join(name="other")["tasks"]["boolq"]["samples"] == 2
    shutil.rmtree(place / "out")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match="got answers of a model with config"):
        join(name="other")
    (other / "tokenizer.json").write_text((place / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ValueError, match="got answers of a model with tokenizer"):
        join(name="other")
    preset = Subject(
        name="gdn2-15m",
        device=torch.device("cpu"),
        dtype=torch.float32,
        tokenizer_name=str(place / "tokenizer.json"),
    )
    with pytest.raises(ValueError, match="got answers of a model with config"):
        evaluate(preset, ["boolq"], sources(place), place / "out", answers=answers)
    assert not (place / "out").exists()


def test_answers_of_other_stops_are_refused(place: Path) -> None:
    evaluate(subject(place), ["boolq"], sources(place), place / "out")
    evaluate(subject(place), ["boolq"], sources(place), place / "out")
    (place / MODEL / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    with pytest.raises(
        ValueError, match=r"got answers of a model with stops \[\], expected \[2, 3"
    ):
        evaluate(subject(place), ["boolq"], sources(place), place / "out")


def test_a_task_that_fails_keeps_no_older_result(place: Path) -> None:
    record = evaluate(subject(place), ["swde", "boolq"], sources(place), place / "out", limit=1)
    assert set(record["tasks"]) == {"swde", "boolq"}
    (place / "data/swde.jsonl").write_text('{"text": "A film."}\n')
    record = evaluate(subject(place), ["swde"], sources(place), place / "out")
    assert set(record["tasks"]) == {"boolq"} and "swde" in record["failed"]
    assert json.loads((place / "out/results.json").read_text()) == record
