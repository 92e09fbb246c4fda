"""What the documents name exists: equations, functions, tests and commands."""

import ast
import importlib
import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EQUATIONS = ROOT / "docs" / "equations.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCES = sorted((ROOT / "gdn2").rglob("*.py"))
LAST_EQUATION = 91
CITATION = re.compile(r"\bEqs?\.\s+(\d+(?:\s*[–-]\s*\d+)?(?:(?:,| and)\s+\d+(?:\s*[–-]\s*\d+)?)*)")


def numbers(text: str) -> list[int]:
    """Equations in a list such as "18–22, 25 and 41"."""
    ranges = re.findall(r"(\d+)(?:\s*[–-]\s*(\d+))?", text)
    spans = (range(int(start), int(end or start) + 1) for start, end in ranges)
    return list(chain.from_iterable(spans))


def cited(text: str) -> set[int]:
    return set(chain.from_iterable(map(numbers, CITATION.findall(text))))


def rows() -> list[list[str]]:
    """Cells of the table of equations, without its head."""
    lines = [line for line in EQUATIONS.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_citations_are_read() -> None:
    text = "(Eqs. 18–22, 25), Eq. 7; Eqs. 9, 10 and 41. Eq. 3 has 12 terms, see Eqs. 64-66"
    assert cited(text) == {18, 19, 20, 21, 22, 25, 7, 9, 10, 41, 3, 64, 65, 66}


def test_every_equation_is_listed_once() -> None:
    listed = list(chain.from_iterable(numbers(row[0]) for row in rows()))
    assert sorted(listed) == list(range(1, LAST_EQUATION + 1))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_cited_equations_are_listed(path: Path) -> None:
    listed = set(chain.from_iterable(numbers(row[0]) for row in rows()))
    assert cited(path.read_text()) <= listed


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_listed_functions_and_tests_exist(row: list[str]) -> None:
    _, _, functions, tests = row
    if "not built yet" in functions:
        assert not tests
        return
    names, nodes = (re.findall(r"`([^`]+)`", cell) for cell in (functions, tests))
    assert names
    assert nodes
    for name in names:
        module, function = name.split(":")
        assert callable(getattr(importlib.import_module(f"gdn2.{module}"), function)), name
    for node in nodes:
        file, test = node.split("::")
        assert test in functions_of(ROOT / "tests" / file), node


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_commands_and_files_exist(path: Path) -> None:
    text = path.read_text()
    code = "\n".join(
        re.findall(r"```.*?```|`[^`\n]+`|^(?: {4}|\t).*$", text, re.DOTALL | re.MULTILINE)
    )
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"\bmake((?: [a-z][\w-]*)+)", code):
        assert set(command.split()) <= targets, f"make{command}"
    for file in re.findall(r"\b((?:gdn2|tests|docs|configs)/[\w./-]+\.\w+)", code):
        assert (ROOT / file).exists(), file


def test_readme_says_how_to_begin() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md")
    text = readme.read_text()
    for command in ("make demo", "make test"):
        assert command in text
