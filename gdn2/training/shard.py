"""One model over many processes: FSDP2 shards its matrices, its vectors are whole everywhere.

Vectors are norms, biases and the parameters of decays and step sizes (`param_groups`), a thousandth of a model. Left
out of FSDP they stay in fp32 where matrices are computed in bf16: the rounding of a decay would add up over the tokens.
Their gradients are averaged by `synchronise`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import linear

from gdn2.layers.attention import AttentionMixer
from gdn2.layers.joint import lay_in_blocks
from gdn2.models.config import ModelConfig
from gdn2.models.initialisation import initialise
from gdn2.models.language_model import LanguageModel
from gdn2.models.param_groups import group_of
from gdn2.ops.arguments import state_dtype
from gdn2.ops.squares import sum_of_squares
from gdn2.training.narrow import NarrowCopies
from gdn2.training.world import World

_COPIES = "_narrow_copies"  # of a model, where it has any


def build_model(
    config: ModelConfig,
    *,
    seed: int,
    world: World,
    weights: torch.dtype,
    compute: torch.dtype,
    compile: bool,
    checkpoint_blocks: bool = False,
    recompute: bool = True,
) -> LanguageModel:
    """A model on the world's device, with the same bits in its first weights whatever the number of processes.

    Args:
        config: of the model.
        seed: of its first weights.
        world: the processes that share it.
        weights: dtype the optimiser sees; decays and step sizes are fp32 in any case.
        compute: dtype of the matrices while computing.
        compile: compile each block.
        checkpoint_blocks: keep only the blocks' inputs for the backward.
        recompute: what each chunk of a recurrent mixer can compute on its own, instead of keeping it.
    """
    with torch.device("meta"):
        model = LanguageModel(config)
    model.cast(weights)
    model.checkpoint_blocks(checkpoint_blocks)
    model.recompute_factors(recompute)
    if compile:
        _compile(model)
    if weights != compute:
        _let_biases_be_wide(model)
    if world.mesh is not None:
        _shard(model, world.mesh, None if weights == compute else compute)
    model.to_empty(device=world.device)
    initialise(model, config, seed, place)
    if world.mesh is None:
        if weights == compute:
            lay_in_blocks(model)
        else:
            setattr(model, _COPIES, NarrowCopies(model, compute))
    return model


def accumulate(model: LanguageModel, last: bool) -> None:
    """Call before each forward of a step: gradients stay where they are until the last backward."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)


def synchronise(model: LanguageModel, world: World) -> None:
    """Average the gradients of the vectors, and let the parameters be those that are trained.

    Call once a step, after the last backward, before anybody looks at gradients or moves weights.
    """
    _take_out_copies(model)
    vectors = [x.grad for x in model.parameters() if not isinstance(x, DTensor)]
    gradients = [gradient for gradient in vectors if gradient is not None]
    if world.size == 1 or not gradients:
        return
    flat = world.mean(torch.cat([gradient.float().flatten() for gradient in gradients]))
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def gradient_norm(model: LanguageModel, world: World) -> Tensor:
    """The norm of all gradients together, in fp32; nothing here waits for a GPU."""
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    sharded = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    squares = sum_of_squares(sharded, world.device)
    if world.mesh is not None:
        dist.all_reduce(squares, group=world.mesh.get_group("shard"))
    return (squares + sum_of_squares(whole, world.device)).sqrt()


def full_weights(model: LanguageModel, world: World) -> dict[str, Tensor] | None:
    """Copies of all weights on the CPU of the main process; None in the others, which must call it too."""
    reshard(model)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if world.is_main:
            weights[name] = whole.to("cpu", copy=True)
    return weights if world.is_main else None


def whole_model(config: ModelConfig, weights: dict[str, Tensor]) -> LanguageModel:
    """A plain model that holds these weights, to be saved or to write text with."""
    with torch.device("meta"):
        model = LanguageModel(config)
    model.load_state_dict(weights, assign=True)
    return model


def reshard(model: nn.Module) -> None:
    """Free the whole weights that a forward without backward has left; its parameters are those that are trained."""
    _take_out_copies(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _take_out_copies(model: nn.Module) -> None:
    copies: NarrowCopies | None = getattr(model, _COPIES, None)
    if copies is not None:
        copies.take_out()


class _WideBias(nn.Linear):
    """A linear map whose bias has a wider dtype than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return linear(x, self.weight, self.bias.to(x.dtype))


def _compile(model: LanguageModel) -> None:
    """Compile the blocks' methods, not the blocks: hooks stay outside, parameters keep their names."""
    model.blocks[0].register_forward_pre_hook(_add_zeros)
    for block in model.blocks:
        block.register_forward_pre_hook(_make_tables)
        block.forward = torch.compile(block.forward)


def _add_zeros(block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the first block zeros to add, with a gradient like any, or its graph would be one of its own.

    Dynamo makes eight graphs of a method and leaves the rest uncompiled.
    """
    x, delta, *others = arguments
    if delta is None:
        delta = torch.zeros_like(x, requires_grad=x.requires_grad)
    return x, delta, *others


def _make_tables(block: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Make what attention shares through the layout before the block runs.

    Made inside, the graph of the first to ask would not be that of the others, nor that of its own second run where
    blocks are checkpointed.
    """
    x, _delta, _state, layout, _inplace = arguments
    if isinstance(block.mixer, AttentionMixer):
        config = block.mixer.config
        layout.rotary(config.head_dim, config.rotary_base, state_dtype(x), x.device)
        block.mixer.block_mask(layout, x.dtype, x.device)


def _shard(model: LanguageModel, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    """Spread the matrices over the last axis of a mesh; `compute` is the dtype they are gathered in, None their own.

    Gathered weights stay until the last backward of a step, so they travel once a step and not twice a micro-batch;
    1.3B of them take 2.6 GB.
    """
    named = model.named_parameters()
    vectors = {x for name, x in named if group_of(name, x) == "vectors"}
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(
            module, mesh=mesh, mp_policy=policy, ignored_params=vectors, reshard_after_forward=False
        )


def _let_biases_be_wide(model: LanguageModel) -> None:
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is not None:
            module.__class__ = _WideBias


def place(parameter: nn.Parameter, value: Tensor) -> None:
    """Put its part of a whole value into a parameter, without asking the other processes."""
    target: Tensor = parameter.detach()
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(value)
