"""The forms of the rule that are timed: the operands of each, and how our operator takes them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

Operands = dict[str, Tensor]
FORMS = ("gdn2", "gdn", "kda", "mamba2")
SHARING = ("gdn2", "gdn")  # whose value heads may be several for each head


class Sizes(NamedTuple):
    """Sizes of the operands."""

    batch: int
    length: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int


def make_operands(form: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Operands:
    """Operands with gates as the paper initialises them: rates in U(1, 16), steps from 1e-3 to 1e-1.

    Gated DeltaNet-2 has a decay and gates for every channel; KDA has one gate for all channels of a head, which erases
    and writes; Gated DeltaNet also one decay, and Mamba-2 one decay and no gates. Of value heads that share a head each
    has a decay and a gate of its own in Gated DeltaNet, and a write gate alone in Gated DeltaNet-2.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rand = torch.Generator(device).manual_seed(0)
    batch, length, heads, value_heads, d_k, d_v = sizes

    def normal(width: int, heads: int = heads) -> Tensor:
        return torch.randn((batch, length, heads, width), generator=rand, dtype=wide, device=device)

    own = value_heads if form == "gdn" else heads
    decays = 1 if form in ("gdn", "mamba2") else d_k
    chance = torch.rand((2, own, decays), generator=rand, dtype=wide, device=device)
    rate, step = 1 + 15 * chance[0, :, :1], 10 ** (2 * chance[1] - 3)
    bias = step + torch.log(-torch.expm1(-step))  # softplus(bias) = step
    g = -rate * softplus(0.5 * normal(decays, own) + bias)
    q, k = (normalize(normal(d_k), dim=-1).to(dtype) for _ in range(2))
    operands = {"q": q, "k": k, "v": normal(d_v, value_heads).to(dtype), "g": g}
    if form == "gdn2":
        operands["w"] = normal(d_v, value_heads).sigmoid().to(dtype)
        operands["b"] = normal(d_k).sigmoid().to(dtype)
    if form in ("gdn", "kda"):
        operands["beta"] = normal(1, own).sigmoid().to(dtype)
    return {name: x.requires_grad_() for name, x in operands.items()}


def own_arguments(operands: Operands) -> Operands:
    """The operands as our operator names them: what is tied is given twice."""
    given = dict(operands)
    if "beta" in given:
        given["b"] = given["w"] = given.pop("beta")
    return given
