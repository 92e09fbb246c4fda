"""Answers in a file that only grows: an evaluation that was killed goes on after the last whole line of it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gdn2.evals.scoring import Answer

FORMAT = "gdn2 answers 1"


class AnswerFile:
    """The answers of one model, by the keys of the requests."""

    def __init__(
        self,
        path: Path,
        model: Mapping[str, Any] | None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a file of this model's answers, or begin one; without a model read whatever it has.

        `model` is what tells it from others; its config is only kept for whoever reads the answers.
        """
        self.path = path
        self._known: dict[str, Answer] = {}
        self.model: Mapping[str, Any] = model or {}
        self.config = config
        head = {"format": FORMAT, "model": model, "config": config}
        content = b"" if model is not None and not path.exists() else self._content()
        end = content.rfind(b"\n") + 1  # what a killed process left of a line is no answer
        if model is None:
            self._read(content[:end])
        elif _line(head).startswith(content):  # nothing, or a header that was not finished
            self._cut(0)
            self._append(head)
        else:
            self._read(content[:end])
            self.check(
                {**dict.fromkeys(self.model), **model}, "; choose another folder for this model"
            )
            if end < len(content):  # only now: a file that was refused is somebody's
                self._cut(end)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Answer:
        return self._known[key]

    def add(self, key: str, answer: Answer) -> None:
        """Remember an answer, on the disk too."""
        self._known[key] = answer
        self._append({"key": key, "answer": answer})

    def check(self, model: Mapping[str, Any], advice: str = "") -> None:
        """Refuse the answers of a model that differs in any of these."""
        for name, expected in model.items():
            if self.model.get(name) != expected:
                raise ValueError(
                    f"{self.path}: got answers of a model with {name} {self.model.get(name)}, "
                    f"expected {expected}{advice}"
                )

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(_line(line))

    def _cut(self, end: int) -> None:
        if self.path.exists():
            with self.path.open("rb+") as file:
                file.truncate(end)

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as reason:
            raise ValueError(f"{self.path}: got {reason.strerror}, expected answers") from None

    def _read(self, content: bytes) -> None:
        head, *lines = content.splitlines() or [b""]
        try:
            about = json.loads(head)
        except ValueError:
            about = None
        known = isinstance(about, dict) and about.get("format") == FORMAT
        if not known or not isinstance(about.get("model"), dict):
            raise ValueError(f"{self.path}: got another file, expected one in format {FORMAT!r}")
        self.model, self.config = about["model"], about.get("config", self.config)
        self._known = dict(self._answers(lines))

    def _answers(self, lines: Iterable[bytes]) -> Iterator[tuple[str, Answer]]:
        for number, line in enumerate(lines, start=2):
            try:
                found = json.loads(line)
            except ValueError as reason:
                raise ValueError(
                    f"{self.path}, line {number}: got {reason}, expected JSON"
                ) from None
            whole = isinstance(found, dict) and isinstance(found.get("key"), str)
            if not whole or "answer" not in found:
                raise ValueError(f"{self.path}, line {number}: got {found!r}, expected an answer")
            yield found["key"], found["answer"]


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
