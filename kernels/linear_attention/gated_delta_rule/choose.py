"""The table of backends of the gated delta rule; what it shares with KDA's is in ../table.py.

On Hopper there is none that was measured to be faster than the library's.
"""

from __future__ import annotations

import torch

from ....decline import Reason
from ....selfcheck import Standing
from ... import backends
from ...backends import Backend
from .. import table
from ..problem import Call, Problem

OP = "gated_delta_rule"
REFERENCE = table.REFERENCE
BACKENDS: tuple[Backend, ...] = (table.frost(OP), REFERENCE)
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
