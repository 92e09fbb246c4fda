"""Answers in a file that only grows: an evaluation that was killed goes on after the last whole line of it."""

import json
from collections.abc import Iterator, Mapping
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
        if model is None or (path.exists() and path.stat().st_size):
            self._read(model)
        else:
            self._append({"format": FORMAT, "model": model, "config": config})

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Answer:
        return self._known[key]

    def add(self, key: str, answer: Answer) -> None:
        """Remember an answer, on the disk too."""
        self._known[key] = answer
        self._append({"key": key, "answer": answer})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self, model: Mapping[str, Any] | None) -> None:
        lines = self._lines()
        head = next(lines, {})
        if head.get("format") != FORMAT or not isinstance(head.get("model"), dict):
            raise ValueError(f"{self.path}: got another file, expected one in format {FORMAT!r}")
        self.model, self.config = head["model"], head.get("config", self.config)
        if model is not None:
            for name in {**model, **self.model}:
                if model.get(name) != self.model.get(name):
                    raise ValueError(
                        f"{self.path}: got answers of a model with {name} {self.model.get(name)}, "
                        f"expected {model.get(name)}; choose another folder for this model"
                    )
        for line in lines:
            self._known[line["key"]] = line["answer"]

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines; what a killed process left of one is cut off."""
        try:
            content = self.path.read_bytes()
        except OSError as reason:
            raise ValueError(f"{self.path}: got {reason.strerror}, expected answers") from None
        end = content.rfind(b"\n") + 1
        if end < len(content):
            with self.path.open("rb+") as file:
                file.truncate(end)
        for number, line in enumerate(content[:end].splitlines(), start=1):
            try:
                found = json.loads(line)
            except ValueError as reason:
                raise ValueError(
                    f"{self.path}, line {number}: got {reason}, expected JSON"
                ) from None
            wanted = set() if number == 1 else {"key", "answer"}
            if not isinstance(found, dict) or not wanted <= found.keys():
                raise ValueError(f"{self.path}, line {number}: got {found!r}, expected an answer")
            yield found
