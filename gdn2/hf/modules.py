"""Lists of modules: what adapters attach to, and what must not lose precision."""

import torch
from torch import nn

from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel

# What they make is multiplied over the tokens, so that an error can grow with the length of the text: decays, step
# sizes and what is erased. Mamba's in_proj makes its decays and step sizes beside everything else.
RECURRENT = ("decay_proj", "beta_proj", "erase_proj", "in_proj")


def lora_targets(config: ModelConfig) -> list[str]:
    """Every linear map of the blocks, as PEFT's `target_modules`; a name's beginning tells mixers from MLPs."""
    return sorted({name for name in _linear_maps(config) if name != "head"})


def precise_modules(config: ModelConfig) -> list[str]:
    """Linear maps to leave out of weight-only quantisation: those that steer the recurrence, and the head."""
    names = _linear_maps(config)
    return sorted({name for name in names if name == "head" or name.split(".")[1] in RECURRENT})


def _linear_maps(config: ModelConfig) -> list[str]:
    """Names without the numbers of blocks."""
    with torch.device("meta"):
        model = LanguageModel(config)
    maps = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [".".join(name.split(".")[2:]) if name.startswith("blocks.") else name for name in maps]
