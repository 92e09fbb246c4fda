"""Compile kernels ahead of the first step."""

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn2.ops.arguments import new_state
from gdn2.ops.backends import why_not
from gdn2.ops.rule import gated_delta_rule, gated_delta_step

Sizes = dict[str, tuple[int, int, torch.dtype]]  # heads, width and dtype of each operand


def warmup(
    heads: int | Sequence[int],
    key_width: int,
    value_width: int,
    *,
    decay: str = "channel",
    erase: str | None = "channel",
    write: str | None = "channel",
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    chunk_size: int = 64,
    solve_precision: str = "ieee",
    backward: bool = True,
    decode_batches: Sequence[int] = (),
) -> float:
    """Compile the kernels that calls of the operator will use, say so on standard error, and return the seconds.

    Runs them once on a few tokens of zeros. Triton compiles anew for other dtypes, sizes known to the compiler, absent
    operands and pointers off a multiple of 16 bytes. So one call covers every batch, length (a multiple of the chunk or
    not), packing, initial and final state, and `recompute`, of operands with these heads, widths, gates and dtypes that
    own their memory; but scans by Triton take more value channels at once where there are more sequences than
    programs can be, and are compiled again for those. Decoding also depends on how many sequences there are, and is
    covered for the batches named.
    Later processes find the kernels in Triton's cache. Without a GPU that kernels run on there is nothing to do.

    Args:
        heads: of all operands, or of q and k, v, g and b.
        key_width, value_width: d_k and d_v.
        decay, erase, write: "channel" or "head" for gates g, b, w of full width or of width one; None for no b or w.
        dtype: of q, k and v; g is fp32.
        gate_dtype: of b and w, by default that of q.
        device: the GPU where there is one, by default.
        chunk_size, solve_precision: as in `gated_delta_rule`.
        backward: compile the backward's kernels too.
        decode_batches: numbers of sequences that `gated_delta_step` will decode, a token each.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    counts = (heads,) * 4 if isinstance(heads, int) else tuple(heads)
    if len(counts) != 4:
        expected = "a number, or those of q and k, v, g and b"
        raise ValueError(f"heads: got {heads!r}, expected {expected}")
    gates = {"g": _width("decay", decay, key_width)}
    if erase is not None:
        gates["b"] = _width("erase", erase, key_width)
    if write is not None:
        gates["w"] = _width("write", write, value_width)
    obstacle = why_not("triton", device, dtype)
    if obstacle is not None:
        _say(f"nothing to compile, {obstacle}")
        return 0.0

    sizes = _sizes(counts, key_width, value_width, gates, dtype, gate_dtype or dtype)
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        leaves = _zeros(sizes, 1, chunk_size + 1, device)
        options = {"chunk_size": chunk_size, "solve_precision": solve_precision}
        leaves = {name: x.requires_grad_(backward) for name, x in leaves.items()}
        # gradients have kernels for either where value heads are shared
        for recompute in (True, False) if backward else (True,):
            o, _ = gated_delta_rule(**leaves, backend="triton", recompute=recompute, **options)  # type: ignore[arg-type]
            if backward:
                o.sum().backward()
    for batch in decode_batches:
        token = _zeros(sizes, batch, 1, device)
        state = new_state(token["q"], token["v"], batch)
        for inplace in (False, True):
            gated_delta_step(**token, state=state, inplace=inplace)  # type: ignore[arg-type]
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    passes = "forward and backward" if backward else "forward"
    steps = f", decoding {', '.join(map(str, decode_batches))} sequences" if decode_batches else ""
    _say(f"compiled {passes}{steps} for {torch.cuda.get_device_name(device)} in {seconds:.1f} s")
    return seconds


def _width(name: str, kind: str, full: int) -> int:
    """Width of a gate."""
    if kind not in ("channel", "head"):
        raise ValueError(f"{name}: got {kind!r}, expected 'channel' or 'head'")
    return full if kind == "channel" else 1


def _sizes(
    heads: tuple[int, ...],
    key_width: int,
    value_width: int,
    gates: dict[str, int],
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
) -> Sizes:
    """Sizes of all operands; the log-decay is fp32."""
    qk_heads, v_heads, g_heads, b_heads = heads
    sizes = {"q": (qk_heads, key_width, dtype), "k": (qk_heads, key_width, dtype)}
    sizes["v"] = (v_heads, value_width, dtype)
    of_gates = {
        "g": (g_heads, torch.float32),
        "b": (b_heads, gate_dtype),
        "w": (v_heads, gate_dtype),
    }
    for name, width in gates.items():
        count, stored = of_gates[name]
        sizes[name] = (count, width, stored)
    return sizes


def _zeros(sizes: Sizes, batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.zeros(batch, length, heads, width, dtype=dtype, device=device)
        for name, (heads, width, dtype) in sizes.items()
    }


def _say(what: str) -> None:
    print(f"gdn2 warmup: {what}", file=sys.stderr)
