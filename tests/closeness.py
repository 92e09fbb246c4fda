"""The one measure of error used by all tests."""

import torch
from torch import Tensor

VANISHING = 1e-30


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in fp64; 0 where both vanish, inf where only one is finite."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    x, y = actual.detach().double(), expected.detach().double()
    if not bool(torch.isfinite(x).all()):
        return float("inf")
    norm = float(y.norm())
    if norm < VANISHING:
        return 0.0 if float(x.norm()) < VANISHING else float("inf")
    return float((x - y).norm()) / norm


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Fail with the operand's name and its error."""
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{name}: relative error {error:.2e} exceeds {tolerance:.0e}"
