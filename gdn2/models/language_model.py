"""The language model: embedding, blocks, head."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from gdn2.layers.attention import AttentionMixer
from gdn2.layers.bare import is_bare
from gdn2.layers.config import MixerConfig
from gdn2.layers.layout import Layout
from gdn2.layers.mixers import Mixer, MixerState, build_mixer
from gdn2.layers.mlp import SwiGLU
from gdn2.layers.norm import RMSNorm, add_and_normalise
from gdn2.models.config import ModelConfig
from gdn2.models.initialisation import initialise
from gdn2.models.param_groups import param_groups
from gdn2.models.state import ModelState
from gdn2.ops.arguments import DTYPES, require, state_dtype
from gdn2.ops.kv_cache import KVCache
from gdn2.ops.linear import linear
from gdn2.ops.loss import linear_cross_entropy


class Output(NamedTuple):
    """What a call returns: logits, or a loss where there were targets; a state where there was one."""

    logits: Tensor | None
    loss: Tensor | None
    state: ModelState | None


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)).

    What the MLP makes is left for the next norm to add: a sum and its norm are one kernel, and so are their gradients.
    """

    def __init__(self, mixer: MixerConfig, config: ModelConfig) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = build_mixer(mixer, config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        state: MixerState | None,
        layout: Layout,
        inplace: bool,
    ) -> tuple[Tensor, Tensor, MixerState | None]:
        """Take x and what is to be added to it, and return the same after the block, with the mixer's state."""
        x, normed = add_and_normalise(self.mixer_norm, x, delta)
        mixed, state = self.mixer(normed, state, layout, inplace)
        x, normed = add_and_normalise(self.mlp_norm, x, mixed)
        return x, self.mlp(normed), state


class LanguageModel(nn.Module):
    """Predicts the next token; trains, prefills and decodes by the same call.

        model(ids, targets=targets).loss                        train
        state = model(prompt, model.new_state(rows)).state      prefill
        logits, _, state = model(token, state)                  decode

    Made under `torch.device("meta")` its parameters hold nothing until `to_empty` and `initialise`; the bits are those
    of a model made anywhere else from the same seed.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        known = isinstance(config, ModelConfig)
        require(known, "config", repr(config), "a ModelConfig, such as gdn2.preset(name)")
        self.config = config
        self._digest = config.digest
        self._checkpoints_blocks = False
        with torch.device("meta"):  # every value is drawn once, below
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.blocks = nn.ModuleList(Block(mixer, config) for mixer in config.mixers)
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            if not config.tie_word_embeddings:
                self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
            initialise(self, config, seed)

    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        layout: Layout | None = None,
        *,
        targets: Tensor | None = None,
        inplace: bool = False,
    ) -> Output:
        """Logits [batch, length, vocabulary] after each of ids [batch, length], or the mean loss against targets.

        Args:
            ids: tokens, as `layout` says they lie; without one each row is a sequence.
            state: what came before, from `new_state` or from an earlier call; None starts anew and keeps nothing.
            layout: of packed sequences, or of a padded batch; logits of padding are zero, its targets do not count.
            targets: [batch, length] the token that should follow each, −100 where none counts. The logits are then
                never held whole.
            inplace: let a call of one token overwrite the given state, in whose caches `reserve` has made room. There
                are no gradients then. A call of more tokens leaves it as it was.
        """
        if targets is not None:
            known = isinstance(targets, Tensor)
            require(known, "targets", type(targets).__name__, "a tensor [batch, length]")
            require(targets.shape == ids.shape, "targets", ("shape", targets), ("ids'", ids))
        with torch.no_grad() if inplace else nullcontext():
            hidden, state, layout = self._encode(ids, state, layout, inplace)
            if targets is None:
                return Output(layout.unpack(self._logits(hidden)), None, state)
            return Output(None, self._loss(hidden, layout.pack(targets)), state)

    def next_token_logits(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        layout: Layout | None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, ModelState | None]:
        """Logits [sequences, vocabulary] after the last token of each, NaN where it has none; and the state."""
        with torch.no_grad() if inplace else nullcontext():
            hidden, state, layout = self._encode(ids, state, layout, inplace)
            nothing = hidden.new_full((layout.rows, hidden.shape[-1]), torch.nan)
            return self._logits(layout.last(hidden, nothing)), state

    def new_state(self, rows: int, capacity: int = 0) -> ModelState:
        """The state of `rows` sequences before their first tokens; caches get room for `capacity` tokens at once."""
        for name, number in (("rows", rows), ("capacity", capacity)):
            require(number >= 0, name, number, "at least 0")
        like = next(self.norm.parameters())  # which no quantisation touches
        states = tuple(mixer.new_state(rows, like, capacity) for mixer in self.mixers)
        seen = torch.zeros(rows, dtype=torch.int64, device=self.embedding.weight.device)
        return ModelState(states, seen, self._digest)

    def reserve(self, state: ModelState, tokens: int) -> ModelState:
        """A copy with room for `tokens` more in the caches of attention, which steps in place cannot make."""
        require(tokens >= 0, "tokens", tokens, "at least 0")
        room = {i: mixer.reserve(cache, tokens) for i, mixer, cache in self._caches(state)}
        layers = (
            room[i] if i in room else type(layer)(*map(torch.clone, layer))
            for i, layer in enumerate(state.layers)
        )
        return replace(state, layers=tuple(layers), seen=state.seen.clone())

    def cast(self, dtype: torch.dtype) -> "LanguageModel":
        """Weights in `dtype`, but fp32 for decays and step sizes, whose rounding would add up over the tokens."""
        require(dtype in DTYPES, "dtype", repr(dtype), f"one of {', '.join(map(str, DTYPES))}")
        wide = torch.promote_types(dtype, torch.float32)
        for name, parameter in self.named_parameters():
            exact = name.endswith(("decay_log_rate", "decay_bias", "step_bias"))
            parameter.data = parameter.data.to(wide if exact else dtype)
        return self

    def checkpoint_blocks(self, enabled: bool = True) -> None:
        """Keep only the blocks' inputs for the backward and compute the rest again."""
        self._checkpoints_blocks = enabled

    def recompute_factors(self, enabled: bool = True) -> None:
        """Compute again in the backward what each chunk of a recurrent mixer can compute on its own, or keep it."""
        for mixer in self.mixers:
            if not isinstance(mixer, AttentionMixer):
                mixer.recompute = enabled

    def param_groups(self, weight_decay: float, *, decay_all: bool = False) -> list[dict[str, Any]]:
        """All parameters as groups of an optimiser: what decays, what does not, and what Muon may take."""
        return param_groups(self, weight_decay, decay_all)

    @property
    def mixers(self) -> list[Mixer]:
        return [cast(Block, block).mixer for block in self.blocks]

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.config.tie_word_embeddings else self.head.weight

    @property
    def _head_is_called(self) -> bool:
        """Whether it is more than its weight: an adapter, or one with hooks."""
        return not self.config.tie_word_embeddings and not is_bare(self.head, nn.Linear)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) if self._head_is_called else linear(hidden, self.head_weight)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not self._head_is_called:
            return linear_cross_entropy(hidden, self.head_weight, targets)
        logits = self.head(hidden).flatten(0, 1)
        total = cross_entropy(logits.to(state_dtype(logits)), targets.flatten(), reduction="sum")
        return total / (targets != -100).sum().clamp(min=1)

    def _encode(
        self, ids: Tensor, state: ModelState | None, layout: Layout | None, inplace: bool
    ) -> tuple[Tensor, ModelState | None, Layout]:
        """Hidden states [1, tokens, width] or [batch, length, width], the state after them, and the layout used."""
        layout = self._laid_out(ids, state, layout)
        x, delta = self.embedding(layout.pack(ids)), None
        inplace = inplace and layout.is_step
        if inplace and state is not None:
            # All of them before the first block runs: a call that raises has written nothing.
            for _, mixer, cache in self._caches(state):
                mixer.check_room(cache)
        before = [None] * len(self.blocks) if state is None else state.layers
        layers: list[Any] = []
        for block, layer in zip(self.blocks, before, strict=True):
            x, delta, after = self._run(block, x, delta, layer, layout, inplace)
            layers.append(after)
        _, x = add_and_normalise(self.norm, x, delta)
        if state is None:
            return x, None, layout
        seen = state.seen + layout.lengths
        seen = state.seen.copy_(seen) if inplace else seen
        return x, ModelState(tuple(layers), seen, self._digest), layout

    def _caches(self, state: ModelState) -> Iterator[tuple[int, AttentionMixer, KVCache]]:
        """The blocks with attention: their places, mixers and caches."""
        for i, (mixer, layer) in enumerate(zip(self.mixers, state.layers, strict=True)):
            if isinstance(mixer, AttentionMixer) and isinstance(layer, KVCache):
                yield i, mixer, layer

    def _run(
        self, block: nn.Module, x: Tensor, delta: Tensor | None, *others: Any
    ) -> tuple[Tensor, Tensor, Any]:
        if self._checkpoints_blocks and torch.is_grad_enabled():
            x = x if delta is None else x + delta  # one tensor is kept, not two
            return checkpoint(block, x, None, *others, use_reentrant=False)
        return block(x, delta, *others)

    def _laid_out(self, ids: Tensor, state: ModelState | None, layout: Layout | None) -> Layout:
        """Check the arguments and return where the tokens lie."""
        require(isinstance(ids, Tensor), "ids", type(ids).__name__, "a tensor [batch, length]")
        require(ids.ndim == 2, "ids", ("shape", ids), "[batch, length]")
        require(ids.dtype in (torch.int32, torch.int64), "ids", ids.dtype, "int32 or int64")
        if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in ids.aminmax())
            wrong = low if low < 0 else high
            fits = 0 <= wrong < self.config.vocab_size
            require(fits, "ids", wrong, f"0 to {self.config.vocab_size - 1}")
        known = layout is None or isinstance(layout, Layout)
        expected = "a Layout, such as Layout.from_mask(mask)"
        require(known, "layout", type(layout).__name__, expected)
        known = state is None or isinstance(state, ModelState)
        require(known, "state", type(state).__name__, "a ModelState, such as new_state makes")
        if layout is None:
            layout = Layout.dense(*ids.shape)
        elif layout.cu_seqlens is not None:
            place = layout.cu_seqlens.device
            require(place == ids.device, "layout", f"device {place}", f"ids' device {ids.device}")
        wanted = (layout.batch, layout.length)
        require(tuple(ids.shape) == wanted, "ids", ("shape", ids), wanted)
        if state is None:
            return layout
        state.check_config(self._digest)
        require(state.rows == layout.rows, "state.rows", state.rows, layout.rows)
        return layout.after(state.seen)
