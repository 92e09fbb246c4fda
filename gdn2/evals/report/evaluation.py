"""An evaluation as the report sees it: whose numbers, the numbers by name, and how they came about."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdn2.evals.heatmap import grid
from gdn2.evals.needles import KINDS
from gdn2.evals.report.paper import needle_measure
from gdn2.evals.results import FORMAT
from gdn2.evals.suites import COLUMNS, columns
from gdn2.models.config import ModelConfig


@dataclass(frozen=True)
class Evaluation:
    """One model's results; `config` is None where the answers came without it."""

    label: str
    config: ModelConfig | None
    measures: Mapping[str, float]
    needles: Mapping[str, Mapping[str, Any]]  # summaries of needle tasks, by their titles
    notes: tuple[str, ...]  # protocol of each task, and what was left out


def read_evaluation(record: Mapping[str, Any], where: Path) -> Evaluation:
    """Read what `gdn2 eval` wrote."""
    try:
        model, tasks, config = record["model"], record["tasks"], record.get("config")
        return Evaluation(
            label=_label(record["name"], model["weights"], model["step"]),
            config=None if config is None else ModelConfig.from_dict(config),
            measures={n: float(v) for n, v in (columns(tasks) | _needle_measures(tasks)).items()},
            needles=_needles(tasks),
            notes=tuple(_notes(record)),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as reason:
        got = f"{type(reason).__name__} {reason}"
        raise ValueError(f"{where}: got {got}, expected results in format {FORMAT!r}") from None


def _label(name: str, weights: str, step: int | None) -> str:
    if weights == "random":
        return f"{name}, random weights"
    return str(name) if step is None else f"{name}, step {step}"


def _needle_measures(tasks: Mapping[str, Any]) -> dict[str, float]:
    return {
        needle_measure(task, int(length)): found["accuracy"]
        for task in KINDS
        if task in tasks
        for length, found in tasks[task]["metrics"]["by_length"].items()
    }


def _needles(tasks: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = {KINDS[name].title: tasks[name]["metrics"] for name in KINDS if name in tasks}
    for summary in found.values():
        grid(summary)  # which fails here, and not while drawing, where something is missing
    return found


def _notes(record: Mapping[str, Any]) -> list[str]:
    """How each task was asked, with the numbers of those that have no column."""
    tabled = {*KINDS, *(task for task, _ in COLUMNS.values())}
    notes = []
    for name, task in record["tasks"].items():
        limit, numbers = task.get("limit"), task["metrics"].items()
        words = [task["protocol"], f"{task['samples']} samples"]
        words += [] if limit is None else [f"only the first {limit}"]
        words += [] if name in tabled else [f"{metric} {value:.2f}" for metric, value in numbers]
        notes.append(f"{name}: {'; '.join(words)}")
    for kind in ("skipped", "failed"):
        notes += [f"{name}: {kind}, {reason}" for name, reason in record.get(kind, {}).items()]
    return notes
