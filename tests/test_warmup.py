"""Warming up compiles what later calls use, and says so; without a GPU there is nothing to do."""

import os
from typing import Any

import pytest
import torch

import gdn2

COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def test_a_cpu_has_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert gdn2.warmup(2, 16, 8, device="cpu") == 0.0
    reason = "Triton kernels need a CUDA GPU, not cpu"
    assert capsys.readouterr().err == f"gdn2 warmup: nothing to compile, {reason}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": None}, "decay: got None, expected 'channel' or 'head'"),
        ({"erase": "token"}, "erase: got 'token', expected 'channel' or 'head'"),
        ({"write": 1}, "write: got 1, expected 'channel' or 'head'"),
        ({"heads": (1, 2)}, r"heads: got \(1, 2\), expected a number, or those of q and k, v, g"),
    ],
)
def test_a_mistake_is_named(options: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"heads": 2, "key_width": 16, "value_width": 8, "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        gdn2.warmup(**usual | options)


@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU, and kernels that are compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_is_left_to_compile(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    """Other lengths, batches and packings, with and without states, run what is there."""
    from gdn2.ops.triton import stages  # noqa: PLC0415 (needs Triton)

    seconds = gdn2.warmup((1, 4, 2, 1), 48, 32, decay="head", dtype=dtype, decode_batches=(1, 3))
    assert seconds > 0
    assert f"in {seconds:.1f} s" in capsys.readouterr().err
    kernels: list[Any] = [f for name, f in vars(stages).items() if name.endswith("_kernel")]

    def compiled() -> list[int]:
        return [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]

    before = compiled()
    assert min(before) > 0

    def leaf(tokens: tuple[int, int], heads: int, width: int, dtype: torch.dtype = dtype) -> Any:
        return torch.zeros(*tokens, heads, width, dtype=dtype, device="cuda", requires_grad=True)

    for tokens in ((1, 1), (1, 64), (3, 127), (2, 1000), (1, 1024)):
        x = [leaf(tokens, 1, 48), leaf(tokens, 1, 48), leaf(tokens, 4, 32)]
        x += [leaf(tokens, 2, 1, torch.float32), leaf(tokens, 1, 48), leaf(tokens, 4, 32)]
        packed = torch.tensor([0, tokens[1] // 3, tokens[1]], device="cuda")
        for recompute in (True, False):
            options = {"cu_seqlens": packed if tokens[0] == 1 else None, "recompute": recompute}
            o, state = gdn2.gated_delta_rule(*x, output_final_state=True, **options)  # type: ignore[arg-type]
            assert state is not None
            (o.sum() + state.sum()).backward()
    assert compiled() == before
