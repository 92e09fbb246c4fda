"""What a language model is made of. Names that Hugging Face has, have Hugging Face's names."""

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from gdn2.layers.config import AttentionConfig, MixerConfig
from gdn2.layers.plain import check_types, from_plain, to_plain
from gdn2.ops.arguments import require


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
    initializer_range: float = 0.02  # standard deviation of the embedding

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "cell", tuple(self.cell))  # a list would be no key of a dict
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("rms_norm_eps", "initializer_range"):
            require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
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
    def digest(self) -> str:
        """Sixteen digits that tell this config from others: a state belongs to the models that have them."""
        return sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

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
