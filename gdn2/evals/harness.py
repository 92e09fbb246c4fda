"""lm-eval as the engine of its own tasks: for one task at a time, and its whole command line over our models.

python -m gdn2.evals.harness --model gdn2 --model_args pretrained=FOLDER --tasks lambada_openai [--data FOLDER]
"""

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gdn2.data.extras import need
from gdn2.evals.local_data import SOURCES, find_file, write_task_file
from gdn2.evals.request import JSON, Request
from gdn2.evals.scoring import Answer, Answers
from gdn2.layers.plain import nearest

RESAMPLES = 1000  # for the standard error of a perplexity


def run_task(
    name: str, answer: Answers, *, window: int | None, data: Path | None, limit: int | None
) -> dict[str, JSON]:
    """Metrics of one task, accuracies in percent, from what some function answers."""
    adapter = need("gdn2.evals.adapter", "eval", name)
    evaluator = need("lm_eval.evaluator", "eval", name)
    asked: list[int] = []
    mistakes: list[Exception] = []  # of what answers
    out, err = sys.stdout, sys.stderr

    def noting(requests: Sequence[Request]) -> Sequence[Answer]:
        asked.append(len(requests))
        with redirect_stdout(out), redirect_stderr(err):
            try:
                return answer(requests)
            except Exception as reason:
                mistakes.append(reason)
                raise

    with TemporaryDirectory() as folder, _silence(), _alone(evaluator):
        manager = _manager(name, data, Path(folder))
        try:
            found = evaluator.simple_evaluate(
                model=adapter.RequestLM(noting, window),
                tasks=[name],
                task_manager=manager,
                limit=limit,
                log_samples=False,
                bootstrap_iters=RESAMPLES,
            )
        except Exception as reason:  # libraries raise whatever they like over data that do not fit
            if reason in mistakes:
                raise
            line = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
            wanted = "rows and answers that give its metrics" if asked else "the task's data"
            raise ValueError(f"{name}: got {line}, expected {wanted}") from reason
    return _readable(name, found)


def _manager(name: str, data: Path | None, folder: Path) -> Any:
    """What finds the task: a file for it in `folder` or, which takes a while, all files of lm-eval."""
    tasks = need("lm_eval.tasks", "eval", name)
    known = name in SOURCES
    if known:
        write_task_file(name, Path(tasks.__file__).parent, data, folder)
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=not known)
    if name not in manager.all_subtasks:
        names = [*SOURCES, *manager.all_subtasks]
        raise ValueError(f"task: got {name!r}, expected {nearest(name, names)}")
    return manager


def protocol(name: str, window: int | None, data: Path | None) -> str:
    """How lm-eval runs one of its tasks, in a sentence."""
    notes = [f"lm-eval {version('lm_eval')}, task {name}, as many examples as the task says"]
    if name in SOURCES:
        source = SOURCES[name]
        place = "the hub's" if data is None else find_file(name, data).name
        notes = [f"lm-eval {version('lm_eval')}, task {name}, zero-shot", f"{source.split} split"]
        notes.append(f"rows of {place}")
    if name == "wikitext":
        carried = "the state is carried through each document, which is not the usual protocol"
        notes.append(carried if window is None else f"windows of {window} tokens")
    return "; ".join(notes)


@contextmanager
def _silence() -> Iterator[None]:
    """What lm-eval and its libraries have to say is bars, and errors that are raised as well."""
    for logger in ("lm_eval", "datasets"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _alone(evaluator: Any) -> Iterator[None]:
    """lm-eval would ask git, pip and others about the machine after each task; git complains outside a checkout."""
    asking = ("get_git_commit_hash", "add_env_info")
    known = {name: vars(evaluator)[name] for name in asking if name in vars(evaluator)}
    try:
        vars(evaluator).update(dict.fromkeys(known, lambda *_: None))
        yield
    finally:
        vars(evaluator).update(known)


def _readable(name: str, found: dict[str, Any]) -> dict[str, JSON]:
    """Metrics, accuracies in percent, without lm-eval's suffixes but those of filters that a task has several of."""
    metrics: dict[str, JSON] = {}
    for key, value in found["results"][name].items():
        metric, _, kept = key.partition(",")
        if isinstance(value, int | float) and kept:
            metrics[metric if kept == "none" else key] = (
                100 * value if metric.startswith("acc") else value
            )
    samples = found["n-samples"][name]["effective"]
    return {"version": str(found["versions"][name]), "samples": samples, "metrics": metrics}


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with the model `gdn2`, and with tasks of a folder where there is `--data`."""
    adapter = need("gdn2.evals.adapter", "eval", "lm-eval")
    need("lm_eval.api.registry", "eval", "lm-eval").register_model("gdn2")(adapter.Gdn2LM)
    words, data = _taken(list(arguments), "--data")
    with TemporaryDirectory() as folder:
        if data is not None:
            stock = Path(need("lm_eval.tasks", "eval", "lm-eval").__file__).parent
            for name in _wanted(words):
                write_task_file(name, stock, Path(data), Path(folder))
            words += ["--include_path", folder]
        sys.argv = ["lm-eval", *words]
        need("lm_eval.__main__", "eval", "lm-eval").cli_evaluate()


def _taken(words: list[str], option: str) -> tuple[list[str], str | None]:
    """The words without an option, and its value."""
    words = [part for word in words for part in _parts(word, option)]
    if option not in words:
        return words, None
    place = words.index(option)
    if place + 1 == len(words):
        raise ValueError(f"{option}: got nothing, expected a folder")
    return words[:place] + words[place + 2 :], words[place + 1]


def _parts(word: str, option: str) -> list[str]:
    """A word, or the two that option=value stands for."""
    return word.split("=", 1) if word.startswith(f"{option}=") else [word]


def _wanted(words: Sequence[str]) -> list[str]:
    named = {name for word in words for name in word.replace("=", ",").split(",")}
    return [name for name in SOURCES if name in named]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
