"""A hybrid of every mixer gives the same answer however its tokens come, and says what is wrong with them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import gdn2
from gdn2.layers.layout import Layout
from gdn2.models.language_model import LanguageModel
from gdn2.models.state import ModelState
from gdn2.ops.chunk_op import chunk_forward
from tests.closeness import assert_close, relative_error
from tests.layers import literal
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import EVERYTHING, VOCABULARY, config, gradients, logits_of, make, tokens

EXACT = 1e-10
LENGTHS = [4, 9, 1, 6]


def padded(side: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Ragged rows in a batch, its mask, and the rows; padding holds a token that must not matter."""
    rows = [tokens(1, length, seed=length)[0] for length in LENGTHS]
    longest = max(LENGTHS) + 1
    ids, mask = torch.full((len(rows), longest), 7), torch.zeros(len(rows), longest)
    for i, row in enumerate(rows):
        start = {"left": longest - len(row), "right": 0, "both": 1}[side]
        ids[i, start : start + len(row)] = row
        mask[i, start : start + len(row)] = 1
    return ids, mask.long(), rows


@pytest.mark.parametrize("tied", [False, True])
def test_model_is_its_definition(tied: bool) -> None:
    chosen = config(*MIXERS.values(), tied=tied)
    model, ids = make(chosen), tokens(2, 11)
    p: dict[str, Tensor] = dict(model.named_parameters())
    x = p["embedding.weight"][ids]
    for i, mixer in enumerate(chosen.mixers):
        prefix = f"blocks.{i}."
        own = {n.removeprefix(f"{prefix}mixer."): v for n, v in p.items() if prefix in n}
        x = x + literal.mixed(mixer, own, literal.rms(x, p[f"{prefix}mixer_norm.weight"]))
        y = literal.rms(x, p[f"{prefix}mlp_norm.weight"])
        gate, up, down = (p[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
        x = x + (literal.silu(y @ gate) * (y @ up)) @ down
    head = p["embedding.weight" if tied else "head.weight"]
    expected = literal.rms(x, p["norm.weight"]) @ head.T
    assert_close("logits", logits_of(model, ids), expected, EXACT)


@pytest.mark.parametrize(
    "pieces", [[20], [17, 1, 1, 1], [1] * 20, [5, 1, 8, 2, 1, 3], [0, 19, 1], [3, 0, 17]]
)
def test_any_split_is_the_whole(pieces: list[int]) -> None:
    model, ids = make(), tokens(2, 20)
    whole = logits_of(model, ids)
    state, parts = model.new_state(2), []
    for piece in ids.split(pieces, 1):
        logits, _, state = model(piece, state)
        parts.append(logits)
    assert_close("logits", torch.cat(parts, 1), whole, EXACT)
    assert state.seen.tolist() == [20, 20]


def test_steps_in_place_are_steps() -> None:
    model, ids = make(), tokens(2, 12)
    whole = logits_of(model, ids)
    with torch.no_grad():
        state = model.reserve(model(ids[:, :8], model.new_state(2)).state, 4)
        held = list(state.tensors())
        for t in range(8, 12):
            logits, _, state = model(ids[:, t : t + 1], state, inplace=True)
            assert_close("logits", logits, whole[:, t : t + 1], EXACT)
        assert all(a is b for a, b in zip(state.tensors(), held, strict=True))
    assert state.seen.tolist() == [12, 12]


@pytest.mark.parametrize("name", ["gdn2-1m-hybrid", "transformer-1m"])
def test_steps_in_place_need_room_and_are_refused_untouched(name: str) -> None:
    model = LanguageModel(replace(gdn2.preset(name), vocab_size=VOCABULARY)).double()
    ids = tokens(2, 9)
    whole = logits_of(model, ids)
    with torch.no_grad():
        prepared = model.new_state(2, 9)
        for t in range(9):
            found = model(ids[:, t : t + 1], prepared, inplace=True).logits
            assert_close(f"token {t}", found, whole[:, t : t + 1], EXACT)
        read = model(ids[:, :8], model.new_state(2)).state
        for state, slots in ((model.new_state(2), 0), (read, 8), (prepared, 9)):
            kept = state.clone()
            message = (
                rf"^cache has capacity {slots}, expected at least {slots + 1}: "
                "reserve it before steps in place$"
            )
            with pytest.raises(ValueError, match=message):
                model(ids[:, :1], state, inplace=True)
            assert all(map(torch.equal, state.tensors(), kept.tensors()))
        nobody = model(ids[:0, :1], model.new_state(0), inplace=True)
        assert nobody.logits.shape == (0, 1, VOCABULARY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [1, 5, 66])
def test_the_future_moves_no_bit(dtype: torch.dtype, cut: int) -> None:
    model, ids = make().to(dtype), tokens(2, 70)
    other = torch.cat([ids[:, :cut], (ids[:, cut:] + 1) % VOCABULARY], 1)
    before, after = logits_of(model, ids), logits_of(model, other)
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert not torch.equal(before[:, cut], after[:, cut])


@pytest.mark.parametrize("by", ["cu_seqlens", "positions"])
def test_packed_documents_are_separate_ones(by: str) -> None:
    model, ids = make(), tokens(1, sum(LENGTHS))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    counts = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    packed = Layout.packed(bounds, sum(LENGTHS))
    layout = packed if by == "cu_seqlens" else Layout.from_positions(counts)
    targets = tokens(1, sum(LENGTHS), seed=1)
    parts = ids.split(LENGTHS, 1)
    separate = torch.cat([logits_of(model, part) for part in parts], 1)
    assert_close("logits", logits_of(model, ids, layout), separate, EXACT)
    assert relative_error(logits_of(model, ids), separate) > 1e-3
    loss = model(ids, layout=layout, targets=targets).loss
    expected = cross_entropy(separate[0], targets[0])
    assert_close("loss", loss, expected, EXACT)
    reference = gradients(model, expected)
    for name, d in gradients(model, loss).items():
        assert_close(name, d, reference[name], EXACT)


def test_rows_of_several_documents_are_told_apart_by_positions() -> None:
    model, ids = make(), tokens(2, 8)
    layout = Layout.from_positions(
        torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [3, 4, 5, 6, 7, 0, 1, 2]])
    )
    found = logits_of(model, ids, layout)
    for row, lengths in enumerate([[3, 2, 3], [5, 3]]):
        parts = ids[row : row + 1].split(lengths, 1)
        expected = torch.cat([logits_of(model, part) for part in parts], 1)
        assert_close(f"row {row}", found[row : row + 1], expected, EXACT)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_nothing(side: str) -> None:
    model = make()
    ids, mask, rows = padded(side)
    layout = Layout.from_mask(mask)
    targets = tokens(len(rows), ids.shape[1], seed=4)
    found, _, state = model(ids, model.new_state(len(rows)), layout)
    assert not found[mask == 0].any()
    alone, losses = [], []
    for i, row in enumerate(rows):
        logits, _, own = model(row[None], model.new_state(1))
        assert_close(f"row {i}", found[i, mask[i] == 1], logits[0], EXACT)
        alone.append(own)
        losses.append(cross_entropy(logits[0], targets[i, mask[i] == 1], reduction="sum"))
    loss = model(ids, layout=layout, targets=targets).loss
    expected = torch.stack(losses).sum() / sum(LENGTHS)
    assert_close("loss", loss, expected, EXACT)
    reference = gradients(model, expected)
    for name, d in gradients(model, loss).items():
        assert_close(name, d, reference[name], EXACT)
    # The ragged batch goes on row by row as if each had been alone.
    assert state.seen.tolist() == LENGTHS
    last, _ = model.next_token_logits(ids, None, layout)
    for i, row in enumerate(rows):
        assert_close(f"last of row {i}", last[i], logits_of(model, row[None])[0, -1], EXACT)
    for t in range(3):
        more = tokens(len(rows), 1, seed=10 + t)
        found, _, state = model(more, state)
        for i in range(len(rows)):
            logits, _, alone[i] = model(more[i : i + 1], alone[i])
            assert_close(f"row {i}, step {t}", found[i], logits[0], EXACT)


def test_names_and_lists_are_no_configs_and_no_ids() -> None:
    expected = r"^config: got 'gdn2-1m', expected a ModelConfig, such as gdn2\.preset\(name\)$"
    with pytest.raises(ValueError, match=expected):
        LanguageModel("gdn2-1m")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^ids: got list, expected a tensor \[batch, length\]$"):
        make(EVERYTHING)([[1, 2]])


def test_a_mask_without_padding_is_a_dense_batch() -> None:
    assert Layout.from_mask(torch.ones(2, 5).bool()).cu_seqlens is None


def test_rows_without_tokens() -> None:
    """A row of padding keeps its state, and has nothing to predict from."""
    model = make()
    ids, mask = tokens(2, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    before = model(tokens(2, 3), model.new_state(2)).state
    logits, after = model.next_token_logits(ids, before, Layout.from_mask(mask))
    assert after is not None
    assert not logits[0].isnan().any()
    assert logits[1].isnan().all()
    assert after.seen.tolist() == [8, 3]
    next_id = tokens(2, 1, seed=5)
    kept = model(next_id, after).logits[1]
    assert_close("row 1", kept, model(next_id, before).logits[1], EXACT)


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, ids, targets = make(), tokens(2, 9), tokens(2, 9, seed=1)
    targets[0, :4] = -100
    loss = model(ids, targets=targets).loss
    expected = cross_entropy(logits_of(model, ids).flatten(0, 1), targets.flatten())
    assert_close("loss", loss, expected, EXACT)
    reference = gradients(model, expected)
    for name, d in gradients(model, loss).items():
        assert_close(name, d, reference[name], EXACT)


def test_checkpointing_blocks_changes_no_gradient() -> None:
    model, ids, targets = make(), tokens(2, 9), tokens(2, 9, seed=1)
    plain = gradients(model, model(ids, targets=targets).loss)
    kept: list[int] = []

    def memory(checkpointed: bool) -> dict[str, Tensor]:
        model.checkpoint_blocks(checkpointed)
        sizes: list[int] = []

        def pack(x: Tensor) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(ids, targets=targets).loss
            kept.append(sum(sizes))
            return gradients(model, loss)

    for checkpointed in (False, True):
        for name, d in memory(checkpointed).items():
            assert torch.equal(d, plain[name]), name
    assert kept[1] < kept[0] / 4


def test_keeping_factors_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recurrent mixer asks the rule for it, and for nothing where there are no gradients."""
    model, ids, targets = make(), tokens(2, 9), tokens(2, 9, seed=1)
    plain = gradients(model, model(ids, targets=targets).loss)
    kept: list[str] = []

    def forward(*arguments: Any) -> Any:
        kept.append(arguments[-2])
        return chunk_forward(*arguments)

    monkeypatch.setattr("gdn2.ops.rule.chunk_forward", forward)
    for enabled, what in ((True, "states"), (False, "factors")):
        kept.clear()
        model.recompute_factors(enabled)
        for name, d in gradients(model, model(ids, targets=targets).loss).items():
            assert torch.equal(d, plain[name]), name
        assert kept == [what] * model.config.layer_types.count("linear_attention")
    kept.clear()
    with torch.no_grad():
        model(ids)
    assert set(kept) == {"nothing"}


def test_states_can_be_picked_and_copied() -> None:
    model, ids = make(), tokens(3, 9)
    state = model(ids[:, :6], model.new_state(3)).state
    picked = state.map(lambda x: x[[2, 0]].clone())
    logits = model(ids[[2, 0], 6:], picked).logits
    assert_close("logits", logits, logits_of(model, ids[[2, 0]])[:, 6:], EXACT)
    assert picked.rows == 2
    assert state.nbytes == sum(x.numel() * x.element_size() for x in state.tensors())


def test_a_cast_keeps_decays_exact() -> None:
    model, ids = make(), tokens(2, 20)
    expected = logits_of(model, ids)
    rounded = make().to(torch.float16)
    assert model.cast(torch.float16) is model
    kept = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert {n.split(".")[-1] for n in kept} == {"decay_log_rate", "decay_bias", "step_bias"}
    assert relative_error(logits_of(model, ids), expected) < 0.05
    assert not torch.equal(logits_of(model, ids), logits_of(rounded, ids))
    state = model(ids, model.new_state(2)).state
    assert model(ids[:, :1], state).logits.dtype == torch.float16


def test_names_at_the_top() -> None:
    assert gdn2.LanguageModel is LanguageModel
    assert gdn2.preset("gdn2-1m") == gdn2.ModelConfig.from_dict(gdn2.preset("gdn2-1m").to_dict())
    with pytest.raises(AttributeError, match="has no attribute 'langage'"):
        _ = gdn2.langage


SMALL = config(DELTA)
loose: Any = Layout  # takes what types forbid


def other_rows(model: LanguageModel) -> ModelState:
    return model.new_state(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(tokens(1, 4)[0]), r"^ids: got shape \(4,\), expected \[batch, length\]$"),
        (lambda m: m(tokens(1, 4).float()), r"^ids: got torch\.float32, expected int32 or int64$"),
        (lambda m: m(tokens(1, 4) - 30), r"^ids: got -\d+, expected 0 to 22$"),
        (lambda m: m(torch.tensor([[0, 23]])), r"^ids: got 23, expected 0 to 22$"),
        (
            lambda m: m(tokens(2, 4), targets=tokens(2, 3)),
            r"^targets: got shape \(2, 3\), expected ids' \(2, 4\)$",
        ),
        (
            lambda m: m(tokens(2, 4), targets=[[1]]),
            r"^targets: got list, expected a tensor \[batch, length\]$",
        ),
        (
            lambda m: m(tokens(2, 4), layout=torch.ones(2, 4)),
            r"^layout: got Tensor, expected a Layout, such as Layout\.from_mask\(mask\)$",
        ),
        (
            lambda m: m(tokens(2, 4), torch.ones(2, 4)),
            r"^state: got Tensor, expected a ModelState, such as new_state makes$",
        ),
        (lambda m: m(tokens(2, 4), other_rows(m)), r"^state\.rows: got 3, expected 2$"),
        (
            lambda m: m(tokens(2, 4), layout=Layout.dense(2, 5)),
            r"^ids: got shape \(2, 4\), expected \(2, 5\)$",
        ),
        (
            lambda m: m(tokens(1, 4).to("meta"), layout=Layout.packed(torch.tensor([0, 4]), 4)),
            r"^layout: got device cpu, expected ids' device meta$",
        ),
        (lambda m: m.new_state(-1), r"^rows: got -1, expected at least 0$"),
        (lambda m: m.cast(torch.int8), r"^dtype: got torch\.int8, expected one of torch\.float64,"),
        (lambda m: m.cast("bfloat16"), r"^dtype: got 'bfloat16', expected one of torch\.float64,"),
        (lambda m: loose.packed([0, 4], 4), r"^cu_seqlens is \[0, 4\], expected a tensor$"),
        (lambda m: loose.from_mask([[1]]), r"^mask: got list, expected a tensor$"),
        (
            lambda m: Layout.from_positions(torch.zeros(1, 2)),
            r"^position_ids: got torch\.float32, expected integers$",
        ),
    ],
)
def test_bad_arguments_are_named(call: Callable[[LanguageModel], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call(LanguageModel(SMALL))
    assert "\n" not in str(caught.value)


def test_models_of_one_seed_are_the_same() -> None:
    for a, b, c in zip(
        LanguageModel(EVERYTHING).parameters(),
        LanguageModel(EVERYTHING).parameters(),
        LanguageModel(EVERYTHING, seed=1).parameters(),
        strict=True,
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == bool((a == a.flatten()[0]).all())  # constants have no seed


def test_steps_in_place_have_no_gradients() -> None:
    """Nor do they keep what earlier steps have made."""
    model, ids = make(), tokens(2, 4)
    state = model.reserve(model.new_state(2), 4)
    before = model(ids, model.new_state(2)).logits
    for i in range(4):
        logits, _, state = model(ids[:, i : i + 1], state, inplace=True)
        assert not logits.requires_grad
        assert not any(x.requires_grad for x in state.tensors())
        assert_close("logits", logits[:, 0], before[:, i].detach(), EXACT)


@pytest.mark.parametrize(
    "name", ["attention", "window", "mamba3", "mamba3, rank 3", "mamba2", "gdn2"]
)
def test_states_pass_where_autocast_comes_and_goes(name: str) -> None:
    model, ids = LanguageModel(config(MIXERS[name])), tokens(2, 6)
    with torch.no_grad():
        fresh = model.new_state(2, 6)
        right = model(ids).logits
        for first in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=first):
                state = model(ids[:, :4], fresh).state
            with torch.autocast("cpu", torch.bfloat16, enabled=not first):
                logits, _, state = model(ids[:, 4:5], state)
                assert relative_error(logits[:, 0], right[:, 4]) < 0.05
                after = model(ids[:, 5:], state, inplace=True)
            assert relative_error(after.logits[:, 0], right[:, 5]) < 0.05
            kinds = [x.dtype for x in after.state.tensors()]
            assert kinds == [x.dtype for x in fresh.tensors()]
