"""The operators timed beside each other: ours, and other people's where they are installed.

The peer is flash-linear-attention (`fla`), whose arguments have our names. It is called and never copied from.
"""

# ruff: noqa: PLC0415 (a peer is never needed: it is imported where it is asked for)
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gdn2.ops.rule import gated_delta_rule

Rule = Callable[..., tuple[Tensor, Tensor | None]]
Operator = Callable[..., Tensor]  # takes q, k, v, g, b, w and cu_seqlens by name
KEPT = (
    "-no-recompute"  # ends the name of an operator that keeps what others recompute in the backward
)


def own_operator(backend: str, chunk_size: int, recompute: bool) -> Operator:
    """Our operator on a backend."""
    rule = partial(gated_delta_rule, backend=backend, chunk_size=chunk_size, recompute=recompute)
    return partial(_output, rule)


def find_peers(
    device: torch.device, packed: bool, erase: bool
) -> tuple[dict[str, Operator], list[str]]:
    """Return the peers that can do it on the device, by name, or one line that says why there are none."""
    if not erase:
        return {}, ["no peers: fla has no form without an erase gate"]
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of every machine without a GPU
            from fla.ops.gdn2 import chunk_gdn2, naive_chunk_gdn2
    except ImportError as missing:
        return {}, [f"no peers: {missing}; pip install 'gdn2[bench]' installs fla"]
    if device.type == "cuda":
        kept = partial(chunk_gdn2, disable_recompute=True)
        rules = {"fla": chunk_gdn2, f"fla{KEPT}": kept}
    elif packed:
        return {}, ["no peers: fla packs sequences on a GPU only"]
    else:
        rules = {"fla-naive-chunk": naive_chunk_gdn2}
    return {name: partial(_output, rule) for name, rule in rules.items()}, []


def _output(rule: Rule, **operands: Tensor) -> Tensor:
    return rule(**operands)[0]
