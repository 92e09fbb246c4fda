"""The machine that a time belongs to."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from gdn2 import __version__
from gdn2.ops.versions import installed

GIB = 2**30
# Packages that nothing needs but one extra of ours, which installs them.
OPTIONAL = {
    "transformers": "hf",
    "accelerate": "hf",
    "peft": "hf",
    "datasets": "data",
    "pyarrow": "data",
    "zstandard": "data",
    "sentencepiece": "data",
    "lm-eval": "eval",
    "nltk": "eval",
    "wonderwords": "eval",
    "matplotlib": "plot",
    "tensorboard": "track",
    "nvidia-cudnn-frontend": "cudnn",
    "fla-core": "bench",
    "einops": "bench",
}


@dataclass(frozen=True)
class Gpu:
    """One CUDA GPU."""

    name: str
    capability: str
    memory_gib: float
    driver: str | None


@dataclass(frozen=True)
class Machine:
    """What a result depends on besides the code."""

    system: str
    cpu: str
    cores: int  # as the operating system counts them, hyper-threads included
    threads: int  # that torch uses
    memory_gib: float | None
    python: str
    versions: dict[str, str | None]  # None: not installed
    gpus: tuple[Gpu, ...]


def describe_machine() -> Machine:
    """Look at this machine; imports none of the packages it lists."""
    # a checkout that is not installed has no version but its own
    versions: dict[str, str | None] = {"gdn2": __version__}
    versions |= {name: installed(name) for name in ("torch", "numpy", "triton", *OPTIONAL)}
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gib=_memory_gib(),
        python=platform.python_version(),
        versions=versions,
        gpus=_gpus() if torch.cuda.is_available() else (),
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    if platform.system() == "Darwin":
        names = [_output("sysctl", "-n", "machdep.cpu.brand_string") or ""]
    name = next(iter(names), "") or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _memory_gib() -> float | None:
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
    return pages * page_bytes / GIB


def _gpus() -> tuple[Gpu, ...]:
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = driver.splitlines()[0] if driver else None
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, f"{p.major}.{p.minor}", p.total_memory / GIB, driver) for p in found)


def _output(*command: str) -> str | None:
    """What a command prints; None where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
