"""The first training step of a fresh process with nothing compiled: what a user waits for."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from gdn2.bench.training import Plan

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def first_step_seconds(plan: Plan) -> dict[str, float | str]:
    """Seconds of each model of ours at the first shape, all caches empty; or why there are none."""
    return {
        f"{preset}, {weights}": _first_step(_command(plan, preset, weights))
        for preset, weights in product(plan.presets, plan.weights)
    }


def _first_step(command: list[str]) -> float | str:
    with TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in CACHES}
        target = Path(folder) / "cold.json"
        done = subprocess.run(
            [sys.executable, "-m", "gdn2", *command, "--json", str(target)],
            env=os.environ | caches,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
        (row,) = json.loads(target.read_text())["result"]["rows"]
        return row["failure"] or row["first_seconds"]


def _command(plan: Plan, preset: str, weights: str) -> list[str]:
    """The benchmark of one model at one shape, once."""
    options = {
        "--shape": str(plan.shapes[0]),
        "--weights": weights,
        "--device": plan.device.type,
        "--steps": "1",
    }
    words = [word for option in options.items() for word in option]
    return ["bench", "training", preset, *words, "--compile" if plan.compile else "--no-compile"]
