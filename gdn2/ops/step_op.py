"""The decode kernel as custom operators: one returns a new state, one overwrites the given. Neither has gradients.

They are defined by their schemas because a call then costs the host about 5 µs, and 33 by `torch.library.custom_op`:
a step of one sequence takes the GPU less than either.
"""

import torch
from torch import Tensor

OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? b, Tensor? w, float scale"
DEVICES = ("cuda", "cpu")  # a CPU runs the kernel in Triton's interpreter, for its tests

torch.library.define(
    "gdn2::step",
    f"({OPERANDS}, Tensor state) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "gdn2::step_inplace",
    f"({OPERANDS}, Tensor(a!) state) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
step = torch.ops.gdn2.step.default
step_inplace = torch.ops.gdn2.step_inplace.default


@torch.library.impl("gdn2::step", DEVICES)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output [N, T, H_v, d_v] and new state."""
    from gdn2.ops.triton import step as kernel  # noqa: PLC0415 (optional dependency)

    final = state.new_empty(state.shape)
    return kernel.step(q, k, v, g, b, w, scale, state, final), final


@torch.library.impl("gdn2::step_inplace", DEVICES)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    scale: float,
    state: Tensor,
) -> Tensor:
    """Output [N, T, H_v, d_v]; the state is overwritten, which autograd hears of by its version."""
    from gdn2.ops.triton import step as kernel  # noqa: PLC0415 (optional dependency)

    o = kernel.step(q, k, v, g, b, w, scale, state, state)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)
    return o


torch.library.register_fake(
    "gdn2::step",
    lambda q, k, v, g, b, w, scale, state: (v.new_empty(v.shape), state.new_empty(state.shape)),
)
torch.library.register_fake(
    "gdn2::step_inplace",
    lambda q, k, v, g, b, w, scale, state: v.new_empty(v.shape),
)
