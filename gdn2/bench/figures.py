"""All measurements of docs/performance.md, one after the other; each is kept in one file as soon as it is there."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import gdn2
from gdn2.bench.timing import describe_machine
from gdn2.layers.plain import nearest
from gdn2.models.files import read_json
from gdn2.ops.trust import write_at_once

FORMAT = "gdn2 figures"
SOURCES = (".py", ".cu", ".cuh")
Taken = dict[
    str, Any
]  # what a figure's commands printed, the numbers that they wrote, when, where and by which code
NAMED = ("gdn2", "torch", "triton", "fla-core")
FIELDS = frozenset(
    ("about", "commands", "output", "data", "failure", "seconds", "date", "machine", "code")
)


@dataclass(frozen=True)
class Figure:
    """Something to measure by commands of `gdn2 bench` that belong together."""

    name: str
    about: str
    minutes: float  # that it took about, on an H200 or on two cores
    commands: tuple[str, ...]


def _operator(name: str, about: str, options: str) -> Figure:
    return Figure(name, about, 2, (f"operator --peers --backend triton --seconds 0.3 {options}",))


def _training(name: str, about: str, preset: str, minutes: float) -> Figure:
    # Which products are chosen lies on the machine, so both are done again on another one.
    chosen = f"products {preset} --seconds 0.15"
    timed = f"training {preset} --peers --weights bf16 --no-recompute --steps 5"
    return Figure(name, about, minutes, (chosen, timed))


_HYBRIDS = ("mamba2", "gdn", "kda", "mamba3-siso")
FIGURES = {
    "cuda": (
        _operator("operator", "The operator at the paper's size", "--suite hopper"),
        _training("training", "Training of the 1.3B hybrid", "gdn2-1.3b-hybrid", 8),
        _training("training-recurrent", "Training of the recurrent 1.3B", "gdn2-1.3b", 8),
        Figure("decode", "One token at a time", 1, ("decode --peers",)),
        Figure(
            "kernels",
            "The operator kernel by kernel, and what registers that do not fit cost",
            2,
            (
                "kernels --programs 1",
                "kernels --form kda --programs 1",
                "kernels --form mamba2 --shape 4x4096x64x64x64 --programs 1",
            ),
        ),
        Figure("accuracy", "Errors against fp64", 2, ("accuracy --peers",)),
        Figure(
            "first-call",
            "The first call and the first training step, nothing compiled",
            3,
            (
                "operator --shape 4x4096x16x128x128 --backend triton --seconds 0.3 --cold",
                "training gdn2-1.3b-hybrid --shape 4x4096 --weights bf16 --steps 1 --cold",
            ),
        ),
        Figure(
            "training-fp32",
            "Training with fp32 weights",
            4,
            (
                "training gdn2-1.3b-hybrid --weights fp32 --no-recompute --steps 5",
                "training gdn2-1.3b --weights fp32 --no-recompute --steps 5",
            ),
        ),
        Figure(
            "profile",
            "Where a training step goes",
            4,
            ("profile gdn2-1.3b-hybrid --no-recompute --peers",),
        ),
        Figure(
            "generation",
            "Prefill and decoding of the recurrent 1.3B",
            2,
            ("generation gdn2-1.3b --batch 1 --batch 64 --context 1024",),
        ),
        _operator(
            "packed", "32 documents in 16384 tokens", "--shape 1x16384x16x128x128 --packed 32"
        ),
        _operator("narrow-heads", "32 heads of width 64", "--shape 4x4096x32x64x64"),
        _operator("long", "65536 tokens, 4 heads", "--shape 1x65536x4x128x128"),
        _operator("kda", "KDA: one gate a head", "--shape 4x4096x16x128x128 --form kda"),
        _operator("mamba2", "Mamba-2: no erase gate", "--shape 4x4096x64x64x64 --form mamba2"),
        _operator(
            "value-heads", "32 value heads of 16", "--shape 4x4096x16x128x128 --value-heads 32"
        ),
        Figure(
            "models",
            "Training of all models of the paper",
            10,
            tuple(
                f"training {preset} --weights bf16 --steps 3"
                for preset in ("transformer-1.3b", *(f"{name}-1.3b-hybrid" for name in _HYBRIDS))
            )
            + tuple(
                f"training mamba3-mimo-1.3b-hybrid --weights bf16 --steps 3 {shapes}"
                for shapes in ("--shape 8x2048 --shape 4x4096 --shape 2x8192", "--shape 1x16384")
            ),
        ),
    ),
    "cpu": (
        Figure(
            "operator",
            "The operator beside the token loop",
            1,
            (
                "operator --shape 1x2048x4x64x64 --backend torch,reference --passes backward"
                " --threads 2 --seconds 6",
            ),
        ),
        Figure(
            "length",
            "Time per token as sequences grow",
            1,
            (
                "operator --shape 1x1024x4x64x64 --shape 1x16384x4x64x64 --backend torch"
                " --passes backward --threads 2 --seconds 4",
            ),
        ),
        Figure("kernels", "Where the operator's time goes", 1, ("kernels",)),
        Figure("accuracy", "Errors against fp64", 1, ("accuracy",)),
        Figure("generation", "Decoding of a small model", 1, ("generation gdn2-15m --threads 2",)),
    ),
}


def choose(device: str, names: Sequence[str]) -> list[Figure]:
    """Those of these names, or all."""
    known = {figure.name: figure for figure in FIGURES[device]}
    for name in names:
        if name not in known:
            raise ValueError(f"figure: got {name!r}, expected {nearest(name, known)}")
    chosen = [known[name] for name in names or known]
    return [
        replace(x, commands=tuple(f"{c} --device {device}" for c in x.commands)) for x in chosen
    ]


def read(file: Path) -> dict[str, Taken]:
    """What is there already."""
    if not file.exists():
        return {}
    record = read_json(file)
    figures = record.get("figures") if record.get("format") == FORMAT else None
    kept = figures.values() if isinstance(figures, dict) else [None]
    if not all(isinstance(one, dict) and one.keys() == FIELDS for one in kept):
        raise ValueError(f"{file}: got another file, expected one of gdn2 bench figures")
    return dict(record["figures"])


def missing(figures: Sequence[Figure], taken: dict[str, Taken]) -> list[Figure]:
    """Those not taken yet by the code as it is."""
    valid = {n for n, one in taken.items() if one["failure"] is None and one["code"] == code()}
    return [figure for figure in figures if figure.name not in valid]


def take(
    figures: Sequence[Figure], file: Path, minutes: float | None, say: Callable[[str], None]
) -> list[str]:
    """Take figures one after the other and keep each in the file; begin none that would not end in time.

    Returns a line for each that failed.
    """
    begun, taken = monotonic(), read(file)
    _keep(taken, file)  # before anything is timed: it can be written
    failures = []
    for number, figure in enumerate(figures, start=1):
        spent = (monotonic() - begun) / 60
        if minutes is not None and spent + figure.minutes > minutes:
            say(f"{figure.name}: left, since it takes about {figure.minutes:g} min")
            continue
        say(f"{figure.name}, {number} of {len(figures)}: about {figure.minutes:g} min")
        taken[figure.name] = one = _take(figure, file, say)
        _keep(taken, file)
        if one["failure"] is not None:
            failures.append(f"{figure.name}: {one['failure']}")
    return failures


def _take(figure: Figure, file: Path, say: Callable[[str], None]) -> Taken:
    """If it is stopped, what it wrote until then stays beside the file."""
    begun = monotonic()
    output, data, failure = [], [], None
    for number, command in enumerate(figure.commands, start=1):
        target = file.with_suffix(f".{figure.name}-{number}.json")
        say(f"gdn2 bench {command}")
        printed, failure = _run([*command.split(), "--json", str(target)], say)
        output.append(printed)
        if target.exists():
            data.append(read_json(target))
            target.unlink()
        if failure is not None:
            break
    return {
        "about": figure.about,
        "commands": list(figure.commands),
        "output": output,
        "data": data,
        "failure": failure,
        "seconds": round(monotonic() - begun, 1),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": asdict(describe_machine()),
        "code": code(),
    }


def _run(arguments: list[str], say: Callable[[str], None]) -> tuple[str, str | None]:
    """What a command of `gdn2 bench` prints, line by line as it comes; and the last line of one that fails."""
    command = [sys.executable, "-u", "-m", "gdn2", "bench", *arguments]
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        errors = process.stderr

        def pass_on() -> None:
            for line in errors:
                said.append(line.rstrip())
                say(said[-1])

        listener = Thread(target=pass_on)
        listener.start()
        printed = []
        for line in process.stdout:
            printed.append(line.rstrip())
            say(printed[-1])
        listener.join()
    last = next((line for line in reversed(said) if line), "no message")
    failure = f"exit code {process.returncode}: {last}" if process.returncode else None
    return "\n".join(printed).strip("\n"), failure


def page(taken: dict[str, Taken]) -> str:
    """All of it as Markdown: each command with what it printed."""
    parts = ["# Figures\n\nBy `gdn2 bench figures`.\n"]
    for one in taken.values():
        machine = one["machine"]
        where = next((gpu["name"] for gpu in machine["gpus"]), machine["cpu"])
        versions = ", ".join(f"{n} {v}" for n, v in machine["versions"].items() if n in NAMED and v)
        took = f"{one['date']}, {one['seconds']:.0f} s, {where}; {versions}; code {one['code']}."
        parts.append(f"## {one['about']}\n\n{took}\n")
        for command, output in zip(one["commands"], one["output"], strict=False):
            lines = [f"$ gdn2 bench {command}", *output.splitlines()]
            parts.append("\n".join(f"    {line}".rstrip() for line in lines) + "\n")
        if one["failure"] is not None:
            parts.append(f"Failed: {one['failure']}\n")
    return "\n".join(parts)


@cache
def code() -> str:
    """A short sum of the package's sources."""
    folder, found = Path(gdn2.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in SOURCES:
            found.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def _keep(taken: dict[str, Taken], file: Path) -> None:
    record = json.dumps({"format": FORMAT, "figures": taken}, indent=1) + "\n"
    write_at_once(file, record.encode())
    write_at_once(file.with_suffix(".md"), page(taken).encode())
