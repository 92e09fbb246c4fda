"""The MLP of a block."""

import torch
from torch import Tensor, nn

from gdn2.layers.joint import joint, multiplies, single
from gdn2.ops.swiglu import swiglu, swiglu_linear


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) ⊙ up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    @property
    def joint_maps(self) -> list[nn.Linear]:
        return [self.gate_proj, self.up_proj]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joint(x, self.gate_proj, self.up_proj, kept=True)
        if torch.is_grad_enabled() and multiplies(self.down_proj, gate):
            return swiglu_linear(gate, up, self.down_proj.weight)
        return single(self.down_proj, swiglu(gate, up))
