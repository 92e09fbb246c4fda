"""Recall from real documents, in the protocol of Just Read Twice: cut around the answer, ask, look for the answer."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from gdn2.data.tokenizers import Tokenizer
from gdn2.evals.documents import Row, find_rows, hub_rows, read_rows
from gdn2.evals.recall_data import RECALL_SETS, Item
from gdn2.evals.request import JSON, Request, Scored, Scores, check_limit, percent
from gdn2.layers.plain import nearest

KEPT = 50  # tokens of the length that the document leaves to question and answer
GENERATED = 48


def recall_task(name: str, data: Path | None = None, length: int = 2048) -> "RecallTask":
    """A task over JRT's dataset on the hub, or over a file, or the file in a folder that has one for it."""
    if name not in RECALL_SETS:
        raise ValueError(f"task: got {name!r}, expected {nearest(name, RECALL_SETS)}")
    dataset = RECALL_SETS[name]
    if data is None:
        return RecallTask(name, hub_rows(dataset.hub, "validation"), dataset.hub, length)
    file = find_rows(data, dataset.stems)
    return RecallTask(name, read_rows(file), str(file), length)


class RecallTask:
    """Questions about documents of one dataset; `source` is what the rows are from."""

    version = "1"

    def __init__(self, name: str, rows: Sequence[Row], source: str, length: int = 2048) -> None:
        if length <= KEPT:
            raise ValueError(f"length: got {length}, expected more than the {KEPT} for an answer")
        if not rows:
            raise ValueError(f"{source}: got no rows, expected some")
        self.name = name
        self._rows, self._source, self._length = rows, source, length
        self._set = RECALL_SETS[name]
        self._form = self._set.form(rows[0])

    @property
    def protocol(self) -> str:
        notes = [
            f"JRT's {self.name}: documents cut to {self._length - KEPT} tokens {self._set.kept}",
            f"greedy, {GENERATED} new tokens up to a line break, right if an answer occurs in them",
        ]
        if self._source != self._set.hub:
            file = Path(self._source).name
            notes.append(f"items of {file}, which need not be those of {self._set.hub}")
        if self._form.note:
            notes.append(self._form.note)
        return "; ".join(notes)

    def requests(self, tokenizer: Tokenizer, limit: int | None = None) -> Iterator[Request]:
        """One for each of the first `limit` items, which some rows have none of; the number is that of the row."""
        check_limit(limit)
        found = ((number, self._item(number, row)) for number, row in enumerate(self._rows))
        items = ((number, item) for number, item in found if item is not None)
        for number, item in islice(items, limit):
            document = cut(item, tokenizer, self._length - KEPT)
            yield Request(
                task=self.name,
                number=number,
                kind="generate",
                context=self._form.prompt(document, item.question),
                until=("\n",),
                max_tokens=GENERATED,
                metadata={"answers": [list(answers) for answers in item.gold]},
            )

    def _item(self, number: int, row: Row) -> Item | None:
        return self._form.read(row, f"{self._source}, row {number + 1}")

    def score(self, request: Request, answer: str) -> Scores:
        gold = request.metadata["answers"]
        assert isinstance(gold, list)
        return {"contains": float(any(_has_all(answer, answers) for answers in gold))}

    def summarise(self, scored: Iterable[Scored]) -> dict[str, JSON]:
        """The share of right answers in percent."""
        found = [scores["contains"] for _, scores in scored]
        return {"contains": percent(found), "samples": len(found)}


def cut(item: Item, tokenizer: Tokenizer, most: int) -> str:
    """At most so many tokens of the document, those around its answer; half of them stand before it.

    As in JRT, even a document that would fit loses what is further away than that.
    """
    document = item.document.strip()
    tokens = tokenizer.encode(document)
    start = max(0, _place(item, document, tokenizer, most) - most // 2)
    return tokenizer.decode(tokens[start : start + most])


def _place(item: Item, document: str, tokenizer: Tokenizer, most: int) -> int:
    """The number of tokens before what the document is cut around."""
    if not item.anchors:
        return 0
    found = min((p for a in item.anchors if (p := _find(a, document)) >= 0), default=-1)
    if found < 0:
        found = next((p for other in item.others if (p := _find(other, document)) >= 0), -1)
    # Found nowhere is -1, all but the last letter: as in JRT the end is kept then.
    before = len(tokenizer.encode(document[:found]))
    return item.token if found < 0 and item.token is not None and before > most else before


def _find(text: str, document: str) -> int:
    match = re.search(re.escape(text), document, re.IGNORECASE)
    return match.start() if match else -1


def _has_all(answer: str, texts: JSON) -> bool:
    assert isinstance(texts, list)
    return all(_find(str(text), answer) >= 0 for text in texts)
