"""The chunkwise form against the token loop and against the paper's own chunk equations."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gdn2.ops.chunk_op import chunk_forward
from gdn2.ops.chunks import chunk_table
from gdn2.ops.chunkwise import Operands, intra, load_values, scan
from gdn2.ops.halving import BASE, DEEPEST
from tests.closeness import assert_close, relative_error
from tests.ops.cases import AXES, Case, Result, operands, rule, run, sampled_cases

EXACT = 1e-12
CASES = sampled_cases(120)
THRESHOLD = math.log(DEEPEST) / BASE  # log-decay a token beyond which a block's last row is deep


def compare(actual: Result, expected: Result, tolerance: float) -> float:
    """Fail beyond the tolerance; returns the worst error."""
    others = expected.named()
    for name, x in actual.named().items():
        assert_close(name, x, others[name], tolerance)
    return max(relative_error(x, others[name]) for name, x in actual.named().items())


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def assert_same_bits(actual: Result, expected: Result) -> None:
    others = expected.named()
    for name, x in actual.named().items():
        assert torch.equal(bits(x), bits(others[name])), name


def test_sampled_cases_cover_every_axis() -> None:
    assert len(CASES) >= 60
    for axis, values in AXES.items():
        seen = {(c.lengths or c.T) if axis == "sequences" else getattr(c, axis) for c in CASES}
        assert seen == set(values), axis
    assert sum(c.d_k != c.d_v for c in CASES) >= 60
    assert any(c.loss == "final_state" and c.lengths for c in CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_agrees_with_the_loop(case: Case) -> None:
    worst = compare(run(case, "torch"), run(case, "reference"), EXACT)
    print(f"\nworst {worst:.1e}")


ANY_DECAY = [0.0, -1e-6, -1.0, -2.5, -2.6, -4.0, -20.0, -200.0, -1000.0]


@pytest.mark.parametrize("decay", [*ANY_DECAY, "mild", "uneven", "spiky", "mixed"])
def test_fp32_holds_for_any_decay(decay: float | str) -> None:
    worst: dict[str, float] = defaultdict(float)
    case = Case(B=1, heads=(1, 2, 2, 1), decay=decay, dtype=torch.float32)
    for seed, (T, d, chunk_size) in enumerate([(65, 16, 16), (130, 64, 64), (257, 128, 128)]):
        for erase_range in (1.0, 2.0):
            sized = replace(case, T=T, d_k=d, d_v=d, chunk_size=chunk_size, seed=seed)
            sized = replace(sized, erase_range=erase_range)
            expected = run(sized, "reference", torch.float64).named()
            for name, x in run(sized, "torch").named().items():
                worst[name] = max(worst[name], relative_error(x, expected[name]))
    print(f"\n{decay:>7}", *(f"{name} {error:.1e}" for name, error in worst.items()), sep="  ")
    for name, error in worst.items():
        assert error <= (5e-6 if name in ("o", "final_state") else 2e-5), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", ["mild", "spiky", -1.0])
def test_halves_are_rounded_once(dtype: torch.dtype, decay: float | str) -> None:
    """States keep fp32's precision; outputs and gradients lose what their own dtype cannot hold."""
    case = Case(T=130, d_k=48, d_v=32, heads=(1, 2, 2, 1), decay=decay, chunk_size=64, dtype=dtype)
    actual, expected = run(case, "torch"), run(case, "reference", torch.float64).named()
    assert (actual.o.dtype, actual.state.dtype) == (dtype, torch.float32)
    for name, x in operands(case).items():
        assert actual.grads[name].dtype == x.dtype, name
    for name, value in actual.named().items():
        rounding = torch.finfo(value.dtype).eps / 2 if value.dtype == dtype else 0.0
        assert_close(name, value, expected[name], rounding + 2e-6)


def test_dg_holds_for_deep_and_shallow_rows_at_once() -> None:
    """Block by block: a shallow one's large gradient must not hide the error of a deep one."""
    blocks: list[float | str] = ["mild", -20.0, 0.0, -2.6, "spiky", THRESHOLD, "uneven", -4.0]
    case = Case(T=16 * len(blocks), d_k=32, d_v=32, B=1, heads=(2, 2, 2, 2), chunk_size=64)
    x = operands(replace(case, erase_range=2.0, dtype=torch.float32))
    parts = [operands(replace(case, T=16, decay=kind, seed=i)) for i, kind in enumerate(blocks)]
    x["g"] = torch.cat([part["g"] for part in parts], 1).float()
    grads = []
    for backend, dtype in (("torch", torch.float32), ("reference", torch.float64)):
        leaves = {n: y.to(dtype).requires_grad_() for n, y in x.items()}
        o, state = rule(leaves, backend=backend, chunk_size=64)
        weight = torch.linspace(-1, 1, o.numel(), dtype=dtype).sin().view_as(o)
        grads.append(torch.autograd.grad([o, state], leaves["g"], [weight, state.detach()])[0])
    for kind, actual, wanted in zip(blocks, *(d.split(16, 1) for d in grads), strict=True):
        assert_close(f"dg at {kind}", actual, wanted, 2e-5)


def tokens_after(x: dict[str, Tensor], other: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    """Operands of x up to token t, of another case after it."""
    return {n: torch.cat([x[n][:, : t + 1], other[n][:, t + 1 :]], 1) for n in "qkvgbw"}


def kept_forward(x: dict[str, Tensor], chunk_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Output and kept residuals and matrices, a row per token, and the states at chunk starts."""
    q, k, v, g, b, w = (x.get(n) for n in "qkvgbw")
    assert q is not None and k is not None and v is not None and g is not None
    options = (1.0, chunk_size, "ieee", "states", "torch")
    o, _, (starts, *rows) = chunk_forward(q, k, v, g, b, w, x.get("initial_state"), None, *options)
    names = ("R", "A_qk", "A") if b is not None else ("R", "A_qk")
    tokens = {n: y.transpose(1, 2).flatten(0, 1) for n, y in zip(names, rows, strict=True)}
    return {"o": o[0], **tokens}, starts


def assert_past_unmoved(
    x: dict[str, Tensor], other: dict[str, Tensor], t: int, chunk_size: int
) -> None:
    """Nothing up to token t, and no chunk's start up to token t + 1, may tell the two apart."""
    (rows, starts), (moved_rows, moved_starts) = (kept_forward(y, chunk_size) for y in (x, other))
    for name, past in rows.items():
        assert torch.equal(bits(past[: t + 1]), bits(moved_rows[name][: t + 1])), (name, t)
    assert not torch.equal(rows["o"][t + 1 :], moved_rows["o"][t + 1 :]), t
    known = (t + 1) // chunk_size + 1
    assert torch.equal(bits(starts[:known]), bits(moved_starts[:known])), t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [-1e-3, "mild", "uneven", -20.0, "mixed"])
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_later_tokens_move_no_bit(chunk_size: int, decay: float | str, dtype: torch.dtype) -> None:
    case = Case(T=200, B=1, heads=(1, 2, 2, 1), decay=decay, erase_range=2.0, dtype=dtype)
    x = operands(case)
    for seed, t in enumerate((0, 14, 15, 16, 62, 63, 64, 100, 127, 128, 198), start=1):
        other = operands(replace(case, decay="mixed" if seed % 2 else -1e-3, seed=seed))
        moved = {**tokens_after(x, other, t), "initial_state": x["initial_state"]}
        assert_past_unmoved(x, moved, t, chunk_size)


NEAR_THRESHOLD = [THRESHOLD * (1 + i * 2**-24) for i in (-1000, -20, -4, -1, 0, 1, 4, 20, 1000)]


@pytest.mark.parametrize("decay", [-1.0, *NEAR_THRESHOLD, -4.0, -20.0, "uneven"])
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("widths", [("full", "full", "full"), ("one", "none", "one")], ids=str)
def test_a_deep_future_moves_no_bit(
    widths: tuple[str, str, str], chunk_size: int, decay: float | str
) -> None:
    """Whether rows take blocks or small levels is their own choice: the future may be deep or not."""
    case = Case(T=144, B=1, decay=decay, widths=widths, dtype=torch.float32)
    x = operands(case)
    for t in (0, 5, 15, 16, 30, 31, 47, 63, 77, 127, 130):
        deep, shallow = ({**x, "g": x["g"].clone()} for _ in range(2))
        deep["g"][:, t + 1 :], shallow["g"][:, t + 1 :] = -1000.0, 0.0
        assert_past_unmoved(deep, shallow, t, chunk_size)


def at_the_threshold(heads: int, still: int, generator: torch.Generator) -> Tensor:
    """Log-decays [1, 32, heads, 1]: 16 − still tokens reach the bound but for a few ulps, then nearly nothing."""
    g = -torch.rand(1, 32, heads, 1, generator=generator, dtype=torch.float64)
    for block in g.split(BASE, 1):
        moving, rest = block.split([BASE - still, still], 1)
        ulps = torch.randint(-8, 9, (1, 1, heads, 1), generator=generator) * 2.0**-24
        moving *= math.log(DEEPEST) * (1 + ulps) / moving.sum(1, keepdim=True)
        rest *= 1e-7
    return g.float()


@pytest.mark.parametrize("still", [0, 1, 3, 4, 8])
def test_rounding_at_the_threshold_moves_no_bit(still: int) -> None:
    """A sum of logs and a product of decays round apart, so only one of them may decide.

    One head at a time, since another one might be deep.
    """
    rand = torch.Generator().manual_seed(still)
    x = operands(Case(T=48, d_k=1, d_v=1, B=1, heads=(1, 1, 1, 1), dtype=torch.float32))
    for head in at_the_threshold(50, still, rand).split(1, 2):
        deep, shallow = ({**x, "g": F.pad(head, (0, 0, 0, 0, 0, 16), value=g)} for g in (-1e3, 0))
        assert_past_unmoved(deep, shallow, 31, chunk_size=16)
        assert_past_unmoved(deep, shallow, 31, chunk_size=64)


@pytest.mark.parametrize("still", [1, 3, 4, 8])
def test_no_pair_is_lost_at_the_threshold(still: int) -> None:
    """Rows and columns that differ by rounding alone may lie on two sides of the bound."""
    rand = torch.Generator().manual_seed(still)
    heads = 512
    case = Case(T=32, d_k=1, d_v=1, B=1, heads=(heads,) * 4, dtype=torch.float32)
    x = operands(case)
    x["g"] = at_the_threshold(heads, still, rand)
    results = []
    for backend, dtype in (("torch", torch.float32), ("reference", torch.float64)):
        leaves = {n: y.to(dtype).requires_grad_() for n, y in x.items()}
        o, state = rule(leaves, backend=backend, chunk_size=32)
        weight = torch.linspace(-1, 1, o.numel(), dtype=dtype).sin().view_as(o)
        grads = torch.autograd.grad([o, state], list(leaves.values()), [weight, state.detach()])
        results.append({"o": o, "state": state, **dict(zip(leaves, grads, strict=True))})
    for name, wanted in results[1].items():
        tolerance = 5e-6 if name in ("o", "state") else 2e-5
        for actual, one in zip(results[0][name].unbind(-2), wanted.unbind(-2), strict=True):
            assert_close(name, actual, one, tolerance)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_neighbours_move_no_bit(poison: float) -> None:
    """What one packed sequence holds, even NaN, reaches no other in outputs, states or gradients."""
    case = Case(lengths=(17, 40, 3), d_k=8, d_v=8, decay="uneven", dtype=torch.float32)
    x = operands(case)
    spoiled_operands = "qkvgbw" if math.isnan(poison) else "qkvbw"  # g may not be positive
    results = []
    for spoil in (False, True):
        leaves = {n: y.clone() for n, y in x.items()}
        if spoil:
            for n in spoiled_operands:
                leaves[n][:, 17:57] = poison
        leaves = {n: y.requires_grad_() for n, y in leaves.items()}
        o, state = rule(leaves, cu_seqlens=case.cu_seqlens, chunk_size=16)
        weight = torch.ones_like(o)
        grads = torch.autograd.grad([o, state], list(leaves.values()), [weight, state.detach()])
        outside = [o[:, :17], o[:, 57:], state[[0, 2]], grads[-1][[0, 2]]]
        results.append(
            [*outside, *(d[:, :17] for d in grads[:-1]), *(d[:, 57:] for d in grads[:-1])]
        )
    for clean, spoiled in zip(*results, strict=True):
        assert torch.equal(bits(clean), bits(spoiled))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [True, False])
def test_two_runs_give_the_same_bits(recompute: bool, dtype: torch.dtype) -> None:
    case = Case(lengths=(65, 1, 130), heads=(1, 4, 4, 2), recompute=recompute, dtype=dtype)
    assert_same_bits(run(case, "torch"), run(case, "torch"))


def test_recomputing_gives_the_same_bits() -> None:
    case = Case(T=130, heads=(1, 2, 2, 1), chunk_size=32, dtype=torch.float32)
    assert_same_bits(run(case, "torch"), run(replace(case, recompute=False), "torch"))


@pytest.mark.parametrize("decay", [0.0, "mild", "spiky"])
def test_chunk_size_does_not_matter(decay: float | str) -> None:
    case = Case(T=257, d_k=12, d_v=20, decay=decay, erase_range=2.0)
    expected = run(replace(case, chunk_size=64), "torch")
    for chunk_size in (16, 32, 128):
        compare(run(replace(case, chunk_size=chunk_size), "torch"), expected, EXACT)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    chunk_size=st.sampled_from([16, 32]),
    decay=st.sampled_from(["mild", "mixed", 0.0]),
)
def test_packing_is_separate_runs(lengths: list[int], chunk_size: int, decay: float | str) -> None:
    case = Case(lengths=tuple(lengths), d_k=5, d_v=3, heads=(1, 2, 2, 1), decay=decay)
    x = {n: y.requires_grad_() for n, y in operands(case).items()}
    start, parts, states = 0, [], []
    for n, length in enumerate(lengths):
        own = {name: x[name][:, start : start + length] for name in "qkvgbw"}
        own["initial_state"] = x["initial_state"][n : n + 1]
        o, state = rule(own, chunk_size=chunk_size)
        parts.append(o)
        states.append(state)
        start += length
    packed = rule(x, cu_seqlens=case.cu_seqlens, chunk_size=chunk_size)
    separate = torch.cat(parts, 1), torch.cat(states)
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in packed]
    grads = torch.autograd.grad(packed, list(x.values()), weights)
    expected = torch.autograd.grad(separate, list(x.values()), weights)
    for name, actual, wanted in zip(
        ("o", "final_state", *x), (*packed, *grads), (*separate, *expected), strict=True
    ):
        assert_close(name, actual, wanted, EXACT)


def paper_forward(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """One chunk of one head by Eqs. 18–25 and 35, γ⁻¹ and all, which fp64 and mild decay allow."""
    Q, K, V, g, B, W, S = (x[n] for n in ("q", "k", "v", "g", "b", "w", "initial_state"))
    gamma = g.cumsum(0).exp()
    K_bar, E_bar, Z, Q_gamma = K / gamma, gamma * (B * K), W * V, gamma * Q
    T = (E_bar @ K_bar.T).tril(-1)
    A = torch.linalg.inv(torch.eye(len(T), dtype=T.dtype) + T)
    Y, U = A @ E_bar, A @ Z
    R = U - Y @ S
    K_tail = gamma[-1] / gamma * K
    A_qk = (Q_gamma @ K_bar.T).tril()
    S_C = gamma[-1].diag() @ S + K_tail.T @ R
    return {**locals(), "O": Q_gamma @ S + A_qk @ R}


def paper_backward(f: dict[str, Tensor], dO: Tensor, dS_C: Tensor) -> dict[str, Tensor]:
    """Eqs. 53–82 in their order: gradients of all operands of `paper_forward`."""
    Q, K, V, B, W, S, gamma = (f[n] for n in ("Q", "K", "V", "B", "W", "S", "gamma"))
    A, Y, R, Z = (f[n] for n in ("A", "Y", "R", "Z"))
    Q_gamma, K_bar, E_bar = (f[n] for n in ("Q_gamma", "K_bar", "E_bar"))
    dA_qk = (dO @ R.T).tril()
    dR = f["A_qk"].T @ dO + f["K_tail"] @ dS_C
    dQ_gamma = dO @ S.T
    dK_tail = R @ dS_C.T
    dS = Q_gamma.T @ dO + gamma[-1].diag() @ dS_C - Y.T @ dR
    dgamma_C = (dS_C * S).sum(1)
    dU, dY = dR, -dR @ S.T
    dA = dU @ Z.T + dY @ E_bar.T
    dZ, dE_bar = A.T @ dU, A.T @ dY
    dT = -(A.T @ dA @ A.T).tril(-1)
    dE_bar = dE_bar + dT @ K_bar
    dK_bar = dT.T @ E_bar + dA_qk.T @ Q_gamma + dK_tail * gamma[-1]
    dQ_gamma = dQ_gamma + dA_qk @ K_bar
    dgamma_C = dgamma_C + (dK_tail * K_bar).sum(0)
    dgamma = dE_bar * B * K - dK_bar * K / gamma**2 + dQ_gamma * Q
    dgamma[-1] += dgamma_C
    return {
        "q": dQ_gamma * gamma,
        "k": dE_bar * gamma * B + dK_bar / gamma,
        "v": dZ * W,
        "g": (dgamma * gamma).flip(0).cumsum(0).flip(0),
        "b": dE_bar * gamma * K,
        "w": dZ * V,
        "initial_state": dS,
    }


def one_chunk(size: int, decay: float | str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Operands of a chunk of one head, as the operator and as the paper takes them."""
    case = Case(T=size, d_k=6, d_v=5, B=1, heads=(1, 1, 1, 1), decay=decay, erase_range=2.0)
    x = operands(case)
    flat = {n: y[0, 0] if n == "initial_state" else y[0, :, 0] for n, y in x.items()}
    return x, flat


one_of_each = pytest.mark.parametrize(
    ("size", "decay"), [(16, "mild"), (16, "uneven"), (16, -4.0), (64, "mild"), (64, "uneven")]
)


@one_of_each
def test_factors_are_the_papers(size: int, decay: float | str) -> None:
    x, flat = one_chunk(size, decay)
    paper = paper_forward(flat)
    q, k, v, g, b, w = (x[n][0] for n in "qkvgbw")
    chunks = chunk_table([size], size, q.device)
    packed = Operands(q, k, v, g, b, w, scale=1.0)
    f, m = intra(packed, chunks, torch.float64)
    Z = load_values(packed, chunks, torch.float64)
    S, starts, R = x["initial_state"].clone(), torch.empty_like(x["initial_state"]), Z.clone()
    O = scan(f, m, Z, chunks, S, starts, R)
    assert m.A is not None
    Q_gamma, E_bar = f.X_gamma.unbind(-2)
    stages = {"gamma": f.gamma, "Q_gamma": Q_gamma, "E_bar": E_bar, "K_tail": f.K_tail}
    stages |= {"Z": Z, "A_qk": m.A_qk, "A": m.A, "Y": m.A @ E_bar, "U": m.A @ Z}
    stages |= {"R": R, "S": starts, "O": O, "S_C": S}
    for name, tile in stages.items():
        assert_close(name, tile[0, 0], paper[name], EXACT)
    assert_close("gamma_C", f.gamma_C[0, 0, :, 0], paper["gamma"][-1], EXACT)
    T, E_bar, Z, S = (paper[n] for n in ("T", "E_bar", "Z", "S"))
    systems = {"Y": E_bar, "U": Z, "R": Z - E_bar @ S}  # Eqs. 37, 38, 45, 46: row by row
    for name, right in systems.items():
        x_tile = stages[name][0, 0]
        assert_close(name, x_tile, right - T @ x_tile, EXACT)


@one_of_each
def test_gradients_are_the_papers(size: int, decay: float | str) -> None:
    x, flat = one_chunk(size, decay)
    rand = torch.Generator().manual_seed(1)
    dO = torch.randn(size, 5, generator=rand, dtype=torch.float64)
    dS_C = torch.randn(6, 5, generator=rand, dtype=torch.float64)
    expected = paper_backward(paper_forward(flat), dO, dS_C)
    leaves = {n: y.requires_grad_() for n, y in x.items()}
    o, state = rule(leaves, scale=1.0, chunk_size=size)
    outer = [dO[None, :, None], dS_C[None, None]]
    grads = torch.autograd.grad([o, state], list(leaves.values()), outer)
    for (name, wanted), actual in zip(expected.items(), grads, strict=True):
        assert_close(f"d{name}", actual.view_as(wanted), wanted, EXACT)


@pytest.mark.parametrize("decay", [-1.0, -3.0, -20.0])
def test_the_printed_form_fails_where_this_holds(decay: float) -> None:
    """Eqs. 18–82 as printed, in fp32 and chunks of 16: γ⁻² spoils dg first, then γ⁻¹ all the rest."""
    case = Case(T=16, d_k=64, d_v=64, B=1, heads=(1, 1, 1, 1), decay=decay, dtype=torch.float32)
    exact, ours = run(case, "reference", torch.float64), run(case, "torch")
    x = {n: y[0, 0] if n == "initial_state" else y[0, :, 0] for n, y in operands(case).items()}
    paper = paper_forward({**x, "q": x["q"] * 64**-0.5})
    rand = torch.Generator().manual_seed(case.seed + 1)
    weights = [torch.randn(y.shape, generator=rand, dtype=torch.float64) for y in exact[:2]]
    d_paper = paper_backward(paper, weights[0][0, :, 0].float(), weights[1][0, 0].float())
    printed = relative_error(paper["O"], exact.o[0, :, 0])
    printed_dg = relative_error(d_paper["g"], exact.grads["g"][0, :, 0])
    here = relative_error(ours.o, exact.o)
    here_dg = relative_error(ours.grads["g"], exact.grads["g"])
    print(f"\n{decay}  printed o {printed:.1e} dg {printed_dg:.1e}  here {here:.1e} {here_dg:.1e}")
    assert here <= 5e-6
    assert here_dg <= 2e-5
    assert printed_dg > (1e-3 if decay < -2 else here_dg)
    assert decay > -20 or printed == float("inf")
