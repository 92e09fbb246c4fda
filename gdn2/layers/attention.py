"""Softmax attention as a token mixer: full, or over a sliding window."""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from gdn2.layers.config import AttentionConfig
from gdn2.layers.initialisation import fill
from gdn2.layers.joint import have_one_gradient, joint, single
from gdn2.layers.layout import Layout
from gdn2.ops.arguments import state_dtype
from gdn2.ops.attention import attention, check_room, may_overflow
from gdn2.ops.entry import attention_inputs, kernels_turn
from gdn2.ops.kv_cache import KVCache
from gdn2.ops.rotary import apply_rotary
from gdn2.ops.window_attention import is_whole, takes_heads


class AttentionMixer(nn.Module):
    """Causal attention with rotary embedding; its state is a cache, with a window one that stops growing."""

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config, self.laid = config, False
        queries, keys = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, keys, bias=False)
        self.out_proj = nn.Linear(queries, hidden_size, bias=False)
        fill(self, config)

    def forward(
        self, x: Tensor, state: KVCache | None, layout: Layout, inplace: bool = False
    ) -> tuple[Tensor, KVCache | None]:
        """Mix x [batch, length, width]; a cache is returned where one was given, overwritten if `inplace`."""
        c = self.config
        q, k, v = self._turned(x, layout)
        made = q.dtype  # which a cache need not have
        started = state is not None and state.capacity > 0
        if state is not None and started:  # autocast may have come or gone since its first token
            q, k, v = (z.to(state.keys.dtype) for z in (q, k, v))
        if inplace and layout.is_step and state is not None and not started:
            self.check_room(state)
        y, cache = attention(
            q,
            k,
            v,
            window=c.window,
            cu_seqlens=layout.cu_seqlens,
            cache=state if started else None,
            output_cache=state is not None,
            inplace=inplace and started and layout.is_step,
            block_mask=self.block_mask(layout, q.dtype, q.device) if not started else None,
        )
        return single(self.out_proj, y.flatten(-2).to(made)), cache

    def _turned(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, length, heads, d], the first two turned by their places."""
        c, maps = self.config, self.joint_maps
        table = layout.rotary(c.head_dim, c.rotary_base, state_dtype(x), x.device)
        if self.laid and have_one_gradient(x, maps) and kernels_turn(x, table[0]):
            turned = attention_inputs(x, [map_.weight for map_ in maps], *table)
            q, k, v = (z.unflatten(-1, (-1, c.head_dim)) for z in turned)
            return q, k, v
        q, k, v = (z.unflatten(-1, (-1, c.head_dim)) for z in joint(x, *maps, laid=self.laid))
        return apply_rotary(q, *table), apply_rotary(k, *table), v

    def block_mask(
        self, layout: Layout, dtype: torch.dtype, device: torch.device
    ) -> BlockMask | None:
        """The mask that layers of one window share; None where none is read."""
        c = self.config
        whole = layout.cu_seqlens is None and is_whole(layout.length, c.window)
        if whole and c.kv_heads == c.num_heads and takes_heads(c.head_dim, dtype, device):
            return None
        return layout.block_mask(c.window, device)

    @property
    def joint_maps(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj]

    def new_state(self, rows: int, like: Tensor, capacity: int = 0) -> KVCache:
        """A cache that makes its slots when tokens come, or has room for `capacity` at once."""
        c = self.config
        slots = capacity if c.window is None else min(capacity, c.window)
        return KVCache.empty(rows, slots, like.new_empty(0, 0, c.kv_heads, c.head_dim))

    def reserve(self, state: KVCache, tokens: int) -> KVCache:
        """Room for `tokens` more, so that steps in place need no other memory; a ring gets all it may ever need."""
        window = self.config.window
        return state.reserve(tokens if window is None else window - state.capacity)

    def check_room(self, state: KVCache) -> None:
        """Refuse a step in place that finds no slot, before anything is written.

        Where looking would stall each step, or a graph is captured, `attention` says what becomes of the rows.
        """
        if state.capacity == 0 and len(state.seen) > 0:  # known anywhere, and nothing to write into
            raise ValueError(
                "cache has capacity 0, expected at least 1: reserve it before steps in place"
            )
        if may_overflow(state, self.config.window):
            check_room(state, 1, self.config.window)

    def core_flops(self, length: int) -> float:
        """Forward, per token of a sequence of this length, without the linear maps."""
        c = self.config
        window = length if c.window is None else min(c.window, length)
        attended = window - window * (window - 1) / (2 * length)
        return 4 * c.num_heads * c.head_dim * attended
