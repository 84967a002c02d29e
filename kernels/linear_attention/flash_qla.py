"""The gated delta rule on Hopper (SM90), and by name on SM100 and SM103: FlashQLA's kernels, both passes.

FlashQLA (PyPI `flash-qla`, in TileLang) takes the log of the decay, and beta past its sigmoid. FLA's layer leaves both
to the kernel. So prepare_per_head.py makes them, and q and k of unit length, from what a call passes, and the raw
inputs' gradients from FlashQLA's. The kernels are called one by one, as FlashQLA's own autograd function calls them,
but for two things: what they are told of sequences and chunks (flash_qla_pieces.py), and how far back a piece looks.

**What the kernels are right for**, read from the sources of FlashQLA 0.1.3:

- They invert I + tril(beta k k^T) of each chunk without the decay, which is multiplied in afterwards. The entries stay
  below 2 where |k| <= 1 and beta is in [0, 2]; elsewhere they may leave the range of bf16 and fp16, where FLA's stay in
  it. So a call is served only if it leaves the L2 norm and the sigmoid of beta to us, or twice the sigmoid.
- Where there are few sequences and heads, a sequence is cut into pieces that run side by side. A piece begins in the
  state E + M S: E is what the piece before makes of a state of zero, M the product of its steps, and S the state in
  which it began. E, M and S are rounded to the dtype of q there; else this is exact. FlashQLA itself leaves M out, and
  works E out from fewer chunks, where the decays of a piece multiply up to less than exp(-10). That is an
  approximation, and another result where little is written for so long and a norm follows. Here the bound is exp(-87),
  at the end of fp32's range. It needs gates that are never above 0: those that are made here, and no others.
- Which pieces there are follows from the numbers of sequences, tokens and heads alone, by FlashQLA's own model of how
  long they take: neither from the gates, nor from whether gradients are wanted, so that a recomputation has the same.
  Sequences of `cu_seqlens` are not cut, as their lengths are on the device.
- Widths are 128, dtypes bf16 and fp16; value heads may be a multiple of those of q and k, and there are as many as in
  FlashQLA's own figures. States are fp32 and [K, V] here; those of a call are transposed where it has them otherwise.
- A kernel is compiled for each number of heads, dtype and scale, with or without states, and for any number of tokens.
  No call waits for the device. A CUDA graph may hold a call whose kernels have run before, with as many pieces.

None of it has run on a GPU through this package.

Tensors: M = B T tokens in one row, H heads of q and k, G value heads, K = V = 128, N sequences, P pieces.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...decline import Reason
from .. import vendor_sources
from ..autograd import differentiable_once
from ..device import made_current
from . import flash_qla_pieces as pieces_of
from . import layouts
from .cudnn_hopper import DTYPES, takes
from .flash_qla_pieces import CHUNK, Pieces
from .problem import Call, Inputs, Problem, problem_of

WIDTH = 128
VALUE_HEADS = range(8, 65, 8)
FORGOTTEN = -87.0
"""The log of a product of decays that fp32 holds for nothing."""
MOST_ELEMENTS = 2**31
"""Of one tensor, as the kernels index with 32 bits. The largest are the states at the start of each chunk."""


# ------------------------------------------------------------------------------------------------- what it can serve


def why_not(problem: Problem) -> Reason | None:
    """Why neither pass may run for this problem, if so. Imports FlashQLA where all else fits."""
    call = problem.call
    if (problem.key_width, problem.value_width) != (WIDTH, WIDTH):
        return Reason.HEAD_SIZE
    if not (call.l2norm and call.beta_sigmoid and call.gate == "softplus"):
        return Reason.UNBOUNDED
    if call.scale == 0:  # which FlashQLA takes for none given
        return Reason.OPTION
    if problem.value_heads not in VALUE_HEADS:
        return Reason.NO_KERNEL
    if any(
        dtype not in DTYPES for dtype in (problem.g_dtype, problem.beta_dtype, *filter(None, problem.parameter_dtypes))
    ):
        return Reason.DTYPE
    return why_no_library()


def why_not_size(problem: Problem, tokens: int, sequences: int) -> Reason | None:
    """What depends on the numbers of tokens and sequences."""
    if not tokens:
        return Reason.ZERO_TOKENS
    chunks = tokens // CHUNK + sequences + 1
    return Reason.INDEX_RANGE if chunks * problem.value_heads * WIDTH * WIDTH >= MOST_ELEMENTS else None


DISTRIBUTION, READ = "flash-qla", "0.1.3"
_ROOT = ("ops", "gated_delta_rule", "chunk")
_READ_FILES = (
    (*_ROOT, "__init__.py"),
    *((*_ROOT, gpu, f"{name}.py") for gpu in ("hopper", "blackwell")
      for name in ("__init__", "kkt_solve", "prepare_h", "fused_fwd", "fused_bwd", "cp_fwd", "cp_bwd")),
    (*_ROOT, "cp", "autocp", "decision.py"),
    ("ops", "utils", "cumsum.py"),
    ("utils", "index.py"),
)  # fmt: skip
_DIGEST = "e662c369a6b40a2178e52e013162d055686e8a1afc8b7016c20b3505934040bb"
"""The sources that the limits above were read from, and the SHA-256 of all of them."""


@functools.cache
def drift() -> tuple[str, ...]:
    """Where the installed FlashQLA is not the one whose limits were read, in words; nothing of it is imported."""
    paths = [vendor_sources.path_of(*parts, package="flash_qla") for parts in _READ_FILES]
    return vendor_sources.why_not_as_read("kernels", paths, _DIGEST, distribution=DISTRIBUTION, release=READ)


_TOKENS = frozenset({"cu_seqlens", "chunk_size"})
_STEP = frozenset({"k", "a", "g", "b", "cu_seqlens", "state_v_first"})
_JOIN = frozenset({"mt_buffer", "fallback_mask", "seq_map_r2c", "state_v_first"})
_FUNCTIONS = {
    "chunk_local_cumsum": _TOKENS | {"g", "reverse", "zero_last_chunk"},
    "kkt_solve": _TOKENS | {"k", "b"},
    "get_warmup_chunks_bidi": _TOKENS | {"g", "ht_mask_fwd", "ht_mask_bwd", "threshold", "seq_map_r2c"},
    "fused_gdr_h": _STEP | {"v", "initial_state", "output_final_state", "output_h", "num_warmup_chunks"},
    "correct_initial_states": _JOIN | {"raw_h0", "ht_buffer"},
    "fused_gdr_fwd": _STEP | {"q", "v", "scale", "initial_state", "output_final_state", "output_h", "output_o"}
    | {"cp_seq_map", "raw_cu_seqlens"},
    "fused_gdr_dh": _STEP | {"q", "do", "dht", "output_dh0", "output_dh", "scale", "num_warmup_chunks"},
    "correct_terminal_states": _JOIN | {"raw_dht", "dht_buffer"},
    "fused_gdr_bwd": _STEP | {"q", "v", "do", "dht", "h", "scale", "chunk_size"},
}  # fmt: skip
"""FlashQLA's functions for the kernels, and what each is called with."""


@functools.cache
def why_no_library() -> Reason | None:
    """Why FlashQLA's kernels can't be had here: not installed, not for this GPU, or with another interface."""
    try:
        library = _library()
        fits = library.CHUNK_SIZE == CHUNK and all(takes(getattr(library, n), names) for n, names in _FUNCTIONS.items())
    except ImportError:
        return Reason.MISSING_PACKAGE
    except AttributeError:
        return Reason.PACKAGE_DIFFERS
    except ValueError:  # which it raises for a GPU that it has no kernels for
        return Reason.ARCHITECTURE
    return None if fits else Reason.PACKAGE_DIFFERS


@functools.cache
def _library() -> Any:
    return importlib.import_module("flash_qla.ops.gated_delta_rule.chunk")


class NotWarmError(RuntimeError):
    """What a CUDA graph is to hold has not run yet, and would be compiled while it is captured."""


def not_supported() -> tuple[type[Exception], ...]:
    """What is raised for a call that can't be served, where that can't be told before. Any other is an error."""
    return (NotWarmError,)


_BACKWARD, _FORWARD = "backward", "forward"
_warm: set[tuple[Any, ...]] = set()
"""Which kernels have run: the pass, what `_kind` gives, and what else they depend on."""


def is_compiled(problem: Problem) -> bool:
    """Whether both passes of this kind of call have run, so that CUDA-graph capture may launch them.

    With how many pieces and which states, `run` knows, and refuses what has not run.
    """
    kind = _kind(problem)
    passes = {key[0] for key in _warm if key[1] == kind}
    return passes >= ({_FORWARD, _BACKWARD} if problem.trains else {_FORWARD})


def _kind(problem: Problem) -> Problem:
    return problem._replace(trains=True, call=problem.call._replace(state_v_first=False))


# ------------------------------------------------------------------------------------------------------------ the op


def run(call: Call, inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The output [B, T, G, V], and the final states where they are wanted. The call was found fit by `why_not`.

    Raises NotWarmError where a CUDA graph is captured and these kernels have not run before.
    """
    with made_current(inputs.v.device):
        # Read here and not inside apply(), where grad mode is always off.
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            out, final = _GatedDeltaRule.apply(call, output_final_state, *inputs)  # type: ignore[no-untyped-call]
            return out, final
        with torch.no_grad():
            return _forward(call, inputs, output_final_state, trains=False)[:2]


class _GatedDeltaRule(Function):
    """Inputs: call, whether the final state is wanted, and `Inputs`."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, output_final_state: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        out, final, kept, ctx.pieces, ctx.key = _forward(call, inputs, output_final_state, trains=True)
        ctx.call = call
        ctx.save_for_backward(*tensors[:-1], *kept)  # the ends of sequences are in the pieces
        return out, final

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Any, ...], grad_out: Tensor, grad_final: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        inputs, kept = Inputs(*saved[:8]), _Kept(*saved[8:])
        with made_current(grad_out.device):
            gradients = _backward(ctx.call, inputs, ctx.pieces, kept, grad_out, grad_final)
        _warm.add((_BACKWARD, *ctx.key))
        wanted = zip(gradients, ctx.needs_input_grad[2:-1], strict=True)
        return None, None, *(gradient if needs else None for gradient, needs in wanted), None


class _Kept(NamedTuple):
    """What the backward pass takes from the forward pass, besides the inputs."""

    a: Tensor
    """[1, M, G, 64]: the inverse of each chunk."""
    starts: Tensor | None = None
    """[P, G, K, V], as are the rest where sequences are cut: the state in which each piece begins."""
    products: Tensor | None = None
    """[P, G, K, K]: of all the steps of a piece."""
    chunks_back: Tensor | None = None
    """[P, G] int32: for how many chunks a piece's end is felt, going backwards."""
    reaches_back: Tensor | None = None
    """[P, G] booleans: whether as far as its start."""


class _Row(NamedTuple):
    """A call's tensors as the kernels take them, in one row of M tokens."""

    q: Tensor
    """[1, M, H, K], as is k."""
    k: Tensor
    v: Tensor
    """[1, M, G, V]."""
    g: Tensor
    """[1, M, G] in fp32: the log of the decay since the chunk's start."""
    b: Tensor
    """[1, M, G] in fp32."""


@functools.cache
def _around() -> ModuleType:
    """Our kernels, whose module imports Triton."""
    from . import prepare_per_head

    return prepare_per_head


def _raw(inputs: Inputs) -> Any:
    q, k, _, g, beta, A_log, dt_bias, *_ = inputs
    assert A_log is not None
    return _around().Raw(
        layouts.tokens(q),
        layouts.tokens(k),
        g.reshape(-1, g.shape[-1]),
        beta.reshape(-1, beta.shape[-1]),
        A_log.reshape(-1).contiguous(),
        None if dt_bias is None else dt_bias.reshape(-1).contiguous(),
    )


def _row(inputs: Inputs, prepared: Any, pieces: Pieces) -> _Row:
    v = layouts.dense(inputs.v)
    q, k, g, beta, _ = (t.unsqueeze(0) for t in prepared)
    decays = _library().chunk_local_cumsum(g=g, chunk_size=CHUNK, cu_seqlens=pieces.ends)
    return _Row(q, k, v.view(1, -1, *v.shape[2:]), decays, beta)


def _forward(
    call: Call, inputs: Inputs, output_final_state: bool, *, trains: bool
) -> tuple[Tensor, Tensor | None, _Kept, Pieces, tuple[Any, ...]]:
    library = _library()
    pieces = _pieces(inputs)
    key = _key_of(call, inputs, pieces, output_final_state)
    _refuse_cold(inputs.v.device, key, trains=trains)
    prepared = _around().prepare(call, _raw(inputs))
    row = _row(inputs, prepared, pieces)
    a = library.kkt_solve(k=row.k, b=row.b, chunk_size=CHUNK, cu_seqlens=pieces.ends)
    starts, kept = _inside(call, inputs.initial_state), _Kept(a)
    if pieces.is_cut:
        kept = _starts(row, a, pieces, starts)
        starts = kept.starts
    out, _, final = library.fused_gdr_fwd(
        q=row.q, k=row.k, v=row.v, a=a, g=row.g, b=row.b, scale=call.scale, initial_state=starts,
        output_final_state=output_final_state, output_h=False, output_o=True, cu_seqlens=pieces.ends,
        cp_seq_map=pieces.sequence_of, raw_cu_seqlens=pieces.sequence_ends, state_v_first=False,
    )  # fmt: skip
    _warm.add((_FORWARD, *key))
    final = _outside(call, final) if output_final_state else None
    return out.view(inputs.v.shape), final, kept, pieces, key


def _starts(row: _Row, a: Tensor, pieces: Pieces, initial: Tensor | None) -> _Kept:
    """The state in which each piece begins, and what the backward pass needs to find the gradients at their ends."""
    library = _library()
    is_last, is_first = pieces.at_an_end()
    chunks, chunks_back, reaches, reaches_back = library.get_warmup_chunks_bidi(
        g=row.g, cu_seqlens=pieces.ends, ht_mask_fwd=is_last, ht_mask_bwd=is_first, chunk_size=CHUNK,
        threshold=FORGOTTEN, seq_map_r2c=pieces.first_of,
    )  # fmt: skip
    _, made, products = library.fused_gdr_h(
        k=row.k, v=row.v, a=a, g=row.g, b=row.b, initial_state=None, output_final_state=True, output_h=False,
        cu_seqlens=pieces.ends, num_warmup_chunks=chunks, state_v_first=False,
    )  # fmt: skip
    starts = library.correct_initial_states(
        raw_h0=initial, ht_buffer=made, mt_buffer=products, fallback_mask=reaches, seq_map_r2c=pieces.first_of,
        state_v_first=False,
    )  # fmt: skip
    return _Kept(a, starts, products, chunks_back, reaches_back)


class _Gradients(NamedTuple):
    """Of a call's inputs, each in the shape and dtype of its input; None where there is no such input."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


def _backward(
    call: Call, inputs: Inputs, pieces: Pieces, kept: _Kept, grad_out: Tensor, grad_final: Tensor | None
) -> _Gradients:
    """The gradients of all inputs. Nothing that was passed or saved is written to."""
    library, raw = _library(), _raw(inputs)
    prepared = _around().prepare(call, raw)
    row = _row(inputs, prepared, pieces)
    grad_out = layouts.dense(grad_out).view(row.v.shape)
    starts, ends = _inside(call, inputs.initial_state), _inside(call, grad_final)
    if pieces.is_cut:
        starts = kept.starts
        _, grad_made = library.fused_gdr_dh(
            q=row.q, k=row.k, a=kept.a, g=row.g, b=row.b, do=grad_out, dht=None, output_dh0=True, output_dh=False,
            scale=call.scale, cu_seqlens=pieces.ends, num_warmup_chunks=kept.chunks_back, state_v_first=False,
        )  # fmt: skip
        ends = library.correct_terminal_states(
            raw_dht=ends, dht_buffer=grad_made, mt_buffer=kept.products, fallback_mask=kept.reaches_back,
            seq_map_r2c=pieces.first_of, state_v_first=False,
        )  # fmt: skip
    states, _, _ = library.fused_gdr_h(
        k=row.k, v=row.v, a=kept.a, g=row.g, b=row.b, initial_state=starts, output_final_state=False, output_h=True,
        cu_seqlens=pieces.ends, num_warmup_chunks=None, state_v_first=False,
    )  # fmt: skip
    grad_q, grad_k, grad_v, grad_g, grad_beta, grad_starts = library.fused_gdr_bwd(
        q=row.q, k=row.k, v=row.v, a=kept.a, g=row.g, b=row.b, do=grad_out, dht=ends, h=states, scale=call.scale,
        cu_seqlens=pieces.ends, chunk_size=CHUNK, state_v_first=False,
    )  # fmt: skip
    grad_g = library.chunk_local_cumsum(
        g=grad_g, chunk_size=CHUNK, cu_seqlens=pieces.ends, reverse=True, zero_last_chunk=True
    )
    incoming = _around().Incoming(*(t.squeeze(0) for t in (grad_q, grad_k, grad_g, grad_beta)))
    found = _around().backward(call, incoming, prepared, raw)
    q, k, v, g, beta, A_log, dt_bias, initial_state, _ = inputs
    if initial_state is not None:
        grad_starts = _outside(call, grad_starts[pieces.first_of[:-1]]).to(initial_state.dtype)
    return _Gradients(
        found.q.view(q.shape),
        found.k.view(k.shape),
        grad_v.view(v.shape),
        found.g.view(g.shape),
        found.beta.view(beta.shape),
        None if A_log is None else found.A_log.view(A_log.shape),
        None if dt_bias is None else found.dt_bias.view(dt_bias.shape),
        None if initial_state is None else grad_starts,
    )


# ------------------------------------------------------------------------------------------------------------- pieces


def _pieces(inputs: Inputs) -> Pieces:
    v, cu_seqlens = inputs.v, inputs.cu_seqlens
    batch, length, value_heads, _ = v.shape
    if cu_seqlens is not None and cu_seqlens.numel() > 2:
        return pieces_of.of_sequences(cu_seqlens, length)
    return pieces_of.of_batch(batch, length, _chunks_per_piece(batch, length, value_heads, v.device), v.device)


@functools.lru_cache(maxsize=1024)
def _chunks_per_piece(batch: int, length: int, value_heads: int, device: torch.device) -> int | None:
    """Of how many chunks a piece should be, by FlashQLA's model of the time that a training step takes; None for all.

    The model counts with pieces that look back over all their chunks, which is the most that they can have to do.
    """
    decide = importlib.import_module("flash_qla.ops.gated_delta_rule.chunk.cp.autocp").decide
    chunks = -(-length // CHUNK)
    cuts, chunks_per_piece = decide(
        num_chunks=[chunks] * batch,
        num_v_heads=value_heads,
        P=torch.cuda.get_device_properties(device).multi_processor_count,
        chunk=CHUNK,
        is_train=True,
    )
    return int(chunks_per_piece) if cuts and chunks_per_piece < chunks else None


def _key_of(call: Call, inputs: Inputs, pieces: Pieces, output_final_state: bool) -> tuple[Any, ...]:
    """What decides which kernels run; how many pieces there are decides how FlashQLA cuts up the values."""
    problem = _kind(problem_of(call, inputs))
    return problem, pieces.number, pieces.is_cut, inputs.initial_state is None, output_final_state


def _refuse_cold(device: torch.device, key: tuple[Any, ...], *, trains: bool) -> None:
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    if any((name, *key) not in _warm for name in ((_FORWARD, _BACKWARD) if trains else (_FORWARD,))):
        raise NotWarmError("a call like this one must have run, with its backward pass, before a CUDA graph holds it")


# ------------------------------------------------------------------------------------------------------------- states


def _inside(call: Call, state: Tensor | None) -> Tensor | None:
    """A state as the kernels take it: [.., K, V], in fp32."""
    if state is None:
        return None
    return layouts.dense(layouts.state(state.float(), is_v_first=call.state_v_first, v_first=False))


def _outside(call: Call, state: Tensor) -> Tensor:
    return layouts.state(state, is_v_first=False, v_first=call.state_v_first).contiguous()
