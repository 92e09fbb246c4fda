"""Runs that begin with the weights of a model folder."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import gdn2
from gdn2.data.config import open_source
from gdn2.layers.config import AttentionConfig
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from gdn2.models.weights import checksum
from gdn2.training.config import RunConfig
from gdn2.training.loop import train
from gdn2.training.run import Run, own_folder
from gdn2.training.run_file import check_same_run, config_from, write_config
from gdn2.training.shard import full_weights
from gdn2.training.validation import validate
from gdn2.training.world import World
from tests.training.runs import LENGTH, ROWS, STEPS, assert_same_run, config, losses, table
from tests.training.spawn import alone, in_processes

SEED = 11  # of the folder's model; the runs' is another


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "first", config(tmp_path).model)


def saved(folder: Path, model: ModelConfig, seed: int = SEED) -> Path:
    gdn2.save(LanguageModel(model, seed=seed), folder)
    return folder


def beginning(run: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    own = {"dir": str(run), "seed": 5, "init_from": str(folder)}
    return config(run, run=own, **sections)


def first_weights(world: World, run: RunConfig) -> dict[str, Tensor] | None:
    with own_folder(run, world):
        return full_weights(Run(run, world).model, world)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_begins_with_the_folders_weights(compute: str, tmp_path: Path, folder: Path) -> None:
    chosen = beginning(tmp_path / "run", folder, precision={"compute": compute})
    with alone() as world:
        found = first_weights(world, chosen)
    assert found is not None
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_its_first_losses_are_the_models(tmp_path: Path, folder: Path) -> None:
    chosen = beginning(tmp_path / "run", folder)
    model = gdn2.load(folder)

    def loss(split: Any, seed: int, rows: int) -> float:
        ids, targets, _ = open_source(chosen.data, LENGTH, seed, split).batch(0, rows)
        with torch.no_grad():
            logits = model(ids).logits
        return float(cross_entropy(logits.flatten(0, 1), targets.flatten()))

    with alone() as world, own_folder(chosen, world):
        run = Run(chosen, world)
        assert run.held_out is not None
        how: dict[str, Any] = {"rows": 10, "micro_rows": 4, "with_accuracy": False}
        held_out = validate(run.model, run.held_out, world, **how)["validation_loss"]
    assert held_out == pytest.approx(loss("validation", 0, 10), rel=1e-6)
    train(chosen, until=1)
    assert losses(tmp_path / "run") == pytest.approx([loss("train", 5, ROWS)], rel=1e-6)


@pytest.mark.parametrize("replicate", [1, 2])
def test_processes_take_their_parts(replicate: int, tmp_path: Path, folder: Path) -> None:
    chosen = beginning(tmp_path / "run", folder, batch={"micro_rows": 2})
    found = in_processes(2 * replicate, first_weights, chosen, replicate=replicate)[0]
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_weights_of_several_files_and_another_dtype(tmp_path: Path) -> None:
    """bf16 is exact in fp32; vectors were fp32 all along."""
    model = LanguageModel(config(tmp_path).model, seed=SEED).cast(torch.bfloat16)
    gdn2.save(model, tmp_path / "first", shard_bytes=2000)
    assert len([*(tmp_path / "first").glob("model-*.safetensors")]) > 1
    with alone() as world:
        found = first_weights(world, beginning(tmp_path / "run", tmp_path / "first"))
    assert found is not None
    for name, parameter in model.named_parameters():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], parameter.detach().float()), name


def test_a_resumed_run_needs_no_folder(tmp_path: Path, folder: Path) -> None:
    train(beginning(tmp_path / "whole", folder))
    train(beginning(tmp_path / "run", folder), until=5)
    shutil.rmtree(folder)
    assert train(beginning(tmp_path / "run", folder)).is_finished
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(ValueError, match=r"^run.init_from: got '.*first', expected a folder with"):
        train(beginning(tmp_path / "new", folder))
    assert not (tmp_path / "new" / "config.json").exists()


def test_a_run_that_was_killed_before_its_first_save_begins_again(
    tmp_path: Path, folder: Path
) -> None:
    run, rarely = tmp_path / "run", {"every_steps": 100}
    train(beginning(run, folder, checkpoint=rarely), until=2)
    shutil.rmtree(run / "checkpoints")
    train(beginning(run, folder))
    train(beginning(tmp_path / "whole", folder))
    assert_same_run(run, tmp_path / "whole")


def test_a_run_knows_what_it_began_with(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / "run"
    train(beginning(run, folder), until=1)
    train(beginning(run, folder), until=2)
    assert json.loads((run / "data.json").read_text()) == {"run.init_from": checksum(folder)}
    other = saved(tmp_path / "other", config(run).model, seed=12)
    moved = folder.rename(tmp_path / "moved")
    check_same_run(beginning(run, moved), run)
    with pytest.raises(ValueError, match=r"^run.init_from: got '.*other', which holds other data"):
        check_same_run(beginning(run, other), run)
    with pytest.raises(ValueError, match=r"^run.init_from: got None, expected '.*first', with whi"):
        check_same_run(config(run), run)
    with pytest.raises(ValueError, match=r"^run.init_from: got '.*gone', expected a folder with a"):
        check_same_run(beginning(run, tmp_path / "gone"), run)
    fresh = tmp_path / "fresh"
    train(config(fresh), until=1)
    with pytest.raises(ValueError, match=r"^run.init_from: got '.*moved', expected None, with whi"):
        check_same_run(beginning(fresh, moved), fresh)


def test_a_model_that_is_left_out_is_the_folders(tmp_path: Path) -> None:
    expected = replace(config(tmp_path).model, intermediate_size=40)
    first = saved(tmp_path / "first", expected)
    own = {"dir": str(tmp_path / "run"), "seed": 5, "init_from": str(first)}
    for left_out in (dict.pop, lambda tables, name: tables.update({name: None})):
        tables = table(tmp_path / "run", run=own)
        left_out(tables, "model")
        assert config_from(tables).model == expected
    train(config_from(tables), until=3)
    shutil.rmtree(first)
    assert config_from(tables).model == expected
    assert train(config_from(tables), until=STEPS).is_finished
    tables["run"] = {"dir": str(tmp_path / "another")}
    with pytest.raises(ValueError, match=r"^model: got None, expected a table$"):
        config_from(tables)


def test_how_weights_were_drawn_does_not_matter(tmp_path: Path) -> None:
    model = replace(config(tmp_path).model, initializer_range=0.5)
    train(beginning(tmp_path / "run", saved(tmp_path / "first", model)), until=1)


def harm_tensor(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return harm


def other_width(folder: Path) -> None:
    saved(folder, replace(gdn2.load(folder).config, intermediate_size=40))


def a_folder(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.unlink()
    file.mkdir()


def a_run(folder: Path) -> None:
    folder.rename(folder.with_name("model"))
    folder.mkdir()
    folder.with_name("model").rename(folder / "model")
    write_config(config(folder), folder)


def other_window(folder: Path) -> None:
    model = gdn2.load(folder).config
    delta, attention = model.cell
    assert isinstance(attention, AttentionConfig)
    saved(folder, replace(model, cell=(delta, replace(attention, window=4))))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "run.init_from: got '.*first', expected a folder with a model"),
    "empty": (
        lambda folder: (folder / "config.json").unlink(),
        "run.init_from: .*config.json: got no such file, expected JSON",
    ),
    "a folder of that name": (
        a_folder,
        "run.init_from: got .*Is a directory: .*model.safetensors', expected a model to read",
    ),
    "a run": (a_run, "run.init_from: .*first: got the folder of a run, expected a model's, .*"),
    "another width": (
        other_width,
        "model.intermediate_size: got 24, expected 40, as in .*first, which run.init_from names",
    ),
    "another window": (other_window, r"model.cell\[1\].window: got 16, expected 4, as in .*"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "run.init_from: .*model.safetensors: got no such file, expected a safetensors file",
    ),
    "cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
        "run.init_from: .*model.safetensors: got .*, expected a whole safetensors file",
    ),
    "a tensor too few": (
        harm_tensor(lambda tensors: tensors.pop("norm.weight")),
        "run.init_from: .*first: got missing norm.weight, expected what its config says",
    ),
    "a shape": (
        harm_tensor(lambda tensors: tensors.update({"norm.weight": torch.ones(3)})),
        r"run.init_from: .*first: norm.weight: got shape \(3,\), expected \(16,\)",
    ),
    "integers": (
        harm_tensor(lambda tensors: tensors.update({"norm.weight": torch.ones(16).long()})),
        "run.init_from: norm.weight: got torch.int64, expected floating point",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_begun_with_is_named(what: str, tmp_path: Path, folder: Path) -> None:
    harm, message = WRONG[what]
    harm(folder)
    with pytest.raises(ValueError, match=f"^{message}$") as caught:
        train(beginning(tmp_path / "run", folder))
    assert "\n" not in str(caught.value)
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()]
    again = saved(tmp_path / "again", config(tmp_path).model)
    assert train(beginning(tmp_path / "run", again), until=1).step == 1
