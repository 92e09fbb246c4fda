"""The models of transformers are the native ones, bit by bit, and folders belong to both."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
)

import gdn2
from gdn2.hf import Gdn2Cache, Gdn2Config, Gdn2ForCausalLM, Gdn2Model
from gdn2.layers.initialisation import InitScheme
from gdn2.layers.layout import Layout
from gdn2.models.folder import load_config
from gdn2.models.language_model import LanguageModel
from tests.closeness import assert_close
from tests.hf.cases import make, padded, prompts, tokens, twin
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import EVERYTHING, config

SMALL = config(DELTA, MIXERS["window"])
DTYPES = [torch.float32, torch.bfloat16]


def logits_of(model: LanguageModel, ids: Tensor, layout: Layout | None = None) -> Tensor:
    logits = model(ids, layout=layout).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_logits_are_the_native_ones_to_the_bit(name: str, dtype: torch.dtype) -> None:
    native = make(config(MIXERS[name], layers=2)).cast(dtype)
    model = twin(native)
    ids = tokens(3, 66)
    assert torch.equal(model(ids).logits, logits_of(native, ids))
    for side in ("left", "right"):
        ids, mask = padded(prompts(), side)
        expected = logits_of(native, ids, Layout.from_mask(mask))
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    ids = tokens(1, 12)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    expected = logits_of(native, ids, Layout.packed(ends, 12))
    assert torch.equal(model(ids, cu_seq_lens_q=ends).logits, expected)


@pytest.mark.parametrize(
    ("tied", "dtype", "size"),
    [
        (False, torch.float32, "50GB"),
        (False, torch.bfloat16, "5KB"),
        (True, torch.float32, "5KB"),
        (True, torch.bfloat16, "50GB"),
        (False, torch.float64, "5KB"),
    ],
    ids=str,
)
def test_folders_belong_to_both(tmp_path: Path, tied: bool, dtype: torch.dtype, size: str) -> None:
    native, ids = make(replace(EVERYTHING, tie_word_embeddings=tied)).cast(dtype), tokens(2, 9)
    expected = logits_of(native, ids)
    gdn2.save(native, tmp_path / "ours", stop_ids=[3])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(model) is Gdn2ForCausalLM
    assert model.generation_config.eos_token_id == [3]
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) == 1 or size == "5KB"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert torch.equal(again(ids).logits, expected)
    back = gdn2.load(tmp_path / "theirs")
    assert back.config == native.config
    ours = dict(native.named_parameters())
    for name, parameter in back.named_parameters():
        assert parameter.dtype == ours[name].dtype
        assert torch.equal(parameter, ours.pop(name))
    assert not ours
    assert torch.equal(logits_of(back, ids), expected)


def test_a_folder_saved_again_is_read_as_transformers_does(tmp_path: Path) -> None:
    """What it saved first was in several files, whose index it leaves behind."""
    old, new = make(config(DELTA)), make(config(DELTA))
    with torch.no_grad():
        new.norm.weight.add_(1)
    twin(old).save_pretrained(tmp_path, max_shard_size="5KB")
    twin(new).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(gdn2.load(tmp_path).norm.weight, new.norm.weight)


def test_a_dtype_can_be_chosen_and_decays_stay_exact(tmp_path: Path) -> None:
    native, ids = make().float(), tokens(2, 9)
    gdn2.save(native, tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    expected = gdn2.load(tmp_path / "m", dtype=torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in expected.named_parameters()}
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == kinds
    assert torch.equal(model(ids).logits, logits_of(expected, ids))
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    begun = auto.from_config(model.config, dtype=torch.bfloat16)
    right = dict(LanguageModel(native.config, seed=0).named_parameters())
    assert {name: parameter.dtype for name, parameter in begun.named_parameters()} == kinds
    for name, parameter in begun.named_parameters():
        assert torch.equal(parameter, right[name].to(kinds[name])), name


def test_the_base_model_reads_the_same_folder(tmp_path: Path) -> None:
    native = make(SMALL)
    gdn2.save(native, tmp_path / "m")
    base, report = AutoModel.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert type(base) is Gdn2Model
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids, mask = padded(prompts(), "left")
    hidden = base(ids, attention_mask=mask).last_hidden_state
    expected = logits_of(native, ids, Layout.from_mask(mask))
    assert_close("logits", hidden @ native.head_weight.T, expected, 1e-12)
    (same,) = base(ids, attention_mask=mask, use_cache=False, return_dict=False)
    assert torch.equal(same, hidden)


@pytest.mark.parametrize("scheme", ["released", "paper", "normal"])
def test_first_values_are_the_native_ones(scheme: InitScheme, tmp_path: Path) -> None:
    chosen = replace(EVERYTHING, init_scheme=scheme)
    Gdn2Config.from_native(chosen).save_pretrained(tmp_path)
    torch.manual_seed(5)
    model = Gdn2ForCausalLM(AutoConfig.from_pretrained(tmp_path))
    native = LanguageModel(chosen, seed=5)
    own = dict(model.named_parameters())
    assert own.keys() == dict(native.named_parameters()).keys()
    for name, parameter in native.named_parameters():
        assert torch.equal(parameter, own[name]), name


def test_loading_undoes_nothing_and_fills_only_what_is_missing(tmp_path: Path) -> None:
    native = make(SMALL).float()
    gdn2.save(native, tmp_path / "m")
    file, missing = tmp_path / "m/model.safetensors", "blocks.0.mixer.decay_log_rate"
    tensors = load_file(file)
    del tensors[missing]
    save_file(tensors, file, {"format": "pt"})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    own, fresh = dict(model.named_parameters()), LanguageModel(SMALL, seed=3)
    assert torch.equal(own.pop(missing), fresh.get_parameter(missing))
    for name, parameter in own.items():
        assert torch.equal(parameter, native.get_parameter(name)), name


def test_the_config_is_one(tmp_path: Path) -> None:
    theirs = Gdn2Config.from_native(EVERYTHING, eos_token_id=2, anything="else")
    theirs.save_pretrained(tmp_path)
    assert load_config(tmp_path) == EVERYTHING
    found = AutoConfig.from_pretrained(tmp_path)
    assert found.native() == EVERYTHING
    assert (found.eos_token_id, found.anything) == (2, "else")
    assert found.layer_types == EVERYTHING.layer_types
    assert found.num_attention_heads == 4 and found.num_key_value_heads == 2
    assert found.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {k: v for k, v in found.to_dict().items() if k.startswith("linear_")}
    assert sizes == {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": False,
    }
    assert Gdn2Config().native() == gdn2.preset("gdn2-1.3b")


def test_a_config_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^sliding_window: got 9, expected 5, as its cell says$"):
        Gdn2Config.from_native(SMALL, sliding_window=9)
    with pytest.raises(ValueError, match=r"^cell\[0\]\.conv_widt: unknown name, expected conv_wid"):
        Gdn2Config(cell=[{"type": "delta", "conv_widt": 3}])
    changed = Gdn2Config.from_native(SMALL)
    changed.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"^layer_types: got \['linear_attention', 'sliding_atte"):
        Gdn2ForCausalLM(changed)
    Gdn2Config.from_native(SMALL).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "layer_types": []}))
    with pytest.raises(ValueError, match=r"layer_types: got \[\], expected \['linear_attention'"):
        AutoConfig.from_pretrained(tmp_path)


def flattened(rows: list[list[int]], **options: Any) -> dict[str, Any]:
    collate = DataCollatorWithFlattening(**options)  # type: ignore[no-untyped-call]
    return dict(collate([{"input_ids": row} for row in rows]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True, "return_position_ids": False},
    ],
    ids=["positions", "both", "lengths", "numbers"],
)
def test_packed_rows_do_not_see_each_other(options: dict[str, bool]) -> None:
    model, rows = twin(make()), prompts()
    batch = flattened(rows, **options)
    found = model(**batch)
    alone = [model(torch.tensor([row])).logits for row in rows]
    assert_close("logits", found.logits, torch.cat(alone, 1), 1e-10)
    assert found.past_key_values is None
    losses = [
        model(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1)
        for row in rows
        if len(row) > 1
    ]
    expected = sum(losses) / sum(len(row) - 1 for row in rows)
    assert_close("loss", found.loss, expected, 1e-6)  # transformers takes losses in fp32


def test_padding_on_either_side_has_the_same_loss() -> None:
    """Its logits are zero, and would score the first token after it."""
    model = twin(make(SMALL))
    batches = [padded(prompts(), side) for side in ("left", "right")]
    left, right = (
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        for ids, mask in batches
    )
    assert_close("loss", left, right, 1e-6)  # transformers takes losses in fp32


def test_positions_of_whole_rows_say_nothing_new() -> None:
    model, ids = twin(make(SMALL)), tokens(2, 6)
    expected = model(ids).logits
    for positions in (torch.arange(6)[None], torch.arange(3, 9).expand(2, 6)):
        assert torch.equal(model(ids, position_ids=positions).logits, expected)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])  # the same for both rows
    parts = torch.cat([model(part).logits for part in ids.split(3, 1)], 1)
    assert_close("logits", model(ids, position_ids=packed).logits, parts, 1e-10)


def test_packed_rows_may_be_padded_as_well() -> None:
    model, ids = twin(make(SMALL)), tokens(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]])
    found = model(ids, attention_mask=mask, position_ids=positions).logits
    for row, start, end in ((0, 0, 3), (0, 3, 5), (1, 0, 1), (1, 1, 2), (1, 2, 5)):
        alone = model(ids[row : row + 1, start:end]).logits[0]
        assert_close(f"{row}, {start}", found[row, start:end], alone, 1e-10)


def test_logits_can_be_fewer_and_hidden_states_more() -> None:
    model = twin(make(SMALL))
    ids, mask = padded(prompts(), "left")
    inputs = {"input_ids": ids, "attention_mask": mask}
    whole = model(**inputs, output_hidden_states=True)
    assert_close("3", model(**inputs, logits_to_keep=3).logits, whole.logits[:, -3:], 1e-12)
    some = model(**inputs, logits_to_keep=torch.tensor([1, 4])).logits
    assert_close("list", some, whole.logits[:, [1, 4]], 1e-12)
    assert_close("1", model(**inputs, logits_to_keep=1).logits, whole.logits[:, -1:], 1e-12)
    ids, mask = padded(prompts(), "right")  # the last token is not in the last column
    last = model(ids, attention_mask=mask, logits_to_keep=1).logits
    assert_close("right", last, whole.logits[:, -1:], 1e-10)
    assert len(whole.hidden_states) == 3
    assert_close("first", whole.hidden_states[0][0], model.embedding(inputs["input_ids"])[0], 1e-12)
    assert_close("last", model.head(whole.hidden_states[-1]), whole.logits, 1e-12)
    assert model(**inputs).hidden_states is None


def test_embeddings_may_be_given_and_resized() -> None:
    model, ids = twin(make(SMALL)), tokens(2, 6)
    expected = model(ids).logits
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)
    model.resize_token_embeddings(30)
    found = model(ids).logits
    assert found.shape[-1] == 30
    cache = model(ids, use_cache=True).past_key_values
    assert cache.state.config == model.config.native().digest
    assert_close("old tokens", found[..., :23], expected, 1e-12)
    assert bool(model(torch.full((1, 2), 29)).logits.isfinite().all())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_have_the_same_gradients(reentrant: bool) -> None:
    ids = tokens(2, 9)

    def gradients(checkpointed: bool) -> list[Tensor]:
        model = twin(make()).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = model(ids, labels=ids)
        assert found.past_key_values is None
        found.loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == len(checkpointed) == len(list(make().parameters()))
    assert all(map(torch.equal, plain, checkpointed))


def test_bad_calls_are_refused_in_a_line() -> None:
    model, ids = twin(make(SMALL)), tokens(2, 6)
    cache = model(ids).past_key_values
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    other = twin(make(config(DELTA)))(ids).past_key_values
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({}, r"^input_ids or inputs_embeds: got none, expected one of them$"),
        (
            {"input_ids": ids, "inputs_embeds": model.embedding(ids)},
            r"^input_ids or inputs_embeds: got both, expected one of them$",
        ),
        (
            {"input_ids": ids, "past_key_values": DynamicCache()},
            r"^past_key_values: got DynamicCache, expected a Gdn2Cache, or None for a new one$",
        ),
        (
            {"input_ids": ids[:1], "past_key_values": cache},
            r"^past_key_values: got 2 rows, expected 1$",
        ),
        (
            {"input_ids": ids, "past_key_values": other},
            r"^state: got one of model \w+, expected of",
        ),
        (
            {"input_ids": ids[:1], "position_ids": packed, "past_key_values": Gdn2Cache()},
            r"^past_key_values: got one of packed sequences, expected none for them$",
        ),
        (
            {"input_ids": ids, "attention_mask": torch.ones(2, 5)},
            r"^attention_mask: got shape \(2, 5\), expected \(2, at least 6\)$",
        ),
        (
            {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])},
            r"^attention_mask: got shape \(1, 6\), expected \(2, at least 6\)$",
        ),
        (
            {"input_ids": ids, "attention_mask": torch.ones(3, 6)},
            r"^attention_mask: got shape \(3, 6\), expected \(2, at least 6\)$",
        ),
        (
            {"input_ids": ids, "position_ids": torch.arange(6).expand(3, 6)},
            r"^position_ids: got shape \(3, 6\), expected \(2, 6\)$",
        ),
        (
            {"input_ids": ids, "seq_idx": torch.zeros(3, 6)},
            r"^seq_idx: got shape \(3, 6\), expected \(2, 6\)$",
        ),
        (
            {"input_ids": ids, "position_ids": torch.arange(7)[None]},
            r"^position_ids: got shape \(1, 7\), expected \(2, 6\)$",
        ),
        (
            {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 3, 6])},
            r"^cu_seq_lens_q: got one beside 2 rows, expected one row$",
        ),
    ]
    for arguments, message in mistakes:
        with pytest.raises(ValueError, match=message):
            model(**arguments)


def test_padding_beside_packed_sequences_is_refused() -> None:
    model, ids = twin(make(SMALL)), tokens(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    for packed in (
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 6])},
    ):
        whole = model(ids, **packed).logits
        assert torch.equal(model(ids, attention_mask=torch.ones_like(mask), **packed).logits, whole)
        with pytest.raises(ValueError, match="attention_mask: got padding beside packed"):
            model(ids, attention_mask=mask, **packed)


def test_sequences_stay_apart_beside_a_row_of_padding() -> None:
    model, ids = twin(make(SMALL)), tokens(2, 9)
    positions = torch.tensor([[0, 0, 1, 2, 3, 0, 1, 2, 3], [0] * 9])
    mask = torch.tensor([[0, *[1] * 8], [0] * 9])
    found = model(ids, position_ids=positions, attention_mask=mask).logits[0]
    for start, end in ((1, 5), (5, 9)):
        assert_close("alone", found[start:end], model(ids[:1, start:end]).logits[0], 1e-10)


def test_weights_of_attention_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^output_attentions: got True, expected False"):
        twin(make(SMALL))(tokens(1, 3), output_attentions=True)
