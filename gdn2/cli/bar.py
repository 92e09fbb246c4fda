"""A bar of the bytes that were read, with the documents and tokens they gave."""

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


class ReadingBar:
    """Shown once a preparation reads."""

    def __init__(self, console: Console) -> None:
        said = TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens")
        columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        self._bars = Bars(*columns, said, console=console)
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
