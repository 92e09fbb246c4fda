"""The kernels beside the operator's own, each compared with its torch twin in fp64 on the CPU, on the same operands."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from gdn2.ops.conv import short_convolution, short_convolution_step
from gdn2.ops.conv_op import convolve, convolve_step
from gdn2.ops.log_decay import log_decay, log_decay_by_kernel
from gdn2.ops.norm import L2_EPS, gated_rms_norm, rms_norm
from gdn2.ops.norm_op import add_normalize_backward, normalize
from gdn2.ops.ranks import MOST_RANKS, rank_reads, ranks_by_kernel
from gdn2.ops.reference import token_loop
from gdn2.ops.rotary import apply_rotary, rotary_table
from gdn2.ops.selfcheck import Scenario, loss_weights, make_operands
from gdn2.ops.triton import gates, norm, rotary, window
from gdn2.ops.triton.adamw import BLOCK as ADAMW_BLOCK
from gdn2.ops.triton.adamw import adamw
from gdn2.ops.triton.cross_entropy import BLOCK, cross_entropy, scaled
from gdn2.ops.triton.delta_inputs import delta_inputs
from gdn2.ops.triton.gates import BLOCK as GATES_BLOCK
from gdn2.ops.triton.matvec import matvec
from gdn2.ops.triton.squares import BLOCK as SQUARES_BLOCK
from gdn2.ops.triton.squares import sum_of_squares
from gdn2.ops.triton.step import TILES, step
from gdn2.ops.triton.swiglu import swiglu, swiglu_gradient
from gdn2.ops.triton.table import BLOCK as TABLE_BLOCK
from gdn2.ops.triton.table import Table, chunk_table, dense_table

Pairs = dict[str, tuple[Tensor, Tensor]]  # for each quantity what a kernel gave and what is right
Call = Callable[..., Sequence[Tensor]]
TOKENS = 2  # of a decode step
LENGTHS = (1, 2, 67)
CHANNELS, HEAD = 256, 128
MODEL = 2304
RMS_EPS = 1e-5
ADAMW: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALE = 3.0  # of gradients
STEP = Scenario("mild", "", rows=1, heads=(1, 1, 1, 1), widths=(HEAD, HEAD))


def check_step(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Output and state of a few tokens (Eqs. 9, 10) in place, by every tile that decoding may choose."""
    drawn = make_operands(STEP, dtype)
    state = drawn.pop("initial_state")
    x = [drawn[name][:, :TOKENS] for name in "qkvgbw"]
    scale = HEAD**-0.5
    exact: list[Any] = [*(t.double() for t in x), scale, state.double()]
    right = token_loop(*exact)
    found: Pairs = {}
    for _, tile in TILES:
        S = state.to(device, copy=True)
        given: list[Any] = [*(t.to(device) for t in x), scale, S, S, tile]
        o = step(*given)
        how = f"{tile.value_block} channels by {tile.num_warps} warps"
        found |= {f"o, {how}": (o, right[0]), f"S, {how}": (S, right[1])}
    return found


def check_conv(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Packed sequences and a step, with activation and normalised heads, and with neither."""
    checks = (check_convolution, check_convolution_step)
    return {
        f"{name}{' of heads' if l2_width else ''}": pair
        for l2_width in (HEAD, None)
        for check in checks
        for name, pair in check(l2_width, device, dtype).items()
    }


def check_convolution(l2_width: int | None, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Output, final state and all gradients."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    silu = l2_width is not None

    def kernel(**x: Tensor) -> tuple[Tensor, Tensor]:
        options = (silu, l2_width, L2_EPS, True)
        return convolve(*x.values(), cu_seqlens.to(device), *options)

    def twin(**x: Tensor) -> tuple[Tensor, Tensor]:
        y, final = short_convolution(
            **x,
            activation="silu" if silu else None,
            l2_width=l2_width,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        assert final is not None
        return y, final

    shapes = convolution_shapes(1, sum(LENGTHS), len(LENGTHS))
    return compare(kernel, twin, draw(shapes, dtype), ("y", "final state"), device)


def check_convolution_step(l2_width: int | None, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Output and state of a few tokens in place."""
    silu = l2_width is not None
    x, weight, bias, state = draw(convolution_shapes(3, TOKENS, 3), dtype).values()
    given = state.to(device, copy=True)
    on_device = (t.to(device) for t in (x, weight, bias))
    y = convolve_step(*on_device, given, silu, l2_width, L2_EPS)
    right_y, right_state = short_convolution_step(
        *(t.double() for t in (x, weight, bias)),
        activation="silu" if silu else None,
        l2_width=l2_width,
        state=state.double(),
    )
    return {"y of a step": (y, right_y), "state of a step": (given, right_state)}


def convolution_shapes(batch: int, length: int, states: int) -> dict[str, tuple[int, ...]]:
    """Of all operands, in the order of the arguments."""
    return {
        "x": (batch, length, CHANNELS),
        "weight": (CHANNELS, 4),
        "bias": (CHANNELS,),
        "initial_state": (states, CHANNELS, 3),
    }


def check_norm(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Outputs and gradients: of heads that are gated, of rows that are gated first, and of plain ones."""

    def kernel_of(silu: bool, gate_first: bool) -> Call:
        def kernel(x: Tensor, weight: Tensor, gate: Tensor | None = None) -> list[Tensor]:
            return [normalize(x, gate, weight, RMS_EPS, silu, gate_first)[0]]

        return kernel

    def gated(x: Tensor, weight: Tensor, gate: Tensor) -> list[Tensor]:
        return [gated_rms_norm(x, gate, weight, RMS_EPS)]

    def gate_first(x: Tensor, weight: Tensor, gate: Tensor) -> list[Tensor]:
        return [gated_rms_norm(x, gate, weight, RMS_EPS, activation="sigmoid", gate_first=True)]

    def plain(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [rms_norm(x, weight, RMS_EPS)]

    cases = (
        ("gated", kernel_of(True, False), gated, (67, HEAD)),
        ("gated first", kernel_of(False, True), gate_first, (5, MODEL)),
        ("plain", kernel_of(False, False), plain, (5, MODEL)),
    )
    found: Pairs = {}
    for name, kernel, twin, shape in cases:
        shapes = {"x": shape, "weight": shape[1:]} | ({} if twin is plain else {"gate": shape})
        pairs = compare(kernel, twin, draw(shapes, dtype), ("y",), device)
        found |= {f"{quantity}, {name}": pair for quantity, pair in pairs.items()}
    return found | check_sum(device, dtype)


def check_sum(device: torch.device, dtype: torch.dtype) -> Pairs:
    """The norm of a sum, which is rounded before it, and the gradients of both."""
    wide = dict.fromkeys(("x", "delta", "dy", "passed"), (5, MODEL))
    x, delta, dy, passed, weight = draw(wide | {"weight": (MODEL,)}, dtype).values()
    total, y, rstd = norm.add(x.to(device), delta.to(device), weight.to(device), RMS_EPS)
    given = (dy.to(device), passed.to(device), total, weight.to(device), rstd)
    d_sum, d_weight = add_normalize_backward(*given)
    leaves = (x + delta).double().requires_grad_(), weight.double().requires_grad_()
    right = rms_norm(*leaves, RMS_EPS)
    grads = torch.autograd.grad(right, leaves, dy.double())
    return {
        "sum": (total, leaves[0].detach()),
        "norm of a sum": (y, right.detach()),
        "d sum": (d_sum, grads[0] + passed),
        "d weight of a sum": (d_weight, grads[1]),
    }


def check_delta_inputs(device: torch.device, dtype: torch.dtype) -> Pairs:
    """The operands of a step, made of one token of three rows, and the states of its convolutions."""
    H, HV, DK, DV, taps, rows = 2, 4, HEAD, 64, 4, 3
    channels = {"q": H * DK, "k": H * DK, "v": HV * DV}
    shapes: dict[str, tuple[int, ...]] = {n: (rows, 1, width) for n, width in channels.items()}
    shapes |= {"erase": shapes["k"], "write": shapes["v"], "decay": shapes["k"]}
    shapes |= {f"{n} weight": (width, taps) for n, width in channels.items()}
    shapes |= {f"{n} state": (rows, width, taps - 1) for n, width in channels.items()}
    shapes |= {"bias": (H * DK,), "log_rate": (H,)}
    x = draw(shapes, dtype)
    given = {n: t.to(device, copy=True) for n, t in x.items()}
    maps = [given[n] for n in ("q", "k", "v", "erase", "write", "decay")]
    weights, states = ([given[f"{n} {kind}"] for n in "qkv"] for kind in ("weight", "state"))
    outputs = delta_inputs(maps, weights, states, given["bias"], given["log_rate"], HV, 2.0, L2_EPS)
    wide = {n: t.double() for n, t in x.items()}
    right: dict[str, Tensor] = {}
    for n, head in (("q", DK), ("k", DK), ("v", None)):
        y, right[f"{n} state"] = short_convolution_step(
            wide[n], wide[f"{n} weight"], activation="silu", l2_width=head, state=wide[f"{n} state"]
        )
        right[n] = y.unflatten(-1, (HV if n == "v" else H, -1))
    speed = softplus(wide["decay"] + wide["bias"]).unflatten(-1, (H, -1))
    right["g"] = -wide["log_rate"].exp()[:, None] * speed
    right["b"] = 2 * wide["erase"].sigmoid().unflatten(-1, (H, -1))
    right["w"] = wide["write"].sigmoid().unflatten(-1, (HV, -1))
    found = given | dict(zip("qkvgbw", outputs, strict=True))
    return {n: (found[n], right[n]) for n in right}


def check_matvec(device: torch.device, dtype: torch.dtype) -> Pairs:
    """A row by matrices of odd sizes, with a bias and without."""
    found: Pairs = {}
    for outputs, inputs in ((MODEL + 1, MODEL), (HEAD, 100)):
        shapes = {"x": (1, 1, inputs), "weight": (outputs, inputs), "bias": (outputs,)}
        x, weight, bias = (t.to(device) for t in draw(shapes, dtype).values())
        right = x.cpu().double() @ weight.cpu().double().T
        found[f"{outputs} of {inputs}"] = (matvec(x, weight, None), right)
        right = right + bias.cpu().double()
        found[f"{outputs} of {inputs}, with a bias"] = (matvec(x, weight, bias), right)
    return found


def check_swiglu(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Of rows that lie side by side, as a joint product leaves them: the product, and it again with its gradients."""
    x, dh = draw({"x": (3, 2 * MODEL), "dh": (3, MODEL)}, dtype).values()
    gate, up = x.to(device).chunk(2, -1)
    both, again = swiglu_gradient(gate, up, dh.to(device), again=True)
    found = (swiglu(gate, up), *both.chunk(2, -1), again)
    leaves = [t.requires_grad_() for t in x.double().chunk(2, -1)]
    h = silu(leaves[0]) * leaves[1]
    d_gate, d_up = torch.autograd.grad(h, leaves, dh.double())
    right = {"y": h.detach(), "d_gate": d_gate, "d_up": d_up, "h": h.detach()}
    return {n: (t, right[n]) for n, t in zip(right, found, strict=True)}


def check_log_decay(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Log-decays and all their gradients, of two heads that are no power of two wide."""
    heads, width = 2, 96
    shapes = {"x": (67, heads * width), "bias": (heads * width,), "log_rate": (heads,)}

    def kernel(x: Tensor, bias: Tensor, log_rate: Tensor) -> list[Tensor]:
        return [log_decay_by_kernel(x, bias, log_rate)]

    def twin(x: Tensor, bias: Tensor, log_rate: Tensor) -> list[Tensor]:
        return [log_decay(x, bias, log_rate)]

    return compare(kernel, twin, draw(shapes, dtype), ("g",), device)


def check_window(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Rows of blocks turned, those of another tensor added to, and results joined, in the place of parts of others."""
    shape, logs = (2, 3, 40, 2, 64), (2, 3, 2, 40)
    own, before = draw({"own": shape, "before": (2, 2, *shape[2:])}, dtype).values()
    own_log, before_log = draw({"own": logs, "before": (2, 2, *logs[2:])}, torch.float32).values()
    found: Pairs = {}
    for name, keys in (("queries", False), ("keys", True)):
        y, sums = own[:, 1:].to(device, copy=True), own.to(device, copy=True)
        window.turn(before.to(device), y, keys, add=False)
        window.turn(before.to(device), sums[:, :-1], keys, add=True)
        right = before.double().flip(2)
        right = right if keys else right.roll(-1, 2)
        found[f"{name} turned"] = (y, right)
        found[f"{name} added"] = (sums[:, :-1], own[:, :-1].double() + right)
    y, log = own.to(device, copy=True), own_log.to(device, copy=True)
    window.join(y[:, 1:], log[:, 1:], before.to(device), before_log.to(device))
    later = before_log.double().flip(-1).roll(-1, -1)
    later[..., -1] = -torch.inf
    total = torch.logaddexp(own_log[:, 1:].double(), later)
    weights = [(x - total).exp().mT.unsqueeze(-1) for x in (own_log[:, 1:].double(), later)]
    right = own[:, 1:].double() * weights[0] + before.double().flip(2).roll(-1, 2) * weights[1]
    return found | {"joined": (y[:, 1:], right), "normalisers": (log[:, 1:], total)}


def check_ranks(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Ranks that read each other, alone and with those of the token before; all their gradients."""

    def kernel(**given: Tensor) -> list[Tensor]:
        return [ranks_by_kernel([*given.values()])]

    def twin(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **old: Tensor) -> list[Tensor]:
        return [rank_reads(q, k, v, weight, tuple(old.values()) or None, "torch")]  # type: ignore[arg-type]

    found: Pairs = {}
    for ranks in (1, MOST_RANKS):
        shape, gates = (2, 5, ranks, 3, HEAD), (2, 5, 3)
        shapes = {**dict.fromkeys(("q", "k", "v"), shape), "weight": gates}
        if ranks > 1:
            shapes |= {"k_old": shape, "v_old": shape, "weight_old": gates}
        pairs = compare(kernel, twin, draw(shapes, dtype), ("o",), device)
        found |= {f"{name}, {ranks} ranks": pair for name, pair in pairs.items()}
    return found


def check_squares(device: torch.device, dtype: torch.dtype) -> Pairs:
    """The sum over tensors of less than a part, of whole blocks and of more."""
    sizes = (1, 5, SQUARES_BLOCK, 2 * SQUARES_BLOCK, SQUARES_BLOCK + 37)
    x = [*draw({f"{n}": (n,) for n in sizes}, dtype).values()]
    found = sum_of_squares([t.to(device) for t in x])
    right = torch.stack([t.double().square().sum() for t in x])
    return {"sum": (found, right.sum())}


def check_rotary(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Heads turned by their places, by all tokens' angles and by those of a sequence, and turned back."""
    heads, d, batch, length = 3, 96, 2, 35
    (x,) = draw({"x": (batch, length, heads * d)}, dtype).values()
    found: Pairs = {}
    for name, places in (
        ("sequence", torch.arange(length)),
        ("token", torch.arange(70).view(2, 35)),
    ):
        table = rotary_table(places, d)
        cos, sin = (t.flatten(0, -2).to(device) for t in table)
        right = apply_rotary(x.double().unflatten(-1, (heads, d)), *(t.double() for t in table))
        to = torch.zeros(batch * length, heads * d + 8, dtype=dtype, device=device)
        rotary.turn(x.flatten(0, 1).to(device), cos, sin, to[:, 8:], back=False)
        again = torch.empty_like(to)
        rotary.turn(to[:, 8:], cos, sin, again[:, :-8], back=True)
        copied = torch.zeros_like(to)
        rotary.copy_rows(to[:, 8:], copied[:, :-8])
        found[f"copied, {name}"] = (copied, pad(right.flatten(0, 1).flatten(1), (0, 8)))
        found[f"turned, {name}"] = (to, pad(right.flatten(0, 1).flatten(1), (8, 0)))
        found[f"back, {name}"] = (again[:, :-8], x.double().flatten(0, 1))
    return found


def check_gates(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Both gates of their logits, and the gradients of these, in rows of another tensor."""
    rows, erase, write, most = 5, GATES_BLOCK + 3, 70, 2.0
    shapes: dict[str, tuple[int, ...]] = {
        "erase": (rows, erase),
        "write": (rows, write),
        "db": (rows, erase),
        "dw": (rows, write),
    }
    x = draw(shapes, dtype)
    on_gpu = {name: t.to(device) for name, t in x.items()}
    b, w = gates.forward(on_gpu["erase"], on_gpu["write"], most)
    to = torch.zeros(rows, erase + write + 8, dtype=dtype, device=device)
    gates.backward(on_gpu["db"], b, on_gpu["dw"], w, most, to[:, 4:-4])
    slopes = [t.double().sigmoid() for t in (x["erase"], x["write"])]
    right = [x["db"].double() * most, x["dw"].double()]
    right = [d * s * (1 - s) for d, s in zip(right, slopes, strict=True)]
    return {
        "b": (b, most * slopes[0]),
        "w": (w, slopes[1]),
        "gradients": (to, pad(torch.cat(right, 1), (4, 4))),
    }


def check_table(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Places of chunks beside those found one by one: of many sequences with room left over, and of equal ones."""
    size, length = 64, 64 * (TABLE_BLOCK + 1) + 3
    lengths = [n % 200 for n in range(0, 37 * (TABLE_BLOCK + 2), 37)]
    starts, counts, first = chunks_of(lengths, size)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(device)
    packed = chunk_table(cu_seqlens, len(starts) + 2, size)[1:]
    dense = dense_table(3, length, size, device)[1:]
    right = [[*starts, 0, 0], [*counts, 0, 0], first, *chunks_of([length] * 3, size)]
    wrong = [found.cpu() != torch.tensor(x) for found, x in zip(packed + dense, right, strict=True)]
    names = (f"{kind} {name}" for kind in ("packed", "dense") for name in Table._fields[1:])
    # each counts
    return {n: (1.0 + w, torch.ones(w.shape)) for n, w in zip(names, wrong, strict=True)}


def chunks_of(lengths: Sequence[int], size: int) -> tuple[list[int], list[int], list[int]]:
    """First token and tokens of each chunk, and first chunk of each sequence."""
    starts, counts, first, start = [], [], [0], 0
    for length in lengths:
        starts += [start + i for i in range(0, length, size)]
        counts += [min(size, length - i) for i in range(0, length, size)]
        first.append(len(starts))
        start += length
    return starts, counts, first


def check_cross_entropy(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Losses and their gradients, of a vocabulary that takes several steps and one token that does not count."""
    (logits,) = draw({"logits": (5, 2 * BLOCK + 3)}, torch.float32).values()
    logits, targets = 5 * logits, torch.tensor([0, 7, -100, BLOCK, 2 * BLOCK + 2])
    losses, d_logits = cross_entropy(logits.to(device), targets.to(device), -100, dtype)
    right = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(right, targets, reduction="none")
    (d_right,) = torch.autograd.grad(expected.sum(), right)
    times = scaled(logits.to(device), torch.tensor(SCALE, device=device), dtype)
    found = {"losses": (losses, expected.detach()), "d_logits": (d_logits, d_right)}
    return found | {"times a number": (times, SCALE * logits.double())}


def check_adamw(device: torch.device, dtype: torch.dtype) -> Pairs:
    """A step of tensors with step counts of their own, one that is not taken, and one of weights in fp32."""
    kinds, sizes = ("p", "g", "m", "v"), (3, ADAMW_BLOCK, ADAMW_BLOCK + 5)
    found: Pairs = {}
    for name, skip, wide in (
        ("", 0.0, dtype),
        (", not taken", 1.0, dtype),
        (", weights in fp32", 0.0, torch.float32),
    ):
        drawn = [draw(dict.fromkeys(kinds, (size,)), dtype) for size in sizes]
        rows = [{n: x if n == "g" else x.to(wide) for n, x in row.items()} for row in drawn]
        for i, row in enumerate(rows):
            row |= {"v": row["v"].square(), "step": torch.tensor(10.0 * i)}
        given = [{n: x.to(device, copy=True) for n, x in row.items()} for row in rows]
        columns = [[row[n] for row in given] for n in (*kinds, "step")]
        scale, found_inf = (torch.tensor(x, device=device) for x in (SCALE, skip))
        adamw(*columns, **ADAMW, grad_scale=scale, found_inf=found_inf)
        right = rows if skip else [adamw_step(**row) for row in rows]
        for i, (row, expected) in enumerate(zip(given, right, strict=True)):
            found |= {
                f"{n}, {sizes[i]}{name}": (row[n], expected[n]) for n in ("p", "m", "v", "step")
            }
    return found


def adamw_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> dict[str, Tensor]:
    """The same by torch's optimiser in fp64."""
    p = p.double().requires_grad_()
    p.grad = g.double() / SCALE
    optimiser = torch.optim.AdamW([p], **ADAMW, foreach=False)
    state = {"exp_avg": m.double(), "exp_avg_sq": v.double(), "step": step.clone()}
    optimiser.state[p] = state
    optimiser.step()
    return {"p": p.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"], "step": state["step"]}


def draw(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Seeded operands on the CPU, rounded to the dtype."""
    rand = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=rand).to(dtype) for n, shape in shapes.items()}


def compare(
    kernel: Call,
    twin: Call,
    operands: dict[str, Tensor],
    outputs: Sequence[str],
    device: torch.device,
) -> Pairs:
    """What a kernel on the device and its twin in fp64 give: outputs, and the gradients of all operands."""
    actual = differentiate(kernel, {n: t.to(device) for n, t in operands.items()})
    right = differentiate(twin, {n: t.double() for n, t in operands.items()})
    names = (*outputs, *(f"d{n}" for n in operands))
    return dict(zip(names, zip(actual, right, strict=True), strict=True))


def differentiate(call: Call, operands: dict[str, Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of a random loss of them."""
    leaves = {n: t.detach().requires_grad_() for n, t in operands.items()}
    outputs = call(**leaves)
    grads = torch.autograd.grad(outputs, list(leaves.values()), loss_weights(*outputs))
    return [*outputs, *grads]
