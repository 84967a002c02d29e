"""The table of backends of the gated delta rule; what it shares with KDA's is in ../table.py.

On Hopper, FlashQLA's kernels serve where they are named: through this package no GPU has run them yet.
"""

from __future__ import annotations

import torch

from ....decline import Reason, Route
from ....selfcheck import Standing
from ... import backends
from .. import flash_qla, table
from ..problem import Call, Problem
from ..table import Backend

OP = "gated_delta_rule"
REFERENCE = table.REFERENCE
BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="flash_qla",
        module="fusepatch.kernels.linear_attention.flash_qla",
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        routes=frozenset({Route.FUSED}),
        named_only=True,
        packages=("triton", "flash_qla", "tilelang"),
        drift=flash_qla.drift,
        why_not=flash_qla.why_not,
        why_not_size=flash_qla.why_not_size,
        capabilities=frozenset({(9, 0), (10, 0), (10, 3)}),
        admits=table.not_measured,
        compiled=lambda problem, tokens: flash_qla.is_compiled(problem),
        check=table.CHECK,
    ),
    table.frost(OP),
    REFERENCE,
)
"""In order of preference where none is named."""

_CALL = Call(128**-0.5, l2norm=True, gate="softplus", beta_sigmoid=True)
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
