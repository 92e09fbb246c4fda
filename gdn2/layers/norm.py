"""RMS norms with their weights."""

import torch
from torch import Tensor, nn

from gdn2.layers.bare import is_bare
from gdn2.ops.norm import GateActivation, add_rms_norm, gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """norm(x) = x / sqrt(mean x² + eps) ⊙ weight, perhaps with a gate."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(
        self,
        x: Tensor,
        gate: Tensor | None = None,
        activation: GateActivation = "silu",
        gate_first: bool = False,
    ) -> Tensor:
        """norm(x); norm(x) ⊙ act(gate), or norm(x ⊙ act(gate)) with the gate first."""
        if gate is None:
            return rms_norm(x, self.weight, self.eps)
        return gated_rms_norm(
            x, gate, self.weight, self.eps, activation=activation, gate_first=gate_first
        )


def add_and_normalise(norm: nn.Module, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum x + delta, and its norm; a norm with hooks or of another class, as an adapter, is called."""
    if delta is not None and is_bare(norm, RMSNorm):
        assert isinstance(norm, RMSNorm)
        return add_rms_norm(x, delta, norm.weight, norm.eps)
    x = x if delta is None else x + delta
    return x, norm(x)
