"""What others put around a model, or make of it, still calls all of it: hooks, adapters, compilers, meta tensors."""

from typing import Any

import torch
from torch import nn

from gdn2.layers.delta import LowRank
from gdn2.layers.joint import lay_side_by_side
from gdn2.layers.norm import RMSNorm
from gdn2.models.language_model import LanguageModel
from tests.closeness import assert_close
from tests.layers.cases import DELTA, MIXERS, Doubling
from tests.models.cases import VOCABULARY, config, gradients, logits_of, make, tokens

EXACT = 1e-10


def test_norms_with_hooks_or_adapters_are_called() -> None:
    mixers = DELTA, MIXERS["window"], MIXERS["mamba2"], MIXERS["mamba3"]
    model, ids = make(config(*mixers, layers=4)), tokens(2, 9)
    plain = logits_of(model, ids)
    norms = [x for x in model.modules() if isinstance(x, RMSNorm)]
    seen: list[nn.Module] = []
    hooks = [x.register_forward_hook(lambda norm, *_: seen.append(norm)) for x in norms]
    assert_close("logits", logits_of(model, ids), plain, EXACT)
    assert len(norms) > 10 and len(seen) == len(norms) and {*seen} == {*norms}
    for hook in hooks:
        hook.remove()
    model.norm = Doubling(model.norm)  # type: ignore[assignment]
    assert_close("logits", logits_of(model, ids), 2 * plain, EXACT)


def test_maps_with_a_narrow_middle_are_called_where_they_have_hooks_or_adapters() -> None:
    model, ids = make(config(DELTA)), tokens(2, 9)
    plain = logits_of(model, ids)
    maps = [x for x in model.modules() if isinstance(x, LowRank)]
    seen: list[nn.Module] = []
    hooks = [x.register_forward_hook(lambda map_, *_: seen.append(map_)) for x in maps]
    assert_close("logits", logits_of(model, ids), plain, EXACT)
    lay_side_by_side(model)  # passes over them
    with torch.no_grad():
        assert_close("logits", logits_of(model, ids), plain, EXACT)
    assert len(maps) == 2 * len(model.mixers) and seen == 2 * maps
    for hook in hooks:
        hook.remove()
    adapted = make(config(DELTA))
    for mixer in adapted.mixers:
        for name in ("decay_proj", "gate_proj"):
            setattr(mixer, name, Doubling(mixer.get_submodule(name)))
    with torch.no_grad():
        for map_ in maps:
            for parameter in map_.up.parameters():
                parameter.mul_(2)
    assert_close("logits", logits_of(adapted, ids), logits_of(model, ids), EXACT)


def test_a_map_is_called_once_by_hooks_that_leave() -> None:
    """A hook that removes itself, as that of a first call does, changes nothing."""
    model, ids = make(config(DELTA)), tokens(2, 9)
    expected = logits_of(model, ids)
    for map_ in [x for x in model.modules() if isinstance(x, LowRank)]:
        map_.register_forward_hook(lambda called, *_: called._forward_hooks.clear())
        assert_close("logits", logits_of(model, ids), expected, EXACT)
        assert not map_._forward_hooks


def test_a_head_with_hooks_or_adapters_is_called() -> None:
    model, ids, targets = make(config(DELTA)), tokens(2, 9), tokens(2, 9, seed=1)
    targets[0, :4] = -100
    plain, loss = logits_of(model, ids), model(ids, targets=targets).loss
    seen: list[nn.Module] = []
    hook = model.head.register_forward_hook(lambda head, *_: seen.append(head))
    assert_close("logits", logits_of(model, ids), plain, EXACT)
    assert_close("loss", model(ids, targets=targets).loss, loss, EXACT)
    assert seen == [model.head] * 2
    hook.remove()
    model.head = Doubling(model.head)  # type: ignore[assignment]
    assert_close("logits", logits_of(model, ids), 2 * plain, EXACT)
    expected = nn.functional.cross_entropy(2 * plain.flatten(0, 1), targets.flatten())
    assert_close("loss", model(ids, targets=targets).loss, expected, EXACT)
    assert model(ids, targets=torch.full_like(targets, -100)).loss == 0


def test_compiles_to_one_graph() -> None:
    model, ids = make(config(DELTA, MIXERS["window"], layers=2)), tokens(2, 9)
    targets = tokens(2, 9, seed=1)
    plain = model(ids, targets=targets).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(ids, targets=targets).loss
    assert_close("loss", found, plain, EXACT)
    reference = gradients(model, plain)
    for name, d in gradients(model, found).items():
        assert_close(name, d, reference[name], EXACT)


def test_a_step_in_place_compiles_to_one_graph() -> None:
    model, ids = make(config(MIXERS["window"], MIXERS["attention"])), tokens(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        state = model.reserve(model(ids, model.new_state(2)).state, 1)
        expected = model(ids[:, :1], state.clone(), inplace=True).logits
        assert_close("logits", compiled(ids[:, :1], state, inplace=True).logits, expected, EXACT)
    assert state.seen.tolist() == [5, 5]


def test_lengths_do_not_compile_anew() -> None:
    model, graphs = make(config(DELTA, MIXERS["window"], layers=2)), []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=count)
    for length in (9, 13, 17, 30, 70, 128, 130, 263, 300, 450, 513, 600):
        ids = tokens(2, length)
        assert_close("logits", compiled(ids).logits, logits_of(model, ids), EXACT)
    # One for the first length; of those that the window divides and of others, one each for a block and for several;
    # and one for several whole blocks.
    assert len(graphs) <= 6


def test_meta_tensors_pass_through() -> None:
    with torch.device("meta"):
        model, ids = LanguageModel(config(DELTA, MIXERS["window"])), torch.zeros(2, 9).long()
        logits, _, state = model(ids, model.new_state(2))
        assert model(ids, targets=ids).loss.shape == ()
    assert logits.shape == (2, 9, VOCABULARY)
    assert state.layers[0].memory.shape == (2, 6, 5, 4)
