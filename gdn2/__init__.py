"""Gated DeltaNet-2: linear attention with channel-wise erase and write gates, exact for any decay."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gdn2.ops.backends import using
from gdn2.ops.rule import gated_delta_rule, gated_delta_step

if TYPE_CHECKING:
    from gdn2.models.config import ModelConfig
    from gdn2.models.folder import load_model as load
    from gdn2.models.folder import save_model as save
    from gdn2.models.generate import Stop, generate, stream
    from gdn2.models.language_model import LanguageModel
    from gdn2.models.presets import preset
    from gdn2.models.sampling import Sampling
    from gdn2.ops.warmup import warmup

__version__ = "0.1.0"
__all__ = [
    "LanguageModel",
    "ModelConfig",
    "Sampling",
    "Stop",
    "gated_delta_rule",
    "gated_delta_step",
    "generate",
    "load",
    "preset",
    "save",
    "stream",
    "using",
    "warmup",
]

_LATER = {  # imported when first asked for, so that importing gdn2 is quick
    "LanguageModel": "models.language_model.LanguageModel",
    "ModelConfig": "models.config.ModelConfig",
    "Sampling": "models.sampling.Sampling",
    "Stop": "models.generate.Stop",
    "generate": "models.generate.generate",
    "load": "models.folder.load_model",
    "preset": "models.presets.preset",
    "save": "models.folder.save_model",
    "stream": "models.generate.stream",
    "warmup": "ops.warmup.warmup",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'gdn2' has no attribute {name!r}")
    module, _, member = _LATER[name].rpartition(".")
    return getattr(import_module(f"gdn2.{module}"), member)
