"""Launch parameters, as data: nothing is tuned at call time."""

from typing import NamedTuple


class Launch(NamedTuple):
    """Largest tiles along key and value channels, warps per program, and stages of pipelined loads."""

    key_block: int
    value_block: int
    num_warps: int
    num_stages: int = 1


# Best of seven on one H200 (torch 2.11, triton 3.6) at 4 × 4096 tokens, 16 heads, width 128, bf16; µs per call.
# Each kernel was timed alone; the seven configurations and what was slower are in docs/performance.md.
DEFAULT = {
    "scores": Launch(32, 0, 2),  # 428
    "solve": Launch(128, 128, 4),  # 270
    "scan": Launch(256, 64, 4, 3),  # 150
    "scan_reverse": Launch(256, 64, 4, 3),  # 177
    "gradient_values": Launch(0, 128, 4),  # 165
    "gradient_keys": Launch(64, 128, 8),  # 2001
}


def launch(kernel: str, row_bytes: int = 0) -> Launch:
    """Launch parameters of a kernel; wide rows of the scans leave shared memory for fewer stages."""
    how = DEFAULT[kernel]
    if row_bytes > 512:
        return how._replace(value_block=32, num_stages=1)
    return how._replace(num_stages=2) if row_bytes > 256 else how
