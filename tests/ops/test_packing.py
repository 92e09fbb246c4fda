import numpy as np
import pytest
import torch
from torch import Tensor

from gdn2.ops import packing
from gdn2.ops.packing import (
    check_cu_seqlens,
    check_operand,
    moved_offsets,
    multiplied_offsets,
    positions,
    sequence_ids,
    sequence_lengths,
)

CPU = torch.device("cpu")
LENGTHS = [[1], [0], [0, 0], [5], [3, 4], [0, 2, 0, 0, 1, 0], [1, 1, 1], [63, 0, 65, 130, 2]]


def offsets(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_ids_and_positions_count_tokens(lengths: list[int], dtype: torch.dtype) -> None:
    cu_seqlens = offsets(lengths, dtype)
    total = sum(lengths)
    check_cu_seqlens(cu_seqlens, 1, total, CPU)
    ids = [n for n, length in enumerate(lengths) for _ in range(length)]
    places = [place for length in lengths for place in range(length)]
    assert sequence_ids(cu_seqlens, total).tolist() == ids
    assert positions(cu_seqlens, total).tolist() == places
    assert (
        sequence_ids(cu_seqlens, total).dtype == positions(cu_seqlens, total).dtype == torch.int64
    )


def test_offsets_may_be_strided() -> None:
    cu_seqlens = torch.stack([offsets([2, 0, 3]), torch.zeros(4, dtype=torch.int64)], dim=1)[:, 0]
    assert sequence_ids(cu_seqlens, 5).tolist() == [0, 0, 2, 2, 2]
    assert positions(cu_seqlens, 5).tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("cu_seqlens", "batch", "length", "message"),
    [
        (torch.tensor([0.0, 4.0]), 1, 4, r"is torch\.float32 \(2,\), expected int32 or int64"),
        (torch.tensor([False, True]), 1, 1, r"is torch\.bool \(2,\), expected int32 or int64"),
        (torch.tensor([[0, 4]]), 1, 4, r"is torch\.int64 \(1, 2\), expected .* one dimension"),
        (torch.tensor(4), 1, 4, r"is torch\.int64 \(\), expected .* one dimension"),
        (torch.tensor([0]), 1, 0, "has 1 entries, expected at least 2"),
        (torch.tensor([], dtype=torch.int64), 1, 0, "has 0 entries, expected at least 2"),
        (torch.tensor([0, 4]), 2, 4, "with a batch of 2, expected a batch of 1"),
        (torch.tensor([1, 4]), 1, 4, "starts at 1, expected 0"),
        (torch.tensor([0, 3, 2, 4]), 1, 4, "falls from 3 to 2 at entry 2, expected no decrease"),
        (torch.tensor([0, 3]), 1, 4, "ends at 3, expected the length 4"),
        (torch.tensor([0, 5]), 1, 4, "ends at 5, expected the length 4"),
        (torch.tensor([0, 4], device="meta"), 1, 4, "is on meta, expected cpu"),
    ],
)
def test_bad_offsets_are_named(cu_seqlens: Tensor, batch: int, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^cu_seqlens .*{message}") as caught:
        check_cu_seqlens(cu_seqlens, batch, length, CPU)
    assert "\n" not in str(caught.value)


def test_offsets_are_checked_again_when_they_or_the_length_change() -> None:
    cu_seqlens = torch.tensor([0, 2, 4])
    check_cu_seqlens(cu_seqlens, 1, 4)
    check_cu_seqlens(cu_seqlens, 1, 4)
    with pytest.raises(ValueError, match="ends at 4, expected the length 5"):
        check_cu_seqlens(cu_seqlens, 1, 5)
    cu_seqlens[1] = 9
    with pytest.raises(ValueError, match="falls from 9 to 4"):
        check_cu_seqlens(cu_seqlens, 1, 4)
    with torch.inference_mode():
        unversioned = torch.tensor([0, 2, 4])
        check_cu_seqlens(unversioned, 1, 4)
        unversioned[0] = 1
        with pytest.raises(ValueError, match="starts at 1"):
            check_cu_seqlens(unversioned, 1, 4)


@pytest.mark.parametrize(
    "operand",
    [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2), torch.zeros(2, 3, device="meta")],
)
def test_bad_operands_are_named(operand: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^w is .*, expected floating point \(2, 3\) on cpu$"):
        check_operand("w", operand, (2, 3), CPU)


def test_offsets_are_checked_before_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = moved_offsets(offsets([2, 0, 3]), 5, CPU)
    monkeypatch.setattr(packing, "_check_offsets", lambda *_: pytest.fail("looked at again"))
    check_cu_seqlens(moved, 1, 5, CPU)
    monkeypatch.undo()
    moved[1] = 9
    for bad in (moved, offsets([2, 2])):
        with pytest.raises(ValueError, match=r"cu_seqlens (falls from 9|ends at 4)"):
            moved_offsets(bad, 5, CPU)


@pytest.mark.parametrize("inferring", [False, True])
def test_offsets_made_here_are_known(monkeypatch: pytest.MonkeyPatch, inferring: bool) -> None:
    with torch.inference_mode(inferring):
        given = offsets([2, 0, 3])
        moved, tripled = moved_offsets(given, 5, CPU), multiplied_offsets(given, 3, 5)
        assert multiplied_offsets(given, 1, 5) is given
        with monkeypatch.context() as context:
            context.setattr(Tensor, "tolist", lambda _: pytest.fail("read again"))
            check_cu_seqlens(tripled, 1, 15, CPU)
            assert sequence_lengths(moved, 1, 5) == [2, 0, 3]
            assert sequence_lengths(tripled, 1, 15) == [6, 0, 9]
        assert tripled.tolist() == [0, 6, 6, 15]
    tripled[1] = 3
    assert sequence_lengths(tripled, 1, 15) == [3, 3, 9]


def test_offsets_of_others_are_checked_once_and_read_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch does not count what others write to their memory, such as numpy or a broadcast."""
    memory = np.array([0, 2, 2, 5])
    given = torch.from_numpy(memory)
    check_cu_seqlens(given, 1, 5, CPU)
    with monkeypatch.context() as context:
        context.setattr(Tensor, "tolist", lambda _: pytest.fail("read again"))
        check_cu_seqlens(given, 1, 5, CPU)
    assert sequence_lengths(given, 1, 5) == [2, 0, 3]
    memory[1] = 1
    assert sequence_lengths(given, 1, 5) == [1, 1, 3]
    memory[1] = 2
    given[1] = 1
    assert sequence_lengths(given, 1, 5) == [1, 1, 3]
    with torch.inference_mode():
        unversioned = offsets([2, 2])
        assert sequence_lengths(unversioned, 1, 4) == [2, 2]
        unversioned[1] = 1
        assert sequence_lengths(unversioned, 1, 4) == [1, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_nobody_waits_for_offsets_that_were_moved() -> None:
    given, device = offsets([2, 0, 3]).pin_memory(), torch.device("cuda", 0)
    torch.empty(1, device=device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = moved_offsets(given, 5, device)
        check_cu_seqlens(moved, 1, 5, device)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert moved.tolist() == [0, 2, 2, 5]
