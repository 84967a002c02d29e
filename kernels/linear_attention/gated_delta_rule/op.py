"""The gated delta rule as a differentiable op: `gated_delta_rule`."""

from __future__ import annotations

from torch import Tensor

from .. import arguments, dispatch
from . import choose


def gated_delta_rule(
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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with one decay per head: `S = exp(g) S`, `S += k (beta (v - S^T k))^T`, `o = S^T scale q`.

    q, k [B, T, H, K]; v [B, T, G, V] with G a multiple of H; g, beta [B, T, G], g the log of the decay; q, k and v of
    one floating dtype. `use_gate_in_kernel` makes the gate of g: `-exp(A_log) softplus(g + dt_bias)`, each of G
    elements. The rest is as in `kda`.

    Returns the output [B, T, G, V] in v's dtype, and the final states where `output_final_state`, else None. Raises
    ValueError for arguments that do not fit each other. Sources: arXiv 2412.06464; names and conventions are those of
    `fla.ops.gated_delta_rule.chunk_gated_delta_rule` of flash-linear-attention 0.6.0.
    """
    found = arguments.read(
        False, q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    return dispatch.run(choose.choose, choose.REFERENCE, found, output_final_state)
