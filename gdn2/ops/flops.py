"""FLOP formulas of the operator: matrix products over dense C × C tiles, two operations per multiply-add.

`torch.utils.flop_counter.FlopCounterMode` counts the operator by them. They are those of the WY form, which the kernels
run; the torch backend needs no Y and U and does about a tenth less. The backward counts what it recomputes.
"""


def rule_flops(key_width: int, value_width: int, chunk: int, erases: bool) -> float:
    """Forward, per token and key-side head; `value_width` counts all value heads it serves."""
    KV, CK, CV = key_width * value_width, chunk * key_width, chunk * value_width
    flops: float = 4 * KV + 2 * CK + 2 * CV  # Q_γ S, K_tailᵀ R; A_qk; A_qk R
    if erases:
        flops += 2 * KV + 4 * CK + 2 * CV + chunk * chunk / 3  # Y S; T, Y; U; the inverse
    return flops


def rule_backward_flops(
    key_width: int, value_width: int, chunk: int, erases: bool, recompute: bool
) -> float:
    """Backward, per token and key-side head."""
    KV, CK, CV = key_width * value_width, chunk * key_width, chunk * value_width
    # dR, dS₀, dQ_γ, dK_tail; dA_qk to rows and columns; dR, dA_qk
    flops: float = 8 * KV + 4 * CK + 4 * CV
    if erases:
        flops += 4 * KV + 4 * CK + 4 * CV  # dS₀, dĒ; dT to rows and columns; dZ, dT
        flops += 2 * KV + 2 * CK + 2 * CV  # again Y S; Y; U
    if recompute:
        # again the scores and the inverse
        flops += 4 * CK + chunk * chunk / 3 if erases else 2 * CK
    return flops
