"""What a run says while it goes: one live line on a terminal, a line now and then in a log."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gdn2.models.run_folder import measure_of

PLAIN_SECONDS = 10.0  # between the lines of a log
SHOWN = {  # of a line of metrics.jsonl, in this order
    "loss": "loss {:.3f}",
    "validation_loss": "val {:.3f}",
    "validation_accuracy": "right {:.1%}",
    "lr": "lr {:.1e}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "MFU {:.0%}",
    "memory_gib": "{:.1f} GiB",
}
MEMORY = 0.9  # of the mean seconds of a step, from one step to the next


class _PatientConsole(Console):
    """A console that falls silent when whoever read it has left; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Shows steps of `steps`, from `done` on; with `shown` false, on all but one process, it says nothing."""

    def __init__(self, steps: int, done: int, *, shown: bool = True) -> None:
        self._steps, self._done, self._shown = steps, done, shown
        self._console = _PatientConsole(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._seconds: float | None = None  # of a step, on average
        self._validation: dict[str, float] = {}
        self._next_line = 0.0

    def __enter__(self) -> "Progress":
        if self._shown and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        if self._shown:
            self._print(text)

    def _print(self, text: str) -> None:
        """What nobody can read any more, or a full disk does not take, is no reason to stop."""
        with suppress(OSError):
            self._console.print(Text(text))

    def update(self, line: dict[str, Any]) -> None:
        """Show what a step found, as metrics.jsonl has it."""
        self._done = line["step"]
        seconds = line["seconds"]
        before = seconds if self._seconds is None else self._seconds
        self._seconds = MEMORY * before + (1 - MEMORY) * seconds
        self._validation |= {name: line[name] for name in line if name.startswith("validation")}
        if not self._shown:
            return
        if self._live is not None:
            self._live.update(self._bar(line))
        elif self._is_due(line):
            self._print(f"step {self._done}/{self._steps}  {self._words(line)}")

    def _is_due(self, line: dict[str, Any]) -> bool:
        now = time.monotonic()
        if now < self._next_line and "validation_loss" not in line and self._done < self._steps:
            return False
        self._next_line = now + PLAIN_SECONDS
        return True

    def _bar(self, line: dict[str, Any]) -> Table:
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column()
        row.add_column(no_wrap=True)
        bar = ProgressBar(total=self._steps, completed=self._done, width=10)
        row.add_row(f"{self._done}/{self._steps}", bar, self._words(line))
        return row

    def _words(self, line: dict[str, Any]) -> str:
        numbers = {**self._validation, **line}
        left = (self._steps - self._done) * (self._seconds or 0.0)
        said = (phrase for name in SHOWN for phrase in _phrases(name, numbers))
        return "  ".join([*said, f"{clock(left)} left"])


def _phrases(shown: str, numbers: dict[str, Any]) -> Iterator[str]:
    """A number in words, and after it the same at other lengths."""
    for name, number in numbers.items():
        measure, length = measure_of(name)
        if measure == shown and number is not None:
            phrase = SHOWN[shown].format(number)
            yield phrase if length is None else phrase.replace(" ", f"@{length} ", 1)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
