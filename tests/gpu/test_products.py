"""The ways that the GPU's library proposes, beside torch's product."""

from pathlib import Path

import pytest
import torch

from gdn2.bench.products import best_way, candidates, draw
from gdn2.ops import products
from gdn2.ops.cuda.multiply import Problem, multiplier, problem_of
from tests.closeness import relative_error
from tests.gpu.test_kernels import COMPILED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU"),
]
DEVICE = torch.device("cuda", 0)
PROBLEMS = [
    Problem(512, 384, 256, a_turned, b_turned, a_stride, b_stride)
    for a_turned, b_turned, a_stride, b_stride in (
        (False, False, 256, 384),
        (False, True, 320, 256),
        (True, False, 512, 1024),
        (True, True, 768, 256),
    )
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_way_is_the_product(problem: Problem) -> None:
    a, b = draw(problem, DEVICE)
    assert problem_of(a, b) == problem
    right = a.double() @ b.double()
    usual = relative_error(a @ b, right)
    multiply = multiplier(problem, DEVICE)
    ways = multiply.ways()
    assert ways
    varied = multiply.variants(ways[0])
    assert ways[0] in varied and len(varied) > 8  # as it is, and otherwise
    for way in [*ways, *varied[:: len(varied) // 8]]:
        out = torch.full((problem.rows, problem.columns), torch.nan, device=DEVICE).bfloat16()
        multiply(a, b, out, way)
        assert relative_error(out, right) < 1.1 * usual


def test_a_choice_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operator, in a graph too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_known", {})
    problem = PROBLEMS[1]
    a, b = draw(problem, DEVICE)
    found = best_way(problem, 1, DEVICE, 0.01)
    ways = multiplier(problem, DEVICE).ways()
    assert found.way in (None, *candidates(multiplier(problem, DEVICE)))
    assert found.usual_seconds >= found.best_seconds > 0
    products.choose(DEVICE, {problem: ways[-1]})
    monkeypatch.setattr(products, "_known", {})
    assert products.ways_of(DEVICE) == {problem: ways[-1]}
    expected = torch.empty(problem.rows, problem.columns, device=DEVICE, dtype=torch.bfloat16)
    multiplier(problem, DEVICE)(a, b, expected, ways[-1])
    assert torch.equal(products.product(a, b), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products.product(a, b)
    graph.replay()
    assert torch.equal(captured, expected)
    products.forget(DEVICE)
    assert not products.is_chosen(DEVICE)
