"""How fast a run is: tokens a second, and the part of the GPU's peak that the model's own arithmetic takes."""

import time
from typing import Any

import torch

from gdn2.models.config import ModelConfig
from gdn2.models.summary import training_flops

# Dense bf16 FLOP/s with fp32 sums, from the vendors' data sheets; the first name that fits counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


class Speed:
    """Clock of the steps; `lap` is called once after each."""

    def __init__(
        self, model: ModelConfig, length: int, device: torch.device, size: int, compute: torch.dtype
    ) -> None:
        self._device = device
        peak = peak_flops(device) if compute == torch.bfloat16 else None
        self._share = None if peak is None else training_flops(model, length) / (peak * size)
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Leave out what was done since the last lap, such as validation."""
        self._last = time.perf_counter()

    def lap(self, tokens: int) -> dict[str, Any]:
        """Numbers of a step of so many tokens."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        found: dict[str, Any] = {"seconds": seconds, "tokens_per_second": tokens / seconds}
        if self._share is not None:
            found["mfu"] = tokens / seconds * self._share
        if self._device.type == "cuda":
            found["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return found


def peak_flops(device: torch.device) -> float | None:
    """What the GPU could compute in bf16, if its name is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)
