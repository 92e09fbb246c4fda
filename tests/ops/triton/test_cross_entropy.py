"""The kernel of losses and their gradients, interpreted, against torch's cross entropy."""

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from gdn2.ops.triton.cross_entropy import BLOCK, SCALED_BLOCK, cross_entropy, scaled
from tests.closeness import assert_close


@pytest.mark.parametrize("vocabulary", [1, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_losses_and_gradients(vocabulary: int, size: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = size * torch.randn(6, vocabulary, generator=generator)
    if vocabulary > 1:
        logits[1, 0] = -torch.inf
    targets = torch.randint(vocabulary, (6,), generator=generator)
    targets[1], targets[4] = vocabulary - 1, -1
    losses, d_logits = cross_entropy(logits, targets, -1, torch.float32)
    exact = logits.double().requires_grad_()
    expected = torch_cross_entropy(exact, targets, ignore_index=-1, reduction="none")
    (d_expected,) = torch.autograd.grad(expected.sum(), exact)
    if vocabulary > 1:
        assert_close("losses", losses, expected, 1e-6)
        assert_close("d_logits", d_logits, d_expected, 1e-6 * size)
    else:
        assert not losses.any() and not d_logits.any()
    assert losses[4] == 0 and not d_logits[4].any()


def test_operands_that_do_not_lie_side_by_side() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 4, generator=generator).T, torch.arange(12).reshape(4, 3) % 7
    found = cross_entropy(logits, labels[:, -1], -1, torch.float32)
    expected = cross_entropy(logits.contiguous(), labels[:, -1].contiguous(), -1, torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_no_rows() -> None:
    logits, targets = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    losses, d_logits = cross_entropy(logits, targets, -1, torch.bfloat16)
    assert losses.shape == (0,) and d_logits.shape == (0, 5) and d_logits.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(1,), (3, SCALED_BLOCK // 2), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_scaled_and_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, by = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.tensor(1 / 3)
    found = scaled(x, by, dtype)
    assert found.shape == x.shape and found.dtype == dtype
    # the interpreter rounds to bf16 in a way of its own
    assert_close("y", found, x.double() * by.double(), 8e-3 if dtype == torch.bfloat16 else 5e-4)
