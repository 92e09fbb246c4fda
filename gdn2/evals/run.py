"""An evaluation from beginning to end: tasks, answers, results, and what is on the disk in between."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch

from gdn2.data.byte_tokenizer import BYTES
from gdn2.data.tokenizers import Tokenizer, load_tokenizer
from gdn2.evals.answers import AnswerFile
from gdn2.evals.request import Request, check_limit
from gdn2.evals.requests_file import key_of, read_requests, write_requests
from gdn2.evals.results import Results, check_owner, describe, known_as, known_of, libraries
from gdn2.evals.scoring import Answer, Scorer
from gdn2.evals.suites import MissingDataError, Sources, columns, make_job
from gdn2.models.files import standing
from gdn2.models.folder import config_of, load_stop_ids, open_model

ANSWERS, RESULTS = "answers.jsonl", "results.json"


class Progress(NamedTuple):
    """How many of a task's requests have an answer."""

    task: str
    done: int
    total: int


class Saved(NamedTuple):
    """How many requests a file has, and why some tasks have none there: no data, or wrong ones."""

    requests: int
    skipped: dict[str, str]
    failed: dict[str, str]


Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to be asked; its weights are read once something must be scored."""

    name: str
    device: torch.device
    dtype: torch.dtype
    tokenizer_name: str | None = None
    batch_size: int | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        folder = standing(Path(self.name))
        return load_tokenizer(self.tokenizer_name or (folder if folder.is_dir() else BYTES))

    def given(self, file: Path) -> AnswerFile:
        """Its answers in a file from elsewhere, which is only read; those of another model are refused."""
        answers = AnswerFile(file, None)
        answers.check(known_of(self.name, self.tokenizer))
        return answers

    def answers(self, folder: Path) -> AnswerFile:
        """Its answers in a folder, which is made where there is none."""
        config = config_of(self.name)
        identity = describe(self.name, config, self.tokenizer, self.dtype)
        if not (folder / ANSWERS).exists():  # none are begun beside another model's results
            check_owner(folder / RESULTS, identity)
        folder.mkdir(parents=True, exist_ok=True)
        return AnswerFile(folder / ANSWERS, identity, config.to_dict())

    @cached_property
    def scorer(self) -> Scorer:
        model = open_model(self.name, device=self.device, dtype=self.dtype).eval()
        stops = load_stop_ids(standing(Path(self.name)))
        return Scorer(model, self.tokenizer, batch_size=self.batch_size, stop_ids=stops)


class Answerer:
    """Gives the answers that a file has, and asks the model for the others."""

    def __init__(self, subject: Subject | None, answers: AnswerFile, report: Report) -> None:
        """Without a subject only known answers can be given."""
        self._subject, self._answers, self._report = subject, answers, report

    def __call__(self, requests: Sequence[Request]) -> list[Answer]:
        keys = [key_of(request) for request in requests]
        missing = {
            key: request
            for key, request in zip(keys, requests, strict=True)
            if key not in self._answers
        }
        total, task = len(set(keys)), requests[0].task if requests else ""
        done = total - len(missing)
        self._report(Progress(task, done, total))
        if missing:
            if self._subject is None:
                lacking = f"{len(missing)} of {total} requests of {task} without an answer"
                raise ValueError(f"{self._answers.path}: got {lacking}, expected all answers")
            names = list(missing)
            for number, answer in self._subject.scorer.answers(list(missing.values())):
                self._answers.add(names[number], answer)
                done += 1
                self._report(Progress(task, done, total))
        return [self._answers[key] for key in keys]


def evaluate(
    subject: Subject,
    tasks: Sequence[str],
    sources: Sources,
    out: Path,
    *,
    limit: int | None = None,
    answers: Path | None = None,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Run tasks and return what `out`/results.json then holds.

    A task whose data are not there is skipped, one whose data are wrong fails, and the others go on. The same call
    again goes on where it was. With `answers`, a file of them from elsewhere, no model is needed.
    """
    check_limit(limit)
    given = subject.given(answers) if answers else subject.answers(out)
    answerer = Answerer(None if answers else subject, given, report)
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / RESULTS, given, subject.name)
    asked = {**_plain(sources), "device": None if answers else str(subject.device)}
    for name in tasks:
        began = monotonic()
        try:
            job = make_job(name, sources)
            found = job.run(answerer, subject.tokenizer, limit)
            said = {"protocol": job.protocol, "limit": limit, "seconds": monotonic() - began}
            results.add(name, {**found, **said, "asked": asked})
        except MissingDataError as reason:
            results.drop(name, "skipped", str(reason))
        except ValueError as reason:
            results.drop(name, "failed", _named(name, reason))
        results.record["columns"] = columns(results.record["tasks"])
        results.write()
    return results.record


def save_requests(
    subject: Subject, tasks: Sequence[str], sources: Sources, file: Path, limit: int | None = None
) -> Saved:
    """Write the requests of tasks to a file; only the tokenizer is needed."""
    check_limit(limit)
    kept: list[Request] = []
    found: list[Request] = []  # of one task, kept once it has gone through
    nothing: dict[str, Answer] = {"generate": "", "rolling": 0.0, "loglikelihood": [0.0, False]}

    def record(requests: Sequence[Request]) -> list[Answer]:
        found.extend(requests)
        return [nothing[request.kind] for request in requests]

    about: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in tasks:
        found.clear()
        try:
            job = make_job(name, sources)
            result = job.run(record, subject.tokenizer, limit)
            about[name] = {"version": result["version"], "protocol": job.protocol}
            kept.extend(found)
        except MissingDataError as reason:
            skipped[name] = str(reason)
        except ValueError as reason:
            failed[name] = _named(name, reason)
    said: dict[str, Any] = {"tokenizer": known_as(subject.tokenizer)}
    said |= {"limit": limit, "tasks": about, "skipped": {**skipped, **failed}}
    write_requests(file, kept, said | {"libraries": libraries()})
    return Saved(len(kept), skipped, failed)


def _named(task: str, reason: ValueError) -> str:
    """Why a task failed, with its name once."""
    return f"{task}: {str(reason).removeprefix(f'{task}: ')}"


def answer_requests(
    subject: Subject, file: Path, out: Path, report: Report = lambda _: None
) -> int:
    """Answer the requests of a file in `out`/answers.jsonl and return how many there are."""
    about, requests = read_requests(file)
    own = known_as(subject.tokenizer)
    if about["tokenizer"] != own:
        raise ValueError(
            f"tokenizer: got one with checksum {own}, expected {about['tokenizer']} as in {file}"
        )
    answerer = Answerer(subject, subject.answers(out), report)
    for name in dict.fromkeys(request.task for request in requests):
        answerer([request for request in requests if request.task == name])
    return len(requests)


def _plain(sources: Sources) -> dict[str, Any]:
    """The sources as JSON has them."""
    values = asdict(sources)
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
