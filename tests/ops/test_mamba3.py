"""What is particular to Mamba-3: strict causality, late ranks, and a state that includes its last write."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2 import gated_delta_rule
from gdn2.ops.mamba3 import Mamba3State, mamba3, mamba3_step, new_mamba3_state
from tests.closeness import assert_close, relative_error
from tests.ops import literal

B, T, H, K, V = 2, 37, 3, 8, 6
EXACT, OFF = 1e-12, 1e-2
Operands = tuple[Tensor, ...]


def draw(rank: int, batch: int = B, length: int = T, seed: int = 0) -> Operands:
    """Rotated q and k, v, log-decay, step size and λ."""
    rand = torch.Generator().manual_seed(seed)

    def normal(*tail: int) -> Tensor:
        return torch.randn((batch, length, *tail), generator=rand, dtype=torch.float64)

    q, k, v = normal(rank, H, K), normal(rank, H, K), normal(rank, H, V)
    return q, k, v, -F.softplus(normal(H)), F.softplus(normal(H)), normal(H).sigmoid()


def draw_state(rank: int, sequences: int = B, seed: int = 1) -> Mamba3State:
    rand = torch.Generator().manual_seed(seed)
    shapes = ((H, K, V), (rank, H, K), (rank, H, V))
    parts = (torch.randn((sequences, *s), generator=rand, dtype=torch.float64) for s in shapes)
    return Mamba3State(*parts)


def to(x: Operands, dtype: torch.dtype) -> Operands:
    """Tokens in `dtype`, gates in fp32 at least."""
    gates = torch.promote_types(dtype, torch.float32)
    return *(t.to(dtype) for t in x[:3]), *(t.to(gates) for t in x[3:])


def unrotated(x: Operands, state: Mamba3State) -> tuple[Tensor, Tensor]:
    """Output and final memory of the literal recurrence without rotation."""
    q, k, v, g, dt, lam = x
    start = (*state, q.new_zeros(*state.S.shape[:2], 0))
    o, end = literal.mamba3(q, k, v, g / dt, dt, lam, q.new_zeros(*g.shape, 0), start)
    return o, end[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("cut", [1, 5, 6, 16, 32, 36])
def test_the_future_moves_no_bit(rank: int, dtype: torch.dtype, cut: int) -> None:
    before, other = to(draw(rank), dtype), to(draw(rank, seed=5), dtype)
    after = tuple(
        torch.cat([a[:, :cut], b[:, cut:]], 1) for a, b in zip(before, other, strict=True)
    )
    outputs = [mamba3(*x, chunk_size=16)[0] for x in (before, after)]
    assert torch.equal(outputs[0][:, :cut], outputs[1][:, :cut])
    assert not torch.equal(outputs[0][:, cut], outputs[1][:, cut])


def look_ahead(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor) -> Tensor:
    """The other form, of rank 1: it writes what token t + 1 will add, and takes it out of the output."""
    ahead = F.pad(((1 - lam) * dt)[:, 1:], (0, 0, 0, 1))
    w = lam * dt + ahead
    q, k, v = (x.squeeze(2) for x in (q, k, v))
    o, _ = gated_delta_rule(q, k, v, g.unsqueeze(-1), w=w.unsqueeze(-1), scale=1.0)
    return (o - (q * k).sum(-1, keepdim=True) * ahead.unsqueeze(-1) * v).unsqueeze(2)


def test_the_look_ahead_form_leaks_the_future() -> None:
    x = draw(1)
    assert_close("o", look_ahead(*x), mamba3(*x)[0], EXACT)
    q, k, v, g, dt, lam = to(x, torch.bfloat16)
    longer = torch.cat([dt[:, :1], dt[:, 1:] + 3], 1)
    o, moved = (look_ahead(q, k, v, g, step, lam)[:, 0] for step in (dt, longer))
    assert relative_error(moved, o) > 1e-4
    o, moved = (mamba3(q, k, v, g, step, lam)[0][:, 0] for step in (dt, longer))
    assert torch.equal(moved, o)


@pytest.mark.parametrize("rank", [1, 3])
def test_half_operands_reach_their_own_precision(rank: int) -> None:
    x = to(draw(rank, length=65), torch.bfloat16)
    exact = to(x, torch.float64)
    o, state = mamba3(*x)
    expected, S = unrotated(exact, new_mamba3_state(exact[0], exact[2], B))
    assert (o.dtype, state.S.dtype) == (torch.bfloat16, torch.float32)
    assert_close("o", o, expected, 4e-3)
    assert_close("S", state.S, S, 1e-6)
    assert torch.equal(state.k, x[1][:, -1])
    assert torch.equal(state.v, x[2][:, -1])


def test_late_ranks_matter() -> None:
    x = draw(3)
    q, k, v, g, dt, lam = x
    expected, _ = unrotated(x, new_mamba3_state(q, v, B))
    zeta, (k_previous, v_previous) = (
        lam * dt,
        (F.pad(y, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1] for y in (k, v)),
    )
    write = g.exp() * (F.pad(zeta, (0, 0, 1, 0))[:, :-1] + (1 - lam) * dt)
    o, _ = gated_delta_rule(
        q.flatten(1, 2),
        k_previous.flatten(1, 2),
        v_previous.flatten(1, 2),
        F.pad(g.unsqueeze(2), (0, 0, 0, 2)).flatten(1, 2).unsqueeze(-1),
        w=write.repeat_interleave(3, 1).unsqueeze(-1),
        scale=1.0,
    )
    now = torch.einsum("btjhk,btihk,bth,btihv->btjhv", q, k, zeta, v)
    without = o.unflatten(1, (T, 3)) + now
    assert relative_error(without, expected) > OFF
    assert_close("the last rank is never late", without[:, :, 2], expected[:, :, 2], EXACT)
    assert_close("o", mamba3(*x)[0], expected, EXACT)


@pytest.mark.parametrize("rank", [1, 3])
def test_packed_is_not_one_sequence(rank: int) -> None:
    x, bounds = draw(rank, batch=1), torch.tensor([0, 11, T])
    packed, _ = mamba3(*x, cu_seqlens=bounds)
    assert relative_error(mamba3(*x)[0], packed) > OFF
    # Beside a sequence that went wrong, the next one does not move by a bit.
    for t in x:
        t[:, 10] = torch.nan
    x[3][:, 10] = -1.0  # log-decays are checked
    beside, _ = mamba3(*x, cu_seqlens=bounds)
    assert torch.equal(beside[:, 11:], packed[:, 11:])


@pytest.mark.parametrize("rank", [1, 3])
def test_state_includes_the_last_write_once(rank: int) -> None:
    x, state = draw(rank), draw_state(rank)
    expected, _ = unrotated(x, state)
    _, middle = mamba3(*(t[:, :20] for t in x), state=state)
    rest = tuple(t[:, 20:] for t in x)
    assert_close("o", mamba3(*rest, state=middle)[0], expected[:, 20:], EXACT)
    zeta = (x[5] * x[4])[:, 19, :, None, None]
    write = zeta * literal.outer(middle.k, middle.v).sum(1)
    without = middle._replace(S=middle.S - write)
    assert relative_error(mamba3(*rest, state=without)[0], expected[:, 20:]) > OFF


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("rank", [1, 3])
def test_step_in_place_overwrites_the_memory(rank: int, length: int) -> None:
    x, state = draw(rank, length=length), draw_state(rank)
    x[0].requires_grad_()
    expected, end = mamba3_step(*x, state=state)
    given = Mamba3State(*(part.clone() for part in state))
    o, after = mamba3_step(*x, state=given, inplace=True)
    assert after.S is given.S
    assert not o.requires_grad
    assert torch.equal(o, expected)
    for name, part, twin in zip(Mamba3State._fields, after, end, strict=True):
        assert torch.equal(part, twin), name


@pytest.mark.parametrize("rank", [1, 3])
def test_autocast_rounds_nothing(rank: int) -> None:
    x = to(draw(rank, length=1), torch.float32)
    state = new_mamba3_state(x[0], x[2], B)
    expected = mamba3_step(*x, state=state)
    with torch.autocast("cpu", torch.bfloat16):
        actual = mamba3_step(*x, state=state)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1].S, expected[1].S)


@pytest.mark.parametrize("packed", [True, False])
def test_compiles_to_one_graph(packed: bool) -> None:
    sequences = 3 if packed else B
    bounds = torch.tensor([0, 4, 4, 9]) if packed else None
    x = tuple(t.requires_grad_() for t in draw(3, batch=1 if packed else B, length=9))
    state = draw_state(3, sequences)

    def loss(*x: Tensor) -> Tensor:
        o, end = mamba3(*x, state=state, cu_seqlens=bounds, chunk_size=16)
        total = o.pow(2).sum() + end.S.pow(2).sum()
        if packed:
            return total
        o, end = mamba3_step(*(t[:, :1] for t in x), state=end)
        return total + o.pow(2).sum() + end.S.pow(2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*x), x)
    for a, b in zip(actual, torch.autograd.grad(loss(*x), x), strict=True):
        assert_close("gradient", a, b, EXACT)


X, Y, GATE = torch.zeros(2, 5, 3, 4, 8), torch.zeros(2, 5, 3, 4, 6), torch.zeros(2, 5, 4)
GATES, STATE = (GATE, GATE, GATE), new_mamba3_state(X, Y, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mamba3(X[:, :, 0], X, Y, *GATES),
            r"^q: got shape \(2, 5, 4, 8\), expected \[batch",
        ),
        (lambda: mamba3(X[:, :, :0], X, Y, *GATES), r"^q: got shape \(2, 5, 0, 4, 8\), expected"),
        (lambda: mamba3(X.long(), X, Y, *GATES), r"^q: got torch\.int64, expected fp64, fp32"),
        (lambda: mamba3(X, X.half(), Y, *GATES), r"^k: got torch\.float16, expected q's dtype"),
        (
            lambda: mamba3(X, X[..., :7], Y, *GATES),
            r"^k: got shape \(2, 5, 3, 4, 7\), expected q's",
        ),
        (lambda: mamba3(X, X, Y[:, :, :1], *GATES), r"^v: got .*, expected \(2, 5, 3, 4, 6\)$"),
        (lambda: mamba3(X, X, Y.to("meta"), *GATES), r"^v: got device meta, expected q's device"),
        (
            lambda: mamba3(X, X, Y, GATE[..., None], GATE, GATE),
            r"^g: got .*, expected \(2, 5, 4\)$",
        ),
        (lambda: mamba3(X, X, Y, GATE, GATE[:1], GATE), r"^dt: got shape \(1, 5, 4\), expected"),
        (lambda: mamba3(X, X, Y, GATE, GATE, GATE.double()), r"^lam: got torch\.float64, expected"),
        (lambda: mamba3(X, X, Y, GATE + 1, GATE, GATE), r"^g: got largest entry 1, expected log"),
        (
            lambda: mamba3(X, X, Y, *GATES, state=STATE._replace(S=STATE.S[:1])),
            r"^state\.S: got shape \(1, 4, 8, 6\), expected \(2, 4, 8, 6\)$",
        ),
        (
            lambda: mamba3_step(X, X, Y, *GATES, state=STATE._replace(k=STATE.v)),
            r"^state\.k: got shape \(2, 3, 4, 6\), expected \(2, 3, 4, 8\)$",
        ),
        (
            lambda: mamba3(X, X, Y, *GATES, state=STATE._replace(v=STATE.v.half())),
            r"^state\.v: got torch\.float16, expected torch\.float32$",
        ),
        (
            lambda: mamba3(X, X, Y, *GATES, cu_seqlens=torch.tensor([0, 5])),
            r"^cu_seqlens was given with a batch of 2, expected a batch of 1$",
        ),
    ],
)
def test_bad_operands_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
