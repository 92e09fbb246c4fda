"""What a language model is made of. Names that Hugging Face has, have Hugging Face's names."""

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from gdn2.layers.config import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
)
from gdn2.layers.initialisation import InitScheme
from gdn2.layers.plain import at_least_one, check_types, from_plain, positive, to_plain
from gdn2.ops.arguments import require

CONVENTIONAL = (  # names that Hugging Face's libraries look for
    *("layer_types", "sliding_window"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "linear_allow_neg_eigval"),
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A stack of blocks, each a token mixer and an MLP; the mixers are a cell that repeats.

    One delta mixer is the recurrent model, a delta mixer and an attention of some window the hybrid, one full attention
    the Transformer.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    cell: tuple[MixerConfig, ...]
    vocab_size: int = 32000
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02  # standard deviation of what begins normal
    init_scheme: InitScheme = "released"

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        positive(self, "rms_norm_eps", "initializer_range")
        require(len(self.cell) > 0, "cell", "no mixers", "at least one")
        fits = self.num_hidden_layers % len(self.cell) == 0
        expected = f"a multiple of the cell's {len(self.cell)} mixers"
        require(fits, "num_hidden_layers", self.num_hidden_layers, expected)

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The mixer of each block."""
        return self.cell * (self.num_hidden_layers // len(self.cell))

    @property
    def layer_types(self) -> list[str]:
        """Each block in Hugging Face's words."""
        return [_layer_type(mixer) for mixer in self.mixers]

    @property
    def conventional(self) -> dict[str, Any]:
        """What Hugging Face's libraries look for; the cell says all of it, its first mixer of a kind the sizes."""
        windows = [mixer.window for mixer in self.cell if isinstance(mixer, AttentionConfig)]
        sizes: dict[str, Any] = {}
        for mixer in reversed(self.cell):
            sizes |= _conventional_sizes(mixer)
        window = max((window for window in windows if window is not None), default=None)
        return {"layer_types": self.layer_types, "sliding_window": window, **sizes}

    @property
    def digest(self) -> str:
        """Sixteen digits that tell this config from others: a state belongs to the models that have them."""
        said = self.to_dict()
        if self.init_scheme == "released":  # as in a file that does not say
            del said["init_scheme"]
        return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """Read what `to_dict` returned; unknown names and wrong types are errors that say where."""
        return from_plain(cls, data)


def _layer_type(mixer: MixerConfig) -> str:
    if not isinstance(mixer, AttentionConfig):
        return "linear_attention"
    return "full_attention" if mixer.window is None else "sliding_attention"


def _conventional_sizes(mixer: MixerConfig) -> dict[str, Any]:
    match mixer:
        case AttentionConfig():
            return {
                "num_attention_heads": mixer.num_heads,
                "num_key_value_heads": mixer.kv_heads,
                "head_dim": mixer.head_dim,
                "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rotary_base},
            }
        case DeltaConfig():
            heads = mixer.num_heads, mixer.value_heads
            widths = mixer.key_head_dim, mixer.value_head_dim
        case Mamba2Config() | Mamba3Config():  # all heads share one key
            heads = 1, mixer.num_heads
            widths = mixer.state_size, mixer.head_dim
    return {
        "linear_num_key_heads": heads[0],
        "linear_num_value_heads": heads[1],
        "linear_key_head_dim": widths[0],
        "linear_value_head_dim": widths[1],
        "linear_conv_kernel_dim": getattr(mixer, "conv_width", None),
        "linear_allow_neg_eigval": getattr(mixer, "erase_range", 1) == 2,
    }
