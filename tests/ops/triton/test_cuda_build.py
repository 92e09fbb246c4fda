"""Compiling CUDA C++ on demand, with a compiler that is made up."""

import ctypes
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn2.ops.cuda import build, launch
from gdn2.ops.triton.checks import MILD, Exact


class Compiler:
    """NVRTC's interface: "compiles" a source to its length, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.calls = fails, 0
        self.text = b""

    def nvrtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, *_: Any) -> int:  # noqa: N802
        self.text = text
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        self.calls += 1
        self.options = [options[i] for i in range(count)]
        return 6 if self.fails else 0

    def result(self) -> bytes:
        return b"gradient.cu(3): error: no such thing\0" if self.fails else b"code " + self.text[:9]

    def size(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.result())
        return 0

    def copy(self, program: Any, buffer: Any) -> int:
        ctypes.memmove(buffer, self.result(), len(self.result()))
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        return 0

    nvrtcGetCUBINSize = nvrtcGetProgramLogSize = size
    nvrtcGetCUBIN = nvrtcGetProgramLog = copy


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(build, "compiler", lambda: made)
    monkeypatch.setattr(build, "_code", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def test_a_source_holds_every_file_it_includes_once() -> None:
    text = build.source("gradient.cu")
    assert '#include "' not in text
    for file in ("warp", "layout", "values", "states", "keys"):
        lines = (build.SOURCES / f"{file}.cuh").read_text().splitlines()
        assert text.count(lines[0]) == 1, file
    assert text.index("DEVICE void mma(") < text.index("through_state(") < text.index('extern "C"')
    assert "DEVICE void mma(" not in build.source("gradient.cu", given=frozenset({"warp.cuh"}))


def test_machine_code_is_compiled_once_for_the_same_options(compiler: Compiler) -> None:
    code = build.compiled("gradient", ["-DD=64"])
    assert code == b"code " + build.source("gradient.cu")[:9].encode()
    assert compiler.options == [b"-DD=64"]
    assert build.compiled("gradient", ["-DD=64"]) == code
    build._code.clear()  # as in another process
    assert build.compiled("gradient", ["-DD=64"]) == code
    assert compiler.calls == 1
    build.compiled("gradient", ["-DD=128"])
    assert compiler.calls == 2


@pytest.mark.parametrize("left", [0, 20, 32, 33, -1])
def test_code_that_lost_a_part_is_compiled_again(
    left: int, compiler: Compiler, tmp_path: Path
) -> None:
    """As where a machine stopped before its disk had all; the driver would read on behind what there is."""
    code = build.compiled("gradient", [])
    (file,) = tmp_path.glob("gdn2/cuda/gradient-*.cubin")
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    build._code.clear()
    assert build.compiled("gradient", []) == code and compiler.calls == 2
    assert file.read_bytes() == whole and [*file.parent.iterdir()] == [file]


def test_a_cache_that_cannot_be_written_is_done_without(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.compiled("gradient", []) == build.compiled("gradient", [])
    assert compiler.calls == 1
    build._code.clear()
    build.compiled("gradient", [])
    assert compiler.calls == 2


def test_what_the_compiler_says_is_passed_on(compiler: Compiler) -> None:
    compiler.fails = True
    with pytest.raises(build.CudaError, match=r"gradient.cu does not compile: .* no such thing$"):
        build.compiled("gradient", [])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    build.torch_library.cache_clear()
    with pytest.raises(build.CudaError, match=r"libnvrtc\.so\.99 is not to be found"):
        build.compiler()
    build.torch_library.cache_clear()


SIZES = {"HEADS": 16, "D": 128, "G_WIDTH": 128, "B_WIDTH": 128, "W_WIDTH": 128, "PROGRAMS": 2}


def test_a_kernel_that_cannot_be_loaded_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and the Triton kernels take over; a GPU with too little shared memory says nothing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise build.CudaError("no kernel image")

    device, memory = torch.device("cuda", 0), SimpleNamespace(shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(launch, "Kernel", refuse)
    with pytest.warns(UserWarning, match="instead of intra on cuda:0: no kernel image"):
        assert launch.load("intra", device, SIZES) is None
    memory.shared_memory_per_block_optin = 101376
    assert launch.load("intra", device, SIZES) is None


def test_a_kernel_says_what_registers_its_threads_have(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {4: 128, 3: 8}  # as the driver numbers them

    def ask(found: Any, what: int, function: Any) -> int:
        found._obj.value = known[what]
        return 0

    monkeypatch.setattr(build, "driver", lambda: SimpleNamespace(cuFuncGetAttribute=ask))
    kernel = build.Kernel.__new__(build.Kernel)
    kernel.function = ctypes.c_void_p()
    assert kernel.of_threads() == (128, 8)


def test_other_programs_are_tried_for_a_while() -> None:
    """What is loaded meanwhile is apart, and forgotten."""
    x, _ = Exact(MILD, torch.bfloat16).operands(torch.device("cpu"))
    usual, kept = launch.macros("intra", x), dict(launch._kernels)
    with launch.trying(1) as loaded:
        assert launch.macros("intra", x) == {**usual, "PROGRAMS": 1}
        launch._kernels[launch.key_of("intra", x, {})] = None
        assert len(loaded) == 1
    with launch.trying(None):
        assert launch.macros("intra", x) == usual and not launch._kernels
    assert launch.macros("intra", x) == usual and launch._kernels == kept


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a thread of its own, a failure left for later; none that is loaded already, and none alone."""
    device, at_once, seen = torch.device("cuda", 0), threading.Barrier(2), set[str]()

    def compiled(kernel: str, options: list[str]) -> bytes:
        assert "--gpu-architecture=sm_90a" in options and "-DD=128" in options
        seen.add(kernel)
        at_once.wait(timeout=10)
        raise build.CudaError("not today")

    monkeypatch.setattr(launch, "compiled", compiled)
    monkeypatch.setattr(launch, "capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    keys = [(kernel, device, (("D", 128),)) for kernel in ("intra", "forward_scan", "gradient")]
    monkeypatch.setitem(launch._kernels, keys[2], None)
    launch.compile_together(keys)
    assert seen == {"intra", "forward_scan"}
    launch.compile_together(keys[1:])
    assert len(seen) == 2
