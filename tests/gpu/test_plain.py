"""The backward without an erase gate by compiled kernels: near fp64, deterministic, and as near as the stages' way."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.closeness import relative_error
from tests.gpu.test_cuda import distrust, packed
from tests.gpu.test_kernels import (
    COMPILED,
    USUAL,
    assert_same_bits,
    check,
    exact,
    on_gpu,
    options,
    run,
    weights,
)
from tests.ops.cases import Case, Result, rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU, and kernels that are compiled"),
]


NAME = "plain_gradient"  # by which the kernels are trusted


def taken(case: Case) -> bool:
    """Whether the kernels do the work of a case."""
    from gdn2.ops.triton import plain  # noqa: PLC0415 (interpreted tests import it in their own way)

    return plain.takes(packed(case), max(case.chunk_size, 32))


def usual(**changes: object) -> Case:
    """Two heads with one decay and one write gate each, with changes."""
    return replace(USUAL, **{"widths": ("one", "none", "one"), **changes})  # type: ignore[arg-type]


CASES = {
    "usual": usual(),
    "no write gate": usual(widths=("one", "none", "none")),
    "shared keys": usual(heads=(1, 8, 8, 1)),  # Mamba-2
    "shared keys and decays": usual(heads=(1, 4, 2, 1)),
    "packed": usual(lengths=(1, 63, 0, 64, 65, 130)),
    "narrow": usual(d_k=48, d_v=20),
    "one channel": usual(d_k=1, d_v=1, decay=-1.0),
    "small chunks": usual(chunk_size=16),
    "many rows": usual(B=48, T=70),
    "long": usual(T=16384, B=1, heads=(8, 8, 8, 8)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_near_fp64(case: Case) -> None:
    assert taken(case)
    check(case)


@pytest.mark.parametrize(
    "decay", ["mild", "uneven", "spiky", "mixed", 0.0, -1.0, -4.0, -20.0, -200.0]
)
def test_decays(decay: float | str) -> None:
    check(usual(decay=decay))


@pytest.mark.parametrize("name", ["usual", "no write gate", "shared keys", "packed", "long"])
def test_as_near_as_the_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These round scores to bf16 where the stages' kernels take tf32."""
    case = CASES[name]
    expected, ours = exact(case).named(), run(case).named()
    distrust(monkeypatch, NAME)
    assert not taken(case)
    stages = run(case).named()
    for quantity, y in expected.items():
        error, other = (relative_error(found[quantity], y) for found in (ours, stages))
        print(f"{quantity} {error:.1e} {other:.1e}")
        assert error <= max(1.5 * other, 5e-3), (quantity, error, other)


@pytest.mark.parametrize("lengths", [(), (1, 130, 65, 0, 204)], ids=["dense", "packed"])
def test_runs_give_the_same_bits(lengths: tuple[int, ...]) -> None:
    """Many at once, and whether factors are to be kept or not: there are none."""
    case = usual(T=400, B=8, lengths=lengths, decay="mixed", heads=(2, 4, 4, 1))
    expected = run(case)
    for recompute in (True, True, False):
        assert_same_bits(run(replace(case, recompute=recompute)), expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_compiles(recompute: bool) -> None:
    """As one graph, with the same bits."""
    torch._dynamo.reset()
    case = usual(recompute=recompute)
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(rule, fullgraph=True)
    leaves = on_gpu(case)
    results = compiled(leaves, **options(case, "triton"))
    grads = torch.autograd.grad(results, list(leaves.values()), weights(case, results))
    o, state = (x.detach() for x in results)
    assert_same_bits(Result(o, state, dict(zip(leaves, grads, strict=True))), run(case))
