"""AdamW's step of many tensors as one kernel (`gdn2.training.optimiser`).

It passes once over parameters, gradients and moments: its time is that of reading all four and writing all but the
gradients. Which tensor a program works on stands in a table of addresses, so that the number of tensors is no matter.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over

# Elements of a program, those of them it has in registers, and its warps. On an H200, 1.3 billion bf16 weights, ms:
# torch's fused step 7.9; 4096 elements at once by 8 warps 4.75, 8192 to 32768 and 1024 at once by 4 warps 4.9 to 5.1.
BLOCK = 4096
PART = 4096
WARPS = 8
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
LEAST = 1e-300  # a β of zero would have no logarithm


@triton.jit
def move(
    p_ptr, g_ptr, m_ptr, v_ptr, first, last, gain, size, root, shrink, rest1, rest2, eps,
    PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Moments and parameters from first to last: p ← p − shrink p − size m / (root √v + eps).

    WHOLE parts take no mask, which would make accesses one element wide; as addresses are aligned, they are 16 bytes.
    """
    for start in range(first, last, PART):
        place = start + tl.arange(0, PART)
        inside = None if WHOLE else place < last
        p_place, g_place = tl.multiple_of(p_ptr + place, 16), tl.multiple_of(g_ptr + place, 16)
        m_place, v_place = tl.multiple_of(m_ptr + place, 16), tl.multiple_of(v_ptr + place, 16)
        p = tl.load(p_place, mask=inside).to(tl.float32)
        g = tl.load(g_place, mask=inside).to(tl.float32) * gain
        m = tl.load(m_place, mask=inside).to(tl.float32)
        v = tl.load(v_place, mask=inside).to(tl.float32)
        m = m * (1 - rest1) + g * rest1
        v = v * (1 - rest2) + g * g * rest2
        p -= p * shrink
        p -= size * m / (root * tl.sqrt(v) + eps)
        tl.store(p_place, p.to(p_ptr.dtype.element_ty), mask=inside)
        tl.store(m_place, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_place, v.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def adamw_kernel(
    table_ptr, programs_ptr, scale_ptr, skip_ptr,
    lr, shrink, rest1, rest2, log1, log2, eps,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A block of one tensor.

    The corrections 1 − βᵗ = 1 − exp(t log β) are differences of near numbers at first, hence fp64.
    """
    program_ptr = programs_ptr + 2 * tl.program_id(0)
    row_ptr = table_ptr + 6 * tl.load(program_ptr)
    first = tl.load(program_ptr + 1).to(tl.int64) * BLOCK
    p_ptr = tl.load(row_ptr).to(tl.pointer_type(P))
    g_ptr = tl.load(row_ptr + 1).to(tl.pointer_type(G))
    m_ptr = tl.load(row_ptr + 2).to(tl.pointer_type(M))
    v_ptr = tl.load(row_ptr + 3).to(tl.pointer_type(V))
    step_ptr = tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32))
    count = tl.load(row_ptr + 5)
    if skip_ptr is not None:
        count = tl.where(tl.load(skip_ptr) == 1, 0, count)
    gain = 1.0
    if scale_ptr is not None:
        gain = 1 / tl.load(scale_ptr).to(tl.float32)
    step = tl.load(step_ptr).to(tl.float64) + 1
    size = lr / (1 - tl.exp(step * log1)).to(tl.float32)
    root = tl.rsqrt((1 - tl.exp(step * log2)).to(tl.float32))
    last = first + BLOCK
    if last <= count:
        move(
            p_ptr, g_ptr, m_ptr, v_ptr, first, last, gain, size, root, shrink, rest1, rest2, eps,
            PART, True,
        )  # fmt: skip
    else:  # a smaller part, for its many accesses would take the registers of more programs
        move(
            p_ptr, g_ptr, m_ptr, v_ptr, first, count, gain, size, root, shrink, rest1, rest2, eps,
            PART // 4, False,
        )  # fmt: skip


@lru_cache(maxsize=16)
def program_map(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """The tensor that each program works on, and which block of it [programs, 2]; the same in every step."""
    blocks = torch.tensor([triton.cdiv(size, block) for size in sizes])
    tensors = torch.arange(len(sizes)).repeat_interleave(blocks)
    before = (blocks.cumsum(0) - blocks)[tensors]
    return torch.stack([tensors, torch.arange(len(tensors)) - before], 1).to(device, torch.int32)


def address_table(columns: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Tensor:
    """Addresses of each tensor, as its gradient, moments and step count, and its size; on its way to the device."""
    device = columns[0][0].device
    addresses = [[x.data_ptr() for x in column] for column in columns]
    rows = [*zip(*addresses, sizes, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Move parameters in place as torch's fused AdamW does, but leave the gradients as they are.

    Each list is of one dtype, fp32 or bf16, all on one device, contiguous and at multiples of 16 bytes; the counts of
    steps are fp32. They advance last: where the kernel cannot be compiled nothing has changed.
    """
    columns = (params, grads, exp_avgs, exp_avg_sqs, steps)
    device, sizes = params[0].device, tuple(x.numel() for x in params)
    scale, skip = (x if x is None else x.to(device) for x in (grad_scale, found_inf))
    programs = program_map(sizes, BLOCK, device)
    if len(programs):
        with torch.cuda.device_of(programs):
            over(adamw_kernel, len(programs))(
                address_table(columns, sizes), programs, scale, skip,
                lr, lr * weight_decay, *(1 - beta for beta in betas),
                *(log(max(beta, LEAST)) for beta in betas), eps,
                *(DTYPES[column[0].dtype] for column in columns[:-1]),
                BLOCK=BLOCK, PART=PART, num_warps=WARPS,
            )  # fmt: skip
    # A list, for a single tensor would be taken for a number, and the host wait for it.
    torch._foreach_add_(list(steps), 1 if skip is None else [1 - skip] * len(steps))
