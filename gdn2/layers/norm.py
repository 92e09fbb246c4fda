"""RMS norms with their weights."""

import torch
from torch import Tensor, nn

from gdn2.ops.norm import GateActivation, add_rms_norm, gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean x² + eps) ⊙ weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum x + delta, and its norm."""
        if delta is None:
            return x, self(x)
        return add_rms_norm(x, delta, self.weight, self.eps)

    def gated(
        self, x: Tensor, gate: Tensor, activation: GateActivation, gate_first: bool = False
    ) -> Tensor:
        """norm(x) ⊙ act(gate), or norm(x ⊙ act(gate)) with the gate first."""
        return gated_rms_norm(
            x, gate, self.weight, self.eps, activation=activation, gate_first=gate_first
        )
