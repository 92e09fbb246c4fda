"""Names that others give to our tensors: the released lit-gpt code, and models around fla's layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# Of the layer, the same in both; what it shares with attention comes first.
SHARED = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
DELTA = {
    "q_conv.weight": "q_conv1d.weight",
    "k_conv.weight": "k_conv1d.weight",
    "v_conv.weight": "v_conv1d.weight",
    "erase_proj.weight": "b_proj.weight",
    "write_proj.weight": "w_proj.weight",
    "decay_proj.down.weight": "f_proj.0.weight",
    "decay_proj.up.weight": "f_proj.1.weight",
    "decay_log_rate": "A_log",
    "decay_bias": "dt_bias",
    "gate_proj.down.weight": "g_proj.0.weight",
    "gate_proj.up.weight": "g_proj.1.weight",
    "gate_proj.up.bias": "g_proj.1.bias",
    "norm.weight": "o_norm.weight",
}
FUSED, FUSED_OUT = "attn.weight", "proj.weight"  # of attention in the released code
# Of what is around the layer: roles, which are our names without the blocks' numbers, and what plays them.
FLA = {
    "embedding": "embeddings",
    "norm": "norm",
    "head": "lm_head",
    "mixer_norm": "attn_norm",
    "mlp_norm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
LIT_GPT = {
    "embedding": "wte",
    "norm": "ln_f",
    "head": "lm_head",
    "mixer_norm": "norm_1",
    "mlp_norm": "norm_2",
    "mlp.gate_proj": "mlp.swiglu.w1",
    "mlp.up_proj": "mlp.swiglu.w2",
    "mlp.down_proj": "mlp.swiglu.w3",
}
# What is before names of the trunk, what comes then before a block's number, and what plays the roles.
PLACES = {"fla": ("model.", "layers.", FLA), "lit-gpt": ("transformer.", "h.", LIT_GPT)}
LAYER = "attn."  # before a mixer's own names
TRUNK = ("embedding", "norm", "head")  # roles outside the blocks
ATTENTION = {f"attention.{own}": other for own, other in SHARED.items()}  # in the mixer's place
ROLES = (*FLA, *ATTENTION)

# Nothing in a file tells the output gates apart.
GATES = "silu, as in the released code, or sigmoid, as in fla: names and shapes are the same"

Gate = Literal["silu", "sigmoid"]
Format = Literal["lit-gpt", "fla"]
Kind = Literal["delta", "attention", "fused"]
Pair = tuple[tuple[str, ...], str]  # ours and theirs; in a fused tensor there are three of ours


@dataclass(frozen=True)
class Naming:
    """How a file calls our tensors."""

    blocks: str  # before a block's number
    layer: str  # before a mixer's own names, behind the number
    kinds: tuple[Kind, ...]  # of the blocks' mixers
    roles: Mapping[str, str]  # names of the trunk; those of blocks from behind the number on

    @property
    def is_official(self) -> bool:
        """Whether this is the released code's."""
        known = naming_in("lit-gpt", self.kinds, tied=False)
        mlp = "mlp.gate_proj"
        return self.blocks == known.blocks and self.roles[mlp] == known.roles[mlp]

    def pairs(self) -> Iterator[Pair]:
        """Our names and the file's, of every tensor."""
        for role, theirs in self.roles.items():
            ours = f"{role.replace('attention.', 'mixer.')}.weight"
            places = ("",) if role in TRUNK else (f"blocks.{i}." for i in self._players(role))
            for place, name in zip(places, self.names(role, theirs), strict=True):
                yield (f"{place}{ours}",), name
        for i, kind in enumerate(self.kinds):
            ours, theirs = f"blocks.{i}.mixer.", f"{self.blocks}{i}.{self.layer}"
            if kind == "delta":
                yield from layer_pairs(ours, theirs)
            elif kind == "fused":
                yield tuple(f"{ours}{x}_proj.weight" for x in "qkv"), theirs + FUSED
                yield (f"{ours}out_proj.weight",), theirs + FUSED_OUT

    def names(self, role: str, theirs: str) -> list[str]:
        """What plays a role, as whole names: one of the trunk, or one of each block that has such a part."""
        if role in TRUNK:
            return [theirs]
        return [f"{self.blocks}{i}.{theirs}" for i in self._players(role)]

    def _players(self, role: str) -> list[int]:
        every = role not in ATTENTION
        return [i for i, kind in enumerate(self.kinds) if every or kind == "attention"]


def naming_in(form: Format, kinds: tuple[Kind, ...], tied: bool) -> Naming:
    """The naming of the released code, or of a model around fla's layers as fla names its own."""
    trunk, blocks, table = PLACES[form]
    roles = {
        role: f"{trunk if role in ('embedding', 'norm') else ''}{name}.weight"
        for role, name in table.items()
        if role != "head" or not tied
    }
    if "attention" in kinds:
        roles |= {role: f"{LAYER}{name}.weight" for role, name in ATTENTION.items()}
    return Naming(trunk + blocks, LAYER, kinds, roles)


def layer_pairs(ours: str, theirs: str) -> Iterator[Pair]:
    """Names of a delta mixer's tensors, each with what is before it."""
    shared = {f"{own}.weight": f"{other}.weight" for own, other in SHARED.items()}
    for own, other in {**shared, **DELTA}.items():
        yield (f"{ours}{own}",), f"{theirs}{other}"
