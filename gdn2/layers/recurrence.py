"""The rule over whatever a layout holds: whole sequences, packed ones, or one more token."""

import torch
from torch import Tensor, nn

from gdn2.layers.layout import Layout
from gdn2.ops.family import Pattern
from gdn2.ops.rule import gated_delta_rule, gated_delta_step

CHUNK = 64  # tokens, as the rule takes them by default
SMALLER = (16, 32)


def run_rule(
    pattern: Pattern, memory: Tensor | None, layout: Layout, inplace: bool, recompute: bool
) -> tuple[Tensor, Tensor | None]:
    """Output and, where a memory was given, the next one; a step may overwrite it.

    `recompute` as in `gated_delta_rule`.
    """
    if memory is not None and layout.is_step:
        return gated_delta_step(**pattern, state=memory, inplace=inplace)
    return gated_delta_rule(
        **pattern,
        initial_state=memory,
        output_final_state=memory is not None,
        cu_seqlens=layout.cu_seqlens,
        chunk_size=_chunk_size(pattern["q"], layout.rows),
        recompute=recompute,
    )


def _chunk_size(q: Tensor, sequences: int) -> int:
    """On a CPU the smallest chunk that holds a sequence of mean length: what fills up short ones is computed too."""
    if q.device.type != "cpu" or torch.compiler.is_compiling():  # one graph serves all lengths
        return CHUNK
    tokens = q.shape[0] * q.shape[1]
    return next((size for size in SMALLER if sequences * size >= tokens), CHUNK)


def wide_parameter(size: int) -> nn.Parameter:
    """Memory for decays or step sizes, fp32 where models are made in fewer bits: training would move nothing there."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.empty(size, dtype=dtype))
