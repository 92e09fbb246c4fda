"""Run configs: files, presets, overrides, and what a resumed run may change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gdn2.models.presets import preset
from gdn2.training.config import RunConfig
from gdn2.training.embedded import CONFIGS, config_names
from gdn2.training.run_file import (
    check_same_run,
    config_from,
    load_config,
    write_config,
)
from tests.data.cases import write_folder
from tests.training.runs import config, table

RELEASED_TOKENS = 512 * 4096


@pytest.mark.parametrize("name", config_names())
def test_embedded_configs_are_valid(name: str) -> None:
    loaded = load_config(name)
    assert loaded.run.dir == f"runs/{name}"
    assert loaded.steps >= 100


def test_the_paper_is_the_default() -> None:
    loaded = load_config("paper-1.3b")
    assert loaded.model == preset("gdn2-1.3b-hybrid")
    assert (loaded.batch.tokens, loaded.batch.length) == (524_288, 4096)
    assert loaded.schedule.tokens == 100 * loaded.schedule.warmup_tokens == 10**11
    assert loaded.steps == 190_735
    section = loaded.optimiser
    assert (section.lr, section.betas, section.weight_decay) == (4e-4, (0.9, 0.95), 0.1)
    assert (section.clip, section.eps, section.decay_all) == (1.0, 1e-8, False)
    assert loaded.run.seed == 3407
    assert loaded.validation.lengths == (8192, 12288, 16384)


def test_the_released_script_is_three_overrides_away() -> None:
    changes = [f"batch.tokens={RELEASED_TOKENS}", "optimiser.decay_all=true"]
    loaded = load_config("paper-1.3b", [*changes, "model.preset=gdn2-1.3b"])
    assert loaded.model == preset("gdn2-1.3b")
    assert loaded.steps == 47_684
    assert loaded.optimiser.decay_all


def test_overrides_are_toml_values_or_words(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[run]\ndir = "r"\n[model]\npreset = "gdn2-1m"\nvocab_size = 256\n'
        '[data]\ntype = "python"\n[schedule]\ntokens = 1_000_000\n'
    )
    loaded = load_config(
        file,
        [
            "run.dir=runs/a b",
            "optimiser.betas=[0.8, 0.9]",
            "checkpoint.every_seconds=none",
            "model.tie_word_embeddings=true",
            'data={type="copying"}',
            "schedule.tokens=2_000_000",
        ],
    )
    assert loaded.run.dir == "runs/a b"
    assert loaded.optimiser.betas == (0.8, 0.9)
    assert loaded.checkpoint.every_seconds is None
    assert loaded.model.tie_word_embeddings
    assert loaded.model.hidden_size == preset("gdn2-1m").hidden_size
    assert loaded.model.vocab_size == 256
    assert loaded.data.type == "copying"
    assert loaded.schedule.tokens == 2_000_000


def test_one_override_is_given_in_a_list() -> None:
    with pytest.raises(ValueError, match=r"^overrides: got 'run.dir=x', expected a list of them$"):
        load_config("demo", "run.dir=x")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"optimizer": {"lr": 1}}, "optimizer: unknown name, expected optimiser"),
    "rate": ({"optimiser": {"rate": 1}}, "optimiser.rate: unknown name"),
    "lr": ({"optimiser": {"lr": -1.0}}, "optimiser.lr: got -1.0, expected more than 0"),
    "betas": ({"optimiser": {"betas": [0.9]}}, r"optimiser.betas: got \(0.9,\), expected two"),
    "tokens": ({"batch": {"tokens": 100}}, "batch.tokens: got 100, expected a multiple of 4 micro"),
    "compute": (
        {"precision": {"weights": "bf16", "compute": "fp32"}},
        "precision.compute: got 'fp32', expected 'bf16' or 'auto'",
    ),
    "keep": ({"checkpoint": {"keep": 0}}, "checkpoint.keep: got 0, expected at least 1"),
    "every": (
        {"checkpoint": {"every_tokens": 0}},
        "checkpoint.every_tokens: got 0, expected None or at least 1",
    ),
    "seconds": ({"checkpoint": {"every_seconds": 0}}, "checkpoint.every_seconds: got 0, expected"),
    "prompt": ({"samples": {"prompt": ""}}, "samples.prompt: got '', expected at least one"),
    "length": (
        {"validation": {"lengths": [16, 0]}},
        r"validation.lengths: got \[16, 0\], expected lengths of at least 1, each once$",
    ),
    "lengths": (
        {"validation": {"lengths": [16, 32, 16]}},
        r"validation.lengths: got \[16, 32, 16\], expected lengths of at least 1, each once$",
    ),
    "no length": (
        {"validation": {"lengths": [16, 32.0]}},
        r"validation.lengths\[1\]: got 32.0, expected an integer$",
    ),
    "one length": (
        {"validation": {"lengths": 16}},
        r"validation.lengths: got 16, expected a list$",
    ),
    "compile": ({"engine": {"compile": True}}, "engine.compile: got True, expected one of 'auto'"),
    "recompute": (
        {"engine": {"recompute": "no"}},
        "engine.recompute: got 'no', expected true or false$",
    ),
    "data": ({"data": {"type": "text"}}, "data.type: got 'text', expected one of tokens, python"),
    "preset": (
        {"model": {"preset": "gdn3-1m"}},
        "model.preset: got 'gdn3-1m', expected gdn-1m or gdn2-1m",
    ),
    "number": ({"model": {"preset": 3}}, "model.preset: got 3, expected a string"),
    "dir": ({"run": {"dir": ""}}, "run.dir: got '', expected a folder"),
}


@pytest.mark.parametrize("which", MISTAKES)
def test_mistakes_are_named(which: str, tmp_path: Path) -> None:
    change, message = MISTAKES[which]
    with pytest.raises(ValueError, match=f"^{message}"):
        config(tmp_path, **change)


def test_missing_sections_are_named(tmp_path: Path) -> None:
    whole = table(tmp_path)
    del whole["schedule"]
    with pytest.raises(ValueError, match=r"^schedule: missing, expected a table"):
        config_from(whole)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.lr", "override: got 'optimiser.lr', expected section.key=value"),
        ("=3", "override: got '=3', expected section.key=value"),
        ("run.dir.name=3", "override: got 'run.dir.name=3', but dir is no table"),
        ("optimiser.lr=fast", "optimiser.lr: got 'fast', expected a number"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        load_config("demo", [override])


def test_unknown_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^config: got 'demmo', expected a file or demo"):
        load_config("demmo")
    for opened in ("[", '{"a":'):
        (tmp_path / "c.json").write_text(opened * 100_000)
        with pytest.raises(ValueError, match=r"c.json: got maximum recursion .*, expected JSON$"):
            load_config(tmp_path / "c.json")
    (tmp_path / "c.toml").write_text("[run\n")
    with pytest.raises(ValueError, match=r"c.toml: got .*, expected TOML"):
        load_config(tmp_path / "c.toml")
    with pytest.raises(ValueError, match=r"^data\."):
        load_config("demo", ["data=" + 20_000 * "["])
    text = (CONFIGS / "demo.toml").read_text()
    (tmp_path / "c.toml").write_text(text, encoding="utf-8-sig")  # as some editors save it
    assert load_config(tmp_path / "c.toml") == load_config("demo")


def written(tmp_path: Path) -> RunConfig:
    first = config(tmp_path)
    write_config(first, tmp_path)
    return first


def test_a_written_config_is_read_back(tmp_path: Path) -> None:
    first = written(tmp_path)
    assert load_config(tmp_path / "config.json") == first
    check_same_run(first, tmp_path)


def test_what_a_written_config_does_not_say_has_its_default(tmp_path: Path) -> None:
    first, file = written(tmp_path), tmp_path / "config.json"
    data = json.loads(file.read_text())
    del data["model"]["init_scheme"]
    file.write_text(json.dumps(data))
    check_same_run(first, tmp_path)
    with pytest.raises(ValueError, match=r"^model.init_scheme: got 'paper', expected 'released'"):
        check_same_run(config(tmp_path, model={"init_scheme": "paper"}), tmp_path)


FREE: list[dict[str, dict[str, Any]]] = [
    {"batch": {"micro_rows": 2}},
    {"parallel": {"replicate": 2}},
    {"log": {"tensorboard": True}},
    {"checkpoint": {"keep": 7}},
    {"validation": {"rows": 3}},
    {"validation": {"lengths": [8192]}},
    {"engine": {"activation_checkpointing": True}},
    {"engine": {"recompute": False}},
    {"run": {"dir": "elsewhere"}},
]


@pytest.mark.parametrize("change", FREE, ids=str)
def test_what_may_differ_on_resuming(change: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    written(tmp_path)
    check_same_run(config(tmp_path, **change), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimiser": {"lr": 0.5}}, r"^optimiser.lr: got 0.5, expected 0.01, with which the run"),
        ({"run": {"seed": 6}}, r"^run.seed: got 6, expected 5"),
        ({"model": {"intermediate_size": 32}}, r"^model.intermediate_size: got 32, expected 24"),
        ({"data": {"pairs": 3}}, r"^data.pairs: got 3, expected 4"),
        ({"data": {"power": 0.5}}, r"^data.power: got 0.5, expected 0.01"),
    ],
)
def test_what_may_not_differ(change: Any, message: str, tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_same_run(config(tmp_path, **change), tmp_path)


def test_mixers_of_a_cell_are_compared_one_by_one(tmp_path: Path) -> None:
    written(tmp_path)
    changed = table(tmp_path)
    changed["model"]["cell"][1] = {**changed["model"]["cell"][1], "window": 8}
    with pytest.raises(ValueError, match=r"^model.cell\[1\].window: got 8, expected 16"):
        check_same_run(config_from(changed), tmp_path)


def reading(tokens: Path, folder: Path, **changes: Any) -> RunConfig:
    """A run on a folder of shards."""
    data = {"type": "tokens", "path": str(tokens), "validation_fraction": 0.0, **changes}
    return config_from({**table(folder), "data": data})


def test_data_may_move_but_not_change(tmp_path: Path) -> None:
    here = write_folder(tmp_path / "here", [30, 5])
    there = Path(shutil.copytree(here, tmp_path / "there"))
    other = write_folder(tmp_path / "other", [30, 6])
    write_config(reading(here, tmp_path), tmp_path)
    check_same_run(reading(there, tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"^data.path: got '.*other', which holds other data than"):
        check_same_run(reading(other, tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"^data.documents: got 'apart', expected 'run_on'"):
        check_same_run(reading(there, tmp_path, documents="apart"), tmp_path)
    shutil.rmtree(here)
    write_folder(here, [31, 5])
    with pytest.raises(ValueError, match=r"^data.path: got '.*here', which holds other data than"):
        check_same_run(reading(here, tmp_path), tmp_path)
