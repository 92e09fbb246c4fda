"""The next token of each row, from its logits and its own stream of random numbers.

A row's random numbers come from its seed and from how many it has drawn, and nothing else: neither its neighbours in
the batch, nor the device, nor what ran before can change them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.arguments import require, whole

# splitmix64, its constants as int64, whose products wrap
STEP = -7046029254386353131
FACTORS = (-4658895280553007687, -7723592293110705685)

MOST_PENALTY = 1e6  # with logits of thousands still far from what fp32 holds


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose a token: filters apply in the order of the fields, each to what the one before has left."""

    # Divides positive logits of tokens in the row, multiplies negative ones.
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # the k likeliest tokens
    top_p: float = 1.0  # the likeliest tokens that together have this probability
    min_p: float = 0.0  # tokens at least this likely, relative to the likeliest

    def __post_init__(self) -> None:
        for name in ("repetition_penalty", "temperature", "top_p", "min_p"):
            value = getattr(self, name)
            require(isinstance(value, Real), name, repr(value), "a number")
        if self.top_k is not None:
            whole("top_k", self.top_k)
        fits = 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY
        expected = f"{1 / MOST_PENALTY:g} to {MOST_PENALTY:g}"
        require(fits, "repetition_penalty", self.repetition_penalty, expected)
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "at least 0")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "None or at least 1")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1


GREEDY = Sampling(temperature=0.0)


class Draws(NamedTuple):
    """What the choice of a row's next token depends on besides its logits."""

    seeds: Tensor  # [rows] int64
    drawn: Tensor  # [rows] int64, numbers taken so far
    # [rows, vocabulary] bool, tokens in the row; no columns where nothing is penalised.
    present: Tensor

    @classmethod
    def start(
        cls,
        seeds: Sequence[int],
        sampling: Sampling,
        vocabulary: int,
        history: Sequence[Tensor],
        device: torch.device,
    ) -> "Draws":
        """Before the first draw of rows with these seeds and these tokens already in them."""
        signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
        own = torch.tensor(signed, dtype=torch.int64, device=device)
        width = vocabulary if sampling.penalises else 0
        present = torch.zeros(len(signed), width, dtype=torch.bool, device=device)
        if sampling.penalises:
            for row, tokens in zip(present, history, strict=True):
                row[tokens.to(device)] = True
        return cls(own, torch.zeros_like(own), present)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Draws":
        """The same with `change` applied to every tensor."""
        return Draws(*map(change, self))


def sample(logits: Tensor, sampling: Sampling, draws: Draws) -> Tensor:
    """Tokens [rows] from logits [rows, vocabulary]; `draws` go on in place."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.penalises:
        penalty = torch.where(
            scores > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty
        )
        scores = torch.where(draws.present, scores * penalty, scores)
    if sampling.temperature == 0:
        tokens = scores.argmax(-1)
    else:
        p = filtered(_heated(scores, sampling.temperature), sampling).softmax(-1)
        tokens = choose(p, uniform(draws.seeds, draws.drawn))
    draws.drawn.add_(1)
    if sampling.penalises:
        draws.present.scatter_(1, tokens.unsqueeze(1), True)
    return tokens


def filtered(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scores with −∞ where a token may not be chosen."""
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:
        p, order = scores.softmax(-1).sort(descending=True, stable=True)
        enough = p.cumsum(-1) - p >= sampling.top_p  # without this token
        enough[..., 0] = False  # rounding must not leave nothing
        scores = scores.masked_fill(enough.scatter(-1, order, enough), -math.inf)
    if sampling.min_p > 0:
        least = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def choose(p: Tensor, u: Tensor) -> Tensor:
    """The token [rows] in whose part of the cumulative probability of p [rows, vocabulary] u [rows] lies.

    In the vocabulary's order, so that a rounding of p moves the borders by no more than itself.
    """
    cumulative = p.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total, so that tokens of probability zero at the end are never reached.
    target = torch.minimum(u.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return found.clamp(max=p.shape[-1] - 1)


def uniform(seeds: Tensor, drawn: Tensor) -> Tensor:
    """The number in [0, 1) that each row draws next, in fp64: splitmix64 of its seed, mixed once more."""
    bits = _mixed(_mixed(seeds + STEP) + (drawn + 1) * STEP)
    return _shifted(bits, 11).double() * 2.0**-53


def _heated(scores: Tensor, temperature: float) -> Tensor:
    """Scores over the temperature, the row's highest at zero: however small it is, the likeliest token stays finite."""
    # Not below the least normal number, whose reciprocal is finite: zero times infinity is no number.
    divisor = max(temperature, torch.finfo(scores.dtype).tiny)
    return (scores - scores.amax(-1, keepdim=True)) / divisor


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * FACTORS[0]
    x = (x ^ _shifted(x, 27)) * FACTORS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted to the right, with zeros in front."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
