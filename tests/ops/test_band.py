"""What cuDNN is told of windows, beside a package of its kind, and what happens where it cannot be asked."""

import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops.attention import attention
from gdn2.ops.cuda import band
from gdn2.ops.window_attention import window_attention
from tests.closeness import assert_close
from tests.ops.test_attention import literal, operands

VERSION = 91900
Operands = tuple[Tensor, Tensor, Tensor]


class Node:
    """A tensor of a graph."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def set_output(self, value: bool) -> "Node":
        return self

    def set_data_type(self, value: object) -> "Node":
        return self

    def set_dim(self, value: list[int]) -> "Node":
        self.given["dim"] = value
        return self

    def set_stride(self, value: list[int]) -> "Node":
        self.given["stride"] = value
        return self


class Graph:
    """Checks what it is given as cuDNN would, and computes by a mask."""

    fails = False

    def __init__(self, **_: Any) -> None:
        self.steps: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.steps.append(name)

    def tensor(self, **given: Any) -> Node:
        return Node(**given)

    def sdpa(self, **given: Any) -> tuple[Node, Node]:
        self.given, self.results = given, [Node(), Node()]
        return self.results[0], self.results[1]

    def sdpa_backward(self, **given: Any) -> list[Node]:
        self.given, self.results = given, [Node() for _ in range(3)]
        return self.results

    def check_support(self) -> None:
        if self.fails:
            raise RuntimeError("No valid engine\nfor this")

    def get_workspace_size(self) -> int:
        return 8

    def execute(self, named: dict[Node, Tensor], room: Tensor, handle: object) -> None:
        assert room.numel() == 8 and handle == "handle"
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
            made = literal(q, k, v, window, scale), scores_of(q, k, window, scale).logsumexp(-1)
        for node, result in zip(self.results, made, strict=True):
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
        set_stream=lambda handle, stream: None,
        pygraph=Graph,
        heur_mode=SimpleNamespace(A="A", FALLBACK="F"),
        data_type=SimpleNamespace(DOUBLE="double", FLOAT="float"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left"),
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: VERSION)
    monkeypatch.setattr(band, "DTYPES", {torch.float64: "DOUBLE"})
    monkeypatch.setattr(band, "is_there", lambda q: band.frontend() is not None)
    monkeypatch.setattr(band, "_handles", band._Handles())
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    forget()
    yield fake
    forget()


def forget() -> None:
    for known in (band.frontend, band.forward_plan, band.backward_plan):
        known.cache_clear()


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


def test_without_the_package_it_is_two_triangles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    band.frontend.cache_clear()
    assert band.frontend() is None
    assert band.attend(*given(), 4, 0.3) is None
    compare(given(), 4)
    band.frontend.cache_clear()


def test_of_another_cudnn_than_torch_has(package: SimpleNamespace) -> None:
    package.backend_version = lambda: VERSION + 1
    assert band.frontend() is None


def test_a_window_is_told(package: SimpleNamespace) -> None:
    """Each call is prepared once, and takes operands as they lie."""
    x = given()
    wide = torch.randn(2, 12, 5, 48, dtype=torch.float64)
    q, k, v = (wide[:, :, 1:4, n : n + 16] for n in (0, 16, 32))
    for _ in range(2):
        for operand in (x, (q, k, v)):
            compare(operand, 4)
    assert band.forward_plan.cache_info().misses == 2
    assert band.forward_plan.cache_info().hits == 2
    assert band.backward_plan.cache_info().misses == 2


@pytest.mark.parametrize("which", ["attend", "differentiate"])
def test_either_way_goes_on_where_the_other_stops(
    which: str, package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalisers mean the same to both."""
    monkeypatch.setattr(band, which, lambda *_: None)
    compare(given(20), 5)


def test_what_cudnn_refuses_is_said_once(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "fails", True)
    with pytest.warns(UserWarning, match=r"without cuDNN's windows: No valid engine$") as said:
        compare(given(), 4)
        compare(given(), 4)
    assert len(said) == 2  # forward and backward


def test_what_lies_otherwise_is_copied() -> None:
    x = torch.randn(2, 6, 3, 16)
    assert band.lying(x) is x
    assert band.lying(x[:, 2:]).data_ptr() == x[:, 2:].data_ptr()
    for other in (x.mT.contiguous().mT, x[:1].expand(2, 6, 3, 16), x[..., 1:], x[:, :1, :1, :1]):
        copy = band.lying(other)
        assert torch.equal(copy, other) and (copy.is_contiguous() or other.shape[-1] == 1)


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
