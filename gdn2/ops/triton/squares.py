"""The sum of the squares of many tensors as one kernel (`gdn2.training.shard`): torch starts one for a few of them."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.adamw import DTYPES, address_table, program_map
from gdn2.ops.triton.ahead import over

BLOCK = 32768  # elements of a program
PART = 4096  # of them at once
WARPS = 8


@triton.jit
def sum_part(x_ptr, first, last, PART: tl.constexpr, WHOLE: tl.constexpr):
    """The sum of x² from first to last; WHOLE parts take no mask, so that 16 bytes are loaded at once."""
    total = tl.zeros((PART,), tl.float32)
    for start in range(first, last, PART):
        place = start + tl.arange(0, PART)
        inside = None if WHOLE else place < last
        other = None if WHOLE else 0.0
        x = tl.load(tl.multiple_of(x_ptr + place, 16), mask=inside, other=other).to(tl.float32)
        total += x * x
    return tl.sum(total, 0)


@triton.jit
def squares_kernel(
    table_ptr, programs_ptr, partial_ptr, X: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """A block of one tensor."""
    program_ptr = programs_ptr + 2 * tl.program_id(0)
    row_ptr = table_ptr + 2 * tl.load(program_ptr)
    x_ptr = tl.load(row_ptr).to(tl.pointer_type(X))
    count = tl.load(row_ptr + 1)
    first = tl.load(program_ptr + 1).to(tl.int64) * BLOCK
    if first + BLOCK <= count:
        total = sum_part(x_ptr, first, first + BLOCK, PART, True)
    else:
        total = sum_part(x_ptr, first, count, PART, False)
    tl.store(partial_ptr + tl.program_id(0), total)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of tensors of one dtype, fp32 or bf16, on one device, contiguous and at multiples of 16 bytes."""
    sizes = tuple(x.numel() for x in tensors)
    programs = program_map(sizes, BLOCK, tensors[0].device)
    partial = torch.empty(len(programs), device=tensors[0].device)
    with torch.cuda.device_of(programs):
        over(squares_kernel, len(programs))(
            address_table([tensors], sizes), programs, partial, DTYPES[tensors[0].dtype],
            BLOCK=BLOCK, PART=PART, num_warps=WARPS,
        )  # fmt: skip
    return partial.sum(dtype=torch.float64).float()
