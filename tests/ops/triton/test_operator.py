"""The whole operator by the kernels, interpreted, against the token loop."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gdn2.ops.arguments import new_state
from gdn2.ops.chunk_op import chunk_forward, pack
from gdn2.ops.pipeline import Batch
from gdn2.ops.triton import launch, pipeline
from tests.closeness import assert_close, relative_error
from tests.ops.cases import OPERANDS, Case, Result, operands, run

EXACT = 1e-10
SINGLE = Case(T=33, d_k=16, d_v=16, B=1, heads=(1, 1, 1, 1), chunk_size=32)


def single(**changes: object) -> Case:
    """One short row of one head in chunks of 32, with changes: an interpreted chunk of a head takes 0.2 s."""
    return replace(SINGLE, **changes)  # type: ignore[arg-type]


# Every length, width, kind of gate, group of heads, decay and chunk size occurs; combinations are spread over them.
CASES = [
    single(),
    single(T=0, loss="final_state"),
    single(lengths=(0, 0), loss="final_state"),
    single(T=3, B=0),
    single(T=1, d_k=20, d_v=48, chunk_size=128),
    single(T=1, B=2, heads=(1, 2, 2, 1), widths=("one", "full", "none")),
    single(T=31, d_k=48, d_v=20, decay=-1.0, erase_range=2.0),
    single(T=33, d_k=16, d_v=1, decay=0.0, widths=("full", "one", "one")),
    single(T=33, d_k=1, d_v=16, decay=-1.0),
    single(T=17, d_k=1, d_v=1, widths=("one", "one", "one"), heads=(1, 2, 1, 2)),
    single(T=63, d_k=48, d_v=16, decay="spiky", chunk_size=64, erase_range=2.0),
    single(T=65, d_k=20, d_v=20, decay="mixed", chunk_size=64, heads=(1, 2, 1, 1)),
    single(T=65, heads=(2, 4, 1, 4), widths=("one", "one", "full"), chunk_size=64),
    single(T=63, decay=-4.0, d_k=20, chunk_size=64),
    single(T=65, decay="uneven", erase_range=2.0, chunk_size=128),
    single(T=100, d_k=48, d_v=48, decay="mixed", chunk_size=128, erase_range=2.0),
    single(T=100, decay=0.0, erase_range=2.0, chunk_size=64, loss="final_state"),
    single(T=100, decay=-20.0, chunk_size=64, widths=("full", "none", "full")),
    single(
        T=65, decay=-20.0, heads=(1, 2, 2, 1), loss="final_state", widths=("one", "full", "one")
    ),
    single(T=33, decay=-200.0, d_k=20),
    single(T=33, decay="ends", erase_range=2.0, chunk_size=64),
    single(T=40, decay="ends", widths=("full", "none", "full")),
    single(T=63, decay="spiky", widths=("one", "none", "none"), heads=(1, 2, 2, 1)),
    single(T=31, heads=(2, 6, 3, 1), decay="mixed", initial_state=False),
    single(T=20, heads=(4, 4, 2, 1), widths=("full", "full", "none"), loss="output"),
    single(T=31, heads=(1, 3, 3, 1), d_v=48, widths=("one", "none", "one"), initial_state=False),
    single(T=40, chunk_size=16, decay="spiky", d_v=20),
    single(T=33, B=2, contiguous=False, d_k=20, heads=(1, 2, 2, 1)),
    single(lengths=(1,), loss="final_state"),
    single(lengths=(0, 1, 0, 33, 5), decay="mixed", d_k=20, chunk_size=32),
    single(lengths=(32, 64, 1), heads=(1, 2, 1, 2), d_v=20, erase_range=2.0),
    single(lengths=(65, 0, 0, 31), chunk_size=64, loss="final_state", initial_state=False),
    single(lengths=(3, 0), chunk_size=128, widths=("full", "none", "one"), loss="output"),
    single(lengths=(1, 1, 1, 1, 30), chunk_size=16, decay=-1.0, widths=("one", "one", "none")),
]


def kernels(case: Case, keep: str = "states") -> Result:
    """Forward and backward by the kernels, with the loss of `tests.ops.cases.run`."""
    x = operands(case)
    q, k, v, g, b, w, state = (x.get(n) for n in OPERANDS)
    assert q is not None and k is not None and v is not None and g is not None
    packed = pack(q, k, v, g, b, w, q.shape[-1] ** -0.5)
    batch = Batch(q.shape[0], q.shape[1], case.cu_seqlens, case.chunk_size, "ieee")
    state = new_state(q, v, batch.sequences) if state is None else state
    o, final, saved = pipeline.forward(packed, batch, state, keep)
    do, d_final = loss_gradients(case, o.view_as(v), final)
    grads = pipeline.backward(packed, batch, state, saved, do.flatten(0, 1), d_final)
    named = zip(OPERANDS, grads, strict=True)
    return Result(o.view_as(v), final, {n: d.view(x[n].shape) for n, d in named if n in x})


def loss_gradients(case: Case, o: Tensor, final: Tensor) -> Iterator[Tensor]:
    """Gradients of output and final state by the fixed random loss."""
    rand = torch.Generator().manual_seed(case.seed + 1)
    for name, x in {"output": o, "final_state": final}.items():
        if case.loss in (name, "both"):
            yield torch.randn(x.shape, generator=rand, dtype=torch.float64).to(x.dtype)
        else:
            yield torch.zeros_like(x)


def compare(actual: Result, expected: Result, tolerance: float) -> None:
    others = expected.named()
    for name, x in actual.named().items():
        assert_close(name, x, others[name], tolerance)


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.contiguous().view({4: torch.int32, 8: torch.int64}[x.itemsize])


def assert_same_bits(actual: Result, expected: Result) -> None:
    others = expected.named()
    for name, x in actual.named().items():
        assert torch.equal(bits(x), bits(others[name])), name


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_agrees_with_the_loop(case: Case) -> None:
    """And reads nothing that was not written: all memory starts as NaN."""
    expected = run(case, "reference")
    compare(kernels(case), expected, EXACT)


@pytest.mark.parametrize(
    "decay", ["mild", "uneven", "spiky", "mixed", 0.0, -1.0, -4.0, -20.0, -200.0]
)
def test_fp32_holds_for_any_decay(decay: float | str) -> None:
    case = single(T=65, d_k=48, d_v=20, chunk_size=64, erase_range=2.0, decay=decay)
    case = replace(case, dtype=torch.float32)
    actual, expected = kernels(case).named(), run(case, "reference", torch.float64).named()
    errors = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    print(f"\n{decay:>7}", *(f"{name} {error:.1e}" for name, error in errors.items()), sep="  ")
    assert max(errors.values()) <= 1e-5


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "case",
    [
        single(T=33, decay="spiky", heads=(1, 2, 1, 2), chunk_size=64),
        single(lengths=(33, 0), widths=("one", "none", "full"), dtype=torch.float32),
    ],
    ids=str,
)
def test_kept_factors_give_the_same_bits(case: Case) -> None:
    assert_same_bits(kernels(case, "factors"), kernels(case))


@pytest.mark.parametrize("lengths", [(), (33, 0, 5)], ids=str)
@pytest.mark.parametrize("erase", ["full", "none"])
@pytest.mark.parametrize("keep", ["nothing", "states", "factors"])
def test_what_is_kept_is_as_announced(keep: str, erase: str, lengths: tuple[int, ...]) -> None:
    """Compilers learn the shapes from `kept`, without values."""
    case = single(T=20, widths=("full", erase, "full"), lengths=lengths, chunk_size=16)
    x = operands(replace(case, dtype=torch.float32))
    q, k, v, g, w = (x[n] for n in "qkvgw")
    packed = pack(q, k, v, g, x.get("b"), w, 1.0)
    batch = Batch(q.shape[0], q.shape[1], case.cu_seqlens, case.chunk_size, "ieee")
    _, _, saved = pipeline.forward(packed, batch, x["initial_state"], keep)
    announced = pipeline.kept(packed, batch, keep)
    assert [(t.shape, t.dtype) for t in saved] == [(t.shape, t.dtype) for t in announced]
    assert len(saved) == (0 if keep != "factors" else 8 if erase == "full" else 6)


def test_small_chunks_are_enlarged() -> None:
    case = single(T=40, decay="spiky", chunk_size=16)
    assert_same_bits(kernels(case), kernels(replace(case, chunk_size=32)))


def test_two_runs_give_the_same_bits() -> None:
    case = single(lengths=(33, 1), decay="spiky", dtype=torch.float32)
    assert_same_bits(kernels(case), kernels(case))


def test_the_custom_operator_runs_them() -> None:
    """Through autograd, and as `torch.library` demands."""
    case = single(T=5)
    x = {n: y.requires_grad_() for n, y in operands(case).items()}
    given = [x[n] for n in OPERANDS]
    options = (16**-0.5, case.chunk_size, "ieee", "states", "triton")
    o, final, saved = chunk_forward(*given, None, *options)
    assert saved == []
    grads = torch.autograd.grad([o, final], given, [*loss_gradients(case, o, final)])
    result = Result(o.detach(), final.detach(), dict(zip(OPERANDS, grads, strict=True)))
    assert_same_bits(result, kernels(case))
    torch.library.opcheck(torch.ops.gdn2.chunk_forward.default, (*given, None, *options))


FAR = Case(T=100, d_k=20, d_v=20, B=1, heads=(1, 1, 1, 1), chunk_size=64, dtype=torch.float32)


@pytest.mark.parametrize("decay", [-1e-3, "mild", "mixed"])
def test_later_tokens_move_no_bit(decay: float | str) -> None:
    """Also where they decay so deeply that their chunk takes the other path, or no longer."""
    case = replace(FAR, decay=decay, erase_range=2.0)
    x = operands(case)

    def forward(x: dict[str, Tensor]) -> Tensor:
        q, k, v, g, b, w, state = (x[n] for n in OPERANDS)
        batch = Batch(1, q.shape[1], None, case.chunk_size, "ieee")
        return pipeline.forward(pack(q, k, v, g, b, w, 1.0), batch, state, "nothing")[0]

    o = forward(x)
    for seed, t in enumerate((0, 15, 31, 32, 50, 63, 64, 98), start=1):
        for kind in ("spiky", -1e-3):
            other = operands(replace(case, decay=kind, seed=seed))
            changed = {n: torch.cat([x[n][:, : t + 1], other[n][:, t + 1 :]], 1) for n in "qkvgbw"}
            moved = forward({**changed, "initial_state": x["initial_state"]})
            assert torch.equal(bits(o[: t + 1]), bits(moved[: t + 1])), (t, kind)
            assert not torch.equal(o[t + 1 :], moved[t + 1 :]), (t, kind)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, of a decay that is all NaN
def test_neighbours_move_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one packed sequence holds, even NaN, reaches no other in outputs, states or gradients."""
    case = single(lengths=(17, 40, 3), chunk_size=64, dtype=torch.float32)
    clean, x = kernels(case), operands(case)
    for n in "qkvgbw":
        x[n][:, 17:57] = float("nan")
    monkeypatch.setattr(f"{__name__}.operands", lambda _: x)
    spoiled = kernels(case).named()
    for name, y in clean.named().items():
        if name in ("final_state", "dinitial_state"):
            assert torch.equal(bits(y[[0, 2]]), bits(spoiled[name][[0, 2]])), name
        else:
            assert torch.equal(bits(y[:, :17]), bits(spoiled[name][:, :17])), name
            assert torch.equal(bits(y[:, 57:]), bits(spoiled[name][:, 57:])), name


WIDE = single(T=40, d_k=48, d_v=48, decay="spiky", heads=(1, 2, 1, 1), chunk_size=64)
WIDE = replace(WIDE, widths=("one", "full", "one"))


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("kernel", launch.DEFAULT)
def test_tiles_do_not_matter(kernel: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(WIDE, "reference")
    row = launch.DEFAULT[kernel]._replace(value_block=tile)
    if not kernel.startswith("scan"):  # those hold the state of all key channels
        row = row._replace(key_block=tile)
    monkeypatch.setitem(launch.DEFAULT, kernel, row)
    compare(kernels(WIDE), expected, EXACT)
