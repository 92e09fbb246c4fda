"""The command `gdn2`."""

from gdn2.cli import benchmarks, data, evaluate, hub, machine, models, report, training
from gdn2.cli.base import app, main

__all__ = [
    "app",
    "benchmarks",
    "data",
    "evaluate",
    "hub",
    "machine",
    "main",
    "models",
    "report",
    "training",
]
