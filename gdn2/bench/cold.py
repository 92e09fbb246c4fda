"""The first call of a fresh process with nothing compiled: what a user waits for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gdn2.bench.operator import Plan

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")


def run_fresh(command: list[str]) -> dict[str, Any]:
    """What a command of `gdn2` writes as JSON in a fresh process whose caches are empty."""
    with TemporaryDirectory() as folder:
        target = Path(folder) / "cold.json"
        done = subprocess.run(
            [sys.executable, "-m", "gdn2", *command, "--json", str(target)],
            env=os.environ | {name: str(Path(folder) / name) for name in CACHES},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"cold: the fresh process failed: {last}")
        record: dict[str, Any] = json.loads(target.read_text())
        return record


def first_call_seconds(plan: Plan) -> dict[str, float]:
    """Seconds of the first forward and backward of each operator at the first shape."""
    (result,) = run_fresh(_command(plan))["results"]
    return {row["backend"]: row["first_seconds"] for row in result["rows"]}


def _command(plan: Plan) -> list[str]:
    """The benchmark of one shape, once."""
    options = {
        "--shape": str(plan.shapes[0]),
        "--backend": ",".join(plan.backends),
        "--device": plan.device.type,
        "--dtype": plan.dtype,
        "--chunk-size": str(plan.chunk_size),
        "--packed": plan.packed,
        "--form": plan.form,
        "--passes": "backward",
        "--seconds": "0",
    }
    words = [word for option in options.items() for word in option]
    if plan.value_heads is not None:
        words += ["--value-heads", str(plan.value_heads)]
    return ["bench", "operator", *words, "--recompute", *(["--peers"] if plan.peers else [])]
