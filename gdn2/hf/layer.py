"""One layer of the released code, or of fla, and a mixer of ours."""

from gdn2.hf.forms import Tensors, check_complete, check_fit, to_ours
from gdn2.hf.naming import GATES, Gate, layer_pairs
from gdn2.layers.config import DeltaConfig
from gdn2.layers.delta import DeltaMixer
from gdn2.ops.arguments import DTYPES, require


def load_layer(
    mixer: DeltaMixer, tensors: Tensors, prefix: str = "", *, output_gate: Gate | None = None
) -> None:
    """Fill a mixer with the tensors of a layer, in the mixer's dtype, or refuse and leave it as it was.

    Args:
        mixer: of Gated DeltaNet-2, in the layer's sizes.
        tensors: a layer's, or those of a whole model.
        prefix: what is before the layer's own names, such as `model.layers.3.attn`; other tensors are not looked at.
        output_gate: what the layer computes, "silu" in the released code, "sigmoid" in fla; it must be the mixer's.
    """
    require(isinstance(mixer, DeltaMixer), "mixer", type(mixer).__name__, "a DeltaMixer")
    check_layer(mixer.config)
    require(output_gate in ("silu", "sigmoid"), "output_gate", output_gate, GATES)
    own_gate = mixer.config.output_gate
    require(output_gate == own_gate, "output_gate", output_gate, f"{own_gate}, the mixer's")
    place = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    layer = {name: x for name, x in tensors.items() if name.startswith(place)}
    pairs = [*layer_pairs("", place)]
    check_complete(layer.keys(), pairs, f"the tensors of a layer behind {place!r} and no others")
    weights = to_ours(layer, pairs)
    parameters = dict(mixer.named_parameters())
    others = {n for n, x in parameters.items() if n not in weights or x.dtype not in DTYPES}
    missing = weights.keys() - parameters.keys()
    got = f"{'a' if others else 'no'} parameter {min(others or missing, default='')}"
    own = "a DeltaMixer's own parameters, neither quantised nor with adapters"
    require(not others and not missing, "mixer", got, own)
    check_fit(weights, {own: other for owns, other in pairs for own in owns}, mixer)
    empty = any(x.is_meta for x in [*weights.values(), *parameters.values()])
    require(
        not empty, "mixer", "tensors on the meta device", "a mixer and tensors that hold values"
    )
    mixer.load_state_dict(weights)


def check_layer(config: DeltaConfig) -> None:
    """Refuse a mixer that computes what the layer cannot."""
    for name in ("decay", "erase_gate", "write_gate"):
        got = getattr(config, name)
        require(got == "channel", name, repr(got), "'channel', as in the layer of others")
    gates, rank = config.gates, config.gate_rank
    require(gates == "separate", "gates", repr(gates), "'separate', as in the layer of others")
    require(rank is not None, "gate_rank", rank, "a rank, as in the layer of others")
    known = config.output_gate in ("silu", "sigmoid")
    require(known, "output_gate", repr(config.output_gate), GATES)
