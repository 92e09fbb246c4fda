"""The MLP of a block."""

from torch import Tensor, nn
from torch.nn.functional import silu

from gdn2.layers.joint import joint


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) ⊙ up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joint(x, self.gate_proj, self.up_proj)
        return self.down_proj(silu(gate) * up)
