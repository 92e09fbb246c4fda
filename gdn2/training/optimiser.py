"""AdamW over a model's groups of parameters."""

import torch

from gdn2.models.language_model import LanguageModel
from gdn2.training.config import OptimiserSection


def build_optimiser(model: LanguageModel, section: OptimiserSection) -> torch.optim.AdamW:
    """AdamW, in one kernel on a GPU; the rate of each step is set by the step."""
    groups = model.param_groups(section.weight_decay, decay_all=section.decay_all)
    beta1, beta2 = section.betas
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=(beta1, beta2),
        eps=section.eps,
        fused=model.embedding.weight.device.type == "cuda",
    )
