"""Bars of long work; where nobody watches a terminal, a line now and then instead."""

from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from gdn2.data.prepare import Progress

PAUSE = 30.0  # seconds between two lines


class Lines:
    """Lines for a file or a pipe, in which a bar that is drawn again and again would show only its end."""

    def __init__(self, console: Console) -> None:
        self.wanted = not console.is_terminal
        self._console, self._last = console, monotonic()

    def say(self, line: str, *, done: bool) -> None:
        """Print a line if it is the last of its work, or some time after the one before."""
        if self.wanted and (done or monotonic() - self._last >= PAUSE):
            self._console.print(line, highlight=False, soft_wrap=True)
            self._last = monotonic()


class ReadingBar:
    """A bar of the bytes that a preparation has read, with the documents and tokens they gave; shown once it reads."""

    def __init__(self, console: Console) -> None:
        self._lines = Lines(console)
        said = TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens")
        columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        self._bars = Bars(*columns, said, console=console, disable=self._lines.wanted)
        self._task = self._bars.add_task("", total=None, documents=0, tokens=0)

    def __enter__(self) -> "ReadingBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def show(self, progress: Progress) -> None:
        self._bars.start()
        self._bars.update(
            self._task,
            total=progress.size or None,
            completed=progress.read,
            documents=progress.documents,
            tokens=progress.tokens,
        )
        whole = f" of {progress.size / 1e6:,.1f}" if progress.size else ""
        said = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
        self._lines.say(f"{progress.read / 1e6:,.1f}{whole} MB, {said}", done=False)
