"""The Engram gate of Hugging Face transformers (5.17 to 5.24): `Qwen4ExpTextPLELayer`, and what runs instead.

Found by what the code of its `forward` does, as in hf_gated_mlp.py. The layer's projections, its embedding, its
convolution and the norm before that stay as they are; the norms of query and key, their product, the gate and the gated
value are one op. So there is one route, `pointwise`.

Tensors: B batch, T length, S streams, D width of a stream; hidden_states [B, T, S*D].
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import fingerprint, guard
from ..catalogue import Assumed
from ..decline import Decision, Reason, Route, decision, original
from ..kernels.backends import Backend
from ..kernels.engram_gate.choose import Problem, choose
from ..kernels.engram_gate.op import SMALLEST_EPS, Call, run_engram_gate
from ..kernels.engram_gate.reference import wide_dtype
from ..ledger import Record, count, count_error
from ..patch import Switch
from . import hf, traced
from .strict import raise_if_short

_NAMES = ("hidden_states", "input_ids", "conv_mask")  # the third is `cache`, or `past_key_values` in 5.17

_FORWARD = """
import math
import torch

def forward(self, hidden_states, input_ids, cache, conv_mask=None):
    embeddings = self.ple_embedding(input_ids, cache)
    key_normed = self.norm_key(self.key_proj(embeddings)).unflatten(-1, (self.hc_count, self.hidden_size))
    value = self.value_proj(embeddings)
    query_normed = self.norm_query(hidden_states).unflatten(-1, (self.hc_count, self.hidden_size))
    gate = (key_normed * query_normed).sum(dim=-1, keepdim=True) / math.sqrt(self.hidden_size)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    gated_value = torch.sigmoid(gate) * value.unsqueeze(-2)
    gated_value_normed = self.norm_conv(gated_value.flatten(-2))
    gated_value = gated_value.flatten(-2)
    if conv_mask is not None:
        gated_value = apply_mask_to_padding_states(gated_value, conv_mask)
        gated_value_normed = apply_mask_to_padding_states(gated_value_normed, conv_mask)
    output = gated_value + self._short_conv(gated_value_normed, cache)
    return output
"""

_NORM_FORWARD = """
def forward(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)
"""

_NORM_NORM = """
import torch

def _norm(self, x):
    if self.group_size is not None:
        x = x.reshape(*x.shape[:-1], -1, self.group_size)
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return out.flatten(-2) if self.group_size is not None else out
"""


class Parts(NamedTuple):
    """What the op needs of a layer."""

    streams: int
    width: int
    eps: float
    query_weight: Tensor
    key_weight: Tensor


# ------------------------------------------------------------------------------------------------------ recognising


@functools.cache
def _template(source: str) -> fingerprint.Fingerprint:
    return fingerprint.of_source(source)


def _is(function: Any, source: str, **reads: Any) -> bool:
    return bool(fingerprint.of(function) == _template(source) and fingerprint.reads_globals(function, reads))


def _undecorated(forward: Any) -> Any:
    """The function under transformers' `deprecate_kwarg`, which only renames an old keyword; else `forward` itself."""
    deprecation = sys.modules.get("transformers.utils.deprecation")
    decorate = getattr(deprecation, "deprecate_kwarg", None)
    if decorate is None or type(forward) is not FunctionType or forward.__closure__ is None:
        return forward
    if forward.__code__ is not _decorated_code(decorate):
        return forward
    return dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["func"].cell_contents


@functools.cache
def _decorated_code(decorate: Callable[..., Any]) -> Any:
    return decorate("old", "99.0.0")(lambda: None).__code__


wants_module = hf.wants_module


def matches(forward: Any) -> bool:
    """Whether `forward` is that of `Qwen4ExpTextPLELayer`."""
    return _is(_undecorated(forward), _FORWARD, math=math, torch=torch)


def looks_alike(module: nn.Module) -> bool:
    """Whether `module` has the parts of such a layer."""
    children = module.__dict__["_modules"]
    return all(name in children for name in ("key_proj", "value_proj", "norm_key", "norm_query", "conv1d"))


@functools.lru_cache(maxsize=256)
def _is_norm(forward: Any, norm: Any) -> bool:
    """Whether a class with these two functions is the zero-centred RMS norm of groups."""
    return _is(forward, _NORM_FORWARD) and _is(norm, _NORM_NORM, torch=torch)


def _why_not_plain_norm(norm: Any, width: int) -> Reason | None:
    """None where calling `norm` is the zero-centred RMS norm of groups of `width`, and nothing else."""
    if not isinstance(norm, nn.Module):
        return Reason.STRUCTURE
    state = norm.__dict__
    weight = state["_parameters"].get("weight")
    is_plain = (
        type(weight) is nn.Parameter
        and not weight.is_meta
        and not {"forward", "_norm", "weight"} & state.keys()
        and not guard.has_hooks(norm)
        and not nn.utils.parametrize.is_parametrized(norm)
        and not guard.is_partitioned(norm)
    )
    if not is_plain:
        reason = guard.why_not_plain_linear(norm)
        if reason is not Reason.NOT_LINEAR:
            return reason
        return Reason.STRUCTURE if weight is None or type(weight) is nn.Parameter else Reason.WEIGHT_NOT_PARAMETER
    kind = type(norm)
    if not _is_norm(getattr(kind, "forward", None), getattr(kind, "_norm", None)) or state.get("group_size") != width:
        return Reason.STRUCTURE
    return None if weight.dtype.is_floating_point and weight.element_size() > 1 else Reason.QUANTISED


def read_parts(module: nn.Module) -> Parts | Reason:
    """The layer's parts, where query and key are normed by exactly what we compute; else why not."""
    state = module.__dict__
    streams, width = state.get("hc_count"), state.get("hidden_size")
    if type(streams) is not int or type(width) is not int or streams < 1 or width < 1:
        return Reason.STRUCTURE
    query, key = state["_modules"].get("norm_query"), state["_modules"].get("norm_key")
    for norm in (query, key):
        reason = _why_not_plain_norm(norm, width)
        if reason is not None:
            return reason
    eps = query.__dict__.get("eps")
    if type(eps) is not float or key.__dict__.get("eps") != eps or not SMALLEST_EPS <= eps < math.inf:
        return Reason.STRUCTURE
    weights = [norm.__dict__["_parameters"]["weight"] for norm in (query, key)]
    if any(weight.numel() != streams * width for weight in weights):
        # FSDP and ZeRO leave empty weights behind.
        return next(guard.why_not_plain_linear_weight(w) for w in weights if w.numel() != streams * width)
    return Parts(streams, width, eps, *weights)


# ------------------------------------------------------------------------------------------------------- deciding


class Verdict(NamedTuple):
    """The decision on one call, and what running it needs."""

    decision: Decision
    parts: Parts | None = None


def _problem(parts: Parts, device: torch.device, dtype: torch.dtype) -> Problem:
    weight_dtype = wide_dtype(parts.query_weight.dtype)
    return Problem(device, dtype, weight_dtype, parts.streams, parts.width, False, "sign", False, rounded=True)


def _decide(parts: Parts | Reason, device: torch.device, dtype: torch.dtype, tokens: int) -> Verdict:
    if isinstance(parts, Reason):
        return Verdict(original(parts))
    if parts.query_weight.device != device or parts.key_weight.device != device:
        return Verdict(original(Reason.DEVICE))
    if any(wide_dtype(weight.dtype) != wide_dtype(dtype) for weight in (parts.query_weight, parts.key_weight)):
        return Verdict(original(Reason.DTYPE))
    found = choose(_problem(parts, device, dtype), tokens)
    if isinstance(found, Reason):
        return Verdict(original(found))
    return Verdict(decision(Route.POINTWISE, Reason.NO_KERNEL), parts)


def decide_call(module: nn.Module, x: Any) -> Verdict:
    """The route of the call `module(x, ...)`, as far as it can be known before the projections run."""
    reason = guard.why_not_plain_call(x)
    if reason is not None:
        return Verdict(original(reason))
    if x.layout is not torch.strided or x.is_nested or x.is_neg():
        return Verdict(original(Reason.STRIDES))
    if x.numel() == 0:
        return Verdict(original(Reason.ZERO_TOKENS))
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        return Verdict(original(Reason.AUTOCAST))  # in which the library's gate may come out in another dtype
    parts = read_parts(module)
    if not isinstance(parts, Reason) and (x.dim() != 3 or x.shape[-1] != parts.streams * parts.width):
        return Verdict(original(Reason.SHAPE))
    return _decide(parts, x.device, x.dtype, x.numel() // x.shape[-1])


def _why_not_projected(parts: Parts, x: Tensor, key: Any, value: Any) -> Reason | None:
    """Why the op can't read what the projections returned, if it can't."""
    for tensor, width in ((key, parts.streams * parts.width), (value, parts.width)):
        if type(tensor) is not Tensor:
            return guard.why_not_plain_call(tensor) or Reason.TENSOR_SUBCLASS
        if tensor.dtype is not x.dtype:
            return Reason.DTYPE
        if tensor.device != x.device:
            return Reason.DEVICE
        if tensor.shape != (*x.shape[:-1], width):
            return Reason.SHAPE
    return None


def size_of(module: nn.Module) -> tuple[object, ...]:
    """What the kernels depend on: not the embedding, of which each layer has another size."""
    return tuple(
        (name, parameter.shape, parameter.dtype, parameter.device)
        for name, parameter in module.named_parameters()
        if name.startswith(("norm_", "key_proj.", "value_proj."))
    )


def decide(module: nn.Module, forward: Callable[..., Any], assumed: Assumed) -> Decision:
    """The route of a plain eager call of `module`, if things were as assumed."""
    if not matches(forward):
        return original(Reason.FORWARD_DIFFERS)
    if assumed.tokens == 0:
        return original(Reason.ZERO_TOKENS)
    parts = read_parts(module)
    if isinstance(parts, Reason):
        return original(parts)
    weight = parts.query_weight
    return _decide(parts, assumed.device or weight.device, assumed.dtype or weight.dtype, assumed.tokens).decision


def example_input(module: nn.Module, forward: Callable[..., Any], tokens: int) -> Tensor | None:
    """None: the layer takes tokens and a mask beside x, and is not tuned yet."""
    return None


def warm(module: nn.Module, forward: Callable[..., Any], tokens: int) -> Decision:
    """Runs the route that the layer would take, forward and backward, on dummy data.

    The layer's own modules are not called: their hooks would fire.
    """
    made = decide(module, forward, Assumed(tokens))
    parts = read_parts(module)
    if made.route is Route.ORIGINAL or isinstance(parts, Reason):
        return made
    weight = parts.query_weight
    with torch.enable_grad():
        x = torch.zeros(1, tokens, parts.streams * parts.width, dtype=weight.dtype, device=weight.device)
        x.requires_grad_()
        value = torch.zeros_like(x[..., : parts.width], requires_grad=True)
        found = choose(_problem(parts, x.device, x.dtype), tokens)
        if isinstance(found, Reason):
            return original(found)
        out = _gated(parts, found, x, torch.zeros_like(x, requires_grad=True), value)
        inputs = [x, value]  # never the layer's weights: their .grad is the user's
        torch.autograd.grad(out, inputs, torch.zeros_like(out))
    return made


# -------------------------------------------------------------------------------------------------------- running


def _gated(parts: Parts, backend: Backend, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The gated value [B, T, S*D], with the roundings of the library before the gate."""
    query_weight, key_weight = (
        1 + weight.to(wide_dtype(weight.dtype)).view(parts.streams, parts.width)
        for weight in (parts.query_weight, parts.key_weight)
    )
    call = Call(backend, parts.eps, residual=False, zero_dot="sign")
    x_BTSD = x.view(*x.shape[:-1], parts.streams, parts.width)
    weight = query_weight * key_weight
    return run_engram_gate(call, x_BTSD, key, value, weight, None, (query_weight, key_weight)).flatten(-2)


def _gated_by_the_library(parts: Parts, module: Any, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by the library's operations, in its order: the projections have run, and are not run again."""
    streams = (parts.streams, parts.width)
    key_normed, query_normed = module.norm_key(key).unflatten(-1, streams), module.norm_query(x).unflatten(-1, streams)
    gate = (key_normed * query_normed).sum(dim=-1, keepdim=True) / math.sqrt(parts.width)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    gated: Tensor = torch.sigmoid(gate) * value.unsqueeze(-2)
    return gated.flatten(-2)


def make_forward(library_forward: Callable[..., Any], switch: Switch, record: Record) -> Callable[..., Any]:
    """The forward that stands in for `library_forward`, with its signature."""
    inner = _undecorated(library_forward)
    signature = inspect.signature(inner)
    of_cache = list(signature.parameters)[3]
    apply_mask = inner.__globals__.get("apply_mask_to_padding_states")

    note_trace = traced.tracing_noted(record)

    @functools.wraps(library_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            note_trace()
            return library_forward(self, *args, **kwargs)
        try:
            bound = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            bound = None  # an old name of a keyword, which the library translates, or the TypeError that it raises
        off = switch.why_off(self)
        if off is not None:
            verdict = Verdict(original(off))
        else:
            verdict = Verdict(original(Reason.STRUCTURE)) if bound is None else decide_call(self, bound[_NAMES[0]])
        if verdict.parts is None or bound is None:
            if switch.strict:
                raise_if_short(verdict.decision, record)
            count(record, verdict.decision, self)
            return library_forward(self, *args, **kwargs)
        x, input_ids, conv_mask = (bound.get(name) for name in _NAMES)
        cache = bound[of_cache]
        embeddings = self.ple_embedding(input_ids, cache)
        gated = _run(self, verdict, x, self.key_proj(embeddings), self.value_proj(embeddings), switch, record)
        normed = self.norm_conv(gated)
        if conv_mask is not None:
            gated, normed = apply_mask(gated, conv_mask), apply_mask(normed, conv_mask)
        return gated + self._short_conv(normed, cache)

    return forward


def _run(module: nn.Module, verdict: Verdict, x: Any, key: Any, value: Any, switch: Switch, record: Record) -> Tensor:
    parts, made = verdict.parts, verdict.decision
    assert parts is not None
    backend = _why_not_projected(parts, x, key, value) or choose(
        _problem(parts, x.device, x.dtype), x.numel() // x.shape[-1]
    )
    if isinstance(backend, Reason):
        made = original(backend)
    if switch.strict:
        raise_if_short(made, record)
    count(record, made, module)
    if isinstance(backend, Reason):
        return _gated_by_the_library(parts, module, x, key, value)
    try:
        return _gated(parts, backend, x, key, value)
    except Exception as error:
        count_error(record, error)
        raise
