"""The operators timed beside each other: ours, and other people's where they are installed.

The peer is flash-linear-attention (`fla`), whose arguments have our names. It is called and never copied from.
"""

# ruff: noqa: PLC0415 (a peer is never needed: it is imported where it is asked for)
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gdn2.bench.forms import own_arguments
from gdn2.ops.rule import gated_delta_rule

Operator = Callable[..., Tensor]  # takes operands of a form and cu_seqlens by name
# Ends the name of an operator that keeps what others recompute in the backward.
KEPT = "-no-recompute"


def own_operator(backend: str, chunk_size: int, recompute: bool) -> Operator:
    """Our operator on a backend."""
    rule: Any = partial(
        gated_delta_rule, backend=backend, chunk_size=chunk_size, recompute=recompute
    )
    return lambda **operands: rule(**own_arguments(operands))[0]


def find_peers(
    device: torch.device, packed: bool, form: str
) -> tuple[dict[str, Operator], list[str]]:
    """Return the peers that can do it on the device, by name, or one line that says why there are none."""
    if device.type != "cuda" and (packed or form != "gdn2"):
        what = "packs sequences" if packed else f"has {form}"
        return {}, [f"no peers: fla {what} on a GPU only"]
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of every machine without a GPU
            return _find(device, form), []
    except ImportError as missing:
        return {}, [f"no peers: {missing}; pip install 'gdn2[bench]' installs fla"]


def _find(device: torch.device, form: str) -> dict[str, Operator]:
    if form == "mamba2":
        from fla.ops.simple_gla import chunk_simple_gla

        return {"fla": partial(_call, chunk_simple_gla)}
    if form == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return {"fla": partial(_call, chunk_gated_delta_rule, shares=True)}
    if form == "kda":
        from fla.ops.kda import chunk_kda

        kept = partial(chunk_kda, disable_recompute=True)
        return {"fla": partial(_call, chunk_kda), f"fla{KEPT}": partial(_call, kept)}
    from fla.ops.gdn2 import chunk_gdn2, naive_chunk_gdn2

    if device.type != "cuda":
        return {"fla-naive-chunk": partial(_call, naive_chunk_gdn2)}
    kept = partial(chunk_gdn2, disable_recompute=True)
    return {"fla": partial(_call, chunk_gdn2), f"fla{KEPT}": partial(_call, kept)}


def _call(
    rule: Callable[..., tuple[Tensor, ...]], *, shares: bool = False, **operands: Tensor
) -> Tensor:
    """Call a rule of fla on our operands.

    Gates of width one have no such axis there, and heads that value heads share are repeated where it shares none.
    """
    groups = operands["v"].shape[2] // operands["q"].shape[2]
    given = {
        n: x.squeeze(-1) if n in ("g", "beta") and x.shape[-1] == 1 else x
        for n, x in operands.items()
    }
    if groups > 1 and not shares:
        for name in ("q", "k", "g", "b"):
            given[name] = given[name].repeat_interleave(groups, 2)
    return rule(**given)[0]
