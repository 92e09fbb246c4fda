"""Matrices computed in fewer bits than they are trained in, by a process alone; where there are many, FSDP2 does that.

All are copied once a step. Nothing is cast, sharded or gathered on the way, and copies lie as products like them best.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gdn2.layers.joint import lay_in_blocks
from gdn2.models.param_groups import group_of


class NarrowCopies:
    """Copies that stand in for a model's matrices, from a call of the model until they are taken out.

    Outside of that the model's parameters are the wide ones. Theirs are all gradients: those of a single backward as
    they were computed, for an optimiser to widen while it reads them, and sums of several as wide as the parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Make room for the copies; the model has its memory and its first weights."""
        matrices = [x for name, x in model.named_parameters() if group_of(name, x) != "vectors"]
        self._copies = {wide: _room(wide, dtype) for wide in matrices}
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter in self._copies
        ]
        self._are_in = False
        self._put_in(model)
        lay_in_blocks(model)
        self.take_out()
        model.register_forward_pre_hook(self._put_in)

    def take_out(self) -> None:
        """Let the model's parameters be the wide ones again."""
        for module, name, wide in self._places:
            module._parameters[name] = wide
        self._are_in = False

    @torch.no_grad()
    def _put_in(self, model: nn.Module, inputs: Any = None) -> None:
        if not self._are_in:
            torch._foreach_copy_([*self._copies.values()], [*self._copies])
            for wide, narrow in self._copies.items():
                narrow.requires_grad_(wide.requires_grad)
            for module, name, wide in self._places:
                module._parameters[name] = self._copies[wide]
            self._are_in = True


def _room(wide: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """What holds a copy and leaves its gradients to the wide one."""
    wide.grad_dtype = None  # any
    narrow = nn.Parameter(torch.empty_like(wide, dtype=dtype))
    narrow.register_post_accumulate_grad_hook(_passing_on_to(wide))
    return narrow


def _passing_on_to(wide: nn.Parameter) -> Callable[[Tensor], None]:
    def pass_on(narrow: Tensor) -> None:
        found, before = narrow.grad, wide.grad
        assert found is not None
        narrow.grad = None
        wide.grad = found if before is None else before.to(wide.dtype).add_(found)

    return pass_on
