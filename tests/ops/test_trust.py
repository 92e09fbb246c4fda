"""A kernel found wrong on a GPU is not used there, in this process and in later ones; nothing else changes."""

import json
import pwd
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch

from gdn2.ops import backends, trust
from gdn2.ops.backends import STAGES, choose, why_not

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pretend to have a GPU that kernels run on, and an empty cache folder; returns the file in it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    return tmp_path / "gdn2" / "kernels.json"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new process knows."""
    monkeypatch.setattr(trust, "_known", {})


def test_nothing_known_is_trusted(file: Path) -> None:
    assert not file.exists()
    assert trust.distrusted(GPU) == {}
    assert choose("auto", GPU, torch.bfloat16) == "triton"
    assert not file.exists()


@pytest.mark.parametrize("kernel", [*STAGES, trust.TOGETHER])
def test_one_wrong_stage_moves_the_operator_to_torch(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust.record(GPU, {kernel: "bf16, alone: R"})
    monkeypatch.setattr(backends, "_said", set())
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"doctor found wrong results here from {kernel}$"):
            assert choose("auto", GPU, torch.bfloat16) == "torch"
        with pytest.raises(ValueError, match=f"backend: got 'triton', but gdn2 doctor .*{kernel};"):
            choose("triton", GPU)
        backends._said.clear()
        forget(monkeypatch)
    assert why_not("triton", GPU, kernels=("step",)) is None


def test_a_companion_falls_back_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trust.record(GPU, {"step": "wrong", "conv": "wrong"})
    forget(monkeypatch)
    assert choose("auto", GPU) == "triton"
    reason = "gdn2 doctor found wrong results here from step"
    assert why_not("triton", GPU, kernels=("step",)) == reason
    assert trust.trusted("norm", GPU) and not trust.trusted("conv", GPU)


@pytest.mark.parametrize("change", ["GPU", "architecture", "torch", "triton", "kernels"])
def test_a_verdict_is_for_one_gpu_compiler_and_set_of_kernels(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust.record(GPU, {"scan": "wrong"})
    forget(monkeypatch)
    match change:
        case "GPU":
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
        case "architecture":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        case "torch":
            monkeypatch.setattr(torch, "__version__", "99.0")
        case "triton":
            monkeypatch.setattr(metadata, "version", lambda name: "99.0")
        case "kernels":
            monkeypatch.setattr(trust, "kernel_digest", lambda: "0123456789ab")
    assert trust.trusted("scan", GPU)


def test_verdicts_of_other_gpus_are_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.record(GPU, {"scan": "wrong"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    assert trust.record(GPU, {}) == file
    names = {name.split(",")[0]: verdict for name, verdict in json.loads(file.read_text()).items()}
    assert names == {"Some GPU": {"scan": "wrong"}, "Another GPU": {}}
    assert [path.name for path in file.parent.iterdir()] == ["kernels.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Some GPU": 1}', "\0"])
def test_a_file_that_cannot_be_read_is_ignored_aloud(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=f"gdn2 ignores {file}, which it cannot read"):
        assert trust.trusted("scan", GPU)
    with pytest.warns(UserWarning, match="gdn2 doctor writes it anew"):
        trust.record(GPU, {"scan": "wrong"})
    assert list(json.loads(file.read_text()).values()) == [{"scan": "wrong"}]


def test_the_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.record(GPU, {"scan": "wrong"})
    forget(monkeypatch)
    assert not trust.trusted("scan", GPU)
    file.write_text("{}")
    assert not trust.trusted("scan", GPU)


def test_a_user_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of its own: kernels run, and what was found holds for this process."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert trust.trusted("scan", GPU)
    with pytest.warns(UserWarning, match="gdn2 cannot write"):
        assert trust.record(GPU, {"scan": "wrong"}) is None
    assert not trust.trusted("scan", GPU)


def test_a_folder_that_cannot_be_written(file: Path) -> None:
    """What was found holds for this process."""
    file.parent.write_text("no folder")
    with pytest.warns(UserWarning, match=f"gdn2 cannot write {file}"):
        assert trust.record(GPU, {"scan": "wrong"}) is None
    assert not trust.trusted("scan", GPU)


def test_the_usual_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust.verdict_file() == tmp_path / ".cache" / "gdn2" / "kernels.json"


def test_the_compiler_does_not_trace_into_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it looks at or says: files, packages and devices may be nothing that can be traced."""
    trust.record(GPU, {"scan": "wrong"})
    forget(monkeypatch)
    monkeypatch.setattr(backends, "_said", set())
    for owner, name in (
        (backends, "find_spec"),
        (torch.cuda, "get_device_capability"),
        (trust, "_read"),
        (warnings, "warn"),
    ):
        monkeypatch.setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    torch._dynamo.reset()

    def chosen(x: torch.Tensor) -> torch.Tensor:
        steps = 1 if why_not("triton", GPU, x.dtype, ("step",)) is None else 2
        return x + steps if choose("auto", GPU, x.dtype) == "triton" else x - steps

    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="doctor found wrong results here from scan$"):
        assert compiled(torch.zeros(())).item() == -1
