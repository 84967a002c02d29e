"""Kimi Delta Attention as a differentiable op: `kda`."""

from __future__ import annotations

from torch import Tensor

from .. import arguments, dispatch
from . import choose


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule, a decay per channel: `S = diag(exp(g)) S`, `S += k (beta (v - S^T k))^T`, `o = S^T (scale q)`.

    q, k [B, T, H, K]; v [B, T, G, V] with G a multiple of H; g [B, T, G, K], the log of the decay; beta [B, T, G];
    q, k and v of one floating dtype. `scale` is 1 / sqrt(K) where None. `initial_state` [N, G, K, V] (or [N, G, V, K]
    where `state_v_first`), in fp32, and fp64 beside fp64; N is B, or the number of sequences into which `cu_seqlens`
    [N + 1] cuts the tokens of a batch of 1.

    `use_qk_l2norm_in_kernel` divides q and k by their lengths first. `use_gate_in_kernel` makes the gate of g:
    `-exp(A_log) softplus(g + dt_bias)`, or `lower_bound sigmoid(exp(A_log) (g + dt_bias))` where that is given; A_log
    has G elements, dt_bias G * K. `safe_gate` promises a gate in [-5, 0), or asks for a `lower_bound` there.
    `use_beta_sigmoid_in_kernel` takes the sigmoid of beta, and twice that where `allow_neg_eigval`.

    Returns the output [B, T, G, V] in v's dtype, and the final states where `output_final_state`, else None. Raises
    ValueError for arguments that do not fit each other. Sources: arXiv 2510.26692; names and conventions are those of
    `fla.ops.kda.chunk_kda` of flash-linear-attention 0.6.0.
    """
    found = arguments.read(
        True, q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate,
        lower_bound=lower_bound, state_v_first=state_v_first, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    return dispatch.run(choose.choose, choose.REFERENCE, found, output_final_state)
