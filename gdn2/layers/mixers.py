"""All token mixers, and what they have in common.

A mixer is `mixer(x, state, layout) -> (y, state)`. With a state it continues from it and returns the next one; with
None it starts from nothing and keeps nothing, as in training. `new_state(rows, like)` is the state before the first
token, for inputs of the dtype and on the device of `like`: weights that somebody quantised do not say which.
Recurrent mixers have an attribute `recompute`: whether the rule computes again in the backward what it could keep.
"""

from gdn2.layers.attention import AttentionMixer
from gdn2.layers.config import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
)
from gdn2.layers.delta import DeltaMixer, DeltaState
from gdn2.layers.mamba2 import Mamba2Mixer, Mamba2State
from gdn2.layers.mamba3 import Mamba3Mixer, Mamba3State
from gdn2.ops.kv_cache import KVCache

Mixer = DeltaMixer | Mamba2Mixer | Mamba3Mixer | AttentionMixer
MixerState = DeltaState | Mamba2State | Mamba3State | KVCache


def build_mixer(config: MixerConfig, hidden_size: int, norm_eps: float = 1e-5) -> Mixer:
    """The mixer that a config describes."""
    match config:
        case DeltaConfig():
            return DeltaMixer(config, hidden_size, norm_eps)
        case Mamba2Config():
            return Mamba2Mixer(config, hidden_size, norm_eps)
        case Mamba3Config():
            return Mamba3Mixer(config, hidden_size, norm_eps)
        case AttentionConfig():
            return AttentionMixer(config, hidden_size)
