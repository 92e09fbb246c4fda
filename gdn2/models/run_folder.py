"""The folder of a training run as others read it: its metrics, line by line, and its checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

from gdn2.models.files import read_json
from gdn2.ops.arguments import require

WRITTEN, METRICS, CHECKPOINTS, MODEL = "config.json", "metrics.jsonl", "checkpoints", "model"
CHECKPOINT = re.compile(r"step-(\d{8,})")
AT_LENGTH = re.compile(r"(validation_\w+)_(\d+)")
PLACE = ("step", "tokens")  # what every line has
DRAWN = ("loss", "validation_loss", "tokens_per_second", "gradient_norm")  # numbers where they are

Line = dict[str, Any]


def is_run(folder: Path) -> bool:
    """Whether a run has written the config in a folder; a model's has no such tables."""
    try:
        return {"run", "schedule"} <= read_json(folder / WRITTEN).keys()
    except ValueError:  # there is none, or it is no table
        return False


def is_saved(folder: Path) -> bool:
    """Whether a run's folder has checkpoints, whole or not, from which alone the run may go on."""
    return any((folder / CHECKPOINTS).glob("step-*"))


def read_metrics(run: Path) -> list[Line]:
    """The lines of a run, without one that a kill cut short."""
    file = run / METRICS
    # A byte that is no text becomes \x.., which is no JSON: its line is named like any other broken one.
    texts = file.read_text("utf-8", "backslashreplace").splitlines() if file.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        where = f"{file}, line {number}"
        try:
            line = json.loads(text)
        except ValueError:
            if number < len(texts):
                raise ValueError(f"{where}: got {text!r}, expected JSON") from None
            continue
        fits = isinstance(line, dict) and all(type(line.get(name)) is int for name in PLACE)
        require(fits, where, repr(line), "a table with step and tokens, both integers")
        for name in (name for name in line if name.startswith(DRAWN)):  # at all lengths
            value = line[name]
            fits = value is None or type(value) in (int, float)
            require(fits, f"{where}: {name}", repr(value), "a number")
        lines.append(line)
    return lines


def measure_of(metric: str) -> tuple[str, int | None]:
    """What a metric measures, and at which length where that is not the training's: it ends the metric's name."""
    found = AT_LENGTH.fullmatch(metric)
    return (metric, None) if found is None else (found[1], int(found[2]))


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08}"


def step_of(checkpoint: Path) -> int | None:
    """The step after which a checkpoint was made, None for another folder."""
    found = CHECKPOINT.fullmatch(checkpoint.name)
    return None if found is None else int(found[1])


def step_of_model(model: Path) -> int | None:
    """The step after which a model in a run's folder was written: a checkpoint's, or the last; None elsewhere."""
    if checkpoint_of(model) is not None:
        return step_of(model.parent)
    lines = read_metrics(model.parent) if is_run(model.parent) else []
    return lines[-1]["step"] if lines else None


def checkpoint_of(model: Path) -> Path | None:
    """The checkpoint that a model's folder lies in; a run may be called like one, too."""
    inside = model.parent.parent.name == CHECKPOINTS and step_of(model.parent) is not None
    return model.parent if inside else None
