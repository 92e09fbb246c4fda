"""All figures by one command: what is there is kept, what is missing is taken, and each command is one there is."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from gdn2.bench import figures, operator, timing
from gdn2.bench.documented import FIGURES, Figure
from gdn2.bench.operator import read_plans
from gdn2.bench.report_inputs import read_inputs
from gdn2.cli import app
from gdn2.models.presets import preset_names
from tests.evals.report_cases import bench

QUICK = "operator --shape 1x32x1x8x8 --backend torch --passes forward --seconds 0.01"
SMALL = (
    Figure("first", "The first one", 0.1, (f"{QUICK} --threads 1",)),
    Figure("second", "Another", 5, (QUICK,)),
)


def take(file: Path, *options: str) -> Any:
    command = ["bench", "figures", *options, "--json", str(file), "--device", "cpu"]
    return CliRunner().invoke(app, command)


def kept(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())["figures"]
    return found


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FIGURES, "cpu", SMALL)
    return tmp_path / "figures.json"


def test_what_is_missing_is_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    done = take(file, "--minutes", "1")
    assert done.exit_code == 0, done.output
    assert signal.getsignal(signal.SIGTERM) is before
    assert done.stdout == f"{file}: 1 of 2 figures\n"
    assert "second: left, since it takes about 5 min\n" in done.stderr
    first = kept(file)["first"]
    assert [len(data["results"]) for data in first["data"]] == [1]
    assert "1x32x1x8x8, gdn2, fp32 on cpu" in first["output"][0]
    assert first["failure"] is None and first["code"] == figures.code()

    assert take(file, "--list").stdout == (
        "first: The first one, about 0.1 min, there\nsecond: Another, about 5 min, missing\n"
    )
    done = take(file)
    assert done.stdout == f"{file}: 2 of 2 figures\n"
    assert kept(file)["first"] == first  # not taken again
    assert "first" not in done.stderr
    text = file.with_suffix(".md").read_text()
    assert text.count(f"    $ gdn2 bench {QUICK} --device cpu\n") == 1
    assert "## Another" in text and "fwd" in text and f"code {figures.code()}" in text
    assert sorted(x.name for x in file.parent.iterdir()) == ["figures.json", "figures.md"]

    monkeypatch.setattr(figures, "code", lambda: "other")
    assert "missing" in take(file, "--list").stdout  # measured with other code
    take(file, "first")
    assert [one["code"] == "other" for one in kept(file).values()] == [True, False]


def test_what_fails_is_kept_too_and_taken_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Figure("first", "Broken", 0.1, (QUICK, "operator --shape nonsense", QUICK))
    monkeypatch.setitem(FIGURES, "cpu", (broken,))
    done = take(file)
    assert done.exit_code == 1
    expected = "expected BxTxHxDkxDv, such as 1x2048x4x64x64"
    reason = f"exit code 2: error: shape: got 'nonsense', {expected}"
    assert done.stdout == f"first: {reason}\n{file}: 0 of 1 figures\n"
    assert kept(file)["first"]["failure"] == reason
    assert len(kept(file)["first"]["data"]) == 1
    assert f"Failed: {reason}" in file.with_suffix(".md").read_text()
    monkeypatch.setitem(FIGURES, "cpu", SMALL[:1])
    assert take(file).exit_code == 0
    assert kept(file)["first"]["failure"] is None


def test_what_was_taken_elsewhere_is_missing(file: Path) -> None:
    """By other commands, such as those of another device, or on another machine."""
    take(file, "first")
    record = json.loads(file.read_text())

    def is_missing(**changes: Any) -> bool:
        changed = {**record["figures"]["first"], **changes}
        content = {**record, "figures": {"first": changed}}
        file.write_text(json.dumps(content))
        return "about 0.1 min, missing" in take(file, "first", "--list").stdout

    machine = record["figures"]["first"]["machine"]
    assert not is_missing()
    assert is_missing(commands=[f"{QUICK} --threads 1 --device cuda"])
    assert is_missing(machine={**machine, "gpus": [{"name": "H200"}]})


def test_figures_that_are_damaged_are_another_file(file: Path, tmp_path: Path) -> None:
    take(file, "first")
    whole = json.loads(file.read_text())["figures"]["first"]
    damage: dict[str, list[Any]] = {"data": [None, [1]], "commands": [None, []], "machine": [[]]}
    for name, several in damage.items():
        for wrong in several:
            record = {"format": figures.FORMAT, "figures": {"first": {**whole, name: wrong}}}
            file.write_text(json.dumps(record))
            report = CliRunner().invoke(app, ["report", str(file), "--out", str(tmp_path / "out")])
            expected = f"error: {file}: got another file, expected one of gdn2 bench figures\n"
            for done in (report, take(file, "first")):
                assert (done.exit_code, done.stderr) == (2, expected), (name, wrong)


def test_figures_of_another_device_stay(file: Path) -> None:
    """Some have the same names: an hour of a GPU is not given for a minute of a CPU."""
    take(file, "first")
    record = json.loads(file.read_text())
    record["figures"]["first"]["commands"] = [f"{QUICK} --device cuda"]
    content = json.dumps(record)
    file.write_text(content)
    for names in ((), ("first",)):
        done = take(file, *names)
        expected = "got first of cuda, expected figures of cpu; choose another file"
        assert (done.exit_code, done.stderr) == (2, f"error: {file}: {expected}\n")
        assert file.read_text() == content
    assert take(file, "second").exit_code == 0
    assert kept(file)["first"] == record["figures"]["first"]


def test_figures_of_a_gpu_are_listed_anywhere(file: Path) -> None:
    command = ["bench", "figures", "--list", "--device", "cuda", "--json", str(file)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert done.stdout.count("\n") == len(FIGURES["cuda"])


def test_mistakes_are_one_line(file: Path) -> None:
    page = file.with_suffix(".md")
    for options, message in {
        ("secnod",): "figure: got 'secnod', expected second",
        ("--minutes", "0"): "minutes: got 0, expected more than 0",
        ("--minutes", "nan"): "minutes: got nan, expected more than 0",
    }.items():
        done = take(file, *options)
        assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")
    done = take(page)
    assert done.stderr == f"error: json: got {page}, expected a name that ends in .json\n"
    for content in ('{"a": 1}', '{"format": "gdn2 figures", "figures": {"first": {}}}'):
        file.write_text(content)
        done = take(file)
        expected = f"error: {file}: got another file, expected one of gdn2 bench figures\n"
        assert (done.exit_code, done.stderr) == (2, expected)
        assert file.read_text() == content
    page.write_text("my notes")
    done = take(file)
    expected = f"error: {page}: got another page, expected one of gdn2 bench figures or none\n"
    assert (done.exit_code, done.stderr, page.read_text()) == (2, expected, "my notes")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes as Linux has them")
def test_what_is_timed_ends_with_the_command(tmp_path: Path) -> None:
    """And its half-written file is not taken for a later one's."""
    long = "operator --shape 1x4096x4x64x64 --backend reference --seconds 60"
    script = f"""
from gdn2.bench.documented import FIGURES, Figure
from gdn2.cli import main
FIGURES["cpu"] = (Figure("first", "Long", 0.1, ("{long}",)),)
main()
"""
    command = [sys.executable, "-c", script, "bench", "figures", "--device", "cpu"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("gdn2 bench"):
                break
        child = _child(process.pid)
        process.terminate()
        assert process.wait(30) == 143
    assert not Path(f"/proc/{child}").exists()
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == {}


def _child(parent: int) -> int:
    """The process that another has started, once it runs its own program."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if found and b"operator" in Path(f"/proc/{found[0]}/cmdline").read_bytes().split(b"\0"):
            time.sleep(1)
            return int(found[0])
        time.sleep(0.05)
    raise AssertionError("no process was started")


def test_a_report_reads_their_speeds(file: Path) -> None:
    take(file, "first")
    record = json.loads(file.read_text())
    rows = ("gdn2-1.3b-hybrid", "4x4096", 60000.0), ("kda-1.3b-hybrid", "4x4096", 50000.0)
    record["figures"]["first"]["data"].append(bench(*rows))
    file.write_text(json.dumps(record))
    speeds = read_inputs([file]).speeds
    assert [(speed.preset, speed.shape, speed.tokens_per_second) for speed in speeds] == list(rows)
    record["figures"]["of earlier code"] = record["figures"]["first"]
    file.write_text(json.dumps(record))
    assert read_inputs([file]).speeds == speeds


CHOSEN = ("suite", "form", "packed", "value_heads", "passes", "seconds")
COMMANDS = [command for device in FIGURES for one in FIGURES[device] for command in one.commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_one_there_is(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are read, and go together; presets are known."""
    monkeypatch.setattr(timing, "find_device", lambda name: torch.device(name or "cuda"))
    monkeypatch.setattr(operator, "choose", lambda name, device: name)
    verbs: Any = typer.main.get_command(app)
    verb, *words = command.split()
    context = verbs.commands["bench"].commands[verb].make_context(verb, words)
    options = context.params
    named = options.get("preset") or [options.get("model")]
    assert {name for name in named if name} <= set(preset_names())
    if verb == "operator":
        chosen = {name: options[name] for name in CHOSEN}
        assert read_plans(shapes=options["shape"], backends=options["backend"], **chosen)


def test_names_are_different() -> None:
    for several in FIGURES.values():
        assert len({figure.name for figure in several}) == len(several)
