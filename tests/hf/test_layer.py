"""A layer of others fills one of our mixers, and computes the same there; what does not fit leaves it alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, rms_norm, silu, softplus

from gdn2.hf import load_layer
from gdn2.layers.delta import DeltaMixer
from gdn2.layers.mixers import build_mixer
from tests.closeness import assert_close
from tests.hf.foreign import LAYER, WINDOW, Tensors, layer
from tests.layers.cases import WIDTH, inputs, run
from tests.models.cases import config, make, quantise

PLACE = "backbone.layers.1.gdn."


def theirs(**changes: Any) -> Tensors:
    """A layer in other people's names, inside a model of somebody's."""
    model = make(config(replace(LAYER, **changes), layers=2)).float()
    named = {PLACE + name: x.clone() for name, x in layer(model, 1).items()}
    return {**named, "backbone.layers.1.norm1.scale": torch.ones(WIDTH)}


def their_output(layer: Tensors, x: Tensor, value_heads: int) -> Tensor:
    """What fla's layer computes of x [length, width], token by token, from its own tensors."""
    heads, keys, values = 2, 5, 4

    def mapped(name: str) -> Tensor:
        return x @ layer[f"{name}.weight"].T

    def convolved(name: str) -> Tensor:
        taps = layer[f"{name}_conv1d.weight"]
        past = torch.cat([x.new_zeros(3, len(taps)), mapped(f"{name}_proj")])
        return silu(conv1d(past.T, taps, groups=len(taps)).T)

    def through_two(name: str) -> Tensor:
        return mapped(f"{name}.0") @ layer[f"{name}.1.weight"].T

    def shared(z: Tensor) -> Tensor:
        return z.unflatten(1, (heads, keys)).repeat_interleave(value_heads // heads, 1)

    q, k = (shared(convolved(name)) for name in "qk")
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    speed = softplus(through_two("f_proj") + layer["dt_bias"]).unflatten(1, (heads, keys))
    decay = (-layer["A_log"].exp()[:, None] * speed).exp()
    decay = decay.repeat_interleave(value_heads // heads, 1)
    erase = shared(mapped("b_proj").sigmoid())
    written = (mapped("w_proj").sigmoid() * convolved("v")).unflatten(1, (value_heads, values))
    state, outputs = x.new_zeros(value_heads, keys, values), []
    for t in range(len(x)):
        state = decay[t, ..., None] * state
        old = torch.einsum("hk,hkv->hv", erase[t] * k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], written[t] - old)
        outputs.append(torch.einsum("hk,hkv->hv", q[t] * keys**-0.5, state))
    gate = (through_two("g_proj") + layer["g_proj.1.bias"]).unflatten(1, (value_heads, values))
    normed = rms_norm(torch.stack(outputs), (values,), layer["o_norm.weight"], 1e-5)
    return (normed * gate.sigmoid()).flatten(1) @ layer["o_proj.weight"].T


def fresh(**changes: Any) -> DeltaMixer:
    return DeltaMixer(replace(LAYER, **changes), WIDTH)


@pytest.mark.parametrize("prefix", [PLACE, PLACE.removesuffix(".")])
@pytest.mark.parametrize("value_heads", [2, 4])
def test_a_layer_computes_the_same_in_a_mixer(prefix: str, value_heads: int) -> None:
    sizes = {"output_gate": "sigmoid", "num_value_heads": value_heads}
    tensors = {name: x.double() for name, x in theirs(**sizes).items()}
    mixer = fresh(**sizes).double()
    load_layer(mixer, tensors, prefix, output_gate="sigmoid")
    x = inputs(1, 9)
    own = {name.removeprefix(PLACE): y for name, y in tensors.items()}
    assert_close("y", run(mixer, x, None)[0][0], their_output(own, x[0], value_heads), 1e-12)
    assert torch.equal(mixer.q_conv.weight, tensors[PLACE + "q_conv1d.weight"][:, 0])


def test_without_a_prefix_all_tensors_are_the_layers() -> None:
    tensors = theirs()
    bare = {x.removeprefix(PLACE): y for x, y in tensors.items() if x.startswith(PLACE)}
    mixer = fresh().bfloat16()
    load_layer(mixer, bare, output_gate="silu")
    assert torch.equal(mixer.erase_proj.weight, bare["b_proj.weight"].bfloat16())


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({PLACE + name: change(tensors[PLACE + name])})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            changed("f_proj.0.weight", lambda x: x.T),
            r"^checkpoint: backbone\.layers\.1\.gdn\.f_proj\.0\.weight: got shape \(10, 3\), expected \(3, 10\)$",
        ),
        (
            changed("v_conv1d.weight", lambda x: x[..., 1:]),
            r"^checkpoint: backbone\.layers\.1\.gdn\.v_conv1d\.weight: got shape \(8, 3\), expected \(8, 4\)$",
        ),
        (
            lambda tensors: tensors.pop(PLACE + "dt_bias"),
            r"^checkpoint: got no backbone\.layers\.1\.gdn\.dt_bias, expected the tensors of a layer "
            r"behind 'backbone\.layers\.1\.gdn\.' and no others$",
        ),
        (
            lambda tensors: tensors.update({PLACE + "q_conv1d.bias": torch.ones(10)}),
            r"^checkpoint: got unexpected backbone\.layers\.1\.gdn\.q_conv1d\.bias, expected the tensors",
        ),
        (
            changed("k_proj.weight", lambda x: (100 * x).to(torch.int8)),
            r"^checkpoint: backbone\.layers\.1\.gdn\.k_proj\.weight: got torch\.int8, expected fp64, f",
        ),
        (
            changed("k_proj.weight", lambda x: x.to("meta")),
            r"^mixer: got tensors on the meta device, expected a mixer and tensors that hold values$",
        ),
        (
            lambda tensors: tensors.clear(),
            r"^checkpoint: got no .* and 14 more, expected the tensors ",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    spoil: Callable[[Tensors], object], message: str
) -> None:
    tensors = theirs()
    spoil(tensors)
    mixer = fresh()
    before = {name: x.clone() for name, x in mixer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_layer(mixer, tensors, PLACE, output_gate="silu")
    assert all(torch.equal(x, before[name]) for name, x in mixer.state_dict().items())


def test_the_gate_must_be_said_and_be_the_mixers() -> None:
    tensors = theirs()
    with pytest.raises(ValueError, match=r"^output_gate: got None, expected silu, as in the relea"):
        load_layer(fresh(), tensors, PLACE)
    with pytest.raises(ValueError, match=r"^output_gate: got sigmoid, expected silu, the mixer's$"):
        load_layer(fresh(), tensors, PLACE, output_gate="sigmoid")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": "tied"}, r"^gates: got 'tied', expected 'separate', as in the layer of others$"),
        ({"decay": "head"}, r"^decay: got 'head', expected 'channel', as in the layer of others$"),
        ({"decay": "none"}, r"^decay: got 'none', expected 'channel', as in the layer of others$"),
        ({"erase_gate": "mean"}, r"^erase_gate: got 'mean', expected 'channel', as in the layer o"),
        ({"write_gate": "mean"}, r"^write_gate: got 'mean', expected 'channel', as in the layer o"),
        ({"gate_rank": None}, r"^gate_rank: got None, expected a rank, as in the layer of others$"),
        ({"output_gate": "none"}, r"^output_gate: got 'none', expected silu, as in the released c"),
    ],
)
def test_other_mixers_are_refused(changes: dict[str, Any], message: str) -> None:
    tensors = theirs()
    with pytest.raises(ValueError, match=message):
        load_layer(fresh(**changes), tensors, PLACE, output_gate="silu")


def test_other_layers_are_refused() -> None:
    attention: Any = build_mixer(WINDOW, WIDTH)
    with pytest.raises(ValueError, match=r"^mixer: got AttentionMixer, expected a DeltaMixer$"):
        load_layer(attention, {}, output_gate="silu")
    with torch.device("meta"):
        nowhere = fresh()
    with pytest.raises(ValueError, match=r"^mixer: got tensors on the meta device, expected a mix"):
        load_layer(nowhere, theirs(), PLACE, output_gate="silu")
    rounded = fresh()
    quantise(rounded)
    with pytest.raises(ValueError, match=r"^mixer: got a parameter decay_proj\.down\.weight, ex"):
        load_layer(rounded, theirs(), PLACE, output_gate="silu")
    for map_ in rounded.modules():
        if isinstance(map_, torch.nn.Linear):
            map_.register_parameter("weight", None)  # as where integers are packed
    with pytest.raises(
        ValueError, match=r"^mixer: got no parameter decay_proj\.down\.weight, expec"
    ):
        load_layer(rounded, theirs(), PLACE, output_gate="silu")
    mixer: Any = fresh()
    mixer.q_proj = torch.nn.Sequential(mixer.q_proj)  # as an adapter wraps it
    with pytest.raises(
        ValueError, match=r"^mixer: got a parameter q_proj\.0\.weight, expected a D"
    ):
        load_layer(mixer, theirs(), PLACE, output_gate="silu")
