"""Products of matrices by cuBLASLt, the library that torch brings along, in ways that it proposes and variants of them.

It knows many kernels for each product, and a rule of thumb for the fastest. Where a GPU is at the limit of its power,
the fastest is the one that takes the least energy, which that rule does not know.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.cuda.build import CudaError, torch_library

BF16, FP32, SUMS_IN_FP32 = 14, 0, 68  # CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F
FIRST_TURNED, SECOND_TURNED = 3, 4  # CUBLASLT_MATMUL_DESC_TRANSA and TRANSB
WORKSPACE, ALIGNMENT = 32 << 20, 16  # bytes
# CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, _REDUCTION_SCHEME_MASK and _MIN_ALIGNMENT_A_BYTES to D, with their sizes: of
# products in parts, sums stay in fp32 (CUBLASLT_REDUCTION_SCHEME_INPLACE and _COMPUTE_TYPE)
PREFERENCES = ((1, 8, WORKSPACE), (3, 4, 1 | 2), *((name, 4, ALIGNMENT) for name in range(5, 9)))
PROPOSALS = 32  # more than it makes
# CUBLASLT_ALGO_CONFIG_TILE_ID and _CUSTOM_OPTION: which tiles, and how they follow one another
# CUBLASLT_ALGO_CAP_TILE_IDS and _CUSTOM_OPTION_MAX: those there are
TILE, OPTION, TILES, LARGEST_OPTION = 1, 5, 6, 7


class Problem(NamedTuple):
    """A [rows, inner] times B [inner, columns]; each lies by rows, or by columns if it is turned."""

    rows: int
    columns: int
    inner: int
    a_turned: bool
    b_turned: bool
    a_stride: int  # from row to row, or from column to column
    b_stride: int


class Way(NamedTuple):
    """How to solve a problem: the library's own words, good for the same version of it."""

    algorithm: str  # 64 bytes as hexadecimal digits
    workspace: int  # bytes


def checked(way: Way) -> Way:
    """A way that was read, which may be no such thing."""
    if len(bytes.fromhex(way.algorithm)) != 64 or way.workspace < 0:
        raise ValueError(f"way: got {way}, expected 64 bytes and a size")
    return way


class Proposal(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def problem_of(a: Tensor, b: Tensor) -> Problem | None:
    """The problem a @ b of two bf16 matrices; None where one of them lies in no way that the library takes."""
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or not (a.numel() and b.numel()):
        return None
    lying = [_stride(x) for x in (a, b)]
    if None in lying or any(x.data_ptr() % ALIGNMENT for x in (a, b)):
        return None
    (a_turned, a_stride), (b_turned, b_stride) = lying  # type: ignore[misc]
    return Problem(a.shape[0], b.shape[1], a.shape[1], a_turned, b_turned, a_stride, b_stride)


def _stride(x: Tensor) -> tuple[bool, int] | None:
    """Whether a matrix lies by columns, and how far these, or its rows, are apart."""
    across, along = x.stride()
    if along == 1 and across >= x.shape[1]:
        return False, across
    if across == 1 and along >= x.shape[0]:
        return True, along
    return None


def library() -> ctypes.CDLL:
    """CuBLASLt."""
    return torch_library("cublasLt")


def library_version() -> int:
    """As the library says it, in a size_t whose upper half is empty."""
    return int(library().cublasLtGetVersion())


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _require(library().cublasLtCreate(byref(handle)), "cublasLtCreate")
    return handle


class Multiplier:
    """One problem on one device. The library computes by columns, so it is told of Bᵀ Aᵀ."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.device, self.handle = problem, device, _handle(device)
        self.description = c_void_p()
        made = library().cublasLtMatmulDescCreate(byref(self.description), SUMS_IN_FP32, FP32)
        _require(made, "cublasLtMatmulDescCreate")
        turns = ((FIRST_TURNED, problem.b_turned), (SECOND_TURNED, problem.a_turned))
        for name, turned in turns:
            value = c_int(turned)
            done = library().cublasLtMatmulDescSetAttribute(
                self.description, name, byref(value), c_size_t(4)
            )
            _require(done, "cublasLtMatmulDescSetAttribute")
        p = problem
        b_shape = (p.inner, p.columns) if p.b_turned else (p.columns, p.inner)
        a_shape = (p.rows, p.inner) if p.a_turned else (p.inner, p.rows)
        self.layouts = (
            _layout(*b_shape, p.b_stride),
            _layout(*a_shape, p.a_stride),
            _layout(p.columns, p.rows, p.columns),
        )

    def ways(self) -> list[Way]:
        """What the library proposes, best first as it thinks; nothing where it knows no way."""
        preference = c_void_p()
        made = library().cublasLtMatmulPreferenceCreate(byref(preference))
        _require(made, "cublasLtMatmulPreferenceCreate")
        for name, size, value in PREFERENCES:
            library().cublasLtMatmulPreferenceSetAttribute(
                preference, name, byref(c_uint64(value)), c_size_t(size)
            )
        found, count = (Proposal * PROPOSALS)(), c_int()
        b, a, c = self.layouts
        asked = library().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, b, a, c, c, preference, PROPOSALS, found, byref(count)
        )
        library().cublasLtMatmulPreferenceDestroy(preference)
        known = found[: count.value] if asked == 0 else []
        proposals = [proposal for proposal in known if proposal.status == 0]
        return [Way(bytes(x.algorithm).hex(), int(x.workspace)) for x in proposals]

    def variants(self, way: Way) -> list[Way]:
        """The same with other tiles, and with other values of its option, as far as the library can."""
        largest = _known(way, LARGEST_OPTION)
        options = range(largest[0] + 1) if largest else ()
        changes = [(TILE, tile) for tile in _known(way, TILES)] + [(OPTION, x) for x in options]
        found = (self._changed(way, name, value) for name, value in changes)
        return [variant for variant in found if variant is not None]

    def _changed(self, way: Way, name: int, value: int) -> Way | None:
        algorithm, number, found = _algorithm(way), c_uint32(value), Proposal()
        refused = library().cublasLtMatmulAlgoConfigSetAttribute(
            byref(algorithm), name, byref(number), c_size_t(4)
        )
        b, a, c = self.layouts
        refused = refused or library().cublasLtMatmulAlgoCheck(
            self.handle, self.description, b, a, c, c, byref(algorithm), byref(found)
        )
        if refused or found.status or found.workspace > WORKSPACE:
            return None
        return Way(bytes(algorithm).hex(), int(found.workspace))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, way: Way) -> None:
        """Store a @ b in out, which lies by rows without gaps."""
        algorithm = _algorithm(way)
        workspace = a.new_empty(way.workspace, dtype=torch.uint8)
        one, none = c_float(1), c_float(0)
        b_layout, a_layout, c_layout = self.layouts
        result = c_void_p(out.data_ptr())
        done = library().cublasLtMatmul(
            self.handle, self.description, byref(one), c_void_p(b.data_ptr()), b_layout,
            c_void_p(a.data_ptr()), a_layout, byref(none), result, c_layout, result, c_layout,
            byref(algorithm), c_void_p(workspace.data_ptr()), c_size_t(way.workspace),
            c_void_p(torch._C._cuda_getCurrentRawStream(a.device.index)),
        )  # fmt: skip
        _require(done, "cublasLtMatmul")


@cache
def multiplier(problem: Problem, device: torch.device) -> Multiplier:
    """The one of a problem."""
    return Multiplier(problem, device)


def _algorithm(way: Way) -> "ctypes.Array[c_uint64]":
    return (c_uint64 * 8).from_buffer_copy(bytes.fromhex(way.algorithm))


def _known(way: Way, name: int) -> list[int]:
    """What an algorithm says of itself: numbers of 32 bits."""
    algorithm, size = _algorithm(way), c_size_t()
    ask = library().cublasLtMatmulAlgoCapGetAttribute
    ask(byref(algorithm), name, None, c_size_t(0), byref(size))
    numbers = (c_uint32 * (size.value // 4))()
    failed = ask(byref(algorithm), name, numbers, c_size_t(ctypes.sizeof(numbers)), byref(size))
    return [] if failed else [*numbers]


def _layout(rows: int, columns: int, stride: int) -> c_void_p:
    layout = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(stride)
    made = library().cublasLtMatrixLayoutCreate(byref(layout), BF16, *sizes)
    _require(made, "cublasLtMatrixLayoutCreate")
    return layout


def _require(status: int, call: str) -> None:
    if status != 0:
        raise CudaError(f"{call}: got status {status}, expected 0")
