"""Which kernels `gdn2 doctor` found wrong on a GPU, remembered between processes.

A compiler that miscompiles one kernel on one GPU is not seen by anybody's tests but the user's own. The doctor checks
every kernel there and writes what it found; whoever chooses a kernel asks here. Kernels never checked are trusted.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gdn2.ops.versions import installed

TOGETHER = "rule"  # stands for the operator's kernels where each is right alone but not all of them together
Verdict = dict[str, str]  # kernels that gave wrong results, and what was wrong
_known: dict[torch.device, Verdict] = {}


def distrusted(device: torch.device) -> Verdict:
    """Kernels not to be used on a device, with what the doctor found; its file is read once in a process."""
    device = indexed(device)
    if device not in _known:
        _known[device] = _read(verdict_file()).get(identity(device), {})
    return _known[device]


def trusted(kernel: str, device: torch.device) -> bool:
    """Whether a kernel may be used on a device, for all that is known."""
    return kernel not in distrusted(device)


def presume_innocent(device: torch.device) -> None:
    """Trust all kernels in this process, so that they can be checked anew."""
    _known[indexed(device)] = {}


def record(device: torch.device, verdict: Verdict) -> Path | None:
    """Remember what was found on a device, here and in later processes; returns the file, if it can be written."""
    _known[indexed(device)] = verdict
    file = verdict_file()
    known = {**_read(file), identity(device): verdict}
    try:
        write_at_once(file, (json.dumps(known, indent=1) + "\n").encode())
    except OSError as failure:
        warnings.warn(f"gdn2 cannot write {file}: {failure}", stacklevel=2)
        return None
    return file


def write_at_once(file: Path, content: bytes) -> None:
    """Another process reads the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_suffix(f".{os.getpid()}")
    written.write_bytes(content)
    written.replace(file)


def verdict_file() -> Path:
    """`gdn2/kernels.json` in the user's cache folder.

    Besides torchrun's variables the one place where the package looks at the environment: what is known of a GPU
    belongs to the machine, and no argument of a call could carry it there.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "gdn2" / "kernels.json"


def _home() -> Path:
    """The user's folder; in a container that knows no such user one that holds nothing and takes nothing."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def identity(device: torch.device) -> str:
    """What a verdict holds for: this GPU, compiler, cuDNN and these kernels."""
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{torch.cuda.get_device_name(device)}, compute {major}.{minor}, torch {torch.__version__}, "
        f"triton {installed('triton')}, cudnn {torch.backends.cudnn.version()} by "
        f"{installed('nvidia-cudnn-frontend')}, kernels {kernel_digest()}"
    )


def indexed(device: torch.device) -> torch.device:
    """A device by its number: "cuda" is the current one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


@cache
def kernel_digest() -> str:
    """The sources of the kernels in twelve digits: a checkout keeps its version while they change."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in sorted([*here.glob("triton/*.py"), *here.glob("cuda/*")]):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _read(file: Path) -> Mapping[str, Verdict]:
    if not file.exists():
        return {}
    try:
        found: Any = json.loads(file.read_text())
        assert all(isinstance(verdict, dict) for verdict in found.values())
    except (OSError, ValueError, AttributeError, AssertionError):
        warnings.warn(
            f"gdn2 ignores {file}, which it cannot read; gdn2 doctor writes it anew", stacklevel=2
        )
        return {}
    return found
