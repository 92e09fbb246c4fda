"""The command `gdn2`."""

from gdn2.cli import benchmarks, data, evaluate, hub, inspection, machine, models, report, training
from gdn2.cli.base import app, main

__all__ = [
    "app",
    "benchmarks",
    "data",
    "evaluate",
    "hub",
    "inspection",
    "machine",
    "main",
    "models",
    "report",
    "training",
]
