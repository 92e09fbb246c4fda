"""The state of the recurrent layers: ranges of their gates, how many are saturated, and norms of their memories."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gdn2.data.batch import Batch
from gdn2.layers.delta import DeltaMixer
from gdn2.models.language_model import LanguageModel
from gdn2.ops.backends import in_force, using
from gdn2.training.step import loss_of

SATURATED = 0.01  # of its range, from either end


class _RuleCalls(TorchDispatchMode):
    """Sees what every call of the rule gets and makes, whichever mixer calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Tensor, Tensor | None, Tensor | None, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.gdn2.chunk_forward.default:
            _, _, _, g, b, w, *_ = args
            self.seen.append((g, b, w, made[1]))
        return made


@torch.no_grad()
def health(model: LanguageModel, batch: Batch) -> dict[str, dict[str, Any]]:
    """For each recurrent block, by its number: decay, gates where it has them, and the mean norm of a final state."""
    calls = _RuleCalls()
    # The token loop is no call of an operator that could be seen.
    backend = "torch" if in_force() == "reference" else in_force()
    with using(backend), calls:
        loss_of(model, batch, model.embedding.weight.device)
    kinds = model.config.layer_types
    blocks = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
    found = {}
    for i, (g, b, w, state) in zip(blocks, calls.seen, strict=True):
        found[str(i)] = {"decay": _range(g.exp()), "state_norm": _mean_norm(state)}
        mixer = model.mixers[i]
        if isinstance(mixer, DeltaMixer) and b is not None and w is not None:
            found[str(i)]["erase"] = _gate(b, mixer.config.erase_range)
            tied = mixer.config.gates == "tied"
            found[str(i)]["write"] = _gate(w, mixer.config.erase_range if tied else 1.0)
    return found


def _range(x: Tensor) -> dict[str, float]:
    x = x.float()
    return {"low": float(x.min()), "mean": float(x.mean()), "high": float(x.max())}


def _gate(gate: Tensor, most: float) -> dict[str, float]:
    part = gate.float() / most
    saturated = ((part < SATURATED) | (part > 1 - SATURATED)).float().mean()
    return {**_range(gate), "saturated": float(saturated)}


def _mean_norm(state: Tensor) -> float:
    return float(state.flatten(-2).norm(dim=-1).mean())
