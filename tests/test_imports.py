"""The direction of imports, the size of files, and what `import gdn2` touches."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "gdn2").rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in FILES]
KERNELS = sorted((ROOT / "gdn2/ops/cuda").glob("*.cu*"))

MODEL = {"ops", "layers", "models"}
EVERYTHING = MODEL | {"gdn2", "data", "training", "evals", "hf", "bench"}
MAY_IMPORT = {  # each part, and the parts it may import; "gdn2" is the package's own __init__
    "gdn2": MODEL,
    "ops": {"ops"},
    "layers": {"ops", "layers"},
    "models": MODEL,
    "data": {"data"},
    "training": MODEL | {"gdn2", "data", "training"},
    "evals": MODEL | {"gdn2", "data", "evals"},
    "hf": MODEL | {"gdn2", "hf"},
    "bench": EVERYTHING,
    "doctor": EVERYTHING,
    "cli": EVERYTHING | {"doctor", "cli"},
    "__main__": {"cli"},
}
ONLY_UNDER = {  # a module, and the one folder that may import it
    "triton": "gdn2/ops/triton",
    "transformers": "gdn2/hf",
    "torch.distributed": "gdn2/training",
}


def imported(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names that a source text imports anywhere, or reaches as attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)  # torch.distributed can be reached without an import


def imports(path: Path) -> list[str]:
    return list(imported(path.read_text(), path.relative_to(ROOT).parent.parts))


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def part_of(name: str) -> str:
    """Part of the package that a dotted name belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "gdn2"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_go_one_way(path: Path) -> None:
    top = path.relative_to(ROOT / "gdn2").with_suffix("").parts[0]
    own = "gdn2" if top == "__init__" else top
    assert own in MAY_IMPORT, f"{own} has no place in the direction of imports"
    used = {part_of(name) for name in imports(path) if is_within(name, "gdn2")}
    assert used <= MAY_IMPORT[own], f"{own} may not import {used - MAY_IMPORT[own]}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_optional_modules_stay_in_their_folder(path: Path) -> None:
    for module, folder in ONLY_UNDER.items():
        if not path.is_relative_to(ROOT / folder):
            outside = [name for name in imports(path) if is_within(name, module)]
            assert not outside, f"{outside} may only be imported under {folder}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import gdn2.ops.rule as r", "gdn2.ops.rule"),
        ("from gdn2 import models", "gdn2.models"),
        ("from ..models import config", "gdn2.models.config"),
        ("from . import delta", "gdn2.layers.delta"),
        ("def f():\n    from torch import distributed", "torch.distributed"),
        ("def f():\n    torch.distributed.barrier()", "torch.distributed"),
        ("if x:\n    import triton.language as tl", "triton.language"),
    ],
)
def test_every_form_of_import_is_seen(source: str, name: str) -> None:
    assert name in imported(source, ("gdn2", "layers"))


@pytest.mark.parametrize("path", [*FILES, *KERNELS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path: Path) -> None:
    is_kernel = path in KERNELS or path.is_relative_to(ROOT / "gdn2/ops/triton")
    most = 450 if is_kernel else 300
    lines = len(path.read_text().splitlines())
    assert lines <= most, f"{lines} lines, expected at most {most}"


def run(script: str) -> str:
    """Standard output of a script in a fresh interpreter."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_touches_no_device_and_nothing_optional() -> None:
    script = """
import sys, gdn2, torch
heavy = {"transformers", "datasets", "matplotlib", "fla"}  # triton comes with torch's FLOP counter
print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())
"""
    assert run(script) == "[] False"


IMPORTS = ["import torch", "import gdn2", "from torch.utils.flop_counter import FlopCounterMode"]
COUNTS = """
import gdn2.ops.loss
x = torch.zeros(1, 64, 1, 16, requires_grad=True)
with FlopCounterMode(display=False) as counter:
    gdn2.gated_delta_rule(x, x, x, x, x, x)[0].sum().backward()
    gdn2.ops.loss.linear_cross_entropy(x[0, :, 0], x[0, :8, 0], torch.arange(64) % 8).backward()
counts = counter.get_flop_counts()["Global"]
print(sorted((str(operator), count) for operator, count in counts.items()))
"""


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)], ids=str)
def test_flops_are_counted_whoever_comes_first(order: tuple[int, ...]) -> None:
    """From the first call on, though the counter is imported by who counts and not by gdn2."""
    T, C, d, vocabulary = 64, 64, 16, 8
    rule = int(T * (6 * d * d + 10 * C * d + C * C / 3))
    head = 2 * T * vocabulary * d
    counted = dict(ast.literal_eval(run("\n".join([*(IMPORTS[i] for i in order), COUNTS]))))
    assert counted["gdn2.chunk_forward"] == rule
    assert counted["gdn2.chunk_backward"] > rule
    assert counted["gdn2.linear_cross_entropy_and_gradients"] == 3 * head


def test_the_operator_works_without_what_is_optional() -> None:
    script = """
import sys
sys.modules |= dict.fromkeys(["triton", "transformers", "fla"])
import torch, gdn2
x = torch.zeros(1, 3, 1, 2)
o, state = gdn2.gated_delta_rule(x, x, x, x, x, x, output_final_state=True)
print(tuple(o.shape), tuple(state.shape))
"""
    assert run(script) == "(1, 3, 1, 2) (1, 1, 2, 2)"
