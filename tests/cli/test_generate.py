"""`gdn2 generate` prints what the model says, and `gdn2 bench generation` how fast it is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

import gdn2
from gdn2.cli import app
from gdn2.cli.talk import Talk
from gdn2.data.byte_tokenizer import ByteTokenizer
from gdn2.data.tokenizers import load_tokenizer
from gdn2.models.generate import Stop, generate
from gdn2.models.sampling import GREEDY, Sampling
from gdn2.ops.backends import in_force
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import config, make

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SMALL = config(DELTA, MIXERS["window"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose 23 tokens are words."""
    place = tmp_path_factory.mktemp("models")
    vocabulary = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(11, 23))])}
    words = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="zero"))
    words.pre_tokenizer = Whitespace()
    words.save(str(place / "tokenizer.json"))
    gdn2.save(make(SMALL), place / "m", tokenizer=place / "tokenizer.json")
    return place / "m"


def run(*words: str, given: str | None = None) -> Any:
    return CliRunner().invoke(app, list(words), input=given)


def test_a_text_without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def refuse(*_: Any) -> None:
        seen.append(in_force())
        raise ValueError("enough")

    monkeypatch.setattr(Talk, "go_on", refuse)
    for backend in ("torch", "reference"):
        run("generate", str(folder), "one", "--device", "cpu", "--backend", backend)
    assert seen == ["torch", "reference"] and in_force() == "auto"
    refused = run("generate", str(folder), "one", "--device", "cpu", "--backend", "fast")
    assert refused.exit_code == 2
    assert refused.stderr == (
        "error: backend: got 'fast', expected one of auto, triton, torch, reference\n"
    )


def test_the_text_is_what_the_model_says(folder: Path, tmp_path: Path) -> None:
    options = ["--max-tokens", "7", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.9"]
    options += ["--min-p", "0.02", "--repetition-penalty", "1.3", "--seed", "11", "--dtype", "fp64"]
    written = tmp_path / "report.json"
    result = run(
        "generate", str(folder), "one two", "--device", "cpu", *options, "--json", str(written)
    )
    assert result.exit_code == 0, result.output
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
    decode = load_tokenizer(folder).decode
    (expected,) = generate(
        gdn2.load(folder),
        [[1, 2]],
        sampling=sampling,
        stop=Stop(max_tokens=7),
        seed=11,
        decode=decode,
    )
    assert result.stdout == expected.text + "\n"
    report = json.loads(written.read_text())
    assert (report["tokens"], report["text"]) == (expected.tokens, expected.text)
    assert (report["end"], report["prompt_tokens"]) == ("length", 2)
    assert report["prefill_speed"] == pytest.approx(2 / report["prefill_seconds"])
    assert report["decode_speed"] == pytest.approx(5 / report["decode_seconds"])
    said = (
        rf"\[length after 7 tokens at {report['decode_speed']:,.1f} tokens/s \(eager: CUDA graphs "
    )
    assert re.search(said, result.stderr)
    assert f"prompt of 2 at {report['prefill_speed']:,.1f} tokens/s]" in result.stderr


def test_the_prompt_may_come_from_standard_input(folder: Path) -> None:
    fixed = ["--max-tokens", "4", "--temperature", "0", "--dtype", "fp64", "--device", "cpu"]
    piped = run("generate", str(folder), "-", *fixed, given="three four\n")
    assert piped.exit_code == 0, piped.output
    assert piped.stdout == run("generate", str(folder), "three four", *fixed).stdout
    (expected,) = generate(gdn2.load(folder), [[3, 4]], sampling=GREEDY, stop=Stop(max_tokens=4))
    assert piped.stdout.split() == load_tokenizer(folder).decode(expected.tokens).split()


def test_a_string_or_a_token_ends_the_text(folder: Path, tmp_path: Path) -> None:
    fixed = ["--max-tokens", "6", "--seed", "3", "--dtype", "fp64", "--device", "cpu"]
    words = run("generate", str(folder), "five", *fixed).stdout.split()
    assert len(set(words)) > 2
    last = next(word for word in words[1:] if word != words[0])
    place = words.index(last)
    cut = run("generate", str(folder), "five", *fixed, "--stop", last)
    assert cut.stdout.split() == words[:place]
    assert f"[stop after {place + 1} tokens" in cut.stderr
    target = tmp_path / "m"
    ids = load_tokenizer(folder).encode(last)
    gdn2.save(gdn2.load(folder), target, tokenizer=folder / "tokenizer.json", stop_ids=ids)
    ended = run("generate", str(target), "five", *fixed)
    assert ended.stdout.split() == words[:place]


def test_a_preset_says_that_it_knows_nothing() -> None:
    result = run("generate", "gdn2-1m", "Hello", "--max-tokens", "3", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "gdn2-1m is a preset: its weights are random, and so is the text" in result.stderr
    assert "[length after 3 tokens" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gdn2-2m", "x"], "model: got 'gdn2-2m', expected a folder with a model, or a name that"),
        (["gdn2-1m", ""], "text: got '', expected at least one token"),
        (["gdn2-1m", "x", "--temperature", "-1"], "temperature: got -1.0, expected at least 0"),
        (["gdn2-1m", "x", "--max-tokens", "0"], "max_tokens: got 0, expected at least 1"),
        (["gdn2-1m", "x", "--dtype", "fp8"], "dtype: got 'fp8', expected one of fp64, fp32,"),
        (["gdn2-1m", "x", "--device", "tpu"], "device: got 'tpu', expected 'cpu' or 'cuda'"),
        (["gdn2-1m", "x", "--tokenizer", "no"], "tokenizer: got 'no', expected 'bytes' or a tok"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    result = run("generate", *words)
    assert result.exit_code == 2
    assert f"error: {message}" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_a_prompt_that_is_no_text_is_named(folder: Path, tokenizer: str) -> None:
    model = "gdn2-1m" if tokenizer == "bytes" else str(folder)
    result = run("generate", model, "one \udcff", "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr.endswith("error: text: got 'one \\udcff', expected UTF-8\n")


def test_a_tokenizer_too_large_for_the_model_is_named(folder: Path) -> None:
    result = run("generate", str(folder), "x", "--tokenizer", "bytes")
    assert result.exit_code == 2
    expected = "error: tokenizer: got 256 tokens, expected at most the model's 23\n"
    assert result.stderr.endswith(expected)


def test_the_folder_of_a_run_is_told_from_its_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in folder.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"run": {}, "schedule": {}}')
    result = run("generate", str(tmp_path), "five")
    found = f"got the folder of a run, expected a model's, such as {tmp_path / 'model'}"
    assert (result.exit_code, result.stderr) == (2, f"error: {tmp_path}: {found}\n")


@pytest.mark.parametrize("text", ["", "plain", "naïve 漢字 🙂\n"])
def test_bytes_are_tokens(text: str) -> None:
    own = load_tokenizer("bytes")
    assert isinstance(own, ByteTokenizer)
    assert own.encode(text) == list(text.encode("utf-8"))
    assert own.decode(own.encode(text)) == text
    assert own.decode([104, 105, 300]) == "hi\N{REPLACEMENT CHARACTER}"


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: got .*, expected a tokenizer\.json$"):
        load_tokenizer(tmp_path)


def bench(target: Path, *options: str) -> tuple[str, dict[str, Any]]:
    result = run("bench", "generation", *options, "--json", str(target))
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(target.read_text())


def test_the_benchmark_times_prefill_and_steps(folder: Path, tmp_path: Path) -> None:
    quick = ["--device", "cpu", "--seconds", "0.01", "--tokens", "3", "--threads", "1"]
    sizes = ["--batch", "1", "--batch", "3", "--context", "5", "--context", "9"]
    printed, result = bench(tmp_path / "b.json", str(folder), *quick, *sizes, "--dtype", "fp32")
    assert (result["plan"]["dtype"], result["plan"]["device"]) == ("fp32", "cpu")
    assert result["machine"]["threads"] >= 1
    rows = result["rows"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 5), (1, 9), (3, 5), (3, 9)]
    for row in rows:
        speed = row["batch"] * row["context"] / row["prefill"]["median"]
        assert row["prefill_speed"] == pytest.approx(speed)
        assert row["decode_speed"] == pytest.approx(row["batch"] / row["step"]["median"])
        assert row["state_bytes"] == rows[0]["state_bytes"] > 0
        assert f"{row['step']['median'] * 1e3:.3f}" in printed
    assert "steps are eager: CUDA graphs need a CUDA GPU, not cpu" in printed


@pytest.mark.parametrize("option", ["--batch", "--context", "--tokens"])
def test_the_benchmark_refuses_nothing_to_do(option: str) -> None:
    result = run("bench", "generation", "gdn2-1m", option, "0")
    assert result.exit_code == 2
    assert f"error: {option[2:]}: got 0, expected at least 1" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seconds", "inf", "seconds: got inf, expected a finite number of at least 0"),
        ("--seconds", "nan", "seconds: got nan, expected a finite number of at least 0"),
        ("--seconds", "-1", "seconds: got -1.0, expected a finite number of at least 0"),
        ("--threads", "100000", "threads: got 100000, expected at most "),
    ],
)
def test_the_benchmark_refuses_what_cannot_be(option: str, value: str, message: str) -> None:
    result = run("bench", "generation", "gdn2-1m", "--device", "cpu", option, value)
    assert result.exit_code == 2
    assert f"error: {message}" in result.stderr
