"""metrics.jsonl: a line for each step, the same after a resume as without one, but for the times."""

import json
import os
from contextlib import suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gdn2.ops.arguments import require

FILE = "metrics.jsonl"
TIMINGS = ("seconds", "tokens_per_second", "mfu", "memory_gib")  # what two equal runs differ in
PLACE = ("step", "tokens")  # what every line has
DRAWN = ("loss", "validation_loss", "tokens_per_second", "gradient_norm")  # numbers where they are

Line = dict[str, Any]


class Metrics:
    """Writes the lines of a run from step `after` + 1 on; later ones of an earlier attempt are cut off.

    Without a folder, on all processes but one, nothing is written.
    """

    def __init__(self, folder: Path | None, after: int, *, tensorboard: bool = False) -> None:
        self._file: BinaryIO | None = None
        self._waiting = b""  # what a full disk did not take
        self._board: Any = None
        if folder is None:
            return
        path, part = folder / FILE, folder / f".{FILE}"
        kept = [line for line in read_metrics(folder) if line["step"] <= after]
        part.write_text("".join(map(_written, kept)))
        part.replace(path)
        self._file = path.open("ab", buffering=0)
        self._board = _board(folder, after) if tensorboard else None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        mistake: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # said before
            self._put()
        for opened in (self._file, self._board):
            if opened is not None:
                opened.close()

    def write(self, line: Line) -> None:
        """Add the line of the next step."""
        if self._board is not None:
            for name, value in _numbers(line):
                self._board.add_scalar(name, value, line["step"])
        self._waiting += _written(line).encode()
        self._put()

    def sync(self) -> None:
        """Put all lines on the disk: no checkpoint may be later than its metrics."""
        self._put()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _put(self) -> None:
        """Write what waits; what a disk does not take is tried again with the next line."""
        while self._file is not None and self._waiting:
            try:
                taken = self._file.write(self._waiting)
            except OSError as reason:
                reason.filename = self._file.name
                raise
            self._waiting = self._waiting[taken:]


def read_metrics(folder: Path) -> list[Line]:
    """The lines of a run, without one that a kill cut short."""
    file = folder / FILE
    # A byte that is no text becomes \x.., which is no JSON: its line is named like any other broken one.
    texts = file.read_text("utf-8", "backslashreplace").splitlines() if file.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        where = f"{file}, line {number}"
        try:
            line = json.loads(text)
        except ValueError:
            if number < len(texts):
                raise ValueError(f"{where}: got {text!r}, expected JSON") from None
            continue
        fits = isinstance(line, dict) and all(type(line.get(name)) is int for name in PLACE)
        require(fits, where, repr(line), "a table with step and tokens, both integers")
        for name in DRAWN:
            value = line.get(name)
            fits = value is None or type(value) in (int, float)
            require(fits, f"{where}: {name}", repr(value), "a number")
        lines.append(line)
    return lines


def check_tensorboard(wanted: bool) -> None:
    """Refuse what could not be written, before anything is trained for it."""
    if wanted and find_spec("tensorboard") is None:
        raise ValueError(
            'log.tensorboard: tensorboard is not installed; pip install "gdn2[track]" installs it'
        )


def _written(line: Line) -> str:
    return json.dumps(_plain(line), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no word for numbers that are none."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _numbers(value: Any, path: str = "") -> list[tuple[str, float]]:
    """The numbers of a line with their paths; those of a layer lie in tables."""
    if isinstance(value, dict):
        inner = ((f"{path}/{name}" if path else name, x) for name, x in value.items())
        return [number for name, x in inner for number in _numbers(x, name)]
    return [(path, value)] if isinstance(value, int | float) else []


def _board(folder: Path, after: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)

    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)
