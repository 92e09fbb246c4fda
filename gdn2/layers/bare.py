"""Which modules may be computed by other means than a call."""

from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules import module as torch_module

M = TypeVar("M", bound=nn.Module)


def is_bare(module: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether calling a module does what its class says and nothing else: no other class, as an adapter, no hooks."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    hooked = any(own) or "forward" in module.__dict__ or torch_module._has_any_global_hook()
    return type(module) is kind and not hooked
