"""What cuDNN is told of windows, beside a package of its kind, and what happens where it cannot be asked."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops.attention import attention
from gdn2.ops.cuda import band
from gdn2.ops.window_attention import window_attention
from tests.closeness import assert_close
from tests.ops.attention_cases import literal, operands

VERSION = 91900
Operands = tuple[Tensor, Tensor, Tensor]


BUILT = [
    "validate",
    "build_operation_graph",
    "create_execution_plans",
    "check_support",
    "build_plans",
]


class RefusedError(Exception):
    """As cuDNN's own."""


class Node:
    """A tensor of a graph."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> "Node":
            self.given[name.removeprefix("set_")] = value
            return self

        return put


class Graph:
    """Checks what it is given as cuDNN would, and computes by a mask."""

    failure: Exception | None = None

    def __init__(self, **given: Any) -> None:
        assert given["handle"] == "handle" and given["io_data_type"] == "double"
        self.steps: list[str] = []

    def __getattr__(self, name: str) -> Any:
        assert name in BUILT

        def step(*_: object) -> None:
            self.steps.append(name)
            if self.failure is not None and name == "check_support":
                raise self.failure

        return step

    def tensor(self, **given: Any) -> Node:
        return Node(**given)

    def sdpa(self, **given: Any) -> tuple[Node, Node]:
        self.given, self.results = given, [Node(), Node()]
        return self.results[0], self.results[1]

    def sdpa_backward(self, **given: Any) -> list[Node]:
        self.given, self.results = given, [Node() for _ in range(3)]
        return self.results

    def get_workspace_size(self) -> int:
        return 8

    def execute(self, named: dict[Node, Tensor], room: Tensor, handle: object) -> None:
        assert room.numel() == 8 and handle == "handle" and self.steps == BUILT
        for node, x in named.items():
            if "dim" in node.given:
                by_heads = x.transpose(1, 2) if x.ndim == 4 else x.unsqueeze(-1)
                assert [*by_heads.shape] == node.given["dim"]
                # of an axis of one nothing is told
                told = zip(by_heads.shape, by_heads.stride(), node.given["stride"], strict=True)
                assert all(size == 1 or stride == given for size, stride, given in told)
        window = self.given["diagonal_band_left_bound"]
        assert self.given["diagonal_band_right_bound"] == 0
        scale = self.given["attn_scale"]
        q, k, v = (named[self.given[name]] for name in "qkv")
        made: tuple[Tensor, ...]
        if "dO" in self.given:
            y, dy, log = (named[self.given[name]] for name in ("o", "dO", "stats"))
            made = gradients(q, k, v, y, dy, log, window, scale)
        else:
            assert self.given["generate_stats"] and self.results[1].given["data_type"] == "float"
            made = literal(q, k, v, window, scale), scores_of(q, k, window, scale).logsumexp(-1)
        for node, result in zip(self.results, made, strict=True):
            assert node.given["output"] is True
            named[node].copy_(result)


def scores_of(q: Tensor, k: Tensor, window: int, scale: float) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    at = torch.arange(q.shape[1])
    ago = at[:, None] - at
    return scores.masked_fill((ago < 0) | (ago >= window), -torch.inf)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, log: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From the output and the normalisers, as cuDNN makes them; an operator knows no autograd."""
    p = (scores_of(q, k, window, scale) - log.unsqueeze(-1)).exp()
    dp = torch.einsum("bihd,bjhd->bhij", dy, v) - (dy * y).sum(-1).mT.unsqueeze(-1)
    ds = p * dp * scale
    dq, dk = torch.einsum("bhij,bjhd->bihd", ds, k), torch.einsum("bhij,bihd->bjhd", ds, q)
    return dq, dk, torch.einsum("bhij,bihd->bjhd", p, dy)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Installed, and taking what a CPU has."""
    fake = SimpleNamespace(
        backend_version=lambda: VERSION,
        create_handle=lambda: "handle",
        destroy_handle=lambda handle: None,
        set_stream=lambda handle, stream: None,
        pygraph=Graph,
        heur_mode=SimpleNamespace(A="A", FALLBACK="F"),
        data_type=SimpleNamespace(DOUBLE="double", FLOAT="float"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left"),
        cudnnGraphNotSupportedError=RefusedError,
        __spec__="there",
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: VERSION)
    monkeypatch.setattr(band, "DTYPES", {torch.float64: "DOUBLE"})
    monkeypatch.setattr(band, "lack", lambda device: band.lack_of_package())
    monkeypatch.setattr(band, "_handles", band._Handles())
    monkeypatch.setattr(band, "_plans", {})
    monkeypatch.setattr(band, "_captured", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    band.lack_of_package.cache_clear()
    yield fake
    band.lack_of_package.cache_clear()


def compare(x: Operands, window: int) -> None:
    """Output and gradients beside a loop over tokens."""
    q, k, v = (t.detach().requires_grad_() for t in x)
    weights = operands(2, x[0].shape[1], heads=3, kv_heads=3, width=16, seed=1)[0]
    results = []
    for y in (window_attention(q, k, v, window, 0.3), literal(q, k, v, window, 0.3)):
        results.append((y, *torch.autograd.grad((y * weights).sum(), (q, k, v))))
    for name, actual, expected in zip(("y", "q", "k", "v"), *results, strict=True):
        assert_close(name, actual, expected, 1e-12)


def given(length: int = 12) -> Operands:
    return operands(2, length, heads=3, kv_heads=3, width=16)


def test_without_the_package_it_is_two_triangles(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr(band, "find_spec", lambda name: None)
    assert band.lack_of_package() == "nvidia-cudnn-frontend is not installed"
    assert band.attend(*given(), 4, 0.3) is None
    compare(given(), 4)


def test_a_package_of_no_use_is_said(package: SimpleNamespace) -> None:
    """One that speaks with another cuDNN than torch, and one that cannot be asked."""

    def asserts() -> int:
        assert not package, "Found 2 libcudnn.so.x"
        return VERSION

    said = f"it speaks with cuDNN {VERSION + 1}, and torch with {VERSION}"
    asked: dict[str, Callable[[], int]] = {
        said: lambda: VERSION + 1,
        "AssertionError: Found 2 libcudnn.so.x": asserts,
    }
    for reason, ask in asked.items():
        band.lack_of_package.cache_clear()
        package.backend_version = ask
        with pytest.warns(UserWarning, match=f"^gdn2 attends without .* of no use: {reason}"):
            compare(given(), 4)
        assert str(band.lack_of_package()).startswith(
            f"nvidia-cudnn-frontend is of no use: {reason}"
        )
    assert not band._plans


def test_an_old_package_is_not_asked(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which others may have brought along, and which knows no such arguments."""
    found = ["1.5.2"]
    monkeypatch.setattr(band, "installed", lambda name: found[0])
    with pytest.warns(UserWarning, match=r"it is version 1\.5\.2, expected at least 1\.14$"):
        compare(given(), 4)
    assert not band._plans
    for found[0] in ("1.14.0", "2.0"):
        band.lack_of_package.cache_clear()
        assert band.lack_of_package() is None


def test_a_device_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert band.lack(torch.device("cpu")) == "cuDNN needs a CUDA GPU, not cpu"
    monkeypatch.setattr(band, "lack_of_package", lambda: None)
    monkeypatch.setattr(band, "trusted", lambda kernel, device: kernel != "band")
    assert band.lack(gpu) == "gdn2 doctor found its windows wrong here"
    monkeypatch.setattr(band, "trusted", lambda kernel, device: True)
    assert band.lack(gpu) is None
    half = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    assert not band.is_there(half)


def test_a_window_is_told(package: SimpleNamespace) -> None:
    """Each call is prepared once, and takes operands as they lie."""
    x = given()
    wide = torch.randn(2, 12, 5, 48, dtype=torch.float64)
    q, k, v = (wide[:, :, 1:4, n : n + 16] for n in (0, 16, 32))
    for _ in range(2):
        for operand in (x, (q, k, v)):
            compare(operand, 4)
    assert len(band._plans) == 4


def test_gradients_are_the_same_each_time_if_asked_for(package: SimpleNamespace) -> None:
    compare(given(), 4)
    torch.use_deterministic_algorithms(True)
    try:
        compare(given(), 4)
    finally:
        torch.use_deterministic_algorithms(False)
    plans = [plan for plan in band._plans.values() if plan is not None]
    asked = [plan.graph.given.get("use_deterministic_algorithm") for plan in plans]
    assert asked == [None, False, True]  # an output is the same in any case


@pytest.mark.parametrize("which", ["attend", "differentiate"])
def test_either_way_goes_on_where_the_other_stops(
    which: str, package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalisers mean the same to both."""
    monkeypatch.setattr(band, which, lambda *_: None)
    compare(given(20), 5)
    assert len(band._plans) == 1


@pytest.mark.parametrize("failure", [RefusedError, RuntimeError])
def test_what_cudnn_refuses_is_said_once(
    failure: type[Exception], package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "failure", failure("No valid engine\nfor this"))
    with pytest.warns(UserWarning, match=r"without cuDNN's windows: No valid engine$") as said:
        compare(given(), 4)
        compare(given(), 4)
    assert len(said) == 2  # forward and backward


def test_mistakes_of_ours_are_not_hidden(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "failure", TypeError("sdpa() got an unexpected argument"))
    with pytest.raises(TypeError, match="unexpected argument"):
        band.attend(*given(), 4, 0.3)
    assert not band._plans


def test_nothing_is_prepared_while_a_graph_is_captured(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert band.attend(*given(), 4, 0.3) is None and not band._plans
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert band.attend(*given(), 4, 0.3) is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert band.attend(*given(), 4, 0.3) is not None


def test_a_handle_goes_with_its_thread(package: SimpleNamespace) -> None:
    names = iter(("first", "second"))
    gone: list[str] = []
    package.create_handle, package.destroy_handle = lambda: next(names), gone.append
    cpu, seen = torch.device("cpu"), [band.handle_on(torch.device("cpu")).value]
    thread = Thread(target=lambda: seen.extend(band.handle_on(cpu).value for _ in range(2)))
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert seen == ["first", "second", "second"] and band.handle_on(cpu).value == "first"
    assert gone == ["second"]


def test_a_plan_keeps_the_handle_it_was_built_with(package: SimpleNamespace) -> None:
    gone: list[str] = []
    package.destroy_handle = gone.append
    thread = Thread(target=lambda: band.attend(*given(), 4, 0.3))
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert band.attend(*given(), 4, 0.3) is not None
    assert gone == [] and len(band._plans) == 1
    band._plans.clear()
    gc.collect()
    assert gone == ["handle"]  # the thread's; that of this one is in use


def test_plans_are_kept_up_to_a_number(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(band, "MOST_PLANS", 2)
    for length in (8, 12, 16, 8):
        assert band.attend(*given(length), 4, 0.3) is not None
    assert [problem.shape[1] for _, problem in band._plans] == [16, 8]


def test_plans_that_were_captured_are_kept_for_ever(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    band.attend(*given(8), 4, 0.3)
    [plan] = band._plans.values()
    assert plan is not None
    there = weakref.ref(plan.graph)
    del plan
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert band.attend(*given(8), 4, 0.3) is not None
    band._plans.clear()
    gc.collect()
    assert there() is not None


def test_what_lies_otherwise_is_copied() -> None:
    x = torch.randn(2, 6, 3, 16)
    for part in (x, x[:, 2:], x[:, :, 1:], x[..., 4:12]):
        assert band.lying(part) is part
    others = (
        x.mT.contiguous().mT,
        x[:1].expand(2, 6, 3, 16),
        x[..., 1:13],
        torch.randn(2, 6, 3, 6),
    )
    for other in others:
        copy = band.lying(other)
        assert copy is not other and torch.equal(copy, other) and copy.is_contiguous()


def test_attention_asks_for_whole_windows_alone(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> None:
        asked.append(window)

    monkeypatch.setattr(band, "attend", attend)
    for length, window in ((12, 4), (12, 5), (12, 12), (12, 20)):
        x = given(length)
        assert_close("y", attention(*x, window=window)[0], literal(*x, window, 0.25), 1e-12)
    assert asked == [4]
