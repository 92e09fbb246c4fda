"""Where the walk of the convolution's gradient through its segments begins, ends and finds nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops.triton import conv_launch as kernels
from tests.closeness import assert_close
from tests.ops.triton.test_conv_kernel import EXACT, Case, bits, check, names, run

SEGMENT = 8
WIDTHS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs of several rows each."""
    changes = {"BLOCK": 4, "BACKWARD_TILE": 16, "SEGMENT": SEGMENT}
    for name, value in changes.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("state", [True, False], ids=["state", "fresh"])
@pytest.mark.parametrize("width", WIDTHS)
def test_sequences_shorter_than_the_window(width: int, state: bool) -> None:
    """Packed or not; the window then spans more than the sequence."""
    check(Case(lengths=(1, 2, 3, 0, 1, 0, 2), width=width, channels=5, state=state), EXACT)
    for length in (1, 2, 3):
        check(Case(T=length, B=3, width=width, channels=5, state=state), EXACT)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("cut", range(2 * SEGMENT + 1))
def test_a_boundary_at_every_place(cut: int) -> None:
    """Between packed sequences: wherever one ends in a segment, the next begins with its own first segment."""
    lengths = (cut, SEGMENT + 1, 2 * SEGMENT - cut)
    check(Case(lengths=lengths, channels=3, bias=True, l2_width=3, seed=cut), EXACT)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT])
def test_segments_that_end_a_sequence(length: int, width: int) -> None:
    check(Case(T=length, B=3, width=width, channels=3), EXACT)
    check(Case(lengths=(length, SEGMENT, length), width=width, channels=3, state=False), EXACT)


@pytest.mark.parametrize("lengths", [(0,) * 20, (1,) * 20, (0, 40, 0, 0, 3), (5, 0) * 9], ids=str)
def test_segments_of_packed_sequences_have_room(lengths: tuple[int, ...]) -> None:
    """The host counts enough of them without knowing the lengths: no token is left out."""
    x = torch.zeros(1, sum(lengths), 3)
    given = kernels.Inputs.of(x, torch.zeros(3, 4), None, None, Case(lengths=lengths).cu_seqlens)
    assert given.segments(SEGMENT) >= sum(-(-length // SEGMENT) for length in lengths)
    check(Case(lengths=lengths, channels=3), EXACT)


@pytest.mark.parametrize("T", [3, SEGMENT, 2 * SEGMENT + 1])
def test_nothing_outside_is_read(T: int) -> None:
    """Around all sequences lies NaN, which rows without a segment must not see."""
    case = Case(T=T, B=3, channels=3, l2_width=3, state=False)
    drawn = case.draw()

    def surrounded(x: Tensor) -> Tensor:
        return torch.full((5, 3 * T, 3), torch.nan, dtype=x.dtype)[1:4, T : 2 * T].copy_(x)

    spoiled = [surrounded(t) if i in (0, 4) and t is not None else t for i, t in enumerate(drawn)]
    for name, a, b in zip(names(case), run(case, drawn), run(case, spoiled), strict=True):
        assert torch.equal(bits(a), bits(b)), name


def test_an_empty_sequence_adds_nothing() -> None:
    """Whatever its state holds."""
    case = Case(lengths=(9, 0, 4), bias=True, l2_width=4)
    clean, spoiled = case.draw(), case.draw()
    assert spoiled[3] is not None
    spoiled[3][1] = torch.nan
    for name, a, b in zip(names(case), run(case, clean), run(case, spoiled), strict=True):
        if name in ("y", "dx", "dweight", "dbias"):
            assert torch.equal(bits(a), bits(b)), name


def gradients(case: Case, **changes: Any) -> list[Tensor]:
    """With other tiles."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in changes.items():
            monkeypatch.setattr(kernels, name, value)
        return run(case)


@pytest.mark.parametrize("lengths", [(), (3, 18, 0, 12)], ids=["dense", "packed"])
def test_rounds_and_segments_do_not_matter(lengths: tuple[int, ...]) -> None:
    """A token's gradient has the same bits wherever its segment begins; sums are of the same terms."""
    case = Case(T=33, lengths=lengths, bias=True, l2_width=6, dtype=torch.float32)
    usual = gradients(case)
    others = [{"UNROLL": 8}, {"SEGMENT": 4}, {"SEGMENT": 12}, {"SEGMENT": 9, "UNROLL": 3}]
    for changes in others:
        for name, a, b in zip(names(case), gradients(case, **changes), usual, strict=True):
            if name in ("dweight", "dbias"):
                assert_close(name, a, b, 1e-6)
            else:
                assert torch.equal(bits(a), bits(b)), (name, changes)
