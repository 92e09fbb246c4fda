"""Maps of one input give the same, joined or not, and nobody's change to one of them is overlooked."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gdn2.layers.joint import joint, lay_side_by_side, single
from tests.closeness import assert_close
from tests.models.cases import make, tokens

EXACT = 1e-12


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3, bias=False), nn.Linear(5, 4, bias=False)
        self.other = nn.Linear(7, 2, bias=False)
        self.c = nn.Linear(5, 1, bias=False)
        self.double()

    @property
    def joint_maps(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.a, self.b, self.c


def row(*shape: int) -> Tensor:
    return torch.randn(*shape, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def joins(three: Three, x: Tensor) -> bool:
    """Whether the maps of x are views of one product; they are right in any case."""
    found = joint(x, *three.joint_maps)
    for y, map_ in zip(found, three.joint_maps, strict=True):
        assert_close("map", y, x @ map_.weight.t(), EXACT)
    return found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_a_single_row_is_one_product() -> None:
    three = Three()
    before = [parameter.clone() for parameter in three.parameters()]
    with torch.no_grad():
        assert not joins(three, row(1, 1))
        lay_side_by_side(three)
        assert all(torch.equal(a, b) for a, b in zip(three.parameters(), before, strict=True))
        assert joins(three, row(1, 1))
        assert not joins(three, row(2, 1))
    assert not joins(three, row(1, 1))  # gradients go to the parameters


def test_gradients_reach_every_weight() -> None:
    three = Three()
    lay_side_by_side(three)
    sum(y.sum() for y in joint(row(1, 1), *three.joint_maps)).backward()  # type: ignore[union-attr]
    for map_ in three.joint_maps:
        assert map_.weight.grad is not None
        assert_close("gradient", map_.weight.grad, row(1, 1)[0].expand_as(map_.weight), EXACT)


class Adapted(nn.Linear):
    """As an adapter that adds to a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda three: setattr(three.b.weight, "data", three.b.weight.data.clone()),
        lambda three: setattr(three.b.weight, "data", three.b.weight.data.contiguous()),
        lambda three: three.load_state_dict(Three().state_dict(), assign=True),
        lambda three: three.load_state_dict(Three().state_dict()),
        lambda three: three.b.weight.data.mul_(3),
        lambda three: three.float().double(),
    ],
)
def test_changed_weights_are_seen(change: Callable[[Three], object]) -> None:
    three = Three()
    lay_side_by_side(three)
    change(three)
    with torch.no_grad():
        joins(three, row(1, 1))


def test_other_kinds_of_maps_are_called() -> None:
    three = Three()
    three.b = Adapted(5, 4, bias=False).double()
    lay_side_by_side(three)
    with torch.no_grad():
        found = joint(row(1, 1), *three.joint_maps)
    assert_close("adapted", found[1], row(1, 1) @ three.b.weight.t() + 1, EXACT)
    biased = nn.Linear(5, 4).double()
    with torch.no_grad():
        assert_close("biased", joint(row(1, 1), biased)[0], biased(row(1, 1)), EXACT)


def test_hooks_are_called() -> None:
    three, seen = Three(), []
    lay_side_by_side(three)
    three.b.register_forward_hook(lambda *given: seen.append(given))
    three.other.register_forward_pre_hook(lambda *given: seen.append(given))
    with torch.no_grad():
        joint(row(1, 1), *three.joint_maps)
        single(three.other, torch.ones(1, 7, dtype=torch.float64))
    assert len(seen) == 2


def test_a_model_laid_out_for_steps_computes_the_same() -> None:
    model, ids = make(), tokens(1, 9)
    expected = model(ids).logits
    lay_side_by_side(model)
    assert model.head.weight.t().is_contiguous()
    with torch.no_grad():
        state = model.reserve(model(ids[:, :4], model.new_state(1)).state, 5)
        for t in range(4, 9):
            logits = model(ids[:, t : t + 1], state, inplace=True).logits
            assert_close(f"token {t}", logits[:, 0], expected[:, t], 1e-10)
