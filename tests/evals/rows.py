"""Rows of our own for every task of lm-eval that the suites have, in the fields of its dataset."""

from pathlib import Path
from typing import Any

from gdn2.evals.local_data import SOURCES
from tests.evals.cases import essay, write_rows

LETTERS = {"text": ["cold", "a warm wind", "rust", "the old map"], "label": ["A", "B", "C", "D"]}
NUMBERED = {"text": ["salt", "a long rope", "a lamp"], "label": ["1", "2", "3"]}
PAGE = (
    " = The Harbour = \n \n It was built in 1901 , by hand . \n  = = Later = = \n"
    ' The @-@ sign ( " odd " ) stayed . \n'
)

ROWS: dict[str, list[dict[str, Any]]] = {
    "wikitext": [{"page": PAGE}, {"page": PAGE.replace("Harbour", "Mill ; again") + essay(12)}],
    "lambada_openai": [
        {"text": "He opened the door, looked at the sea and said that it was the sea"},
        {"text": '"Never," she said.\n\nThen she laughed and asked for the map'},
        {"text": "They walked until the road ended at a harbour"},
    ],
    "piqa": [
        {"goal": "How to dry a map?", "sol1": "Hang it up.", "sol2": "Burn it.", "label": 0},
        {"goal": "Open a jar", "sol1": "Turn it upside down", "sol2": "Turn the lid", "label": 1},
    ],
    "hellaswag": [
        {
            "activity_label": "Sailing [title] a boat",
            "ctx_a": "A man [step] unties a rope.",
            "ctx_b": "he  then",
            "endings": ["sails away.", "eats [sub] the rope", "sleeps  on it.", "reads a map"],
            "label": label,
        }
        for label in ("0", "3")
    ],
    "winogrande": [
        {
            "sentence": "The rope was longer than the plank, so _ was cut in two.",
            "option1": "the rope",
            "option2": "the plank",
            "answer": answer,
        }
        for answer in ("1", "2")
    ],
    "arc_easy": [
        {"question": "What makes iron brown?", "choices": LETTERS, "answerKey": "C"},
        {"question": "What does one burn for light?", "choices": NUMBERED, "answerKey": "3"},
    ],
    "arc_challenge": [
        {"question": "Which of these is in the sea?", "choices": NUMBERED, "answerKey": "1"},
        {"question": "Which shows the way?", "choices": LETTERS, "answerKey": "D"},
    ],
    "openbookqa": [
        {"question_stem": "Food keeps longer with", "choices": NUMBERED, "answerKey": "1"},
        {"question_stem": "A sail is filled by", "choices": LETTERS, "answerKey": "B"},
    ],
    "social_iqa": [
        {
            "context": "Ada gave Bo her map.",
            "question": "Why did Ada do this?",
            "answerA": "to help",
            "answerB": "to sleep",
            "answerC": "because she was lost herself",
            "label": label,
        }
        for label in ("1", "3")
    ],
    "boolq": [
        {"passage": essay(3), "question": "is it about a harbour", "label": 1},
        {"passage": essay(5), "question": "is it about whales", "label": 0},
    ],
}


def write_folder(folder: Path) -> Path:
    """A folder for `--data`, some of whose files are compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, (name, rows) in enumerate(ROWS.items()):
        write_rows(folder / f"{SOURCES[name].stems[0]}.jsonl{'.gz' * (i % 2)}", rows)
    return folder
