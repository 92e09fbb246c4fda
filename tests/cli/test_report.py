"""`gdn2 report` and `gdn2 synthetic`: what they write, what they say, and their exit codes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn2.bench import synthetic
from gdn2.bench.report_inputs import read_inputs
from gdn2.bench.synthetic import Problem
from gdn2.cli import app
from gdn2.data.synthetic import RecallConfig
from gdn2.models.presets import preset
from gdn2.training.loop import train
from gdn2.training.metrics import Metrics
from gdn2.training.run_file import write_config
from tests.evals.report_cases import NASTY, bench, grid, put, results
from tests.evals.test_report import Reader
from tests.training.runs import config

pytest.importorskip("matplotlib")


def gdn2(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with an evaluation of its model in it."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings = config(folder)
    write_config(settings, folder)
    with Metrics(folder, 0) as metrics:
        for step in range(1, 13):
            line = {"step": step, "tokens": 192 * step, "loss": 3.5 - step / 10}
            metrics.write(line | {"gradient_norm": 1.0, "tokens_per_second": 100.0})
        metrics.write({"step": 12, "tokens": 2304, "loss": 2.25, "validation_loss": 2.125})
    put(folder / "eval" / "results.json", results(str(folder / "model"), settings.model))
    return folder


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Evaluations, speeds and a grid, each in a file."""
    rows = [("gdn2-1.3b-hybrid", "8x2048", 50_123.0), ("gdn2-1.3b-hybrid", "1x16384", None)]
    return [
        put(tmp_path / "a.json", results("gdn2-15m", preset("gdn2-15m"), shift=2.0)),
        put(
            tmp_path / "b.json",
            results(NASTY, preset("gdn2-15m"), needles=False) | {"config": None},
        ),
        put(tmp_path / "speed.json", bench(*rows, ("gdn2-1m", "2x256", 7.0), machine="H200 <1>")),
        put(tmp_path / "grid.json", grid()),
    ]


def test_a_report_of_everything(run: Path, files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out" / "report"
    result = gdn2("report", run, *files, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        f"wrote {out / 'report.html'}",
        f"wrote {out / 'report.md'}",
    ]
    text = (out / "report.html").read_text()
    page = Reader(text)
    images = [attributes["src"] or "" for tag, attributes in page.elements if tag == "img"]
    assert len(images) == 5  # curves, two of needles, throughput, synthetic
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in images)
    assert not {"script", "link", "iframe", "a"} & {tag for tag, _ in page.elements}
    assert not re.search(r"https?:|url\(|@import|file:", text)
    for wanted in (f"{NASTY}, step 40", "Ours, H200 <1>", "50.12", "2.250", "2.125", "98.7"):
        assert wanted in page.texts
    assert f"Gated DeltaNet-2: {run / 'model'}, step 40" in page.texts
    assert "Timed at shapes that the figure has not: 2x256." in page.texts
    for number in range(2, 6):
        assert any(title.startswith(f"Table {number}: ") for title in page.texts)


def test_markdown_says_the_same_beside_its_pictures(
    run: Path, files: list[Path], tmp_path: Path
) -> None:
    assert gdn2("report", run, *files, "--out", tmp_path / "out").exit_code == 0
    text = (tmp_path / "out" / "report.md").read_text()
    names = re.findall(r"\]\((.*?)\)", text)
    assert names == [
        "curves.png",
        "needles-1.png",
        "needles-2.png",
        "throughput.png",
        "synthetic-1.png",
    ]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert "| Gated DeltaNet-2: gdn2-15m, step 40 | 2.00 | 3.00 | 4.00 |" in text
    assert "| gdn2-1.3b-hybrid, gdn2 bf16 | 50.12 | – | – | – |" in text
    assert "ours solid, twins of fla's layers dotted" in text
    assert "| Gated DeltaNet-2 | **15.90** | **11.41** | 48.09 |" in text
    assert "| 4 pairs | 98.7 | – |" in text
    assert "- piqa: how piqa is asked; 5 samples; only the first 5" in text


def test_results_tell_the_kind_of_their_model(run: Path) -> None:
    (evaluation,) = read_inputs([run / "eval"]).evaluations
    assert evaluation.config == read_inputs([run]).runs[0].config.model
    assert len(read_inputs([run, run / "eval", run / "eval" / "results.json"]).evaluations) == 1


def test_a_report_without_ours_says_so(files: list[Path], tmp_path: Path) -> None:
    assert gdn2("report", files[-1], "--out", tmp_path / "out").exit_code == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("Nothing that was given has a number for this table.") == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "got Expecting property name"),
        ("[]", "got a list, expected a table"),
        ('{"a": 1}', "got another file, expected results of gdn2 eval, gdn2 bench training or"),
        ('{"format": "gdn2 results 1"}', "got KeyError 'model', expected results in format"),
        ('{"format": "gdn2 synthetic 1", "name": "a"}', "steps: got None, expected an integer"),
        ('{"result": {"rows": []}}', "got no machine with its gpus, expected one"),
        (
            json.dumps(bench(("gdn2-1m", "2x256", 1.0)) | {"x": 1}).replace("1.0", '"fast"'),
            "tokens_per_second: got 'fast', expected a number",
        ),
    ],
)
def test_files_that_are_wrong_are_one_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    out = tmp_path / "out"
    result = gdn2("report", file, "--out", out)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {file}: {message}")
    assert not out.exists()


def test_two_speeds_of_one_model_are_refused(tmp_path: Path) -> None:
    """Those with recomputed and with kept factors are two."""
    files = [tmp_path / f"{name}.json" for name in "abc"]
    for file, recompute in zip(files, (True, False, False), strict=True):
        record = bench(("gdn2-1.3b-hybrid", "4x4096", 1.0))
        record["result"]["plan"] = {"recompute": recompute}
        file.write_text(json.dumps(record))
    out = tmp_path / "out"
    assert gdn2("report", *files[:2], "--out", out).exit_code == 0
    assert (out / "report.md").read_text().count("factors kept") == 1
    result = gdn2("report", *files, "--out", out)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: speeds: got two of gdn2-1.3b-hybrid, ")
    same = tmp_path / "out" / ".." / "a.json"
    assert len(read_inputs([files[0], same]).speeds) == 1


def test_folders_that_are_wrong_are_one_line(run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = gdn2("report", empty)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: run: got '{empty}', expected a folder with a metrics")
    result = gdn2("report", tmp_path / "nothing.json")
    assert "got no such file" in result.stderr
    result = gdn2("report", run, "--out", run)
    expected = f"error: out: got {run}, the folder of a run, expected one of the report's own\n"
    assert (result.exit_code, result.stderr) == (2, expected)
    result = gdn2("report", run, "--out", run / "metrics.jsonl")
    assert result.stderr.startswith("error: out: got [Errno 17] File exists: ")
    (run / "metrics.jsonl").write_text('{"loss": 1}\n')
    result = gdn2("report", run)
    assert "line 1: got {'loss': 1}, expected a table with step and tokens" in result.stderr
    (run / "metrics.jsonl").write_text("")
    assert "got no steps" in gdn2("report", run).stderr


def test_the_synthetic_grid_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(
        synthetic.GRIDS["mqar"],
        problems=(Problem("2 pairs", RecallConfig(pairs=2, vocab_size=12), 8),),
        rows=4,
    )
    monkeypatch.setitem(synthetic.GRIDS, "mqar", tiny)
    options = ["--family", "gdn2", "--state", "512", "--state", "1024", "--steps", "3"]
    words = ["synthetic", "mqar", *options, "--device", "cpu", "--dir", str(tmp_path)]
    result = gdn2(*words)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "mqar" / "synthetic.json").read_text())
    shown = [f"{cell['accuracy']:.1%}" for cell in record["cells"]]
    assert ["2", "pairs", "50.0%", *shown] in [line.split() for line in result.output.splitlines()]
    assert (tmp_path / "mqar" / "synthetic.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(synthetic, "train", lambda config: pytest.fail("was trained before"))
    assert gdn2(*words).exit_code == 0
    report = gdn2("report", tmp_path, "--out", tmp_path / "report")
    assert report.exit_code == 0, report.output
    (tmp_path / "file").touch()
    result = gdn2(*words[:-1], tmp_path / "file")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: got [Errno 20] Not a directory: ")
    result = gdn2(*words, "--state", "7")
    assert result.exit_code == 2
    assert result.stderr == "error: state: got 7, expected a multiple of 512 up to 16384\n"


def test_a_real_run_can_be_reported(tmp_path: Path) -> None:
    train(config(tmp_path / "run"))
    assert gdn2("report", tmp_path / "run", "--out", tmp_path / "out").exit_code == 0
