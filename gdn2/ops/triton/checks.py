"""Each kernel beside the equations written out: what every stage gives for one sequence whose other stages are exact.

A stage is fed with exact tensors, computed in fp64 on the CPU and rounded, so that an error is its own. Kernels of one
stage run one after the other: the later one is also fed by the earlier. Kernels of other operators have torch twins.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gdn2.ops.arguments import state_dtype
from gdn2.ops.attention import attention
from gdn2.ops.chunk_op import pack
from gdn2.ops.cuda import band
from gdn2.ops.cuda.blocks import to_blocks, to_rows
from gdn2.ops.cuda.launch import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    GROUP_GRADIENT,
    INTRA,
    PLAIN,
    in_blocks,
    takes,
)
from gdn2.ops.operands import Operands
from gdn2.ops.reference import token_loop
from gdn2.ops.selfcheck import (
    DTYPES,
    TOLERANCES,
    Check,
    Scenario,
    loss_weights,
    make_operands,
    relative_error,
)
from gdn2.ops.triton import plain, scans, stages
from gdn2.ops.triton.companions import (
    Pairs,
    check_adamw,
    check_conv,
    check_cross_entropy,
    check_delta_inputs,
    check_gates,
    check_log_decay,
    check_matvec,
    check_norm,
    check_ranks,
    check_rotary,
    check_squares,
    check_step,
    check_swiglu,
    check_table,
    check_window,
    differentiate,
    draw,
)
from gdn2.ops.triton.pipeline import contiguous
from gdn2.ops.triton.stages import Factors
from gdn2.ops.triton.sums import NAME as SUMS
from gdn2.ops.triton.sums import sum_heads
from gdn2.ops.triton.table import Table, dense_table
from gdn2.ops.window_attention import takes_heads

CHUNK = 64
FACTORS = ("Q_gamma", "K_tail", "gamma_C", "A_qk", "A", "Y", "U")
MILD = Scenario("mild", "", rows=1, heads=(1, 1, 1, 1), widths=(128, 128))
PLAIN_SCALE = 0.1
STRONG = replace(MILD, name="strong", strong=True)
NARROW = replace(STRONG, name="gates of heads", scalar_gates=True)


class Exact:
    """One sequence in fp64, all that passes between the stages, and the gradients of all of it by autograd.

    Every pair of tokens has its own decay, the exponential of a sum: nothing is split or measured from anywhere.
    """

    def __init__(self, scenario: Scenario, dtype: torch.dtype) -> None:
        given = make_operands(scenario, dtype)
        state = given.pop("initial_state")
        self.rounded = pack(**given, scale=given["q"].shape[-1] ** -0.5)
        self.state = state.double().requires_grad_()
        self.x = {n: y[0].double().requires_grad_() for n, y in given.items()}
        self.length = given["q"].shape[1]
        self.compute_factors()
        self.compute_scan()
        self.differentiate()

    def load(self, name: str) -> Tensor:
        """Tokens [L, H, d] as chunks [M, H, C, d], zero past the end."""
        x = self.x[name]
        return pad(x, (0, 0, 0, 0, 0, -len(x) % CHUNK)).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def compute_factors(self) -> None:
        """Eqs. 18–22 and 25, with the decay D [M, H, C, C, d_k] from each token (third axis) to each later one."""
        q, k, v, g, b, w = map(self.load, "qkvgbw")
        Q, E = q * self.rounded.scale, b * k
        t = torch.arange(CHUNK)
        later = (t > t[:, None])[..., None]
        D = torch.where(later, g.unsqueeze(2), 0.0).cumsum(3).exp() * (t >= t[:, None])[..., None]
        gamma = g.cumsum(2).exp()
        self.Q_gamma, self.K_tail, self.gamma_C = Q * gamma, k * D[:, :, :, -1], gamma[:, :, -1]
        self.A_qk = torch.einsum("mhrc,mhsrc,mhsc->mhrs", Q, D, k)
        T = torch.einsum("mhrc,mhsrc,mhsc->mhrs", E, D, k).tril(-1)
        self.A = torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + T).tril()
        self.Y, self.U = self.A @ (E * gamma), self.A @ (w * v)

    def compute_scan(self) -> None:
        """Eqs. 23 and 24, keeping the state at both ends of each chunk."""
        S, outputs = self.state[0], []
        self.start_list, self.end_list, self.R_list = [], [], []
        for Q_gamma, K_tail, gamma_C, A_qk, Y, U in zip(
            self.Q_gamma, self.K_tail, self.gamma_C, self.A_qk, self.Y, self.U, strict=True
        ):
            R = U - Y @ S
            outputs.append(Q_gamma @ S + A_qk @ R)
            self.start_list.append(S)
            S = gamma_C.unsqueeze(-1) * S + K_tail.mT @ R
            self.R_list.append(R)
            self.end_list.append(S)
        self.o = torch.cat(outputs, 1).transpose(0, 1)[: self.length]
        self.final = S.unsqueeze(0)
        self.starts, self.R = torch.stack(self.start_list), torch.stack(self.R_list)

    def differentiate(self) -> None:
        """Gradients of a random loss: of the operands and of what passes between the stages."""
        self.do, self.d_final = loss_weights(self.o, self.final)
        leaves = {**self.x, "state": self.state}
        wanted = [*leaves.values(), *self.R_list, *self.end_list]
        grads = torch.autograd.grad((self.o, self.final), wanted, (self.do, self.d_final))
        self.grads = dict(zip(leaves, grads, strict=False))
        last = len(grads) - len(self.end_list)
        self.dR, self.ends = torch.stack(grads[len(leaves) : last]), torch.stack(grads[last:])

    def operands(self, device: torch.device) -> tuple[Operands, Table]:
        """What every stage is given."""
        tensors = {n: t.to(device) for n, t in self.rounded._asdict().items() if n != "scale"}
        return self.rounded._replace(**tensors), dense_table(1, self.length, CHUNK, device)

    def give(self, name: str, device: torch.device) -> Tensor:
        """One of the tensors between the stages as a kernel gets it: rounded, decays and states less so."""
        wide = name in ("gamma_C", "state", "d_final")
        dtype = state_dtype(self.rounded.q) if wide else self.rounded.q.dtype
        exact: Tensor = getattr(self, name)
        return exact.detach().to(device, dtype).contiguous()

    def factors(self, device: torch.device, deep: Tensor | None = None) -> Factors:
        """What the stages after the first are given."""
        flags = torch.zeros(self.A.shape[:3], dtype=torch.int8, device=device)
        given: dict[str, Any] = {name: self.give(name, device) for name in FACTORS}
        return Factors(**given, deep=flags if deep is None else deep)


exact = cache(Exact)


def check_intra(
    names: tuple[str, ...], scenario: Scenario, device: torch.device, dtype: torch.dtype
) -> Pairs:
    """Factors of each chunk (Eqs. 18–22, 25)."""
    right = exact(scenario, dtype)
    x, table = right.operands(device)
    f = stages.intra(x, table, "ieee", stages.decays(x, table))
    return {name: (getattr(f, name), getattr(right, name)) for name in names}


def check_intra_at_once(device: torch.device, dtype: torch.dtype) -> Pairs:
    """All factors by one kernel, where it takes such operands: nothing otherwise."""
    pairs: Pairs = {}
    for scenario in (MILD, STRONG, NARROW):
        right = exact(scenario, dtype)
        x, table = right.operands(device)
        blocks = in_blocks(x, table.size)
        if blocks or takes(INTRA, x, table.size):
            f = stages.intra(x, table, "ieee")
            f = reordered(f) if blocks else f
            for name in FACTORS:
                made = getattr(f, name)
                pairs[f"{name}, {scenario.name}"] = made, getattr(right, name).expand(made.shape)
    return pairs


def reordered(f: Factors) -> Factors:
    """In blocks if they are in rows, and the other way."""
    assert f.Y is not None
    names = ("Q_gamma", "K_tail", "A_qk", "Y", "U")
    reorder = to_rows if f.blocks else to_blocks
    found = {name: reorder(getattr(f, name)) for name in names}
    return f._replace(**found, blocks=not f.blocks)


def check_scan(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Outputs and states (Eqs. 23, 24), and the states and residuals that the backward needs."""
    right = exact(MILD, dtype)
    x, table = right.operands(device)
    f, state = right.factors(device), right.give("state", device)
    o, final, _, _ = stages.scan(x, f, table, state, outputs=True, save=False)
    _, _, starts, R = stages.scan(x, f, table, state, outputs=False, save=True)
    found = {"o": o, "final": final, "starts": starts, "R": R}
    return {name: (y, getattr(right, name)) for name, y in found.items() if y is not None}


def check_forward_scan(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Outputs by the CUDA kernel, where it takes such operands: nothing otherwise."""
    right = exact(MILD, dtype)
    x, table = right.operands(device)
    if not in_blocks(x, CHUNK):
        return {}
    f = reordered(right.factors(device))
    o, final = scans.forward(x, f, table, right.give("state", device))
    return {"o": (o, right.o), "final": (final, right.final)}


def check_backward_scans(device: torch.device, dtype: torch.dtype) -> Pairs:
    """What the backward needs of both scans by the CUDA kernel, where it takes such operands: nothing otherwise."""
    right = exact(MILD, dtype)
    x, table = right.operands(device)
    if not in_blocks(x, CHUNK):
        return {}
    given = [right.give(name, device) for name in ("state", "do", "d_final")]
    found = scans.backward(x, reordered(right.factors(device)), table, *given)._asdict()
    d_state = found.pop("d_state")
    pairs: Pairs = {name: (to_rows(y), getattr(right, name)) for name, y in found.items()}
    return pairs | {"d_state": (d_state, right.grads["state"])}


def plain_operands(
    width: int, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Operands, Tensor]:
    """One decay and one write gate a head and no erase gate: in fp64, and packed on the device with the state."""
    drawn = make_operands(replace(MILD, widths=(width, width), erase=False), dtype)
    drawn |= {name: drawn[name][..., :1] for name in "gw"}
    given = {name: t.to(device) for name, t in drawn.items()}
    state = given.pop("initial_state")
    x = contiguous(pack(**given, b=None, scale=PLAIN_SCALE))
    return {name: t.double() for name, t in drawn.items()}, x, state


def plain_loop(initial_state: Tensor, **x: Any) -> tuple[Tensor, Tensor]:
    """The token loop of such operands."""
    return token_loop(**x, b=None, scale=PLAIN_SCALE, state=initial_state)


def check_plain_scan(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Output and final state without an erase gate, where the kernel takes such operands: nothing otherwise.

    With the write gate as narrow as values, and as wide as decays.
    """
    exact, x, state = plain_operands(128, device, dtype)
    right, pairs = plain_loop(**exact), Pairs()
    assert x.w is not None
    for name, gate in (("narrow", x.w), ("wide", x.w.float())):
        found = scans.plain(x._replace(w=gate), dense_table(1, len(x.q), CHUNK, device), state)
        if found is not None:
            pairs[f"o, {name} gate"] = (found[0], right[0][0])
            pairs[f"final, {name} gate"] = (found[1], right[1])
    return pairs


def check_plain_gradient(device: torch.device, dtype: torch.dtype) -> Pairs:
    """All gradients without an erase gate, where the kernels take such operands: nothing otherwise."""
    exact, x, state = plain_operands(64, device, dtype)
    if not plain.takes(x, CHUNK):
        return {}
    o, final, *grads = differentiate(plain_loop, exact)
    do, d_final = loss_weights(o, final)
    given = state, do[0].to(x.v), d_final.to(state)
    found, d_state = plain.backward(x, dense_table(1, len(x.q), CHUNK, device), *given)
    named = dict(zip("qkvgbw", found, strict=True)) | {"initial_state": d_state}
    right = dict(zip(exact, grads, strict=True))
    return {f"d{name}": (named[name], d.view_as(named[name])) for name, d in right.items()}


def check_scan_reverse(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Gradients of residuals and states (Eqs. 53–63)."""
    right = exact(MILD, dtype)
    do, d_final = right.give("do", device), right.give("d_final", device)
    x, table = right.operands(device)
    dR, ends, d_state = stages.scan_reverse(x, right.factors(device), table, do, d_final)
    return {
        "dR": (dR, right.dR),
        "ends": (ends, right.ends),
        "d_state": (d_state, right.grads["state"]),
    }


def check_gradient(
    names: str, scenario: Scenario, device: torch.device, dtype: torch.dtype
) -> Pairs:
    """Gradients of the operands (Eqs. 53–82)."""
    right = exact(scenario, dtype)
    x, table = right.operands(device)
    sums = stages.decays(x, table)
    f = right.factors(device, stages.intra(x, table, "ieee", sums).deep)
    between = [right.give(name, device) for name in ("starts", "R", "ends", "dR")]
    do = right.give("do", device)
    found = stages.gradient(x, f.A, f.deep, table, sums, do, between)
    grads = dict(zip("qkvgbw", found, strict=True))
    return {f"d{name}": (grads[name], right.grads[name]) for name in names}


def check_gradient_at_once(blocks: bool, device: torch.device, dtype: torch.dtype) -> Pairs:
    """All of them by one kernel and the one for deep rows, where it takes such operands: nothing otherwise."""
    pairs: Pairs = {}
    for scenario in (MILD, STRONG, NARROW):
        right = exact(scenario, dtype)
        x, table = right.operands(device)
        if in_blocks(x, table.size) if blocks else takes(GRADIENT, x, table.size):
            f = right.factors(device, stages.intra(x, table, "ieee").deep)
            between = [right.give(name, device) for name in ("starts", "R", "ends", "dR")]
            between = [to_blocks(t) for t in between] if blocks else between
            do = right.give("do", device)
            found = stages.gradient(x, f.A, f.deep, table, None, do, between, blocks)
            grads = zip("qkvgbw", found, strict=True)
            pairs |= {f"d{n}, {scenario.name}": (y, right.grads[n]) for n, y in grads}
    return pairs


def check_band(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Attention over windows by cuDNN and its gradients, where it is asked for it: nothing otherwise."""
    if dtype not in band.DTYPES or not takes_heads(64, dtype, device) or band.lack(device):
        return {}
    pairs: Pairs = {}
    for width in (64, 128):
        x = draw(dict.fromkeys(("q", "k", "v", "dy"), (2, 120, 2, width)), dtype)
        q, k, v, dy = (t.to(device) for t in x.values())
        found = band.attend(q, k, v, 40, 0.1)
        grads = None if found is None else band.differentiate(dy, q, k, v, *found, 40, 0.1)
        if found is None or grads is None:
            raise ValueError(f"cuDNN refuses windows of heads of {width}")
        exact = [x[name].double().requires_grad_() for name in "qkv"]
        y = attention(*exact, window=40, scale=0.1, backend="sdpa")[0]
        right = [y.detach(), *torch.autograd.grad(y, exact, x["dy"].double())]
        names = (f"{name} of width {width}" for name in ("y", "dq", "dk", "dv"))
        pairs |= zip(names, zip((found[0], *grads), right, strict=True), strict=True)
    return pairs


def check_sums(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Gradients of what three heads share each, of gates of a head and of channels."""
    pairs: Pairs = {}
    for width in (1, 96):
        x = draw({"x": (70, 6, width), "like": (70, 2, width)}, dtype)
        right = x["x"].double().unflatten(1, (2, 3)).sum(2)
        found = sum_heads(x["x"].to(device), x["like"].to(device))
        pairs[f"sums of width {width}"] = found, right
    return pairs


SCORES = ("Q_gamma", "K_tail", "gamma_C", "A_qk")
# A kernel's name, and what compares it on a device in a dtype; `gdn2.ops.trust` remembers the names that fail.
CHECKS: dict[str, Callable[[torch.device, torch.dtype], Pairs]] = {
    "decays": partial(check_intra, ("gamma_C",), MILD),
    "scores": partial(check_intra, SCORES, MILD),
    "deep_scores": partial(check_intra, ("A_qk",), STRONG),
    "solve": partial(check_intra, ("A", "Y", "U"), MILD),
    "scan": check_scan,
    "scan_reverse": check_scan_reverse,
    "gradient_values": partial(check_gradient, "vw", MILD),
    "gradient_states": partial(
        check_gradient, "qkgb", MILD
    ),  # what it makes is only seen in the keys'
    "gradient_keys": partial(check_gradient, "qkgb", MILD),
    "deep_gradient": partial(check_gradient, "qkgb", STRONG),
    "step": check_step,
    "conv": check_conv,
    "norm": check_norm,
    "delta_inputs": check_delta_inputs,
    "swiglu": check_swiglu,
    "matvec": check_matvec,
    "cross_entropy": check_cross_entropy,
    "window": check_window,
    "log_decay": check_log_decay,
    "adamw": check_adamw,
    "ranks": check_ranks,
    "table": check_table,
    "gates": check_gates,
    "rotary": check_rotary,
    "squares": check_squares,
    SUMS: check_sums,
    plain.NAME: check_plain_gradient,
    # where these are wrong or cannot run, the stages' kernels are used
    INTRA: check_intra_at_once,
    PLAIN: check_plain_scan,
    FORWARD: check_forward_scan,
    BACKWARD: check_backward_scans,
    GRADIENT: partial(check_gradient_at_once, False),
    GROUP_GRADIENT: partial(check_gradient_at_once, True),
    # and without this one windows are two triangles
    band.NAME: check_band,
}


def check_kernel(kernel: str, device: torch.device, dtype: str) -> Iterator[Check]:
    """Yield the error of every quantity that a kernel makes, held to the looser bound of gradients."""
    for quantity, (actual, expected) in CHECKS[kernel](device, DTYPES[dtype]).items():
        error = relative_error(actual, expected)
        yield Check("alone", dtype, quantity, error, TOLERANCES[dtype][1])
