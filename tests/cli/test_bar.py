"""Long work in a log: whole lines, now and then."""

from io import StringIO

import pytest
from rich.console import Console

from gdn2.cli import bar
from gdn2.cli.bar import ReadingBar
from gdn2.cli.results import AnswerBar
from gdn2.data import prepare
from gdn2.evals import run


def test_answers_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = StringIO(), [0.0]
    monkeypatch.setattr(bar, "monotonic", lambda: now[0])
    with AnswerBar(Console(file=out)) as shown:
        for second in range(71):
            now[0] = second
            shown.show(run.Progress("piqa", second, 71))
        shown.show(run.Progress("piqa", 71, 71))
        shown.show(run.Progress("boolq", 0, 5))
    assert out.getvalue() == "piqa: 30 of 71\npiqa: 60 of 71\npiqa: 71 of 71\n"


def test_reading_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = StringIO(), [0.0]
    monkeypatch.setattr(bar, "monotonic", lambda: now[0])
    with ReadingBar(Console(file=out)) as shown:
        for second, size in ((0, 0), (29, 0), (30, 0), (59, 90_000_000), (60, 90_000_000)):
            now[0] = second
            shown.show(prepare.Progress(1_500_000 * second, size, second, 2000 * second, 0))
    assert out.getvalue() == (
        "45.0 MB, 30 documents, 60,000 tokens\n90.0 of 90.0 MB, 60 documents, 120,000 tokens\n"
    )


def test_a_terminal_shows_a_bar() -> None:
    out = StringIO()
    with AnswerBar(Console(file=out, force_terminal=True, width=100)) as shown:
        shown.show(run.Progress("piqa", 3, 3))
    assert "3/3" in out.getvalue()
    assert "3 of 3" not in out.getvalue()
