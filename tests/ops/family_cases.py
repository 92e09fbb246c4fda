"""The models of the family, each as its literal recurrence and on the operator, behind one interface."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2 import gated_delta_rule, gated_delta_step
from gdn2.ops import family
from gdn2.ops.mamba3 import Mamba3State, mamba3, mamba3_step
from gdn2.ops.rotary import cumulative_rotation, rotate_pairs
from tests.ops import literal

B, T, H, K, V = 2, 37, 3, 8, 6

Inputs = dict[str, Tensor]
State = tuple[Tensor, ...]
Outcome = tuple[Tensor, State]

# Shape behind batch and length, and what makes a normal draw a sensible value.
KINDS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "q": ((H, K), lambda x: F.normalize(x, dim=-1)),
    "k": ((H, K), lambda x: F.normalize(x, dim=-1)),
    "v": ((H, V), lambda x: x),
    "g": ((H, K), lambda x: -F.softplus(x)),
    "g_head": ((H,), lambda x: -F.softplus(x)),
    "beta": ((H,), lambda x: 2 * x.sigmoid()),
    "b": ((H, K), lambda x: 2 * x.sigmoid()),
    "w": ((H, V), torch.sigmoid),
    "one_key": ((K,), lambda x: x),
    "one_query": ((K,), lambda x: x),
    "dt": ((H,), F.softplus),
    "lam": ((H,), torch.sigmoid),
    "rate": ((H,), lambda x: -F.softplus(x)),
    "angle": ((2,), lambda x: x),
}


class Model(NamedTuple):
    inputs: dict[str, str]  # name of each raw input → its kind
    start: tuple[tuple[int, ...], ...]  # shape of a sequence's state
    literal: Callable[[Inputs, State], Outcome]
    rule: Callable[[Inputs, State | None, Tensor | None, str], Outcome]
    step: Callable[[Inputs, State], Outcome]


def on_operator(
    inputs: str,
    oracle: Callable[..., literal.Run],
    pattern: Callable[..., family.Pattern],
    skip: Callable[[Inputs], Tensor | float] = lambda x: 0.0,
) -> Model:
    def rule(x: Inputs, state: State | None, cu_seqlens: Tensor | None, backend: str) -> Outcome:
        o, S = gated_delta_rule(
            **pattern(**x),
            initial_state=None if state is None else state[0],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=backend,
            chunk_size=16,
        )
        assert S is not None
        return o + skip(x), (S,)

    def step(x: Inputs, state: State) -> Outcome:
        o, S = gated_delta_step(**pattern(**x), state=state[0])
        return o + skip(x), (S,)

    def run(x: Inputs, state: State) -> Outcome:
        o, S = oracle(**x, S=state[0])
        return o, (S,)

    named = (word.partition(":") for word in inputs.split())
    kinds = {name: kind or name for name, _, kind in named}
    return Model(kinds, ((H, K, V),), run, rule, step)


def on_mamba3(rank: int) -> Model:
    """Keys and queries are drawn unrotated; the state carries the angle as a fourth part."""

    def rotated(
        x: Inputs, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        start = None if state is None else state[3]
        theta = cumulative_rotation(x["angle"], x["dt"], initial_angle=start, cu_seqlens=cu_seqlens)
        q, k = (rotate_pairs(x[n], theta.unsqueeze(2)) for n in ("q", "k"))
        if cu_seqlens is None and start is not None:
            theta = torch.cat([start.unsqueeze(1), theta], 1)
        return [q, k, x["v"], x["rate"] * x["dt"], x["dt"], x["lam"]], theta[:, -1]

    def rule(x: Inputs, state: State | None, cu_seqlens: Tensor | None, backend: str) -> Outcome:
        operands, theta = rotated(x, state, cu_seqlens)
        start = None if state is None else Mamba3State(*state[:3])
        o, end = mamba3(
            *operands, state=start, cu_seqlens=cu_seqlens, backend=backend, chunk_size=16
        )
        return o, (*end, theta)

    def step(x: Inputs, state: State) -> Outcome:
        operands, theta = rotated(x, state, None)
        o, end = mamba3_step(*operands, state=Mamba3State(*state[:3]))
        return o, (*end, theta)

    def run(x: Inputs, state: State) -> Outcome:
        turn = math.pi * x["angle"].tanh().unsqueeze(2) * x["dt"].unsqueeze(3)
        S, k, v, theta = state
        operands = (x["q"], x["k"], x["v"], x["rate"], x["dt"], x["lam"], turn)
        return literal.mamba3(*operands, (S, k, v, theta))

    kinds = {n: n for n in ("q", "k", "v", "rate", "dt", "lam", "angle")}
    start = ((H, K, V), (rank, H, K), (rank, H, V), (H, 2))
    return Model(kinds, start, run, rule, step)


RATE, SKIP = torch.tensor([[-0.3, -1.0, -4.0], [1.0, -0.5, 2.0]], dtype=torch.float64)


def read(q: Tensor) -> Tensor:
    return q * K**-0.5


MODELS = {
    "linear attention": on_operator(
        "q k v",
        lambda q, k, v, S: literal.linear_attention(read(q), k, v, S),
        family.linear_attention,
    ),
    "GLA": on_operator(
        "q k v g", lambda q, k, v, g, S: literal.gla(read(q), k, v, g.exp(), S), family.gla
    ),
    "DeltaNet": on_operator(
        "q k v beta",
        lambda q, k, v, beta, S: literal.delta_net(read(q), k, v, beta, S),
        family.delta_net,
    ),
    "Gated DeltaNet": on_operator(
        "q k v g:g_head beta",
        lambda q, k, v, g, beta, S: literal.gated_delta_net(read(q), k, v, g.exp(), beta, S),
        family.gated_delta_net,
    ),
    "KDA": on_operator(
        "q k v g beta",
        lambda q, k, v, g, beta, S: literal.kda(read(q), k, v, g.exp(), beta, S),
        family.kda,
    ),
    "Gated DeltaNet-2": on_operator(
        "q k v g b w",
        lambda q, k, v, g, b, w, S: literal.gated_delta_net_2(read(q), k, v, g.exp(), b, w, S),
        family.gated_delta_net_2,
    ),
    "Mamba-2": on_operator(
        "x:v B:one_key C:one_query dt",
        lambda x, B, C, dt, S: literal.mamba2(x, B, C, dt, RATE, SKIP, S),
        lambda x, B, C, dt: family.mamba2(C.unsqueeze(2), B.unsqueeze(2), x, RATE * dt, dt),
        lambda x: SKIP[:, None] * x["x"],
    ),
    "Mamba-3 SISO": on_mamba3(1),
    "Mamba-3 MIMO": on_mamba3(3),
}


def draw(model: Model, batch: int, sequences: int, seed: int = 0) -> tuple[Inputs, State]:
    """Raw inputs of `batch` rows of T tokens and states of `sequences`, as leaves."""
    rand = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rand, dtype=torch.float64)

    rank = model.start[1][:1] if len(model.start) > 1 else ()
    inputs = {}
    for name, kind in model.inputs.items():
        tail, shape = KINDS[kind]
        ranks = rank if kind in ("q", "k", "v") else ()
        inputs[name] = shape(normal(batch, T, *ranks, *tail)).requires_grad_()
    return inputs, tuple(normal(sequences, *s).requires_grad_() for s in model.start)


def cut(x: Inputs, first: int, last: int) -> Inputs:
    return {n: t[:, first:last] for n, t in x.items()}
