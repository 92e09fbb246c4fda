"""metrics.jsonl: a line for each step, the same after a resume as without one, but for the times."""

import json
import os
from contextlib import suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from gdn2.models.files import replace_file
from gdn2.models.run_folder import METRICS, Line, read_metrics


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
        kept = [line for line in read_metrics(folder) if line["step"] <= after]
        replace_file(folder / METRICS, "".join(map(_written, kept)))
        self._file = (folder / METRICS).open("ab", buffering=0)
        self._board = _board(folder, after) if tensorboard else None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # said before
            self._put()
        if self._file is not None:
            self._file.close()
        self._close_board()

    def write(self, line: Line) -> None:
        """Add the line of the next step."""
        self._waiting += _written(line).encode()
        try:
            self._put()
        finally:
            self._draw(line)

    def sync(self) -> None:
        """Put all lines on the disk: no checkpoint may be later than its metrics."""
        self._put()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _draw(self, line: Line) -> None:
        """Give the board the numbers; its library takes none any more after a disk has refused some."""
        if self._board is None:
            return
        try:
            for name, value in _numbers(line):
                self._board.add_scalar(name, value, line["step"])
        except OSError as reason:
            self._close_board()
            said = f"no more for tensorboard: {reason.strerror or reason}"
            raise OSError(said) from None

    def _close_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with suppress(OSError):
                board.close()

    def _put(self) -> None:
        """Write what waits; what a disk does not take is tried again with the next line."""
        while self._file is not None and self._waiting:
            try:
                taken = self._file.write(self._waiting)
            except OSError as reason:
                reason.filename = self._file.name
                raise
            self._waiting = self._waiting[taken:]


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
