"""Linear maps of one input: as one product for inference, with one gradient of the input for training.

A product with few rows reads every weight once and computes little: its time is that of reading. Small matrices are
read by one core of a CPU or by a part of a GPU, a large one by all; and each product of its own is one more to start.
So weights of maps that take the same input are laid side by side in one block of memory, of which each parameter is a
part, and the block is multiplied at once.

In training on a GPU each map would leave a gradient of the input, to be added up by kernels that only read and write;
there the products of the backward add to one another, and with weights side by side they are one (`gdn2.ops.maps`).
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from gdn2.layers.bare import is_bare
from gdn2.ops.linear import linear
from gdn2.ops.maps import maps as together
from gdn2.ops.maps import side_by_side
from gdn2.ops.products import is_chosen


def joint(x: Tensor, *maps: nn.Linear, laid: bool = False, kept: bool = False) -> Sequence[Tensor]:
    """What each of the maps makes of x: one product where gradients are not needed and their weights lie side by side.

    On a CPU only of a single row: there its block is laid out for that. Where weights lie is nothing a compiler knows.
    With gradients those of x add to one another.

    Args:
        x: [..., inputs].
        maps: of the same input.
        laid: whether `lay_in_blocks` has laid out the weights, so that gradients are worth being joined.
        kept: whether all results are needed until the backward, so that they may be one tensor at no cost.
    """
    if torch.is_grad_enabled():
        if _adds_gradients(x) and _are_alike(x, maps):
            weights = [map_.weight for map_ in maps]
            return together(x, weights, one_output=kept, one_gradient=laid)
    elif not torch.compiler.is_compiling() and (x.is_cuda or x.numel() == x.shape[-1]):
        block = _block(maps)
        if block is not None:
            return linear(x, block).split([map_.out_features for map_ in maps], -1)
    return tuple(map_(x) for map_ in maps)


def have_one_gradient(x: Tensor, maps: Sequence[nn.Linear]) -> bool:
    """Whether all gradients of maps that only multiply are needed, and those of x better added by products."""
    if not torch.is_grad_enabled() or not _adds_gradients(x) or not _are_alike(x, maps):
        return False
    return x.requires_grad and all(map_.weight.requires_grad for map_ in maps)


def single(map_: nn.Module, x: Tensor) -> Tensor:
    """What a map makes of x; one with hooks or of another class, as an adapter, is called."""
    if not torch.is_grad_enabled() and is_bare(map_, nn.Linear):
        return linear(x, map_.weight, map_.bias)
    if is_chosen(x.device) and isinstance(map_, nn.Linear) and multiplies(map_, x):
        return together(x, [map_.weight])[0]
    return map_(x)


def lay_side_by_side(root: nn.Module) -> None:
    """Lay the weights of maps that modules name as their `joint_maps` in blocks: by rows, on a CPU by columns.

    There other linear maps are laid out by columns too, which more than one core can read for a single row. Values stay
    and no memory is taken, but results may differ in their last bits.
    """
    groups = [maps for _, maps in _joint_groups(root)]
    joined = {map_ for group in groups for map_ in group}
    alone = [[m] for m in root.modules() if _is_dense(m) and m not in joined]
    for group in filter(None, [*groups, *alone]):
        on_cpu = group[0].weight.device.type == "cpu"
        if on_cpu or len(group) > 1:
            _lay(group, by_columns=on_cpu)


def lay_in_blocks(root: nn.Module) -> None:
    """Lay weights as `lay_side_by_side` does on a GPU, for training: as they were, but next to each other.

    Only weights of one dtype that all begin at multiples of 16 bytes, as kernels like it. Modules that have a `laid`
    are told; weights that get other memory later are multiplied one by one again.
    """
    for module, maps in _joint_groups(root):
        aligned = all(map_.weight.nbytes % 16 == 0 for map_ in maps)
        if len(maps) > 1 and aligned and len({map_.weight.dtype for map_ in maps}) == 1:
            _lay(maps, by_columns=False)
            if hasattr(module, "laid"):
                module.laid = True  # type: ignore[assignment]


def _joint_groups(root: nn.Module) -> list[tuple[nn.Module, list[nn.Linear]]]:
    groups = ((module, getattr(module, "joint_maps", ())) for module in root.modules())
    return [(module, [*maps]) for module, maps in groups if maps and all(map(_is_dense, maps))]


def _is_dense(map_: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a map is its weight as it stands: others may store theirs as only they can read it."""
    return type(map_) is nn.Linear and type(map_.weight) is nn.Parameter


def _lay(maps: Sequence[nn.Linear], by_columns: bool) -> None:
    weights = [map_.weight for map_ in maps]
    if by_columns:
        block = torch.cat([weight.data.t() for weight in weights], 1).t()
    else:
        block = torch.cat([weight.data for weight in weights])
    for weight, part in zip(weights, block.split([len(w) for w in weights]), strict=True):
        weight.data = part


def _adds_gradients(x: Tensor) -> bool:
    """Whether gradients of x are better added by products than by kernels that wait for memory: on a GPU."""
    return x.is_cuda


def _are_alike(x: Tensor, maps: Sequence[nn.Linear]) -> bool:
    """Whether there are several maps that only multiply."""
    return len(maps) > 1 and all(multiplies(map_, x) for map_ in maps)


def multiplies(map_: nn.Linear, x: Tensor) -> bool:
    """Whether the map of x is a product with a dense weight in the dtype of x and nothing else, on the way back too."""
    if not _is_product(map_) or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
        return False
    return type(map_.weight) is nn.Parameter and map_.weight.dtype == x.dtype


def _block(maps: Sequence[nn.Linear]) -> Tensor | None:
    """The weight [all outputs, inputs] whose parts are the maps' weights, in this order, if there is one.

    A map with a bias or hooks, or of another class, such as an adapter, is more than its weight.
    """
    if not all(_is_product(map_) for map_ in maps):
        return None
    return side_by_side([map_.weight for map_ in maps], 0)


def _is_product(map_: nn.Module) -> bool:
    return is_bare(map_, nn.Linear) and map_._parameters["bias"] is None
