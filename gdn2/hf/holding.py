"""What other people's code can compute of our models; the rest is refused by the field's name."""

from typing import TypeVar

from gdn2.hf.importing import Unsaid
from gdn2.hf.layer import check_layer
from gdn2.hf.naming import PLACES, Format, Gate
from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.models.config import ModelConfig
from gdn2.ops.arguments import require

Config = TypeVar("Config", DeltaConfig, AttentionConfig)

COMPUTED: dict[Format, Gate] = {"lit-gpt": "silu", "fla": "sigmoid"}


def check_held(config: ModelConfig, form: Format, output_gate: Gate | None) -> None:
    """Refuse a model that code of this format would compute otherwise, or not at all.

    Sizes are not looked at: shapes say them. Another output gate passes where it is given, as the model's own.
    """
    require(form in PLACES, "format", repr(form), "lit-gpt or fla")
    for mixer in config.cell:
        known = isinstance(mixer, DeltaConfig | AttentionConfig)
        require(known, "cell", f"a mixer of type {mixer.type!r}", "'delta' and 'attention'")
    delta, attention = mixer_of(config, DeltaConfig), mixer_of(config, AttentionConfig)
    require(delta is not None, "cell", "no mixer of type 'delta'", "at least one")
    assert delta is not None
    check_layer(delta)
    rank, width = delta.gate_rank, delta.value_head_dim
    require(rank == width, "gate_rank", rank, f"{width}, the value_head_dim, as in their layer")
    _check_gate(delta, form, output_gate)
    if form == "lit-gpt":
        _check_trunk(config, delta, attention)


def mixer_of(config: ModelConfig, kind: type[Config]) -> Config | None:
    """The one mixer of this kind; None where there is none."""
    found = {mixer for mixer in config.cell if isinstance(mixer, kind)}
    several = f"{len(found)} different mixers of type {kind.type!r}"
    require(len(found) <= 1, "cell", several, "one: a checkpoint tells them for all blocks")
    return next(iter(found), None)


def _check_gate(delta: DeltaConfig, form: Format, output_gate: Gate | None) -> None:
    own = delta.output_gate
    if output_gate is not None:
        require(output_gate == own, "output_gate", output_gate, f"{own}, the model's")
        return
    anyway = f"; --output-gate {own} writes the weights all the same"
    computed = COMPUTED[form]
    require(own == computed, "output_gate", own, f"{computed}, which {form} computes{anyway}")


def _check_trunk(
    config: ModelConfig, delta: DeltaConfig, attention: AttentionConfig | None
) -> None:
    """The released trunk: every n-th block has the layer, and most of what files do not say is fixed."""
    fixed = [
        ("erase_range", delta.erase_range, Unsaid.erase_range),
        ("rms_norm_eps", config.rms_norm_eps, Unsaid.norm_eps),
        ("tie_word_embeddings", config.tie_word_embeddings, Unsaid.tied),
    ]
    if attention is not None:
        heads, width = attention.num_heads, config.hidden_size
        fixed += [
            ("num_kv_heads", attention.kv_heads, heads),
            ("num_heads * head_dim", heads * attention.head_dim, width),
            ("rotary_base", attention.rotary_base, Unsaid.rotary_base),
        ]
    for name, got, expected in fixed:
        require(got == expected, name, got, f"{expected}, as in the released code")
    layers = [isinstance(mixer, DeltaConfig) for mixer in config.mixers]
    period = next((i for i, has in enumerate(layers) if i and has), len(layers))
    regular = layers == [i % period == 0 for i in range(len(layers))]
    types = ", ".join(mixer.type for mixer in config.cell)
    require(regular, "cell", types, "a delta mixer first, then attention or nothing")
