"""A small haystack and few keys of our own, models that answer without thinking, and files of rows."""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from gdn2.evals.keys import Keys
from gdn2.evals.request import Request

SHARED = Path(__file__).parents[3] / "shared"  # real data, where there are any

KEYS = Keys(
    ["old", "old-fashioned", "brisk", "ad hoc", "Early", "zonked", "brisk"],
    ["kettle", "fashioned-kettle", "dump truck", "jalapeño", "ATM"],
)

SUBJECTS = ["The harbour", "A careful reader", "My neighbour's dog", "The committee", "Rain in May"]
VERBS = ["remembers", "forgets", "rearranges", "admires", "repairs", "postpones", "explains"]
OBJECTS = ["every broken clock", "the third letter", "a map of canals", "what nobody asked for"]
ENDINGS = ["before noon.", "without a word!", "as if it mattered.", "— or does it?"]


def essay(sentences: int) -> str:
    """Text of some sentences, with odd spaces between them and at its end."""
    parts = (SUBJECTS, VERBS, OBJECTS, ENDINGS)
    lines = (" ".join(part[i % len(part)] for part in parts) for i in range(sentences))
    return "".join(line + "  \n\n\u00a0"[i % 4 : i % 4 + 2] for i, line in enumerate(lines)) + "\n"


def split(text: str) -> list[str]:
    """Sentences that end in a mark and a space."""
    return re.split(r"(?<=[.!?]) ", text)


def oracle(request: Request) -> str:
    """Reads the key out of the question and its value out of the text, as no language model does."""
    question = request.context.rpartition("What is the special magic")[2]
    key = question.partition(" for ")[2].partition(" mentioned in the provided text?")[0]
    found = re.search(f"for {re.escape(key)} is: ([0-9a-f-]+)\\.", request.context)
    assert found is not None
    return f" {found[1].upper()}. And so on."


def guesser(random: Random) -> str:
    return f" {random.randint(1_000_000, 9_999_999)}"


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
