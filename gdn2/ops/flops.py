"""FLOP formulas of the operator: matrix products over dense C × C tiles, two operations per multiply-add.

`torch.utils.flop_counter.FlopCounterMode` counts the operator by them. The backward counts what it recomputes.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

COUNTER = "torch.utils.flop_counter"
Formulas = dict[Any, Callable[..., int]]  # of operators, from the shapes of their arguments


def register_when_counting(formulas: Formulas) -> None:
    """Give formulas to torch's counter as soon as somebody imports it.

    To import it here would import triton, 0.2 s. To wait for an operator's first call would be too late: a counter
    copies the formulas when it is made.
    """
    if COUNTER in sys.modules:
        _register(formulas)
    else:
        sys.meta_path.insert(0, _Awaited(formulas))


def _register(formulas: Formulas) -> None:
    for operator, formula in formulas.items():
        sys.modules[COUNTER].register_flop_formula(operator)(formula)


class _Awaited(MetaPathFinder):
    """Lets the other finders find the counter, and registers once it has run."""

    def __init__(self, formulas: Formulas) -> None:
        self.formulas = formulas

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(self.formulas)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def rule_flops(key_width: int, value_width: int, chunk: int, erases: bool) -> float:
    """Forward, per token and key-side head; `value_width` counts all value heads it serves."""
    KV, CK, CV = key_width * value_width, chunk * key_width, chunk * value_width
    flops: float = 4 * KV + 2 * CK + 2 * CV  # Q_γ S, K_tailᵀ R; A_qk; A_qk R
    if erases:
        flops += 2 * KV + 4 * CK + 2 * CV + chunk * chunk / 3  # Y S; T, Y; U; the inverse
    return flops


def rule_backward_flops(
    key_width: int, value_width: int, chunk: int, erases: bool, recompute: bool
) -> float:
    """Backward, per token and key-side head."""
    KV, CK, CV = key_width * value_width, chunk * key_width, chunk * value_width
    flops: float = (
        8 * KV + 4 * CK + 4 * CV
    )  # dR, dS₀, dQ_γ, dK_tail; dA_qk to rows and columns; dR, dA_qk
    if erases:
        flops += 4 * KV + 4 * CK + 4 * CV  # dS₀, dĒ; dT to rows and columns; dZ, dT
        flops += 2 * KV + 2 * CK + 2 * CV  # again Y S; Y; U
    if recompute:
        flops += (
            4 * CK + chunk * chunk / 3 if erases else 2 * CK
        )  # again the scores and the inverse
    return flops
