"""The language model as transformers' classes, made of the native modules under the native names.

There is no prefix before a base model's names: the causal model has the base model's modules as its own, beside the
head. So `save_pretrained` writes what `gdn2.load` reads, and the other way round.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
# ruff: noqa: RUF012 (transformers reads these lists from the classes, and is not typed throughout)
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from gdn2.hf.cache import Gdn2Cache, Moment
from gdn2.hf.configuration import Gdn2Config
from gdn2.hf.inputs import layout_of
from gdn2.layers.layout import Layout
from gdn2.layers.norm import RMSNorm, add_and_normalise
from gdn2.models.initialisation import parameter_value
from gdn2.models.language_model import Block
from gdn2.models.param_groups import param_groups
from gdn2.models.state import ModelState
from gdn2.ops.arguments import require

# How transformers' own models may compute attention.
ATTENTION = ("eager", "sdpa", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4)))


class Encoded(NamedTuple):
    """What the blocks make of a call."""

    x: Tensor  # the last hidden states, as the layout packs them
    layout: Layout
    cache: Gdn2Cache | None
    hidden_states: Any  # a Tensor [batch, length, width] before each block and after the last norm, if asked for


class Gdn2Block(GradientCheckpointingLayer, Block):
    """A block that keeps only its input for the backward where the trainer asks for that."""


class Gdn2PreTrainedModel(PreTrainedModel):
    """Embedding, blocks and norm, and what transformers wants to know about them."""

    config: Gdn2Config
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Gdn2Block"]
    _skip_keys_device_placement = ["past_key_values"]
    # As LanguageModel.cast does: rounding of decays and step sizes would add up over the tokens.
    _keep_in_fp32_modules_strict = ["decay_log_rate", "decay_bias", "step_bias"]
    _input_embed_layer = "embedding"
    _has_head = False

    def __init__(self, config: Gdn2Config) -> None:
        super().__init__(config)
        self._native = native = config.native()
        with torch.device("meta"):  # every value is drawn once, by post_init
            self.embedding = nn.Embedding(native.vocab_size, native.hidden_size)
            self.blocks = nn.ModuleList(Gdn2Block(mixer, native) for mixer in native.mixers)
            self.norm = RMSNorm(native.hidden_size, native.rms_norm_eps)
            if self._has_head:
                self.head = nn.Linear(native.hidden_size, native.vocab_size, bias=False)
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """Load as transformers does, into memory of the model's own.

        Tensors in a file's memory map lie at any multiple of eight bytes, where products round differently.
        """
        found = super().from_pretrained(*arguments, **options)
        model = found[0] if isinstance(found, tuple) else found
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()
        return found

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *_: Any, **__: Any
    ) -> str:
        """Take any of transformers' names and load nothing: layers choose their kernels by what they are given."""
        known = attn_implementation is None or attn_implementation in ATTENTION
        expected = f"one of {', '.join(ATTENTION)}; layers choose their kernels themselves"
        require(known, "attn_implementation", repr(attn_implementation), expected)
        return "eager"  # transformers gives nothing to a model of which it notes this

    def param_groups(self, weight_decay: float, *, decay_all: bool = False) -> list[dict[str, Any]]:
        """All parameters as groups of an optimiser, as LanguageModel has them."""
        return param_groups(self, weight_decay, decay_all)

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> nn.Embedding:
        """Resize as transformers does; caches of the former vocabulary are then those of another model."""
        found: nn.Embedding = super().resize_token_embeddings(*arguments, **options)
        self._native = self.config.native()
        return found

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """First values that are those of LanguageModel(config, seed=s) after torch.manual_seed(s), bit by bit."""
        names = {id(known): name for name, known in self.named_modules()}
        if id(module) not in names:  # not yet part of the model: an embedding of another size
            super()._init_weights(module)
            return
        for name, parameter in module.named_parameters(names[id(module)], recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                seed = torch.initial_seed()
                init.copy_(parameter, parameter_value(name, parameter.shape, self._native, seed))

    def _encode(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        past_key_values: Gdn2Cache | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        **where: Tensor | None,
    ) -> Encoded:
        """Run the blocks on tokens that lie as `where` says."""
        one = (input_ids is None) != (inputs_embeds is None)
        got = "none" if input_ids is None else "both"
        require(one, "input_ids or inputs_embeds", got, "one of them")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values
        expected = "a Gdn2Cache, or None for a new one"
        known = cache is None or isinstance(cache, Gdn2Cache)
        require(known, "past_key_values", type(cache).__name__, expected)
        if cache is not None:
            rows = cache.batch_size
            require(rows in (-1, x.shape[0]), "past_key_values", f"{rows} rows", x.shape[0])
        if cache is not None and cache.again is not None:
            return self._encode_again(x, cache, output_hidden_states, where["attention_mask"])
        layout = layout_of(x.shape[0], x.shape[1], **where)
        if cache is None:  # training and packed sequences have no use for one
            wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
            cache = Gdn2Cache() if wanted and layout.rows == layout.batch else None
        return self._run(x, layout, cache, output_hidden_states)

    def _encode_again(
        self, x: Tensor, cache: Gdn2Cache, output_hidden_states: bool | None, mask: Tensor | None
    ) -> Encoded:
        """Run the blocks on what the cache has to read again and on x, and return what they make of x."""
        assert cache.again is not None
        again = cache.again.shape[1]
        whole = torch.cat([cache.again, x], 1)
        layout = layout_of(whole.shape[0], whole.shape[1], attention_mask=mask)
        found = self._run(whole, layout, cache, output_hidden_states)
        own = layout_of(x.shape[0], x.shape[1], attention_mask=mask)
        hidden_states = found.hidden_states
        if hidden_states is not None:
            hidden_states = tuple(hidden[:, again:] for hidden in hidden_states)
        return Encoded(own.pack(layout.unpack(found.x)[:, again:]), own, cache, hidden_states)

    def _run(
        self, x: Tensor, layout: Layout, cache: Gdn2Cache | None, output_hidden_states: bool | None
    ) -> Encoded:
        inputs, before = x, None if cache is None else self._before(cache, x, layout)
        if before is not None:
            layout = layout.after(before.state.seen)
        x = layout.pack(x)
        asked = output_hidden_states
        keep = self.config.output_hidden_states if asked is None else asked
        layers: list[Any] = []
        hidden_states: list[Tensor] = []
        delta = None
        whole = keep or (self.is_gradient_checkpointing and self.training)  # else two would be kept
        for i, block in enumerate(self.blocks):
            if whole and delta is not None:
                x, delta = x + delta, None
            hidden_states += [x] if keep else []
            past = None if before is None else before.state.layers[i]
            x, delta, after = block(x, delta, past, layout, False)
            layers.append(after)
        _, x = add_and_normalise(self.norm, x, delta)
        if cache is not None and before is not None:
            seen = before.state.seen + layout.lengths
            state = ModelState(tuple(layers), seen, before.state.config)
            cache.advance(Moment(state, layout.last(x, before.last).clone()), inputs)
        kept = tuple(map(layout.unpack, [*hidden_states, x])) if keep else None
        return Encoded(x, layout, cache, kept)

    def _before(self, cache: Gdn2Cache, x: Tensor, layout: Layout) -> Moment:
        """What the cache holds, or the moment before the first token."""
        rows = layout.batch
        require(layout.rows == rows, "past_key_values", "one of packed sequences", "none for them")
        if cache.now is None:
            layers = tuple(cast(Block, block).mixer.new_state(rows, x) for block in self.blocks)
            seen = torch.zeros(rows, dtype=torch.int64, device=x.device)
            state = ModelState(layers, seen, self._native.digest)
            return Moment(state, x.new_zeros(rows, x.shape[-1]))
        cache.now.state.check_config(self._native.digest)
        return cache.now
