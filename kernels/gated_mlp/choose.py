"""The table of backends of the gated MLP, and which one serves a call; the rules are those of kernels/backends.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...decline import Reason, Route
from ...selfcheck import Standing
from .. import backends

OP = "gated_mlp"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class Problem(NamedTuple):
    """One call as a kernel sees it: `x [tokens, hidden]`, `Wg, Wu [inner, hidden]`, `Wd [hidden, inner]`.

    `hidden` is 0 where only the pointwise op is called, and `inner` where a module's projections have not run yet.
    """

    route: Route
    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    activation: str
    bias: bool
    """Of gate and up; the pointwise route never sees one."""
    packed: bool = False
    """Whether gate and up are in one weight, and so in one tensor between the projections."""
    down_bias: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend(backends.Backend):
    """Besides what every backend says of itself."""

    fused_bias: bool
    """Whether the fused route takes biases."""
    packed: bool = True
    """Whether the fused route takes gate and up in one weight."""
    activations: tuple[str, ...] = ACTIVATIONS
    whole: bool = False
    """Its module has the whole op, an autograd function of its own, in place of the two fused kernels: as `gated_mlp`
    in cudnn.py. It takes dense rows and no bias at all."""
    fewest_compiled: Callable[[Problem], int | None] = field(default=lambda problem: None)
    """The fewest tokens at which it was measured to win inside `torch.compile` against the library's code there; None
    where it was not. Not asked where the user named the backend."""
    compile_ahead: Callable[[torch.device, torch.dtype, str, bool], None] = field(default=lambda *case: None)
    """Compiles, side by side, what a self-check of this (device, dtype, activation, biased) is about to launch."""
    products: str | None = None
    """The module of the products that follow the backward kernel, where some are faster than cuBLAS's: `dx`,
    `d_weights` and `d_down`, with None in place of a result where they are not."""


def _pointwise_wins(problem: Problem, tokens: int) -> bool:
    """Whether the GPU is busy for longer than the host takes to launch: below that, more Python is a slower step.

    H200, whole LlamaMLP in bf16, pointwise over eager: 0.98 to 0.95 forward and 0.99 to 0.96 forward + backward from
    (4096, 2048, 8192) up, 1.11 at half of that, 2.0 at (8192, 1024, 3072), where the host bounds both.
    """
    return tokens >= _FEWEST_POINTWISE and tokens * problem.inner >= 2**25 and problem.hidden >= 1024


_FEWEST_POINTWISE = 512
"""So that a call with fewer can be told at once: 2^25 elements with I 65536, and none larger was measured."""


_FUSED_WINS: dict[tuple[int, int], int] = {
    (896, 4864): 8192,
    (1024, 3072): 16384,
    (1536, 8960): 8192,
    (2048, 5632): 8192,
    (2048, 6144): 8192,
    (2048, 8192): 2048,
    (2560, 9728): 2048,
    (3072, 8192): 2048,
    (3584, 18944): 2048,
    (4096, 11008): 2048,
    (4096, 12288): 2048,
    (4096, 14336): 1024,
    (5120, 17408): 1024,
    (8192, 28672): 2048,
}
"""(hidden, inner) to the fewest tokens at which the Hopper kernels won, forward and forward + backward.

H200, bf16, SiLU, fusepatch against HF eager, by `python -m benchmarks gated_mlp`: 0.76 to 0.96 of a training step
(docs/performance.md has each). With fewer tokens it lost (where the host bounds both), won by less than it varies, or
was not tried. The forward pass alone won with fewer too, but grad mode must not pick the route.
"""
_ALSO_WINS: dict[tuple[torch.dtype, str], dict[tuple[int, int], int]] = {
    (torch.float16, "silu"): {(1024, 3072): 16384, (2048, 8192): 8192, (4096, 14336): 8192, (5120, 17408): 8192},
    (torch.bfloat16, "gelu_tanh"): {(1024, 3072): 16384, (2048, 8192): 8192},
}
"""The same for other dtypes and activations: 0.78 to 0.94 of a training step. Elsewhere these were not measured."""


def _fused_wins(problem: Problem, tokens: int) -> bool:
    """Whether this was measured, and won. What was not measured declines."""
    kind = problem.dtype, problem.activation
    measured = _FUSED_WINS if kind == (torch.bfloat16, "silu") else _ALSO_WINS.get(kind, {})
    fewest = None if problem.bias else measured.get((problem.hidden, problem.inner))
    return fewest is not None and tokens >= fewest


_FUSED_WINS_COMPILED: dict[tuple[int, int], int] = {
    (1024, 3072): 16384,
    (2048, 8192): 8192,
    (4096, 11008): 4099,
    (4096, 14336): 8192,
    (5120, 17408): 8192,
}
"""As _FUSED_WINS, with both sides compiled: 0.87 to 0.97 of a training step, by the same command with the arms compile
and compile_fusepatch_hopper. Nothing else was tried.
"""


def _fewest_compiled(problem: Problem) -> int | None:
    if problem.bias or (problem.dtype, problem.activation) != (torch.bfloat16, "silu"):
        return None
    return _FUSED_WINS_COMPILED.get((problem.hidden, problem.inner))


def _is_compiled(problem: Problem, tokens: int) -> bool:
    pointwise = importlib.import_module("fusepatch.kernels.gated_mlp.pointwise")
    kind = problem.device, problem.dtype, problem.activation
    return bool(pointwise.is_compiled(*kind, tokens, problem.inner, problem.packed))


def _hopper() -> Any:
    return importlib.import_module("fusepatch.kernels.gated_mlp.hopper")


def _hopper_is_compiled(problem: Problem, tokens: int) -> bool:
    return bool(_hopper().is_compiled(problem, tokens))


def _blackwell_is_compiled(problem: Problem, tokens: int) -> bool:
    blackwell = importlib.import_module("fusepatch.kernels.gated_mlp.blackwell")
    return bool(blackwell.is_compiled(problem, tokens))


def _cudnn_wins(problem: Problem, tokens: int) -> bool:
    """What NVIDIA published, for B200: the README of cudnn-frontend 1.32, with cuDNN 9.26, at 8192 tokens of this size.

    Not on (10, 3), for which nothing was published, nor on (9, 0), where it runs: there it serves where it is named.
    """
    cudnn = importlib.import_module("fusepatch.kernels.gated_mlp.cudnn")
    is_b200 = torch.cuda.get_device_capability(problem.device) == (10, 0)
    is_published = (problem.hidden, problem.inner) == (5120, 17408) and tokens >= 8192
    return is_b200 and is_published and bool(cudnn.is_as_published())


def _cudnn_drift() -> tuple[str, ...]:
    cudnn = importlib.import_module("fusepatch.kernels.gated_mlp.cudnn")
    found: tuple[str, ...] = cudnn.drift()
    return found


def _cudnn_why_not(problem: Problem) -> Reason | None:
    cudnn = importlib.import_module("fusepatch.kernels.gated_mlp.cudnn")
    reason: Reason | None = cudnn.why_not()
    return reason


def _never(problem: Problem, tokens: int) -> bool:
    """It has won nowhere."""
    return False


def _triton_gemm_is_compiled(problem: Problem, tokens: int) -> bool:
    dual_gemm = importlib.import_module("fusepatch.kernels.gated_mlp.dual_gemm")
    return bool(dual_gemm.is_compiled(problem, tokens))


_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="triton",
        module="fusepatch.kernels.gated_mlp.pointwise",
        routes=frozenset({Route.POINTWISE}),
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        fused_bias=False,
        packages=("triton",),
        check="fusepatch.kernels.gated_mlp.check",
        admits=_pointwise_wins,
        fewest_tokens=_FEWEST_POINTWISE,
        compiled=_is_compiled,
    ),
    Backend(
        name="hopper",
        module="fusepatch.kernels.gated_mlp.hopper",
        routes=frozenset({Route.FUSED}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        fused_bias=True,
        packages=("cutlass", "tvm_ffi"),
        capabilities=frozenset({(9, 0)}),
        width_multiple=8,
        byte_alignment=16,
        check="fusepatch.kernels.gated_mlp.check",
        admits=_fused_wins,
        fewest_tokens=min(_FUSED_WINS.values()),
        fewest_compiled=_fewest_compiled,
        products="fusepatch.kernels.gated_mlp.hopper_products",
        compiled=_hopper_is_compiled,
        compile_ahead=lambda *case: _hopper().compile_ahead(*case),
    ),
    # On Blackwell the first of the fused route that a GPU there can run.
    Backend(
        name="cudnn",
        module="fusepatch.kernels.gated_mlp.cudnn",
        routes=frozenset({Route.FUSED}),
        dtypes=frozenset({torch.bfloat16}),
        fused_bias=False,
        packed=False,
        activations=("silu",),
        whole=True,
        packages=("cudnn",),
        drift=_cudnn_drift,
        why_not=_cudnn_why_not,
        capabilities=frozenset({(9, 0), (10, 0), (10, 3)}),
        width_multiple=8,
        byte_alignment=32,
        check="fusepatch.kernels.gated_mlp.check",
        admits=_cudnn_wins,
        fewest_tokens=8192,
        # It has not been timed through this package.
        named_only=True,
        warmed_only=True,
        compiled=lambda problem, tokens: False,  # it stops the device where a size or a stream is new to it
        note="cudnn saves gate, up and h for the backward pass: 3*M*I elements for M tokens and intermediate size I, "
        "where fusepatch's own kernels save 2*M*I",
    ),
    Backend(
        name="triton_gemm",
        module="fusepatch.kernels.gated_mlp.dual_gemm",
        routes=frozenset({Route.FUSED}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        fused_bias=True,
        packages=("triton",),
        width_multiple=8,
        byte_alignment=16,
        check="fusepatch.kernels.gated_mlp.check",
        admits=_never,
        # Right on the H200, and slower than eager there: 1.10 of a training step at (16384, 1024, 3072), by
        # `python -m benchmarks gated_mlp`. On Blackwell, which it is for, it has not run.
        named_only=True,
        compiled=_triton_gemm_is_compiled,
    ),
    Backend(
        name="blackwell",
        module="fusepatch.kernels.gated_mlp.blackwell",
        routes=frozenset({Route.FUSED}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        fused_bias=False,
        packages=("cutlass", "tvm_ffi"),
        capabilities=frozenset({(10, 0), (10, 3)}),
        width_multiple=8,
        byte_alignment=16,
        check="fusepatch.kernels.gated_mlp.check",
        admits=_never,
        named_only=True,  # it has run on no GPU yet
        compiled=_blackwell_is_compiled,
        compile_ahead=lambda *case: importlib.import_module("fusepatch.kernels.gated_mlp.blackwell").compile_ahead(
            *case
        ),
    ),
    # The op itself takes biases on every route. The fused route declines them here, though the GPU's kernels take them,
    # so that the route taken in a rehearsal on a CPU is the one that a GPU takes by itself: no size is admitted yet.
    Backend(
        name="reference",
        module="fusepatch.kernels.gated_mlp.reference",
        routes=frozenset({Route.FUSED, Route.POINTWISE}),
        dtypes=_FLOATS,
        fused_bias=False,
        native=False,
    ),
)
"""In order of preference where none is named."""

REFERENCE = BACKENDS[-1]


def _hopper_with(choice: str, what: str, *, checked: bool) -> Backend:
    """Hopper with one of the choices of hopper_configuration.py; `checked` where it launches what the self-check of the
    backend does not, or for other sizes."""
    (own,) = (backend for backend in BACKENDS if backend.name == "hopper")
    return replace(
        own,
        choice=choice,
        note=f"hopper/{choice}: {what}, which `fusepatch tune` measured to be the fastest here",
        admits=lambda problem, tokens: _hopper().differs(problem, tokens, choice),
        compiled=lambda problem, tokens: _hopper().is_compiled(problem, tokens, choice),
        check=own.check if checked else None,
        compile_ahead=lambda *case: _hopper().compile_ahead(*case, choice),
    )


CHOICES: tuple[Backend, ...] = (
    _hopper_with("small-groups", "tiles in smaller groups, whose operands take less of L2", checked=True),
    _hopper_with("large-groups", "tiles in larger groups, which read the weights less often", checked=True),
    _hopper_with("swapped-backward", "the backward kernel for a long sum at a short one, or the reverse", checked=True),
    _hopper_with("own-products", "all products of the backward pass by kernels of fusepatch", checked=False),
    _hopper_with("cublas-products", "all products of the backward pass by cuBLAS", checked=False),
)
"""What `fusepatch tune` tries of the backend that won, in this order."""


def labelled(label: str) -> Backend:
    """The backend, or the choice, of that label. Raises LookupError where there is none."""
    found = backends.labelled((*BACKENDS, *CHOICES), label)
    if found is None:
        raise LookupError(label)
    return found


def _unfit(backend: Backend, problem: Problem) -> Reason | None:
    if problem.activation not in backend.activations:
        return Reason.ACTIVATION
    if problem.route is Route.FUSED:
        if (problem.bias and not backend.fused_bias) or (problem.down_bias and backend.whole):
            return Reason.BIAS
        if problem.packed and not backend.packed:
            return Reason.PACKED_WEIGHT
    return None


def _widths(problem: Problem) -> tuple[int, ...]:
    return (problem.hidden, problem.inner) if problem.route is Route.FUSED else (problem.inner,)


def _case(backend: Backend, problem: Problem) -> str:
    biased = " biased" if problem.bias else ""
    return f"{problem.route.value} {str(problem.dtype).removeprefix('torch.')} {problem.activation}{biased}"


def _samples(backend: Backend, route: Route, device: torch.device) -> list[Problem]:
    width = 1024 * backend.width_multiple
    biases = (False, True) if backend.fused_bias and route is Route.FUSED else (False,)
    return [
        Problem(route, device, dtype, width, width, activation, bias)
        for dtype in sorted(backend.dtypes, key=str)
        for activation in backend.activations
        for bias in biases
    ]


TABLE: backends.Table[Problem, Backend] = backends.Table(
    OP,
    lambda: BACKENDS,
    choices=lambda: CHOICES,
    widths=_widths,
    case=_case,
    samples=_samples,
    unfit=_unfit,
)


def choose(problem: Problem, tokens: int, *tensors: Tensor, any_size: bool = False) -> Backend | Reason:
    """The backend that serves `problem` for this many tokens, or why there is none: backends.choose."""
    found = backends.choose(TABLE, problem, tokens, tensors, any_size)
    if isinstance(found, Backend) and found.whole and not all(tensor.is_contiguous() for tensor in tensors):
        return Reason.STRIDES
    return found


def is_too_few(tokens: int, device: torch.device) -> bool:
    """Whether nothing serves so few tokens, whatever the problem: backends.is_too_few."""
    return backends.is_too_few(TABLE, tokens, device)


def for_op(problem: Problem, tokens: int, *tensors: Tensor) -> Backend:
    """As `choose`, for a direct call of the op, which has no library's code to decline to: plain PyTorch serves it."""
    found = choose(problem, tokens, *tensors, any_size=True)
    return found if isinstance(found, Backend) else REFERENCE


def admit(backend: Backend, problem: Problem, tokens: int) -> None:
    """Notes that `warmup()` ran this: backends.admit."""
    backends.admit(TABLE, backend, problem, tokens)


def survey(device: torch.device) -> tuple[Standing, ...]:
    """What the table says of every backend and route on `device`; no self-check is run."""
    return backends.survey(TABLE, device)
