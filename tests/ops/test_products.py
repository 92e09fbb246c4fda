"""Products in ways that were chosen: only what was met, only here, and torch's wherever anything is missing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gdn2.ops import products
from gdn2.ops.cuda.build import CudaError
from gdn2.ops.cuda.multiply import Problem, Way, problem_of
from gdn2.ops.maps import maps
from gdn2.ops.swiglu import swiglu_linear

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WAY = Way("00" * 64, 8)


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder; as in a new process nothing is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "identity", lambda device: "Some GPU, some library")
    yield tmp_path / "gdn2" / "products.json"


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_a_problem_is_how_operands_lie() -> None:
    a, b, wide = matrix(6, 4), matrix(4, 3), matrix(4, 8)
    assert problem_of(a, b) == Problem(6, 3, 4, False, False, 4, 3)
    assert problem_of(matrix(4, 6).t(), b) == Problem(6, 3, 4, True, False, 6, 3)
    assert problem_of(a, matrix(3, 4).t()) == Problem(6, 3, 4, False, True, 4, 4)
    assert problem_of(a, matrix(4, 16)[:, 8:11]) == Problem(6, 3, 4, False, False, 4, 16)
    assert problem_of(wide[:, :6].t(), b) == Problem(6, 3, 4, True, False, 8, 3)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (matrix(6, 4).float(), matrix(4, 3).float()),
        (matrix(6, 8)[:, ::2], matrix(4, 3)),  # nothing lies next to each other
        (matrix(1, 4).expand(6, 4), matrix(4, 3)),  # rows upon each other
        (matrix(0, 4), matrix(4, 3)),
        (matrix(25)[1:].view(6, 4), matrix(4, 3)),  # at no multiple of 16 bytes
    ],
)
def test_other_operands_are_left_to_torch(a: Tensor, b: Tensor) -> None:
    assert problem_of(a, b) is None
    with products.counting() as met:
        assert torch.equal(products.product(a, b), a @ b)
    assert not met


def test_nothing_is_chosen_unless_asked_for(file: Path) -> None:
    a, b = matrix(6, 4), matrix(4, 3)
    assert not products.is_chosen(CPU) and not products.is_chosen(GPU)
    assert torch.equal(products.product(a, b), a @ b)
    assert not file.exists()


def test_choices_are_kept_for_later_processes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Problem(6, n, 4, False, True, 4, 4) for n in (3, 5))
    assert products.choose(GPU, {first: WAY}) == file
    assert products.choose(GPU, {second: Way("11" * 64, 0)}) == file
    monkeypatch.setattr(products, "_known", {})
    assert products.ways_of(GPU) == {first: WAY, second: Way("11" * 64, 0)}
    assert products.is_chosen(GPU) and not products.is_chosen(CPU)
    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "identity", lambda device: "another GPU")
    assert products.ways_of(GPU) == {}
    products.choose(GPU, {first: WAY})
    products.forget(GPU)
    assert products.ways_of(GPU) == {}
    assert [*json.loads(file.read_text())] == ["Some GPU, some library"]


def test_a_choice_can_be_withdrawn_and_added_to_elsewhere(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process has written meanwhile stays."""
    problems = [Problem(6, n, 4, False, True, 4, 4) for n in (3, 5, 7)]
    products.choose(GPU, dict.fromkeys(problems[:2], WAY))
    with monkeypatch.context() as other:
        other.setattr(products, "_known", {})
        products.choose(GPU, {problems[2]: WAY})
    products.choose(GPU, {problems[0]: None})
    monkeypatch.setattr(products, "_known", {})
    assert products.ways_of(GPU) == dict.fromkeys(problems[1:], WAY)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"a": [[[1, 1, 1, true, true, 1, 1], ["00", 0]]]}',
        '{"Some GPU, some library": [[1]]}',
        '{"a": 3}',
    ],
)
def test_a_file_that_cannot_be_read_is_said(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=r"ignores .*products.json.* gdn2 bench products writes"):
        assert products.ways_of(GPU) == {}


def test_without_the_library_nothing_is_chosen(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> str:
        raise CudaError("libcublasLt.so.0 is not to be found")

    file.parent.mkdir()
    file.write_text("{}")
    monkeypatch.setattr(products, "identity", missing)
    assert not products.is_chosen(GPU)


class Fake:
    """In place of the library: torch's product, marked."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.calls = fails, 0

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, way: Way) -> None:
        assert way == WAY
        self.calls += 1
        if self.fails:
            raise CudaError("cublasLtMatmul: got status 7, expected 0")
        out.copy_(a @ b)


@pytest.mark.parametrize("fails", [False, True])
def test_a_way_that_was_chosen_is_taken(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails is said once, and torch's is taken from then on."""
    a, b, other = matrix(6, 4), matrix(4, 3), matrix(4, 5)
    problem = problem_of(a, b)
    assert problem is not None
    fake = Fake(fails)
    monkeypatch.setattr(products, "_known", {CPU: {problem: WAY}})
    monkeypatch.setattr(products, "multiplier", lambda given, device: fake)
    if fails:
        with pytest.warns(UserWarning, match="leaves products to torch: cublasLtMatmul"):
            assert torch.equal(products.chosen_product(a, b), a @ b)
        assert products.ways_of(CPU) == {}
    for _ in range(2):
        assert torch.equal(products.chosen_product(a, b), a @ b)
    assert torch.equal(products.chosen_product(a, other), a @ other)
    assert fake.calls == (1 if fails else 2)


def test_all_products_of_maps_are_met() -> None:
    """Forward and backward of a map, of several, and of the MLP; results and gradients stay."""
    leaves = {
        "x": matrix(2, 3, 8),
        "gate": matrix(16, 8),
        "up": matrix(16, 8),
        "down": matrix(4, 16),
    }

    def run() -> list[Tensor]:
        given = {n: x.clone().requires_grad_() for n, x in leaves.items()}
        gate, up = maps(given["x"], [given["gate"], given["up"]])
        y = swiglu_linear(gate, up, given["down"])
        return [y, *torch.autograd.grad(y.float().square().sum(), [*given.values()])]

    expected = run()
    with products.counting() as met:
        found = run()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    forward = {Problem(6, 16, 8, False, True, 8, 8): 2, Problem(6, 4, 16, False, True, 16, 16): 1}
    backward: dict[Problem, int] = {
        Problem(6, 16, 4, False, False, 4, 16): 1,  # of the activation
        Problem(4, 16, 6, True, False, 4, 16): 1,  # of down
        Problem(16, 8, 6, True, False, 32, 8): 2,  # of gate and up, whose gradients are one tensor
    }
    assert met == forward | backward
    assert not products.is_chosen(CPU)


def test_a_compiler_is_told_what_it_returns() -> None:
    a, b = matrix(4, 6).t(), matrix(4, 3)
    torch.library.opcheck(products.chosen_product, (a, b))
    with FlopCounterMode(display=False) as counter:
        products.chosen_product(a, b)
    assert counter.get_total_flops() == 2 * 6 * 4 * 3

    def run(x: Tensor, weight: Tensor) -> Any:
        return maps(x, [weight])[0]

    x, weight = matrix(2, 3, 4), matrix(5, 4)
    with products.counting() as met:
        torch._dynamo.reset()
        found = torch.compile(run, fullgraph=True, backend="aot_eager")(x, weight)
    assert torch.equal(found, x @ weight.t()) and met
    torch._dynamo.reset()
