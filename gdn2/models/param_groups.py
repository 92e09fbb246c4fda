"""Which parameters decay, which do not, and which are matrices that Muon may take."""

from typing import Any

from torch import nn

from gdn2.ops.arguments import require

# A fused map is several matrices in one. A step of Muon has a fixed size, which drives decays and one-number gates far.
NOT_FOR_MUON = ("in_proj", "decay_proj", "beta_proj")
# Biases and diagonal maps that are not vectors.
VECTORS = ("key_bias", "query_bias", "mimo_value", "mimo_gate", "mimo_out")


def param_groups(model: nn.Module, weight_decay: float, decay_all: bool) -> list[dict[str, Any]]:
    """Three groups that hold every parameter once, each with its weight decay and whether Muon may take it.

    Vectors are norms, biases, and the parameters of decays and step sizes: pulled towards zero these shorten the
    memory. The released training code decays them all the same, as does `decay_all`.
    """
    require(weight_decay >= 0, "weight_decay", weight_decay, "at least 0")
    members: dict[str, list[nn.Parameter]] = {"matrices": [], "tables": [], "vectors": []}
    for name, parameter in model.named_parameters():
        members[group_of(name, parameter)].append(parameter)
    return [
        {
            "name": name,
            "params": params,
            "weight_decay": weight_decay if decay_all or name != "vectors" else 0.0,
            "muon": name == "matrices",
        }
        for name, params in members.items()
    ]


def group_of(name: str, parameter: nn.Parameter) -> str:
    """Matrices are linear maps inside blocks; tables are embedding, head, fused maps, gates and convolutions."""
    path = name.split(".")
    if parameter.ndim < 2 or path[-1] in VECTORS:
        return "vectors"
    is_map = path[0] == "blocks" and not path[-2].endswith("conv")
    return "matrices" if is_map and not set(NOT_FOR_MUON) & set(path) else "tables"
