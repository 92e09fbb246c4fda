"""How batches step: eagerly, or by captured graphs, which serve what they were captured of and change no tokens."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn2.layers.joint import lay_side_by_side
from gdn2.models import decode
from gdn2.models.decode import Steps
from gdn2.models.generate import Stop, generate
from gdn2.models.language_model import LanguageModel
from gdn2.models.sampling import Sampling
from tests.models.cases import make
from tests.models.test_generate import RAGGED, WARM, prompts


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make()


def test_on_a_cpu_steps_are_eager_and_say_why(model: LanguageModel) -> None:
    assert Steps(model).eager_because == "CUDA graphs need a CUDA GPU, not cpu"


def test_a_failed_capture_is_said_and_decoded_eagerly(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(decode.GraphSteps):
        def __init__(self, *given: object) -> None:
            raise RuntimeError("out of luck\nand much more")

    stop = Stop(max_tokens=4)
    expected = generate(model, [[1, 2]], stop=stop)
    monkeypatch.setattr(decode, "why_eager", lambda model: None)
    monkeypatch.setattr(decode, "GraphSteps", Failing)
    with pytest.warns(UserWarning, match="^gdn2 decodes eagerly, no CUDA graph: out of luck$"):
        assert generate(model, [[1, 2]], stop=stop) == expected


class Gpus:
    """Two GPUs as torch has them, of which the second holds the model; `fails` when a capture begins or ends."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.device = fails, 0
        self.current: dict[int, Any] = {n: Stream(n, "main") for n in range(2)}
        self.events: list[str] = []

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        yield
        self.device = before

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before = self.current[stream.device]
        self.current[stream.device] = stream
        try:
            yield
        finally:
            self.current[stream.device] = before

    def advance(self, *_: object) -> None:
        self.events.append(f"step on {self.current[1].name}")

    def graph(self, graph: object, *, stream: "Stream", capture_error_mode: str) -> "Capture":
        assert (stream.device, capture_error_mode) == (1, "thread_local")
        stream.name = "captured"
        return Capture(self, stream)


class Stream:
    def __init__(self, device: int, name: str = "aside") -> None:
        self.device, self.name = device, name
        self.waited: list[str] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other.name)


class Capture:
    """As torch's: where the capture cannot begin or end, its stream stays the current one."""

    def __init__(self, gpus: Gpus, stream: Stream) -> None:
        self.gpus, self.stream, self.before = gpus, stream, gpus.current[stream.device]

    def __enter__(self) -> None:
        self.gpus.current[self.stream.device] = self.stream
        self.fail("begin")

    def __exit__(self, *_: object) -> None:
        self.fail("end")
        self.gpus.current[self.stream.device] = self.before

    def fail(self, when: str) -> None:
        if self.gpus.fails == when:
            raise RuntimeError(f"no {when}")


@pytest.mark.parametrize("fails", ["", "begin", "end"])
def test_a_capture_is_on_the_gpu_of_its_model(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the current stream as it was, waiting for what it started, whether or not it succeeds."""
    gpus, second = Gpus(fails), torch.device("cuda", 1)
    fakes: dict[str, Any] = {
        "CUDAGraph": SimpleNamespace,
        "device": gpus.on,
        "stream": gpus.stream,
        "graph": gpus.graph,
        "current_stream": lambda: gpus.current[gpus.device],
        "Stream": lambda device=None: Stream(gpus.device if device is None else device.index),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(decode, "advance", gpus.advance)
    decode.capture_stream.cache_clear()
    main = gpus.current[1]
    start: Any = SimpleNamespace(
        map=lambda change: "buffers", tokens=SimpleNamespace(device=second)
    )
    model: Any = None
    with ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(RuntimeError, match=f"no {fails}"))
        decode.GraphSteps(model, Sampling(), start)
    decode.capture_stream.cache_clear()
    assert gpus.current[1] is main and gpus.current[0].name == "main"
    assert main.waited == ["aside"]
    steps = ["step on aside", "step on captured"]
    assert gpus.events == (steps[:1] if fails == "begin" else steps)


class Replayed(decode.GraphSteps):
    """As a graph, with the step itself in place of its capture."""

    def __init__(self, model: LanguageModel, sampling: Sampling, start: decode.Decoding) -> None:
        self.now, self.given = start.map(torch.clone), (model, sampling)

    def step(self) -> None:
        decode.advance(*self.given, self.now)


def test_graphs_are_captured_once_per_batch_size(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers stay where they are, idle rows wait until half have ended, and nobody's tokens change."""
    rows = prompts(*RAGGED)
    free = generate(model, rows, stop=Stop(max_tokens=12), seed=2, sampling=WARM)
    stop = Stop(max_tokens=12, ids=sorted({free[0].tokens[3], free[2].tokens[5]}))
    expected = generate(model, rows, stop=stop, seed=2, sampling=WARM)
    monkeypatch.setattr(decode, "why_eager", lambda model: None)
    monkeypatch.setattr(decode, "GraphSteps", Replayed)
    steps = Steps(model)
    for _ in range(2):
        assert generate(model, rows, stop=stop, seed=2, sampling=WARM, steps=steps) == expected
    sizes = [len(graph.now.tokens) for graph in steps._graphs.values()]
    assert all(smaller <= larger / 2 for larger, smaller in pairwise(sizes))
    monkeypatch.setattr(Steps, "most_graphs", 1)
    assert generate(model, rows, stop=stop, seed=2, sampling=WARM, steps=steps) == expected
    generate(model, rows[:3], stop=stop, steps=steps)
    assert len(steps._graphs) == 1


def test_a_graph_serves_what_it_was_captured_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not under another autocast, not for a state of another dtype, and not when weights have moved."""
    monkeypatch.setattr(decode, "why_eager", lambda model: None)
    monkeypatch.setattr(decode, "GraphSteps", Replayed)
    model = make().float()
    steps, eager = Steps(model), Steps(model)
    eager.eager_because = "the test asks for it"

    def generated(*ways: torch.autocast) -> int:
        """The graphs there are after two generations, which say what eager ones say."""
        with ExitStack() as stack:
            for way in ways:
                stack.enter_context(way)
            expected = generate(model, [[1, 2]], stop=Stop(max_tokens=4), steps=eager)
            for _ in range(2):
                found = generate(model, [[1, 2]], stop=Stop(max_tokens=4), steps=steps)
                assert found == expected
        return len(steps._graphs)

    assert generated() == 1
    assert generated(torch.autocast("cpu", torch.bfloat16)) == 2
    assert generated(torch.autocast("cpu", torch.float16)) == 3
    assert generated(torch.autocast("cpu", enabled=False)) == 3
    with torch.inference_mode():
        assert generated() == 3
    lay_side_by_side(model)
    assert generated() == 4
    model.double()
    assert generated() == 5


def test_a_graph_casts_by_itself() -> None:
    with torch.autocast("cpu", torch.float16):
        with decode.casts_anew("cpu"):
            assert torch.get_autocast_dtype("cpu") == torch.float16
            assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
    with decode.casts_anew("cpu"):
        assert not torch.is_autocast_enabled("cpu")
