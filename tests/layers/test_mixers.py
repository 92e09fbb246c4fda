"""Every mixer is its definition, however its tokens come: at once, in pieces, one by one, packed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.layers.attention import AttentionMixer
from gdn2.layers.config import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
)
from gdn2.layers.layout import Layout
from gdn2.layers.mamba3 import heavy_tail
from gdn2.layers.mixers import Mixer, build_mixer
from tests.closeness import assert_close, relative_error
from tests.layers import literal
from tests.layers.cases import MIXERS, inputs, make, run, run_split

EXACT = 1e-10
LENGTH = 13
mixers = pytest.mark.parametrize("name", MIXERS)


def assert_states_agree(actual: Any, expected: Any) -> None:
    for field, a, b in zip(actual._fields, actual, expected, strict=True):
        if field == "angle":  # where a turn ends, 0 is 2π
            for wave in (torch.cos, torch.sin):
                assert_close(field, wave(a), wave(b), EXACT)
        else:
            assert_close(field, a.double(), b.double(), EXACT)


def gradients(mixer: Mixer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of a fixed random loss, for the input and every parameter."""
    rand = torch.Generator().manual_seed(7)
    weight = torch.randn(y.shape, generator=rand, dtype=y.dtype)
    leaves = {"x": x, **dict(mixer.named_parameters())}
    found = torch.autograd.grad((y * weight).sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@mixers
def test_mixer_is_its_definition(name: str) -> None:
    mixer, x = make(name), inputs(2, LENGTH).requires_grad_()
    y, state = run(mixer, x, None)
    expected = literal.mixed(MIXERS[name], dict(mixer.named_parameters()), x)
    assert state is None
    assert_close("y", y, expected, EXACT)
    reference = gradients(mixer, x, expected)
    for parameter, d in gradients(mixer, x, y).items():
        assert float(reference[parameter].norm()) > 1e-6, parameter
        assert_close(parameter, d, reference[parameter], EXACT)


def test_a_heavy_tail_is_smooth_at_zero() -> None:
    x = torch.tensor([-3.0, -1e-3, -0.0, 0.0, 1e-3, 3.0], dtype=torch.float64, requires_grad=True)
    y = heavy_tail(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    tail = [1 / 4, 1 / 1.001]
    assert_close("y", y, x.new_tensor([*tail, 1, 1, 1.001, 4]), 1e-15)
    assert_close("slope", slope, x.new_tensor([*(z * z for z in tail), 1, 1, 1, 1]), 1e-15)


@mixers
@pytest.mark.parametrize(
    "pieces", [[LENGTH], [9, 1, 1, 1, 1], [1] * LENGTH, [1, 5, 2, 1, 4], [0, 12, 0, 1], [2, 11]]
)
def test_any_split_is_the_whole(name: str, pieces: list[int]) -> None:
    mixer, x = make(name), inputs(2, LENGTH).requires_grad_()
    whole, _ = run(mixer, x, None)
    _, end = run(mixer, x, mixer.new_state(2, x))
    y, state = run_split(mixer, x, pieces)
    assert_close("y", y, whole, EXACT)
    assert_states_agree(state, end)
    reference = gradients(mixer, x, whole)
    for parameter, d in gradients(mixer, x, y).items():
        assert_close(parameter, d, reference[parameter], EXACT)


@mixers
def test_longer_than_a_chunk(name: str) -> None:
    mixer, x = make(name), inputs(1, 150)
    whole, _ = run(mixer, x, None)
    y, _ = run_split(mixer, x, [64, 65, 1, 20])
    assert_close("y", y, whole, EXACT)


@mixers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [1, 6, 70])
def test_the_future_moves_no_bit(name: str, dtype: torch.dtype, cut: int) -> None:
    mixer = make(name).to(dtype)
    x = inputs(2, 80).to(dtype)
    other = torch.cat([x[:, :cut], inputs(2, 80, seed=5)[:, cut:].to(dtype)], 1)
    before, after = run(mixer, x, None)[0], run(mixer, other, None)[0]
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert not torch.equal(before[:, cut], after[:, cut])


@mixers
def test_packed_documents_are_separate_ones(name: str) -> None:
    lengths = [3, 1, 0, 7, 2, 0]
    mixer, x = make(name), inputs(1, sum(lengths)).requires_grad_()
    layout = Layout.packed(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))
    packed, states = mixer(x, mixer.new_state(len(lengths), x), layout)
    alone = [run(mixer, part, mixer.new_state(1, x)) for part in x.split(lengths, 1)]
    separate = torch.cat([y for y, _ in alone], 1)
    assert_close("y", packed, separate, EXACT)
    assert_close("y without a state", mixer(x, None, layout)[0], separate, EXACT)
    assert relative_error(run(mixer, x, None)[0], separate) > 1e-3
    reference = gradients(mixer, x, separate)
    for parameter, d in gradients(mixer, x, packed).items():
        assert_close(parameter, d, reference[parameter], EXACT)
    # Rows of the packed state go on as a batch, each as if it had been alone.
    more = inputs(len(lengths), 2, seed=3)
    past = torch.tensor(lengths)
    y, _ = mixer(more, states, Layout.dense(len(lengths), 2).after(past))
    for row, (length, (_, state)) in enumerate(zip(lengths, alone, strict=True)):
        expected, _ = run(mixer, more[row : row + 1], state, length)
        assert_close(f"row {row}", y[row : row + 1], expected, EXACT)
    # And so they do when packed again.
    y, _ = mixer(x, states, layout.after(past))
    for row, part in enumerate(x.split(lengths, 1)):
        expected, _ = run(mixer, part, alone[row][1], lengths[row])
        assert_close(f"row {row}", y.split(lengths, 1)[row], expected, EXACT)


@mixers
def test_a_step_in_place_is_a_step(name: str) -> None:
    mixer, x = make(name), inputs(2, 6)
    with torch.no_grad():
        _, state = run(mixer, x[:, :4], mixer.new_state(2, x))
        if isinstance(mixer, AttentionMixer):
            state = mixer.reserve(state, 2)
        given = type(state)(*(part.clone() for part in state))
        for t in (4, 5):
            expected, state = run(mixer, x[:, t : t + 1], state, t)
            layout = Layout.dense(2, 1).after(torch.tensor([t, t]))
            y, after = mixer(x[:, t : t + 1], given, layout, inplace=True)
            assert_close("y", y, expected, 1e-14)
            assert all(a is b for a, b in zip(after, given, strict=True))
    if name != "attention":  # a cache that grows ends elsewhere
        assert_states_agree(given, state)


@mixers
def test_a_given_state_is_left_alone(name: str) -> None:
    mixer, x = make(name), inputs(2, 5)
    _, state = run(mixer, x, mixer.new_state(2, x))
    kept = [part.clone() for part in state]
    for length in (1, 3):
        run(mixer, x[:, :length], state, 5)
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))


def test_state_sizes() -> None:
    """Numbers of Eqs. 90, 91 and of what decoding carries besides, at the paper's sizes."""
    expected: dict[MixerConfig, list[int]] = {
        DeltaConfig(): [262_144, 6_144, 6_144, 6_144],
        Mamba2Config(): [262_144, 12_672],
        Mamba3Config(): [262_144, 4_096, 4_096, 1_024],
        Mamba3Config(rank=4): [262_144, 16_384, 4_096, 1_024],
        AttentionConfig(window=2048): [4_718_592, 4_718_592, 1],
    }
    for config, sizes in expected.items():
        with torch.device("meta"):
            mixer = build_mixer(config, 2304)
            state = mixer.new_state(3, torch.empty(0, dtype=torch.bfloat16), capacity=4096)
        assert [part.numel() for part in state] == [3 * size for size in sizes]
        assert all(part.shape[0] == 3 for part in state)
        assert state[0].dtype == (torch.bfloat16 if config.type == "attention" else torch.float32)


@mixers
def test_half_precision_and_autocast_run(name: str) -> None:
    """Prefill and steps in bf16, and under autocast with fp32 parameters, near the exact result."""
    exact, x = make(name), inputs(2, 9)
    expected, _ = run(exact, x, None)
    half = make(name).to(torch.bfloat16)
    y, _ = run_split(half, x.to(torch.bfloat16), [7, 1, 1])
    assert_close("bf16", y, expected, 0.1)
    single = make(name).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = run_split(single, x.float(), [7, 1, 1])
    assert_close("autocast", y, expected, 0.1)
    if name not in ("attention", "window"):
        assert state.memory.dtype == torch.float32
