"""One word chooses the backend of everything, a model included, until its block ends."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gdn2
from gdn2.ops import backends, reference, rule
from gdn2.ops.backends import choose, in_force, why_not
from tests.ops.cases import Case, operands

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have a GPU whose kernels are all trusted."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    monkeypatch.setattr(backends, "trusted", lambda kernel, device: True)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_no_kernel_runs_meanwhile(gpu: None, backend: str) -> None:
    for kernels in (backends.RULE, ("conv",), ("norm",), ("step",), ("adamw",)):
        assert why_not("triton", GPU, kernels=kernels) is None
        with gdn2.using(backend):
            reason = why_not("triton", GPU, kernels=kernels)
            assert reason == f"gdn2.using({backend!r}) is in force"
    with gdn2.using(backend):
        assert choose("auto", GPU) == backend
        assert choose("torch", GPU) == "torch"
        with pytest.raises(
            ValueError, match=rf"^backend: got 'triton', but gdn2.using\('{backend}'"
        ):
            choose("triton", GPU)
        with gdn2.using("auto"):
            assert choose("auto", GPU) == "triton"
        assert choose("auto", GPU) == backend
    assert choose("auto", GPU) == "triton"


def test_triton_is_asked_for_or_refused(gpu: None) -> None:
    with gdn2.using("triton"):
        assert choose("auto", GPU) == "triton"
        with pytest.raises(ValueError, match=r"^backend: got 'triton', but .* need a CUDA GPU"):
            choose("auto", CPU)


def test_it_ends_with_its_block(gpu: None) -> None:
    with pytest.raises(KeyError), gdn2.using("torch"):
        raise KeyError
    assert choose("auto", GPU) == "triton"
    with pytest.raises(ValueError, match=r"^backend: got 'fast', expected one of auto, triton"):
        gdn2.using("fast").__enter__()
    assert choose("auto", GPU) == "triton"


def test_blocks_of_threads_may_end_in_any_order() -> None:
    one, other, last = (gdn2.using(name) for name in ("torch", "reference", "torch"))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert in_force() == "reference"
    last.__enter__()
    other.__exit__(None, None, None)
    assert in_force() == "torch"
    last.__exit__(None, None, None)
    assert in_force() == "auto"


def test_a_model_goes_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, and the same numbers up to rounding."""
    model = gdn2.LanguageModel(gdn2.preset("gdn2-1m")).double()
    ids, targets = torch.randint(model.config.vocab_size, (2, 2, 70))
    calls = []

    def counted(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(q.shape[1])
        return reference.token_loop(q, *rest)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, targets=targets).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    monkeypatch.setattr(rule, "token_loop", counted)
    chunkwise = gradients()
    assert not calls
    with gdn2.using("reference"):
        exact = gradients()
    assert calls == [70] * model.config.num_hidden_layers
    for one, other in zip(chunkwise, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_compiled_code_follows() -> None:
    """What was compiled for one backend is compiled again for another."""
    x: dict[str, Any] = operands(Case(T=20))
    expected = {
        name: gdn2.gated_delta_rule(**x, backend=name)[0] for name in ("torch", "reference")
    }
    assert not torch.equal(*expected.values())
    compiled = torch.compile(lambda: gdn2.gated_delta_rule(**x)[0], backend="eager")
    assert torch.equal(compiled(), expected["torch"])
    with gdn2.using("reference"):
        assert torch.equal(compiled(), expected["reference"])
