"""Linear maps of one input as one product, for decoding on a CPU.

A product with a single row reads every weight once and computes little: its time is that of reading. Small matrices are
read by one core, a large one by all. So weights of maps that take the same input are laid side by side in one block of
memory, of which each parameter is a part, and the block is multiplied at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def joint(x: Tensor, *maps: nn.Linear) -> Sequence[Tensor]:
    """What each of the maps makes of x; for a single row one product, where their weights lie side by side."""
    if x.numel() == x.shape[-1] and not torch.is_grad_enabled():
        block = _block(maps)
        if block is not None:
            return torch.matmul(x, block).split([map_.out_features for map_ in maps], -1)
    return tuple(map_(x) for map_ in maps)


def lay_side_by_side(module: nn.Module) -> None:
    """Lay the weights of a module's own linear maps out by columns, those of one width of input in one block.

    Values stay and no memory is taken, but results may differ in their last bits.
    """
    maps = [child for child in module.children() if type(child) is nn.Linear]
    for width in {map_.in_features for map_ in maps}:
        group = [map_ for map_ in maps if map_.in_features == width]
        block = torch.cat([map_.weight.data.t() for map_ in group], 1)
        parts = block.split([map_.out_features for map_ in group], 1)
        for map_, part in zip(group, parts, strict=True):
            map_.weight.data = part.t()


def _block(maps: Sequence[nn.Linear]) -> Tensor | None:
    """The matrix [inputs, all outputs] whose columns are the maps' weights, in this order, if there is one.

    Found by where they lie, at each call: a weight that was given other memory has left its block. A map of another
    class, such as an adapter, or one with a bias is more than its weight.
    """
    first, outputs = maps[0].weight, 0
    for map_ in maps:
        weight = map_.weight
        plain = type(map_) is nn.Linear and map_.bias is None and weight.dtype == first.dtype
        if not plain or weight.stride() != (1, first.stride(1)):
            return None
        if weight.data_ptr() != first.data_ptr() + outputs * first.element_size():
            return None
        outputs += map_.out_features
    if outputs > first.stride(1):
        return None
    return first.as_strided((first.shape[1], outputs), (first.stride(1), 1))
