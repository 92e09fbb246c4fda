"""A layout finds the sequences in whatever describes them, and refuses what it cannot read."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from gdn2.layers.layout import Layout

CPU = torch.device("cpu")


def test_dense() -> None:
    layout = Layout.dense(3, 5)
    x = torch.randn(3, 5, 2)
    assert layout.pack(x) is x
    assert layout.unpack(x) is x
    assert layout.lengths == 5
    assert not layout.is_step
    assert Layout.dense(3, 1).is_step
    assert torch.equal(layout.last(x, torch.zeros(3, 2)), x[:, -1])
    assert torch.equal(Layout.dense(3, 0).last(x[:, :0], x[:, 1]), x[:, 1])


def test_a_mask_packs_and_unpacks() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    layout = Layout.from_mask(mask)
    x = torch.arange(16.0).reshape(4, 4, 1)
    packed = layout.pack(x)
    assert packed.flatten().tolist() == [2, 3, 4, 5, 6, 13]
    assert layout.cu_seqlens is not None
    assert layout.cu_seqlens.tolist() == [0, 2, 5, 5, 6]
    assert torch.equal(layout.unpack(packed), x * mask[..., None])
    assert layout.last(packed, -torch.ones(4, 1)).flatten().tolist() == [3, 6, -1, 13]
    assert not layout.is_step


def test_positions_begin_sequences() -> None:
    layout = Layout.from_positions(torch.tensor([[0, 1, 0, 1, 2], [4, 5, 6, 0, 0]]))
    assert layout.cu_seqlens is not None
    assert layout.cu_seqlens.tolist() == [0, 2, 5, 8, 9, 10]
    x = torch.randn(2, 5, 3)
    assert torch.equal(layout.unpack(layout.pack(x)), x)


def angle(layout: Layout) -> list[list[int]]:
    """Positions, read off the rotary table: the first pair turns by one radian a token."""
    cos, sin = layout.rotary(2, 10000.0, torch.float64, CPU)
    turned = torch.atan2(sin, cos).remainder(2 * torch.pi)[..., 0]
    return [row.tolist() for row in turned.round().long().reshape(-1, turned.shape[-1])]


def test_positions_go_on_after_the_past() -> None:
    assert angle(Layout.dense(2, 3)) == [[0, 1, 2]]
    past = torch.tensor([2, 0])
    assert angle(Layout.dense(2, 3).after(past)) == [[2, 3, 4], [0, 1, 2]]
    packed = Layout.packed(torch.tensor([0, 2, 5]), 5)
    assert angle(packed) == [[0, 1, 0, 1, 2]]
    assert angle(packed.after(past)) == [[2, 3, 0, 1, 2]]


def test_tables_are_shared() -> None:
    layout = Layout.dense(1, 4)
    ask = (6, 100.0, torch.float32, CPU)
    assert layout.rotary(*ask)[0] is layout.rotary(*ask)[0]
    assert layout.rotary(*ask)[0] is not layout.rotary(4, *ask[1:])[0]
    later = layout.after(torch.tensor([3]))
    assert not torch.equal(later.rotary(*ask)[0][0], layout.rotary(*ask)[0])


def test_a_copy_makes_its_own_tables() -> None:
    """Field by field, as FSDP2 copies what it casts."""
    layout = Layout.packed(torch.tensor([0, 2, 5]), 5).after(torch.tensor([3, 0]))
    cos, sin = layout.rotary(6, 100.0, torch.float32, CPU)
    copy = replace(layout, **{x.name: getattr(layout, x.name) for x in fields(layout)})
    found = copy.rotary(6, 100.0, torch.float32, CPU)
    assert found[0] is not cos
    assert torch.equal(found[0], cos) and torch.equal(found[1], sin)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Layout.from_mask(torch.tensor([[1, 1], [1, 0], [1, 1]]).float()),
            r"^mask: got torch\.float32, expected bool or integers$",
        ),
        (
            lambda: Layout.from_mask(torch.ones(3).bool()),
            r"^mask: got shape \(3,\), expected \[batch, length\]$",
        ),
        (
            lambda: Layout.from_mask(torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]])),
            r"^mask: got a gap in row 1, expected padding at the ends$",
        ),
        (
            lambda: Layout.from_positions(torch.zeros(2, 3)),
            r"^position_ids: got torch\.float32, expected integers$",
        ),
        (
            lambda: Layout.from_positions(torch.zeros(2, 0).long()),
            r"^position_ids: got shape \(2, 0\), expected at least one token$",
        ),
        (
            lambda: Layout.packed(torch.tensor([0, 3, 2, 5]), 5),
            r"^cu_seqlens falls from 3 to 2 at entry 2, expected no decrease$",
        ),
        (lambda: Layout.packed(torch.tensor([0, 3]), 5), r"^cu_seqlens ends at 3, expected the"),
        (
            lambda: Layout.dense(2, 3).after(torch.tensor([1])),
            r"^past: got shape \(1,\), expected \(2,\)$",
        ),
    ],
)
def test_bad_descriptions_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_is_shared_fits_its_device_and_mode() -> None:
    """Tensors made for inference cannot be kept for a backward."""
    layout = Layout.dense(1, 3)
    with torch.inference_mode():
        later = layout.after(torch.tensor([3]))
        for asked in (layout, later):
            assert not asked.rotary(4, 10.0, torch.float32, CPU)[0].is_inference()
    assert layout.rotary(4, 10.0, torch.float32, CPU)[0].tolist()[0] == [1.0, 1.0]
    assert layout.rotary(4, 10.0, torch.float32, torch.device("meta"))[0].is_meta
