"""Launch parameters, as data: nothing is tuned at call time."""

from typing import NamedTuple


class Launch(NamedTuple):
    """Largest tiles along key and value channels, warps per program, and stages of pipelined loads."""

    key_block: int
    value_block: int
    num_warps: int
    num_stages: int = 1


DEFAULT = {
    "scores": Launch(32, 0, 2),
    "solve": Launch(128, 128, 4),
    "scan": Launch(256, 64, 4, 3),
    "scan_reverse": Launch(256, 64, 4, 3),
    "gradient_values": Launch(0, 128, 4),
    "gradient_keys": Launch(64, 128, 8),
}


def launch(kernel: str) -> Launch:
    """Launch parameters of a kernel."""
    return DEFAULT[kernel]
