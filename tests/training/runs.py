"""Small training runs, and what is compared of them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gdn2.models.run_folder import read_metrics
from gdn2.training.config import RunConfig
from gdn2.training.run_file import config_from

STEPS, ROWS, LENGTH = 12, 8, 24
TIMINGS = ("seconds", "tokens_per_second", "mfu", "memory_gib")  # what two equal runs differ in


def table(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A hybrid that learns to recall, as a file would hold it; sections are put over it."""
    delta = {"type": "delta", "num_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
    window = {"type": "attention", "num_heads": 2, "head_dim": 8, "window": 16}
    tokens = ROWS * LENGTH
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "seed": 5},
        "model": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "cell": [{**delta, "gate_rank": 8}, window],
            "vocab_size": 32,
        },
        "data": {"type": "mqar", "pairs": 4, "vocab_size": 32},
        "batch": {"tokens": tokens, "length": LENGTH, "micro_rows": 4},
        "optimiser": {"lr": 1e-2},
        "schedule": {"tokens": STEPS * tokens, "warmup_tokens": 3 * tokens},
        "engine": {"device": "cpu"},
        "checkpoint": {"every_steps": 4},
        "validation": {"every_steps": 5, "rows": 10},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    return config_from(table(folder, **sections))


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without what two equal runs differ in."""
    return [
        {name: value for name, value in line.items() if name not in TIMINGS}
        for line in read_metrics(folder)
    ]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)]


def weights(folder: Path) -> dict[str, Tensor]:
    """Of the run's last model."""
    return load_file(folder / "model" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Every bit of losses, norms, validation and final weights."""
    assert lines(one) == lines(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
