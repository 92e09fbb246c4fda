"""Names that others give to our tensors: the released lit-gpt code, and models around fla's layer."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# Of the layer, the same in both; what it shares with attention comes first.
SHARED = {
    "q_proj.weight": "q_proj.weight",
    "k_proj.weight": "k_proj.weight",
    "v_proj.weight": "v_proj.weight",
    "out_proj.weight": "o_proj.weight",
}
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
# Of everything around it, the first that a file has.
EMBEDDING = ("embeddings", "embed_tokens", "wte", "tok_embeddings", "embedding")
FINAL_NORM = ("norm", "ln_f", "final_norm")
HEAD = ("lm_head", "head", "output")
MIXER_NORM = ("attn_norm", "input_layernorm", "norm_1", "mixer_norm")
MLP_NORM = ("mlp_norm", "post_attention_layernorm", "norm_2", "ffn_norm")
MLP = {
    "gate_proj": ("mlp.gate_proj", "mlp.swiglu.w1"),
    "up_proj": ("mlp.up_proj", "mlp.swiglu.w2"),
    "down_proj": ("mlp.down_proj", "mlp.swiglu.w3"),
}
WRAPPERS = re.compile(r"^(?:_forward_module\.|module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")


@dataclass(frozen=True)
class Naming:
    """How a file calls our tensors."""

    names: frozenset[str]
    blocks: str  # before a block's number
    layer: str  # before a mixer's own names, behind the number
    count: int

    @classmethod
    def of(cls, names: Collection[str]) -> "Naming":
        """Found by where the first convolution of a delta mixer lies."""
        for name in sorted(names):
            found = re.fullmatch(r"(.*?)(\d+)\.(.*)q_conv1d\.weight", name)
            if found is not None:
                blocks = found[1]
                numbers = (re.match(rf"{re.escape(blocks)}(\d+)\.", name) for name in names)
                count = 1 + max(int(number[1]) for number in numbers if number)
                return cls(frozenset(names), blocks, found[3], count)
        raise ValueError("checkpoint: got no tensor ….q_conv1d.weight, expected blocks with one")

    @property
    def is_official(self) -> bool:
        return self.blocks == "transformer.h." and self._block(0, "mlp.swiglu.w1") in self.names

    def is_delta(self, block: int) -> bool:
        return any(self._mixer(block, name) in self.names for name in DELTA.values())

    def is_fused(self, block: int) -> bool:
        return any(self._mixer(block, name) in self.names for name in (FUSED, FUSED_OUT))

    def fused(self, block: int) -> str:
        return self._mixer(block, FUSED)

    def pairs(self, tied: bool) -> Iterator[tuple[str, str]]:
        """Our name and the file's, of every tensor but fused ones."""
        yield "embedding.weight", self._trunk(EMBEDDING)
        yield "norm.weight", self._trunk(FINAL_NORM)
        if not tied:
            prefixed = self._trunk(HEAD)
            yield "head.weight", prefixed if prefixed in self.names else self._first("", HEAD)
        for i in range(self.count):
            yield from self._of_block(i)

    def _of_block(self, i: int) -> Iterator[tuple[str, str]]:
        ours, theirs = f"blocks.{i}.", f"{self.blocks}{i}."
        yield f"{ours}mixer_norm.weight", f"{theirs}{self._spelling(MIXER_NORM)}.weight"
        yield f"{ours}mlp_norm.weight", f"{theirs}{self._spelling(MLP_NORM)}.weight"
        for own, options in MLP.items():
            yield f"{ours}mlp.{own}.weight", f"{theirs}{self._spelling(options)}.weight"
        if self.is_fused(i):
            yield f"{ours}mixer.out_proj.weight", self._mixer(i, FUSED_OUT)
            return
        for own, other in {**SHARED, **(DELTA if self.is_delta(i) else {})}.items():
            yield f"{ours}mixer.{own}", self._mixer(i, other)

    def _mixer(self, block: int, name: str) -> str:
        return f"{self.blocks}{block}.{self.layer}{name}"

    def _block(self, block: int, name: str) -> str:
        return f"{self.blocks}{block}.{name}.weight"

    def _spelling(self, options: tuple[str, ...]) -> str:
        """The option that any block has, or the first."""
        blocks = range(self.count)
        known = (x for x in options if any(self._block(i, x) in self.names for i in blocks))
        return next(known, options[0])

    def _trunk(self, options: tuple[str, ...]) -> str:
        """A name beside the blocks: model.norm beside model.layers.0."""
        parent, dot, _ = self.blocks.removesuffix(".").rpartition(".")
        return self._first(parent + dot, options)

    def _first(self, prefix: str, options: tuple[str, ...]) -> str:
        """The option that the file has, or the first."""
        named = [f"{prefix}{option}.weight" for option in options]
        return next((name for name in named if name in self.names), named[0])
