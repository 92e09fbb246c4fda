"""The command `gdn2`."""

from gdn2.cli import benchmarks, machine, models
from gdn2.cli.base import app, main

__all__ = ["app", "benchmarks", "machine", "main", "models"]
