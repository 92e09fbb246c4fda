"""Validation at lengths besides the training's, against the model on the same rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import gdn2
from gdn2.data.config import open_source
from gdn2.data.prepare import prepare
from gdn2.layers.layout import Layout
from gdn2.layers.plain import to_plain
from gdn2.models.language_model import LanguageModel
from gdn2.training.config import RunConfig
from gdn2.training.loop import train
from gdn2.training.run import Run, own_folder
from gdn2.training.run_file import config_from
from gdn2.training.validation import validate
from gdn2.training.world import World
from tests.training.runs import LENGTH, assert_same_run, config, lines, weights
from tests.training.spawn import in_processes

ROWS = 10  # of the training's length
LENGTHS = [36, 96, LENGTH, 20, 1000]


def expected(run: RunConfig, model: LanguageModel, length: int) -> tuple[float, float]:
    """Loss and accuracy over as many whole rows as have the tokens of those of the training's length."""
    rows = max(1, ROWS * LENGTH // length)
    ids, targets, offsets = open_source(run.data, length, 0, "validation").batch(0, rows)
    layout = None if offsets is None else Layout.packed(offsets, ids.shape[1])
    with torch.no_grad():
        logits = model(ids, layout=layout).logits
    assert logits is not None
    flat: Tensor = logits.flatten(0, 1)
    counted = targets.flatten() >= 0
    right = (flat.argmax(-1) == targets.flatten())[counted].double().mean()
    return float(cross_entropy(flat[counted], targets.flatten()[counted])), float(right)


def task(folder: Path, **choices: Any) -> RunConfig:
    return config(folder, validation={"rows": ROWS, "lengths": LENGTHS, **choices})


def reading(folder: Path, documents: str, lengths: list[int], held_out: float = 0.5) -> RunConfig:
    """A run on 50 texts of 13 bytes."""
    tokens, texts = folder.with_name("tokens"), folder.with_name("texts")
    if not tokens.exists():
        texts.mkdir()
        for i in range(50):
            (texts / f"{i}.txt").write_text(f"{i:4} * 7 = {7 * i:2}"[:13].ljust(13))
        prepare([str(texts)], tokens, workers=1)
    data = {"path": str(tokens), "validation_fraction": held_out, "documents": documents}
    plain = to_plain(config(folder, model={"vocab_size": 256}))
    plain["validation"] |= {"rows": ROWS, "lengths": lengths}
    return config_from(plain | {"data": {"type": "tokens", **data}})


def test_a_task_at_other_lengths(tmp_path: Path) -> None:
    run = task(tmp_path)
    end = train(run)
    model = gdn2.load(tmp_path / "model")
    last = lines(tmp_path)[-1]
    found = {name: value for name, value in last.items() if name.startswith("validation")}
    assert found == end.validation
    others = [n for n in LENGTHS if n != LENGTH]
    kinds = ("validation_loss", "validation_accuracy")
    assert found.keys() == {*kinds, *(f"{kind}_{n}" for kind in kinds for n in others)}
    for n in others:
        loss, right = expected(run, model, n)
        assert found[f"validation_loss_{n}"] == pytest.approx(loss, rel=1e-5)
        assert found[f"validation_accuracy_{n}"] == pytest.approx(right, abs=1e-9)


@pytest.mark.parametrize("documents", ["run_on", "apart"])
def test_tokens_at_other_lengths(documents: str, tmp_path: Path) -> None:
    run = reading(tmp_path / "run", documents, [9, 96])
    end = train(run, until=5)
    model = gdn2.load(tmp_path / "run/checkpoints/step-00000005/model")
    assert [*end.validation] == ["validation_loss", "validation_loss_9", "validation_loss_96"]
    for n in (9, 96):
        loss, _ = expected(run, model, n)
        assert end.validation[f"validation_loss_{n}"] == pytest.approx(loss, rel=1e-5)


def test_a_run_does_not_depend_on_them(tmp_path: Path) -> None:
    train(task(tmp_path / "seen"))
    train(task(tmp_path / "interrupted"), until=7)
    train(task(tmp_path / "interrupted"))
    assert_same_run(tmp_path / "seen", tmp_path / "interrupted")
    train(task(tmp_path / "alone", lengths=[]))
    ours, theirs = (weights(tmp_path / name) for name in ("seen", "alone"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def at_length(world: World, run: RunConfig, length: int) -> float:
    with own_folder(run, world):
        made = Run(run, world)
        rows = made.held_out_at[length]
        found = validate(made.model, rows, world, rows=5, micro_rows=2, with_accuracy=True)
        return found["validation_loss"]


def test_processes_share_the_rows(tmp_path: Path) -> None:
    run = task(tmp_path, lengths=[36])
    model = LanguageModel(run.model, seed=run.run.seed)
    ids, targets, _ = open_source(run.data, 36, 0, "validation").batch(0, 5)
    with torch.no_grad():
        logits = model(ids).logits
    assert logits is not None
    loss = float(cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert in_processes(2, at_length, run, 36) == pytest.approx([loss] * 2, rel=1e-6)


def test_progress_names_the_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = train(task(tmp_path, lengths=[36]))
    said = capsys.readouterr().err
    numbers = end.validation
    phrases = f"val {numbers['validation_loss']:.3f}  val@36 {numbers['validation_loss_36']:.3f}  "
    assert phrases + f"right {numbers['validation_accuracy']:.1%}  right@36 " in said
    assert f"validation_loss_36 {numbers['validation_loss_36']:.4f}" in said


def test_lengths_that_data_do_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^validation.lengths: length: got 3, expected at least \d+ for mqar$"
    ):
        train(task(tmp_path / "task", lengths=[3]))
    with pytest.raises(
        ValueError,
        match=r"^validation.lengths: length: got 400, expected less than the 3\d\d tokens",
    ):
        train(reading(tmp_path / "run", "run_on", [400]))
    assert not (tmp_path / "run" / "config.json").exists()
    nothing = reading(tmp_path / "run", "run_on", [400], held_out=0.0)
    assert train(nothing, until=1).step == 1
