"""What a model costs: parameters, FLOPs per token, and what it carries per sequence."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gdn2.layers.config import AttentionConfig, MixerConfig
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel

TRAINING_LENGTH = 4096
CONTEXTS = (4096, 65536, 1 << 20)


@dataclass(frozen=True)
class Summary:
    """Numbers of a model in bf16, with states in fp32."""

    config: ModelConfig
    mixer_parameters: tuple[int, ...]  # of each block
    mlp_parameters: int
    block_parameters: int
    parameters: int
    flops: float  # forward, per token of a sequence of TRAINING_LENGTH
    state_bytes: tuple[int, ...]  # per sequence, at each of CONTEXTS
    transformer_bytes: tuple[int, ...]  # the cache of full attention in every block

    def as_json(self) -> dict[str, Any]:
        """Return the numbers with their units in the names."""
        contexts = [str(tokens) for tokens in CONTEXTS]
        return {
            "config": self.config.to_dict(),
            "layer_types": self.config.layer_types,
            "mixer_parameters": list(self.mixer_parameters),
            "block_parameters": self.block_parameters,
            "parameters": self.parameters,
            "forward_flops_per_token": self.flops,
            "flops_at_length": TRAINING_LENGTH,
            "state_bytes": dict(zip(contexts, self.state_bytes, strict=True)),
            "transformer_bytes": dict(zip(contexts, self.transformer_bytes, strict=True)),
        }


def summarise(config: ModelConfig) -> Summary:
    """Count everything on the meta device, where a model of any size takes no memory."""
    with torch.device("meta"):
        model = LanguageModel(config).bfloat16()
    kept = tuple(model.new_state(1, tokens).nbytes for tokens in CONTEXTS)
    cache = 4 * config.num_hidden_layers * config.hidden_size  # keys and values of a token in bf16
    return Summary(
        config=config,
        mixer_parameters=tuple(map(count_parameters, model.mixers)),
        mlp_parameters=3 * config.hidden_size * config.intermediate_size,
        block_parameters=count_parameters(model.blocks),
        parameters=count_parameters(model),
        flops=forward_flops(model, TRAINING_LENGTH),
        state_bytes=kept,
        transformer_bytes=tuple(cache * tokens for tokens in CONTEXTS),
    )


def count_parameters(module: nn.Module) -> int:
    """Parameters of a module, each once."""
    return sum(parameter.numel() for parameter in module.parameters())


def forward_flops(model: LanguageModel, length: int) -> float:
    """Forward, per token of a sequence of this length, head included."""
    maps = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    weights = sum(map_.weight.numel() for map_ in maps) + model.head_weight.numel()
    return 2 * weights + sum(mixer.core_flops(length) for mixer in model.mixers)


def training_flops(config: ModelConfig, length: int) -> float:
    """Both passes, per token: the backward takes twice the forward. What is computed again is not counted."""
    with torch.device("meta"):
        return 3 * forward_flops(LanguageModel(config), length)


def render(name: str, summary: Summary, console: Any) -> None:
    """Print the tables of `gdn2 show`."""
    from rich.table import Table  # noqa: PLC0415 (a model needs no console)

    config = summary.config
    blocks = Table(title=f"{name}: width {config.hidden_size}, vocabulary {config.vocab_size}")
    blocks.add_column("blocks")
    blocks.add_column("mixer")
    blocks.add_column("parameters", justify="right")
    for i, mixer in enumerate(config.cell):
        numbers = range(i, config.num_hidden_layers, len(config.cell))
        which = f"{len(numbers)}: {', '.join(map(str, numbers[:3]))}{', …' * (len(numbers) > 3)}"
        blocks.add_row(which, describe(mixer), f"{summary.mixer_parameters[i]:,}")
    mlp = f"SwiGLU of width {config.intermediate_size}"
    blocks.add_row(f"{config.num_hidden_layers}: all", mlp, f"{summary.mlp_parameters:,}")
    console.print(blocks)

    sizes = Table(title="size", show_header=False)
    sizes.add_column()
    sizes.add_column(justify="right")
    tied = "tied" if config.tie_word_embeddings else "untied"
    sizes.add_row("parameters of the blocks", f"{summary.block_parameters:,}")
    sizes.add_row(f"with embedding and head, {tied}", f"{summary.parameters:,}")
    sizes.add_row(f"forward GFLOP a token at {TRAINING_LENGTH}", f"{summary.flops / 1e9:.3f}")
    sizes.add_row("training GFLOP a token, three times that", f"{3 * summary.flops / 1e9:.3f}")
    console.print(sizes)

    memory = Table(title="carried per sequence, in bf16 with fp32 memories")
    for title in ("tokens", "this model", "Transformer", "ratio"):
        memory.add_column(title, justify="right")
    rows = zip(CONTEXTS, summary.state_bytes, summary.transformer_bytes, strict=True)
    for tokens, own, cache in rows:
        memory.add_row(f"{tokens:,}", in_bytes(own), in_bytes(cache), f"{cache / own:.1f}")
    console.print(memory)


def describe(mixer: MixerConfig) -> str:
    """A mixer in a few words."""
    if isinstance(mixer, AttentionConfig):
        reach = "full attention" if mixer.window is None else f"attention over {mixer.window}"
        return f"{reach}, {mixer.num_heads} × {mixer.head_dim}"
    if mixer.type == "delta":
        keys = f"{mixer.num_heads} × {mixer.key_head_dim}"
        values = f"{mixer.value_heads} × {mixer.value_head_dim}"
        gates = f"{mixer.decay} decay, {mixer.gates} gates"
        return f"delta, {keys} keys, {values} values, {gates}"
    rank = f", rank {mixer.rank}" if mixer.type == "mamba3" else ""
    return f"{mixer.type}, {mixer.num_heads} × {mixer.head_dim}, state {mixer.state_size}{rank}"


def in_bytes(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
