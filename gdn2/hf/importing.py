"""Other people's checkpoints as our models; every tensor is accounted for, or the file is refused."""

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from gdn2.hf.forms import Tensors, check_complete, check_fit, to_ours
from gdn2.hf.naming import GATES, ROLES, Gate, Kind, Naming
from gdn2.hf.recognising import advice, recognise
from gdn2.layers.config import AttentionConfig, DeltaConfig, MixerConfig
from gdn2.layers.plain import nearest
from gdn2.models.config import ModelConfig
from gdn2.models.files import each_tensor
from gdn2.models.language_model import LanguageModel
from gdn2.models.weights import weight_files
from gdn2.ops.arguments import require

WRAPPERS = re.compile(r"^(?:_forward_module\.|module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")
CHECKPOINT = "a checkpoint of tensors and plain values"
OTHER = "something else, or code, which is not run"


@dataclass(frozen=True, kw_only=True)
class Unsaid:
    """What the tensors of a checkpoint do not say.

    output_gate: "silu" in the released code, "sigmoid" in fla; names and shapes are the same. None is SiLU for the
        released code's checkpoints, and an error for others.
    head_dim, window, rotary_base: of attention, where there is any; the defaults are the released code's.
    names: what is called otherwise, as `recognise` takes it.
    """

    output_gate: Gate | None = None
    erase_range: float = 1.0
    head_dim: int = 128
    window: int | None = 2048
    rotary_base: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.head_dim >= 1, "head_dim", self.head_dim, "at least 1")
        for role, name in self.names.items():
            require(role in ROLES, "name", f"{role}={name}", f"{nearest(role, ROLES)} before =")


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .pth file, of a safetensors file, or of a folder of these, without prefixes of wrappers.

    They lie in the files' memory maps, where these have one, so that whoever copies them holds them once. A pickle is
    read by torch's own reader of tensors and plain values, which executes nothing.
    """
    path = Path(path)
    require(path.exists(), "checkpoint", f"{path}, which is not there", "a file or a folder")
    files = weight_files(path) if path.is_dir() else [path]
    found: dict[str, Any] = {}
    for file in files:
        is_safe = file.suffix == ".safetensors"
        found |= dict(each_tensor(file, torch.device("cpu"))) if is_safe else _unpickle(file)
    for name in ("model", "state_dict"):
        found = found[name] if isinstance(found.get(name), dict) else found
    tensors: dict[str, Tensor] = {}
    for wrapped, value in found.items():
        name = WRAPPERS.sub("", str(wrapped))
        require(name not in tensors, "checkpoint", f"{name} twice, in wrappers", "each once")
        tensors[name] = value
        fits = isinstance(value, Tensor)
        require(fits, f"checkpoint: {name}", type(value).__name__, "a tensor")
    return tensors


def import_model(tensors: Tensors, unsaid: Unsaid) -> LanguageModel:
    """The model that a checkpoint of the released code, or of a model around fla's layer, holds."""
    naming = recognise(tensors.keys(), unsaid.names, unsaid.tied)
    tensors = _without_tied_head(tensors, naming) if unsaid.tied else tensors
    pairs = [*naming.pairs()]
    whole = "the tensors of its blocks and no others"
    check_complete(tensors.keys(), pairs, whole + advice(tensors.keys(), naming))
    for name, x in tensors.items():
        require(x.numel() > 0, f"checkpoint: {name}", f"shape {tuple(x.shape)}", "some numbers")
    names = {own: other for owns, other in pairs for own in owns}
    config = _config(tensors, naming, names, unsaid)
    with torch.device("meta"):
        model = LanguageModel(config)
    weights = to_ours(tensors, pairs, unsaid.head_dim)
    check_fit(weights, names, model)
    # Tensors of a file may share its memory, and lie where, or so that, products round differently.
    dense = torch.contiguous_format
    own_memory = {own: x.clone(memory_format=dense) for own, x in weights.items()}
    model.load_state_dict(own_memory, assign=True)
    return model


def _without_tied_head(tensors: Tensors, naming: Naming) -> Tensors:
    """The tensors without the embedding under a head's name, as pickles of tied models hold it; another one stays."""
    table = tensors.get(naming.roles["embedding"])
    known = {name for _, name in naming.pairs()}
    again = {name for name in tensors.keys() - known if _same(tensors[name], table)}
    return {name: x for name, x in tensors.items() if name not in again}


def _same(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.dtype == y.dtype and torch.equal(x, y)


def _unpickle(file: Path) -> dict[str, Any]:
    try:
        # Older files are no archives, and have to be read at once.
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError:  # torch's words on it advise to read the file without care
        raise ValueError(f"{file}: got {OTHER}, expected {CHECKPOINT}") from None
    # Any: bytes that are no pickle may be taken for any of its commands.
    except Exception as reason:
        line = str(reason).strip().partition("\n")[0] or "a file that ends early"
        raise ValueError(f"{file}: got {line!r}, expected {CHECKPOINT}") from None
    require(isinstance(found, dict), f"{file}", type(found).__name__, "a dict of tensors")
    return found


def _config(tensors: Tensors, naming: Naming, names: dict[str, str], unsaid: Unsaid) -> ModelConfig:
    """Sizes that most blocks agree on, taken from vectors and counts: so a tensor that is wrong is the one refused."""

    def size(ending: str) -> int:
        return mode(tensors[other].numel() for own, other in names.items() if own.endswith(ending))

    width = size("mixer_norm.weight")
    mixers: list[MixerConfig] = [
        _delta(size, width, naming, unsaid)
        if kind == "delta"
        else _attention(tensors, kind, names, unsaid, width, i)
        for i, kind in enumerate(naming.kinds)
    ]
    return ModelConfig(
        hidden_size=width,
        intermediate_size=size("mlp.up_proj.weight") // width,
        num_hidden_layers=len(naming.kinds),
        cell=_cell(mixers),
        vocab_size=size("embedding.weight") // width,
        rms_norm_eps=unsaid.norm_eps,
        tie_word_embeddings=unsaid.tied,
    )


def _delta(size: Callable[[str], int], width: int, naming: Naming, unsaid: Unsaid) -> DeltaConfig:
    gate = unsaid.output_gate or ("silu" if naming.is_official else None)
    require(gate is not None, "output_gate", gate, GATES)
    assert gate is not None
    heads, keys = size(".decay_log_rate"), size(".decay_bias")
    values, value_head = size(".gate_proj.up.bias"), size(".mixer.norm.weight")
    return DeltaConfig(
        num_heads=heads,
        num_value_heads=None if values == heads * value_head else values // value_head,
        key_head_dim=keys // heads,
        value_head_dim=value_head,
        conv_width=size(".q_conv.weight") // keys,
        erase_range=unsaid.erase_range,
        output_gate=gate,
        gate_rank=size(".decay_proj.down.weight") // width,
    )


def _attention(
    tensors: Tensors, kind: Kind, names: dict[str, str], unsaid: Unsaid, width: int, i: int
) -> AttentionConfig:
    def heads(own: str) -> int:
        name = names[f"blocks.{i}.mixer.{own}.weight"]
        rows = tensors[name].numel() // width // (3 if kind == "fused" else 1)
        fits = rows % unsaid.head_dim == 0
        require(fits, "head_dim", unsaid.head_dim, f"a divisor of {rows}, the rows of {name}")
        return rows // unsaid.head_dim

    queries, keys = heads("q_proj"), heads("k_proj")
    return AttentionConfig(
        num_heads=queries,
        num_kv_heads=None if keys == queries else keys,
        head_dim=unsaid.head_dim,
        window=unsaid.window,
        rotary_base=unsaid.rotary_base,
    )


def _cell(mixers: list[MixerConfig]) -> tuple[MixerConfig, ...]:
    """The shortest cell whose repetition this is."""
    count = len(mixers)
    periods = (n for n in range(1, count + 1) if count % n == 0)
    return next(tuple(mixers[:n]) for n in periods if mixers[:n] * (count // n) == mixers)
