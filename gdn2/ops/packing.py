"""What the operators share: sequences packed in a batch of one, and the check of an operand.

`cu_seqlens` [N + 1] holds the cumulative lengths: sequence n is tokens cu_seqlens[n] up to, not
including, cu_seqlens[n + 1]. A length may be zero.
"""

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Reading offsets off a GPU waits for it. So a tensor that passed once passes again as long as torch
# counts no write to it. Values are known of tensors made here only: to others numpy, a broadcast
# or a kernel may write uncounted.
_passed: MutableMapping[Tensor, tuple[int, int]] = WeakTensorKeyDictionary()
_made: MutableMapping[Tensor, tuple[int, list[int]]] = WeakTensorKeyDictionary()


def check_operand(name: str, operand: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless the operand is floating point, of this shape and on this device."""
    if operand.dtype not in FLOATS or tuple(operand.shape) != shape or operand.device != device:
        raise ValueError(
            f"{name} is {operand.dtype} {tuple(operand.shape)} on {operand.device}, "
            f"expected floating point {shape} on {device}"
        )


def check_cu_seqlens(
    cu_seqlens: Tensor, batch: int, length: int, device: torch.device | None = None
) -> None:
    """Raise ValueError unless cu_seqlens packs `length` tokens of a batch of one."""
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens is {cu_seqlens!r}, expected a tensor")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, "
            "expected int32 or int64 of one dimension"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has {cu_seqlens.shape[0]} entries, expected at least 2")
    if batch != 1:
        raise ValueError(f"cu_seqlens was given with a batch of {batch}, expected a batch of 1")
    if device is not None and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, expected {device}")
    if not _has_values(cu_seqlens):
        return
    if cu_seqlens.is_inference() or _passed.get(cu_seqlens) != (length, cu_seqlens._version):
        known_offsets(cu_seqlens, length)


def moved_offsets(cu_seqlens: Tensor, length: int, device: torch.device) -> Tensor:
    """A copy of offsets of `length` tokens, checked here before they go to a device: nobody waits for them there."""
    check_cu_seqlens(cu_seqlens, 1, length)
    return _made_of(cu_seqlens, length, 1, device)


def multiplied_offsets(cu_seqlens: Tensor, times: int, length: int) -> Tensor:
    """Offsets of `length` tokens that became several each; nobody waits for those either."""
    return cu_seqlens if times == 1 else _made_of(cu_seqlens, length, times, cu_seqlens.device)


def _made_of(cu_seqlens: Tensor, length: int, times: int, device: torch.device) -> Tensor:
    with kept():  # inference tensors do not count what is written to them
        made = cu_seqlens.to(device, non_blocking=True) * times
    if _has_values(made):
        offsets = [times * offset for offset in known_offsets(cu_seqlens, length)]
        _made[made] = made._version, offsets
    return made


def known_offsets(cu_seqlens: Tensor, length: int) -> list[int]:
    """The offsets, which are checked when they are read."""
    if cu_seqlens.is_inference():
        return _read(cu_seqlens, length)
    version, offsets = _made.get(cu_seqlens, (None, []))
    if version != cu_seqlens._version or offsets[-1] != length:
        offsets = _read(cu_seqlens, length)
        _passed[cu_seqlens] = length, cu_seqlens._version
    return offsets


def _read(cu_seqlens: Tensor, length: int) -> list[int]:
    offsets: list[int] = cu_seqlens.tolist()
    _check_offsets(offsets, length)
    return offsets


def _has_values(cu_seqlens: Tensor) -> bool:
    return not (cu_seqlens.is_meta or torch.compiler.is_compiling())


def kept() -> AbstractContextManager[None]:
    """Makes tensors that a backward may keep, wherever they are asked for first; compilers do not ask."""
    inferring = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inferring else nullcontext()


def _check_offsets(offsets: list[int], length: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens starts at {offsets[0]}, expected 0")
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"cu_seqlens falls from {start} to {end} at entry {n + 1}, expected no decrease"
            )
    if offsets[-1] != length:
        raise ValueError(f"cu_seqlens ends at {offsets[-1]}, expected the length {length}")


def sequence_lengths(cu_seqlens: Tensor | None, batch: int, length: int) -> list[int]:
    """Return the lengths of a dense or packed batch."""
    if cu_seqlens is None:
        return [length] * batch
    if torch.compiler.is_compiling():
        lengths: list[int] = cu_seqlens.diff().tolist()
        return lengths
    return [end - start for start, end in pairwise(known_offsets(cu_seqlens, length))]


def sequence_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the index [length] of the sequence each token belongs to."""
    tokens = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # The first end beyond the token: an empty sequence ends where it starts and is passed over.
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def positions(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the position [length] of each token in its own sequence, from 0."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    return tokens - cu_seqlens[sequence_ids(cu_seqlens, length)]
