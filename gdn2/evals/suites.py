"""The paper's suites by name: which tasks they are, and which metric stands in which column."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from gdn2.data.tokenizers import Tokenizer
from gdn2.evals import harness
from gdn2.evals.documents import find_rows
from gdn2.evals.fitting import FITS
from gdn2.evals.local_data import SOURCES, find_file
from gdn2.evals.needle_task import needle_task
from gdn2.evals.needles import KINDS
from gdn2.evals.recall import KEPT, recall_task
from gdn2.evals.recall_data import RECALL_SETS
from gdn2.evals.request import JSON, Task
from gdn2.evals.scoring import Answers
from gdn2.layers.plain import nearest
from gdn2.ops.arguments import require

LM = ("wikitext", "lambada_openai")
CARRIED = "wikitext_carried"  # the same documents, with the state carried from window to window
SUITES: dict[str, tuple[str, ...]] = {
    "lm": LM,
    "commonsense": tuple(name for name in SOURCES if name not in LM),
    "niah": tuple(KINDS),
    "recall": tuple(RECALL_SETS),
}
SUITES["all"] = tuple(name for suite in list(SUITES.values()) for name in suite)

PAPER_LENGTHS = {
    "niah_single_1": (1024, 2048, 4096, 8192),
    "niah_single_2": (1024, 2048, 4096, 8192),
    "niah_single_3": (1024, 2048, 4096),
    "niah_multikey_1": (1024, 2048, 4096),
}

COLUMNS: dict[str, tuple[str, str]] = {  # of the paper's Tables 2 and 4: task and metric
    "Wiki. ppl": ("wikitext", "word_perplexity"),
    "LMB. ppl": ("lambada_openai", "perplexity"),
    "LMB. acc": ("lambada_openai", "acc"),
    "PIQA": ("piqa", "acc"),
    "Hella.": ("hellaswag", "acc_norm"),
    "Wino.": ("winogrande", "acc"),
    "ARC-e": ("arc_easy", "acc"),
    "ARC-c": ("arc_challenge", "acc"),
    "OBQA": ("openbookqa", "acc"),
    "SIQA": ("social_iqa", "acc"),
    "BoolQ": ("boolq", "acc"),
    "SWDE": ("swde", "contains"),
    "SQD": ("squad", "contains"),
    "FDA": ("fda", "contains"),
    "TQA": ("triviaqa", "contains"),
    "NQ": ("nq", "contains"),
    "DROP": ("drop", "contains"),
}
AVERAGES = {"Avg. of Table 2": list(COLUMNS)[2:11], "Avg. of Table 4": list(COLUMNS)[11:]}


class MissingDataError(ValueError):
    """A task whose data were not given; others can go on."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where tasks find their data, and how they ask."""

    data: Path | None = None  # a folder; else the hub
    essays: Path | None = None
    lengths: tuple[int, ...] | None = None  # of needles; else the paper's
    window: int = 4096  # tokens of a perplexity's windows
    needle_fit: str = "ruler"  # how needle prompts are brought to their length; or "lm_eval"
    recall_length: int = 2048  # tokens of a document with question and answer

    def __post_init__(self) -> None:
        for name, path in (("data", self.data), ("essays", self.essays)):
            is_there = path is None or path.exists()
            require(is_there, name, f"no {path}", "a path that is there")
        require(self.window >= 1, "window", self.window, "at least 1")
        fit, length = self.needle_fit, self.recall_length
        require(fit in FITS, "needle_fit", repr(fit), nearest(fit, FITS))
        require(length > KEPT, "recall_length", length, f"more than the {KEPT} for an answer")

    @property
    def nltk_data(self) -> Path | None:
        """NLTK's folder beside the essays; else NLTK knows where to look."""
        beside = None if self.essays is None else self.essays.parent / "nltk_data"
        return beside if beside is not None and beside.is_dir() else None


class Job(Protocol):
    """A task ready to be run."""

    @property
    def protocol(self) -> str: ...

    def run(self, answer: Answers, tokenizer: Tokenizer, limit: int | None) -> dict[str, JSON]:
        """Version, number of samples and metrics, from what some function answers."""
        ...


@dataclass(frozen=True)
class OwnJob:
    """A task of ours."""

    task: Task

    @property
    def protocol(self) -> str:
        return self.task.protocol

    def run(self, answer: Answers, tokenizer: Tokenizer, limit: int | None) -> dict[str, JSON]:
        requests = list(self.task.requests(tokenizer, limit))
        if not requests:
            raise ValueError(f"{self.task.name}: got no question among the rows, expected some")
        answers = zip(requests, answer(requests), strict=True)
        summary = self.task.summarise((r, self.task.score(r, str(a))) for r, a in answers)
        samples = summary.pop("samples")
        return {"version": self.task.version, "samples": samples, "metrics": summary}


@dataclass(frozen=True)
class HarnessJob:
    """A task of lm-eval."""

    name: str
    window: int | None
    data: Path | None

    @property
    def protocol(self) -> str:
        return harness.protocol(self.name, self.window, self.data)

    def run(self, answer: Answers, tokenizer: Tokenizer, limit: int | None) -> dict[str, JSON]:
        return harness.run_task(self.name, answer, window=self.window, data=self.data, limit=limit)


def tasks_of(suites: Sequence[str], names: Sequence[str] = ()) -> list[str]:
    """The tasks of suites, and others by name, each once."""
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"suite: got {suite!r}, expected {nearest(suite, SUITES)}")
    found = list(dict.fromkeys([*(name for suite in suites for name in SUITES[suite]), *names]))
    if not found:
        raise ValueError("tasks: got none, expected a suite or names of tasks")
    return found


def make_job(name: str, sources: Sources) -> Job:
    """A task by its name: one of ours, or any of lm-eval's."""
    data = sources.data
    if name in KINDS:
        if KINDS[name].essays and sources.essays is None:
            raise MissingDataError(f"{name}: got no essays, expected a file of them (--essays)")
        lengths = sources.lengths or PAPER_LENGTHS[name]
        task = needle_task(
            name,
            lengths,
            essays=sources.essays,
            nltk_data=sources.nltk_data,
            fit=sources.needle_fit,
        )
        return OwnJob(task)
    if name in RECALL_SETS:
        _check_there(name, lambda place: find_rows(place, RECALL_SETS[name].stems), data)
        return OwnJob(recall_task(name, data, sources.recall_length))
    stock, window = ("wikitext", None) if name == CARRIED else (name, sources.window)
    if stock in SOURCES:
        _check_there(name, lambda place: find_file(stock, place), data)
    elif data is not None:
        raise ValueError(f"task: got {name!r}, expected {nearest(name, SUITES['all'])}")
    return HarnessJob(stock, window, data)


def _check_there(name: str, find: Callable[[Path], Path], data: Path | None) -> None:
    try:
        if data is not None:
            find(data)
    except ValueError as reason:
        raise MissingDataError(f"{name}: {reason}") from None


def columns(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The paper's columns that results have a number for, and averages where none is missing or asked otherwise."""
    found = {
        column: tasks[task]["metrics"][metric]
        for column, (task, metric) in COLUMNS.items()
        if metric in tasks.get(task, {}).get("metrics", {})
    }
    for average, parts in AVERAGES.items():
        names = [COLUMNS[part][0] for part in parts if part in found]
        ways = {_way(name, tasks[name]) for name in names}
        if len(names) == len(parts) and len(ways) == 1:
            found[average] = mean(found[part] for part in parts)
    return found


def _way(name: str, task: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """How many samples were asked, and of recall the length of documents, which calls may choose."""
    length = task.get("asked", {}).get("recall_length", Sources.recall_length)
    return task.get("limit"), length if name in RECALL_SETS else None
