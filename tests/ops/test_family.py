"""Every model on the operator against its own recurrence: whole, continued, decoded and packed."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gdn2 import gated_delta_rule, gated_delta_step
from gdn2.ops import family
from tests.closeness import assert_close
from tests.ops.family_cases import MODELS, B, H, Inputs, K, Outcome, State, T, cut, draw

EXACT = 1e-12
LENGTHS = (5, 0, 1, 17, 14)


def assert_same(actual: Outcome, expected: Outcome, leaves: Inputs) -> None:
    """Compare outputs, states up to the angle, and the gradients of a fixed loss of them all."""
    results = []
    for o, state in (actual, expected):
        parts = {"o": o} | dict(zip(("S", "k", "v"), state, strict=False))
        rand = torch.Generator().manual_seed(9)
        loss = o.new_zeros(())
        for part in parts.values():
            weight = torch.randn(part.shape, generator=rand, dtype=torch.float64)
            loss = loss + (part * weight).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        named = {f"gradient of {n}": d for n, d in zip(leaves, grads, strict=True)}
        results.append(parts | {n: d for n, d in named.items() if d is not None})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert_close(name, value, results[1][name], EXACT)


def leaves_of(x: Inputs, state: State) -> Inputs:
    return x | {f"initial {i}": part for i, part in enumerate(state)}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_its_recurrence(name: str, backend: str) -> None:
    model = MODELS[name]
    x, state = draw(model, B, B)
    actual = model.rule(x, state, None, backend)
    assert_same(actual, model.literal(x, state), leaves_of(x, state))


@pytest.mark.parametrize("name", MODELS)
def test_prefills_and_steps_equal_the_whole(name: str) -> None:
    model = MODELS[name]
    x, start = draw(model, B, B, seed=1)
    state, outputs = start, []
    for first, last in ((0, 0), (0, 20), (20, 21), (21, 29), (29, 29)):
        o, state = model.rule(cut(x, first, last), state, None, "torch")
        outputs.append(o)
    for first, last in (*pairwise(range(29, 35)), (34, 34), (34, T)):
        o, state = model.step(cut(x, first, last), state)
        outputs.append(o)
    actual = torch.cat(outputs, 1), state
    assert_same(actual, model.literal(x, start), leaves_of(x, start))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_separate(name: str, given: bool) -> None:
    model = MODELS[name]
    x, state = draw(model, 1, len(LENGTHS), seed=2)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    starts = state if given else tuple(torch.zeros_like(part) for part in state)
    runs = []
    for n, (first, last) in enumerate(pairwise(bounds.tolist())):
        runs.append(model.literal(cut(x, first, last), tuple(p[n : n + 1] for p in starts)))
    ends = zip(*(end for _, end in runs), strict=True)
    expected = torch.cat([o for o, _ in runs], 1), tuple(torch.cat(parts) for parts in ends)
    actual = model.rule(x, state if given else None, bounds.int(), "torch")
    assert_same(actual, expected, leaves_of(x, state) if given else x)


def test_key_side_heads_serve_all_values() -> None:
    x, (S,) = draw(MODELS["Gated DeltaNet-2"], B, B)
    for name in ("q", "k", "b"):
        x[name] = x[name].detach()[:, :, :1].requires_grad_()
    spread = {n: t.expand(-1, -1, H, -1) for n, t in x.items()}
    model = MODELS["Gated DeltaNet-2"]
    assert_same(model.rule(x, (S,), None, "torch"), model.literal(spread, (S,)), leaves_of(x, (S,)))


@pytest.mark.parametrize("name", MODELS)
def test_operands_may_be_strided(name: str) -> None:
    model = MODELS[name]
    x, state = draw(model, B, B, seed=3)
    strided = {n: torch.stack([t.transpose(0, 1)] * 2, -1)[..., 0] for n, t in x.items()}
    actual = model.rule({n: t.transpose(0, 1) for n, t in strided.items()}, state, None, "torch")
    assert_same(actual, model.literal(x, state), leaves_of(x, state))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("linear attention", family.linear_attention),
        ("GLA", family.gla),
        ("DeltaNet", family.delta_net),
        ("Gated DeltaNet", family.gated_delta_net),
        ("KDA", family.kda),
        ("Gated DeltaNet-2", family.gated_delta_net_2),
    ],
)
def test_scale_multiplies_the_output(name: str, pattern: Callable[..., family.Pattern]) -> None:
    x, _ = draw(MODELS[name], B, B)
    default, _ = gated_delta_rule(**pattern(**x))
    scaled, _ = gated_delta_rule(**pattern(**x, scale=0.7))
    assert_close("o", scaled, default * 0.7 * K**0.5, EXACT)


def test_compiles_to_one_graph() -> None:
    x, (S,) = draw(MODELS["KDA"], B, B)

    def loss(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        pattern = family.kda(q, k, v, g, beta)
        o, after = gated_delta_rule(**pattern, initial_state=S, output_final_state=True)
        assert after is not None
        step, _ = gated_delta_step(
            **family.kda(*(t[:, :1] for t in (q, k, v, g, beta))), state=after
        )
        return o.pow(2).sum() + step.pow(2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = list(x.values())
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for name, d, twin in zip(x, actual, expected, strict=True):
        assert_close(f"gradient of {name}", d, twin, EXACT)


X4, GATE = torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: family.kda(X4, X4, X4, X4, GATE[..., :1]), r"^beta: got shape \(2, 5, 1\), exp"),
        (lambda: family.kda(X4, X4, X4, X4, X4), r"^beta: got .*, expected v's \(2, 5, 3\)$"),
        (lambda: family.delta_net(X4, X4, X4[0], GATE), r"^v: got shape \(5, 3, 4\), expected \["),
        (lambda: family.linear_attention(X4, X4, X4[0, 0]), r"^v: got shape \(3, 4\), expected"),
        (lambda: family.gated_delta_net(X4, X4, X4, X4, GATE), r"^g: got shape \(2, 5, 3, 4\)"),
        (lambda: family.mamba2(X4, X4, X4, GATE[:, :4], GATE), r"^g: got shape \(2, 4, 3\), exp"),
        (lambda: family.mamba2(X4, X4, X4, GATE, GATE[:1]), r"^dt: got shape \(1, 5, 3\), expect"),
        (lambda: family.mamba2(X4, X4, GATE, GATE, GATE), r"^v: got shape \(2, 5, 3\), expected"),
    ],
)
def test_bad_operands_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
