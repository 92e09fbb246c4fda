"""AdamW over a model's groups of parameters."""

import torch
from torch import Tensor

from gdn2.models.language_model import LanguageModel
from gdn2.training.config import OptimiserSection


class ClippingAdamW(torch.optim.AdamW):
    """A fused AdamW, which itself divides gradients by `grad_scale` and moves nothing where `found_inf` is one.

    So clipping takes no pass over the gradients, and a step is on its way before the host knows whether it is to be
    taken: a GPU that waited for the host to look would idle for a twentieth of a step.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def step_clipped(self, lr: float, norm: Tensor, clip: float, is_finite: Tensor) -> None:
        """Move by gradients of this norm, scaled down to `clip` where it is larger; not at all unless it is finite."""
        for group in self.param_groups:
            group["lr"] = lr
        self.grad_scale = ((norm + 1e-6) / clip).clamp(min=1)
        self.found_inf = 1 - is_finite.to(norm)
        self.step()


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
