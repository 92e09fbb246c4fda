"""The training peer: our language models built from flash-linear-attention's layer and fused modules.

The twin has the sizes of a config of ours and is what a user of fla would put together: fla's Gated DeltaNet-2 layer,
norms, SwiGLU, rotary embedding and fused loss, FlexAttention for the window. Its layer gates the output by a sigmoid
where ours does by SiLU, which costs the same.
"""

# ruff: noqa: PLC0415 (a peer is never needed: it is imported where it is asked for)
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gdn2.layers.config import AttentionConfig, DeltaConfig, MixerConfig
from gdn2.layers.layout import Layout
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import Output
from gdn2.models.param_groups import param_groups

EXACT = ("A_log", "dt_bias")  # decays, which fla keeps in fp32


@dataclass(frozen=True)
class Parts:
    """The classes of fla that a twin is made of."""

    mixer: Any
    norm: Any
    mlp: Any
    rotary: Any
    loss: Any


def find_parts(device: torch.device) -> Parts | str:
    """The classes, or one line that says why there are none."""
    if device.type != "cuda":
        return "no peers: fla trains on a GPU only"
    try:
        with warnings.catch_warnings(action="ignore"):
            from fla.layers import GatedDeltaNet2
            from fla.modules import (
                FusedLinearCrossEntropyLoss,
                GatedMLP,
                RMSNorm,
                RotaryEmbedding,
            )
    except Exception as missing:  # whatever a version of fla trips over here
        reason = str(missing).strip().partition("\n")[0]
        return f"no peers: {reason}; pip install flash-linear-attention installs fla's layers"
    return Parts(GatedDeltaNet2, RMSNorm, GatedMLP, RotaryEmbedding, FusedLinearCrossEntropyLoss)


def why_no_twin(config: ModelConfig) -> str | None:
    """What in a config fla's layer does not have; None where there is a twin."""
    if config.tie_word_embeddings:
        return "its head is tied to the embedding"
    deltas = [mixer for mixer in config.cell if isinstance(mixer, DeltaConfig)]
    attentions = [mixer for mixer in config.cell if isinstance(mixer, AttentionConfig)]
    if not deltas or len(deltas) + len(attentions) < len(config.cell):
        return "its mixers are not those of Gated DeltaNet-2"
    if any(mixer.kv_heads != mixer.num_heads for mixer in attentions):
        return "its attention shares keys among heads"
    fits = all(
        (mixer.decay, mixer.gates, mixer.erase_gate, mixer.write_gate)
        == ("channel", "separate", "channel", "channel")
        and mixer.key_head_dim == mixer.value_head_dim == mixer.gate_rank
        and mixer.output_gate != "none"
        for mixer in deltas
    )
    return None if fits else "its gates or head sizes are not those of fla's layer"


def build_twin(config: ModelConfig, parts: Parts, device: torch.device, seed: int) -> "Twin":
    """A twin with all weights in bf16 but those of the decays."""
    # for fla's loss, which sums the gradient of the head in fp32
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(seed)
    with torch.device(device):
        twin = Twin(config, parts)
    for name, parameter in twin.named_parameters():
        exact = name.endswith(EXACT)
        parameter.data = parameter.data.to(torch.float32 if exact else torch.bfloat16)
    return twin


class Twin(nn.Module):
    """Has of `LanguageModel` what a training step asks for."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(
            TwinBlock(mixer, config, parts, number) for number, mixer in enumerate(config.mixers)
        )
        self.norm = parts.norm(width, eps=config.rms_norm_eps)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.loss = parts.loss()

    def forward(self, ids: Tensor, *, layout: Layout, targets: Tensor) -> Output:
        assert layout.cu_seqlens is None
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        loss = self.loss(self.norm(x).flatten(0, 1), targets.flatten(), self.head.weight)
        return Output(None, loss, None)

    def param_groups(self, weight_decay: float, *, decay_all: bool = False) -> list[dict[str, Any]]:
        return param_groups(self, weight_decay, decay_all)


class TwinBlock(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, mixer: MixerConfig, config: ModelConfig, parts: Parts, number: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.mixer_norm, self.mlp_norm = parts.norm(width, eps=eps), parts.norm(width, eps=eps)
        if isinstance(mixer, AttentionConfig):
            self.mixer = WindowAttention(mixer, width, parts)
        else:
            assert isinstance(mixer, DeltaConfig)
            self.mixer = parts.mixer(
                hidden_size=width,
                head_dim=mixer.key_head_dim,
                num_heads=mixer.num_heads,
                num_v_heads=mixer.value_heads,
                allow_neg_eigval=mixer.erase_range == 2,
                conv_size=mixer.conv_width,
                layer_idx=number,
                norm_eps=eps,
            )
        self.mlp = parts.mlp(
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            hidden_act="swish",
            fuse_swiglu=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))[0]
        return x + self.mlp(self.mlp_norm(x))


class WindowAttention(nn.Module):
    """FlexAttention over a window, with fla's rotary embedding; returns a tuple, as fla's layers do."""

    def __init__(self, config: AttentionConfig, width: int, parts: Parts) -> None:
        super().__init__()
        self.config = config
        inner = config.num_heads * config.head_dim
        self.qkv_proj = nn.Linear(width, 3 * inner, bias=False)
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.rotary = parts.rotary(config.head_dim, base=config.rotary_base)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        length = x.shape[1]
        sizes = (3, self.config.num_heads, self.config.head_dim)
        q, k, v = self.qkv_proj(x).unflatten(-1, sizes).unbind(2)
        q, k = self.rotary(q.contiguous(), k.contiguous(), max_seqlen=length)
        mask = _window_mask(length, self.config.window or length, x.device)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = _flex()(q, k, v, block_mask=mask)
        return (self.out_proj(y.transpose(1, 2).flatten(2)),)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _window_mask(length: int, window: int, device: torch.device) -> BlockMask:
    def allowed(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(allowed, None, None, length, length, device=device)
