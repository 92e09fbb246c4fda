"""Products of matrices in training, in the way that was found fastest on this GPU.

Nothing is chosen unless `gdn2 bench products` was run: what it found lies in the user's cache, for this GPU and version
of the library, and holds for the sizes that it met. All others are left to torch.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops.arguments import exact_products
from gdn2.ops.cuda.build import CudaError
from gdn2.ops.cuda.multiply import (
    Problem,
    Way,
    checked,
    library_version,
    multiplier,
    problem_of,
)
from gdn2.ops.trust import indexed, verdict_file, write_at_once

Ways = dict[Problem, Way]
_known: dict[torch.device, Ways] = {}
_met: Counter[Problem] | None = None  # problems of calls, while they are counted


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for two matrices, which has no gradients where ways were chosen."""
    return chosen_product(a, b) if is_chosen(a.device) else a @ b


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ for x [..., inputs] and W [outputs, inputs], as `product`."""
    if not is_chosen(x.device):
        return F.linear(x, weight)
    return product(rows_of(x), weight.t()).view(*x.shape[:-1], len(weight))


def rows_of(x: Tensor) -> Tensor:
    """[rows, width] of [..., width]."""
    return x.reshape(-1, x.shape[-1])


def is_chosen(device: torch.device) -> bool:
    """Whether ways were chosen for a device, or products are being counted."""
    return _met is not None or (device.type == "cuda" and bool(ways_of(device)))


@torch.library.custom_op("gdn2::product", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def chosen_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b."""
    problem = problem_of(a, b)
    if _met is not None and problem is not None:
        _met[problem] += 1
    way = None if problem is None else ways_of(a.device).get(problem)
    if problem is not None and way is not None:
        out = a.new_empty(problem.rows, problem.columns)
        try:
            with torch.cuda.device_of(a):
                multiplier(problem, a.device)(a, b, out, way)
            return out
        except CudaError as failure:  # from now on torch's way
            warnings.warn(f"gdn2 leaves products to torch: {failure}", stacklevel=2)
            ways_of(a.device).pop(problem, None)
    with exact_products(a.device):
        return torch.mm(a, b)


@chosen_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@register_flop_formula(torch.ops.gdn2.product)
def _flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


@contextmanager
def counting() -> Iterator[Counter[Problem]]:
    """Count the problems that calls meet meanwhile."""
    global _met  # noqa: PLW0603 (operators have no other place to leave it)
    _met = Counter()
    try:
        yield _met
    finally:
        _met = None


def ways_of(device: torch.device) -> Ways:
    """What was chosen for a device; the file is read once in a process."""
    device = indexed(device)
    if device not in _known:
        _known[device] = {}
        if device.type == "cuda" and choices_file().exists():
            with suppress(CudaError):  # no library, no choice
                _known[device] = _read(choices_file()).get(identity(device), {})
    return _known[device]


def choose(device: torch.device, ways: Mapping[Problem, Way | None]) -> Path:
    """Add ways to those of a device, here and for later processes; None leaves a problem to torch again."""
    known, file = ways_of(device), choices_file()
    kept = _read(file)  # another process may have added to it
    known |= kept.get(identity(device), {})
    for problem, way in ways.items():
        known.pop(problem, None)
        if way is not None:
            known[problem] = way
    _write(file, {**kept, identity(device): known})
    return file


def forget(device: torch.device) -> Path:
    """Leave all products on a device to torch again."""
    file = choices_file()
    ways_of(device).clear()
    _write(file, {name: ways for name, ways in _read(file).items() if name != identity(device)})
    return file


def choices_file() -> Path:
    """Beside what `gdn2 doctor` writes."""
    return verdict_file().with_name("products.json")


def identity(device: torch.device) -> str:
    """What a choice holds for."""
    return f"{torch.cuda.get_device_name(device)}, cuBLASLt {library_version()}"


def _read(file: Path) -> dict[str, Ways]:
    if not file.exists():
        return {}
    try:
        return {
            name: {Problem(*problem): checked(Way(*way)) for problem, way in rows}
            for name, rows in json.loads(file.read_text()).items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        hint = "gdn2 bench products writes it anew"
        warnings.warn(f"gdn2 ignores {file}, which it cannot read; {hint}", stacklevel=2)
        return {}


def _write(file: Path, known: Mapping[str, Ways]) -> None:
    text = json.dumps({name: [*ways.items()] for name, ways in known.items()}, indent=1)
    write_at_once(file, f"{text}\n".encode())


# torch.compile calls it instead of tracing into it
vars(is_chosen)["_dynamo_marked_constant"] = True
