"""Generation on a GPU: captured steps are the eager ones to the bit, and rows are as they are alone."""

import pytest
import torch
from torch import Tensor

import gdn2
from gdn2.layers.joint import lay_side_by_side
from gdn2.models import decode
from gdn2.models.decode import Decoding, EagerSteps, GraphSteps, Steps, advance
from gdn2.models.generate import Stop, collect, generate, go_on
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import prefill
from gdn2.models.sampling import GREEDY, Draws, Sampling, sample
from tests.models.cases import make as make_small
from tests.models.cases import tokens as small_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

WARM = Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
PRESETS = ["gdn2-1m", "gdn2-1m-hybrid", "kda-1m", "mamba2-1m", "mamba3-siso-1m", "transformer-1m"]


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    return gdn2.LanguageModel(gdn2.preset(name)).cuda().cast(dtype)


def prompts(*lengths: int) -> list[Tensor]:
    rand = torch.Generator().manual_seed(0)
    return [torch.randint(32000, (length,), generator=rand) for length in lengths]


def eager(model: LanguageModel) -> Steps:
    steps = Steps(model)
    steps.eager_because = "the test asks for it"
    return steps


def started(model: LanguageModel, sampling: Sampling, rows: list[Tensor]) -> Decoding:
    ready = prefill(model, rows)
    vocabulary = ready.logits.shape[1]
    draws = Draws.start(range(len(rows)), sampling, vocabulary, rows, ready.logits.device)
    first = sample(ready.logits, sampling, draws)
    return Decoding(first, model.reserve(ready.state, 40), draws)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_replay_is_an_eager_step_to_the_bit(name: str, sampling: Sampling) -> None:
    model = make(name)
    start = started(model, sampling, prompts(40, 3, 17))
    graph = GraphSteps(model, sampling, start)
    graph.load(start)
    plain = EagerSteps(model, sampling, start.map(torch.clone))
    for _ in range(20):
        graph.step()
        plain.step()
    for ours, theirs in zip(graph.now.tensors(), plain.now.tensors(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", PRESETS)
def test_generation_by_graphs_is_eager_generation(name: str) -> None:
    """Rows that end are idle in a captured batch until half of them have: their neighbours do not notice."""
    model, rows = make(name, torch.float64), prompts(33, 1, 70, 12, 5)
    free = generate(model, rows, stop=Stop(max_tokens=24), steps=eager(model))
    ids = sorted({free[0].tokens[5], free[3].tokens[11], free[4].tokens[2]})
    stop = Stop(max_tokens=24, ids=ids)
    expected = generate(model, rows, stop=stop, steps=eager(model))
    steps = Steps(model)
    assert steps.eager_because is None
    for _ in range(2):
        assert generate(model, rows, stop=stop, steps=steps) == expected
    assert steps.eager_because is None


def test_graphs_outlive_the_autocast_they_were_captured_under() -> None:
    """Each of its blocks casts weights anew and forgets them; memory is overwritten in between."""
    model, rows = make("gdn2-1m-hybrid", torch.float32), prompts(33, 5)
    stop, steps = Stop(max_tokens=24), Steps(model)
    for inference in (True, False):
        with torch.inference_mode(inference), torch.autocast("cuda", torch.bfloat16):
            found = generate(model, rows, stop=stop, steps=steps)
        torch.full((1 << 28,), torch.nan, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert generate(model, rows, stop=stop, steps=steps) == found
        assert generate(model, rows, stop=stop, steps=steps) == generate(
            model, rows, stop=stop, steps=eager(model)
        )
    assert steps.eager_because is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_models_on_two_gpus() -> None:
    """The second, whose device nobody made the current one, is captured after the first."""
    rows, stop = prompts(33, 5), Stop(max_tokens=8)
    for place in ("cuda:0", "cuda:1"):
        model = gdn2.LanguageModel(gdn2.preset("gdn2-1m-hybrid")).to(place)
        steps = Steps(model)
        found = generate(model, rows, stop=stop, steps=steps)
        assert found == generate(model, rows, stop=stop, steps=eager(model))
        assert steps.eager_because is None


def test_a_capture_that_fails_leaves_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the GPU cannot be captured, and ends the capture."""
    model, calls = make("gdn2-1m"), list[int]()

    def waits(*given: object) -> None:
        advance(*given)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 2:
            torch.cuda.synchronize()

    monkeypatch.setattr(decode, "advance", waits)
    stop, before = Stop(max_tokens=8), torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="gdn2 decodes eagerly, no CUDA graph"):
        found = generate(model, prompts(33, 5), stop=stop)
    assert torch.cuda.current_stream() == before
    assert found == generate(model, prompts(33, 5), stop=stop, steps=eager(model))


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_ragged_batches_and_forks_in_fp64(sampling: Sampling) -> None:
    """Every mixer there is, where rounding cannot hide anything."""
    model = make_small().cuda()
    rows = [small_tokens(1, length, seed=length)[0] for length in (7, 1, 12, 4)]
    stop = Stop(max_tokens=9)
    found = generate(model, rows, sampling=sampling, stop=stop, seed=5)
    for row, prompt in enumerate(rows):
        (alone,) = generate(model, [prompt], sampling=sampling, stop=stop, seed=5 + row)
        assert alone == found[row]
    on_cpu = generate(make_small(), rows, sampling=sampling, stop=stop, seed=5)
    assert on_cpu == found
    history = [rows[2]] * 64
    forked = go_on(model, prefill(model, [rows[2]]).fork(64), history, sampling=sampling, stop=stop)
    assert collect(forked, 64) == generate(model, history, sampling=sampling, stop=stop)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_fused_steps_agree_with_plain_ones(rows: int, dtype: torch.dtype, most: float) -> None:
    """Where gradients are not needed a step takes other kernels, and for one row other products."""
    model = make("gdn2-1m-hybrid", dtype)
    lay_side_by_side(model)
    state = model.reserve(prefill(model, prompts(*[70] * rows)).state, 4)
    plain, fused = state, state.clone()
    for token in torch.randint(32000, (4, rows, 1), device="cuda"):
        right, _, after = model(token, plain)
        assert after is not None
        plain = after.map(torch.Tensor.detach)
        with torch.no_grad():
            found = model(token, fused, inplace=True).logits
        assert right is not None
        assert found is not None
        error = (found - right).float().norm() / right.float().norm()
        assert error < most


@pytest.mark.parametrize("name", ["gdn2-1m", "gdn2-1m-hybrid"])
def test_memory_of_decoding_does_not_grow_with_the_context(name: str) -> None:
    model, peaks = make(name), []
    for context in (1024, 1 << 20):
        ready = prefill(model, prompts(context))
        state = model.reserve(ready.state, 8)
        start = started(model, GREEDY, prompts(3))._replace(state=state)
        running = EagerSteps(model, GREEDY, start)
        running.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            running.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0]
