"""`generate` writes what the native generator writes, however the prompt comes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import gdn2
from gdn2.hf import Gdn2Cache, Gdn2ForCausalLM
from gdn2.models.state_file import load_state, save_state
from tests.closeness import assert_close
from tests.hf.cases import make, padded, prompts, tokens, twin
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import config

KINDS = ("gdn2, scalar write", "mamba2", "mamba3, rank 3", "attention", "window")  # of states
NATIVE = make(config(*(MIXERS[name] for name in KINDS)))
MODEL = twin(NATIVE)
NEW = 7
# Older versions of transformers read the whole prompt again, whatever model they are given.
CHUNKS_GO_ON = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 22)
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 9, "eos_token_id": None}
sides = pytest.mark.parametrize("side", ["left", "right"])


def native_greedy(rows: list[list[int]], new: int = NEW) -> list[list[int]]:
    sampling, stop = gdn2.Sampling(temperature=0), gdn2.Stop(max_tokens=new)
    return [row.tokens for row in gdn2.generate(NATIVE, rows, sampling=sampling, stop=stop)]


def greedy(ids: Tensor, mask: Tensor | None = None, new: int = NEW, **options: Any) -> Tensor:
    """All tokens, the prompt's too."""
    written = MODEL.generate(ids, attention_mask=mask, max_new_tokens=new, **{**GREEDY, **options})
    assert isinstance(written, Tensor)
    return written


@sides
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"prefill_chunk_size": 3}],
    ids=["cache", "no cache", "prefill in chunks"],
)
def test_ragged_batches_give_the_native_tokens(side: str, options: dict[str, Any]) -> None:
    ids, mask = padded(prompts(), side)
    written = greedy(ids, mask, **options)[:, ids.shape[1] :]
    assert written.tolist() == native_greedy(prompts())


@sides
def test_every_split_between_prompt_and_continuation_is_the_same(side: str) -> None:
    """A cache may be gone on from with the whole text; only what is new of it is read."""
    ids, mask = padded(prompts(), side)
    whole = greedy(ids, mask)
    for split in range(1, NEW):
        cache = Gdn2Cache()
        first = greedy(ids, mask, split, past_key_values=cache)
        assert cache.get_seq_length() == first.shape[1] - 1
        seen = torch.cat([mask, torch.ones(len(ids), split, dtype=torch.int64)], 1)
        assert torch.equal(greedy(first, seen, NEW - split, past_key_values=cache), whole)


@sides
def test_every_split_of_a_forward_is_the_same(side: str) -> None:
    ids, mask = padded(prompts(), side)
    whole = MODEL(ids, attention_mask=mask).logits
    for split in range(1, ids.shape[1]):
        cache = MODEL(ids[:, :split], attention_mask=mask[:, :split]).past_key_values
        rest = MODEL(ids[:, split:], attention_mask=mask, past_key_values=cache)
        assert rest.past_key_values is cache
        assert_close(f"from {split}", rest.logits, whole[:, split:], 1e-10)


@sides
def test_embeddings_may_be_the_prompt(side: str) -> None:
    ids, mask = padded(prompts(), side)
    written = MODEL.generate(
        inputs_embeds=MODEL.embedding(ids), attention_mask=mask, max_new_tokens=NEW, **GREEDY
    )
    assert written.tolist() == native_greedy(prompts())


@sides
def test_beams_follow_their_own_states(side: str) -> None:
    """With a cache, whose rows are reordered at every step, as without one."""
    ids, mask = padded(prompts(), side)
    with_cache, without = (
        MODEL.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            num_beams=3,
            num_return_sequences=2,
            use_cache=use_cache,
            **GREEDY,
        )
        for use_cache in (True, False)
    )
    assert with_cache.tolist() == without.tolist()
    assert with_cache[::2, ids.shape[1] :].tolist() != native_greedy(prompts())


@sides
def test_samples_do_not_depend_on_the_padding(side: str) -> None:
    def drawn(row: list[list[int]]) -> list[int]:
        torch.manual_seed(4)
        ids, mask = padded(row, side)
        options = {**GREEDY, "do_sample": True, "top_k": 5}
        return MODEL.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)[
            0, -NEW:
        ].tolist()

    prompt = prompts()[0]
    alone = [drawn([prompt]), drawn([prompt])]
    assert alone[0] == alone[1] != native_greedy([prompt])[0]
    torch.manual_seed(4)
    ids, mask = padded([prompt[:3], prompt], side)
    scores = MODEL(ids, attention_mask=mask, logits_to_keep=1).logits[1, -1]
    assert_close("scores", scores, MODEL(torch.tensor([prompt])).logits[0, -1], 1e-10)


def assistant(noise: float) -> Any:
    """A model that guesses right at times."""
    model = twin(NATIVE)
    rand = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=rand, dtype=torch.float64)
    return model


@pytest.mark.parametrize("noise", [0.02, 1.0])
def test_assisted_decoding_takes_back_what_was_guessed_wrong(noise: float) -> None:
    ids = torch.tensor([prompts()[0]])
    found = greedy(ids, new=15, assistant_model=assistant(noise))
    assert torch.equal(found, greedy(ids, new=15))


def test_prompt_lookup_takes_back_what_was_guessed_wrong() -> None:
    ids = torch.tensor([prompts()[0] * 3])
    assert torch.equal(greedy(ids, new=15, prompt_lookup_num_tokens=4), greedy(ids, new=15))


def test_a_conversation_may_be_assisted_at_times() -> None:
    """By one cache, which keeps nothing of the past once nobody may take it back."""
    cache, said = Gdn2Cache(), torch.tensor([prompts()[0] * 3])
    ways: list[dict[str, Any]] = [
        {},
        {"prompt_lookup_num_tokens": 3},
        {},
        {"assistant_model": assistant(0.02)},
        {"prefill_chunk_size": 2} if CHUNKS_GO_ON else {},
        {"prompt_lookup_num_tokens": 2},
        {},
    ]
    for turn, options in enumerate(ways):
        mask = torch.ones_like(said)  # what has been written may have the number of padding
        written = greedy(said, mask, past_key_values=cache, **options)
        assert torch.equal(written, greedy(said, mask)), turn
        said = torch.cat([written, torch.tensor([[turn, 3, 4]])], 1)
    assert not cache.is_recording and cache._calls == []
    assert cache.get_seq_length() == written.shape[1] - 1


@pytest.mark.parametrize("read", [3, 6, 9])
def test_a_turn_may_be_given_by_its_new_tokens_alone(read: int) -> None:
    """With a mask of the whole sequence, as transformers allows it."""
    said = torch.tensor([prompts()[0] * 3])[:, :12]
    expected = greedy(said)
    ways: list[dict[str, Any]] = [
        *({}, {"assistant_model": assistant(0.02)}, {"prompt_lookup_num_tokens": 3})
    ]
    for options in ways:
        cache = Gdn2Cache()
        MODEL(said[:, :read], past_key_values=cache)
        mask = torch.ones_like(said)
        written = greedy(said[:, read:], mask, past_key_values=cache, **options)
        assert torch.equal(written[:, 12 - read :], expected[:, 12:]), options


def test_what_a_cache_reads_after_assisted_decoding_is_not_recorded() -> None:
    said, cache = torch.tensor([prompts()[0] * 3]), Gdn2Cache()
    greedy(said, past_key_values=cache, prompt_lookup_num_tokens=3)
    for _ in range(3):
        MODEL(said[:, :1], past_key_values=cache)
    assert not cache.is_recording and cache._calls == []


def test_columns_can_be_taken_back_from_any_call() -> None:
    ids = tokens(2, 12)
    whole = MODEL(ids).logits
    for removed in (1, 4, 5, 7, 9):
        cache = MODEL(ids[:, :3]).past_key_values
        cache.activate_past_recording()
        for start, end in ((3, 7), (7, 8), (8, 12)):
            MODEL(ids[:, start:end], past_key_values=cache)
        cache.crop(torch.tensor(-removed))  # as older versions of transformers count
        left = 12 - removed
        length = cache.get_seq_length()
        assert type(length) is int and length == left
        again = MODEL(ids[:, left:], past_key_values=cache, output_hidden_states=True)
        assert_close(f"{removed} again", again.logits, whole[:, left:], 1e-10)
        assert again.hidden_states[0].shape[1] == removed
        assert cache.get_seq_length() == 12


def test_rows_keep_what_they_have_to_read_again() -> None:
    ids, order = tokens(3, 8), torch.tensor([2, 0])
    cache = Gdn2Cache()
    cache.activate_past_recording()
    MODEL(ids[:, :4], past_key_values=cache)
    MODEL(ids[:, 4:7], past_key_values=cache)
    cache.crop(-2)
    cache.reorder_cache(order)
    rest = MODEL(ids[order, 5:], past_key_values=cache)
    assert_close("turned", rest.logits, MODEL(ids[order]).logits[:, 5:], 1e-10)
    cache.reorder_cache(order[:1] - 1)
    cache.crop(-3)  # from the call before the rows were chosen
    again = MODEL(ids[:1, 5:], past_key_values=cache).logits
    assert_close("again", again, MODEL(ids[:1]).logits[:, 5:], 1e-10)


def test_rows_keep_a_prompt_that_has_to_be_read_again() -> None:
    """Then there is no state yet, only what the first call began with."""
    ids, order = tokens(3, 6), torch.tensor([1, 1, 0])
    cache = Gdn2Cache()
    cache.batch_repeat_interleave(2)  # of nothing
    cache.activate_past_recording()
    MODEL(ids[:, :5], past_key_values=cache)
    cache.crop(-2)
    assert (cache.state, cache.batch_size) == (None, 3)
    with pytest.raises(ValueError, match=r"^past_key_values: got 3 rows, expected 2$"):
        MODEL(ids[:2, 3:], past_key_values=cache)
    cache.batch_select_indices(order)
    rest = MODEL(ids[order, 3:], past_key_values=cache).logits
    assert_close("turned", rest, MODEL(ids[order]).logits[:, 3:], 1e-10)


def test_what_cannot_be_taken_back_is_refused() -> None:
    cache = MODEL(tokens(2, 5)).past_key_values
    cache.crop(0)
    with pytest.raises(
        ValueError, match=r"^tokens_to_remove: got -1, expected 0 to 0, columns rea"
    ):
        cache.crop(-1)
    cache.activate_past_recording()
    MODEL(tokens(2, 2), past_key_values=cache)
    with pytest.raises(ValueError, match=r"^tokens_to_remove: got -3, expected -2 to 0, columns r"):
        cache.crop(-3)
    with pytest.raises(ValueError, match=r"^tokens_to_remove: got 1, expected -2 to 0"):
        cache.crop(1)
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match=r"^cache_implementation: got 'static', expected None: th"):
        greedy(tokens(1, 3), cache_implementation="static")


def test_a_cache_holds_a_state_like_any_other(tmp_path: Path) -> None:
    """A conversation can be written to a file here and continued natively, and the other way round."""
    ids = tokens(2, 8)
    cache = MODEL(ids[:, :5]).past_key_values
    save_state(cache.state, tmp_path / "state.safetensors")
    state = load_state(tmp_path / "state.safetensors", NATIVE)
    expected = NATIVE(ids[:, 5:], state).logits
    assert expected is not None
    assert torch.equal(MODEL(ids[:, 5:], past_key_values=cache).logits, expected)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert cache.batch_size == 2
    turned = MODEL(ids[[1, 0], :1], past_key_values=cache).logits
    again = MODEL(torch.cat([ids, ids[:, :1]], 1)).logits[[1, 0], -1:]
    assert_close("turned", turned, again, 1e-10)


def test_models_of_linear_layers_alone_generate(tmp_path: Path) -> None:
    """transformers' own cache cannot count tokens without attention."""
    native = make(config(DELTA, layers=2))
    sampling, stop = gdn2.Sampling(temperature=0), gdn2.Stop(max_tokens=NEW)
    (expected,) = gdn2.generate(native, [prompts()[0]], sampling=sampling, stop=stop)
    gdn2.save(native, tmp_path / "m")
    for model in (twin(native), Gdn2ForCausalLM.from_pretrained(tmp_path / "m")):
        written = model.generate(torch.tensor([prompts()[0]]), max_new_tokens=NEW, **GREEDY)
        assert written[0, -NEW:].tolist() == expected.tokens
