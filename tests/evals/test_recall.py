"""Recall: prompts and cuts as in JRT, scores, and what becomes of damaged files."""

import json
import re
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from gdn2.data.byte_tokenizer import ByteTokenizer
from gdn2.data.tokenizers import load_tokenizer
from gdn2.evals.recall import RecallTask, cut, recall_task
from gdn2.evals.recall_data import RECALL_SETS, Item
from gdn2.evals.request import Request, Task

from .cases import SHARED, write_rows

LOCAL = SHARED / "data/eval"

KEYED = {"key": "release year", "value": "1994"}
CLOZE = {"orig_question": "Who found it?", "answers": ["Mary Anning", "Anning"]}

PROMPTS: list[tuple[str, dict[str, Any], str]] = [
    # The label gets a capital, the text loses dots, a label at its end, and for SWDE the other prompt and spaces.
    (
        "swde",
        {"text": " A film. Release Year: 1994..\n Summary of information above... x", **KEYED},
        "A film. Release Year: 1994. Release year:",
    ),
    (
        "swde",
        {"text": "Release year: 1994. RELEASE YEAR:release year:", **KEYED},
        "Release year: 1994. Release year:",
    ),
    ("fda", {"text": "made in 1994 .", **KEYED}, "made in 1994 . Release year:"),
    ("fda", {"text": "..made in 1994\n..", **KEYED}, "made in 1994\n. Release year:"),
    ("squad", {"text": " Born 1994. It began in\n", "value": "1994"}, "Born 1994. It began in"),
    (
        "triviaqa",
        {"context": "[DOC] [TLE] Fossils [PAR] Anning dug.. it was found by", **CLOZE}
        | {"question": " It was found by "},
        "Fossils  Anning dug. It was found by",
    ),
    (
        "drop",
        {"context": "Anning dug. by whom by whom", "question": "By whom", **CLOZE},
        "Anning dug. by whom. By whom",
    ),
    (
        "nq",
        {"context": "Mary Anning dug. By whom", "question": "By whom", **CLOZE},
        "Mary Anning dug. By whom",
    ),
    (
        "nq",  # which compares the letters as they are, and once
        {"context": "Mary Anning dug. by whom", "question": "By whom", **CLOZE},
        "Mary Anning dug. by whom. By whom",
    ),
    (
        "squad",
        {"context": "Mary Anning dug. ", "question": "Who?", "answers": ["Mary Anning"]},
        "Mary Anning dug.\nQuestion: Who?\nAnswer:",
    ),
    (
        "drop",
        {"context": "Anning, then Owen.", "question": "Who?", "answers": [["Owen", "anning"]]},
        "Anning, then Owen.\nQuestion: Who?\nAnswer:",
    ),
]


@pytest.mark.parametrize(("name", "row", "prompt"), PROMPTS)
def test_prompts(name: str, row: dict[str, Any], prompt: str) -> None:
    (request,) = RecallTask(name, [row], "rows").requests(ByteTokenizer())
    assert request.context == prompt
    assert (request.kind, request.until, request.max_tokens) == ("generate", ("\n",), 48)


def literal_cut(row: dict[str, Any], keys: list[str], text: str, room: int) -> bytes:
    """The window as JRT describes it, step by step, over bytes."""
    position = -1
    for key in keys:
        found = re.search(re.escape(row[key]), text, re.IGNORECASE)
        if found and (position == -1 or found.start() < position):
            position = found.start()
    if position == -1:
        for other in row["alt_answers"]:
            found = re.search(re.escape(other), text, re.IGNORECASE)
            if found:
                position = found.start()
                break
    if not keys:
        position = 0
    tokens, before = text.encode(), len(text[:position].encode())
    if position == -1 and "tok_pos" in row and before > room:
        before = row["tok_pos"]
    start = max(0, before - room // 2)
    taken = before - start
    return tokens[start : min(len(tokens), before + room - taken)]


def test_documents_are_cut_around_the_answer_as_in_jrt() -> None:
    random, tokenizer, cuts = Random(3), ByteTokenizer(), set()
    for _ in range(300):
        text = "".join(random.choices("abcdé", k=random.randint(1, 60))).strip()
        words = ["".join(random.choices("abcdÉ", k=random.randint(2, 4))) for _ in range(4)]
        row: dict[str, Any] = {"a": words[0], "b": words[1], "alt_answers": words[2:]}
        if random.random() < 0.5:
            row["tok_pos"] = random.randrange(40)
        keys = random.choice([[], ["a"], ["a", "b"]])
        room = random.choice([1, 7, 20, 100])
        anchors = [row[key] for key in keys]
        item = Item(text, "", [], anchors, row["alt_answers"] if keys else [], row.get("tok_pos"))
        expected = literal_cut(row, keys, text, room)
        assert cut(item, tokenizer, room) == tokenizer.decode(list(expected))
        cuts.add(len(expected) < len(text.encode()))
    assert cuts == {True, False}


def test_what_is_cut_is_the_document_alone() -> None:
    text = "x" * 500 + " 1994 " + "y" * 500
    (request,) = RecallTask("fda", [{"text": text, **KEYED}], "rows", 70).requests(ByteTokenizer())
    assert request.context == "x" * 9 + " 1994 " + "y" * 5 + ". Release year:"
    row = {"context": text, "question": "In", **CLOZE}
    (head,) = RecallTask("drop", [row], "rows", 60).requests(ByteTokenizer())
    assert head.context == "x" * 10 + ". In"


def test_rows_sought_by_one_letter_are_left_out_and_numbers_stay() -> None:
    good = {"text": "made in 1994", **KEYED}
    rows = [good, good | {"value": "4"}, good | {"key": ""}, good]
    task = RecallTask("fda", rows, "rows")
    assert [request.number for request in task.requests(ByteTokenizer())] == [0, 3]
    assert [request.number for request in task.requests(ByteTokenizer(), 1)] == [0]
    assert [request.number for request in task.requests(ByteTokenizer(), 2)] == [0, 3]
    drop = [
        {"context": "It was Owen.", "question": "Who?", "answers": [["Owen"], ["he"]]},
        {"context": "It was Owen.", "question": "How many?", "answers": [["1"]]},
    ]
    assert len(list(RecallTask("drop", drop, "rows").requests(ByteTokenizer()))) == 1


def test_an_answer_is_right_if_it_has_any_alternative_whole() -> None:
    task: Task = RecallTask("drop", [{"context": "", "question": "", "answers": [[""]]}], "rows")
    request = Request("drop", 0, "generate", "", metadata={"answers": [["a.b", "C"], ["d"]]})
    answers = {"x A.B and c y": 1.0, "axb c": 0.0, "a.b": 0.0, "D": 1.0, "": 0.0}
    assert {answer: task.score(request, answer)["contains"] for answer in answers} == answers
    scored = [(request, task.score(request, answer)) for answer in answers]
    assert task.summarise(scored) == {"contains": 40.0, "samples": 5}


def test_protocols_say_what_differs() -> None:
    hub = RECALL_SETS["squad"].hub
    assert "items of" not in RecallTask("squad", [{"text": "", "value": ""}], hub).protocol
    row = {"context": "a", "question": "b", "answers": ["c"]}
    protocol = RecallTask("squad", [row], "/data/squad.jsonl", 1000).protocol
    for words in (
        "950 tokens around the answer",
        f"items of squad.jsonl, which need not be those of {hub}",
        "itself",
    ):
        assert words in protocol


def test_a_folder_is_searched_for_the_tasks_file(tmp_path: Path) -> None:
    row = {"text": "made in 1994", **KEYED}
    write_rows(tmp_path / "fda_rebuilt.jsonl.gz", [row, row])
    write_rows(tmp_path / "swde.jsonl", [row])
    assert len(list(recall_task("fda", tmp_path).requests(ByteTokenizer()))) == 2
    assert len(list(recall_task("swde", tmp_path).requests(ByteTokenizer()))) == 1
    assert len(list(recall_task("swde", tmp_path / "swde.jsonl").requests(ByteTokenizer()))) == 1
    with pytest.raises(ValueError, match=r"got a folder without .*, expected triviaqa.jsonl or"):
        recall_task("triviaqa", tmp_path)


def test_hub_data_are_the_harness_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        if "fda" in name:
            raise ConnectionError("no\nnetwork")
        return [{"text": "made in 1994", **KEYED}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(list(recall_task("swde").requests(ByteTokenizer()))) == 1
    assert asked == [("hazyresearch/based-swde-v2", "validation")]
    with pytest.raises(ValueError, match="based-fda: got no network, expected a dataset"):
        recall_task("fda")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'datasets, expected pip install "gdn2\[data\]"'):
        recall_task("swde")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "fda.jsonl: got an empty file, expected text"),
        ('{"text": "a"\n', "fda.jsonl, line 1: got .*, expected an object of JSON"),
        ('\n["text"]\n', "fda.jsonl, line 2: got a list, expected an object of JSON"),
        ('{"text": "a", "key": "b"}', "row 1: got fields text, key, expected also 'value'"),
        ('{"text": 1, "key": "b", "value": "c"}', "row 1, field 'text': got 1, expected a string"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "fda.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as mistake:
        list(recall_task("fda", tmp_path).requests(ByteTokenizer()))
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize("answers", ["Owen", [], [3], [[]], [["Owen", None]]])
def test_bad_answers_are_one_line(answers: Any) -> None:
    task = RecallTask("nq", [{"context": "a", "question": "b", "answers": answers}], "rows")
    with pytest.raises(ValueError, match=r"row 1, field 'answers': got .*, expected"):
        list(task.requests(ByteTokenizer()))


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task: got 'sqad', expected squad"):
        recall_task("sqad")
    with pytest.raises(ValueError, match="length: got 50, expected more than the 50"):
        RecallTask("fda", [KEYED], "rows", 50)
    with pytest.raises(ValueError, match="rows: got no rows, expected some"):
        RecallTask("fda", [], "rows")
    (tmp_path / "fda.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"fda.jsonl: got .*, expected a file of UTF-8 text"):
        recall_task("fda", tmp_path)
    with pytest.raises(ValueError, match="limit: got -1, expected a positive number"):
        list(RecallTask("fda", [KEYED], "rows").requests(ByteTokenizer(), -1))


@pytest.mark.slow
@pytest.mark.skipif(not LOCAL.is_dir(), reason="no local data")
@pytest.mark.parametrize(
    ("name", "rows", "items"),
    [
        ("swde", 1002, 1002),
        ("fda", 1104, 1104),
        ("squad", 1000, 999),
        ("nq", 2655, 2639),
        ("drop", 1000, 607),
    ],
)
def test_local_data_have_their_answers_in_the_prompt(name: str, rows: int, items: int) -> None:
    pytest.importorskip("sentencepiece")
    tokenizer = load_tokenizer(SHARED / "data/tokenizers/llama2_32k")
    task = recall_task(name, LOCAL)
    requests = list(task.requests(tokenizer))
    assert len(requests) == items
    assert requests[-1].number < rows
    reading = task.summarise((r, task.score(r, r.context)) for r in requests)
    silent = task.summarise((r, task.score(r, "")) for r in requests)
    assert json.loads(json.dumps(reading)) == {"contains": 100.0, "samples": items}
    assert silent["contains"] == 0
    assert max(len(tokenizer.encode(r.context)) for r in requests) < 2048
