"""All that commands measure for docs/performance.md, one after the other; each is kept as soon as it is there."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from math import inf
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import gdn2
from gdn2.bench.documented import FIGURES, Figure
from gdn2.bench.machine import describe_machine
from gdn2.layers.plain import nearest
from gdn2.models.files import read_json
from gdn2.ops.trust import write_at_once

FORMAT, TITLE = "gdn2 figures", "# Figures"
SOURCES = (".py", ".cu", ".cuh")
# What a figure's commands printed, the numbers that they wrote, when, where and by which code.
Taken = dict[str, Any]
TOLERANCE = 0.1  # minutes
NAMED = ("gdn2", "torch", "triton", "fla-core")
FIELDS = {
    "about": str,
    "commands": list,
    "output": list,
    "data": list,
    "failure": str | None,
    "seconds": float,
    "date": str,
    "machine": dict,
    "code": str,
}


def choose(device: str, names: Sequence[str]) -> list[Figure]:
    """The figures of these names, or all, each with its commands for the device."""
    known = {figure.name: figure for figure in FIGURES[device]}
    for name in names:
        if name not in known:
            raise ValueError(f"figure: got {name!r}, expected {nearest(name, known)}")
    chosen = [known[name] for name in names or known]
    return [
        replace(x, commands=tuple(f"{c} --device {device}" for c in x.commands)) for x in chosen
    ]


def read(file: Path) -> dict[str, Taken]:
    """What is there already; a file or a page that is another's is a ValueError."""
    if file.suffix != ".json":
        raise ValueError(f"json: got {file}, expected a name that ends in .json")
    beside = file.with_suffix(".md")
    if beside.exists() and not beside.read_text(errors="replace").startswith(TITLE):
        raise ValueError(f"{beside}: got another page, expected one of gdn2 bench figures or none")
    if not file.exists():
        return {}
    record = read_json(file)
    figures = record.get("figures") if record.get("format") == FORMAT else None
    kept = figures.values() if isinstance(figures, dict) else [None]
    if not all(map(_is_taken, kept)):
        raise ValueError(f"{file}: got another file, expected one of gdn2 bench figures")
    return dict(record["figures"])


def _is_taken(one: Any) -> bool:
    if not isinstance(one, dict) or one.keys() != FIELDS.keys():
        return False
    if not all(isinstance(one[name], kind) for name, kind in FIELDS.items()):
        return False
    return bool(one["commands"]) and all(isinstance(data, dict) for data in one["data"])


def missing(figures: Sequence[Figure], taken: dict[str, Taken]) -> list[Figure]:
    """The figures not taken yet by these commands and the code as it is on a machine like this one."""
    here = _processor(asdict(describe_machine()))

    def is_there(figure: Figure) -> bool:
        one = taken.get(figure.name)
        if one is None or one["failure"] is not None or one["code"] != code():
            return False
        return one["commands"] == [*figure.commands] and _processor(one["machine"]) == here

    return [figure for figure in figures if not is_there(figure)]


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end what is being timed too, meanwhile only: processes that are forked inherit it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def take(
    figures: Sequence[Figure], file: Path, minutes: float | None, say: Callable[[str], None]
) -> list[str]:
    """Take figures one after the other and keep each in the file; begin none that would not end in time.

    Returns a line for each that failed.
    """
    if minutes is not None and not 0 < minutes < inf:
        raise ValueError(f"minutes: got {minutes:g}, expected more than 0")
    begun, taken = monotonic(), read(file)
    _check_device(figures, taken, file)
    _keep(taken, file)  # before anything is timed: it can be written
    failures = []
    for number, figure in enumerate(figures, start=1):
        spent = (monotonic() - begun) / 60
        if minutes is not None and spent + figure.minutes > minutes + TOLERANCE:
            say(f"{figure.name}: left, since it takes about {figure.minutes:g} min")
            continue
        say(f"{figure.name}, {number} of {len(figures)}: about {figure.minutes:g} min")
        taken[figure.name] = one = _take(figure, file, say)
        _keep(taken, file)
        if one["failure"] is not None:
            failures.append(f"{figure.name}: {one['failure']}")
    return failures


def _check_device(figures: Sequence[Figure], taken: dict[str, Taken], file: Path) -> None:
    """Refuse a CPU's figures in the place of a GPU's, or the other way round: some have the same names."""

    def device(commands: Sequence[str]) -> str:
        return commands[-1].rpartition(" --device ")[2]

    for figure in figures:
        wanted, kept = device(figure.commands), taken.get(figure.name)
        if kept is not None and device(kept["commands"]) != wanted:
            got = f"{figure.name} of {device(kept['commands'])}"
            raise ValueError(
                f"{file}: got {got}, expected figures of {wanted}; choose another file"
            )


def _take(figure: Figure, file: Path, say: Callable[[str], None]) -> Taken:
    """Run a figure's commands; what those of a figure that is stopped have written stays beside the file."""
    begun = monotonic()
    output, data, failure = [], [], None
    numbers = range(1, 1 + len(figure.commands))
    targets = [file.with_suffix(f".{figure.name}-{number}.json") for number in numbers]
    for target in targets:
        target.unlink(missing_ok=True)  # of a try that was stopped
    for command, target in zip(figure.commands, targets, strict=True):
        say(f"gdn2 bench {command}")
        printed, failure = _run([*command.split(), "--json", str(target)], say)
        output.append(printed)
        if target.exists():
            data.append(read_json(target))
        if failure is not None:
            break
    for target in targets:
        target.unlink(missing_ok=True)
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
    printed: list[str] = []

    def pass_on(stream: Iterable[str], kept: list[str]) -> None:
        for line in stream:
            kept.append(line.rstrip())
            say(kept[-1])

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            listener = Thread(target=pass_on, args=(process.stderr, said))
            listener.start()
            pass_on(process.stdout, printed)
            listener.join()
        except BaseException:  # Ctrl-C, or whatever ends this process
            process.terminate()
            raise
    last = next((line for line in reversed(said) if line), "no message")
    failure = f"exit code {process.returncode}: {last}" if process.returncode else None
    return "\n".join(printed).strip("\n"), failure


def page(taken: dict[str, Taken]) -> str:
    """All of it as Markdown: each command with what it printed."""
    parts = [f"{TITLE}\n\nBy `gdn2 bench figures`.\n"]
    for one in taken.values():
        where, versions = _processor(one["machine"]), one["machine"]["versions"].items()
        versions = ", ".join(
            f"{name} {version}" for name, version in versions if name in NAMED and version
        )
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


def _processor(machine: dict[str, Any]) -> str:
    """The GPU, or the CPU where there is none."""
    return str(next((gpu["name"] for gpu in machine["gpus"]), machine["cpu"]))


def _keep(taken: dict[str, Taken], file: Path) -> None:
    record = json.dumps({"format": FORMAT, "figures": taken}, indent=1) + "\n"
    write_at_once(file, record.encode())
    write_at_once(file.with_suffix(".md"), page(taken).encode())
