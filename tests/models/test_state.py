"""States are copied, forked, picked, joined, rolled back and stored without moving a bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gdn2.layers.layout import Layout
from gdn2.models.config import ModelConfig
from gdn2.models.files import read_header, read_tensors
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import prefill
from gdn2.models.state import ModelState
from gdn2.models.state_file import load_state, save_state
from gdn2.ops.kv_cache import KVCache
from tests.closeness import assert_close
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import EVERYTHING, config, make, tokens

EXACT = 1e-10
RAGGED = [4, 9, 1]
CPU = torch.device("cpu")
RECURRENT = config(
    *(mixer for name, mixer in MIXERS.items() if name not in ("attention", "window"))
)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make()


def prompts(*lengths: int) -> list[Tensor]:
    return [tokens(1, length, seed=length)[0] for length in lengths]


def reached(model: LanguageModel, *lengths: int) -> ModelState:
    return prefill(model, prompts(*lengths)).state


def storages(state: ModelState) -> dict[int, int]:
    """The bytes of each piece of memory that the state keeps alive, by its address."""
    held = [x.untyped_storage() for x in state.tensors()]
    return {memory.data_ptr(): memory.nbytes() for memory in held if memory.nbytes()}


def next_logits(model: LanguageModel, state: ModelState, seed: int = 9) -> Tensor:
    """After one more token of each row, the same in every row."""
    ids = tokens(1, 1, seed=seed).expand(state.rows, 1)
    with torch.no_grad():
        found = model(ids, state).logits
    assert isinstance(found, Tensor)
    return found


def same(a: ModelState, b: ModelState) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return a.config == b.config and all(torch.equal(x, y) for x, y in pairs)


def test_a_clone_is_apart(model: LanguageModel) -> None:
    state = model.reserve(reached(model, *RAGGED), 2)
    kept = state.clone()
    assert same(kept, state)
    with torch.no_grad():
        model(tokens(3, 1), state, inplace=True)
    assert not same(kept, state)
    assert state.seen.tolist() == [5, 10, 2]
    assert kept.seen.tolist() == RAGGED


def test_rollback_undoes_speculative_steps(model: LanguageModel) -> None:
    """In place, to the bit, and the tokens taken afterwards are as if they had come at once."""
    state = model.reserve(reached(model, *RAGGED), 8)
    held, kept = list(state.tensors()), state.clone()
    untouched = next_logits(model, kept)
    with torch.no_grad():
        for t in range(5):
            model(tokens(3, 1, seed=t), state, inplace=True)
    assert state.rollback(kept) is state
    assert same(state, kept)
    assert all(a is b for a, b in zip(state.tensors(), held, strict=True))
    assert torch.equal(next_logits(model, state), untouched)


def test_accepting_some_of_a_draft(model: LanguageModel) -> None:
    """Score a draft of five in one call, keep two: as if only these had been taken."""
    state, draft = reached(model, 7), tokens(1, 5, seed=3)
    with torch.no_grad():
        scored = model(draft, state)  # leaves the state as it is
        accepted = model(draft[:, :2], state).state
        one_by_one = model(draft[:, 1:2], model(draft[:, :1], state).state).state
    assert scored.state.seen.tolist() == [12]
    assert_close("logits", next_logits(model, accepted), next_logits(model, one_by_one), EXACT)


def test_forks_are_rows_of_their_own(model: LanguageModel) -> None:
    forked = reached(model, 6, 3).fork(3)
    assert forked.seen.tolist() == [6, 6, 6, 3, 3, 3]
    alone = reached(model, 6, 6, 6, 3, 3, 3)
    for found, expected in zip(forked.tensors(), alone.tensors(), strict=True):
        assert_close("fork", found[:1].double(), expected[:1].double(), EXACT)
    more = tokens(6, 4)
    with torch.no_grad():
        assert_close("logits", model(more, forked).logits, model(more, alone).logits, EXACT)


def test_rows_are_picked_and_joined(model: LanguageModel) -> None:
    """Full attention's caches differ in room until they are joined."""
    state = reached(model, *RAGGED)
    picked = state.select([2, 0, 2])
    assert picked.seen.tolist() == [1, 4, 1]
    assert_close("picked", next_logits(model, picked), next_logits(model, state)[[2, 0, 2]], 1e-12)
    assert same(state.select(torch.tensor([0, 1, 2])), state)
    fresh = model.new_state(1)
    joined = ModelState.join([picked, fresh, reached(model, 12)])
    assert joined.seen.tolist() == [1, 4, 1, 0, 12]
    expected = torch.cat([next_logits(model, s) for s in (picked, fresh, reached(model, 12))])
    assert_close("joined", next_logits(model, joined), expected, EXACT)


def test_recurrent_states_keep_their_size() -> None:
    model = LanguageModel(RECURRENT)
    start = model.new_state(2).nbytes
    state = prefill(model, tokens(2, 300), chunk=100).state
    assert state.nbytes == start
    with torch.device("meta"):  # a million tokens have the shapes of none
        far = LanguageModel(RECURRENT).new_state(2, 1 << 20)
    assert far.nbytes == start


def test_a_state_keeps_nothing_else_alive(model: LanguageModel) -> None:
    for layout in (None, Layout.packed(torch.tensor([0, 300]), 300)):
        with torch.no_grad():
            state = model(tokens(1, 300), model.new_state(1), layout).state
        assert sum(storages(state).values()) == state.nbytes


@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens_give_a_state_of_its_own(model: LanguageModel, packed: bool) -> None:
    layout = Layout.packed(torch.tensor([0, 0, 0]), 0) if packed else None
    with torch.no_grad():
        before = model(tokens(2, 5), model.new_state(2)).state
        after = model(tokens(1 if packed else 2, 0), before, layout).state
    assert same(after, before)
    assert not storages(after).keys() & storages(before).keys()


def test_a_state_with_room_is_a_copy(model: LanguageModel) -> None:
    state = reached(model, *RAGGED)
    kept, expected = state.clone(), next_logits(model, state)
    roomy = model.reserve(state, 2)
    with torch.no_grad():
        for seed in (9, 8):
            ids = tokens(1, 1, seed=seed).expand(3, 1)
            model(ids, roomy, inplace=True)
    assert same(state, kept)
    assert torch.equal(next_logits(model, state), expected)


def test_room_is_used_before_more_is_made(model: LanguageModel) -> None:
    with torch.no_grad():
        state, whole = model.new_state(2, 12), model.new_state(2)
        for ids in tokens(2, 12).split([5, 1, 6], 1):
            state = model(ids, state).state
        expected = model(tokens(2, 12), whole).state
    assert [x.shape for x in state.tensors()] == [x.shape for x in expected.tensors()]
    logits = next_logits(model, expected)
    assert_close("logits", next_logits(model, state), logits, EXACT)
    with torch.no_grad():  # the shorter row has room left
        uneven = prefill(model, prompts(4, 9)).state
        layout = Layout.packed(torch.tensor([0, 5, 6]), 6)
        after = model(tokens(1, 6), uneven, layout).state
    assert [c.capacity for c in after.layers if isinstance(c, KVCache)] == [10, 5]


def test_windows_bound_the_state_and_full_attention_grows() -> None:
    window, full = MIXERS["window"], MIXERS["attention"]
    hybrid, transformer = LanguageModel(config(DELTA, window)), LanguageModel(config(full))
    sizes = [prefill(hybrid, tokens(1, length)).state.nbytes for length in (1, 5, 50, 400)]
    assert len(set(sizes)) == 1
    with torch.device("meta"):
        assert LanguageModel(config(DELTA, window)).new_state(1, 1 << 20).nbytes == sizes[0]
    short, long = (prefill(transformer, tokens(1, n)).state.nbytes for n in (5, 50))
    assert long - short == 45 * 2 * 2 * 6 * 4  # tokens, keys and values, heads, width, fp32


@pytest.mark.parametrize("chosen", [EVERYTHING, RECURRENT], ids=["everything", "recurrent"])
def test_a_file_gives_the_state_back(tmp_path: Path, chosen: ModelConfig) -> None:
    model = make(chosen)
    state = reached(model, *RAGGED)
    save_state(state, tmp_path / "state.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]
    assert same(load_state(tmp_path / "state.safetensors", model), state)
    metadata = read_header(tmp_path / "state.safetensors").metadata
    assert metadata["config"] == chosen.digest
    assert (metadata["rows"], json.loads(metadata["seen"])) == ("3", RAGGED)
    assert json.loads(metadata["shapes"])["blocks.0.memory"] == [3, 6, 5, 4]


def test_bf16_states_come_back_as_they_are(tmp_path: Path) -> None:
    model = LanguageModel(EVERYTHING).cast(torch.bfloat16)
    state = prefill(model, prompts(*RAGGED)).state
    save_state(state, tmp_path / "s")
    assert same(load_state(tmp_path / "s", model), state)
    wide = LanguageModel(EVERYTHING)
    with pytest.raises(ValueError, match=r"got torch\.bfloat16, expected torch\.float32"):
        load_state(tmp_path / "s", wide)


def test_a_state_made_under_autocast_comes_back_and_goes_on(tmp_path: Path) -> None:
    model = LanguageModel(EVERYTHING)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = prefill(model, prompts(*RAGGED)).state
        save_state(state, tmp_path / "s")
        loaded = load_state(tmp_path / "s", model)
        assert torch.bfloat16 in {x.dtype for x in loaded.tensors()}
        assert same(loaded, state)
        assert torch.equal(next_logits(model, loaded), next_logits(model, state))
    spoil(tmp_path / "s", lambda t, _: t.update({n: t[n].half() for n in t if "values" in n}))
    with pytest.raises(
        ValueError, match=r"values: got torch\.float16, expected torch\.bfloat16, as"
    ):
        load_state(tmp_path / "s", model)


def spoil(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    """Write a state file again with something changed."""
    tensors, metadata = read_tensors(path, CPU), read_header(path).metadata
    change(tensors, metadata)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop("blocks.0.memory"), r"no match for blocks\.0\.memory, expected"),
        (lambda t, m: t.update(extra=torch.ones(1)), r"no match for extra, expected"),
        (
            lambda t, m: t.update({"blocks.0.memory": t["blocks.0.memory"][:2].clone()}),
            r"blocks\.0\.memory: got shape \(2, 6, 5, 4\), expected \(3, 6, 5, 4\)$",
        ),
        (lambda t, m: m.update(config="0123"), r"got a state of config 0123, expected \w{16}, the"),
        (lambda t, m: m.clear(), r"got format None, expected gdn2-state-1$"),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path,
    model: LanguageModel,
    change: Callable[[dict[str, Tensor], dict[str, str]], object],
    message: str,
) -> None:
    path = tmp_path / "state"
    save_state(reached(model, *RAGGED), path)
    spoil(path, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_state(path, model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_torn_files_are_refused(tmp_path: Path, model: LanguageModel, size: int) -> None:
    path = tmp_path / "state"
    save_state(reached(model, 3), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"state: got .*, expected a whole safetensors file$"):
        load_state(path, model)
    with pytest.raises(ValueError, match="got no such file"):
        load_state(tmp_path / "nowhere", model)


def other(rows: int = 2) -> ModelState:
    return LanguageModel(config(DELTA)).new_state(rows)


def test_a_state_goes_to_a_folder_that_is_there(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^path: got .*none/x, expected a file in a folder that"):
        save_state(model.new_state(1), tmp_path / "none" / "x")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(tokens(2, 1), other()), r"^state: got one of model \w{16}, expected of model"),
        (lambda m: m(tokens(2, 1), m.new_state(3)), r"^state\.rows: got 3, expected 2$"),
        (lambda m: m.new_state(2).rollback(other()), r"^state: got one of model"),
        (
            lambda m: m.new_state(2).rollback(m.new_state(3)),
            r"^snapshot: got shape \(3, 6, 5, 4\), expected a clone's \(2, 6, 5, 4\)$",
        ),
        (lambda m: m.new_state(2).select([0, 2]), r"^rows: got 2, expected numbers from 0 to 1$"),
        (
            lambda m: m.new_state(2).select(torch.tensor([True, False])),
            r"^rows: got True, expected numbers from 0 to 1$",
        ),
        (lambda m: m.new_state(2).select([0.5]), r"^rows: got 0\.5, expected an integer$"),
        (lambda m: m.reserve(m.new_state(2), -3), r"^tokens: got -3, expected at least 0$"),
        (lambda m: m.new_state(2, -3), r"^capacity: got -3, expected at least 0$"),
        (lambda m: m.new_state(2).fork(0), r"^copies: got 0, expected at least 1$"),
        (lambda m: ModelState.join([]), r"^states: got none, expected at least one$"),
        (lambda m: ModelState.join([m.new_state(1), other()]), r"^state: got one of model"),
    ],
)
def test_mistakes_are_named(
    model: LanguageModel, call: Callable[[LanguageModel], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call(model)
    assert "\n" not in str(caught.value)
