"""Operands that share heads, repeated for CUDA kernels: the operator is the same, and so are its gradients."""

import pytest
import torch

from gdn2.ops.chunk_op import pack
from gdn2.ops.cuda import heads
from gdn2.ops.cuda.heads import repeated
from gdn2.ops.operands import Operands
from gdn2.ops.pipeline import Batch
from gdn2.ops.triton.pipeline import kind_of, table_of
from tests.ops.cases import Case, run
from tests.ops.triton.test_operator import EXACT, compare, kernels, single

SHARED = {
    "keys": single(T=40, B=2, heads=(1, 2, 2, 2), widths=("one", "one", "one")),
    "gates": single(T=40, heads=(2, 2, 1, 1), widths=("one", "one", "none")),
    "decays of channels": single(T=40, heads=(1, 2, 2, 1), widths=("one", "full", "full")),
    "all but values": single(T=40, heads=(1, 2, 1, 1), widths=("full", "one", "full")),
    "keys of three": single(T=40, heads=(1, 3, 1, 3), lengths=(33, 0, 7)),
}


def operands(case: Case) -> Operands:
    """Of shapes alone."""
    (qk, v, g, b), width = case.heads, case.d_k

    def made(count: int, kind: str = "full") -> torch.Tensor | None:
        channels = {"full": width, "one": 1, "none": 0}[kind]
        return torch.randn(1, 5, count, channels) if channels else None

    g_kind, b_kind, w_kind = case.widths
    q, k, values = made(qk), made(qk), made(v)
    return pack(q, k, values, made(g, g_kind), made(b, b_kind), made(v, w_kind), 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("keep", ["states", "factors"])
def test_gradients_are_summed_over_what_shared(
    name: str, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "in_blocks", lambda x, chunk: True)
    case, x = SHARED[name], operands(SHARED[name])
    assert repeated(x, case.chunk_size, apart=True) is not x
    compare(kernels(case, keep), run(case, "reference"), EXACT)


@pytest.mark.parametrize("name", SHARED)
def test_what_kernels_are_asked_for_is_what_they_get(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Operands] = []

    def note(x: Operands, chunk: int) -> bool:
        asked.append(x)
        return True

    monkeypatch.setattr(heads, "in_blocks", note)
    x = operands(SHARED[name])
    found = repeated(x, 64, apart=True)
    (shapes,) = ([None if t is None else t.shape for t in y[:6]] for y in asked)
    assert [None if t is None else t.shape for t in found[:6]] == shapes
    count = x.v.shape[1]
    for before, after in zip(x[:6], found[:6], strict=True):
        if before is not None and after is not None:
            assert after.is_contiguous() and after.shape[1] == count
            group = count // before.shape[1]
            assert torch.equal(after[:, ::group], before.expand(-1, -1, after.shape[2]))


def test_what_need_not_be_repeated_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in SHARED.values():
        x = operands(case)
        assert repeated(x, 64, apart=True) is x  # not on a GPU
    monkeypatch.setattr(heads, "in_blocks", lambda x, chunk: True)
    for case in (
        single(),
        single(widths=("one", "one", "one")),
        single(heads=(1, 2, 1, 1)),  # value heads that share scores
        single(heads=(1, 2, 2, 1), widths=("one", "none", "one")),
    ):
        x = operands(case)
        assert repeated(x, 64) is x


def test_kernels_of_kept_factors_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value heads that share all else have other kernels for them, and so are calls of another kind."""
    monkeypatch.setattr(heads, "in_blocks", lambda x, chunk: True)
    x = operands(SHARED["all but values"])
    table = table_of(x, Batch(1, 5, None, 64, "ieee"))
    assert repeated(x, 64, apart=True).heads != repeated(x, 64).heads
    kinds = {kind_of(x, table, "ieee", keep) for keep in ("nothing", "states", "factors")}
    assert len(kinds) == 3
