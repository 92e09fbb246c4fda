"""Files as the commands write them, for the report to read."""

import json
from pathlib import Path
from typing import Any

from gdn2.bench.synthetic import FORMAT as SYNTHETIC
from gdn2.evals.results import FORMAT
from gdn2.evals.suites import COLUMNS, PAPER_LENGTHS
from gdn2.models.config import ModelConfig

NASTY = "<script>alert('x')</script> | *a* & \"b\""


def results(
    name: str, config: ModelConfig, *, shift: float = 0.0, needles: bool = True
) -> dict[str, Any]:
    """Results of an evaluation in which every number tells its task: that of column i is i + shift."""
    tasks: dict[str, Any] = {}
    for i, (task, metric) in enumerate(COLUMNS.values()):
        about = {"version": "1", "samples": 5, "protocol": f"how {task} is asked", "limit": 5}
        tasks.setdefault(task, {**about, "metrics": {}})["metrics"][metric] = i + shift
    for task, lengths in PAPER_LENGTHS.items() if needles else ():
        by_length = {
            str(n): {"accuracy": n / 100 + shift, "by_depth": {"0": 1.0, "90": 50.0}}
            for n in lengths
        }
        metrics = {"accuracy": 50.0, "by_length": by_length}
        about = {"version": "1", "samples": 5, "protocol": f"how {task} is asked", "limit": None}
        tasks[task] = {**about, "metrics": metrics}
    return {
        "format": FORMAT,
        "name": name,
        "model": {"config": config.digest, "weights": "0f", "step": 40},
        "config": config.to_dict(),
        "tasks": tasks,
        "skipped": {"other": "no data"},
        "failed": {},
        "columns": {},
    }


def bench(*rows: tuple[str, str, float | None], machine: str = "H200") -> dict[str, Any]:
    """Speeds of presets at shapes, as `gdn2 bench training` writes them."""
    timed = [
        {"preset": preset, "variant": "gdn2 bf16", "shape": shape, "tokens_per_second": speed}
        for preset, shape, speed in rows
    ]
    gpus = [{"name": machine}]
    return {
        "result": {"rows": timed, "machine": {"gpus": gpus, "cpu": "c"}},
        "cold_seconds": {},
    }


def grid() -> dict[str, Any]:
    """Two cells of a synthetic grid, one of them without an accuracy."""
    cell = {"problem": "4 pairs", "family": "gdn2", "chance": 0.25, "rate": 3e-3, "failure": None}
    cells = [
        {**cell, "state": 512, "accuracy": 0.987},
        {**cell, "state": 1024, "accuracy": None, "rate": None, "failure": "skipped"},
    ]
    return {"format": SYNTHETIC, "name": "mqar", "grid": {"steps": 7}, "cells": cells}


def put(file: Path, record: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record))
    return file
