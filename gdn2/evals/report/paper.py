"""The paper's Tables 2 to 5: their columns, what of an evaluation stands in each, and every number as printed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gdn2.evals.needles import KINDS
from gdn2.evals.suites import AVERAGES, COLUMNS, PAPER_LENGTHS

RECURRENT, HYBRID = "Recurrent models", "Attention or hybrid models"
COMMON_SENSE, RECALL = "Avg. of Table 2", "Avg. of Table 4"
# Rows of Table 5, which are variants of one model.
SCALAR_ERASE = "w-only, scalar b, channel w"
SCALAR_WRITE = "b-only, channel b, scalar w"
FULL = "Gated DeltaNet-2, b ∈ [0,1]"
WIDE_ERASE = "expanded b ∈ [0,2]"


@dataclass(frozen=True)
class Column:
    """Two lines of a table's head, and the measure below them."""

    top: str
    bottom: str
    measure: str  # of those that `gdn2.evals.report.evaluation` names
    digits: int
    is_lower_better: bool = False

    @property
    def title(self) -> str:
        return f"{self.top} {self.bottom}".strip()


@dataclass(frozen=True)
class PaperTable:
    number: int
    title: str
    columns: tuple[Column, ...]
    sections: Mapping[str, Mapping[str, tuple[float, ...]]]  # numbers by section and row
    protocol: str  # what stands behind the paper's numbers
    is_one_contest: bool = False  # the best of all sections is marked, and no second


def needle_measure(task: str, length: int) -> str:
    """The name of an accuracy at a length."""
    return f"{task} at {length}"


def _sections(text: str) -> dict[str, dict[str, tuple[float, ...]]]:
    found: dict[str, dict[str, tuple[float, ...]]] = {}
    for line in text.strip().splitlines():
        name, bar, numbers = (part.strip() for part in line.partition("|"))
        if not bar:
            rows = found.setdefault(name, {})
        else:
            rows[name] = tuple(map(float, numbers.split()))
    return found


def _table_2_columns() -> Iterator[Column]:
    yield from _perplexities()
    for measure in AVERAGES[COMMON_SENSE]:
        bottom = "acc_n ↑" if COLUMNS[measure][1] == "acc_norm" else "acc ↑"
        yield Column(measure.removesuffix(" acc"), bottom, measure, 2)
    yield Column("Avg.", "acc ↑", COMMON_SENSE, 2)


def _table_3_columns() -> Iterator[Column]:
    for task, lengths in PAPER_LENGTHS.items():
        for length in lengths:
            yield _needles(task, length, "{}K")


def _table_4_columns() -> Iterator[Column]:
    for measure in AVERAGES[RECALL]:
        yield Column(measure, "", measure, 2)
    yield Column("Avg.", "", RECALL, 2)


def _table_5_columns() -> Iterator[Column]:
    yield from _perplexities()
    yield Column("Common.", "avg ↑", COMMON_SENSE, 2)
    yield _needles("niah_single_2", 4096, "@{}K ↑")
    yield _needles("niah_single_3", 2048, "@{}K ↑")
    yield _needles("niah_multikey_1", 4096, "@{}K ↑")
    yield Column("Recall", "avg ↑", RECALL, 2)


def _perplexities() -> Iterator[Column]:
    for top in ("Wiki.", "LMB."):
        yield Column(top, "ppl ↓", f"{top} ppl", 2, is_lower_better=True)


def _needles(task: str, length: int, bottom: str) -> Column:
    kilo = bottom.format(length // 1024)
    return Column(KINDS[task].title, kilo, needle_measure(task, length), 1)


TABLES = (
    PaperTable(
        2,
        "Language modelling and zero-shot common-sense reasoning",
        tuple(_table_2_columns()),
        _sections("""
Recurrent models
  Mamba-2          | 16.79 12.38 45.24 72.58 55.51 55.33 70.68 35.26 31.00 40.63 60.19 51.82
  Gated DeltaNet   | 16.40 11.89 49.62 72.31 56.50 56.75 68.81 35.15 30.20 40.53 58.78 52.07
  KDA              | 16.81 11.68 48.13 72.09 55.75 55.72 70.83 35.92 30.40 40.99 60.67 52.28
  Mamba-3 (SISO)   | 16.30 12.99 45.06 72.31 55.58 56.20 70.45 34.56 31.00 41.76 55.90 51.42
  Mamba-3 (MIMO)   | 16.45 11.66 47.82 72.36 56.49 55.78 72.38 38.07 30.00 40.89 57.74 52.39
  Gated DeltaNet-2 | 15.90 11.41 48.09 72.80 56.84 57.85 72.43 38.23 31.60 40.58 59.54 53.11
Attention or hybrid models
  Transformer      | 19.22 13.72 48.32 70.21 56.12 55.85 69.23 33.84 25.00 39.74 59.42 50.86
  Mamba-2          | 17.46 11.29 48.05 71.47 57.52 56.17 70.50 34.73 29.80 40.35 59.31 51.99
  Gated DeltaNet   | 16.00 10.82 48.71 70.06 57.50 56.83 70.41 35.15 30.60 40.97 60.00 52.25
  KDA              | 16.01 10.66 49.21 71.06 56.89 57.77 71.59 35.07 30.00 40.53 62.03 52.68
  Mamba-3 (SISO)   | 15.54 10.65 49.19 71.01 58.75 57.30 70.54 36.35 32.00 41.20 57.86 52.69
  Mamba-3 (MIMO)   | 15.81 10.92 49.82 71.98 58.19 57.06 70.54 38.48 29.40 40.99 57.98 52.72
  Gated DeltaNet-2 | 15.62 10.43 50.90 72.20 58.46 58.56 71.89 36.69 33.00 41.50 62.57 53.97
"""),
        "The paper names the datasets; its group's earlier code ran lm-eval, zero-shot. Accuracies are "
        "percentages, HellaSwag's is normalised by length. Avg. is the mean of LAMBADA's and the eight other "
        "accuracies. The windows of WikiText's perplexity are not stated.",
    ),
    PaperTable(
        3,
        "Needles in a haystack, from RULER",
        tuple(_table_3_columns()),
        _sections("""
Recurrent models
  Mamba-2          | 100.0 100.0 97.0 55.8 99.6 99.6 62.6 21.0 59.2 38.6 14.4 29.0 21.2 21.4
  Gated DeltaNet   | 99.8 100.0 100.0 97.6 100.0 100.0 87.2 32.0 89.8 54.2 60.6 58.0 37.0 27.8
  KDA              | 100.0 100.0 99.2 70.6 100.0 100.0 89.0 30.6 77.4 63.2 26.2 54.0 44.2 28.0
  Mamba-3 (SISO)   | 100.0 99.0 63.4 27.8 99.8 99.0 59.4 25.2 60.2 35.6 12.2 44.8 27.4 20.2
  Mamba-3 (MIMO)   | 100.0 99.8 93.0 35.6 99.8 98.8 64.2 27.2 89.2 72.4 29.2 49.4 19.2 18.0
  Gated DeltaNet-2 | 100.0 100.0 100.0 97.8 100.0 100.0 93.0 39.2 92.0 89.8 31.8 72.6 51.4 37.8
Attention or hybrid models
  Transformer      | 100.0 100.0 51.2 0.0 100.0 100.0 44.2 0.0 95.8 94.8 37.0 75.6 66.6 38.2
  Mamba-2          | 100.0 100.0 51.8 25.4 100.0 99.6 52.4 25.8 97.8 86.8 48.0 82.0 58.6 39.0
  Gated DeltaNet   | 100.0 100.0 47.2 22.4 100.0 99.8 57.3 25.6 94.8 91.2 47.2 91.0 78.4 44.8
  KDA              | 100.0 100.0 51.8 26.2 100.0 100.0 56.0 23.0 97.2 93.4 51.6 91.4 84.0 40.4
  Mamba-3 (SISO)   | 100.0 100.0 49.6 26.0 100.0 100.0 58.2 27.8 95.0 90.4 44.0 78.8 65.6 33.6
  Mamba-3 (MIMO)   | 100.0 100.0 49.0 22.8 100.0 100.0 53.0 27.8 99.4 98.4 54.2 82.4 79.0 46.6
  Gated DeltaNet-2 | 100.0 100.0 55.2 27.4 100.0 100.0 57.9 29.2 99.6 99.0 55.6 93.0 84.6 48.0
"""),
        "RULER has 500 samples for each task and length. The paper does not say which of RULER's two ways of "
        "fitting the length it used.",
    ),
    PaperTable(
        4,
        "Recall from real documents of at most 2K tokens",
        tuple(_table_4_columns()),
        _sections("""
Recurrent models
  Mamba-2          | 17.24 32.38 14.53 58.35 18.91 19.60 26.84
  Gated DeltaNet   | 17.90 32.67 18.52 59.60 20.16 19.69 28.09
  Mamba-3 (SISO)   | 17.62 35.07 11.08 58.89 18.18 21.32 27.03
  KDA              | 22.49 35.10 14.90 58.12 19.58 21.80 28.67
  Mamba-3 (MIMO)   | 16.68 36.65 17.44 59.06 19.16 21.08 28.35
  Gated DeltaNet-2 | 23.65 36.75 19.98 61.37 19.64 17.87 29.88
Attention or hybrid models
  Transformer      | 32.21 38.67 54.78 58.09 22.49 22.18 38.07
  Mamba-2          | 34.67 40.74 52.31 60.13 25.91 24.68 39.74
  Gated DeltaNet   | 33.18 42.28 50.86 60.60 25.78 21.95 39.11
  Mamba-3 (SISO)   | 35.30 46.42 54.95 59.54 25.91 23.96 41.01
  KDA              | 39.83 40.10 53.59 59.89 25.27 22.18 40.14
  Mamba-3 (MIMO)   | 32.33 44.70 55.31 59.00 26.26 23.08 40.11
  Gated DeltaNet-2 | 41.96 44.70 54.68 62.38 26.31 23.67 42.28
"""),
        "The paper's tasks are those of Just Read Twice, whose questions are sentences to be completed. SQD is "
        "SQuAD, TQA is TriviaQA.",
    ),
    PaperTable(
        5,
        "Gate structure and erase range, recurrent models only",
        tuple(_table_5_columns()),
        _sections(f"""
Channel structure
  {SCALAR_ERASE} | 16.55 11.62 52.45 90.6 71.4 30.6 28.92
  {SCALAR_WRITE} | 16.12 11.50 52.79 92.1 84.6 35.2 29.51
Erase range
  {FULL} | 15.90 11.41 53.11 93.0 89.8 37.8 29.88
  {WIDE_ERASE} | 15.95 11.44 53.04 93.1 89.4 37.6 29.81
"""),
        "Columns are those of Tables 2 to 4: Common. and Recall are the averages of Tables 2 and 4.",
        is_one_contest=True,
    ),
)
