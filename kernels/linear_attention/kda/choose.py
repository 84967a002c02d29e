"""The table of backends of KDA, and which one serves a call; the rules are those of kernels/backends.py."""

from __future__ import annotations

import torch

from ....decline import Reason, Route
from ....selfcheck import Standing
from ... import backends
from ...backends import Backend
from .. import cudnn_frost, cudnn_hopper
from ..problem import Call, Problem

OP = "kda"
_CHECK = "fusepatch.kernels.linear_attention.check"


def _not_measured(problem: Problem, tokens: int) -> bool:
    """No size is admitted: through the library's layers, the kernels have been measured on no GPU."""
    return False


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
        capabilities=frozenset({(9, 0)}),
        admits=_not_measured,
        compiled=lambda problem, tokens: cudnn_hopper.is_compiled(problem),
        note="cudnn_hopper's gradients of dt_bias, A_log, the gate and the initial state are less exact than the "
        "library's, beyond parity",
        check=_CHECK,
    ),
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
"""In order of preference where none is named."""

REFERENCE = BACKENDS[-1]


def _case(backend: Backend, problem: Problem) -> str:
    return f"{OP} {str(problem.dtype).removeprefix('torch.')}"


def _samples(backend: Backend, route: Route, device: torch.device) -> list[Problem]:
    call = Call(128**-0.5, l2norm=True, gate="bounded", lower_bound=-5.0, beta_sigmoid=True, safe_gate=True)
    parameters = (torch.float32, torch.float32)
    return [
        Problem(device, dtype, 16, 16, 128, 128, True, call, dtype, dtype, parameters)
        for dtype in sorted(backend.dtypes, key=str)
    ]


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
