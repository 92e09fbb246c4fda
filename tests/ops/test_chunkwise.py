"""The chunkwise form against the token loop and against the paper's own chunk equations."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gdn2.ops.chunks import chunk_table
from gdn2.ops.chunkwise import intra, scan
from gdn2.ops.operands import Operands, load_values
from tests.closeness import assert_close, relative_error
from tests.ops.cases import (
    AXES,
    THRESHOLD,
    Case,
    Result,
    at_the_threshold,
    operands,
    rule,
    run,
    sampled_cases,
)

EXACT = 1e-12
CASES = sampled_cases(120)


def compare(actual: Result, expected: Result, tolerance: float) -> float:
    """Fail beyond the tolerance; returns the worst error."""
    others = expected.named()
    for name, x in actual.named().items():
        assert_close(name, x, others[name], tolerance)
    return max(relative_error(x, others[name]) for name, x in actual.named().items())


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


ANY_DECAY = [0.0, -1e-6, -0.1, -0.5, -1.0, -1.5, -2.0, -2.3, -2.4, -4.0, -20.0, -200.0, -1000.0]


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


def fp32_and_exact(x: dict[str, Tensor], chunk_size: int) -> list[dict[str, Tensor]]:
    """Results and gradients of given operands: in fp32, and by the loop in fp64."""
    results = []
    for backend, dtype in (("torch", torch.float32), ("reference", torch.float64)):
        leaves = {n: y.to(dtype).requires_grad_() for n, y in x.items()}
        o, state = rule(leaves, backend=backend, chunk_size=chunk_size)
        weight = torch.linspace(-1, 1, o.numel(), dtype=dtype).sin().view_as(o)
        grads = torch.autograd.grad([o, state], list(leaves.values()), [weight, state.detach()])
        results.append(Result(o, state, dict(zip(leaves, grads, strict=True))).named())
    return results


def test_dg_holds_for_deep_and_shallow_rows_at_once() -> None:
    """Block by block: a shallow one's large gradient must not hide the error of a deep one."""
    blocks: list[float | str] = ["mild", -20.0, 0.0, -2.6, "spiky", THRESHOLD, "uneven", -4.0]
    blocks += ["mild", -1.5, -0.5, -1.0]
    case = Case(T=32 * len(blocks), d_k=32, d_v=32, B=1, heads=(2, 2, 2, 2), chunk_size=64)
    x = operands(replace(case, erase_range=2.0, dtype=torch.float32))
    parts = [operands(replace(case, T=32, decay=kind, seed=i)) for i, kind in enumerate(blocks)]
    x["g"] = torch.cat([part["g"] for part in parts], 1).float()
    dg = (y["dg"].split(32, 1) for y in fp32_and_exact(x, 64))
    for kind, actual, wanted in zip(blocks, *dg, strict=True):
        assert_close(f"dg at {kind}", actual, wanted, 2e-5)


@pytest.mark.parametrize("spike", [-5.0, -10.0, -20.0, -40.0, -50.0])
def test_dg_of_a_spike_is_as_good_as_its_neighbours(spike: float) -> None:
    """Inside a block gradients are subtracted: the error is small beside the channel's largest in the block."""
    x = operands(Case(T=64, d_k=32, d_v=32, B=1, decay=0.0, dtype=torch.float32))
    x["g"][:, 8::32] = spike
    actual, expected = (y["dg"].unflatten(1, (-1, 32)) for y in fp32_and_exact(x, 64))
    error = (actual.double() - expected).abs().amax(2)
    assert bool((error <= 1e-5 * expected.abs().amax(2)).all())


@pytest.mark.parametrize("still", [1, 3, 4, 8])
def test_no_pair_is_lost_at_the_threshold(still: int) -> None:
    """Rows and columns that differ by rounding alone may lie on two sides of the bound."""
    rand = torch.Generator().manual_seed(still)
    heads = 512
    case = Case(T=64, d_k=1, d_v=1, B=1, heads=(heads,) * 4, dtype=torch.float32)
    x = operands(case)
    x["g"] = at_the_threshold(heads, still, rand)
    actual, expected = fp32_and_exact(x, 64)
    for name, wanted in expected.items():
        tolerance = 5e-6 if name in ("o", "final_state") else 2e-5
        for head, one in zip(actual[name].unbind(-2), wanted.unbind(-2), strict=True):
            assert_close(name, head, one, tolerance)


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
    S, R = x["initial_state"].clone(), Z.clone()
    starts = torch.empty_like(S.flatten(0, 1))
    O = scan(f, m, Z, chunks, S, starts, R)
    assert m.A is not None
    Q_gamma, E_bar = f.X_gamma
    stages = {"Q_gamma": Q_gamma, "E_bar": E_bar, "K_tail": f.past[-1]}
    stages |= {"Z": Z, "A_qk": m.A_qk, "A": m.A, "Y": m.A @ E_bar, "U": m.A @ Z}
    stages |= {"R": R, "S": starts, "O": O, "S_C": S[0]}
    for name, tile in stages.items():
        assert_close(name, tile[0], paper[name], EXACT)
    assert_close("gamma_C", f.gamma_C[0, :, 0], paper["gamma"][-1], EXACT)
    T, E_bar, Z, S = (paper[n] for n in ("T", "E_bar", "Z", "S"))
    systems = {"Y": E_bar, "U": Z, "R": Z - E_bar @ S}  # Eqs. 37, 38, 45, 46: row by row
    for name, right in systems.items():
        x_tile = stages[name][0]
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


@pytest.mark.parametrize("decay", [-1.0, -2.0, -2.3, -2.4, "mild"])
def test_gradients_of_a_small_loss_keep_their_digits(decay: float | str) -> None:
    """A mean over a large batch makes gradients of 1e-10; products with decayed rows must not underflow."""
    case = Case(T=64, d_k=16, d_v=16, B=1, decay=decay, dtype=torch.float32)
    grads = []
    for backend, dtype in (("torch", torch.float32), ("reference", torch.float64)):
        leaves = {n: x.to(dtype).requires_grad_() for n, x in operands(case).items()}
        o, _ = rule(leaves, backend=backend, chunk_size=64)
        weight = 1e-10 * torch.linspace(-1, 1, o.numel(), dtype=dtype).sin().view_as(o)
        grads.append(torch.autograd.grad(o, list(leaves.values()), weight))
    for name, actual, wanted in zip(leaves, *grads, strict=True):
        assert_close(f"d{name}", actual, wanted, 2e-5)


@pytest.mark.parametrize("size", [1e4, 1e5])
def test_large_keys_of_the_future_are_no_infinity(size: float) -> None:
    """Measured from a block's start a later key may be 1e32 times as large: no product with it may count."""
    case = Case(T=96, d_k=16, d_v=8, B=1, decay=-2.29, dtype=torch.float32)
    x = operands(case)
    x |= {"q": size * x["q"], "k": size * x["k"]}
    del x["b"]  # with keys as large as these erasing would diverge
    o, state = rule(x, backend="torch", scale=1)
    expected = rule({n: y.double() for n, y in x.items()}, backend="reference", scale=1)
    for name, actual, wanted in zip(("o", "state"), (o, state), expected, strict=True):
        assert_close(name, actual, wanted, 1e-5)


@pytest.mark.parametrize("decay", [-1e-6, -1e-4])
def test_a_slow_decay_does_not_drift(decay: float) -> None:
    case = Case(T=4096, d_k=4, d_v=4, B=1, heads=(1, 1, 1, 1), decay=decay, dtype=torch.float32)
    actual = run(case, "torch").named()
    expected = run(case, "reference", torch.float64).named()
    assert_close("final_state", actual["final_state"], expected["final_state"], 5e-6)
