"""The table of backends of the gated delta rule, and which one serves a call; see kernels/backends.py for the rules.

On Hopper there is none that was measured to be faster than the library's.
"""

from __future__ import annotations

import torch

from ....decline import Reason, Route
from ....selfcheck import Standing
from ... import backends
from ...backends import Backend
from .. import cudnn_frost, cudnn_hopper
from ..problem import Call, Problem

OP = "gated_delta_rule"
_CHECK = "fusepatch.kernels.linear_attention.check"


def _not_measured(problem: Problem, tokens: int) -> bool:
    """No size is admitted: the kernels have run on no GPU yet, so none was measured to win."""
    return False


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="cudnn_frost",
        module="fusepatch.kernels.linear_attention.cudnn_frost",
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        routes=frozenset({Route.FUSED}),
        named_only=True,
        packages=("cudnn", "cutlass"),
        why_not=lambda problem: cudnn_frost.why_not(problem, OP),
        capabilities=frozenset({(10, 0), (10, 3)}),
        admits=_not_measured,
        compiled=lambda problem, tokens: False,
        check=_CHECK,
    ),
    Backend(
        name="reference",
        module="fusepatch.kernels.linear_attention.reference",
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
        routes=frozenset({Route.FUSED}),
        native=False,
    ),
)

REFERENCE = BACKENDS[-1]


def _samples(backend: Backend, route: Route, device: torch.device) -> list[Problem]:
    call = Call(128**-0.5, l2norm=True, gate="softplus", beta_sigmoid=True)
    parameters = (torch.float32, torch.float32)
    return [
        Problem(device, dtype, 16, 16, 128, 128, True, call, dtype, dtype, parameters)
        for dtype in sorted(backend.dtypes, key=str)
    ]


def _case(backend: Backend, problem: Problem) -> str:
    return f"{OP} {str(problem.dtype).removeprefix('torch.')}"


_TABLE: backends.Table[Problem, Backend] = backends.Table(
    OP, lambda: BACKENDS, widths=lambda problem: (), case=_case, samples=_samples
)


def choose(problem: Problem, tokens: int, sequences: int, *, any_size: bool = False) -> Backend | Reason:
    """The backend that serves `problem` for this many tokens and sequences, or why there is none: backends.choose."""
    found = backends.choose(_TABLE, problem, tokens, (), any_size)
    if isinstance(found, Backend) and found is not REFERENCE:
        return cudnn_hopper.why_not_size(problem, sequences) or found
    return found


def survey(device: torch.device) -> tuple[Standing, ...]:
    """What the table says of every backend on `device`; no self-check is run."""
    return backends.survey(_TABLE, device)


def forget() -> None:
    """Drops what was worked out so far, for tests that change the table of backends."""
    _TABLE.known.clear()
