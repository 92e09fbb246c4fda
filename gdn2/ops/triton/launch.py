"""Launch parameters, as data: a table per architecture, and nothing is tuned at call time.

`gdn2 bench tune` measures a table's rows on the GPU it runs on and prints better ones, if there are, to be put here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from gdn2.ops.cuda.launch import multiprocessors


class Launch(NamedTuple):
    """Largest tiles along key and value channels, warps per program, and stages of pipelined loads."""

    key_block: int
    value_block: int
    num_warps: int
    num_stages: int = 1


class Scan(NamedTuple):
    """What the launch of a scan depends on.

    Its shared memory: tokens in a chunk, key channels and bytes of an element. Its programs: value channels, and the
    heads of all sequences.
    """

    chunk: int
    keys: int
    itemsize: int
    values: int
    heads: int


class Architecture(NamedTuple):
    """Bytes of shared memory that a program may have, and the row of each kernel."""

    shared_memory: int
    rows: dict[str, Launch]


# Best of a few on one H200 (torch 2.11, triton 3.6) at 4 × 4096 tokens, 16 heads, width 128, bf16; µs per call.
# Each kernel was timed alone; what was slower is in docs/performance-steps.md.
DEFAULT = {
    "decays": Launch(128, 0, 2),  # 134
    "scores": Launch(32, 0, 4),  # 290
    "solve": Launch(128, 128, 4),  # 183
    "scan": Launch(256, 64, 4, 3),  # 150
    "scan_reverse": Launch(256, 64, 4, 3),  # 177
    "gradient_values": Launch(0, 128, 4),  # 183
    "gradient_states": Launch(64, 128, 4),  # 959
    "gradient_keys": Launch(64, 0, 4),  # 840
}

# The others are not measured. They compile and fit, which tests check without such GPUs: chunks of 64 up to width 256
# in bf16 and fp32, chunks of 128 up to width 256 in bf16.
LARGE = DEFAULT | {
    "solve": Launch(64, 64, 4),
    "scan": Launch(256, 64, 4, 2),
    "scan_reverse": Launch(256, 64, 4, 2),
    "gradient_values": Launch(0, 64, 4),
    "gradient_states": Launch(64, 64, 4),
    "gradient_keys": Launch(32, 0, 2),
}
BLACKWELL = LARGE | {  # 64 value channels at width 256 stop ptxas
    "scan": Launch(256, 32, 4, 2),
    "scan_reverse": Launch(256, 32, 4, 2),
}
SMALL = BLACKWELL | {"gradient_states": Launch(32, 64, 4), "gradient_keys": Launch(32, 0, 2)}
KIB = 1024
ARCHITECTURES = {
    (8, 0): Architecture(163 * KIB, LARGE),  # A100
    (8, 6): Architecture(99 * KIB, SMALL),  # RTX 30 and A10; RTX 40 and L4 (8.9)
    (9, 0): Architecture(227 * KIB, DEFAULT),  # H100, H200
    (10, 0): Architecture(227 * KIB, BLACKWELL),  # B200, and B300 (10.3)
    (12, 0): Architecture(99 * KIB, SMALL),  # RTX 50
}
INTERPRETED = (9, 0)  # whose rows run where there is no GPU
SMALLEST_BLOCK = 16

_overrides: dict[str, Launch] = {}


def launch(kernel: str, device: torch.device, scan: Scan | None = None) -> Launch:
    """Launch parameters of a kernel on a device; those of a scan are made to fit its shared memory, and to fill it."""
    if kernel in _overrides:
        return _overrides[kernel]
    how = row(kernel, capability(device), scan)
    return how if scan is None else spread(how, scan, multiprocessors(device))


def spread(how: Launch, scan: Scan, processors: int) -> Launch:
    """Fewer value channels a program, as long as all programs of a scan still run at once.

    With 16 heads of width 128 the three scans of a forward and a backward take 1146 instead of 1520 µs at 1 × 16384
    tokens, 740 instead of 812 at 2 × 8192.
    """
    while how.value_block > SMALLEST_BLOCK:
        programs = scan.heads * -(-scan.values // (how.value_block // 2))
        if programs > processors:
            break
        how = how._replace(value_block=how.value_block // 2)
    return how


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED


def row(kernel: str, wanted: tuple[int, int], scan: Scan | None = None) -> Launch:
    """A kernel's row for a compute capability, or for the nearest older one that has a table."""
    known = nearest(wanted)
    how = ARCHITECTURES[known].rows[kernel]
    return how if scan is None else fitted(how, scan, known)


@cache
def nearest(wanted: tuple[int, int]) -> tuple[int, int]:
    """The newest architecture in the table that is no newer, or the oldest."""
    return max((known for known in ARCHITECTURES if known <= wanted), default=min(ARCHITECTURES))


@cache
def fitted(how: Launch, scan: Scan, architecture: tuple[int, int]) -> Launch:
    """The first way to launch a scan that fits; else the smallest, since the estimate is an upper bound."""
    choices = smaller(how)
    limit = ARCHITECTURES[architecture].shared_memory
    return next((h for h in choices if scan_bytes(h, scan, architecture) <= limit), choices[-1])


def smaller(how: Launch) -> list[Launch]:
    """Ways to launch a scan in less and less memory: loads in flight are given up last."""
    blocks = [how.value_block, *(b for b in (128, 64, 32, 16) if b < how.value_block)]
    pipelined = range(how.num_stages, 1, -1)
    sizes = [*((b, s) for b in blocks for s in pipelined), *((b, 1) for b in blocks)]
    return [how._replace(value_block=b, num_stages=s) for b, s in sizes]


def scan_bytes(how: Launch, scan: Scan, architecture: tuple[int, int]) -> int:
    """Estimated shared memory of a scan, at least what Triton takes.

    A step loads Q_γ, K_tail and Y [C, keys], A_qk [C, C], a tile of values [C, value block] and γ_C. Stages − 1 of
    these are on their way while one is used; Hopper's products of 64 rows and more read theirs in shared memory while
    the next arrive, which takes one more. State and keys pass through shared memory on their way into products, and on
    a B200 scores and values too. With one stage nothing is on its way.
    """
    C, BV = scan.chunk, how.value_block
    BK = max(SMALLEST_BLOCK, 1 << (min(scan.keys, how.key_block) - 1).bit_length())
    if how.num_stages == 1:
        elements = C * BK + C * C + max(BK, C) * BV
    else:
        buffers = how.num_stages - 1 + (architecture == (9, 0) and BV >= 64)
        elements = buffers * (3 * C * BK + C * C + C * BV) + (C + BV) * BK
        elements += C * C + C * BV if architecture == (10, 0) else 0
    return elements * scan.itemsize + how.num_stages * BK * 4


@contextmanager
def overriding(kernel: str, how: Launch) -> Iterator[None]:
    """Launch a kernel in another way for a while, exactly as said."""
    before = dict(_overrides)
    _overrides[kernel] = how
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
