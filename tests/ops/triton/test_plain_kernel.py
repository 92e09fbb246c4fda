"""The backward without an erase gate, interpreted, against the token loop and autograd through it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops import trust
from gdn2.ops.chunk_op import chunk_forward, pack
from gdn2.ops.operands import Operands
from gdn2.ops.pipeline import Batch
from gdn2.ops.triton import pipeline, plain, stages
from gdn2.ops.triton.table import dense_table
from tests.closeness import relative_error
from tests.ops.cases import OPERANDS, Case, Result, operands, run
from tests.ops.triton.test_operator import (
    EXACT,
    assert_same_bits,
    compare,
    kernels,
    loss_gradients,
)

CPU = torch.device("cpu")
GATED, UNGATED = ("one", "none", "one"), ("one", "none", "none")
SINGLE = Case(T=65, d_k=16, d_v=16, B=1, heads=(1, 1, 1, 1), widths=GATED, chunk_size=64)
SHARED = (1, 4, 2, 1)  # q and k by four value heads, decays by two


def single(**changes: object) -> Case:
    """A chunk and a token of one head, with changes."""
    return replace(SINGLE, **changes)  # type: ignore[arg-type]


CASES = [
    single(),
    single(widths=UNGATED),
    single(T=1, d_k=1, d_v=1),
    single(T=31, d_k=20, d_v=48, chunk_size=16),
    single(T=130, d_k=64, d_v=64, B=2, decay=-1.0),
    single(T=100, d_k=48, d_v=20, decay="spiky", chunk_size=32),
    single(T=100, decay="mixed", widths=UNGATED),
    single(T=70, decay=0.0, initial_state=False),
    single(T=40, decay=-1e-6, loss="final_state"),
    single(decay=-20.0, loss="output", heads=(2, 2, 2, 1)),
    single(decay=-200.0, heads=(2, 2, 1, 1)),
    single(T=33, heads=(1, 3, 3, 1), decay="uneven", chunk_size=32),  # Mamba-2
    single(T=40, heads=SHARED, d_k=20, d_v=1, decay="mixed"),
    single(lengths=(1, 0, 65, 5), decay="spiky", heads=SHARED, d_v=20),
    single(lengths=(0, 0, 33), widths=UNGATED, decay=-1.0, chunk_size=32),
    single(lengths=(0, 0), loss="final_state"),
    single(T=0, loss="final_state"),
    single(T=3, B=0),
    single(T=33, B=2, contiguous=False, heads=(1, 2, 2, 1)),
]


def packed(case: Case) -> Operands:
    """The operands as the kernels get them."""
    given: dict[str, Any] = {"b": None, "w": None, **operands(case)}
    given.pop("initial_state", None)
    return pack(**given, scale=0.3)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way to the gradients is closed."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("gradients by the stages")

    monkeypatch.setattr(stages, "gradient", refuse)


@pytest.mark.usefixtures("poison", "taken")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_agrees_with_the_loop(case: Case) -> None:
    """And reads nothing that was not written: all memory starts as NaN."""
    compare(kernels(case), run(case, "reference"), EXACT)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    "decay", ["mild", "uneven", "spiky", "mixed", 0.0, -1.0, -4.0, -20.0, -200.0]
)
def test_fp32_holds_for_any_decay(decay: float | str) -> None:
    case = single(T=130, d_k=48, d_v=20, decay=decay, dtype=torch.float32)
    actual, expected = kernels(case).named(), run(case, "reference", torch.float64).named()
    errors = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    print(f"\n{decay:>7}", *(f"{name} {error:.1e}" for name, error in errors.items()), sep="  ")
    assert max(errors.values()) <= 3e-6


def test_what_was_before_a_pair_does_not_blur_its_decay() -> None:
    """Small log-decays after large ones are as precise as without those."""
    case = single(T=64, decay=-1e-3, dtype=torch.float32)
    x = operands(case)
    x["g"][:, :41] = -1000.0
    given = pack(x["q"], x["k"], x["v"], x["g"], None, x["w"], 0.3)
    table = dense_table(1, 64, 64, CPU)
    do, d_final = torch.zeros_like(given.v), torch.zeros_like(x["initial_state"])
    do[40:] = 1.0
    grads, _ = plain.backward(given, table, x["initial_state"], do, d_final)
    late = Operands(*(None if t is None else t[40:] for t in given[:-1]), 0.3)  # type: ignore[call-arg, arg-type]
    short = dense_table(1, 24, 64, CPU)
    alone, _ = plain.backward(late, short, x["initial_state"], do[40:], d_final)
    for i in (0, 1, 2, 5):
        assert relative_error(grads[i][40:], alone[i]) < 1e-6, i  # sums of 41000 are known to 4e-3


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("lengths", [(), (33, 0, 5)], ids=str)
def test_nothing_is_kept(lengths: tuple[int, ...]) -> None:
    """There are no factors, so keeping them changes no bit; as compilers are told."""
    case = single(T=20, lengths=lengths, dtype=torch.float32, heads=SHARED)
    x, state = packed(case), operands(case)["initial_state"]
    batch = Batch(1, x.q.shape[0], case.cu_seqlens, case.chunk_size, "ieee")
    for keep in ("nothing", "states", "factors"):
        assert pipeline.forward(x, batch, state, keep)[2] == pipeline.kept(x, batch, keep) == []
    assert_same_bits(kernels(case, "factors"), kernels(case))


def test_the_custom_operator_runs_them() -> None:
    """Through autograd, and as `torch.library` demands, though factors were to be kept."""
    case = single(T=5)
    x: dict[str, Any] = {n: y.requires_grad_() for n, y in operands(case).items()}
    given = [x.get(n) for n in OPERANDS]
    options = (16**-0.5, case.chunk_size, "ieee", "factors", "triton")
    o, final, saved = chunk_forward(*given, None, *options)
    assert saved == []
    grads = torch.autograd.grad([o, final], list(x.values()), [*loss_gradients(case, o, final)])
    result = Result(o.detach(), final.detach(), dict(zip(x, grads, strict=True)))
    assert_same_bits(result, kernels(case))
    torch.library.opcheck(torch.ops.gdn2.chunk_forward.default, (*given, None, *options))


@pytest.mark.parametrize(
    "change",
    [
        *({"widths": ("full", "none", "one")}, {"widths": ("one", "one", "one")}),
        *({"widths": ("one", "none", "full")}, {"d_k": 65}, {"d_v": 65}),
    ],
    ids=str,
)
def test_other_operands_are_left_to_the_stages(change: dict[str, object]) -> None:
    assert plain.takes(packed(SINGLE), 64) and plain.takes(packed(single(heads=SHARED)), 32)
    assert not plain.takes(packed(single(**change)), 64)
    assert not plain.takes(packed(SINGLE), 128)


GPU = torch.device("cuda", 0)


class OnGpu(Tensor):
    """Says so."""

    device = GPU


def on_gpu(dtype: torch.dtype) -> Operands:
    x = packed(single(dtype=dtype))
    return x._replace(k=x.k.as_subclass(OnGpu))


def test_gpus_take_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trust._known, GPU, {})
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert [plain.takes(on_gpu(dtype), 64) for dtype in dtypes] == [True, False, False]


def test_a_kernel_found_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the factors are kept again."""
    x, batch = on_gpu(torch.bfloat16), Batch(1, 65, None, 64, "ieee")
    monkeypatch.setitem(trust._known, GPU, {})
    assert pipeline.kept(x, batch, "factors") == []
    monkeypatch.setitem(trust._known, GPU, {plain.NAME: "wrong"})
    assert not plain.takes(x, 64)
    assert len(pipeline.kept(x, batch, "factors")) == 6


def test_few_programs_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions of every head at once, over 132 multiprocessors."""
    monkeypatch.setattr(plain, "multiprocessors", lambda device: 132)
    x = packed(single(d_k=64, d_v=64, heads=(2, 2, 2, 1)))
    blocks = {n: plain.states_launch(x, n).value_block for n in (1, 8, 16, 17, 64)}
    assert blocks == {1: 16, 8: 16, 16: 32, 17: 64, 64: 64}
    case = single(T=70, d_v=48, decay="spiky")
    compare(kernels(case), run(case, "reference"), EXACT)
