"""Each stage of the kernels alone, interpreted, against the equations written out and autograd through them.

`Literal` has a decay for each pair of tokens, exp of the sum of the log-decays between them: nothing is split, merged
or measured from anywhere. A stage is fed with its tensors, never with those of another stage. Memory starts as NaN.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops.arguments import new_state
from gdn2.ops.chunk_op import pack
from gdn2.ops.operands import Operands
from gdn2.ops.triton import overlap, stages
from gdn2.ops.triton.stages import Factors
from gdn2.ops.triton.table import Table, chunk_table, dense_table
from tests.closeness import assert_close
from tests.ops.cases import OPERANDS, Case, operands

EXACT = 1e-10
SINGLE = Case(T=40, d_k=16, d_v=16, B=1, heads=(1, 1, 1, 1), chunk_size=32)


def single(**changes: object) -> Case:
    """Two chunks of one head, with changes."""
    return replace(SINGLE, **changes)  # type: ignore[arg-type]


CASES = [
    single(decay="mixed", d_k=20, d_v=48),
    single(decay=0.0, erase_range=2.0, d_k=48, d_v=20, T=65, chunk_size=64),
    single(decay="spiky", heads=(1, 4, 2, 1), widths=("one", "one", "one"), chunk_size=64),
    single(decay=-200.0, heads=(2, 4, 1, 2), widths=("full", "none", "none"), T=31),
    single(decay=-4.0, heads=(1, 2, 1, 2), widths=("one", "full", "full"), T=100, chunk_size=128),
    single(decay=-1.0, lengths=(1, 0, 33), d_v=1, erase_range=2.0),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
poisoned = pytest.mark.usefixtures("poison")


class Literal:
    """A case by the book: factors of its chunks, scan over them, and the gradients of all of it by autograd.

    Its table has a row more than there are chunks, as that of packed sequences may have.
    """

    def __init__(self, case: Case) -> None:
        leaves = {n: y.requires_grad_() for n, y in operands(case).items()}
        q, k, v, g, b, w, state = (leaves.get(n) for n in OPERANDS)
        assert q is not None and k is not None and v is not None and g is not None
        self.leaves = [y for n, y in leaves.items() if n != "initial_state"]
        self.state = new_state(q, v, 1) if state is None else state
        self.x = pack(q, k, v, g, b, w, scale=0.3)
        cu_seqlens = torch.tensor([0, *(case.lengths or [case.T])]).cumsum(0)
        self.used = sum(-(-n // case.chunk_size) for n in cu_seqlens.diff().tolist())
        self.table = chunk_table(cu_seqlens, self.used + 1, case.chunk_size)
        self.compute_factors()
        self.compute_scan()
        self.differentiate()

    def load(self, tokens: Tensor) -> Tensor:
        """Packed tokens [L, heads, d] → chunks [M, heads, C, d], zero past a chunk's end."""
        tiles = []
        for start, length in zip(
            self.table.start.tolist(), self.table.length.tolist(), strict=True
        ):
            tile = tokens[start : start + length]
            past = tile.new_zeros(self.table.size - length, *tile.shape[1:])
            tiles.append(torch.cat([tile, past]))
        return torch.stack(tiles).transpose(1, 2)

    def load_keys(self, tokens: Tensor) -> Tensor:
        """Chunks of a key-side operand, heads repeated: [M, H, C, d_k or 1]."""
        tiles = self.load(tokens)
        return tiles.repeat_interleave(self.x.heads // tiles.shape[1], 1)

    def load_values(self, tokens: Tensor) -> Tensor:
        """Chunks of values, those of one key head side by side: [M, H, C, G · d_v]."""
        return side_by_side(self.load(tokens), self.x.heads)

    def compute_factors(self) -> None:
        """Eqs. 18–22 and 25, with the decay D [M, H, C, C, d_k] from each token to each later one."""
        x, C = self.x, self.table.size
        Q, K = self.load_keys(x.q) * x.scale, self.load_keys(x.k)
        g = self.load_keys(x.g).expand_as(K)
        columns = []
        for s in range(C):
            later = g[..., s + 1 :, :].cumsum(-2).exp()
            earlier, own = torch.zeros_like(g[..., :s, :]), torch.ones_like(g[..., :1, :])
            columns.append(torch.cat([earlier, own, later], -2))
        D = torch.stack(columns, -2)
        gamma = g.cumsum(-2).exp()
        self.Q_gamma, self.K_tail, self.gamma_C = Q * gamma, K * D[..., -1, :, :], gamma[..., -1, :]
        self.A_qk = torch.einsum("mhrc,mhrsc,mhsc->mhrs", Q, D, K)
        self.deep = (g.unflatten(-2, (2, -1)).cumsum(-2) < -80).flatten(2, 3).any(-1).char()
        self.Z = self.U = self.load_values(x.v if x.w is None else x.v * x.w)
        if x.b is not None:
            E = self.load_keys(x.b) * K
            self.E_bar = E * gamma
            self.T = torch.einsum("mhrc,mhrsc,mhsc->mhrs", E, D, K).tril(-1)
            self.A = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + self.T).tril()
            self.Y, self.U = self.A @ self.E_bar, self.A @ self.Z

    def compute_scan(self) -> None:
        """Eqs. 23 and 24 for each sequence, keeping the state at both ends of each chunk."""
        G = self.x.v.shape[1] // self.x.heads
        outputs, finals = [self.x.v[:0]], []
        self.starts: list[Tensor] = []
        self.ends: list[Tensor] = []
        self.R: list[Tensor] = []
        states = side_by_side(self.state, self.x.heads)
        for initial, (first, last) in zip(states, pairwise(self.table.first.tolist()), strict=True):
            S = initial
            for m in range(first, last):
                R = self.U[m] if self.x.b is None else self.U[m] - self.Y[m] @ S
                O = self.Q_gamma[m] @ S + self.A_qk[m] @ R
                outputs.append(one_below_other(O, G).transpose(0, 1)[: int(self.table.length[m])])
                self.starts.append(S)
                S = self.gamma_C[m].unsqueeze(-1) * S + self.K_tail[m].mT @ R
                self.R.append(R)
                self.ends.append(S)
            finals.append(one_below_other(S, G))
        self.o, self.final = torch.cat(outputs), torch.stack(finals)

    def differentiate(self) -> None:
        """Gradients of a random loss: of all operands, and of what passes between the stages."""
        rand = torch.Generator().manual_seed(1)
        results = (self.o, self.final)
        self.do, self.d_final = (
            torch.randn(y.shape, generator=rand, dtype=torch.float64) for y in results
        )
        within = [self.Z, self.A_qk, self.Z if self.x.b is None else self.T]
        state = [self.state] if self.state.requires_grad else []
        grads = torch.autograd.grad(
            results,
            [*self.leaves, *within, *self.R, *self.ends, *state],
            (self.do, self.d_final),
            allow_unused=True,
            materialize_grads=True,
        )
        parts = [len(self.leaves), 3, self.used, self.used, len(state)]
        d_leaves, d_within, self.dR, self.d_ends, self.d_state = split(grads, parts)
        self.dZ, self.dA_qk, self.dT = d_within
        self.d_leaves = [d.flatten(0, 1) for d in d_leaves]

    def given(self) -> tuple[Operands, Factors, Table]:
        """What the stages are called with."""
        tensors = {n: t.detach() for n, t in self.x._asdict().items() if isinstance(t, Tensor)}
        erases = self.x.b is not None
        f = Factors(
            Q_gamma=self.Q_gamma,
            K_tail=self.K_tail,
            gamma_C=self.gamma_C,
            A_qk=self.A_qk,
            A=self.A if erases else None,
            Y=self.Y if erases else None,
            U=self.U,
            deep=self.deep,
        )
        detached = (None if t is None else t.detach().contiguous() for t in f[:-1])
        return self.x._replace(**tensors), Factors(*detached), self.table  # type: ignore[arg-type]

    def rows(self, tiles: list[Tensor]) -> Tensor:
        """Tiles of the chunks there are, and NaN in the table's last row."""
        return torch.stack([*tiles, torch.full_like(tiles[0], float("nan"))]).detach()


def side_by_side(x: Tensor, heads: int) -> Tensor:
    """Value heads of one key head next to each other: [n, H · G, rows, d] → [n, H, rows, G · d]."""
    return x.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)


def one_below_other(x: Tensor, groups: int) -> Tensor:
    """Undo `side_by_side` for one chunk or sequence: [H, rows, G · d] → [H · G, rows, d]."""
    return x.unflatten(-1, (groups, -1)).transpose(1, 2).flatten(0, 1)


def split(tensors: tuple[Tensor, ...], parts: list[int]) -> list[list[Tensor]]:
    """Cut a tuple into lists of these lengths."""
    rest = iter(tensors)
    return [[next(rest) for _ in range(count)] for count in parts]


@cache
def literal(case: Case) -> Literal:
    return Literal(case)


class Spy:
    """A kernel that remembers the tensors it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.seen: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.seen = dict(zip(self.kernel.arg_names, arguments, strict=False))
            self.kernel[grid](*arguments, **options)

        return launch


def spy(monkeypatch: pytest.MonkeyPatch, kernel: str) -> Spy:
    """Watch a kernel of the stages."""
    watched = Spy(getattr(stages, kernel))
    monkeypatch.setattr(stages, kernel, watched)
    return watched


@poisoned
@each_case
def test_factors(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, with the deep rows, are exps of sums; A is an inverse; rows past an end and unused chunks are zero."""
    by_hand = literal(case)
    x, expected, table = by_hand.given()
    solve = spy(monkeypatch, "solve_kernel")
    f = stages.intra(x, table, "ieee")
    for name in ("Q_gamma", "K_tail", "gamma_C", "A_qk", "U"):
        assert_close(name, getattr(f, name), getattr(expected, name), EXACT)
    assert torch.equal(f.deep, expected.deep)
    assert (f.A is None) == (f.Y is None) == (x.b is None)
    if f.A is not None and f.Y is not None:
        assert_close("E_bar", solve.seen["E_bar_ptr"], by_hand.E_bar, EXACT)
        assert_close("T", solve.seen["T_ptr"].tril(-1), by_hand.T, EXACT)
        assert_close("A", f.A.tril(), by_hand.A, EXACT)
        assert_close("Y", f.Y, by_hand.Y, EXACT)


@poisoned
@each_case
def test_scan(case: Case) -> None:
    by_hand = literal(case)
    x, f, table = by_hand.given()
    state = by_hand.state.detach()
    o, final, starts, R = stages.scan(x, f, table, state, outputs=True, save=True)
    assert o is not None and final is not None and starts is not None and R is not None
    assert_close("o", o, by_hand.o, EXACT)
    assert_close("final_state", final, by_hand.final, EXACT)
    assert_close("starts", starts[:-1], torch.stack(by_hand.starts), EXACT)
    assert_close("R", R[:-1], torch.stack(by_hand.R), EXACT)
    nothing, no_state, again, R_again = stages.scan(x, f, table, state, outputs=False, save=True)
    assert nothing is None and no_state is None and again is not None and R_again is not None
    assert torch.equal(again[:-1], starts[:-1]) and torch.equal(R_again[:-1], R[:-1])


@poisoned
@each_case
def test_scan_reverse(case: Case) -> None:
    by_hand = literal(case)
    x, f, table = by_hand.given()
    dR, ends, d_state = stages.scan_reverse(x, f, table, by_hand.do, by_hand.d_final)
    assert_close("dR", dR[:-1], torch.stack(by_hand.dR), EXACT)
    assert_close("ends", ends[:-1], torch.stack(by_hand.d_ends), EXACT)
    assert_close("d_state", d_state, by_hand.d_state[0], EXACT)


@poisoned
@each_case
def test_gradient(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of values and scores, then of all operands."""
    by_hand = literal(case)
    x, f, table = by_hand.given()
    states = spy(monkeypatch, "gradient_states_kernel")
    keys = spy(monkeypatch, "gradient_keys_kernel")
    tiles = (by_hand.starts, by_hand.R, by_hand.d_ends, by_hand.dR)
    sums = stages.decays(x, table)
    between = [*map(by_hand.rows, tiles)]
    grads = stages.gradient(x, f.A, f.deep, table, sums, by_hand.do, between)
    assert_close("dZ", states.seen["dZ_ptr"][:-1], by_hand.dZ[:-1], EXACT)
    assert_close("dA_qk", keys.seen["dA_qk_ptr"][:-1].tril(), by_hand.dA_qk[:-1].tril(), EXACT)
    if x.b is not None:
        assert_close("dT", keys.seen["dT_ptr"][:-1].tril(-1), by_hand.dT[:-1].tril(-1), EXACT)
    present = zip("qkvgbw", (x.q, x.k, x.v, x.g, x.b, x.w), grads, strict=True)
    actual = {n: d for n, operand, d in present if operand is not None}
    for (name, d), expected in zip(actual.items(), by_hand.d_leaves, strict=True):
        assert_close(f"d{name}", d, expected, EXACT)


def chunks_by_hand(lengths: list[int], size: int) -> list[tuple[int, int]]:
    """First token and tokens of each chunk."""
    chunks, start = [], 0
    for length in lengths:
        chunks += [(start + i, min(size, length - i)) for i in range(0, length, size)]
        start += length
    return chunks


@pytest.mark.parametrize("lengths", [[5], [0], [32], [33, 0, 0, 64, 1], [0, 0, 7], [31, 65, 0]])
def test_table(lengths: list[int]) -> None:
    """The bound on its rows is that of `Batch.chunks`; rows beyond are empty."""
    expected = chunks_by_hand(lengths, 32)
    rows = sum(lengths) // 32 + len(lengths)
    table = chunk_table(torch.tensor([0, *lengths]).cumsum(0).int(), rows, 32)
    made = [*zip(table.start.tolist(), table.length.tolist(), strict=True)]
    assert made[: len(expected)] == expected
    assert made[len(expected) :] == [(0, 0)] * (rows - len(expected))
    counts = [-(-n // 32) for n in lengths]
    assert table.first.tolist() == [sum(counts[:n]) for n in range(len(counts) + 1)]


@pytest.mark.parametrize(("rows", "length"), [(1, 0), (2, 32), (3, 33), (2, 100)])
def test_dense_table(rows: int, length: int) -> None:
    table = dense_table(rows, length, 32, torch.device("cpu"))
    made = [*zip(table.start.tolist(), table.length.tolist(), strict=True)]
    assert made == chunks_by_hand([length] * rows, 32)
    assert table.first.tolist() == [n * -(-length // 32) for n in range(rows + 1)]


@pytest.mark.parametrize("chunks", [256, 257, 1023])
def test_pieces_of_one_sequence(chunks: int) -> None:
    """All chunks, one piece behind the other; the same on the host and on a device."""
    pieces = overlap.pieces(chunks)
    assert overlap.bounds_on(chunks, torch.device("cpu")).tolist() == [[*piece] for piece in pieces]
    assert [chunk for first, last in pieces for chunk in range(first, last)] == [*range(chunks)]
