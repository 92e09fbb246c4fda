"""How a file calls our tensors, found from the names in it and from what a user says is called otherwise."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from gdn2.hf.naming import (
    ATTENTION,
    DELTA,
    FLA,
    FUSED,
    FUSED_OUT,
    LIT_GPT,
    ROLES,
    SHARED,
    TRUNK,
    Kind,
    Naming,
)
from gdn2.ops.arguments import require

# Other common names, for which a file is searched as well.
COMMON = {
    "embedding": ("embed_tokens", "tok_embeddings", "embedding"),
    "norm": ("final_norm",),
    "head": ("head", "output"),
    "mixer_norm": ("input_layernorm", "mixer_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
}


def read_names(words: Iterable[str]) -> dict[str, str]:
    """Names by roles, from words such as norm=norm_f."""
    called: dict[str, str] = {}
    for word in words:
        role, _, name = word.partition("=")
        whole = bool(role) and bool(name)
        require(whole, "name", repr(word), "role=name, such as embedding=backbone.tok_emb")
        require(role not in called, "name", f"{role} twice", "one name for it")
        called[role] = name
    return called


def recognise(names: Collection[str], called: Mapping[str, str], tied: bool) -> Naming:
    """The naming of a file, told by where the first convolution of a delta mixer lies.

    Args:
        names: of its tensors.
        called: what plays a role, with or without `.weight`: of the trunk a whole name, or what comes beside the
            blocks; of a block what comes behind its number. Roles that are not here are searched by common names.
        tied: there is no head.
    """
    names = frozenset(names)
    blocks, layer = _first_convolution(names)
    numbers = (re.match(rf"{re.escape(blocks)}(\d+)\.", name) for name in names)
    count = 1 + max(int(number[1]) for number in numbers if number)
    few = f"at most {len(names)}, as many as there are tensors"
    require(count <= len(names), "checkpoint", f"a block {blocks}{count - 1}", few)
    apart = any(role in ATTENTION for role in called)
    kinds = tuple(_kind(names, f"{blocks}{i}.{layer}", apart) for i in range(count))
    naming = Naming(blocks, layer, kinds, {})
    absent = {*(() if "attention" in kinds else ATTENTION), *(["head"] if tied else [])}
    roles = [role for role in ROLES if role not in absent]
    for role, said in called.items():
        had = f"one of {', '.join(roles)}, which the model has"
        require(role in roles, "name", f"{role}={said}", had)
    found = {role: _find(names, naming, role, called.get(role)) for role in roles}
    return replace(naming, roles=found)


def advice(names: Collection[str], naming: Naming) -> str:
    """The options for roles that no tensor of these names plays, or nothing."""
    roles = naming.roles.items()
    missing = [role for role, theirs in roles if not _plays(names, naming, role, theirs)]
    tied = {"head": " or --tied"}
    options = " and ".join(f"--name {role}=…{tied.get(role, '')}" for role in missing)
    return f"; {options} would help" * bool(missing)


def _first_convolution(names: Collection[str]) -> tuple[str, str]:
    """What is before a block's number, and what is between it and the layer's own names."""
    for name in sorted(names):
        found = re.fullmatch(r"((?:.*?\.)??)(\d+)\.(.*)q_conv1d\.weight", name)
        if found is not None:
            return found[1], found[3]
    raise ValueError("checkpoint: got no tensor ….q_conv1d.weight, expected blocks with one")


def _kind(names: Collection[str], place: str, apart: bool) -> Kind:
    """The kind of the mixer whose names begin with `place`.

    `apart` says that a user names maps of attention, which then is not fused.
    """
    if any(place + name in names for name in DELTA.values()):
        return "delta"
    apart = apart or f"{place}{SHARED['q_proj']}.weight" in names
    is_fused = not apart and any(place + name in names for name in (FUSED, FUSED_OUT))
    return "fused" if is_fused else "attention"


def _find(names: Collection[str], naming: Naming, role: str, said: str | None) -> str:
    """What plays the role, or else its likeliest name; what a user says must be there."""
    options = _options(naming, role, said)
    found = next((name for name in options if _plays(names, naming, role, name)), None)
    if found is None and said is not None:
        place = naming.names(role, "")[0]
        known = [name.removeprefix(place) for name in names if name.startswith(place)]
        near = "".join(f", such as {name}" for name in get_close_matches(said, known, n=1))
        behind = f" behind {place}" * bool(place)
        raise ValueError(f"name: got {role}={said}, expected a tensor's name{behind}{near}")
    return found or options[0]


def _plays(names: Collection[str], naming: Naming, role: str, theirs: str) -> bool:
    return any(name in names for name in naming.names(role, theirs))


def _options(naming: Naming, role: str, said: str | None) -> list[str]:
    """Names to look for, the likeliest first."""
    if said is not None:
        options = [said, f"{said}.weight"]
    elif role in ATTENTION:
        options = [f"{naming.layer}{ATTENTION[role]}.weight"]
    else:
        options = [f"{name}.weight" for name in (FLA[role], LIT_GPT[role], *COMMON.get(role, ()))]
    if role not in TRUNK:
        return options
    parent, dot, _ = naming.blocks.removesuffix(".").rpartition(".")
    places = ["", parent + dot] if role == "head" else [parent + dot, ""]
    return [place + name for place in places for name in options]
