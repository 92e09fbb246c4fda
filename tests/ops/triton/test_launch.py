"""The launch table: complete, small enough for every GPU, and replaceable; each kernel checked and tuned by itself."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn2
from gdn2.bench import tune
from gdn2.bench.operator import Plan, Shape
from gdn2.ops.backends import STAGES
from gdn2.ops.chunk_op import pack
from gdn2.ops.cuda import band, build
from gdn2.ops.pipeline import Batch
from gdn2.ops.triton import (
    adamw,
    ahead,
    checks,
    companions,
    conv_launch,
    cross_entropy,
    delta_inputs,
    gates,
    launch,
    log_decay,
    matvec,
    norm,
    pipeline,
    plain,
    ranks,
    rotary,
    squares,
    stages,
    step,
    sums,
    swiglu,
    table,
    window,
)
from gdn2.ops.triton.launch import ARCHITECTURES, DEFAULT, KIB, Launch, Scan, overriding, row
from tests.ops.cases import Case, operands

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
KERNELS = [name.removesuffix("_kernel") for name in vars(stages) if name.endswith("_kernel")]
SCANS = ["scan", "scan_reverse"]
# By the name that is trusted or not: the module that launches, and what it launches.
COMPANIONS: dict[str, tuple[Any, ...]] = {
    "step": (step, "step"),
    "conv": (conv_launch, "convolve", "final_state", "convolve_gradient", "state_gradient", "step"),
    "norm": (norm, "rms_norm", "rms_norm_gradient"),
    "delta_inputs": (delta_inputs, "delta_inputs"),
    "swiglu": (swiglu, "swiglu", "swiglu_gradient"),
    "matvec": (matvec, "matvec"),
    "cross_entropy": (cross_entropy, "cross_entropy", "scaled"),
    "window": (window, "turn", "join"),
    "log_decay": (log_decay, "log_decay", "log_decay_gradient"),
    "adamw": (adamw, "adamw"),
    "ranks": (ranks, "rank_reads", "rank_reads_gradient"),
    "table": (table, "table"),
    "gates": (gates, "gates", "gates_gradient"),
    "rotary": (rotary, "rotary", "copy_rows"),
    "squares": (squares, "squares"),
    "sums": (sums, "sum_heads"),
    "plain_gradient": (plain, "states", "plain_gradient"),
}


def test_every_kernel_has_a_row_everywhere() -> None:
    """Deep kernels go with those whose rows they complete."""
    assert sorted(DEFAULT) == sorted(name for name in KERNELS if not name.startswith("deep_"))
    for architecture in ARCHITECTURES.values():
        assert list(architecture.rows) == list(DEFAULT)
    sizes = {(8, 0): 163, (8, 6): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert {c: a.shared_memory // KIB for c, a in ARCHITECTURES.items()} == sizes


@pytest.mark.parametrize(
    ("capability", "nearest"),
    [
        *(((7, 5), (8, 0)), ((8, 0), (8, 0)), ((8, 6), (8, 6)), ((8, 7), (8, 6)), ((8, 9), (8, 6))),
        *(((9, 0), (9, 0)), ((10, 3), (10, 0)), ((11, 0), (10, 0)), ((12, 1), (12, 0))),
        ((13, 0), (12, 0)),
    ],
)
def test_an_unknown_gpu_takes_the_nearest_older_row(
    capability: tuple[int, int], nearest: tuple[int, int]
) -> None:
    for kernel, expected in ARCHITECTURES[nearest].rows.items():
        assert row(kernel, capability) == expected


def test_measured_rows_are_used_as_measured() -> None:
    usual = Scan(chunk=64, keys=128, itemsize=2, values=128, heads=64)
    for kernel, expected in DEFAULT.items():
        scan = usual if kernel in SCANS else None
        assert launch.launch(kernel, CPU, scan) == row(kernel, (9, 0), scan) == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_scans_fit_into_shared_memory(architecture: tuple[int, int]) -> None:
    """By the estimate; where large chunks do not, they are launched in the smallest way there is."""
    limit = ARCHITECTURES[architecture].shared_memory
    sizes = (
        Scan(*s, values=128, heads=64)
        for s in product((32, 64, 128), (1, 16, 48, 100, 128, 160, 256), (2, 4))
    )
    for kernel, scan in product(SCANS, sizes):
        how = row(kernel, architecture, scan)
        if launch.scan_bytes(how, scan, architecture) > limit:
            assert scan.chunk == 128, (scan, how)
            assert limit < 128 * KIB or (scan.keys, scan.itemsize) > (128, 2), (scan, how)
            assert how[1:] == (16, 4, 1)


def test_less_memory_is_taken_step_by_step() -> None:
    sizes = [h[1::2] for h in launch.smaller(Launch(256, 64, 4, 3))]
    assert sizes == [
        (64, 3),
        (64, 2),
        (32, 3),
        (32, 2),
        (16, 3),
        (16, 2),
        (64, 1),
        (32, 1),
        (16, 1),
    ]


@pytest.mark.parametrize(
    ("heads", "values", "expected"),
    [(16, 128, 16), (32, 128, 32), (64, 128, 64), (512, 128, 64), (1, 256, 16), (33, 64, 16), (66, 64, 32)],
    ids=str,
)  # fmt: skip
def test_few_programs_are_spread(heads: int, values: int, expected: int) -> None:
    """Over 132 multiprocessors."""
    how = launch.spread(Launch(256, 64, 4, 3), Scan(64, 128, 2, values, heads), 132)
    assert how == Launch(256, expected, 4, 3)


def test_a_row_is_overridden_for_a_while() -> None:
    usual, other, third = launch.launch("solve", CPU), Launch(16, 16, 1), Launch(32, 16, 1)
    with overriding("solve", other):
        assert launch.launch("solve", CPU) == other
        assert launch.launch("scores", CPU) == DEFAULT["scores"]
        with pytest.raises(KeyError), overriding("solve", third):
            assert launch.launch("solve", CPU) == third
            raise KeyError
        assert launch.launch("solve", CPU) == other
    assert launch.launch("solve", CPU) == usual


class Watched:
    """A kernel that notes what Triton compiles for: dtypes, constants, absences, and whether pointers are aligned."""

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            runtime = tuple(map(self.specialisation, arguments))
            constants = tuple((n, str(value)) for n, value in sorted(options.items()))
            self.seen.add((self.kernel.fn.__name__, runtime, constants))
            self.kernel[grid](*arguments, **options)

        return run

    def specialisation(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        return type(x) if isinstance(x, float) else x


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """What the kernels launched meanwhile would be compiled for."""
    seen: set[Any] = set()
    with monkeypatch.context() as patch:
        for name in KERNELS:
            kernel = f"{name}_kernel"
            patch.setattr(stages, kernel, Watched(getattr(stages, kernel), seen))
        yield seen


def specialisations(case: Case, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What forward and backward of a case would compile."""
    given = operands(case)
    state = given.pop("initial_state")
    rows, length = given["q"].shape[:2]
    batch = Batch(rows, length, case.cu_seqlens, case.chunk_size, "ieee")
    tensors: dict[str, Any] = {n: given.get(n) for n in "qkvgbw"}
    x = pack(**tensors, scale=0.3)
    with watching(monkeypatch) as seen:
        o, final, _ = pipeline.forward(x, batch, state, "nothing")
        pipeline.backward(x, batch, state, [], o, final)
    return seen


def test_one_length_compiles_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `warmup` says: batches, lengths and packings are nothing that Triton sees."""
    case = {"d_k": 16, "d_v": 16, "heads": (1, 2, 1, 1), "chunk_size": 32, "dtype": torch.float32}
    first = specialisations(Case(T=33, B=1, **case), monkeypatch)  # type: ignore[arg-type]
    assert len(first) == len(KERNELS) + 1
    others = [{"T": 1, "B": 1}, {"T": 32, "B": 3}, {"T": 64, "B": 1}, {"lengths": (1, 0, 16)}]
    for other in others:
        assert specialisations(Case(**case, **other), monkeypatch) == first, other  # type: ignore[arg-type]
    wider = Case(T=33, B=1, **case | {"d_v": 32})  # type: ignore[arg-type]
    assert specialisations(wider, monkeypatch) != first


def test_warming_up_compiles_what_a_call_uses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU stands in for a GPU."""
    for module in ("gdn2.ops.warmup", "gdn2.ops.rule", "gdn2.ops.backends"):  # importers first
        monkeypatch.setattr(f"{module}.why_not", lambda *arguments, **options: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "interpreter")
    sizes: dict[str, Any] = {"decay": "head", "write": None, "dtype": torch.float32}
    with watching(monkeypatch) as seen:
        seconds = gdn2.warmup(
            (1, 4, 2, 1), 16, 20, chunk_size=32, device="cpu", decode_batches=(1, 3), **sizes
        )
    said = f"gdn2 warmup: compiled forward and backward, decoding 1, 3 sequences for interpreter in {seconds:.1f} s"
    assert capsys.readouterr().err == f"{said}\n"
    case = Case(
        T=70, d_k=16, d_v=20, heads=(1, 4, 2, 1), widths=("one", "full", "none"), chunk_size=32
    )
    assert specialisations(replace(case, dtype=torch.float32), monkeypatch) == seen


def test_no_memory_to_compile_ahead_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call needs itself may well fit; other failures are those of the call, and are said at once."""
    monkeypatch.setattr(ahead, "_done", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tried: list[bool] = []

    def work(failure: Exception) -> None:
        tried.append(ahead.compiling())
        raise failure

    gpu, full = torch.device("cuda", 0), partial(work, torch.OutOfMemoryError("no room"))
    for _ in range(2):
        ahead.compile_together("kind", gpu, full)
    assert tried == [True] and not ahead.compiling()
    with pytest.raises(ValueError, match="mistake"):
        ahead.compile_together("another", gpu, partial(work, ValueError("mistake")))
    assert not ahead.compiling()


def test_every_kernel_is_checked() -> None:
    assert sorted(KERNELS) == sorted(STAGES)
    *checked, last = checks.CHECKS
    cuda = sorted(file.stem for file in build.SOURCES.glob("*.cu"))
    assert checked[: -len(cuda)] == [*STAGES, *COMPANIONS]
    assert sorted(checked[-len(cuda) :]) == cuda
    assert last == band.NAME
    for module, *names in COMPANIONS.values():
        assert {f"{name}_kernel" for name in names} == {
            name for name in vars(module) if name.endswith("_kernel")
        }


@pytest.mark.parametrize("kernel", STAGES)
def test_a_kernel_alone_is_found_right(kernel: str) -> None:
    found = list(checks.check_kernel(kernel, CPU, "fp32"))
    assert found
    for check in found:
        assert check.passed, check
        assert 1e-9 < check.error < 1e-6, check  # really fp32


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences, and what a program walks of them, for the interpreter."""
    monkeypatch.setattr(companions, "LENGTHS", (1, 2, 9))
    monkeypatch.setattr(conv_launch, "SEGMENT", 8)


# the interpreter's products of bf16 are wrong
INTERPRETED = [
    pair for pair in product(COMPANIONS, ("fp32", "bf16")) if pair != (plain.NAME, "bf16")
]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("kernel", "dtype"), INTERPRETED)
def test_a_companion_alone_is_found_right(kernel: str, dtype: str) -> None:
    found = list(checks.check_kernel(kernel, CPU, dtype))
    worst = max(check.error for check in found)
    assert all(check.passed for check in found)
    if kernel == table.NAME:
        assert worst == 0  # numbers of tokens and chunks
    elif kernel == "squares":
        assert worst < 1e-6  # of any dtype a sum in fp32
    else:
        assert (1e-8 < worst < 1e-6) if dtype == "fp32" else (1e-3 < worst < 1e-2)


class Broken:
    """A kernel whose every result is off by a tenth, or by one.

    A result is what a call changes: new memory must be poisoned, since what was freed may hold it already.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            before = [x.clone() if isinstance(x, Tensor) else None for x in arguments]
            self.kernel[grid](*arguments, **options)
            for x, old in zip(arguments, before, strict=True):
                if old is not None and not torch.equal(x, old):
                    x.copy_(1.1 * x if x.is_floating_point() else x + 1)

        return run


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "kernel", ["deep_scores", "scan", "scan_reverse", "gradient_values", "gradient_states"]
)
def test_a_wrong_kernel_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{kernel}_kernel"
    monkeypatch.setattr(stages, name, Broken(getattr(stages, name)))
    assert any(not check.passed for check in checks.check_kernel(kernel, CPU, "fp32"))


@pytest.mark.usefixtures("short", "poison")
@pytest.mark.parametrize(
    ("companion", "kernel"),
    [  # all but one whose results are no arguments, but at addresses in one
        *((c, n) for c, (_, *names) in COMPANIONS.items() for n in names if n != "adamw"),
    ],
)
def test_a_wrong_companion_is_found(
    companion: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = COMPANIONS[companion][0], f"{kernel}_kernel"
    monkeypatch.setattr(module, name, Broken(getattr(module, name)))
    assert any(not check.passed for check in checks.check_kernel(companion, CPU, "fp32"))


TINY = Plan((Shape(1, 70, 1, 32, 16),), ("triton",), CPU, "fp32", chunk_size=32)


def test_tuning_times_what_is_right_and_says_what_is_not() -> None:
    right, slow = Launch(256, 16, 2, 2), Launch(256, 16, 8)
    ways = [
        *(("scan", right), ("scan", Launch(16, 16, 4)), ("scan", slow), ("scan", Launch(1, 1, 1))),
        *(("scores", Launch(16, 0, 1)), ("scores", Launch(24, 0, 1))),
    ]
    seconds = {right: 1e-6, slow: 9e-6, Launch(16, 0, 1): 7e-6}

    def timer(stage: Any, kernel: str) -> float:
        return seconds[stage.args[2]] if isinstance(stage, partial) else 5e-6

    def ahead(plan: Plan, ways: list[tune.Way]) -> list[str]:
        return ["died" if how == Launch(1, 1, 1) else "" for _, how in ways]

    result = tune.tune(TINY, ways, timer, ahead)
    problems = {(t.kernel, t.how): t.problem for t in result.trials if not t.default}
    assert problems["scan", right] == problems["scan", slow] == ""
    assert problems["scan", Launch(16, 16, 4)].startswith("another result: off by ")
    assert problems["scan", Launch(1, 1, 1)] == "died"
    assert "Error" in problems["scores", Launch(24, 0, 1)]  # no power of two
    assert [(t.kernel, t.seconds) for t in result.trials if t.default] == [
        ("scan", 5e-6),
        ("scores", 5e-6),
    ]
    assert {k: t.how for k, t in result.best.items()} == {
        "scan": right,
        "scores": DEFAULT["scores"],
    }
    usual = ", ".join(map(str, DEFAULT["scores"][:3]))
    literal = f'    "scores": Launch({usual}),  # 5\n    "scan": Launch(256, 16, 2, 2),  # 1'
    assert result.literal() == literal
    record = result.as_json()
    assert record["trials"][-1]["how"] == {
        "key_block": 24,
        "value_block": 0,
        "num_warps": 1,
        "num_stages": 1,
    }
    assert json.loads(json.dumps(record))["best"] == literal


def test_every_stage_can_be_tuned_and_tried_out() -> None:
    assert list(tune.CANDIDATES) == list(DEFAULT)
    assert set(tune.prepare(TINY.shapes[0], TINY)) == set(DEFAULT)
    assert tune.try_out(TINY, "scan", Launch(256, 16, 4)) == ""
    assert "Error" in tune.try_out(TINY, "scores", Launch(24, 0, 1))
    with pytest.raises(
        ValueError, match="kernel: got 'scna', expected one of decays, scores, solve, scan"
    ):
        list(tune.candidates(["scna"]))
