"""The six recall datasets: a document, a question about it, the answers, and around what the document is cut.

The hub's datasets are those of the Just Read Twice (JRT) harness, where the prompt ends in a sentence to complete.
Files that lack these rewritten questions are asked the question itself.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gdn2.evals.documents import Row, list_field, text_field

Gold: TypeAlias = list[list[str]]  # an answer is right if it has all strings of any of these
SWDE_MARK = "Summary of information above..."  # JRT's own prompt for SWDE begins here


@dataclass(frozen=True)
class Item:
    """One question about one document, of which without anchors the beginning is kept."""

    document: str
    question: str
    gold: Gold
    anchors: Sequence[str] = ()  # the earliest is what the document is cut around
    others: Sequence[str] = ()  # or the first of these, where no anchor is found
    token: int | None = None  # or this token, where none of these is


Read: TypeAlias = Callable[[Row, str], Item | None]  # from a row and its place; None is left out
Prompt: TypeAlias = Callable[[str, str], str]  # from the document, once cut, and the question


@dataclass(frozen=True)
class Form:
    """How rows become items and prompts, and what that leaves to say."""

    read: Read
    prompt: Prompt
    note: str = ""


@dataclass(frozen=True)
class RecallSet:
    """A dataset of JRT's on the hub, and names of files that may stand in for it."""

    hub: str
    stems: tuple[str, ...]
    kept: str  # which part of a document that is too long
    jrt: Form
    mark: str = ""  # a field of JRT's rows that rows of another form lack
    other: Form | None = None  # of rows with a context, a question and answers

    def form(self, row: Row) -> Form:
        return self.jrt if self.other is None or self.mark in row else self.other


def _keyed(row: Row, where: str) -> Item | None:
    document, key, value = (text_field(row, name, where) for name in ("text", "key", "value"))
    return _sought(Item(document, key, [[value]], anchors=(key, value)))


def _keyed_page(row: Row, where: str) -> Item | None:
    page = text_field(row, "text", where).split(SWDE_MARK)[0]
    return _keyed(row | {"text": page}, where)


def _completed(row: Row, where: str) -> Item | None:
    document, value = (text_field(row, name, where) for name in ("text", "value"))
    return _sought(Item(document, "", [[value]], anchors=(value,)))


def _asked(row: Row, where: str) -> Item:
    document, question = (text_field(row, name, where) for name in ("context", "question"))
    return Item(document, question, _gold(row, where))


def _asked_if_present(row: Row, where: str) -> Item | None:
    item = _asked(row, where)
    document = item.document.lower()
    return item if all(answer.lower() in document for answer in item.gold[0]) else None


def _asked_around(row: Row, where: str) -> Item | None:
    """The document is cut around the first answer."""
    item = _asked(row, where)
    (first, *_), *rest = item.gold
    others = row.get("alt_answers", [answer for answers in rest for answer in answers])
    if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
        raise ValueError(
            f"{where}, field 'alt_answers': got {others!r}, expected strings in a list"
        )
    token = row.get("tok_pos")
    if not isinstance(token, int | None):
        raise ValueError(f"{where}, field 'tok_pos': got {token!r}, expected a number or null")
    return _sought(replace(item, anchors=(first,), others=others, token=token))


def _sought(item: Item) -> Item | None:
    """JRT leaves out what would be sought by a single letter."""
    return item if all(len(anchor) > 1 for anchor in item.anchors) else None


def _gold(row: Row, where: str) -> Gold:
    """The answers as alternatives, each of one string or of several; blank ones would always be right."""
    answers = list_field(row, "answers", where)
    gold = [answer if isinstance(answer, list) else [answer] for answer in answers]
    if not all(part and all(isinstance(t, str) and t.strip() for t in part) for part in gold):
        raise ValueError(f"{where}, field 'answers': got {answers!r}, expected strings with text")
    return gold


def _without(document: str, question: str) -> str:
    """The document without copies of the question at its end."""
    while question and document.lower().endswith(question.lower()):
        document = document[: -len(question)]
    return document


def _fda(document: str, key: str) -> str:
    document = _without(document, f"{key}:").strip("\n")
    return f"{document.strip('.')}. {_label(key)}"


def _swde(document: str, key: str) -> str:
    document = _without(document, f"{key}:").strip()
    return f"{document.strip('.')}. {_label(key)}"


def _label(key: str) -> str:
    return f"{key[0].upper()}{key[1:]}:"


def _squad(document: str, question: str) -> str:
    return document.strip()


def _cloze(document: str, question: str) -> str:
    question = question.strip()
    return f"{_without(document.strip(), question).strip().strip('.')}. {question}"


def _triviaqa(document: str, question: str) -> str:
    return _cloze(re.sub(r"\[(PAR|DOC|TLE)\]", "", document.strip()), question)


def _nq(document: str, question: str) -> str:
    question = question.strip()
    document = document.strip().removesuffix(question)
    return f"{document.strip().strip('.')}. {question}"


def _interrogative(document: str, question: str) -> str:
    return f"{document.strip()}\nQuestion: {question.strip()}\nAnswer:"


AROUND_KEY = "around what comes first of key and value"
AROUND_ANSWER = "around the answer"
BEGINNING = "from their beginning"
INTERROGATIVE = "asks the question itself after the document where JRT has a sentence to complete"
PRESENT = f"{INTERROGATIVE}; only what the document answers literally"

RECALL_SETS = {
    "swde": RecallSet(
        "hazyresearch/based-swde-v2",
        ("swde", "swde_rebuilt"),
        AROUND_KEY,
        Form(_keyed_page, _swde),
    ),
    "fda": RecallSet(
        "hazyresearch/based-fda", ("fda", "fda_rebuilt"), AROUND_KEY, Form(_keyed, _fda)
    ),
    "squad": RecallSet(
        "hazyresearch/based-squad",
        ("squad", "squad_v1_dev_sample1000"),
        AROUND_ANSWER,
        Form(_completed, _squad),
        mark="text",
        other=Form(_asked_around, _interrogative, INTERROGATIVE),
    ),
    "triviaqa": RecallSet(
        "hazyresearch/based_triviaqa",
        ("triviaqa",),
        BEGINNING,
        Form(_asked, _triviaqa),
        mark="orig_question",
        other=Form(_asked, _interrogative, INTERROGATIVE),
    ),
    "nq": RecallSet(
        "hazyresearch/based_nq_2048",
        ("nq", "nq_oracle_passages"),
        AROUND_ANSWER,
        Form(_asked_around, _nq),
        mark="orig_question",
        other=Form(_asked_around, _interrogative, INTERROGATIVE),
    ),
    "drop": RecallSet(
        "hazyresearch/based_drop",
        ("drop", "drop_dev_sample1000"),
        BEGINNING,
        Form(_asked, _cloze),
        mark="orig_question",
        other=Form(_asked_if_present, _interrogative, PRESENT),
    ),
}
