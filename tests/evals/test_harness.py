"""Our adapter beside lm-eval's own `hf` model over the same weights, task by task, and data that come from files."""

import gzip
import json
import math
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from gdn2.data.tokenizers import load_tokenizer
from gdn2.evals.harness import _readable, _taken, main, protocol, run_task
from gdn2.evals.local_data import SOURCES, check_rows, find_file, write_task_file
from gdn2.evals.request import Request
from gdn2.evals.scoring import Answer, Scorer
from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from tests.data.samples import save_json
from tests.evals.cases import SHARED, write_rows
from tests.evals.rows import ROWS, write_folder
from tests.evals.subjects import write_model

lm_eval: Any = pytest.importorskip("lm_eval")
datasets: Any = pytest.importorskip("datasets")
transformers: Any = pytest.importorskip("transformers")
WINDOW = 40
LOCAL = SHARED / "data/eval"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is asked of the hub, and what the library keeps of files goes away with them."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


class Pairing:
    """One model, asked through our scorer and through lm-eval's class for transformers' models."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        from tests.hf.cases import twin  # noqa: PLC0415 (which needs transformers)

        native = LanguageModel(
            ModelConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                cell=(
                    DeltaConfig(num_heads=2, key_head_dim=16, value_head_dim=16),
                    AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16),
                ),
                vocab_size=vocabulary,
            )
        )
        random = torch.Generator().manual_seed(0)
        for parameter in native.parameters():  # so that tasks have likelihoods that differ
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=random)
        file = folder / "tokenizer.json"
        end = "<|endoftext|>"
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(file), eos_token=end, pad_token=end
        )
        self.hf = import_module("lm_eval.models.huggingface").HFLM(
            pretrained=twin(native), tokenizer=theirs, max_length=4096, batch_size=3
        )
        self.scorer = Scorer(native.eval(), load_tokenizer(file))
        self.ours: list[Answer] = []

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        found = dict(self.scorer.answers(requests))
        self.ours = [found[i] for i in range(len(requests))]
        return self.ours

    def theirs(self, name: str, data: Path, limit: int | None, window: int) -> Any:
        """What lm-eval alone makes of the task, from its task file to its metrics."""
        tasks: Any = import_module("lm_eval.tasks")
        self.hf._max_length = window if name == "wikitext" else 4096
        with TemporaryDirectory() as folder:
            stock = Path(tasks.__file__).parent
            write_task_file(name, stock, data, Path(folder))
            manager = tasks.TaskManager(include_path=folder, include_defaults=False)
            return lm_eval.simple_evaluate(
                model=self.hf, tasks=[name], task_manager=manager, limit=limit, bootstrap_iters=0
            )


@pytest.fixture(scope="module")
def pairing(tmp_path_factory: pytest.TempPathFactory) -> Pairing:
    folder = tmp_path_factory.mktemp("model")
    save_json(folder / "tokenizer.json")
    return Pairing(folder, 400)


def compare(
    pairing: Pairing, name: str, data: Path, limit: int | None, window: int
) -> dict[str, Any]:
    """Likelihoods to 1e-4, accuracies to the bit."""
    ours: Any = run_task(name, pairing.answer, window=window, data=data, limit=limit)
    theirs = pairing.theirs(name, data, limit, window)
    samples = theirs["samples"][name]
    responses = [found for sample in samples for (found,) in sample["resps"]]
    for own, other in zip(pairing.ours, responses, strict=True):
        if isinstance(own, list):
            assert own[1] == other[1]
            own, other = own[0], other[0]  # noqa: PLW2901
        assert own == pytest.approx(other, abs=1e-4, rel=1e-6)
    for metric, value in ours["metrics"].items():
        if "stderr" not in metric:
            expected = theirs["results"][name][f"{metric},none"]
            exact = metric.startswith("acc")
            assert value == (100 * expected if exact else pytest.approx(expected, rel=1e-4))
    return ours


@pytest.mark.parametrize("name", SOURCES)
def test_we_agree_with_lm_evals_own_model(name: str, pairing: Pairing, tmp_path: Path) -> None:
    found = compare(pairing, name, write_folder(tmp_path), None, WINDOW)
    assert found["samples"] == len(ROWS[name])
    assert len(pairing.ours) >= len(ROWS[name])


@pytest.mark.slow
@pytest.mark.skipif(not LOCAL.is_dir(), reason="no shared data")
@pytest.mark.parametrize("name", SOURCES)
def test_we_agree_on_real_rows(name: str, tmp_path: Path) -> None:
    tokenizer = SHARED / "data/tokenizers/gpt_neox_olmo/tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    compare(Pairing(tmp_path, 50280), name, LOCAL, 100 if name != "wikitext" else None, 1024)


@pytest.mark.skipif(not LOCAL.is_dir(), reason="no shared data")
def test_wikitext_has_62_documents_of_241335_words() -> None:
    """Counted from the perplexity of a model whose likelihood of every text is exp(-1)."""
    found: Any = run_task(
        "wikitext", lambda requests: [-1.0] * len(requests), window=9, data=LOCAL, limit=None
    )
    assert found["samples"] == 62
    assert 62 / math.log(found["metrics"]["word_perplexity"]) == pytest.approx(241_335)
    with gzip.open(find_file("wikitext", LOCAL), "rt") as lines:
        pages = [json.loads(line)["page"] for line in lines]
    assert sum(len(re.split(r"\s+", page)) for page in pages) == 241_335


def test_winogrande_is_scored_by_the_rest_of_the_sentence(tmp_path: Path) -> None:
    asked: list[Request] = []

    def answer(requests: Sequence[Request]) -> list[Answer]:
        asked.extend(requests)
        return [[-float(len(request.context)), False] for request in requests]

    found: Any = run_task("winogrande", answer, window=9, data=write_folder(tmp_path), limit=1)
    assert [(r.context, r.continuation) for r in asked] == [
        ("The rope was longer than the plank, so the rope", " was cut in two."),
        ("The rope was longer than the plank, so the plank", " was cut in two."),
    ]
    assert found["metrics"]["acc"] == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goal": None}, "row 2, field 'goal': got None, expected str"),
        ({"label": "0"}, "row 2, field 'label': got '0', expected int"),
    ],
)
def test_a_wrong_field_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    first, second = ROWS["piqa"]
    file = write_rows(tmp_path / "piqa_validation.jsonl", [first, second | change])
    with pytest.raises(ValueError, match=re.escape(f"{file}, {message}")):
        run_task("piqa", lambda _: [], window=9, data=tmp_path, limit=None)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("wikitext", {"page": " \n"}, r"field 'page': got ' \n', expected some text"),
        ("lambada_openai", {"text": ""}, "field 'text': got '', expected some text"),
        ("piqa", {"label": 2}, "field 'label': got 2, expected 0 or 1"),
        ("piqa", {"sol1": ""}, "field 'sol1': got '', expected some text"),
        ("hellaswag", {"label": "4"}, "field 'label': got '4', expected 0 or 1 or 2 or 3"),
        ("hellaswag", {"label": ""}, "field 'label': got '', expected 0 or 1 or 2 or 3"),
        ("hellaswag", {"endings": []}, "field 'endings': got [], expected a list of texts"),
        ("winogrande", {"answer": "0"}, "field 'answer': got '0', expected 1 or 2"),
        ("arc_easy", {"answerKey": "Z"}, "field 'answerKey': got 'Z', expected A or B or C or D"),
        ("arc_challenge", {"choices": {}}, "field 'choices': got None, expected a list of texts"),
        (
            "openbookqa",
            {"choices": {"text": ["salt", "rope"], "label": ["1"]}},
            "field 'choices': got 1 labels, expected 2 as of texts",
        ),
        ("social_iqa", {"label": "0"}, "field 'label': got '0', expected 1 or 2 or 3"),
        ("boolq", {"label": -1}, "field 'label': got -1, expected 0 or 1"),
    ],
)
def test_rows_that_do_not_fit_are_one_line(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Of the right fields and kinds, but without a text, or with a gold answer that is none of the choices."""
    file = tmp_path / f"{SOURCES[name].stems[0]}.jsonl"
    write_rows(file, [ROWS[name][0] | change])
    with pytest.raises(ValueError, match=re.escape(f"{file}, row 1, {message}")):
        run_task(name, lambda _: [], window=9, data=tmp_path, limit=None)


@pytest.mark.parametrize("name", SOURCES)
def test_rows_that_fit_are_taken(name: str, tmp_path: Path) -> None:
    check_rows(write_rows(tmp_path / "rows.jsonl", ROWS[name]), SOURCES[name])


def test_answers_that_give_no_metric_are_one_line(tmp_path: Path) -> None:
    """Here a perplexity that overflows: whatever lm-eval makes of it ends this task, not the others."""
    with pytest.raises(ValueError, match=r"wikitext: got OverflowError: .*, expected rows and"):
        run_task(
            "wikitext",
            lambda requests: [-1e9] * len(requests),
            window=9,
            data=write_folder(tmp_path),
            limit=None,
        )


def test_a_mistake_of_the_model_is_not_one_of_the_data(tmp_path: Path) -> None:
    def fail(requests: Sequence[Request]) -> list[Answer]:
        raise IndexError("no such row")

    with pytest.raises(IndexError, match="no such row"):
        run_task("boolq", fail, window=9, data=write_folder(tmp_path), limit=None)


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "piqa_validation.jsonl"
    for content, message in [
        (b"", "got an empty file"),
        (b'{"goal": 1', "line 1: got"),
        (b'{"goal": "x"}\n', "row 1: got fields goal, expected also 'sol1'"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            check_rows(file, SOURCES["piqa"])
        assert "\n" not in str(caught.value)


def test_the_protocol_says_what_was_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert "test split; rows of wikitext_test.jsonl; windows of 7 tokens" in protocol(
        "wikitext", 7, folder
    )
    assert "rows of the hub's; the state is carried" in protocol("wikitext", None, None)


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0"])
def test_without_a_gpu_the_cpu_answers(
    device: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's command line asks for cuda:0 on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    adapter: Any = import_module("gdn2.evals.adapter")
    asked = adapter.Gdn2LM(str(write_model(tmp_path / "model")), device=device)
    (answer,) = asked._scored([Request("t", 0, "loglikelihood", "the", " map")])
    assert answer[0] < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model_args: got no pretrained, expected pretrained=FOLDER"),
        ({"pretrained": "m", "windows": 3}, "model_args: got 'windows', expected window"),
        ({"pretrained": "m", "window": "abc"}, "window: got 'abc', expected an integer of at le"),
        ({"pretrained": "m", "window": 0}, "window: got 0, expected an integer of at least 1"),
        ({"pretrained": "m", "carry_state": 7}, "carry_state: got 7, expected true or false"),
        ({"pretrained": "m", "dtype": "fp16"}, "dtype: got 'fp16', expected one of float64, flo"),
    ],
    ids=str,
)
def test_wrong_options_of_our_model_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        import_module("gdn2.evals.adapter").Gdn2LM(**options)


@pytest.mark.slow  # lm-eval reads all of its task files
def test_lm_evals_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    folder = write_folder(tmp_path / "data")
    model = write_model(tmp_path / "model")
    words = ["--model", "gdn2", "--model_args", f"pretrained={model},window=16"]
    main([*words, "--tasks", "boolq,wikitext", "--data", str(folder)])
    printed = capsys.readouterr().out
    assert "word_perplexity" in printed
    assert re.search(r"boolq\s*\|\s*2\|none\s*\|\s*0\|acc", printed)


def test_a_task_of_several_filters_keeps_them_all() -> None:
    scores = {"exact_match,strict-match": 0.0, "exact_match,flexible-extract": 1.0, "acc,none": 0.5}
    found = {
        "results": {"t": scores | {"alias": "t", "acc_stderr,none": "N/A"}},
        "n-samples": {"t": {"effective": 2}},
        "versions": {"t": 3},
    }
    assert _readable("t", found)["metrics"] == {
        "exact_match,strict-match": 0.0,
        "exact_match,flexible-extract": 1.0,
        "acc": 50.0,
    }


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens"])
def test_the_limit_of_a_generation_has_several_names(name: str) -> None:
    adapter: Any = import_module("gdn2.evals.adapter")
    assert adapter._generation("t", 0, "x", {"until": ["."], name: 7}).max_tokens == 7
    cold = adapter._generation("t", 0, "x", {"until": ".", "temperature": 0.0})
    assert cold.max_tokens == adapter.MAX_TOKENS
    for warm in ({"temperature": 0.7}, {"do_sample": True}):
        with pytest.raises(ValueError, match="t: got do_sample, expected greedy generation"):
            adapter._generation("t", 0, "x", warm)


def test_an_option_may_be_one_word() -> None:
    for words in (["--data", "d"], ["--data=d"]):
        assert _taken(["--tasks=a", *words, "-x"], "--data") == (["--tasks=a", "-x"], "d")
