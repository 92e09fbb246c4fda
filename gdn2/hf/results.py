"""What an evaluation found, from the files that `gdn2 eval` and lm-eval write."""

from pathlib import Path
from typing import Any

from gdn2.models.files import read_json
from gdn2.models.weights import checksum
from gdn2.ops.arguments import require

Numbers = dict[str, dict[str, Any]]


def read_results(file: Path, folder: Path, digest: str, step: int | None) -> Numbers:
    """Numbers by name, for each task.

    `gdn2 eval` says which model it saw; results of another config than `digest`, of another step, or of other weights
    than those in `folder`, are refused.
    """
    data = read_json(file)
    kind = "tasks" if str(data.get("format")).startswith("gdn2 results") else "results"
    tasks = data.get(kind)
    fits = isinstance(tasks, dict) and all(isinstance(task, dict) for task in tasks.values())
    require(fits, f"{file}", "none", "results of `gdn2 eval` or of lm-eval")
    assert isinstance(tasks, dict)
    if kind == "results":
        return {name: _of_lm_eval(task) for name, task in tasks.items()}
    seen = data.get("model")
    whole = {"metrics", "samples", "protocol"}
    numbers = all(whole <= x.keys() and isinstance(x["metrics"], dict) for x in tasks.values())
    fits = isinstance(seen, dict) and numbers
    require(fits, f"{file}", "no model, or a task without numbers", "results of `gdn2 eval`")
    assert isinstance(seen, dict)
    after = seen.get("step")
    same = seen.get("config") == digest and (None in (after, step) or after == step)
    found = f"those of model {seen.get('config')} after step {after}"
    require(same, f"{file}", found, f"of {digest} after step {step}")
    own, theirs = checksum(folder), str(seen.get("weights"))
    found = f"those of weights {theirs[:16]}"
    require(theirs == own, f"{file}", found, f"of weights {own[:16]} in {folder}")
    return {name: _of_ours(task) for name, task in tasks.items()}


def _of_lm_eval(task: dict[str, Any]) -> dict[str, Any]:
    """The numbers, without the task's name, which stands there again, and the name of no filter."""
    return {key.removesuffix(",none"): x for key, x in task.items() if key.strip() != "alias"}


def _of_ours(task: dict[str, Any]) -> dict[str, Any]:
    """The numbers with what they were measured on, and how."""
    return {**task["metrics"], "samples": task["samples"], "protocol": task["protocol"]}
