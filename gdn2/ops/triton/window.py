"""What lies around the two triangles of a sliding window: rows turned, results joined, gradients added.

Tensors are [batch, blocks, window, heads, d]; of those that are parts of others only d lies next to each other. A
program holds rows of one block and head.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over

# Not measured yet. Elements of a tile, and its warps.
TILE = 4096
WARPS = 4


@triton.jit
def turned(row, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Where a row of a block is read backwards: as keys all of them, as queries all but the last."""
    if KEYS:
        return WINDOW - 1 - row
    return tl.where(row == WINDOW - 1, row, WINDOW - 2 - row)


@triton.jit
def work(blocks, heads, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Batch, block, head and rows of this program; a grid's other axes would end at 65535."""
    tiles: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    head_block = tl.program_id(0) // tiles
    block, head = (head_block // heads).to(tl.int64), head_block % heads
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    return block // blocks, block % blocks, head, row


@triton.jit
def place(
    ptr, batch_stride, block_stride, row_stride, head_stride, batch, block, head, row,
    D: tl.constexpr,
):  # fmt: skip
    """Rows of a block and head."""
    ptr += batch * batch_stride + block * block_stride + head * head_stride
    return ptr + row.to(tl.int64)[:, None] * row_stride + tl.arange(0, D)[None, :]


@triton.jit
def turn_kernel(
    x_ptr, y_ptr, x_batch, x_block, x_row, x_head, y_batch, y_block, y_row, y_head, blocks, heads,
    WINDOW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Rows of x, turned, become those of y, or are added to them."""
    batch, block, head, row = work(blocks, heads, WINDOW, ROWS)
    inside = (row < WINDOW)[:, None]
    source = turned(row, WINDOW, KEYS)
    x_place = place(x_ptr, x_batch, x_block, x_row, x_head, batch, block, head, source, D)
    x = tl.load(x_place, mask=inside)
    y_place = place(y_ptr, y_batch, y_block, y_row, y_head, batch, block, head, row, D)
    if ADD:
        wide: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
        x = (tl.load(y_place, mask=inside).to(wide) + x.to(wide)).to(y_ptr.dtype.element_ty)
    tl.store(y_place, x, mask=inside)


@triton.jit
def join_kernel(
    own_ptr, own_log_ptr, before_ptr, before_log_ptr,
    own_batch, own_block, own_row, own_head, before_batch, before_block, before_row, before_head,
    log_batch, log_block, before_log_batch, before_log_block, blocks, heads,
    WINDOW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The results of both triangles, weighed by their normalisers, in the place of the first ones."""
    batch, block, head, row = work(blocks, heads, WINDOW, ROWS)
    inside = row < WINDOW
    source = turned(row, WINDOW, False)
    own_log_ptr += batch * log_batch + block * log_block + head * WINDOW + row
    before_log_ptr += batch * before_log_batch + block * before_log_block + head * WINDOW + source
    own_log = tl.load(own_log_ptr, mask=inside, other=0.0)
    before_log = tl.load(
        before_log_ptr, mask=row < WINDOW - 1, other=float("-inf")
    )  # the last sees nothing
    most = tl.maximum(own_log, before_log)
    own_weight, before_weight = tl.exp(own_log - most), tl.exp(before_log - most)
    total = own_weight + before_weight
    own_place = place(own_ptr, own_batch, own_block, own_row, own_head, batch, block, head, row, D)
    before_place = place(
        before_ptr, before_batch, before_block, before_row, before_head,
        batch, block, head, source, D,
    )  # fmt: skip
    own = tl.load(own_place, mask=inside[:, None]).to(own_log.dtype)
    before = tl.load(before_place, mask=inside[:, None]).to(own_log.dtype)
    joined = own * (own_weight / total)[:, None] + before * (before_weight / total)[:, None]
    tl.store(own_place, joined.to(own_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(own_log_ptr, most + tl.log(total), mask=inside)


def turn(x: Tensor, y: Tensor, keys: bool, add: bool) -> None:
    """Store x in y, or add it, with the rows of each block turned."""
    programs, how = _sizes(x)
    over(turn_kernel, programs)(
        x, y, *x.stride()[:-1], *y.stride()[:-1], x.shape[1], x.shape[3],
        **how, KEYS=keys, ADD=add, num_warps=WARPS,
    )  # fmt: skip


def join(own: Tensor, own_log: Tensor, before: Tensor, before_log: Tensor) -> None:
    """Join results [batch, blocks, window, heads, d] and logarithms [batch, blocks, heads, window], both in place."""
    programs, how = _sizes(own)
    over(join_kernel, programs)(
        own, own_log, before, before_log, *own.stride()[:-1], *before.stride()[:-1],
        *own_log.stride()[:2], *before_log.stride()[:2], own.shape[1], own.shape[3],
        **how, num_warps=WARPS,
    )  # fmt: skip


def _sizes(x: Tensor) -> tuple[int, dict[str, int]]:
    """Programs, and what the kernels are compiled for."""
    batch, blocks, window, heads, d = x.shape
    rows = max(1, min(TILE // d, triton.next_power_of_2(window)))
    programs = triton.cdiv(window, rows) * heads * batch * blocks
    return programs, {"WINDOW": window, "D": d, "ROWS": rows}
