"""lm-eval's tasks over files of a folder: its own task files, included by others that only say where the rows are."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdn2.evals.documents import Kind, Row, field_of, find_rows, read_rows

CHOICES: Mapping[str, Kind] = {"choices": dict, "answerKey": str}


@dataclass(frozen=True)
class Gold:
    """The field that says which answer is right, and what it may say."""

    name: str
    among: Callable[[Row, str], Sequence[str]]  # from a row and its place


def _fixed(*values: str) -> Callable[[Row, str], Sequence[str]]:
    return lambda row, where: values


def _endings(row: Row, where: str) -> Sequence[str]:
    texts = _texts(row["endings"], f"{where}, field 'endings'")
    return [str(number) for number in range(len(texts))]


def _labels(row: Row, where: str) -> Sequence[str]:
    where, choices = f"{where}, field 'choices'", row["choices"]
    texts, labels = (_texts(choices.get(name), where) for name in ("text", "label"))
    if len(texts) != len(labels):
        raise ValueError(f"{where}: got {len(labels)} labels, expected {len(texts)} as of texts")
    return labels


def _texts(found: Any, where: str) -> list[str]:
    strings = isinstance(found, list) and all(isinstance(t, str) and t.strip() for t in found)
    if not strings or not found:
        raise ValueError(f"{where}: got {found!r}, expected a list of texts")
    return list(found)


@dataclass(frozen=True)
class Source:
    """A task of lm-eval: its file there, the split that is scored, and what may stand in for that."""

    stock: str  # under lm_eval/tasks
    split: str
    stems: tuple[str, ...]  # names of files, without their endings
    fields: Mapping[str, Kind]
    gold: Gold | None = None
    blank: tuple[str, ...] = ()  # texts that may be; one of the others would be scored as something


CHOICE = Gold("answerKey", _labels)
SOURCES = {
    "wikitext": Source(
        "wikitext/wikitext.yaml",
        "test",
        ("wikitext_test", "wikitext2_raw_test_documents"),
        {"page": str},
    ),
    "lambada_openai": Source(
        "lambada/lambada_openai.yaml", "test", ("lambada_openai_test",), {"text": str}
    ),
    "piqa": Source(
        "piqa/piqa.yaml",
        "validation",
        ("piqa_validation",),
        {"goal": str, "sol1": str, "sol2": str, "label": int},
        Gold("label", _fixed("0", "1")),
    ),
    "hellaswag": Source(
        "hellaswag/hellaswag.yaml",
        "validation",
        ("hellaswag_validation",),
        {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": (str, int)},
        Gold("label", _endings),
        blank=("ctx_b",),
    ),
    "winogrande": Source(
        "winogrande/default.yaml",
        "validation",
        ("winogrande_validation", "winogrande_xl_validation"),
        {"sentence": str, "option1": str, "option2": str, "answer": str},
        Gold("answer", _fixed("1", "2")),
    ),
    "arc_easy": Source(
        "arc/arc_easy.yaml", "test", ("arc_easy_test",), {"question": str, **CHOICES}, CHOICE
    ),
    "arc_challenge": Source(
        "arc/arc_challenge.yaml",
        "test",
        ("arc_challenge_test",),
        {"question": str, **CHOICES},
        CHOICE,
    ),
    "openbookqa": Source(
        "openbookqa/openbookqa.yaml",
        "test",
        ("openbookqa_test",),
        {"question_stem": str, **CHOICES},
        CHOICE,
    ),
    "social_iqa": Source(
        "siqa/siqa.yaml",
        "validation",
        ("social_iqa_validation",),
        {"context": str, "question": str, **dict.fromkeys(("answerA", "answerB", "answerC"), str)}
        | {"label": (str, int)},
        Gold("label", _fixed("1", "2", "3")),
    ),
    "boolq": Source(
        "super_glue/boolq/default.yaml",
        "validation",
        ("boolq_validation",),
        {"passage": str, "question": str, "label": int},
        Gold("label", _fixed("0", "1")),
    ),
}


def find_file(name: str, data: Path) -> Path:
    """The file with a task's rows."""
    return find_rows(data, SOURCES[name].stems)


def task_file(name: str, stock: Path, data: Path | None) -> dict[str, Any]:
    """What a task file of lm-eval holds: the task under `stock` as it is, or with the checked rows of a folder."""
    source = SOURCES[name]
    own = {"include": str(stock / source.stock), "task": name}
    if data is None:
        return own
    file = find_file(name, data)
    check_rows(file, source)
    splits = {f"{split}_split": None for split in ("training", "validation", "test")}
    return own | {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {source.split: str(file.absolute())}},
        **splits,
        f"{source.split}_split": source.split,
    }


def write_task_file(name: str, stock: Path, data: Path | None, folder: Path) -> None:
    """Write a task file; JSON is YAML too."""
    (folder / f"{name}.yaml").write_text(json.dumps(task_file(name, stock, data), indent=1))


def check_rows(file: Path, source: Source) -> None:
    """Refuse a file without rows, or one with a row of which lm-eval would make nothing, or nonsense."""
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}, row {number}"
        for name, kind in source.fields.items():
            kinds = kind if isinstance(kind, tuple) else (kind,)
            field_of(row, name, where, kinds, " or ".join(one.__name__ for one in kinds))
            if kind is str and name not in source.blank and not row[name].strip():
                raise ValueError(f"{where}, field {name!r}: got {row[name]!r}, expected some text")
        if source.gold is not None:
            _check_gold(row, source.gold, where)


def _check_gold(row: Row, gold: Gold, where: str) -> None:
    """Refuse an answer that is no choice: lm-eval takes -1 for the last one, or for one that nobody finds."""
    found, among = row[gold.name], gold.among(row, where)
    if str(int(found) if isinstance(found, bool) else found) not in among:
        said = " or ".join(among)
        raise ValueError(f"{where}, field {gold.name!r}: got {found!r}, expected {said}")
