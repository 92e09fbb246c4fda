"""Each mixer from its definition: plain products, one loop over the tokens, nothing of the package.

Parameters come as a state dict. Sequences start from nothing.
"""

import math

import torch
from torch import Tensor

from gdn2.layers.config import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
)
from tests.ops import literal

Parameters = dict[str, Tensor]
EPS = 1e-5


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """SiLU of the sum over the taps, the last of which meets the current token."""
    rows, width = [], weight.shape[1]
    for t in range(x.shape[1]):
        taps = [weight[:, -1 - i] * x[:, t - i] for i in range(width) if t >= i]
        rows.append(silu(torch.stack(taps).sum(0) + bias))
    return torch.stack(rows, 1)


def mixed(config: MixerConfig, p: Parameters, x: Tensor) -> Tensor:
    """What the mixer makes of x [batch, length, width]."""
    match config:
        case DeltaConfig():
            return delta(config, p, x)
        case Mamba2Config():
            return mamba2(config, p, x)
        case Mamba3Config():
            return mamba3(config, p, x)
        case AttentionConfig():
            return attention(config, p, x)


def mapped(p: Parameters, name: str, x: Tensor) -> Tensor:
    """A linear map, of full rank or through two matrices."""
    if f"{name}.weight" in p:
        return x @ p[f"{name}.weight"].T
    return x @ p[f"{name}.down.weight"].T @ p[f"{name}.up.weight"].T + p.get(f"{name}.up.bias", 0)


def delta(c: DeltaConfig, p: Parameters, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    heads, values = c.num_heads, c.value_heads
    group = values // heads

    def on_values(z: Tensor) -> Tensor:
        """Key head i serves value heads i · group … i · group + group − 1."""
        z = z.reshape(batch, length, heads, -1)
        return torch.stack([z[:, :, j // group] for j in range(values)], 2)

    q, k, v = (convolved(mapped(p, f"{n}_proj", x), p[f"{n}_conv.weight"]) for n in "qkv")
    q, k = unit(on_values(q)) * c.key_head_dim**-0.5, unit(on_values(k))
    v = v.reshape(batch, length, values, -1)
    alpha = torch.ones_like(k)
    if c.decay != "none":
        speed = softplus(mapped(p, "decay_proj", x) + p["decay_bias"]).reshape(
            *x.shape[:2], heads, -1
        )
        alpha = on_values((-p["decay_log_rate"].exp()[:, None] * speed).exp()).expand_as(k)
    S = x.new_zeros(batch, values, c.key_head_dim, c.value_head_dim)
    if c.gates == "tied":
        beta = c.erase_range * sigmoid(mapped(p, "beta_proj", x))
        o, _ = literal.kda(q, k, v, alpha, beta, S)
    else:
        b = c.erase_range * on_values(sigmoid(mapped(p, "erase_proj", x)))
        w = sigmoid(mapped(p, "write_proj", x)).reshape(v.shape)
        if c.erase_gate == "mean":
            b = (b.sum(-1, keepdim=True) / c.key_head_dim).expand_as(b)
        if c.write_gate == "mean":
            w = (w.sum(-1, keepdim=True) / c.value_head_dim).expand_as(w)
        o, _ = literal.gated_delta_net_2(q, k, v, alpha, b, w, S)
    o = rms(o, p["norm.weight"])
    if c.output_gate != "none":
        activation = {"silu": silu, "sigmoid": sigmoid}[c.output_gate]
        o = o * activation(mapped(p, "gate_proj", x)).reshape(o.shape)
    return o.reshape(batch, length, -1) @ p["out_proj.weight"].T


def mamba2(c: Mamba2Config, p: Parameters, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    inner, state = c.inner_size, c.state_size
    z, xBC, step = (x @ p["in_proj.weight"].T).split([inner, inner + 2 * state, c.num_heads], -1)
    v, B, C = convolved(xBC, p["conv.weight"], p["conv.bias"]).split([inner, state, state], -1)
    v = v.reshape(batch, length, c.num_heads, c.head_dim)
    dt, A = softplus(step + p["step_bias"]), -p["decay_log_rate"].exp()
    h = x.new_zeros(batch, c.num_heads, state, c.head_dim)
    y, _ = literal.mamba2(v, B, C, dt, A, p["skip"], h)
    return rms(y.reshape(batch, length, inner) * silu(z), p["norm.weight"]) @ p["out_proj.weight"].T


def mamba3(c: Mamba3Config, p: Parameters, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    heads, rank, state, angles = c.num_heads, c.rank, c.state_size, c.state_size // 4
    sizes = [c.inner_size, c.inner_size, rank * state, rank * state, heads, heads, heads, angles]
    z, v, B, C, step, rate, trapezoid, angle = (x @ p["in_proj.weight"].T).split(sizes, -1)
    dt = softplus(step + p["step_bias"])
    tail = torch.where(rate < 0, 1 / (1 - rate), 1 + rate)
    A = softplus(rate) if c.decay_rate == "softplus" else tail
    A = -torch.maximum(A, torch.tensor(1e-4, dtype=x.dtype))
    turn = math.pi * angle.tanh()[:, :, None] * dt[..., None]

    def ranks(y: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        y = rms(y.reshape(batch, length, rank, 1, state), norm)
        return y + bias.permute(1, 0, 2)

    k = ranks(B, p["key_norm.weight"], p["key_bias"])
    q = ranks(C, p["query_norm.weight"], p["query_bias"])
    z, v = (y.reshape(batch, length, 1, heads, -1) for y in (z, v))
    one = x.new_ones(heads, rank, c.head_dim)
    spread = {n: p.get(f"mimo_{n}", one).permute(1, 0, 2) for n in ("value", "gate", "out")}
    v = v * spread["value"]
    start = (
        x.new_zeros(batch, heads, state, c.head_dim),
        x.new_zeros(batch, rank, heads, state),
        x.new_zeros(batch, rank, heads, c.head_dim),
        x.new_zeros(batch, heads, angles),
    )
    o, _ = literal.mamba3(q, k, v, A, dt, sigmoid(trapezoid), turn, start)
    y = (o + p["skip"][:, None] * v) * silu(z * spread["gate"]) * spread["out"]
    return y.sum(2).reshape(batch, length, -1) @ p["out_proj.weight"].T


def attention(c: AttentionConfig, p: Parameters, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    q, k, v = ((x @ p[f"{n}_proj.weight"].T).reshape(batch, length, -1, c.head_dim) for n in "qkv")
    half = c.head_dim // 2
    speeds = torch.tensor([c.rotary_base ** (-i / half) for i in range(half)], dtype=x.dtype)
    outputs = []
    for t in range(length):
        first = 0 if c.window is None else max(0, t - c.window + 1)
        heads = []
        for head in range(c.num_heads):
            shared = head * c.kv_heads // c.num_heads
            query = turned(q[:, t, head], t * speeds)
            scores = [query * turned(k[:, s, shared], s * speeds) for s in range(first, t + 1)]
            weights = (torch.stack(scores, 1).sum(-1) / math.sqrt(c.head_dim)).softmax(-1)
            heads.append((weights[..., None] * v[:, first : t + 1, shared]).sum(1))
        outputs.append(torch.cat(heads, -1))
    return torch.stack(outputs, 1) @ p["out_proj.weight"].T


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Channels (i, i + d/2) of x [batch, d] as complex numbers, times exp(i · angle)."""
    real, imaginary = x.chunk(2, -1)
    z = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)
