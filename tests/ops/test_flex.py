"""FlexAttention's mask, built from borders of blocks, and its results on a GPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gdn2.ops.attention import attention
from gdn2.ops.flex import causal_block_mask
from tests.closeness import assert_close
from tests.ops.attention_cases import operands


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 255, 300])
@pytest.mark.parametrize("length", [1, 128, 700])
def test_block_mask(length: int, window: int | None) -> None:
    borders = torch.tensor([0, length // 3, length // 3, 2 * length // 3, length])
    for cu_seqlens in (None, borders):
        mask = causal_block_mask(length, window=window, cu_seqlens=cu_seqlens)
        assert mask.mask_mod is not None
        expected = create_block_mask(mask.mask_mod, None, None, length, length, "cpu")
        assert torch.equal(mask.to_dense(), expected.to_dense())
        for part in ("kv_num_blocks", "full_kv_num_blocks"):
            assert torch.equal(getattr(mask, part), getattr(expected, part)), part
        q, k, v = operands(1, length)
        y, _ = attention(q, k, v, window=window, cu_seqlens=cu_seqlens, backend="sdpa")
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        flexible = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert_close("y", flexible.transpose(1, 2), y, 1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention needs CUDA")
@pytest.mark.parametrize("window", [None, 2, 100, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_equals_sdpa(dtype: torch.dtype, window: int | None) -> None:
    for length in (65, 700):
        borders = torch.tensor([0, 1, length // 2, length // 2, length], device="cuda")
        exact = operands(1, length, width=64)
        weights = operands(1, length, width=64, seed=1)[0].to("cuda")
        for cu_seqlens in (None, borders):
            results = {}
            for backend, precision in (("sdpa", torch.float64), ("flex", dtype)):
                x = [t.to(dtype).to("cuda", precision).requires_grad_() for t in exact]
                y, _ = attention(*x, window=window, cu_seqlens=cu_seqlens, backend=backend)
                gradients = torch.autograd.grad((y * weights).sum(), x)
                results[backend] = (y, *gradients)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            for name, actual, expected in zip(
                ("y", "q", "k", "v"), results["flex"], results["sdpa"], strict=True
            ):
                assert_close(name, actual, expected, tolerance)
