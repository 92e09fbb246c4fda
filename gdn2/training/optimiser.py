"""AdamW over a model's groups of parameters."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gdn2.models.language_model import LanguageModel
from gdn2.ops.backends import why_not
from gdn2.ops.squares import ALIGNMENT, DTYPES
from gdn2.training.config import OptimiserSection

Kind = tuple[torch.device | torch.dtype, ...]  # of what one launch of the kernel moves


class ClippingAdamW(torch.optim.AdamW):
    """A fused AdamW, which itself divides gradients by `grad_scale` and moves nothing where `found_inf` is one.

    So clipping takes no pass over the gradients, and a step is on its way before the host knows whether it is to be
    taken: a GPU that waited for the host to look would idle for a twentieth of a step. There one launch of our kernel
    moves all tensors of a kind, and leaves gradients as they are; what it cannot move is left to torch.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    _failed = False  # whether the kernel could not be compiled or started

    def step_clipped(self, lr: float, norm: Tensor, clip: float, is_finite: Tensor) -> None:
        """Move by gradients of this norm, scaled down to `clip` where it is larger; not at all unless it is finite."""
        for group in self.param_groups:
            group["lr"] = lr
        self.grad_scale = ((norm + 1e-6) / clip).clamp(min=1)
        self.found_inf = 1 - is_finite.to(norm)
        self.step()

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> bool:
        """Gather, as torch does, what it is to move in this step; what our kernel can move has moved by then."""
        columns = (params, grads, exp_avgs, exp_avg_sqs, steps)
        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps)
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        unusual = group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor)
        if group["fused"] and not unusual:
            left = self._move(group, columns)
            for column in columns:
                column[:] = [column[i] for i in left]
        grads[:] = [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)]
        return has_complex

    def _move(self, group: dict[str, Any], columns: Sequence[list[Tensor]]) -> list[int]:
        """Move what the kernel can, by one launch for each kind, and return the places of the others."""
        params = columns[0]
        obstacle = {d: why_not("triton", d, kernels=("adamw",)) for d in {x.device for x in params}}
        if all(obstacle.values()):
            return [*range(len(params))]
        local = [[_local(x) for x in column] for column in columns]
        kinds: dict[Kind | None, list[int]] = {None: []}
        for i, row in enumerate(zip(*local, strict=True)):
            kind = None if obstacle[params[i].device] else kind_of(*row)
            kinds.setdefault(kind, []).append(i)
        left = kinds.pop(None)
        for places in kinds.values():
            if self._launch(group, [[column[i] for i in places] for column in local]):
                torch.autograd.graph.increment_version([params[i] for i in places])
            else:
                left += places
        return sorted(left)

    def _launch(self, group: dict[str, Any], columns: Sequence[Sequence[Tensor]]) -> bool:
        """Whether tensors of one kind could be moved; a failure is said once and has changed nothing."""
        if self._failed:
            return False
        from gdn2.ops.triton.adamw import adamw  # noqa: PLC0415 (optional dependency)

        hyper = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        try:
            adamw(*columns, **hyper, grad_scale=self.grad_scale, found_inf=self.found_inf)
        except Exception as failure:  # whatever a compiler may raise
            self._failed = True
            warnings.warn(f"gdn2 leaves AdamW to torch: {failure}", stacklevel=2)
            return False
        return True


def kind_of(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> Kind | None:
    """Where a parameter is, and the dtypes of it, its gradient and its moments; None if they do not suit the kernel."""
    device, size = param.device, param.numel()
    for x in (param, grad, exp_avg, exp_avg_sq):
        dense = x.layout == torch.strided and x.is_contiguous() and x.numel() == size
        if not dense or x.device != device or x.dtype not in DTYPES:
            return None
        if x.data_ptr() % ALIGNMENT:
            return None
    if step.dtype != torch.float32 or step.device != device:
        return None
    return device, param.dtype, grad.dtype, exp_avg.dtype, exp_avg_sq.dtype


def _local(x: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def build_optimiser(model: LanguageModel, section: OptimiserSection) -> ClippingAdamW:
    """AdamW with weight decay where it belongs; the rate of each step is set by the step."""
    groups = model.param_groups(section.weight_decay, decay_all=section.decay_all)
    beta1, beta2 = section.betas
    return ClippingAdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=(beta1, beta2),
        eps=section.eps,
        fused=True,
    )
