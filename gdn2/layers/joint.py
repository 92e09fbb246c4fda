"""Linear maps of one input: as one product for inference, with one gradient of the input for training.

A product with few rows reads every weight once and computes little: its time is that of reading. Small matrices are
read by one core of a CPU or by a part of a GPU, a large one by all; and each product of its own is one more to start.
So weights of maps that take the same input are laid side by side in one block of memory, of which each parameter is a
part, and the block is multiplied at once.

In training on a GPU each map would leave a gradient of the input, to be added up by kernels that only read and write;
there the products of the backward add to one another (`gdn2.ops.maps`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gdn2.layers.bare import is_bare
from gdn2.ops.linear import linear
from gdn2.ops.maps import maps as together


def joint(x: Tensor, *maps: nn.Linear) -> Sequence[Tensor]:
    """What each of the maps makes of x: one product where gradients are not needed and their weights lie side by side.

    On a CPU only of a single row: there its block is laid out for that. With gradients those of x add to one another.
    """
    if torch.is_grad_enabled():
        if _adds_gradients(x) and _are_alike(x, maps):
            return together(x, [map_.weight for map_ in maps])
    elif x.is_cuda or x.numel() == x.shape[-1]:
        block = _block(maps)
        if block is not None:
            return linear(x, block).split([map_.out_features for map_ in maps], -1)
    return tuple(map_(x) for map_ in maps)


def single(map_: nn.Module, x: Tensor) -> Tensor:
    """What a map makes of x; one with hooks or of another class, as an adapter, is called."""
    if not torch.is_grad_enabled() and is_bare(map_, nn.Linear):
        assert isinstance(map_, nn.Linear)
        return linear(x, map_.weight, map_.bias)
    return map_(x)


def lay_side_by_side(root: nn.Module) -> None:
    """Lay the weights of maps that modules name as their `joint_maps` in blocks: by rows, on a CPU by columns.

    There other linear maps are laid out by columns too, which more than one core can read for a single row. Values stay
    and no memory is taken, but results may differ in their last bits.
    """
    groups: list[list[nn.Linear]] = [getattr(m, "joint_maps", []) for m in root.modules()]
    joined = {map_ for group in groups for map_ in group}
    alone = [[m] for m in root.modules() if type(m) is nn.Linear and m not in joined]
    for group in filter(None, [*groups, *alone]):
        weights = [map_.weight for map_ in group]
        if weights[0].device.type == "cpu":
            block = torch.cat([weight.data.t() for weight in weights], 1).t()
        elif len(weights) > 1:
            block = torch.cat([weight.data for weight in weights])
        else:
            continue
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

    Found by where they lie, at each call: a weight that was given other memory has left its block. A map with a bias or
    hooks, or of another class, such as an adapter, is more than its weight.
    """
    if not all(_is_product(map_) for map_ in maps):
        return None
    first: Tensor = maps[0].weight
    strides, dtype, outputs = first.stride(), first.dtype, 0
    end = start = first.data_ptr()
    for map_ in maps:
        weight = map_.weight
        if weight.data_ptr() != end or weight.dtype != dtype or weight.stride() != strides:
            return None
        outputs += map_.out_features
        end = start + outputs * strides[0] * first.element_size()
    # neighbours in memory that was taken piece by piece are no block
    if maps[-1].weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    by_rows, by_columns = first.stride(1) == 1, first.stride(0) == 1 and outputs <= first.stride(1)
    if not (by_rows or by_columns):
        return None
    return first.as_strided((outputs, first.shape[1]), first.stride())


def _is_product(map_: nn.Module) -> bool:
    return is_bare(map_, nn.Linear) and map_._parameters["bias"] is None
