"""The CUDA kernels on a GPU they are for: taken, and equal to the Triton kernels they stand in for."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops import trust
from gdn2.ops.chunk_op import pack
from gdn2.ops.cuda.launch import PLAIN, in_blocks, takes_plain, trying
from gdn2.ops.operands import Operands
from tests.closeness import relative_error
from tests.gpu.test_kernels import COMPILED, USUAL, exact, on_gpu, options, run, weights
from tests.ops.cases import Case, rule

KERNELS = ("intra", "forward_scan", "backward_scans", "gradient", "group_gradient")
HOPPER = COMPILED and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]
CASES = {
    "usual": USUAL,
    "128": replace(USUAL, d_k=128, d_v=128),
    "uneven": replace(USUAL, decay="uneven"),
    "mixed": replace(USUAL, decay="mixed"),
    "ends": replace(USUAL, d_k=128, d_v=128, decay="ends"),
    "packed": replace(USUAL, lengths=(1, 63, 64, 65, 130)),
    "one gate a head": replace(USUAL, widths=("full", "one", "one")),
    "no write gate": replace(USUAL, widths=("full", "one", "none")),
    "one decay a head": replace(USUAL, widths=("one", "one", "one")),
    "one decay a head of 128": replace(
        USUAL, widths=("one", "one", "one"), decay="mixed", d_k=128, d_v=128
    ),
    "decays for each gate": replace(USUAL, widths=("one", "full", "full")),
    "shared keys": replace(USUAL, heads=(1, 2, 2, 2), widths=("one", "one", "one")),
    "value heads that share": replace(USUAL, heads=(2, 4, 2, 2)),
    "kept factors of value heads that share": replace(
        USUAL, heads=(1, 4, 2, 1), recompute=False, d_k=128, d_v=128
    ),
    "three value heads of one": replace(USUAL, heads=(1, 3, 1, 1), decay="mixed", d_k=128, d_v=128),
    "shared decays": replace(USUAL, heads=(2, 2, 1, 1), recompute=False),
    "kept factors": replace(USUAL, recompute=False),
    "many rows": replace(USUAL, B=48, T=70),
}


def packed(case: Case) -> Operands:
    """The operands as the kernels get them."""
    given: dict[str, Any] = {"b": None, "w": None, **on_gpu(case)}
    del given["initial_state"]
    return pack(**given, scale=1.0)


def distrust(monkeypatch: pytest.MonkeyPatch, *kernels: str) -> None:
    verdict = dict.fromkeys(kernels, "for the test")
    monkeypatch.setitem(trust._known, trust.indexed(torch.device("cuda")), verdict)


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is near the equations in fp64, and neither is much further away than the other."""
    from gdn2.ops.triton.pipeline import widened  # noqa: PLC0415 (a module for GPUs)

    case = CASES[name]
    x = widened(packed(case), 64)
    assert in_blocks(x, 64)
    expected, ours = exact(case).named(), run(case).named()
    distrust(monkeypatch, *KERNELS)
    assert not in_blocks(x, 64)
    triton = run(case).named()
    for quantity, y in expected.items():
        error, other = (relative_error(found[quantity], y) for found in (ours, triton))
        assert error <= max(1.3 * other, 2e-3), (quantity, error, other)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("recompute", [True, False])
def test_what_one_kernel_cannot_do(
    kernel: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others read what Triton's kernels leave in its place, and the other way."""
    case = replace(USUAL, recompute=recompute)
    distrust(monkeypatch, kernel)
    found = run(case).named()
    for quantity, y in exact(case).named().items():
        assert relative_error(found[quantity], y) < 1e-2, quantity


def test_kept_factors_and_operands_may_lie_elsewhere_in_the_backward() -> None:
    """A gate that begins anywhere, whose copy for the backward begins where memory does."""
    case = replace(CASES["one gate a head"], B=1, recompute=False)
    leaves = on_gpu(case)
    whole = torch.cat([leaves["b"][:, :1], leaves["b"]], 1).detach()
    found = []
    for away in (nullcontext(), torch.autograd.graph.save_on_cpu()):
        leaves["b"] = whole[:, 1:].requires_grad_()
        assert leaves["b"].data_ptr() % 16
        with away:
            results = rule(leaves, **options(case, "triton"))
        grads = torch.autograd.grad(results, list(leaves.values()), weights(case, results))
        found.append([*results, *grads])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_registers_are_enough_with_gates_for_each_channel() -> None:
    """Also for chunks that are not whole; other programs may be tried."""
    x = packed(CASES["128"])
    with trying(None) as loaded:
        assert in_blocks(x, 64)
        found = {key[0]: kernel.of_threads() for key, kernel in loaded.items() if kernel}
    assert {name: spilled for name, (_, spilled) in found.items()} == dict.fromkeys(
        ("intra", "forward_scan", "backward_scans", "group_gradient"), 0
    )
    with trying(1) as loaded:
        assert in_blocks(x, 64)
        wider = {key[0]: kernel.of_threads() for key, kernel in loaded.items() if kernel}
    assert wider["intra"][0] > found["intra"][0] and wider["intra"][1] == 0


@pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"d_k": 96}, {"chunk_size": 32}])
def test_other_operands_are_left_to_triton(change: dict[str, object]) -> None:
    case = replace(USUAL, **change)  # type: ignore[arg-type]
    assert not in_blocks(packed(case), case.chunk_size)


PLAIN_CASES = {
    "no gates": replace(USUAL, widths=("one", "none", "none")),
    "a write gate a head": replace(USUAL, widths=("one", "none", "one")),
    "128, packed": replace(
        USUAL, d_k=128, d_v=128, widths=("one", "none", "one"), lengths=(1, 63, 64, 65, 130)
    ),
    "shared keys": replace(USUAL, widths=("one", "none", "one"), heads=(1, 2, 2, 2)),
    "many rows": replace(USUAL, widths=("one", "none", "none"), B=48, T=70),
}


@pytest.mark.parametrize("name", PLAIN_CASES)
def test_both_ways_without_an_erase_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = PLAIN_CASES[name]
    x = packed(case)
    assert takes_plain(x, 64, rows=8)
    expected, ours = exact(case).named(), run(case).named()
    distrust(monkeypatch, PLAIN)
    assert not takes_plain(x, 64, rows=8)
    triton = run(case).named()
    for quantity, y in expected.items():
        error, other = (relative_error(found[quantity], y) for found in (ours, triton))
        assert error <= max(1.3 * other, 2e-3), (quantity, error, other)


def test_a_write_gate_may_be_wide() -> None:
    """As those of Mamba-2 and Mamba-3: where it holds the same numbers, nothing else changes."""
    case = PLAIN_CASES["a write gate a head"]
    narrow = run(case)
    leaves = on_gpu(case)
    leaves["w"] = leaves["w"].detach().float().requires_grad_()
    given: dict[str, Any] = {"b": None, **leaves}
    del given["initial_state"]
    assert takes_plain(pack(**given, scale=1.0), 64, rows=8)
    o, state = rule(leaves, **options(case, "triton"))
    assert torch.equal(o, narrow.o)
    assert state is not None and torch.equal(state, narrow.state)


LONG = replace(USUAL, B=1, T=64 * 259 - 7)


def is_overlapped(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, dict[str, Tensor]]:
    """Whether the scan goes on while chunks compute, and all results."""
    from gdn2.ops.triton import overlap  # noqa: PLC0415 (a module for GPUs)

    takes, seen = overlap.takes, []

    def watched(*given: Any) -> bool:
        seen.append(takes(*given))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(overlap, "takes", watched)
        found = run(case).named()
    return seen[-1], found


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_a_long_sequence_is_scanned_while_chunks_compute(
    width: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes by that but the time."""
    from gdn2.ops.triton import overlap  # noqa: PLC0415

    case = replace(LONG, d_k=width, d_v=width, recompute=recompute)
    overlapped, ours = is_overlapped(case, monkeypatch)
    assert overlapped
    monkeypatch.setattr(overlap, "takes", lambda *_: False)
    apart = run(case).named()
    assert all(torch.equal(x, apart[name]) for name, x in ours.items())


@pytest.mark.parametrize("change", [{"B": 2}, {"T": 64 * 255}, {"lengths": (8192, 8377)}], ids=str)
def test_other_sequences_are_scanned_afterwards(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_overlapped(replace(LONG, **change), monkeypatch)[0]


def test_a_long_sequence_in_a_graph() -> None:
    """Both streams are captured."""
    leaves = {n: x.detach() for n, x in on_gpu(LONG).items()}
    expected = rule(leaves, **options(LONG, "triton"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rule(leaves, **options(LONG, "triton"))
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
