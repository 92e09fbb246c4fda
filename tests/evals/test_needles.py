"""Needles: the prompts of the original generators, the errors, and what oracle and guesser score."""

import hashlib
import json
import re
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gdn2.data.byte_tokenizer import ByteTokenizer
from gdn2.data.tokenizers import load_tokenizer
from gdn2.evals.fitting import FITS, Budget
from gdn2.evals.haystacks import DEPTHS, REFRAIN, Essays, Haystack, Noise, read_essays
from gdn2.evals.heatmap import draw, grid, heat_map
from gdn2.evals.keys import Keys, ruler_keys
from gdn2.evals.needle_task import NeedleTask, needle_task
from gdn2.evals.needles import KINDS, Drawer, Sample
from gdn2.evals.request import JSON, Request, Task

from .cases import KEYS, SHARED, essay, guesser, oracle, split

GOLDEN = SHARED / "checks/ruler_golden.json"
HAYSTACK = SHARED / "data/haystack"
needs_shared = pytest.mark.skipif(not GOLDEN.is_file(), reason="no stored prompts to compare with")

# Of six prompts: sha256 over them joined by NUL, and the sizes of their haystacks. Made by lm-eval 0.4.13's own
# generator (seed 0), and by RULER's search written out around it (seed 42), over the text and keys of cases.py, the
# tokens being bytes, and one more before each text for lm-eval.
PROMPTS = {
    ("lm_eval", "niah_single_1", 2500): ("e7610085dc34159f", [20] * 6),
    ("lm_eval", "niah_single_1", 9000): ("b0ad103d217e0942", [75] * 6),
    ("lm_eval", "niah_single_2", 2500): ("482769c8d183b2dd", [1] * 6),
    ("lm_eval", "niah_single_2", 9000): ("da54f2f31ce6ef18", [1243] * 6),  # all there is
    ("lm_eval", "niah_single_3", 9000): ("a88a0a1831d6d78e", [1243] * 6),
    ("lm_eval", "niah_multikey_1", 2500): ("d3dc65326c32a1b3", [4] * 6),
    ("lm_eval", "niah_multikey_1", 9000): ("bf75d7752de1b656", [1243] * 6),
    ("ruler", "niah_single_1", 2500): ("11422db36dd78848", [22, 22, 22, 22, 17, 22]),
    ("ruler", "niah_single_1", 9000): ("6bf7c51574ac951e", [94] * 6),
    ("ruler", "niah_single_2", 9000): ("db8209bfcad202c7", [1502, 1002, 1502, 1502, 1502, 1502]),
    ("ruler", "niah_single_2", 16000): ("7ec0bbadd71f4c87", [2244, 2744, 2744, 2744, 2744, 2744]),
    ("ruler", "niah_single_3", 9000): ("b512eed8f0d19cc2", [1003, 1003, 1003, 1503, 1003, 1003]),
    ("ruler", "niah_multikey_1", 9000): ("5c49d21a78f288dd", [970, 970, 970, 970, 970, 1470]),
    ("ruler", "niah_multikey_1", 16000): ("6a8a10f3dc056005", [2212, 2212, 2212, 2712, 2212, 2712]),
}


def small_task(name: str, *lengths: int, fit: str = "ruler", seed: int | None = None) -> NeedleTask:
    essays = name in KINDS and KINDS[name].essays
    haystack: Haystack = Essays(essay(120), split) if essays else Noise()
    return NeedleTask(name, lengths, haystack, KEYS, fit=fit, seed=seed)


def digest(requests: list[Request]) -> str:
    prompts = "\0".join(request.context for request in requests)
    return hashlib.sha256(prompts.encode()).hexdigest()[:16]


@pytest.mark.parametrize(("fit", "name", "length"), PROMPTS, ids=str)
def test_prompts_are_those_of_the_original_generators(fit: str, name: str, length: int) -> None:
    requests = list(small_task(name, length, fit=fit).requests(ByteTokenizer(), 6))
    sizes = [request.metadata["haystack"] for request in requests]
    assert (digest(requests), sizes) == PROMPTS[fit, name, length]
    assert [r.metadata["tokens"] for r in requests] == [len(r.context.encode()) for r in requests]


def test_another_seed_shuffles_the_needles_of_ruler_differently() -> None:
    requests = list(small_task("niah_multikey_1", 9000, seed=7).requests(ByteTokenizer(), 6))
    assert digest(requests) == "1741d3423a82ca0a"


@cache
def golden() -> Any:
    return json.loads(GOLDEN.read_text())


def golden_task(generator: str, name: str, lengths: list[int]) -> NeedleTask:
    for module in ("nltk", "wonderwords", "sentencepiece"):
        pytest.importorskip(module)
    essays, nltk_data = HAYSTACK / "PaulGrahamEssays.json.gz", HAYSTACK / "nltk_data"
    fit, seed = ("ruler", None) if generator == "ruler" else ("lm_eval", 42)
    if generator == "lm_eval_seed0":
        seed = None
    return needle_task(name, lengths, essays=essays, nltk_data=nltk_data, fit=fit, seed=seed)


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("generator", ["ruler", "lm_eval", "lm_eval_seed0"])
def test_prompts_are_the_stored_ones(generator: str, name: str) -> None:
    """Those that RULER's and lm-eval's own scripts made of the essays with Llama 2's tokenizer."""
    stored = golden()["generators"][generator][name]
    task = golden_task(generator, name, [int(length) for length in stored])
    tokenizer = load_tokenizer(SHARED / "data/tokenizers/llama2_32k")
    expected = [(int(length), sample) for length in stored for sample in stored[length]["samples"]]
    for request, (length, sample) in zip(task.requests(tokenizer, 10), expected, strict=True):
        found = request.metadata
        assert hashlib.sha256(request.context.encode()).hexdigest() == sample["sha256"]
        assert (found["length"], found["tokens"]) == (length, sample["tokens"])
        assert (found["haystack"], found["key"]) == (sample["haystack_used"], sample["query"])
        assert [found["answer"]] == sample["answers"]
        if "line_index" in sample:
            assert found["depth"] == 100 * sample["line_index"] / sample["haystack_used"]
        else:
            assert found["depth"] == sample["answer_depth"]


@needs_shared
@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192])
def test_the_search_asks_for_the_stored_sizes(length: int) -> None:
    for module in ("wonderwords", "sentencepiece"):
        pytest.importorskip(module)
    stored = golden()["generators"]["ruler"]["niah_single_1"][str(length)]
    tokenizer = load_tokenizer(SHARED / "data/tokenizers/llama2_32k")
    noise, asked = Noise(), list[int]()
    drawer = Drawer(KINDS["niah_single_1"], noise, ruler_keys(), Random(42), 42)

    def make(size: int) -> Sample:
        asked.append(size)
        return drawer(size)

    def count(text: str) -> int:
        return len(tokenizer.encode(text)) - 1  # without the one that begins a text

    budget = Budget(length, noise.step(length), 1, noise.most, count)
    assert FITS["ruler"].size(make, budget) == stored["haystack_size"]
    assert asked == [stored["first_call_size"], *(size for size, _ in stored["probes"])]


@needs_shared
def test_ingredients_are_the_stored_ones() -> None:
    pytest.importorskip("wonderwords")
    inputs, keys = golden()["inputs"], ruler_keys()
    assert len(keys) == inputs["keys"]["count"]
    assert (keys[0], keys[-1]) == (inputs["keys"]["first"], inputs["keys"]["last"])
    assert inputs["depths"] == DEPTHS
    words = re.sub(r"\s+", " ", read_essays(HAYSTACK / "PaulGrahamEssays.json.gz"))
    assert (
        hashlib.sha256(words.encode()).hexdigest()
        == inputs["essays"]["sha256_of_words_joined_by_one_space"]
    )


def test_keys_are_all_pairs_in_order() -> None:
    random = Random(0)
    for _ in range(50):
        adjectives, nouns = (
            ["".join(random.choices("ab- é", k=random.randint(1, 4))) for _ in range(count)]
            for count in (random.randint(1, 12), random.randint(1, 5))
        )
        keys = Keys(adjectives, nouns)
        assert keys[:] == sorted({f"{a}-{n}" for a in adjectives for n in nouns})
        assert [keys[-1], keys[len(keys) // 2]] == [keys[:][-1], keys[:][len(keys) // 2]]
    with pytest.raises(IndexError):
        keys[len(keys)]


def test_needles_stand_where_depth_says() -> None:
    stack = Essays(essay(40), split)
    sentences = split(" ".join(essay(40).split()))
    text, depths = stack.hide(["ONE.", "TWO."], len(" ".join(sentences).split()), Random(5))
    pieces = [re.sub(" +", " ", piece).strip() for piece in re.split(r"ONE\.|TWO\.", text)]
    ends = [int(len(sentences) * depth / 100) for depth in depths]
    assert depths == sorted(depths)
    assert pieces == [
        " ".join(sentences[start:end])
        for start, end in zip([0, *ends], [*ends, len(sentences)], strict=True)
    ]
    lines = Noise().hide(["HERE"], 7, Random(1))
    place = lines.text.split("\n").index("HERE")
    assert lines.text.split("\n") == [REFRAIN] * place + ["HERE"] + [REFRAIN] * (7 - place)
    assert lines.depths == [100 * place / 7]


@pytest.mark.parametrize("name", KINDS)
def test_an_oracle_is_always_right_and_a_guesser_never(name: str) -> None:
    task: Task = small_task(name, 6000, 8000)
    requests = list(task.requests(ByteTokenizer(), 30))
    assert [request.number for request in requests] == list(range(60))
    assert {(r.kind, r.max_tokens, r.until) for r in requests} == {("generate", 128, ())}
    right = task.summarise((request, task.score(request, oracle(request))) for request in requests)
    random = Random(0)
    wrong = task.summarise((r, task.score(r, guesser(random))) for r in requests)
    for summary, accuracy in ((right, 100), (wrong, 0)):
        by_length: Any = summary["by_length"]
        assert (summary["accuracy"], summary["samples"]) == (accuracy, 60)
        assert list(by_length) == ["6000", "8000"]
        for cell in by_length.values():
            assert (cell["accuracy"], cell["samples"]) == (accuracy, 30)
            assert set(cell["by_depth"].values()) == {accuracy}


def test_samples_depend_neither_on_their_number_nor_on_other_lengths() -> None:
    both = list(small_task("niah_multikey_1", 6000, 9000).requests(ByteTokenizer(), 6))
    alone = list(small_task("niah_multikey_1", 9000).requests(ByteTokenizer(), 3))
    assert [r.context for r in both[6:9]] == [r.context for r in alone]


def made(number: int, length: int, depth: float, tokens: int = 900) -> Request:
    metadata: dict[str, JSON] = {"length": length, "depth": depth, "tokens": tokens, "answer": "1"}
    return Request("niah_single_2", number, "generate", "", metadata=metadata)


def test_accuracy_by_length_and_depth() -> None:
    task = small_task("niah_single_2", 1024, 2048)
    requests = [made(0, 1024, 0), made(1, 1024, 9.9, 930), made(2, 1024, 10), made(3, 2048, 100)]
    scored = list(zip(requests, [{"accuracy": a} for a in (1.0, 0.0, 1.0, 0.0)], strict=True))
    summary = task.summarise(scored)
    assert summary == {
        "accuracy": 50.0,
        "samples": 4,
        "by_length": {
            "1024": {
                "accuracy": pytest.approx(200 / 3),
                "samples": 3,
                "prompt_tokens": 910,
                "by_depth": {"0": 50.0, "10": 100.0},
            },
            "2048": {
                "accuracy": 0.0,
                "samples": 1,
                "prompt_tokens": 900,
                "by_depth": {"90": 0.0},
            },
        },
    }
    assert grid(summary) == (
        ["1024", "2048"],
        [[50.0, None], [100.0, None], *[[None, None]] * 7, [None, 0.0]],
    )


def test_a_heat_map_shows_every_accuracy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    task = small_task("niah_single_2", 1024)
    short = task.summarise([(made(0, 1024, 0), {"accuracy": 1.0})])
    long = task.summarise(
        [(made(0, 1024, 0), {"accuracy": 0.0}), (made(1, 16384, 55), {"accuracy": 1.0})]
    )
    figure = draw({"S-NIAH-1": short, "S-NIAH-2": long})
    left, right, _ = figure.axes
    assert left.get_title() == "S-NIAH-1: 100.0 %"
    assert [text.get_text() for text in right.texts] == ["0", "100"]
    assert [label.get_text() for label in right.get_xticklabels()] == ["1024", "16384"]
    cells = right.images[0].get_array()
    assert (cells.shape, cells[0, 0], cells[5, 1], cells.mask.sum()) == ((10, 2), 0, 100, 18)
    file = tmp_path / "needles.png"
    heat_map({"S-NIAH-1": short, "S-NIAH-2": long}, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"got '.*needles.jpg', expected .* ends in .png"):
        heat_map({"S-NIAH-1": short}, tmp_path / "needles.jpg")
    with pytest.raises(ValueError, match="got no results"):
        heat_map({}, file)


def test_a_length_that_no_prompt_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths: got none, expected at least one"):
        small_task("niah_single_1")
    with pytest.raises(ValueError, match="length: got 128, expected more than the 128 tokens"):
        small_task("niah_single_1", 1024, 128)
    for fit in FITS:
        task = small_task("niah_multikey_1", 500, fit=fit)
        with pytest.raises(ValueError, match=r"length: got 500, expected at least \d+, what"):
            list(task.requests(ByteTokenizer(), 1))
    least = 3296  # what the error says of the first hundred draws
    with pytest.raises(ValueError, match=f"expected at least {least}"):
        list(small_task("niah_single_2", 2500).requests(ByteTokenizer(), 1))
    (request,) = small_task("niah_single_2", least + 10).requests(ByteTokenizer(), 1)
    assert request.metadata["haystack"] == 500


def test_wrong_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="task: got 'niah_single2', expected niah_single_2"):
        needle_task("niah_single2", [1024])
    with pytest.raises(ValueError, match="fit: got 'lmeval', expected lm_eval"):
        small_task("niah_single_1", 1024, fit="lmeval")
    with pytest.raises(ValueError, match="limit: got 0, expected a positive number"):
        list(small_task("niah_single_1", 1024).requests(ByteTokenizer(), 0))


def test_essays_are_read_from_json_and_text(tmp_path: Path) -> None:
    (tmp_path / "essays.json").write_text(json.dumps({"text": "One. Two."}))
    (tmp_path / "essays.txt").write_text("One. Two.")
    assert read_essays(tmp_path / "essays.json") == read_essays(tmp_path / "essays.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "a.txt: got an empty file, expected text"),
        ("a.json", "{", "a.json: got .*, expected JSON"),
        ("a.json", "[]", r"a.json: got fields \(none\), expected also 'text'"),
        ("a.json", '{"texts": ""}', "a.json: got fields texts, expected also 'text'"),
        ("a.json", '{"text": 3}', "a.json, field 'text': got 3, expected a string"),
        ("a.json", '{"text": " "}', "a.json: got an empty text, expected essays"),
        ("a.json.gz", "{}", "a.json.gz: damaged .*, expected a whole file"),
    ],
)
def test_bad_essays_are_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as mistake:
        read_essays(tmp_path / name)
    assert "\n" not in str(mistake.value)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="essays: got no file, expected one for niah_single_2"):
        needle_task("niah_single_2", [1024])
    with pytest.raises(ValueError, match=r"absent.json: got .*No such file.*, expected a file"):
        needle_task("niah_single_2", [1024], essays=tmp_path / "absent.json")
    (tmp_path / "essays.txt").write_text("One.")
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(ValueError, match=r'sentences: needs .* nltk, .*pip install "gdn2\[eval\]"'):
        needle_task("niah_single_2", [1024], essays=tmp_path / "essays.txt")


def test_sentences_without_their_data_are_refused(tmp_path: Path) -> None:
    nltk = pytest.importorskip("nltk")
    (tmp_path / "essays.txt").write_text("One.")
    before, nltk.data.path = nltk.data.path, []
    try:
        with pytest.raises(ValueError, match=f"nltk_data: got {tmp_path}, expected a folder"):
            needle_task("niah_single_2", [1024], essays=tmp_path / "essays.txt", nltk_data=tmp_path)
    finally:
        nltk.data.path = before
