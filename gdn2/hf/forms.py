"""The forms in which others hold our tensors, and whether theirs are all there and of the right shapes."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gdn2.hf.naming import Pair
from gdn2.models.weights import some
from gdn2.ops.arguments import DTYPES, require

Tensors = Mapping[str, Tensor]


def to_ours(tensors: Tensors, pairs: Iterable[Pair], head_dim: int = 0) -> dict[str, Tensor]:
    """Their tensors by our names and in our forms; `head_dim` is that of attention, if there is any."""
    found: dict[str, Tensor] = {}
    for owns, other in pairs:
        tensor = tensors[other]
        parts = _split(other, tensor, head_dim) if len(owns) > 1 else [_flat(owns[0], tensor)]
        found |= dict(zip(owns, parts, strict=True))
    return found


def to_theirs(weights: Tensors, pairs: Iterable[Pair], head_dim: int = 0) -> dict[str, Tensor]:
    """Our tensors by their names and in their forms, from which `to_ours` makes them again."""
    found: dict[str, Tensor] = {}
    for owns, other in pairs:
        parts = [weights[own] for own in owns]
        found[other] = _fuse(parts, head_dim) if len(parts) > 1 else _deep(owns[0], parts[0])
    return found


def check_complete(found: Collection[str], pairs: Iterable[Pair], whole: str) -> None:
    """Refuse names that are missing, left over, or those of two of our tensors; all of them are `whole`."""
    owners = Counter(other for _, other in pairs)
    twice = [name for name, count in owners.items() if count > 1]
    require(not twice, "checkpoint", f"{some(twice)} for two parts", "a tensor for each")
    names, expected = set(found), set(owners)
    strange = {"no": expected - names, "unexpected": names - expected}
    got = " and ".join(f"{kind} {some(those)}" for kind, those in strange.items() if those)
    require(not got, "checkpoint", got, whole)


def check_fit(weights: Tensors, names: Mapping[str, str], module: nn.Module) -> None:
    """Refuse weights that are no values of a module's parameters, by the names that others give them."""
    for own, parameter in module.named_parameters():
        weight, name = weights[own], f"checkpoint: {names[own]}"
        got, expected = tuple(weight.shape), tuple(parameter.shape)
        require(got == expected, name, f"shape {got}", expected)
        require(weight.dtype in DTYPES, name, weight.dtype, "fp64, fp32, bf16 or fp16")


def _flat(own: str, tensor: Tensor) -> Tensor:
    """A convolution's weight [channels, 1, width] without its middle."""
    is_depthwise = "_conv." in own and tensor.ndim == 3 and tensor.shape[1] == 1
    return tensor.squeeze(1) if is_depthwise else tensor


def _deep(own: str, tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1) if "_conv." in own else tensor


def _split(name: str, fused: Tensor, head_dim: int) -> list[Tensor]:
    """Queries, keys and values of rows that are grouped by head."""
    fits = fused.ndim == 2 and fused.shape[0] % (3 * head_dim) == 0
    expected = f"rows of queries, keys and values of heads of {head_dim}"
    require(fits, f"checkpoint: {name}", f"shape {tuple(fused.shape)}", expected)
    grouped = fused.unflatten(0, (-1, 3, head_dim))
    return [grouped[:, part].flatten(0, 1) for part in range(3)]


def _fuse(parts: Sequence[Tensor], head_dim: int) -> Tensor:
    grouped = [part.unflatten(0, (-1, head_dim)) for part in parts]
    return torch.stack(grouped, 1).flatten(0, 2)
