"""metrics.jsonl, the numbers of speed, health and samples, and what the console says."""

import errno
import json
import math
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import gdn2
from gdn2.data.batch import Batch
from gdn2.data.byte_tokenizer import ByteTokenizer
from gdn2.data.config import CorpusConfig, MixtureConfig
from gdn2.data.synthetic import ParityConfig
from gdn2.layers.config import DeltaConfig
from gdn2.layers.plain import leaves
from gdn2.models.language_model import LanguageModel
from gdn2.models.run_folder import read_metrics
from gdn2.models.summary import summarise
from gdn2.training import loop, speed
from gdn2.training import metrics as metrics_module
from gdn2.training.config import SamplesSection
from gdn2.training.health import health
from gdn2.training.loop import train
from gdn2.training.metrics import Metrics, check_tensorboard
from gdn2.training.progress import Progress, clock
from gdn2.training.speed import Speed
from gdn2.training.writing import sample, tokenizer_of
from tests.models.cases import EVERYTHING, config
from tests.training import runs


def write(folder: Path, after: int, steps: range) -> None:
    with Metrics(folder, after) as metrics:
        for step in steps:
            metrics.write({"step": step, "tokens": 10 * step, "loss": 0.1 * step})
        metrics.sync()


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 8))
    before = (tmp_path / "metrics.jsonl").read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    write(tmp_path, 4, range(5, 8))
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_broken_lines_are_named_unless_a_kill_broke_them(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    first, third = ({"step": step, "tokens": 10 * step} for step in (1, 3))
    file.write_text(f'{json.dumps(first)}\n{{"step"\n')
    assert read_metrics(tmp_path) == [first]
    file.write_text(f'{json.dumps(first)}\n{{"step"\n{json.dumps(third)}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: got '{\"step\"', expected JSON$"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    "line", ["{}", "[1]", '{"loss": 1}', '{"step": 2}', '{"step": "2", "tokens": 20}', "null"]
)
def test_lines_of_another_kind_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1, "tokens": 10}}\n{line}\n')
    expected = "a table with step and tokens, both integers"
    message = f"{file}, line 2: got {json.loads(line)!r}, expected {expected}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Metrics(tmp_path, 5)
    assert file.read_text().endswith(f"{line}\n")  # nothing is lost


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1, "tokens": 10}\n'
    for spoilt in (b"\xff", b'{"step": 2, "tokens": 20, "x": "\xff"}'):
        file.write_bytes(whole + spoilt + b"\n" + whole)
        with pytest.raises(
            ValueError, match=r"metrics.jsonl, line 2: got .*xff.*, expected JSON$"
        ) as caught:
            read_metrics(tmp_path)
        assert "\n" not in str(caught.value)


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    with Metrics(tmp_path, 0) as metrics:
        metrics.write({"step": 1, "loss": math.nan, "health": {"0": {"state_norm": math.inf}}})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "loss": None, "health": {"0": {"state_norm": None}}}


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events = import_module("tensorboard.backend.event_processing.event_accumulator")

    with Metrics(tmp_path, 0, tensorboard=True) as metrics:
        metrics.write({"step": 1, "loss": 2.5, "health": {"0": {"state_norm": 3.0}}})
        metrics.write({"step": 2, "loss": 1.5})
    board = events.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(x.step, x.value) for x in board.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [x.value for x in board.Scalars("health/0/state_norm")] == [3.0]


def test_tensorboard_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tensorboard(False)
    monkeypatch.setattr("gdn2.training.metrics.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^log.tensorboard: .*gdn2\[track\]"):
        check_tensorboard(True)


def test_mfu_is_counted_flops_over_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a million tokens a second, two GPUs of this name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    now = iter([10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    model = gdn2.preset("gdn2-1m-hybrid")
    found = Speed(model, 4096, torch.device("cuda"), 2, torch.bfloat16).lap(2_000_000)
    assert (found["seconds"], found["tokens_per_second"], found["memory_gib"]) == (2, 1e6, 3)
    assert found["mfu"] == pytest.approx(1e6 * 3 * summarise(model).flops / (2 * 989e12))


class FullBoard:
    """As tensorboard's writer when its disk is full: it never recovers, and says so to the end."""

    asked = 0

    def add_scalar(self, *_: object) -> None:
        self.asked += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_under_the_board_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = FullBoard()
    monkeypatch.setattr(metrics_module, "_board", lambda folder, after: board)
    monkeypatch.setattr(loop, "check_tensorboard", lambda wanted: None)
    assert train(runs.config(tmp_path / "run", log={"tensorboard": True})).is_finished
    train(runs.config(tmp_path / "alone"))
    runs.assert_same_run(tmp_path / "run", tmp_path / "alone")
    assert board.asked == 1
    said = capsys.readouterr().err
    assert said.count("no more for tensorboard: No space left on device; training goes on") == 1


def test_no_peak_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gdn2.preset("gdn2-1m")
    assert "mfu" not in Speed(model, 64, torch.device("cpu"), 1, torch.bfloat16).lap(1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    assert speed.peak_flops(torch.device("cuda")) is None


def test_health_is_what_the_rule_was_given() -> None:
    """By hand for a block whose gates are pushed to their ends, and for the norm of a state."""
    chosen = config(DeltaConfig(num_heads=2, key_head_dim=4, value_head_dim=6, erase_range=2))
    model = LanguageModel(chosen)
    model.get_parameter("blocks.0.mixer.erase_proj.weight").data.zero_()
    model.get_parameter("blocks.0.mixer.write_proj.weight").data *= 1e6
    ids = torch.arange(60).view(2, 30) % 23
    found = health(model, Batch(ids, ids))["0"]
    assert found["erase"] == {"low": 1.0, "mean": 1.0, "high": 1.0, "saturated": 0.0}
    assert found["write"]["saturated"] > 0.99
    assert 0 < found["decay"]["low"] < found["decay"]["mean"] < found["decay"]["high"] < 1
    with torch.no_grad():
        memory = model(ids, model.new_state(2)).state.layers[0].memory
    assert found["state_norm"] == pytest.approx(float(memory.norm(dim=(-2, -1)).mean()), rel=1e-5)


def test_health_of_every_mixer() -> None:
    model = LanguageModel(EVERYTHING)
    ids = torch.arange(66).view(2, 33) % 23
    found = health(model, Batch(ids, ids))
    kinds = enumerate(EVERYTHING.layer_types)
    assert list(found) == [str(i) for i, kind in kinds if kind == "linear_attention"]
    assert all(math.isfinite(layer["state_norm"]) for layer in found.values())


def test_health_beside_the_token_loop() -> None:
    """Another backend makes the same states, up to rounding."""
    model = LanguageModel(EVERYTHING)
    ids = torch.arange(66).view(2, 33) % 23
    with gdn2.using("reference"):
        found = health(model, Batch(ids, ids))
    expected = dict(leaves(health(model, Batch(ids, ids))))
    assert dict(leaves(found)) == pytest.approx(expected, rel=1e-5)


def test_health_and_samples_while_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = runs.config(tmp_path, log={"health_every_steps": 2}, samples={"every_steps": 1})
    train(chosen, until=4)
    assert ["health" in line for line in runs.lines(tmp_path)] == [False, True, False, True]
    assert "The" not in capsys.readouterr().err  # recall has no text


def test_samples_are_the_models_own_words() -> None:
    model = LanguageModel(gdn2.preset("gdn2-1m-hybrid"))
    model = LanguageModel(gdn2.ModelConfig.from_dict({**model.config.to_dict(), "vocab_size": 256}))
    section = SamplesSection(prompt="def f", tokens=5, temperature=0.0)
    ids = list(b"def f")
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert sample(model, ByteTokenizer(), section) == bytes(ids).decode(errors="replace")


def test_the_tokenizer_is_that_of_the_data() -> None:
    assert isinstance(tokenizer_of(CorpusConfig()), ByteTokenizer)
    assert tokenizer_of(ParityConfig()) is None
    both = MixtureConfig(parts=(ParityConfig(), CorpusConfig()), weights=(1.0, 1.0))
    assert isinstance(tokenizer_of(both), ByteTokenizer)


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"loss": 2.0, "lr": 1e-3, "tokens_per_second": 12_345.6, "mfu": 0.41, "seconds": 3.0}
    with Progress(100, 0) as progress:
        progress.update({"step": 1, **line})
        progress.update({"step": 2, **line})
        progress.update({"step": 3, **line, "validation_loss": 1.5, "memory_gib": 2.25})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step 1/100  loss 2.000  lr 1.0e-03  12,346 tok/s  MFU 41%  4:57 left"
    assert second.startswith("step 3/100  loss 2.000  val 1.500  lr")
    assert second.endswith("MFU 41%  2.2 GiB  4:51 left")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (7325, "2:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


class Disk:
    """A file that takes so many bytes, and no more before it has room again."""

    def __init__(self, room: int) -> None:
        self.room, self.content, self.name = room, b"", "metrics.jsonl"

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = data[: self.room]
        self.content, self.room = self.content + taken, self.room - len(taken)
        return len(taken)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("room", [1, 30, 60, 61])
def test_lines_wait_for_a_disk_that_is_full(tmp_path: Path, room: int) -> None:
    disk = Disk(room)
    with Metrics(tmp_path, 0) as metrics:
        assert metrics._file is not None
        metrics._file.close()
        metrics._file = disk  # type: ignore[assignment]
        for step in range(1, 9):
            disk.room = 1000 if step == 7 else disk.room
            try:
                metrics.write({"step": step, "tokens": step})
            except OSError as reason:
                assert str(reason) == "[Errno 28] No space left on device: 'metrics.jsonl'"
                assert step < 7
    found = [json.loads(line) for line in disk.content.decode().splitlines()]
    assert found == [{"step": step, "tokens": step} for step in range(1, 9)]
