"""The table of backends of KDA; what it shares with the gated delta rule's is in ../table.py."""

from __future__ import annotations

import torch

from ....decline import Reason, Route
from ....selfcheck import Standing
from ... import backends
from .. import cudnn_hopper, table
from ..problem import Call, Problem
from ..table import Backend

OP = "kda"
REFERENCE = table.REFERENCE
BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="cudnn_hopper",
        module="fusepatch.kernels.linear_attention.cudnn_hopper",
        dtypes=frozenset({torch.bfloat16}),
        routes=frozenset({Route.FUSED}),
        # On an H200 the gradients of dt_bias, A_log, g and the initial state were beyond parity with FLA's: the
        # kernel's own roundings, which nothing of ours can undo (cudnn_hopper.py). Whoever names it takes them.
        named_only=True,
        packages=("fla", "triton", "cudnn", "cuda"),
        drift=cudnn_hopper.drift,
        why_not=cudnn_hopper.why_not,
        why_not_size=cudnn_hopper.why_not_size,
        capabilities=frozenset({(9, 0)}),
        admits=table.not_measured,
        compiled=lambda problem, tokens: cudnn_hopper.is_compiled(problem),
        note="cudnn_hopper's gradients of dt_bias, A_log, the gate and the initial state are less exact than the "
        "library's, beyond parity",
        check=table.CHECK,
    ),
    table.frost(OP),
    REFERENCE,
)
"""In order of preference where none is named."""

_CALL = Call(128**-0.5, l2norm=True, gate="bounded", lower_bound=-5.0, beta_sigmoid=True, safe_gate=True)
TABLE = table.table_of(OP, lambda: BACKENDS, _CALL)


def choose(problem: Problem, tokens: int, sequences: int, *, any_size: bool = False) -> Backend | Reason:
    """The backend that serves `problem` for this many tokens and sequences, or why there is none."""
    return table.choose(TABLE, problem, tokens, sequences, any_size)


def sample(device: torch.device, dtype: torch.dtype) -> Problem:
    """A problem that fits every backend there is, in training."""
    return table.sample(_CALL, device, dtype)


def survey(device: torch.device) -> tuple[Standing, ...]:
    """What the table says of every backend on `device`; no self-check is run."""
    return backends.survey(TABLE, device)
