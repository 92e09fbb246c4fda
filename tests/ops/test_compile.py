"""The operator under torch.compile, on meta tensors, and what it counts as work."""

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch.utils.flop_counter import FlopCounterMode

from gdn2 import gated_delta_rule, gated_delta_step
from gdn2.ops.attention import attention
from gdn2.ops.chunk_op import chunk_forward
from gdn2.ops.family import kda
from gdn2.ops.flops import rule_backward_flops
from gdn2.ops.mamba3 import Mamba3State, mamba3
from tests.closeness import assert_close
from tests.ops.cases import Case, operands, rule

OPERANDS = ("q", "k", "v", "g", "b", "w", "initial_state")

# Packed lengths are such that their bound on the number of chunks is reached: opcheck compares all
# rows of what is kept, and unused ones are undefined.
CASES = {
    "all": (Case(T=20), "states"),
    "kept": (Case(T=20, heads=(1, 2, 2, 1)), "factors"),
    "nothing kept": (Case(T=20), "nothing"),
    "no gates": (Case(T=20, widths=("one", "none", "none"), initial_state=False), "states"),
    "no erase": (Case(T=20, widths=("full", "none", "one")), "factors"),
    "no write": (Case(T=20, widths=("one", "one", "none"), initial_state=False), "states"),
    "shared keys": (Case(T=20, heads=(1, 4, 1, 1)), "states"),
    "packed": (Case(lengths=(5, 21, 17), dtype=torch.float32), "states"),
}


def forward_arguments(case: Case, keep: str) -> tuple[Any, ...]:
    x = operands(case)
    given = [x[n].requires_grad_(keep != "nothing") if n in x else None for n in OPERANDS]
    return *given, case.cu_seqlens, 0.5, 16, "ieee", keep, "torch"


@pytest.mark.parametrize("name", CASES)
def test_forward_passes_opcheck(name: str) -> None:
    torch.library.opcheck(torch.ops.gdn2.chunk_forward.default, forward_arguments(*CASES[name]))


@pytest.mark.parametrize("name", [n for n in CASES if n != "nothing kept"])
def test_backward_passes_opcheck(name: str) -> None:
    arguments = [
        x.detach() if isinstance(x, Tensor) else x for x in forward_arguments(*CASES[name])
    ]
    o, final, saved = chunk_forward(*arguments)
    *tensors, scale, size, precision, _, backend = arguments
    outer = torch.ones_like(o), torch.ones_like(final)
    torch.library.opcheck(
        torch.ops.gdn2.chunk_backward.default,
        (*outer, *tensors, saved, scale, size, precision, backend),
    )


def differentiated(function: Any, x: dict[str, Tensor], **options: Any) -> list[Tensor]:
    o, state = function(x, **options)
    grads = torch.autograd.grad((o * o).sum() + state.sin().sum(), list(x.values()))
    return [o, state, *grads]


@pytest.mark.parametrize("name", [n for n in CASES if n != "nothing kept"])
def test_compiled_equals_eager(name: str) -> None:
    case, keep = CASES[name]
    torch._dynamo.reset()
    x = {n: y.requires_grad_() for n, y in operands(case).items()}
    options = {"cu_seqlens": case.cu_seqlens, "recompute": keep == "states", "chunk_size": 16}
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager")
    eager = differentiated(rule, x, **options)
    for actual, expected in zip(differentiated(compiled, x, **options), eager, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_compiles_it_among_others() -> None:
    """With neighbours to fuse, as in a layer."""
    torch._dynamo.reset()
    x = {n: y.requires_grad_() for n, y in operands(Case(T=20, dtype=torch.float32)).items()}

    def layer(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        o, state = rule({**x, "k": x["k"].tanh(), "g": -x["g"].abs()})
        return torch.nn.functional.silu(o), state

    # The cache on disk does not notice that a custom operator returns something else.
    with fresh_cache():
        actual = differentiated(torch.compile(layer, fullgraph=True), x)
    for one, other in zip(actual, differentiated(layer, x), strict=True):
        assert_close("compiled", one, other, 1e-6)


LENGTHS = (5, 17, 33, 64, 65, 100, 130, 200, 257, 300)


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_do_not_recompile(packed: bool) -> None:
    """Ten lengths, and with packing ten numbers of sequences: one static graph, one dynamic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rule, fullgraph=True, backend=counter)
    for i, T in enumerate(LENGTHS):
        parts = tuple([2] * (i + 1) + [T - 2 * (i + 1)]) if packed else ()
        case = Case(T=T, B=1, lengths=parts, d_k=8, d_v=8, dtype=torch.float32)
        x = {n: y.requires_grad_() for n, y in operands(case).items()}
        options = {"cu_seqlens": case.cu_seqlens}
        actual = differentiated(compiled, x, **options)
        for one, other in zip(actual, differentiated(rule, x, **options), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count <= 3


def run_kda(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """KDA on operands of the rule, with one gate in the place of two."""
    q, k, v, g = (x[n] for n in "qkvg")
    return rule({**kda(q, k, v, g, x["w"][..., 0]), "initial_state": x["initial_state"]})


def run_mamba3(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mamba-3 of rank two, whose sub-tokens are copies of a token."""
    q, k, v = (x[n].unsqueeze(2).expand(-1, -1, 2, -1, -1) for n in "qkv")
    start = Mamba3State(x["initial_state"], k[:, 0], v[:, 0])
    o, end = mamba3(q, k, v, x["g"][..., 0], x["b"][..., 0], x["w"][..., 0], state=start)
    return o, end.S


@pytest.mark.parametrize("model", [run_kda, run_mamba3])
def test_lengths_do_not_recompile_the_family(model: Any) -> None:
    """Ten lengths: one static graph, one dynamic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    for T in LENGTHS:
        x = operands(Case(T=T, B=1, d_k=8, d_v=8, dtype=torch.float32))
        for actual, expected in zip(compiled(x), model(x), strict=True):
            assert torch.equal(actual, expected)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("length", [1, 4, 5, 8])
def test_sizes_may_be_unknown(length: int) -> None:
    """Also those that gates and heads share."""
    torch._dynamo.reset()
    x = torch.rand(2, length, 2, 4)
    compile_ = partial(torch.compile, fullgraph=True, dynamic=True, backend="eager")
    runs: list[tuple[Any, Any]] = [
        (lambda *a: gated_delta_rule(*a)[0], (x, x, x, -x, x, x)),
        (lambda *a: gated_delta_rule(*a, backend="reference")[0], (x, x, x, -x, x)),
        (lambda *a: attention(*a)[0], (x, x, x)),
        (lambda *a: attention(*a)[0], (x, x[:, :, :1], x[:, :, :1])),
    ]
    for run, given in runs:
        assert torch.equal(compile_(run)(*given), run(*given))


def test_a_scale_may_change() -> None:
    """A compiler takes the first for a constant, and from the second on for a number it does not know."""
    x, state = torch.rand(2, 5, 2, 4), torch.rand(2, 2, 4, 4)
    runs: list[Any] = [
        lambda by: gated_delta_rule(x, x, x, -x, scale=by)[0],
        lambda by: gated_delta_step(x, x, x, -x, scale=by, state=state)[0],
        lambda by: attention(x, x, x, scale=by)[0],
    ]
    for run in runs:
        torch._dynamo.reset()
        compiled: Any = torch.compile(run, fullgraph=True, backend="eager")
        for scale in (0.5, 0.25, 0.125, 2.0):
            assert_close(f"scale {scale}", compiled(scale), run(scale), 1e-6)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_compiles(inplace: bool) -> None:
    torch._dynamo.reset()
    x: dict[str, Any] = operands(Case(T=1, dtype=torch.float32))
    state = x.pop("initial_state")
    states = state.clone(), state.clone()
    compiled = torch.compile(gated_delta_step, fullgraph=True, backend="aot_eager")
    actual = compiled(**x, state=states[0], inplace=inplace)
    expected = gated_delta_step(**x, state=states[1], inplace=inplace)
    for one, other in zip((*actual, states[0]), (*expected, states[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(), (9, 0, 30)], ids=str)
def test_meta_tensors_have_the_right_shapes(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    case = Case(T=39, d_k=8, d_v=6, heads=(1, 4, 2, 1), lengths=lengths, dtype=dtype)
    x = {n: y.requires_grad_() for n, y in operands(case).items()}
    ghosts = {n: y.detach().to("meta").requires_grad_() for n, y in x.items()}
    cu_seqlens = case.cu_seqlens
    ghost_cu = None if cu_seqlens is None else cu_seqlens.to("meta")
    real = differentiated(rule, x, cu_seqlens=cu_seqlens)
    ghost = differentiated(rule, ghosts, cu_seqlens=ghost_cu)
    for actual, expected in zip(ghost, real, strict=True):
        assert actual.is_meta
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


def counted(case: Case, recompute: bool) -> tuple[int, int]:
    """FLOPs that torch's own counter sees in a forward, and in its backward."""
    x: dict[str, Any] = {n: y.requires_grad_() for n, y in operands(case).items()}
    with FlopCounterMode(display=False) as counter:
        o, _ = gated_delta_rule(**x, recompute=recompute, chunk_size=case.chunk_size)
        forward = counter.get_total_flops()
        o.sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("d", [64, 128])
def test_flops_are_counted(d: int) -> None:
    """Forward by its formula; erasing nothing costs at most 0.55 of it, and less going back."""
    T, C = 256, 64
    shape = Case(T=T, d_k=d, d_v=d, B=1, chunk_size=C, dtype=torch.float32)
    free = Case(**{**vars(shape), "widths": ("full", "none", "full")})
    forward, backward = counted(shape, recompute=True)
    free_forward, free_backward = counted(free, recompute=True)
    K = V = d
    heads = 2
    assert forward == int(T * heads * (6 * K * V + 6 * C * K + 4 * C * V + C * C / 3))
    assert free_forward == T * heads * (4 * K * V + 2 * C * K + 2 * C * V)
    assert free_forward <= 0.55 * forward
    assert free_backward <= 0.55 * backward
    assert backward > forward
    # torch's backward keeps what costs products either way, and only a backend that does not counts them again
    assert counted(shape, recompute=False) == (forward, backward)
    kept, again = (rule_backward_flops(d, d, C, True, recompute) for recompute in (False, True))
    assert backward == T * heads * kept
    assert again - kept == pytest.approx(4 * C * K + C * C / 3)


def test_shared_keys_are_counted_once() -> None:
    """Two value heads of one key head are one head of twice the width."""
    case = Case(T=64, d_k=16, d_v=8, B=1, heads=(1, 2, 1, 1), chunk_size=16)
    wide = Case(T=64, d_k=16, d_v=16, B=1, heads=(1, 1, 1, 1), chunk_size=16)
    assert counted(case, recompute=True) == counted(wide, recompute=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_operands_by_heads_pass_opcheck(batch: int) -> None:
    """Results have no gaps and no order of their own, whatever the operands'."""
    x = {n: by_heads(t) for n, t in operands(Case(T=20, B=batch)).items()}
    given = [x[n].detach().requires_grad_() for n in OPERANDS]
    arguments = *given, None, 0.5, 16, "ieee", "states", "torch"
    torch.library.opcheck(torch.ops.gdn2.chunk_forward.default, arguments)


def by_heads(x: Tensor) -> Tensor:
    """The same, stored with its second and third axes exchanged."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
