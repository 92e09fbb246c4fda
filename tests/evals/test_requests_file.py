"""Requests and answers in files: they come back as they were, and what is cut or changed is seen."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdn2.evals.answers import FORMAT, AnswerFile
from gdn2.evals.request import Request
from gdn2.evals.requests_file import WINDOW, key_of, read_requests, write_requests

REQUESTS = [
    Request("boolq", 0, "loglikelihood", "Is it?\u2028\nAnswer:", " yes"),
    Request(
        "niah", 3, "generate", "Where 🙂", until=("\n", "."), max_tokens=8, metadata={"depth": 4}
    ),
    Request("wikitext", 0, "rolling", " = A = \n", metadata={WINDOW: 16}),
]


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.gz"])
def test_requests_come_back(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    write_requests(file, REQUESTS, {"tokenizer": "bytes"})
    about, found = read_requests(file)
    assert found == REQUESTS
    assert (about["tokenizer"], about["requests"]) == ("bytes", 3)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_changed_file_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    write_requests(file, REQUESTS, {})
    whole = file.read_text()
    for content in (whole[:-20], whole.replace("Is it?", "Is id?"), whole + whole.splitlines()[1]):
        file.write_text(content)
        with pytest.raises(
            ValueError, match=r"lines that were cut or changed, expected 3 requests"
        ):
            read_requests(file)
    for content in ("{}\n", "[1]\n", "nothing\n", '{"format": "gdn2 answers 1"}\n'):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"got format .*, expected 'gdn2 requests 1'"):
            read_requests(file)
    file.with_suffix(".gz").write_bytes(gzip.compress(whole.encode())[:-30])
    with pytest.raises(ValueError, match="expected"):
        read_requests(file.with_suffix(".gz"))


def test_keys_tell_requests_apart_by_what_is_answered() -> None:
    first = REQUESTS[1]
    same = replace(first, task="other", number=7, metadata={})
    assert key_of(same) == key_of(first)
    others = [
        replace(first, context="x"),
        replace(first, until=()),
        replace(first, max_tokens=9),
        replace(first, kind="loglikelihood"),
        replace(first, continuation="x"),
        replace(first, metadata={WINDOW: 16}),
    ]
    assert len({key_of(request) for request in [first, *others]}) == 7


MODEL = {"config": "abc", "step": 5}


def test_answers_go_on_after_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    begun = AnswerFile(file, MODEL, {"vocab_size": 7})
    begun.add("a", [-0.1 - 0.2, True])
    begun.add("b", "text\u2028\n")
    with file.open("a") as torn:
        torn.write('{"key": "c", "ans')
    again = AnswerFile(file, MODEL)
    assert (again["a"], again["b"]) == ([-0.1 - 0.2, True], "text\u2028\n")
    assert "c" not in again
    again.add("c", -1.5)
    assert AnswerFile(file, None)["c"] == -1.5
    assert (again.model, again.config) == (MODEL, {"vocab_size": 7})
    assert len(file.read_text().splitlines()) == 4


def test_answers_of_another_model_are_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    AnswerFile(file, MODEL).add("a", 1.0)
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"answers of a model with step 5, expected 6; choose"):
        AnswerFile(file, MODEL | {"step": 6})
    assert file.read_bytes() == before
    file.write_text(json.dumps({"format": "other"}) + "\n")
    with pytest.raises(ValueError, match="got another file, expected one in format 'gdn2 answers"):
        AnswerFile(file, MODEL)
    for line in ("[]", '{"key": "a"}'):
        file.write_text(json.dumps({"format": FORMAT, "model": MODEL}) + f"\n{line}\n")
        with pytest.raises(ValueError, match=r"line 2: got .*, expected an answer"):
            AnswerFile(file, MODEL)
    with pytest.raises(ValueError, match="No such file or directory, expected answers"):
        AnswerFile(tmp_path / "nowhere", None)


HEAD = json.dumps({"format": FORMAT, "model": MODEL, "config": None})


@pytest.mark.parametrize("model", [MODEL, None])
@pytest.mark.parametrize(
    "content", ["notes", "first\nsecond", '[1]\n{"a"', f"{HEAD}\n[]\n{{", '{"format": "other"}']
)
def test_a_refused_file_stays_as_it_is(
    content: str, model: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Also without a line break at its end."""
    file = tmp_path / "answers.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match="expected"):
        AnswerFile(file, model)
    assert file.read_text() == content


def test_torn_answers_of_another_model_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(f'{HEAD}\n{{"key"')
    with pytest.raises(ValueError, match="with step 5, expected 6"):
        AnswerFile(file, MODEL | {"step": 6})
    assert file.read_text() == f'{HEAD}\n{{"key"'


def test_answers_that_are_only_read_are_not_written(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    content = f'{HEAD}\n{{"key": "a", "answer": 1.0}}\n{{"key"'
    file.write_text(content)
    file.chmod(0o444)
    assert AnswerFile(file, None)["a"] == 1.0
    assert file.read_text() == content


def test_a_torn_header_is_begun_again(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    for content in ("", HEAD[:40], HEAD):
        file.write_text(content)
        AnswerFile(file, MODEL)
        assert file.read_text() == f"{HEAD}\n"
