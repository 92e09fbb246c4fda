"""What the documents name exists: equations, functions, tests and commands."""

import ast
import importlib
import re
from itertools import chain
from pathlib import Path

import pytest
from typer.main import get_command

from gdn2.cli import app

ROOT = Path(__file__).parents[1]
EQUATIONS = ROOT / "docs" / "equations.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
SOURCES = sorted((ROOT / "gdn2").rglob("*.py"))
LAST_EQUATION = 91
EXTRAS = {"huggingface.md": ("transformers", "peft")}  # what its examples need beside the package
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
    names, nodes = (re.findall(r"`([^`]+)`", cell) for cell in (functions, tests))
    assert names
    assert nodes
    for name in names:
        module, function = name.split(":")
        assert callable(getattr(importlib.import_module(f"gdn2.{module}"), function)), name
    for node in nodes:
        file, test = node.split("::")
        assert test in functions_of(ROOT / "tests" / file), node


def code_of(path: Path) -> list[str]:
    """Lines of code in a document: fenced, indented or inline."""
    found = re.findall(
        r"```.*?```|`[^`\n]+`|^(?: {4}|\t)[^\n]*$", path.read_text(), re.DOTALL | re.MULTILINE
    )
    return [line.strip("`").strip() for line in "\n".join(found).splitlines()]


def check_verbs(words: list[str]) -> None:
    """Walk down the verbs of the command line, and look its options up."""
    command = get_command(app)
    while (group := getattr(command, "commands", None)) and words:
        verb = words.pop(0)
        assert verb in group, verb
        command = group[verb]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}  # --on and --no-on
    assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("line", ["bench operatr", "dance", "bench operator --thread 2"])
def test_wrong_commands_are_seen(line: str) -> None:
    with pytest.raises(AssertionError):
        check_verbs(line.split())


@documents
def test_named_commands_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code_of(path):
        program, *words = line.split("#")[0].split("|")[0].split() or [""]
        if program == "make":
            assert set(words) <= targets, line
        elif program == "gdn2" and words:
            check_verbs(words)
        elif program == "pytest" and "-k" in words:
            (file,) = (word for word in words if word.endswith(".py"))
            wanted = words[words.index("-k") + 1]
            assert any(wanted in name for name in functions_of(ROOT / file)), line


@documents
def test_named_files_exist(path: Path) -> None:
    for file in re.findall(
        r"(?<![\w/.])((?:gdn2|tests|docs|configs)/[\w./-]+\.\w+)", "\n".join(code_of(path))
    ):
        assert (ROOT / file).exists(), file
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text()):
        assert (path.parent / link).exists(), link


@documents
def test_examples_run(path: Path) -> None:
    for module in EXTRAS.get(path.name, ()):
        pytest.importorskip(module)
    for example in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(example, path.name, "exec"), {})


def test_readme_says_how_to_begin() -> None:
    text = (ROOT / "README.md").read_text()
    for command in ("make demo", "make test"):
        assert command in text
