"""All that a mixer makes of its input at once, by interpreted kernels, against maps, convolutions and gates apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.layers import attention, delta, joint
from gdn2.layers.attention import AttentionMixer
from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.layers.delta import DeltaMixer
from gdn2.layers.joint import lay_in_blocks
from gdn2.layers.layout import Layout
from gdn2.ops import entry
from gdn2.ops.conv import short_convolution
from gdn2.ops.entry import (
    attention_inputs,
    entry_gradient,
    gates,
    mixer_inputs,
    rotated,
    rotated_gradient,
)
from gdn2.ops.rotary import apply_rotary, rotary_table
from gdn2.ops.triton import conv_launch
from gdn2.ops.triton import gates as kernels
from gdn2.ops.triton import rotary as rotary_kernels
from tests.closeness import assert_close

WIDTH, HEAD, HEADS, VALUES, RANK, TAPS = 12, 8, 3, 40, 5, 4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs along every axis."""
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(rotary_kernels, "TILE", 16)
    monkeypatch.setattr(rotary_kernels, "MOST_COLS", 8)
    monkeypatch.setattr(conv_launch, "SEGMENT", 8)


def draw(
    batch: int, length: int, others: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x, the weights of all maps and the taps."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (0.5 * drawn).to(dtype).requires_grad_()

    widths = [HEADS * HEAD, HEADS * HEAD, VALUES, HEADS * HEAD, VALUES, *[RANK] * others]
    weights = [normal(width, WIDTH) for width in widths]
    return normal(batch, length, WIDTH), weights, [normal(width, TAPS) for width in widths[:3]]


def apart(
    x: Tensor,
    weights: list[Tensor],
    taps: list[Tensor],
    *,
    l2_width: int,
    erase_range: float,
    cu_seqlens: Tensor | None,
) -> list[Tensor]:
    made = [x @ weight.t() for weight in weights]
    found = [
        short_convolution(z, t, activation="silu", l2_width=width, cu_seqlens=cu_seqlens)[0]
        for z, t, width in zip(made[:3], taps, (l2_width, l2_width, None), strict=True)
    ]
    return [*found, erase_range * made[3].sigmoid(), made[4].sigmoid(), *made[5:]]


def gradients(by: Callable[..., Any], drawn: Any, **options: Any) -> list[Tensor]:
    """Results, and the gradients of a random loss of all of them."""
    x, weights, taps = drawn
    results = by(x, weights, taps, **options)
    generator = torch.Generator().manual_seed(1)
    ones = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in results]
    leaves = [x, *weights, *taps]
    found = torch.autograd.grad(
        results, leaves, [d.to(y) for d, y in zip(ones, results, strict=True)]
    )
    return [*results, *found]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("erase_range", [1.0, 2.0])
@pytest.mark.parametrize(
    ("batch", "length", "lengths"),
    [(2, 13, None), (3, 1, None), (1, 13, (1, 9, 3))],
    ids=str,
)
def test_results_and_gradients(
    others: int, erase_range: float, batch: int, length: int, lengths: tuple[int, ...] | None
) -> None:
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    drawn = draw(batch, length, others, torch.float64)
    options: dict[str, Any] = {"l2_width": HEAD, "erase_range": erase_range}
    options["cu_seqlens"] = cu_seqlens
    found = gradients(mixer_inputs, drawn, **options)
    for i, (a, b) in enumerate(zip(found, gradients(apart, drawn, **options), strict=True)):
        assert_close(f"result {i}", a, b, 1e-12)


def test_operators_tell_what_they_return() -> None:
    _, _, taps = draw(2, 5, 1, torch.float32)
    made = [torch.randn(2, 5, n) for n in (24, 24, VALUES, 24, VALUES, RANK)]
    torch.library.opcheck(gates, (made[3], made[4], 2.0))
    b, w = gates(made[3], made[4], 2.0)
    taps = [t.detach() for t in taps]
    given = (made[:3], made[:3], taps, None, [b, w], [b, w], made[5:], HEAD, 2.0)
    torch.library.opcheck(entry_gradient, given)


def mixer(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> DeltaMixer:
    """A mixer laid out for training, as on a GPU."""
    config = DeltaConfig(
        num_heads=HEADS, key_head_dim=HEAD, value_head_dim=HEAD, gate_rank=RANK, **changes
    )
    made = DeltaMixer(config, WIDTH).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(2))
    lay_in_blocks(made)
    monkeypatch.setattr(joint, "_adds_gradients", lambda x: True)
    monkeypatch.setattr(entry, "kernels_take", lambda *_: True)
    monkeypatch.setattr(entry, "why_not", lambda *_: None)
    return made


def step(made: DeltaMixer | AttentionMixer) -> list[Tensor]:
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x.requires_grad_()
    y, _ = made(x, None, Layout.dense(2, 9))
    return [y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])]


@pytest.mark.parametrize(
    "changes", [{}, {"erase_range": 2}, {"decay": "none"}, {"output_gate": "none"}], ids=str
)
def test_a_mixer_trains_the_same(changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mixer(monkeypatch, **changes)
    entered: list[int] = []

    def watched(*given: Any, **options: Any) -> Any:
        entered.append(1)
        return mixer_inputs(*given, **options)

    monkeypatch.setattr(delta, "mixer_inputs", watched)
    found = step(made)
    assert entered
    monkeypatch.setattr(entry, "kernels_take", lambda *_: False)
    expected = step(made)
    assert len(entered) == 1
    names = ["y", "x", *(name for name, _ in made.named_parameters())]
    for name, a, b in zip(names, found, expected, strict=True):
        assert_close(name, a, b, 1e-11)


def test_others_enter_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64).requires_grad_()
    made = mixer(monkeypatch)
    assert made._enters_at_once(x)
    with torch.no_grad():
        assert not made._enters_at_once(x)
    assert not made._enters_at_once(x.detach())
    made.k_proj.weight.requires_grad_(False)
    assert not made._enters_at_once(x)
    made = mixer(monkeypatch)
    made.v_conv.register_forward_hook(lambda *_: None)
    assert not made._enters_at_once(x)
    for change in ({"erase_gate": "mean"}, {"write_gate": "mean"}, {"gates": "tied"}):
        assert not mixer(monkeypatch, **change)._enters_at_once(x)
    made = mixer(monkeypatch)
    made.laid = False
    assert not made._enters_at_once(x)


def turned_apart(
    x: Tensor, weights: list[Tensor], taps: list[Tensor], cos: Tensor, sin: Tensor
) -> list[Tensor]:
    q, k, v = (x @ weight.t() for weight in weights)
    turned = (apply_rotary(z.unflatten(-1, (-1, HEAD)), cos, sin).flatten(-2) for z in (q, k))
    return [*turned, v]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("places", [torch.arange(13), torch.arange(26).view(2, 13)], ids=str)
def test_queries_and_keys_are_turned(places: Tensor) -> None:
    x, weights, taps = draw(2, 13, 0, torch.float64)
    cos, sin = rotary_table(places, HEAD, dtype=torch.float64)

    def at_once(x: Tensor, weights: list[Tensor], taps: list[Tensor], **table: Tensor) -> Any:
        return attention_inputs(x, weights, **table)

    def grads(by: Callable[..., Any]) -> list[Tensor]:
        results = by(x, weights[:3], taps, cos=cos, sin=sin)
        ones = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) for y in results]
        leaves = [x, *weights[:3]]
        return [*results, *torch.autograd.grad(results, leaves, [d.to(x) for d in ones])]

    for i, (a, b) in enumerate(zip(grads(at_once), grads(turned_apart), strict=True)):
        assert_close(f"result {i}", a, b, 1e-12)
    made = [torch.randn(2, 13, HEADS * HEAD, dtype=torch.float64) for _ in range(3)]
    torch.library.opcheck(rotated, (made[0], cos, sin))
    torch.library.opcheck(rotated_gradient, (*made, cos, sin))


def test_attention_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = AttentionMixer(AttentionConfig(num_heads=HEADS, head_dim=HEAD, window=4), WIDTH).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(2))
    lay_in_blocks(made)
    expected = step(made)
    monkeypatch.setattr(joint, "_adds_gradients", lambda x: True)
    monkeypatch.setattr(entry, "why_not", lambda *_: None)
    entered: list[int] = []

    def watched(*given: Any) -> Any:
        entered.append(1)
        return attention_inputs(*given)

    monkeypatch.setattr(attention, "attention_inputs", watched)
    found = step(made)
    assert entered
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"result {i}", a, b, 1e-11)
    with torch.no_grad():
        made(torch.randn(1, 4, WIDTH, dtype=torch.float64), None, Layout.dense(1, 4))
    assert len(entered) == 1


def test_a_compiler_sees_through(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mixer(monkeypatch)
    expected = step(made)
    torch._dynamo.reset()
    layout = Layout.dense(2, 9)

    def run(x: Tensor) -> Tensor:
        y: Tensor = made(x, None, layout)[0]
        return y

    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x.requires_grad_()
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    found = [y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"result {i}", a, b, 1e-12)
    torch._dynamo.reset()
