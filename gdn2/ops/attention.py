"""Causal softmax attention, full or in a sliding window: dense, packed, continued from a cache."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from gdn2.ops.arguments import read_scale, require
from gdn2.ops.flex import causal_block_mask, flex, flex_spares_a_mask
from gdn2.ops.kv_cache import KVCache
from gdn2.ops.masked_attention import masked, windows
from gdn2.ops.packing import FLOATS, check_cu_seqlens, check_operand, sequence_lengths
from gdn2.ops.window_attention import fits, window_attention

# without cuDNN, which takes 7 ms on an H200 to prepare for each new shape
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cache: KVCache | None = None,
    output_cache: bool = False,
    inplace: bool = False,
    block_mask: BlockMask | None = None,
    backend: str = "auto",
) -> tuple[Tensor, KVCache | None]:
    """Return y [batch, length, heads, d], and the cache after it if one was given or asked for.

    q is [batch, length, heads, d]; k and v are [batch, length, kv heads, d], rotated already, where kv heads divides
    heads. A token sees itself and the `window` − 1 tokens before it, or all of them where `window` is None. `scale` is
    d**-0.5 unless given. `cu_seqlens` packs sequences in a batch of one; the cache then has one row per sequence, ready
    to go on as a batch.

    Any split of a sequence into calls that hand on the cache equals one whole call. The cache grows where it may
    lack room, for a window up to its size, unless `inplace` writes into the slots that `KVCache.reserve` made.
    Overfilling those is a ValueError; where looking would stall each step, or a graph is captured, the rows concerned
    turn to NaN.

    `backend` "sdpa" runs anywhere; "flex", FlexAttention compiled, needs CUDA and no incoming cache. "auto" chooses it
    wherever it spares a mask, for packed sequences only where there may be gradients: inference meets ever new shapes,
    and each may be compiled for. Where the window divides the length, "auto" takes cuDNN or two triangles instead
    (`window_attention`). By "sdpa", packed sequences are sorted by their lengths, which breaks a compiled graph.

    `block_mask`, from `causal_block_mask`, is read by "flex" alone; let all layers of one window share it, since making
    it takes longer (1 to 2 ms on an H200) than attending to 4 × 4096 tokens (0.7 ms).
    """
    _check(q, k, v, window, cu_seqlens, cache)
    if inplace and cache is None:
        raise ValueError("inplace is True and cache is None, expected a cache to write into")
    scale = read_scale(scale, q)
    require(scale > 0, "scale", scale, "more than 0")  # torch's kernels make NaN of others
    blocks = backend == "auto" and cu_seqlens is None and cache is None and fits(q, k, window)
    flexes = _use_flex(backend, q, window, cu_seqlens, cache)
    updated = None
    if cache is not None and cu_seqlens is None and q.shape[1] == 1:
        # One token evicts only what has left its window, so the slots alone hold every key.
        now = cache.seen[:, None].clone()
        updated = _append(cache, k, v, window, cu_seqlens, inplace)
        held = updated.slot_positions()
        y = masked(q, updated.keys, updated.values, now, held, window, scale)
    else:
        if window is not None and blocks:
            y = window_attention(q, k, v, window, scale)
        elif flexes:
            if block_mask is None:
                block_mask = causal_block_mask(q.shape[1], window, cu_seqlens, device=q.device)
            y = flex(q, k, v, block_mask, scale)
        elif cu_seqlens is not None:
            y = _packed(q, k, v, cu_seqlens, cache, window, scale)
        else:
            y = _dense(q, k, v, cache, window, scale)
        if cache is not None or output_cache:
            updated = _append(cache, k, v, window, cu_seqlens, inplace)
    if updated is not None and inplace and cu_seqlens is None and may_overflow(updated, window):
        y = y.masked_fill((updated.seen > updated.capacity)[:, None, None, None], float("nan"))
    return y, updated


def _append(
    cache: KVCache | None,
    k: Tensor,
    v: Tensor,
    window: int | None,
    cu_seqlens: Tensor | None,
    inplace: bool,
) -> KVCache:
    """Return the cache, or a first one, after k and v; one with too few slots grows unless `inplace`."""
    added = k.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    if cache is None:
        cache = KVCache.empty(k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, 0, k)
    if may_overflow(cache, window):
        if inplace:
            check_room(cache, added, window)
        else:
            cache = cache.reserve(_room(cache, added, window))
    return cache.append(k, v, cu_seqlens, inplace=inplace)


def may_overflow(cache: KVCache, window: int | None) -> bool:
    """A ring with fewer slots than its window has never gone round and would be torn."""
    return window is None or cache.capacity < window


def _room(cache: KVCache, added: int | Tensor, window: int | None) -> int:
    """Return how many more slots to make: for a step of a batch all of the window, since more will follow."""
    is_step = isinstance(added, int) and added == 1
    stalls = cache.capacity == 0 or (is_step and cache.seen.is_cuda)  # or nothing to be found
    if window is None and not stalls and _may_look(cache):
        return max(_needed(cache, added) - cache.capacity, 0)
    most = added if isinstance(added, int) else int(added.max()) if len(added) else 0
    if window is None:
        return most
    return window - cache.capacity if is_step else min(window - cache.capacity, most)


def _may_look(cache: KVCache) -> bool:
    """Whether the tokens of rows can be known, if at the cost of waiting for them."""
    captured = cache.seen.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (is_compiling() or captured or cache.seen.is_meta)


def _needed(cache: KVCache, added: int | Tensor) -> int:
    """Return the slots of full attention after so many more tokens."""
    return int((cache.seen + added).max()) if len(cache.seen) else 0


def check_room(cache: KVCache, added: int | Tensor, window: int | None) -> None:
    """Refuse to overfill a cache in place, where looking does not stall each step."""
    stalls = window is None and isinstance(added, int) and cache.seen.is_cuda
    if stalls or not _may_look(cache):
        return
    needed = _needed(cache, added)
    if needed > cache.capacity:
        raise ValueError(
            f"cache has capacity {cache.capacity}, expected at least "
            f"{needed if window is None else min(needed, window)}: reserve it before steps in place"
        )


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cache: KVCache | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Return attention within packed sequences, each with its own past: those of similar lengths as one batch.

    A call for each of hundreds of short ones would be mostly launches. What fills up a batch lies after all tokens of
    its row, so nothing sees it. Slots that no row has reached are left out.
    """
    lengths, starts = cu_seqlens.diff(), cu_seqlens[:-1]
    known = sequence_lengths(cu_seqlens, 1, q.shape[1])
    if cache is not None:
        reached = min(cache.capacity, int(cache.seen.max()) if len(cache.seen) else 0)
        cache = KVCache(cache.keys[:, :reached], cache.values[:, :reached], cache.seen)
    outputs, places = [q[0, :0]], [starts[:0]]
    for group in _similar(known):
        rows = torch.tensor(group, device=q.device)
        offsets = torch.arange(known[group[0]], device=q.device)
        inside = offsets < lengths[rows][:, None]
        tokens = starts[rows][:, None] + torch.minimum(offsets, lengths[rows][:, None] - 1)
        past = None if cache is None else KVCache(*(x[rows] for x in cache))
        with sdpa_kernel(ANY_SHAPE):
            y = _dense(q[0, tokens], k[0, tokens], v[0, tokens], past, window, scale)
        outputs.append(y[inside])
        places.append(tokens[inside])
    return torch.cat(outputs)[torch.cat(places).argsort()].unsqueeze(0)


def _similar(lengths: list[int]) -> list[list[int]]:
    """Return the rows in lists, the longest of each first and the others at least three quarters as long."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if lengths[row] == 0:
            break
        if not groups or 4 * lengths[row] < 3 * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def _dense(
    q: Tensor, k: Tensor, v: Tensor, past: KVCache | None, window: int | None, scale: float
) -> Tensor:
    """Return attention to the past and to k, in blocks of queries where a mask is needed."""
    length = q.shape[1]
    if past is None and (window is None or window >= length):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        gqa = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 (a compiler has no bool otherwise)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        return y.transpose(1, 2)

    # Queries of a block meet the keys of its own and of `reach` blocks before, so memory grows with length · window.
    # Joining blocks of one split keeps the backward linear as well: the gradient of each slice of k would be as long as
    # k. For a window of 2048, blocks of 512 compute less in vain than blocks of 2048: 0.32 s against 0.52 s for 8192
    # tokens of 4 heads of 64 on a CPU core.
    size = 512 if window is None else min(max(window, 64), 512)
    reach = length if window is None else -(-(window - 1) // size)
    if is_compiling() and past is None and window is not None:
        return windows(q, k, v, size, reach, window, scale)
    now = torch.arange(length, device=q.device)[None]
    blocks = [(k[:, :0], v[:, :0], now[:, :0])]
    if past is not None:
        now = now + past.seen[:, None]
        blocks = [(past.keys, past.values, past.slot_positions())]
    blocks += zip(*(torch.split(x, size, 1) for x in (k, v, now)), strict=True)
    outputs = []
    for n, queries in enumerate(torch.split(q, size, 1), start=1):
        near = zip(*blocks[max(0, n - reach) : n + 1], strict=True)
        keys, values, held = (torch.cat(part, dim=1) for part in near)
        outputs.append(masked(queries, keys, values, blocks[n][2], held, window, scale))
    return torch.cat(outputs, dim=1)


def _use_flex(
    backend: str, q: Tensor, window: int | None, cu_seqlens: Tensor | None, cache: KVCache | None
) -> bool:
    if backend not in ("auto", "sdpa", "flex"):
        raise ValueError(f"backend is {backend!r}, expected 'auto', 'sdpa' or 'flex'")
    obstacles = {
        f"CUDA, and q is on {q.device}": not q.is_cuda,
        f"at most 32 bits, and q is {q.dtype}": q.dtype == torch.float64,
        f"at least 16 channels, and q has {q.shape[-1]}": q.shape[-1] < 16,
        "at least one token": q.shape[0] == 0 or q.shape[1] == 0,
        "cache=None": cache is not None,
    }
    obstacle = next((needed for needed, lacking in obstacles.items() if lacking), None)
    if backend == "flex" and obstacle:
        raise ValueError(f"backend is 'flex', which needs {obstacle}: expected 'sdpa'")
    spares = backend == "auto" and flex_spares_a_mask(q.shape[1], window, cu_seqlens is not None)
    return backend == "flex" or (spares and obstacle is None)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    cu_seqlens: Tensor | None,
    cache: KVCache | None,
) -> None:
    if q.ndim != 4 or q.dtype not in FLOATS:
        raise ValueError(
            f"q is {q.dtype} {tuple(q.shape)}, expected floating point [batch, length, heads, d]"
        )
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2] if k.ndim == 4 else heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, expected a divisor of the {heads} heads of q")
    rows = batch
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length, q.device)
        rows = cu_seqlens.shape[0] - 1
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window is {window}, expected None or an integer of at least 1")
    operands = {"k": (k, batch, length), "v": (v, batch, length)}
    if cache is not None:
        capacity = cache.capacity if window is None else min(cache.capacity, window)
        operands |= {"cache.keys": (cache.keys, rows, capacity)}
        operands |= {"cache.values": (cache.values, rows, capacity)}
    for name, (operand, *shape) in operands.items():
        check_operand(name, operand, (*shape, kv_heads, width), q.device)
        if operand.dtype != q.dtype:
            raise ValueError(f"{name} is {operand.dtype}, expected {q.dtype} like q")
    if cache is not None and (cache.seen.dtype != torch.int64 or cache.seen.shape != (rows,)):
        seen = f"{cache.seen.dtype} {tuple(cache.seen.shape)}"
        raise ValueError(f"cache.seen is {seen}, expected torch.int64 ({rows},)")
