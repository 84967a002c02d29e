"""KDA and the gated delta rule on Blackwell data-centre GPUs (SM100, SM103): cuDNN's FROST kernels, both passes.

cuDNN's operators `kimi_delta_attention` and `gated_delta_net` (nvidia-cudnn-frontend 1.32.0) take raw q, k, g and beta:
the L2 norm, the gate and the sigmoid of beta are done in their kernels, and their autograd formulas give the gradients
of the raw inputs. The plan is pinned, so that no other engine of cuDNN's serves a call.

**What the kernels are right for**, read from their sources: KDA's scale a tile of 16 tokens by 1 / exp(sum of g), so
the gate must be at least -5 and |k| at most 1, as on Hopper (cudnn_hopper.py). Those of the gated delta rule cut a
sequence where its gates have decayed, which is right where no step makes a state larger: for |k| <= 1 and beta in
[0, 2]. Where beta is not promised to lie there, `batch_invariant` keeps a sequence whole.

None of it has run on a GPU through this package.

Tensors: M = B T tokens, H heads of q and k, G value heads, K and V widths, N sequences; states [N, G, V, K] inside.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ...decline import Reason
from .cudnn_hopper import DTYPES, SMALLEST_GATE
from .problem import Call, Inputs, Problem

WIDTHS = (64, 128)
FUNCTIONS = {"kda": ("kimi_delta_attention", "kda_frost"), "gated_delta_rule": ("gated_delta_net", "gdn_frost")}
"""cuDNN's name for each op, and for the plan."""
_ARGUMENTS = frozenset(
    {"q", "k", "v", "g", "beta", "cu_seqlens", "scale", "initial_state", "output_final_state", "a_log", "dt_bias"}
    | {"use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "batch_invariant"}
    | {"plan_name"}
)


def why_not(problem: Problem, op: str) -> Reason | None:
    """Why neither pass may run for this problem, if so. Imports cuDNN's frontend where all else fits."""
    call = problem.call
    if problem.key_width not in WIDTHS or problem.value_width not in WIDTHS:
        return Reason.HEAD_SIZE
    if not call.l2norm or (op == "kda" and not _gate_is_bounded(call)):
        return Reason.UNBOUNDED
    if any(dtype not in DTYPES for dtype in (problem.g_dtype, *filter(None, problem.parameter_dtypes))):
        return Reason.DTYPE
    return why_no_library(op)


def _gate_is_bounded(call: Call) -> bool:
    if call.gate == "bounded":
        return SMALLEST_GATE <= call.lower_bound <= 0
    return call.gate == "given" and call.safe_gate


@functools.cache
def why_no_library(op: str) -> Reason | None:
    """Why cuDNN's operator can't be had here: not installed, or with another interface."""
    try:
        function = _function(op)
    except ImportError:
        return Reason.MISSING_PACKAGE
    except AttributeError:
        return Reason.PACKAGE_DIFFERS
    names = inspect.signature(function).parameters.keys()
    needed = _ARGUMENTS | ({"gate_lower_bound"} if op == "kda" else set())
    return None if needed <= names else Reason.PACKAGE_DIFFERS


@functools.cache
def _function(op: str) -> Any:
    return getattr(importlib.import_module("cudnn.linear_attention.ops"), FUNCTIONS[op][0])


def not_supported() -> tuple[type[Exception], ...]:
    """What cuDNN raises for what it does not support. Any other exception is an error."""
    return NotImplementedError, importlib.import_module("cudnn").cudnnGraphNotSupportedError


def run(call: Call, inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The output [B, T, G, V], and the final states where they are wanted. The call was found fit by `why_not`."""
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens = inputs
    batch, length, value_heads, width = v.shape
    op = "kda" if g.dim() == 4 else "gated_delta_rule"
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=v.device)
    options: dict[str, Any] = {}
    if call.gate != "given":
        per_head = (value_heads, -1) if op == "kda" else (value_heads,)
        options = {
            "safe_gate": True,
            "a_log": None if A_log is None else A_log.reshape(-1),
            "dt_bias": None if dt_bias is None else dt_bias.reshape(per_head),
            **({"gate_lower_bound": call.lower_bound} if op == "kda" else {}),
        }
    state = None if initial_state is None else _inside(call, initial_state.float()).contiguous()
    out, final_state = _function(op)(
        *(_tokens(t) for t in (q, k, v, g)),
        _tokens(beta if beta.dtype in (torch.float32, v.dtype) else beta.float()),
        cu_seqlens.to(torch.int32).contiguous(),
        scale=call.scale,
        initial_state=state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=call.beta_sigmoid,
        allow_neg_eigval=call.negative_eigenvalues,
        batch_invariant=op == "gated_delta_rule" and not call.beta_sigmoid,
        plan_name=FUNCTIONS[op][1],
        **options,
    )
    out = out.view(batch, length, value_heads, width)
    return out, _inside(call, final_state).contiguous() if output_final_state else None


def _tokens(t: Tensor) -> Tensor:
    """`t [B, T, ...]` as [M, ...], contiguous."""
    return t.reshape(-1, *t.shape[2:]).contiguous()


def _inside(call: Call, state: Tensor) -> Tensor:
    """From the call's layout of states to cuDNN's, or back: the one or the other is transposed, or neither."""
    return state if call.state_v_first else state.transpose(-1, -2)
