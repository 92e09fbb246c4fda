"""Our weights in other people's names and forms: for the released code's trunk, or for models around fla's layer."""

from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from gdn2.hf.export import find_model
from gdn2.hf.forms import to_theirs
from gdn2.hf.holding import check_held, mixer_of
from gdn2.hf.importing import Unsaid
from gdn2.hf.naming import Format, Gate, Kind, naming_in
from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.models.config import ModelConfig
from gdn2.models.files import new_folder, read_json, standing
from gdn2.models.folder import CONFIG, MODEL_TYPE, SHARD_BYTES, load_model
from gdn2.models.language_model import LanguageModel
from gdn2.models.weights import write_weights
from gdn2.ops.arguments import DTYPES, require

PICKLE = "model.pth"


def find_weights(place: Path, step: int | None = None) -> Path:
    """A model's folder as it is, or that of a run as `find_model` finds it."""
    config = standing(place) / CONFIG
    if not config.is_file() or read_json(config).get("model_type") != MODEL_TYPE:
        return find_model(place, step)
    require(step is None, "step", step, f"none: {place} is a model's folder")
    return place


def export_weights(
    source: Path, folder: Path, form: Format, output_gate: Gate | None = None
) -> tuple[Path, Unsaid]:
    """Write the weights of a model folder into a new one; what to read again, and what to say then.

    The released code's are one `.pth`, with the weights under `model` as there; others are safetensors.
    """
    require(not standing(folder).exists(), "folder", f"{folder}, which exists", "a new one")
    model = load_model(source, device="cpu")
    tensors = foreign_tensors(model, form, output_gate)
    with new_folder(folder) as written:
        if form == "lit-gpt":
            torch.save({"model": tensors}, written / PICKLE)
        else:
            write_weights(written, tensors, SHARD_BYTES)
    return (folder / PICKLE if form == "lit-gpt" else folder), unsaid_of(model.config)


def foreign_tensors(
    model: LanguageModel, form: Format, output_gate: Gate | None = None
) -> dict[str, Tensor]:
    """The weights of a model by the names and in the forms that `import_model` reads.

    Args:
        model: one that the format can hold; others are refused.
        form: "lit-gpt", the released code's, or "fla".
        output_gate: the model's, where the format's code computes another and it is to be written all the same.
    """
    config = model.config
    check_held(config, form, output_gate)
    attention: Kind = "fused" if form == "lit-gpt" else "attention"
    kinds: tuple[Kind, ...] = tuple(
        "delta" if isinstance(mixer, DeltaConfig) else attention for mixer in config.mixers
    )
    pairs = [*naming_in(form, kinds, config.tie_word_embeddings).pairs()]
    weights = model.state_dict()
    held = {own for owns, _ in pairs for own in owns}
    others = {n for n, x in weights.items() if n not in held or x.dtype not in DTYPES}
    expected = "a model's own parameters, neither quantised nor with adapters"
    require(not others, "model", f"a parameter {min(others, default='')}", expected)
    return to_theirs(weights, pairs, unsaid_of(config).head_dim)


def unsaid_of(config: ModelConfig) -> Unsaid:
    """What a checkpoint of such a model does not say."""
    delta, attention = mixer_of(config, DeltaConfig), mixer_of(config, AttentionConfig)
    require(delta is not None, "cell", "no mixer of type 'delta'", "at least one")
    assert delta is not None
    gated = delta.output_gate != "none"
    require(gated, "output_gate", repr(delta.output_gate), "'silu' or 'sigmoid'")
    assert delta.output_gate != "none"
    attention = attention or AttentionConfig(window=Unsaid.window)
    return Unsaid(
        output_gate=delta.output_gate,
        erase_range=delta.erase_range,
        head_dim=attention.head_dim,
        window=attention.window,
        rotary_base=attention.rotary_base,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
    )


def in_options(unsaid: Unsaid) -> str:
    """The options of `gdn2 import` that say it, but for those at their defaults."""
    default = {x.name: x.default for x in fields(unsaid) if x.default is not MISSING}
    return _options(
        unsaid, [name for name, usual in default.items() if getattr(unsaid, name) != usual]
    )


def taken(unsaid: Unsaid, config: ModelConfig) -> str:
    """What a model that was imported so has and its tensors do not say, as options whether they were given or not."""
    delta = next(mixer for mixer in config.cell if isinstance(mixer, DeltaConfig))
    assert delta.output_gate != "none"
    attention = any(isinstance(mixer, AttentionConfig) for mixer in config.cell)
    names = ("head_dim", "window", "rotary_base") if attention else ()
    found = replace(unsaid, output_gate=delta.output_gate)
    return _options(found, ["output_gate", "erase_range", *names, "norm_eps"])


def _options(unsaid: Unsaid, names: Iterable[str]) -> str:
    words = []
    for name in names:
        value, option = getattr(unsaid, name), f"--{name.replace('_', '-')}"
        # All tokens are no window here, and 0 there.
        words.append(option if value is True else f"{option} {value or 0}")
    return " ".join(words)
