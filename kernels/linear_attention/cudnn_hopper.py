"""Training with KDA on Hopper (SM90): FLA's own forward pass, and a backward pass of cuDNN's kernels and ours.

The forward pass is the library's, bit for bit: cuDNN's own was measured to be slower. cuDNN's backward kernels need
nothing of it but the inputs: q and k of unit length, beta past its sigmoid, the gate past its formula in fp32, and as
many heads of q and k as of v. prepare.py makes these from what a call passes, and the gradients of the raw inputs from
cuDNN's. So nothing but the inputs is kept between the passes.

cuDNN's own function `hopper.cuda_bwd_host.launch` is called directly: its operator spends more time on the host than
the kernels take on the device, and keeps a plan for every number of tokens.

**What the kernels are right for**, read from their source in nvidia-cudnn-frontend 1.32.0: `kda_bwd_sm90.cu` scales the
rows of a block of 16 tokens by 1 / exp(sum of g over the rows before), which leaves fp32 where the sum is below -87. A
gate of at least -5 keeps it at -75. And cuDNN states the kernel for |k| <= 1 and beta in (0, 1). A call that does not
promise these is declined (`why_not`): no look at the numbers could decide it without waiting for the device. (The
forward kernel, `kda_fused_sm90.cu`, would ask for more: it starts the pieces of a sequence from a zero state, on a
bound that does not hold for a gate per channel, as cuDNN's frost/common/split_k.py says.)

**What it is less exact in than FLA**: the gradients of A_log and of dt_bias, several times where gates decay within a
few tokens, and those of the gate and of the initial state. Within a chunk of 64 tokens, what a pair of tokens adds to
the gradient of an earlier one's gate comes once as q dq and once as -k dk, and cancels. cuDNN's kernel rounds the
operands of either to bf16, each by itself, where FLA keeps fp32 and multiplies in TF32 or better; what does not cancel
stands in the gradients of all earlier tokens of the chunk, and dt_bias sums them. Our kernels round none of it: g and
its gradient are fp32 on the way in and out. compat_tests/numerics/test_cudnn_hopper_roundings.py shows it. So the
backend is beyond the parity that the others keep, and serves only where it is named.

Tensors: M = B T tokens, H heads of q and k, G value heads, K = V = 128, N sequences; states are [N, G, V, K] inside.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...decline import Reason
from .. import vendor_sources
from ..autograd import differentiable_once
from ..device import made_current
from . import layouts
from .layouts import dense
from .problem import Call, Inputs, Problem

WIDTH = 128
SMALLEST_GATE = -5.0
MOST_BLOCKS = 65535
"""Of a launch's second dimension: cuDNN's scan has one per sequence and head."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of g, beta, A_log and dt_bias, which our kernel reads."""


# ------------------------------------------------------------------------------------------------- what it can serve


def why_not(problem: Problem) -> Reason | None:
    """Why neither pass may run for this problem, if so; all that forward and backward need, but sizes.

    Architecture, dtype and packages are the table's to judge. Imports cuDNN's frontend where all else fits.
    """
    call = problem.call
    if not problem.trains:
        return Reason.NO_GRADIENT
    if (problem.key_width, problem.value_width) != (WIDTH, WIDTH):
        return Reason.HEAD_SIZE
    if call.scale != WIDTH**-0.5 or call.negative_eigenvalues:
        return Reason.OPTION
    if not (call.l2norm and call.beta_sigmoid and _gate_is_bounded(problem)):
        return Reason.UNBOUNDED
    if any(
        dtype not in DTYPES for dtype in (problem.g_dtype, problem.beta_dtype, *filter(None, problem.parameter_dtypes))
    ):
        return Reason.DTYPE
    return why_no_library()


def _gate_is_bounded(problem: Problem) -> bool:
    call = problem.call
    if call.gate == "bounded":
        return SMALLEST_GATE <= call.lower_bound <= 0
    return call.gate == "given" and call.safe_gate


def why_not_size(problem: Problem, tokens: int, sequences: int) -> Reason | None:
    """What depends on the number of sequences."""
    return Reason.INDEX_RANGE if sequences * problem.value_heads > MOST_BLOCKS else None


_KERNEL, _DIGEST = "kda_bwd_sm90.cu", "47ed19df7f6097838f5fa166bce90ec937a83c29c03828e5f16bb9c8fbb7ca58"
"""The source that the limits above were read from, and its SHA-256."""


@functools.cache
def drift() -> tuple[str, ...]:
    """Where the installed kernel is not the one whose limits were read, in words; nothing of cuDNN is imported."""
    path = vendor_sources.path_of("linear_attention", "hopper", "cuda_kernels", _KERNEL)
    return vendor_sources.why_not_as_read(_KERNEL, [path], _DIGEST)


class _Frontend(NamedTuple):
    """cuDNN's host code for the kernels."""

    launch: Callable[..., None]
    workspace_bytes: Callable[[int, int, int], int]
    load: Callable[[int], Any]
    """Compiles the kernels for a device, once."""


_TENSORS = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "d_final_state", "dO", "workspace")
_WRITTEN = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state")
_ARGUMENTS = frozenset({*_TENSORS, *_WRITTEN, "device", "stream", "total_tokens", "n_heads", "n_seqs"})


@functools.cache
def why_no_library() -> Reason | None:
    """Why cuDNN's kernels can't be had here: not installed, no CUDA headers to compile with, or another interface.

    The same conditions under which cuDNN's own engine says that it does not support a graph; whatever else goes wrong
    is raised.
    """
    try:
        host, compiler = _import("hopper.cuda_bwd_host"), _import("cake.compiler")
    except ImportError:
        return Reason.MISSING_PACKAGE
    try:
        fits = (
            takes(host.launch, _ARGUMENTS)
            and host.DH == WIDTH
            and callable(host.workspace_bytes)
            and callable(host.library)
        )
    except AttributeError:
        fits = False
    if not fits:
        return Reason.PACKAGE_DIFFERS
    try:
        compiler.cuda_include_dirs()
    except compiler.CakeCompileError:
        return Reason.MISSING_PACKAGE
    return None


def _import(name: str) -> ModuleType:
    return importlib.import_module(f"cudnn.linear_attention.{name}")


def takes(function: Any, names: frozenset[str]) -> bool:
    """Whether `function` takes exactly these arguments by name, and any others only if it likes."""
    parameters = inspect.signature(function).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return required <= names <= parameters.keys()


@functools.cache
def _frontend() -> _Frontend:
    host = _import("hopper.cuda_bwd_host")
    # A sum over fifteen buffers, which `launch` works out again in each call.
    return _Frontend(host.launch, functools.lru_cache(maxsize=64)(host.workspace_bytes), host.library)


def is_compiled(problem: Problem) -> bool:
    """Whether the backward pass is compiled for this kind of call, so that CUDA-graph capture may launch it."""
    return _kind(problem.device, problem.call, problem.heads, problem.value_heads, problem.dtype, problem.g_dtype,
                 problem.beta_dtype, problem.parameter_dtypes) in _compiled  # fmt: skip


_compiled: set[tuple[Any, ...]] = set()


def _kind(device: torch.device, call: Call, heads: int, value_heads: int, *dtypes: Any) -> tuple[Any, ...]:
    return (device.index, call.gate, heads, value_heads, *dtypes)


# ------------------------------------------------------------------------------------------------------------ the op


def run(call: Call, inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The output [B, T, G, V], and the final states where they are wanted. The call was found fit by `why_not`."""
    # Read here and not inside apply(), where grad mode is always off.
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        out, final_state = _Kda.apply(call, output_final_state, *inputs)  # type: ignore[no-untyped-call]
        return out, final_state
    return _forward(call, inputs, output_final_state)


@functools.cache
def _chunk_kda() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """FLA's function without its registry of backends, in which ours is the first."""
    found: Callable[..., tuple[Tensor, Tensor | None]] = inspect.unwrap(
        importlib.import_module("fla.ops.kda").chunk_kda
    )
    return found


def _forward(call: Call, inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    gate = call.gate != "given"
    parameters = {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias} if gate else {}
    with torch.no_grad():
        return _chunk_kda()(
            q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, scale=call.scale,
            initial_state=inputs.initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=call.l2norm, use_gate_in_kernel=gate,
            use_beta_sigmoid_in_kernel=call.beta_sigmoid, safe_gate=call.safe_gate,
            lower_bound=call.lower_bound if gate else None, state_v_first=call.state_v_first,
            cu_seqlens=inputs.cu_seqlens, **parameters,
        )  # fmt: skip


class _Kda(Function):
    """Inputs: call, whether the final state is wanted, and `Inputs`."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, output_final_state: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        compile_for(call, inputs)
        out, final_state = _forward(call, inputs, output_final_state)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return out, final_state

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Any, ...], grad_out: Tensor, grad_final_state: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        gradients = backward(ctx.call, Inputs(*saved), grad_out, grad_final_state)
        wanted = zip(gradients, ctx.needs_input_grad[2:-1], strict=True)
        return None, None, *(gradient if needs else None for gradient, needs in wanted), None


class _Flat(NamedTuple):
    """A call's tensors as the kernels read them."""

    v: Tensor
    """[M, G, V]."""
    g: Tensor
    """[M, G, K]; raw, as is beta [M, G]."""
    beta: Tensor
    A_log: Tensor | None
    """[G]."""
    dt_bias: Tensor | None
    """[G, K]."""
    state: Tensor | None
    """[N, G, V, K]: the initial one."""
    cu_seqlens: Tensor
    """int32."""


def _flat(call: Call, inputs: Inputs) -> _Flat:
    _, _, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens = inputs
    batch, length, value_heads, _ = v.shape
    return _Flat(
        dense(v).view(-1, value_heads, WIDTH),
        layouts.tokens(g),
        beta.reshape(-1, value_heads),
        None if A_log is None else A_log.reshape(-1).contiguous(),
        None if dt_bias is None else dt_bias.reshape(-1, WIDTH).contiguous(),
        None if initial_state is None else dense(_inside(call, initial_state)),
        _boundaries(batch, length, v.device) if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
    )


def compile_for(call: Call, inputs: Inputs) -> None:
    """Compiles the backward pass, once per kind of call: what that raises, a forward pass raises."""
    q, _, v, g, beta, A_log, dt_bias, *_ = inputs
    parameters = (None if A_log is None else A_log.dtype, None if dt_bias is None else dt_bias.dtype)
    kind = _kind(v.device, call, q.shape[2], v.shape[2], v.dtype, g.dtype, beta.dtype, parameters)
    if kind not in _compiled:
        with made_current(v.device):
            _frontend().load(_index(v.device))
            _prepare(call, inputs, _flat(call, inputs))  # compiles by running, and what comes after it too
        _compiled.add(kind)


@functools.cache
def _around() -> ModuleType:
    """Our kernels, whose module imports Triton."""
    from . import prepare

    return prepare


def _prepare(call: Call, inputs: Inputs, flat: _Flat) -> Any:
    q_MHK, k_MHK = layouts.tokens(inputs.q), layouts.tokens(inputs.k)
    return _around().prepare(call, q_MHK, k_MHK, flat.g, flat.beta, flat.A_log, flat.dt_bias)


class Gradients(NamedTuple):
    """Of a call's inputs, each in the shape and dtype of its input; None where there is no such input."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


def backward(call: Call, inputs: Inputs, grad_out: Tensor, grad_final_state: Tensor | None) -> Gradients:
    """The gradients of all inputs.

    grad_out [B, T, G, V] in v's dtype, grad_final_state as the call has its states, in fp32, of any stride. Nothing
    that was passed is written to.
    """
    flat, device = _flat(call, inputs), inputs.v.device
    tokens, value_heads, _ = flat.v.shape
    sequences = flat.cu_seqlens.numel() - 1
    with made_current(device):
        prepared = _prepare(call, inputs, flat)
        grad_q, grad_k, grad_v, grad_g, grad_beta = (
            torch.empty_like(t) for t in (prepared.q, prepared.k, flat.v, prepared.g, prepared.beta)
        )
        grad_initial = torch.empty(sequences, value_heads, WIDTH, WIDTH, dtype=torch.float32, device=device)
        # Read only, so that one tensor may stand for both.
        zeros = torch.zeros_like(grad_initial) if flat.state is None or grad_final_state is None else None
        initial = zeros if flat.state is None else flat.state
        grad_final = zeros if grad_final_state is None else dense(_inside(call, grad_final_state))
        grad_out = dense(grad_out)
        frontend = _frontend()
        size = frontend.workspace_bytes(tokens, value_heads, sequences)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        frontend.launch(
            device=_index(device),
            stream=torch.cuda.current_stream(device).cuda_stream,
            **_addresses(
                workspace=workspace, dO=grad_out, q=prepared.q, k=prepared.k, v=flat.v, g=prepared.g,
                beta=prepared.beta, cu_seqlens=flat.cu_seqlens, initial_state=initial, d_final_state=grad_final,
                dq=grad_q, dk=grad_k, dv=grad_v, dg=grad_g, dbeta=grad_beta, d_initial_state=grad_initial,
            ),
            total_tokens=tokens,
            n_heads=value_heads,
            n_seqs=sequences,
        )  # fmt: skip
        raw = _around().backward(call, grad_q, grad_k, grad_g, grad_beta, prepared, flat.g, flat.beta, flat.A_log,
                                 flat.dt_bias)  # fmt: skip
    q, k, v, g, beta, A_log, dt_bias, initial_state, _ = inputs
    return Gradients(
        raw.q.view(q.shape),
        raw.k.view(k.shape),
        grad_v.view(v.shape),
        raw.g.view(g.shape),
        raw.beta.view(beta.shape),
        None if A_log is None or raw.A_log is None else raw.A_log.view(A_log.shape),
        None if dt_bias is None or raw.dt_bias is None else raw.dt_bias.view(dt_bias.shape),
        None if initial_state is None else _outside(call, grad_initial),
    )


# ------------------------------------------------------------------------------------------------------------ layouts


def _inside(call: Call, state: Tensor) -> Tensor:
    return layouts.state(state, is_v_first=call.state_v_first, v_first=True)


def _outside(call: Call, state_NGVK: Tensor) -> Tensor:
    return layouts.state(state_NGVK, is_v_first=True, v_first=call.state_v_first).contiguous()


def _boundaries(batch: int, length: int, device: torch.device) -> Tensor:
    """Where the sequences of a batch end: [0, T, 2T, ...]."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def _addresses(**tensors: Tensor | None) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in tensors.items() if t is not None}


def _index(device: torch.device) -> int:
    return 0 if device.index is None else device.index
