"""The timer against known durations, and the machine against what torch says of it."""

import math
import time

import pytest
import torch

from gdn2.bench import timing
from gdn2.bench.machine import OPTIONAL, describe_machine

CPU = torch.device("cpu")


def test_a_sleep_takes_its_time() -> None:
    took = timing.measure(lambda: time.sleep(0.02), CPU, warmup=1, seconds=0.2)
    assert took.repeats >= 5
    assert took.low <= took.median <= took.high
    assert 0.02 <= took.median < 0.04  # a machine may be busy
    assert took.spread == pytest.approx((took.high - took.low) / took.median)
    assert took.peak_bytes is None


def test_twice_the_sleep_takes_twice_the_time() -> None:
    calls = {"short": lambda: time.sleep(0.02), "long": lambda: time.sleep(0.04)}
    timings = timing.measure_together(calls, CPU, warmup=1, seconds=0.1)
    assert timings["long"].median / timings["short"].median == pytest.approx(2, rel=0.3)
    assert timings["long"].repeats == timings["short"].repeats


def test_calls_take_turns_each_after_an_untimed_one_of_its_own() -> None:
    order: list[str] = []
    fractions: list[float] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = timing.measure_together(
        calls, CPU, warmup=1, seconds=0, least=4, progress=fractions.append
    )
    assert order == list("aabbcc") * 5
    assert fractions == [0.25, 0.5, 0.75, 1.0]
    assert {took.repeats for took in timings.values()} == {4}


def test_quartiles() -> None:
    took = timing._summary([5.0, 1.0, 4.0, 2.0, 3.0], None)
    assert (took.low, took.median, took.high) == (2, 3, 4)
    assert took.spread == pytest.approx(2 / 3)


def test_nothing_to_time() -> None:
    assert timing.measure_together({}, CPU) == {}


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with timing.use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        assert describe_machine().threads == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="threads: got 0, expected at least 1"):
        timing.use_threads(0).__enter__()


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_no_time_that_nothing_can_take(seconds: float) -> None:
    timing.check_seconds(0.0)
    message = f"^seconds: got {seconds}, expected a finite number of at least 0$"
    with pytest.raises(ValueError, match=message):
        timing.check_seconds(seconds)


def test_much_time_is_as_many_repeats_as_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_REPEATS", 7)
    assert timing.measure(lambda: None, CPU, seconds=1e308).repeats == 7


def test_threads_beyond_reason_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    message = r"^threads: got 13, expected at most 12, 4 times the CPU's 3 cores$"
    with pytest.raises(ValueError, match=message):
        timing.use_threads(13).__enter__()
    with timing.use_threads(12):
        assert torch.get_num_threads() == 12
    assert torch.get_num_threads() == before


def test_device_names() -> None:
    assert timing.find_device("cpu") == CPU
    assert timing.find_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="device: got 'tpu', expected 'cpu' or 'cuda'"):
        timing.find_device("tpu")


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no CUDA GPU"):
        timing.find_device("cuda")
    assert describe_machine().gpus == ()


def test_the_machine_is_this_one() -> None:
    machine = describe_machine()
    assert machine.versions["torch"] == torch.__version__
    assert set(OPTIONAL) < set(machine.versions)
    assert machine.threads == torch.get_num_threads()
    assert machine.memory_gib is None or machine.memory_gib > 0.1
    assert machine.cpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="events need CUDA")
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    device = torch.device("cuda")
    cycles = 10_000_000  # some milliseconds at any clock
    calls = {
        "once": lambda: torch.cuda._sleep(cycles),
        "twice": lambda: torch.cuda._sleep(2 * cycles),
    }
    timings = timing.measure_together(calls, device, seconds=0.2)
    assert timings["once"].median > 1e-3
    assert timings["twice"].median / timings["once"].median == pytest.approx(2, rel=0.1)
    assert timings["once"].peak_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_peak_memory_is_what_a_call_adds() -> None:
    held = torch.ones(2**20, device="cuda")
    took = timing.measure(lambda: held + 1, torch.device("cuda"), seconds=0.01)
    assert took.peak_bytes is not None
    assert 4 * 2**20 <= took.peak_bytes < 5 * 2**20
