"""The CUDA kernels leave the same bits in whatever order threads, copies and products get on, as far as they may.

What a missing barrier or wait would change is found on a CPU this way, by the schedules of `emulated.h`; and that it is
found is seen by taking them out of the kernels, one at a time.
"""

import faulthandler
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import Empty, Queue

import pytest
import torch
from torch import Tensor

from gdn2.ops.cuda import build
from gdn2.ops.cuda.launch import BACKWARD, FORWARD, GRADIENT, GROUP_GRADIENT, INTRA, PLAIN
from gdn2.ops.selfcheck import Scenario
from gdn2.ops.triton.checks import MILD, Exact
from tests.ops.triton import (
    test_cuda_gradient,
    test_cuda_intra,
    test_cuda_plain_scan,
    test_cuda_scan,
)
from tests.ops.triton.emulation import (
    INSTRUCTIONS,
    Emulate,
    Emulated,
    bits,
    emulator,
    needs_compiler,
)

SCHEDULES = range(1, 5)
STRONG = replace(MILD, name="strong", strong=True)
NARROW = replace(STRONG, heads=(2, 2, 2, 2), widths=(64, 64))
THREE = replace(STRONG, heads=(1, 3, 1, 1))
# Gates and decays for each head.
FEW, NARROW_FEW = (replace(scenario, scalar_gates=True) for scenario in (STRONG, NARROW))
exact = cache(Exact)


def in_any_order(kernel: Emulated) -> Emulated:
    kernel.schedules = SCHEDULES
    return kernel


def of_operands(folder: Path, kernel: str, arguments: str, blocks: int) -> Emulate:
    compiled = emulator(folder, kernel, arguments, BLOCKS=blocks)
    return lambda x: in_any_order(compiled(x))


def intra(folder: Path, scenario: Scenario, blocks: int) -> list[Tensor]:
    compiled = of_operands(folder, INTRA, test_cuda_intra.ARGUMENTS, blocks)
    return test_cuda_intra.launch(compiled, exact(scenario, torch.bfloat16)).tensors()


def gradient(folder: Path, scenario: Scenario, blocks: int) -> list[Tensor]:
    compiled = of_operands(folder, GRADIENT, test_cuda_gradient.ARGUMENTS, blocks)
    return test_cuda_gradient.Launched(compiled, exact(scenario, torch.bfloat16)).found


def group_gradient(folder: Path, scenario: Scenario) -> list[Tensor]:
    compiled = of_operands(folder, GROUP_GRADIENT, test_cuda_gradient.ARGUMENTS + "n", 1)
    return test_cuda_gradient.Launched(compiled, exact(scenario, torch.bfloat16)).found


def scan(folder: Path, kernel: str) -> list[Tensor]:
    def compiled(kernel: str, heads: int, shared: int, width: int) -> Emulated:
        arguments = test_cuda_scan.ARGUMENTS[kernel]
        sizes = {"HEADS": heads, "F_HEADS": shared, "D": width}
        return in_any_order(Emulated(folder, kernel, arguments, **sizes))

    return test_cuda_scan.Packed((1, 330)).run(compiled, kernel)


def plain(folder: Path) -> list[Tensor]:
    def compiled(*sizes: int) -> Emulated:
        macros = dict(zip(test_cuda_plain_scan.MACROS, sizes, strict=True))
        return in_any_order(Emulated(folder, PLAIN, test_cuda_plain_scan.ARGUMENTS, **macros))

    x = test_cuda_plain_scan.draw((2, 2, 2), 64, (1, 330), None, torch.bfloat16)
    return list(test_cuda_plain_scan.launch(compiled, x, 64, (1, 330)))


RUNS: dict[str, Callable[[Path], list[Tensor]]] = {
    "intra": lambda folder: intra(folder, STRONG, 1),
    "intra, rows": lambda folder: intra(folder, STRONG, 0),
    "intra, heads of 64": lambda folder: intra(folder, NARROW, 1),
    "intra, three value heads": lambda folder: intra(folder, THREE, 1),
    "gradient, heads of 64": lambda folder: gradient(folder, NARROW, 1),
    "gradient, rows": lambda folder: gradient(folder, STRONG, 0),
    "gradient, gates of heads": lambda folder: gradient(folder, NARROW_FEW, 1),
    "group_gradient": lambda folder: group_gradient(folder, STRONG),
    "group_gradient, gates of heads": lambda folder: group_gradient(folder, FEW),
    "forward_scan": lambda folder: scan(folder, FORWARD),
    "backward_scans": lambda folder: scan(folder, BACKWARD),
    "plain_scan": plain,
}


@needs_compiler
@pytest.mark.parametrize("name", RUNS)
def test_the_order_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Each program is run again by each schedule (`Emulated`)."""
    assert RUNS[name](tmp_path)


# What a program waits for, but for the barriers of single warps: emulated lanes wait at each exchange in any case.
WAITS = re.compile(
    r"^[^/\n]*(?<!DEVICE void )\b(?P<wait>(__syncthreads|await_group|await<\w+>|arrive<\w+>|publish|"
    r"wait_for_(signal|copies|series<\d>|products<.+>)|wait_until_read<0>)\(.*?\);)",
    re.MULTILINE,
)
NOT_SEEN = {
    # Those between value heads, of which there is one; of three all are seen.
    "intra": {"__syncthreads();"},
    "intra, heads of 64": {"__syncthreads();"},
    # One for gates of all channels; all else of the case is seen.
    "gradient, heads of 64": {"__syncthreads();"},
    # Both are for states, and not compiled.
    "forward_scan": {"publish();", "wait_until_read<0>();"},
    # What is put aside is written before large copies come to lie over it, which emulated ones never overtake.
    "group_gradient": {"publish();"},
    "group_gradient, gates of heads": {"publish();"},
}


def waits(kernel: str) -> list[tuple[str, str]]:
    """Each of a kernel's, and the source without it."""
    text = build.source(f"{kernel}.cu", given=INSTRUCTIONS)
    places = [found.span("wait") for found in WAITS.finditer(text)]
    return [(text[begin:end], f"{text[:begin]};{text[end:]}") for begin, end in places]


def ends_like(expected: list[Tensor], name: str, folder: Path, seconds: int = 60) -> bool:
    """Whether a run ends with these bits; one that was broken may do anything else, so another process tries."""
    context = multiprocessing.get_context("fork")
    same: Queue[bool] = context.Queue()  # type: ignore[assignment]

    def run() -> None:
        faulthandler.disable()  # whatever it does is expected
        torch.set_num_threads(1)  # others are missing here
        found = RUNS[name](folder)
        same.put(all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True)))

    process = context.Process(target=run)
    process.start()
    process.join(seconds)
    process.kill()
    try:
        return same.get(timeout=1)
    except Empty:
        return False


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", [n for n in RUNS if not n.endswith("rows")])
def test_each_wait_is_needed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = RUNS[name](tmp_path)
    assert ends_like(expected, name, tmp_path)
    unseen = []
    for i, (wait, without) in enumerate(waits(name.split(",", maxsplit=1)[0])):
        folder = tmp_path / str(i)
        folder.mkdir()
        monkeypatch.setattr(build, "source", lambda *_, text=without, **__: text)
        if ends_like(expected, name, folder):
            unseen.append(wait)
    assert set(unseen) == NOT_SEEN.get(name, set()), unseen
