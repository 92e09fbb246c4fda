"""The language model as transformers' classes."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
# ruff: noqa: RUF012 (transformers reads these lists from the classes, and is not typed throughout)
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from gdn2.hf.base import Encoded, Gdn2PreTrainedModel
from gdn2.hf.cache import Gdn2Cache
from gdn2.ops.arguments import require

IGNORED = -100  # a label that transformers' losses pass over


class Gdn2Model(Gdn2PreTrainedModel):
    """From tokens to hidden states."""

    _keys_to_ignore_on_load_unexpected = [r"^head\.weight$"]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Gdn2Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [batch, length, width], zero where there is padding."""
        _refuse_weights(kwargs)
        found = self._encode(
            input_ids,
            inputs_embeds,
            past_key_values,
            use_cache,
            output_hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seq_lens=cu_seq_lens_q,
            seq_idx=seq_idx,
        )
        last: Any = found.layout.unpack(found.x)
        return BaseModelOutputWithPast(
            last_hidden_state=last,
            past_key_values=found.cache,
            hidden_states=found.hidden_states,
        )


def _without_unread(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Labels but those after padding, whose logits say nothing of them."""
    if mask is None or mask.ndim != 2:
        return labels
    padding = mask[:, -labels.shape[1] :] == 0
    return labels.masked_fill(pad(padding[:, :-1], (1, 0)), IGNORED)


def _refuse_weights(options: dict[str, Any]) -> None:
    """Nobody who asks for attention's weights should get none without a word."""
    asked = options.get("output_attentions")
    require(not asked, "output_attentions", asked, "False: recurrent blocks have no such weights")


class Gdn2ForCausalLM(Gdn2PreTrainedModel, GenerationMixin):
    """From tokens to the logits of the next."""

    _tied_weights_keys = {"head.weight": "embedding.weight"}
    _has_head = True

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Put in an empty cache where generation wants one and the caller gave none."""
        given = model_kwargs.get("past_key_values")
        if isinstance(given, Gdn2Cache) and not generation_config.is_assistant:
            given.deactivate_past_recording()  # assisted decoding, if it is that again, will ask for it
        if generation_config.use_cache is False or given is not None:
            prepare: Any = super()._prepare_cache_for_generation  # type: ignore[misc]
            prepare(generation_config, model_kwargs, *others)
            return
        kind = generation_config.cache_implementation
        require(kind in (None, "dynamic"), "cache_implementation", repr(kind), "None: there is one")
        model_kwargs["past_key_values"] = cache = Gdn2Cache()
        if generation_config.is_assistant:
            cache.activate_past_recording()

    def _assisted_decoding(self, *arguments: Any, **options: Any) -> Any:
        """Record only meanwhile: the caller, who has the cache afterwards, may never take anything back."""
        cache = options.get("past_key_values")
        try:
            decode: Any = super()._assisted_decoding  # type: ignore[misc]
            return decode(*arguments, **options)
        finally:
            if isinstance(cache, Gdn2Cache):
                cache.deactivate_past_recording()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # by its name generation knows that it may be given
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        """Give a cache only what it has not read; of its first call assisted decoding does not say what that is."""
        begins = is_first_iteration and next_sequence_length is None and inputs_embeds is None
        positions = kwargs.get("position_ids")  # of all tokens, also where only new ones were given
        begins = begins and (positions is None or positions.shape[-1] == input_ids.shape[1])
        if begins and isinstance(past_key_values, Gdn2Cache) and past_key_values.is_recording:
            seen = past_key_values.get_seq_length()
            next_sequence_length = input_ids.shape[1] - seen if seen else None
        prepare: Any = super().prepare_inputs_for_generation  # type: ignore[misc]
        return prepare(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Gdn2Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, length, vocabulary], zero where there is padding, and the loss where there are labels.

        `labels` are the tokens themselves, as everywhere in transformers; `logits_to_keep` keeps that many of the last
        columns, or those it lists, and 1 the last token of each row, wherever its padding is.
        """
        _refuse_weights(kwargs)
        found = self._encode(
            input_ids,
            inputs_embeds,
            past_key_values,
            use_cache,
            output_hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seq_lens=cu_seq_lens_q,
            seq_idx=seq_idx,
        )
        logits = self._logits(found, logits_to_keep)
        loss = None
        if labels is not None:
            kwargs["vocab_size"] = self.config.vocab_size
            labels = _without_unread(labels, attention_mask)
            loss = self.loss_function(logits=logits, labels=labels, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=found.cache,
            hidden_states=found.hidden_states,
        )

    def _logits(self, found: Encoded, keep: int | Tensor) -> Any:
        x, layout, cache, _ = found
        if isinstance(keep, int) and keep == 0:
            return layout.unpack(self.head(x))
        if isinstance(keep, int) and keep == 1 and layout.rows == layout.batch:
            if cache is not None and cache.now is not None:
                last = cache.now.last  # which may have come in an earlier call
            else:
                last = layout.last(x, x.new_zeros(layout.rows, x.shape[-1]))
            return self.head(last).unsqueeze(1)
        columns = slice(-keep, None) if isinstance(keep, int) else keep
        return self.head(layout.unpack(x)[:, columns])
