"""What a run refuses before it begins: folders of others, data that do not fit, numbers that are none."""

import json
import math
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

from gdn2.data.batch import Batch
from gdn2.data.config import MixtureConfig, TokensConfig, open_source
from gdn2.data.prepare import prepare
from gdn2.data.synthetic import ParityConfig
from gdn2.layers.plain import to_plain
from gdn2.models.config import ModelConfig
from gdn2.models.files import replace_file
from gdn2.models.language_model import LanguageModel
from gdn2.models.run_folder import read_metrics
from gdn2.training import demo, loop, run_file
from gdn2.training.config import RunConfig
from gdn2.training.faults import TrainingError, is_lack_of_memory
from gdn2.training.loop import train
from gdn2.training.run_file import config_from, load_config
from gdn2.training.validation import _judged
from tests.training.runs import LENGTH, config


@pytest.mark.parametrize("name", ["config.json", "data.json", "metrics.jsonl", "model"])
def test_files_of_others_are_left_alone(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text('{"model_type": "gdn2"}')
    said = f"^run.dir: got {tmp_path}, where {name} is of no run, expected a new folder or a run's$"
    with pytest.raises(ValueError, match=said):
        train(config(tmp_path))
    assert file.read_text() == '{"model_type": "gdn2"}' and [*tmp_path.iterdir()] == [file]


def test_a_run_that_saved_nothing_begins_anew(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"checkpoint": {"every_steps": 100}}
    train(config(tmp_path, **sections), until=2)
    for saved in (tmp_path / "checkpoints").glob("step-*"):
        saved.rename(tmp_path / "away")
    assert train(config(tmp_path, **sections), until=3).step == 3


def test_a_finished_model_is_not_trained_over(tmp_path: Path) -> None:
    """Its checkpoints take room, and may be removed."""
    train(config(tmp_path))
    rmtree(tmp_path / "checkpoints")
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    with pytest.raises(ValueError, match=r"^run.dir: got .*, which holds a finished model and no"):
        train(config(tmp_path, run={"seed": 6}))
    assert {file: file.read_bytes() for file in kept} == kept


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^run.dir: got .*name too long.*, expected a folder to w"
    ):
        train(config(tmp_path / ("a" * 300)))


def test_a_run_killed_at_its_first_file_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(file: Path, content: str) -> None:
        if len([*tmp_path.glob("*.json")]) == 1:
            raise KeyboardInterrupt
        replace_file(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(run_file, "replace_file", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path))
    assert [file.name for file in tmp_path.glob("*.json")] == ["config.json"]
    assert train(config(tmp_path), until=1).step == 1


def test_a_model_without_numbers_has_no_loss(tmp_path: Path) -> None:
    """Rather than the best there is."""
    sections: dict[str, Any] = {"optimiser": {"lr": 1e30, "max_skips": 100}}
    end = train(config(tmp_path, **sections))
    assert math.isnan(end.validation["validation_loss"])
    assert read_metrics(tmp_path)[-1]["validation_loss"] is None


def test_a_batch_without_targets_has_none_to_lose(tmp_path: Path) -> None:
    run = config(tmp_path)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    for targets, expected in ((torch.full_like(ids, -100), True), (ids, False)):
        loss, right = _judged(LanguageModel(run.model), Batch(ids, targets), torch.device("cpu"))
        assert (loss.item() == 0) == expected and math.isfinite(loss.item())
        assert not expected or right == 0


def tokens(folder: Path, text: str, tokenizer: str = "bytes") -> str:
    source = folder.with_suffix(".txt")
    source.write_text(text)
    prepare([str(source)], folder, tokenizer=tokenizer, workers=1)
    return str(folder)


def words(file: Path) -> str:
    """A tokenizer that knows three letters."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "<|endoftext|>": 3}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return str(file)


def text_run(folder: Path, path: str) -> RunConfig:
    """Trained on tokens in a folder, with samples."""
    samples = {"every_steps": 2, "prompt": "The", "tokens": 2}
    plain = to_plain(config(folder, model={"vocab_size": 256}, samples=samples))
    data = {"type": "tokens", "path": path, "validation_fraction": 0.3}
    return config_from(plain | {"data": data})


def test_a_prompt_of_no_tokens_is_found_at_once(tmp_path: Path) -> None:
    path = tokens(tmp_path / "abc", "abc" * 200, words(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError, match=r"^samples.prompt: got 'The', expected text that the data"
    ):
        train(text_run(tmp_path / "run", path))
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()]


def test_a_sample_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> str:
        raise ValueError("prompts[0]: got no tokens, expected at least one")

    path = tokens(tmp_path / "text", "some text " * 100)
    monkeypatch.setattr(loop, "sample", fails)
    end = train(text_run(tmp_path / "run", path), until=3)
    assert end.step == 3
    assert "no sample: prompts[0]: got no tokens" in capsys.readouterr().err


def test_validation_has_the_tokenizer_of_training(tmp_path: Path) -> None:
    letters = tokens(tmp_path / "abc", "abc" * 200, words(tmp_path / "tokenizer.json"))
    text = tokens(tmp_path / "text", "some text " * 100)
    for path, other in ((letters, text), (text, letters)):
        data = TokensConfig(path=path, validation_path=other)
        said = f"^validation_path: got '{other}', expected tokens of the tokenizer of {path}$"
        with pytest.raises(ValueError, match=said):
            open_source(data, LENGTH, 0, "train")
        parts = (ParityConfig(), TokensConfig(path=path), TokensConfig(path=other))
        mixed = MixtureConfig(parts=parts, weights=(1, 1, 1))
        said = f"^parts: got '{other}', expected tokens of the tokenizer of {path}$"
        with pytest.raises(ValueError, match=said):
            open_source(mixed, LENGTH, 0, "train")


def test_home_is_read_as_by_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    changed = load_config("demo", ["run.dir=~/runs/a"])
    assert changed.run.dir == f"{tmp_path}/runs/a"
    data = TokensConfig(path="~/shards", validation_path="~/more")
    assert (data.path, data.validation_path) == (f"{tmp_path}/shards", f"{tmp_path}/more")
    assert load_config("demo", ["run.dir=~nobody-of-this-name/a"]).run.dir.startswith("~nobody")


@pytest.mark.parametrize("name", ["2024-01-01", "2024", "none", "1e3", 'a "b" \\ c', "true"])
def test_a_demo_lives_in_any_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def begin(run: Any, until: int) -> Any:
        found.append(run.run.dir)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", begin)
    with pytest.raises(KeyboardInterrupt):
        demo.demo(Path(name), lambda line: None)
    assert found == [name]


def test_text_ends_as_it_was_given() -> None:
    assert load_config("demo", ["samples.prompt=def "]).samples.prompt == "def "
    assert load_config("demo", ["checkpoint.every_seconds=none "]).checkpoint.every_seconds is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimiser.lr=inf", r"optimiser.lr: got inf, expected more than 0 and finite"),
        ("optimiser.eps=inf", r"optimiser.eps: got inf, expected more than 0 and finite"),
        ("optimiser.weight_decay=nan", r"optimiser.weight_decay: got nan, expected at least 0"),
        ("samples.temperature=inf", r"samples.temperature: got inf, expected at least 0 and fin"),
    ],
)
def test_numbers_are_finite(change: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        load_config("demo", [change])


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_only_cpus_and_gpus_train(device: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"^engine.device: got '{device}', expected 'cpu' or 'cuda'$"
    ):
        train(config(tmp_path, engine={"device": device}))


def test_too_little_memory_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(config: ModelConfig, **_: object) -> LanguageModel:
        torch.empty(1 << 60)
        raise AssertionError

    monkeypatch.setattr("gdn2.training.run.build_model", large)
    with pytest.raises(TrainingError, match=r"^there is not enough memory; take fewer batch.micro"):
        train(config(tmp_path))
    assert not is_lack_of_memory(RuntimeError("shapes differ"))
