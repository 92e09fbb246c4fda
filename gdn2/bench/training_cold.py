"""The first training step of a fresh process with nothing compiled: what a user waits for."""

from itertools import product

from gdn2.bench.cold import run_fresh
from gdn2.bench.trainers import Plan


def first_step_seconds(plan: Plan) -> dict[str, float | str]:
    """Seconds of each model of ours at the first shape, all caches empty; or why there are none."""
    return {
        f"{preset}, {weights}": _first_step(_command(plan, preset, weights))
        for preset, weights in product(plan.presets, plan.weights)
    }


def _first_step(command: list[str]) -> float | str:
    try:
        (row,) = run_fresh(command)["result"]["rows"]
    except ValueError as failure:
        return str(failure)
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
    switches = {"compile": plan.compile, "recompute": plan.recompute}
    words += [f"--{name}" if on else f"--no-{name}" for name, on in switches.items()]
    return ["bench", "training", preset, *words]
