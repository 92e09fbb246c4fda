"""A run becomes a folder that transformers and lm-eval can use as it is."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import gdn2
from gdn2.cli import app
from gdn2.data.config import CorpusConfig
from gdn2.data.tokenizers import BYTES, load_tokenizer
from gdn2.hf import lm_eval
from gdn2.hf.export import export_run, find_model
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from gdn2.training.checkpoint_files import step_folder
from gdn2.training.checkpoints import MODEL_FOLDER
from gdn2.training.config import RunConfig, RunSection, ScheduleSection
from gdn2.training.metrics import FILE
from gdn2.training.run import CHECKPOINTS, MODEL
from gdn2.training.run_file import write_config
from gdn2.training.writing import exporter
from tests.layers.cases import DELTA, MIXERS, scramble

CONFIG = ModelConfig(
    hidden_size=10,
    intermediate_size=14,
    num_hidden_layers=2,
    cell=(DELTA, MIXERS["window"]),
    vocab_size=256,
)


def model_after(step: int) -> LanguageModel:
    model = LanguageModel(CONFIG)
    scramble(model, seed=step)
    return model.float()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What training leaves behind."""
    folder = tmp_path / "run"
    export = exporter(CONFIG, load_tokenizer(BYTES))
    (folder / CHECKPOINTS).mkdir(parents=True)
    config = RunConfig(
        run=RunSection(dir=str(folder)),
        model=CONFIG,
        data=CorpusConfig(),
        schedule=ScheduleSection(tokens=123456),
    )
    write_config(config, folder)
    lines: list[dict[str, Any]] = []
    for step in (1, 2, 3):
        lines.append({"step": step, "tokens": 1000 * step, "loss": 5.5 - step})
        place = step_folder(folder / CHECKPOINTS, step)
        place.mkdir()
        export(place / MODEL_FOLDER, dict(model_after(step).state_dict()))
    lines[1]["validation_loss"] = 4.25
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / FILE).write_text(text + '{"step": 4, "lo')  # a kill cut it short
    return folder


def test_the_latest_model_or_that_of_a_step_is_found(run: Path) -> None:
    assert find_model(run).parent.name == "step-00000003"
    assert find_model(run, 1).parent.name == "step-00000001"
    with pytest.raises(ValueError, match=r"^step: got 7, expected a step .* kept: 1, 2, 3$"):
        find_model(run, 7)
    with pytest.raises(ValueError, match=r"^run: got .*nothing with neither model nor checkpoints"):
        find_model(run.parent / "nothing")
    exporter(CONFIG, None)(run / MODEL, dict(model_after(9).state_dict()))
    assert find_model(run) == run / MODEL


def test_a_run_is_exported_with_tokenizer_and_card(run: Path) -> None:
    results = {"results": {"tiny": {"alias": "tiny", "acc,none": 0.625, "acc_stderr,none": 0.1}}}
    (run / "results.json").write_text(json.dumps(results))
    place = run.parent / "shared|model"
    command = ["export", str(run), str(place), "--step", "2"]
    done = CliRunner().invoke(app, [*command, "--results", str(run / "results.json")])
    assert done.exit_code == 0, done.output
    tokenizer = AutoTokenizer.from_pretrained(place)
    text = "Grüße, 世界!"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == list(text.encode())
    assert tokenizer.decode(ids[0]) == text
    model = AutoModelForCausalLM.from_pretrained(place)
    assert torch.equal(model(ids).logits, model_after(2)(ids).logits)
    card = (place / "README.md").read_text()
    expected = [
        *("library_name: transformers", "pipeline_tag: text-generation", "# shared|model"),
        *("| steps | 2 |", "| tokens | 2,000 |", "| training loss | 3.5 |"),
        *("| validation loss | 4.25 |", "| data.type | python |", "| schedule.tokens | 123,456 |"),
        *("| optimiser.lr | 0.0004 |", "| tiny.acc,none | 0.625 |", "| width | 10 |"),
    ]
    for line in expected:
        assert line in card.splitlines(), line
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"A language model of {parameters:,} parameters" in card
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "which exists, expected a new one" in again.output


def test_bad_results_are_refused_before_anything_is_written(run: Path) -> None:
    (run / "results.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"results\.json: got a list, expected a table$"):
        export_run(run, run.parent / "m", results=run / "results.json")
    (run / "results.json").write_text('{"tiny": 0.5}')
    with pytest.raises(ValueError, match=r"results\.json: got .*, expected a table of numbers"):
        export_run(run, run.parent / "m", results=run / "results.json")
    assert not (run.parent / "m").exists()


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
DOCUMENTS = [("one, two,", " three"), ("a", " b c d"), ("The sky is", " blue"), ("x" * 90, " y")]


@torch.no_grad()
def log_likelihood(model: LanguageModel, text: str, target: str) -> float:
    ids = torch.tensor([list((text + target).encode())])
    logits = model(ids[:, :-1]).logits
    assert isinstance(logits, Tensor)
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    return float(chosen[-len(target.encode()) :].sum())


def test_lm_evals_own_model_gives_the_native_numbers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    export_run(run, run.parent / "m")
    tasks, out = run.parent / "tasks", run.parent / "out"
    tasks.mkdir()
    rows = [{"text": text, "target": target} for text, target in DOCUMENTS]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "tiny.yaml").write_text(TASK.format(file=tasks / "rows.jsonl"))
    own = f"pretrained={run.parent / 'm'},prefix_token_id=10"  # bytes have no token of that kind
    command = ["run", "--model", "hf", "--model_args", own]
    command += ["--tasks", "tiny", "--include_path", str(tasks), "--output_path", str(out)]
    command += ["--batch_size", "3", "--device", "cpu"]
    monkeypatch.setenv("HF_DATASETS_CACHE", str(run.parent / "cache"))
    monkeypatch.setattr(sys, "argv", ["lm_eval", *command])
    lm_eval.main()
    (file,) = out.rglob("results*.json")
    found = json.loads(file.read_text())["results"]["tiny"]
    native = gdn2.load(run.parent / "m")
    expected = [log_likelihood(native, text, target) for text, target in DOCUMENTS]
    mean = sum(expected) / len(expected)
    assert math.isclose(math.log(found["perplexity,none"]), -mean, rel_tol=1e-5)
