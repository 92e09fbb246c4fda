"""A run becomes a folder that transformers and lm-eval can use as it is, and they find what we do."""

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import gdn2
from gdn2.cli import app
from gdn2.data.tokenizers import load_tokenizer
from gdn2.evals.local_data import write_task_file
from gdn2.evals.results import describe
from gdn2.hf import lm_eval
from gdn2.hf.card import model_card
from gdn2.hf.export import export_run, find_model
from gdn2.hf.special_tokens import write_special_tokens
from gdn2.models.folder import load_stop_ids
from gdn2.models.presets import preset
from gdn2.models.run_folder import read_metrics
from gdn2.training.loop import train
from gdn2.training.run_file import load_config
from tests.data.samples import TEXTS, save_tokenizer
from tests.evals.rows import write_folder

TINY = [
    "model.hidden_size=16",
    "model.intermediate_size=16",
    "model.num_hidden_layers=1",
    "model.cell=[{type = 'delta', num_heads = 2, key_head_dim = 4, value_head_dim = 4}]",
    "batch.tokens=64",
    "batch.length=16",
    "batch.micro_rows=4",
    "schedule.tokens=192",
    "schedule.warmup_tokens=64",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    "validation.every_steps=2",
    "validation.rows=4",
    "engine.device=cpu",
]
TASKS = ["wikitext", "lambada_openai", "boolq", "hellaswag"]
WINDOW = 512  # in bytes; one of wikitext's pages is longer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a smaller model, for three steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(load_config("demo", [*TINY, f"run.dir={folder}"]))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(trained, tmp_path / "run")


def command(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_latest_model_or_that_of_a_step_is_found(run: Path) -> None:
    (run / "checkpoints/step-copy").mkdir()
    assert find_model(run) == run / "model"
    assert find_model(run, 1).parent.name == "step-00000001"
    with pytest.raises(ValueError, match=r"^step: got 7, expected a step .* kept: 1, 2, 3$"):
        find_model(run, 7)
    with pytest.raises(ValueError, match=r"^run: got .*nothing with neither model nor checkpoints"):
        find_model(run.parent / "nothing")
    (run / "model").rename(run / ".model.old")  # killed while it was replaced
    assert find_model(run) == run / ".model.old"
    shutil.rmtree(run / ".model.old")
    assert find_model(run).parent.name == "step-00000003"


def test_a_run_is_exported_with_tokenizer_and_card(run: Path) -> None:
    place = run.parent / "shared|model"
    words = ["export", run, place, "--step", 2]
    done = command(*words)
    assert done.exit_code == 0, done.output
    tokenizer = AutoTokenizer.from_pretrained(place)
    text = "Grüße, 世界!"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == list(text.encode())
    assert tokenizer.decode(ids[0]) == text
    model = AutoModelForCausalLM.from_pretrained(place)
    native = gdn2.load(run / "checkpoints/step-00000002/model")
    assert torch.equal(model(ids).logits, native(ids).logits)
    assert GenerationConfig.from_pretrained(place).eos_token_id is None  # bytes have none
    second = read_metrics(run)[1]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = (place / "README.md").read_text()
    expected = [
        *("library_name: transformers", "pipeline_tag: text-generation", "# shared|model"),
        f"A language model of {parameters:,} parameters, trained with gdn2.",
        *("| steps | 2 |", "| tokens | 128 |", f"| training loss | {second['loss']:.5g} |"),
        f"| validation loss | {second['validation_loss']:.5g} |",
        *("| data.type | python |", "| schedule.tokens | 192 |", "| optimiser.lr | 0.003 |"),
        *("| seed | 3407 |", "| width | 16 |"),
    ]
    for line in expected:
        assert line in card.splitlines(), line
    assert "## Evaluation" not in card
    again = command(*words)
    assert again.exit_code == 2
    assert "which exists, expected a new one" in again.output


def test_a_killed_run_is_exported_as_of_its_last_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints/step-00000003")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    export_run(run, run.parent / "m")
    card = (run.parent / "m/README.md").read_text()
    assert "| steps | 2 |" in card
    assert f"| training loss | {read_metrics(run)[1]['loss']:.5g} |" in card


def test_a_damaged_checkpoint_is_not_exported(run: Path) -> None:
    shutil.rmtree(run / "model")
    file = run / "checkpoints/step-00000003/model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = b"\0\0\0\1"
    file.write_bytes(content)
    done = command("export", run, run.parent / "m")
    assert done.exit_code == 2
    assert "step-00000003: got " in done.stderr and "--step takes another" in done.stderr
    assert not (run.parent / "m").exists()
    assert command("export", run, run.parent / "m", "--step", 2).exit_code == 0


def test_parts_of_a_mixture_stand_in_the_card() -> None:
    parts = [{"type": "tokens", "path": "a"}, {"type": "python"}]
    table = {"run": {"seed": 1}, "data": {"type": "mixture", "weights": [1.0, 2.0], "parts": parts}}
    card = model_card("m", preset("gdn2-1m"), table, {}, {})
    rows = ["| data.weights | [1.0, 2.0] |", "| data.parts.1.path | a |"]
    for line in [*rows, "| data.parts.2.type | python |"]:
        assert line in card.splitlines(), line


def results(run: Path, content: Any) -> Path:
    file = run / "results.json"
    file.write_text(json.dumps(content))
    return file


def test_results_of_lm_eval_stand_in_the_card(run: Path) -> None:
    found = {"alias": "tiny", "acc,none": 0.625, "acc_stderr,none": "N/A", "exact,strict": 0.5}
    export_run(run, run.parent / "m", results=results(run, {"results": {"tiny": found}}))
    card = (run.parent / "m/README.md").read_text().splitlines()
    for line in ("| tiny.acc | 0.625 |", "| tiny.exact,strict | 0.5 |"):
        assert line in card, line
    assert not any("alias" in line for line in card)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], r"results\.json: got a list, expected a table$"),
        ({"tiny": 0.5}, r"results\.json: got none, expected results of `gdn2 eval` or of lm-eval$"),
        ({"results": {"tiny": 0.5}}, r"got none, expected results of `gdn2 eval` or of lm-eval$"),
        (
            {"format": "gdn2 results 1", "tasks": {}},
            r"json: got no model, or a task without numbers",
        ),
        (
            {"format": "gdn2 results 1", "tasks": {}, "model": 7},
            r"json: got no model, or a task without numbers, expected results of `gdn2 eval`$",
        ),
        (
            {
                "format": "gdn2 results 1",
                "tasks": {"a": {"metrics": [1], "samples": 1, "protocol": {}}},
                "model": {},
            },
            r"json: got no model, or a task without numbers, expected results of `gdn2 eval`$",
        ),
        ({"config": "0", "step": 3}, r"got those of model 0 after step 3, expected of \w+ after"),
        ({"step": 2}, r"got those of model \w+ after step 2, expected of \w+ after step 3$"),
    ],
)
def test_bad_results_are_refused_before_anything_is_written(
    content: Any, message: str, run: Path
) -> None:
    if "step" in content:
        seen = {"config": gdn2.load(run / "model").config.digest, **content}
        content = {"format": "gdn2 results 1", "model": seen, "tasks": {}}
    with pytest.raises(ValueError, match=message):
        export_run(run, run.parent / "m", results=results(run, content))
    assert not (run.parent / "m").exists()


def test_results_of_other_weights_are_refused(run: Path) -> None:
    folder = run / "model"
    seen = describe(str(folder), gdn2.load(folder).config, load_tokenizer("bytes"), torch.float32)
    content = {"format": "gdn2 results 1", "model": seen, "tasks": {}}
    export_run(run, run.parent / "own", results=results(run, content))
    model = gdn2.load(folder)
    with torch.no_grad():
        model.norm.weight.add_(1)
    gdn2.save(model, folder)
    message = r"results\.json: got those of weights \w{16}, expected of weights \w{16} in .*model$"
    with pytest.raises(ValueError, match=message):
        export_run(run, run.parent / "m", results=results(run, content))
    assert not (run.parent / "m").exists()


def test_a_run_called_like_a_checkpoint_is_exported(run: Path) -> None:
    place = run.parent / "step-00001000"
    shutil.copytree(run, place)
    assert command("export", place, run.parent / "m").exit_code == 0
    assert "| steps | 3 |" in (run.parent / "m" / "README.md").read_text()


def test_what_another_export_left_is_not_taken_over(run: Path) -> None:
    """A kill between two renames leaves a folder under another name, where readers find it."""
    assert command("export", run, run.parent / "m").exit_code == 0
    (run.parent / "m").rename(run.parent / ".m.old")
    result = command("export", run, run.parent / "m")
    assert result.exit_code == 2 and f"{run.parent / 'm'}, which exists" in result.stderr
    assert (run.parent / ".m.old" / "config.json").is_file()


def test_what_cannot_be_written_or_read_leaves_nothing(run: Path) -> None:
    (run.parent / "file").write_text("")
    failed = command("export", run, run.parent / "file" / "m")
    assert failed.exit_code == 2
    assert "error: got [Errno 20]" in failed.output
    (run / "config.json").write_text('{"run": {}, "schedule": {}}')
    assert command("export", run, run.parent / "n").exit_code == 0
    assert "| seed | unknown |" in (run.parent / "n" / "README.md").read_text()
    (run / "config.json").unlink()
    failed = command("export", run, run.parent / "m")
    assert failed.exit_code == 2
    assert "config.json: got no such file, expected JSON" in failed.output
    assert not any("m" in path.name for path in run.parent.iterdir())


@pytest.mark.parametrize("kind", ["json", "gpt2", "sentencepiece"])
def test_transformers_sees_the_tokens_we_see(kind: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    name = save_tokenizer(tmp_path / "source", kind)
    ours = load_tokenizer(name)
    folder = tmp_path / "m"
    gdn2.save(gdn2.LanguageModel(preset("gdn2-1m")), folder)
    ours.save(folder)
    if kind == "sentencepiece":  # what a run's own model folder holds is enough
        assert AutoTokenizer.from_pretrained(folder)(TEXTS[0]).input_ids == ours.encode(TEXTS[0])
    write_special_tokens(folder, ours.bos_id, ours.eos_id)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    for text in TEXTS:
        if "<s>" not in text:  # a special token's name, which is text for our SentencePiece
            assert theirs(text).input_ids == ours.encode(text), text
    again = load_tokenizer(folder)
    assert (again.bos_id, again.eos_id) == (ours.bos_id, ours.eos_id)
    assert load_stop_ids(folder) == [ours.eos_id]


def test_lm_evals_own_model_finds_what_our_evaluation_does(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, evaluated, exported with the results, and evaluated again as transformers' model."""
    library = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(run.parent / "cache"))
    data, tasks, out = write_folder(run.parent / "data"), run.parent / "tasks", run.parent / "out"
    words: list[object] = ["--tasks", ",".join(TASKS), "--data", data, "--window", WINDOW]
    done = command("eval", run / "model", *words, "--device", "cpu", "--out", run.parent / "eval")
    assert done.exit_code == 0, done.output
    record = json.loads((run.parent / "eval/results.json").read_text())
    place = run.parent / "m"
    done = command("export", run, place, "--results", run.parent / "eval/results.json")
    assert done.exit_code == 0, done.output

    tasks.mkdir()
    for name in TASKS:
        write_task_file(name, Path(library.__file__).parent, data, tasks)
    own = f"pretrained={place},prefix_token_id=10,max_length={WINDOW}"  # bytes have no such token
    asked = ["run", "--model", "hf", "--model_args", own, "--include_path", str(tasks)]
    asked += ["--tasks", *TASKS, "--output_path", str(out), "--batch_size", "3", "--device", "cpu"]
    # Reading thousands of other tasks, and asking pip and others about the machine, takes half a minute.
    few = partial(library.TaskManager, include_defaults=False)
    monkeypatch.setattr(library, "TaskManager", few)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["lm_eval", *asked])
    lm_eval.main()
    (file,) = out.rglob("results*.json")
    theirs = json.loads(file.read_text())["results"]

    card = (place / "README.md").read_text()
    compared = 0
    for name in TASKS:
        for metric, value in record["tasks"][name]["metrics"].items():
            if "stderr" not in metric:
                found = theirs[name][f"{metric},none"] * (100 if metric.startswith("acc") else 1)
                assert math.isclose(found, value, rel_tol=1e-5), f"{name} {metric}"
                assert f"| {name}.{metric} | {value:.5g} |" in card
                compared += 1
    assert compared == 8
    assert "| boolq.samples | 2 |" in card
