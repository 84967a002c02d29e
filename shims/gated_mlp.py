"""What the shims of gated MLPs share: reading a module's parts, deciding the route of a call, and running it.

`decide()` is a pure function of the module's structure, tensor metadata and settings; the whole of it is measured by
`benchmarks/host_decide.py`.

Tensors: M tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import guard
from ..catalogue import Assumed
from ..decline import FUSED, Decision, Reason, Route, decision, original
from ..kernels.backends import load, warming
from ..kernels.gated_mlp.choose import Backend, Problem, admit, choose, is_too_few
from ..kernels.gated_mlp.op import run_act_mul, run_gated_mlp
from ..ledger import Record, count, count_error, count_trace, note
from ..patch import Switch
from . import activations, traced
from .strict import raise_if_short


@dataclass(frozen=True)
class Layout:
    """Under which attributes a class keeps the parts of a gated MLP."""

    gate: str
    """The gate projection, or the packed one, whose first half is the gate."""
    up: str | None
    """The up projection; None where it is packed with the gate."""
    down: str
    act: str | None
    """The activation; None where the class's code calls SiLU by name."""
    pointwise: bool = True
    """Whether the route exists: the library calls all three projections, and runs the activation unfused."""
    untouched: tuple[str, ...] = ()
    """Further sub-modules that the library calls and the fused route would not: they must carry no hooks."""
    why_not: Callable[[nn.Module], Reason | None] | None = None
    """Why an instance computes something else than its class's other instances, if it does."""

    @functools.cached_property
    def children(self) -> tuple[str, ...]:
        """Every attribute that is read."""
        return tuple(name for name in (self.gate, self.up, self.down, self.act) if name is not None)


class Weights(NamedTuple):
    """The tensors of a gated MLP. `up` is None where `gate` is the packed [2*I, H] weight."""

    gate: Tensor
    up: Tensor | None
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def inner(self) -> int:
        """The intermediate size I."""
        return self.down.shape[1]


class Verdict(NamedTuple):
    """The decision on one call, and what running it needs."""

    decision: Decision
    activation: str = ""
    backend: Backend | None = None
    weights: Weights | None = None


def _declined(reason: Reason) -> Verdict:
    return Verdict(original(reason))


_TOO_FEW = _declined(Reason.SIZE_NOT_ADMITTED)


# ------------------------------------------------------------------------------------------------------- deciding


def decide(layout: Layout, module: nn.Module, x: Any) -> Verdict:
    """The route of the call `module(x)`. What it costs: `python -m benchmarks.host_decide`."""
    reason = guard.why_not_plain_call(x)
    if reason is not None:
        return _declined(reason)
    if x.layout is not torch.strided or x.is_nested or x.is_neg():
        return _declined(Reason.STRIDES)
    if x.dim() == 0:
        return _declined(Reason.SHAPE)
    if x.numel() == 0:
        return _declined(Reason.ZERO_TOKENS)
    return _decide(layout, module, x.device, x.dtype, x.numel() // x.shape[-1], x)


def decide_module(layout: Layout, module: nn.Module, assumed: Assumed) -> Decision:
    """The route of a plain eager call of `module`, if things were as assumed."""
    if assumed.tokens == 0:
        return original(Reason.ZERO_TOKENS)
    some = next(module.parameters(), None)
    if some is None:
        return original(Reason.STRUCTURE)
    verdict = _decide(layout, module, assumed.device or some.device, assumed.dtype or some.dtype, assumed.tokens, None)
    if verdict.decision is FUSED and verdict.backend is not None:
        return decision(Route.FUSED, note=verdict.backend.note)
    return verdict.decision


def _decide(
    layout: Layout, module: nn.Module, device: torch.device, dtype: torch.dtype, tokens: int, x: Tensor | None
) -> Verdict:
    """The route of a plain call with so many tokens; on `x`, or on any that fits."""
    if device.type == "cuda" and is_too_few(tokens, device):
        return _TOO_FEW
    activation = read_activation(layout, module)
    if isinstance(activation, Reason):
        # ZeRO-3 hooks everything, and counts on each hook being called.
        return _declined(Reason.ZERO3 if activation is Reason.HOOKS and guard.is_partitioned(module) else activation)
    weights = read_weights(layout, module)
    if isinstance(weights, Reason):
        return _try_pointwise(layout, module, dtype, device, tokens, activation, weights)
    inputs = () if x is None else (x,)
    why_not = None if x is None else guard.why_autocast(x, weights.gate)
    # The look at every weight, 2 us, comes last: where no kernel would serve, it is not needed.
    backend = why_not or choose_fused(weights, activation, device, dtype, tokens, *inputs)
    if isinstance(backend, Reason):
        return _try_pointwise(layout, module, dtype, device, tokens, activation, backend)
    why_not = why_not_weights(weights) or (None if x is None else why_not_input(x, weights))
    if why_not is not None:
        return _try_pointwise(layout, module, dtype, device, tokens, activation, why_not)
    return Verdict(FUSED, activation, backend, weights)


def size_of(module: nn.Module) -> tuple[object, ...]:
    """Shapes, dtypes and devices of the weights."""
    return tuple((parameter.shape, parameter.dtype, parameter.device) for parameter in module.parameters())


def example_input(layout: Layout, module: nn.Module, tokens: int) -> Tensor | None:
    """`x [tokens, hidden]` of zeros where the weights are; None where the module does not say its sizes."""
    some = next(module.parameters(), None)
    hidden, inner = _sizes(layout, module)
    if some is None or not hidden or not inner:
        return None
    return torch.zeros(tokens, hidden, dtype=some.dtype, device=some.device)


def warm(layout: Layout, module: nn.Module, tokens: int) -> Decision:
    """Runs what our kernels do in a call of `module` on `tokens` tokens, forward and backward, on dummy data.

    The module's own projections are not called: their hooks would fire.
    """
    some = next(module.parameters(), None)
    hidden, inner = _sizes(layout, module)
    if some is None or not hidden or not inner:
        return decide_module(layout, module, Assumed(tokens))
    with torch.enable_grad():
        x = torch.zeros(tokens, hidden, dtype=some.dtype, device=some.device, requires_grad=True)
        with warming():
            verdict = decide(layout, module, x)
        if verdict.backend is not None and verdict.backend.warmed_only:
            if _try_out(verdict, x):
                return verdict.decision
            verdict = decide(layout, module, x)
        if verdict.decision.route is Route.ORIGINAL:
            return verdict.decision
        if verdict.decision.route is Route.FUSED:
            assert verdict.weights is not None
            gate, up, down, gate_bias, up_bias, down_bias = (
                None if weight is None else weight.detach() for weight in verdict.weights
            )
            assert gate is not None and down is not None
            out = run_gated_mlp(verdict.backend, x, gate, up, down, gate_bias, up_bias, down_bias, verdict.activation)
        else:
            width = inner if layout.up is not None else 2 * inner
            gate = torch.zeros(tokens, width, dtype=some.dtype, device=some.device, requires_grad=True)
            up = None if layout.up is None else torch.zeros_like(gate, requires_grad=True)
            first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
            backend = choose_act_mul(first, second, verdict.activation, hidden, layout.up is None)
            if isinstance(backend, Reason):
                return original(backend)
            out = run_act_mul(backend, gate, up, verdict.activation)
        out.backward(torch.zeros_like(out))  # type: ignore[no-untyped-call]
    return verdict.decision


def _try_out(verdict: Verdict, x: Tensor) -> bool:
    """Whether a backend that serves only what was warmed up can serve this, having run it with gradients and without.

    What it can't serve it says by an exception of its own kind; any other is raised.
    """
    backend, weights = verdict.backend, verdict.weights
    assert backend is not None and weights is not None
    # All gradients are wanted, so that whatever a call may want is made ready.
    gate, up, down, *_ = (None if weight is None else weight.detach().requires_grad_() for weight in weights)
    assert gate is not None and down is not None
    tensors = (x, gate, up, down, None, None, None)
    try:
        out = run_gated_mlp(backend, *tensors, verdict.activation)
        torch.autograd.grad(out, [t for t in tensors if t is not None], torch.zeros_like(out))
        with torch.no_grad():
            run_gated_mlp(backend, *tensors, verdict.activation)
    except load(backend).not_supported():
        return False
    admit(backend, _problem(weights, verdict.activation, x.device, x.dtype), x.shape[0])
    return True


def read_activation(layout: Layout, module: nn.Module) -> str | Reason:
    """Which activation `module` applies, or why that is not plainly one of ours."""
    state = module.__dict__
    if not _reads_plainly(type(module), layout.children):  # type: ignore[arg-type]
        return Reason.STRUCTURE
    children = state["_modules"]
    for name in layout.children:
        if name in state and (name != layout.act or name in children):  # would hide the sub-module
            return Reason.STRUCTURE
    why_not = layout.why_not(module) if layout.why_not is not None else None
    if why_not is not None:
        return why_not
    if layout.act is None:
        return "silu"
    act = children.get(layout.act)
    return activations.kind_of(state.get(layout.act) if act is None else act)


@functools.lru_cache(maxsize=4096)
def _reads_plainly(kind: type, names: tuple[str, ...]) -> bool:
    """Whether `module.<name>` is what `nn.Module` keeps under that name, for instances of `kind`."""
    return (
        kind.__getattribute__ is object.__getattribute__  # type: ignore[comparison-overlap]
        and getattr(kind, "__getattr__", None) is nn.Module.__getattr__
        and not any(name in vars(base) for base in kind.__mro__ for name in names)
    )


def read_weights(layout: Layout, module: nn.Module) -> Weights | Reason:
    """The module's weights, where each projection is exactly a linear layer; else why not."""
    children = module.__dict__["_modules"]
    gate, down = children.get(layout.gate), children.get(layout.down)
    up = None if layout.up is None else children.get(layout.up)
    for projection in (gate, down) if layout.up is None else (gate, up, down):
        if not guard.is_plain_linear(projection):
            return guard.why_not_plain_linear(projection)
    for name in layout.untouched:
        other = children.get(name)
        if other is not None and ("forward" in other.__dict__ or guard.has_hooks(other)):
            return Reason.HOOKS
    of_gate, of_down = gate.__dict__["_parameters"], down.__dict__["_parameters"]
    of_up = {} if up is None else up.__dict__["_parameters"]
    return Weights(
        of_gate["weight"], of_up.get("weight"), of_down["weight"], of_gate["bias"], of_up.get("bias"), of_down["bias"]
    )


def why_not_weights(weights: Weights) -> Reason | None:
    """Why the fused route can't read these weights together, if it can't."""
    gate, up, down = weights.gate, weights.up, weights.down
    dtype, device = gate.dtype, gate.device
    hidden, inner = down.shape
    for tensor in weights:
        if tensor is None:
            continue
        if tensor.dtype is not dtype:
            return Reason.DTYPE
        if tensor.device != device:
            return Reason.DEVICE
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return Reason.STRIDES
    if gate.shape != ((2 * inner if up is None else inner), hidden) or (up is not None and up.shape != gate.shape):
        return guard.why_not_plain_linear_weight(gate)
    return None


def why_not_input(x: Tensor, weights: Weights) -> Reason | None:
    """Why the fused route can't read `x` beside these weights, if it can't."""
    gate = weights.gate
    if x.dtype is not gate.dtype:
        return Reason.DTYPE
    if x.device != gate.device:
        return Reason.META if gate.device.type == "meta" else Reason.DEVICE
    if x.shape[-1:] != gate.shape[1:]:
        return Reason.SHAPE
    if not x.is_contiguous() and not _is_rows(x):
        return Reason.STRIDES
    return None


def _is_rows(x: Tensor) -> bool:
    """Whether `x [..., H]` is a view of `[M, H]` with unit inner stride and one row stride of at least H."""
    shape, stride = x.shape, x.stride()
    if stride[-1] != 1 and shape[-1] != 1:
        return False
    dims = [(size, step) for size, step in zip(shape[:-1], stride[:-1], strict=True) if size != 1]
    if not dims:
        return True
    return dims[-1][1] >= shape[-1] and all(
        outer == inner * size for (_, outer), (size, inner) in itertools.pairwise(dims)
    )


def choose_fused(
    weights: Weights, activation: str, device: torch.device, dtype: torch.dtype, tokens: int, *inputs: Tensor
) -> Backend | Reason:
    """The backend of the fused route for this many tokens, or why there is none."""
    gate, up, down = weights.gate, weights.up, weights.down
    if gate.dim() != 2 or down.dim() != 2:
        return guard.why_not_plain_linear_weight(down if gate.dim() == 2 else gate)
    problem = _problem(weights, activation, device, dtype)
    read = (*inputs, gate, down) if up is None else (*inputs, gate, up, down)
    return choose(problem, tokens, *read)


def _problem(weights: Weights, activation: str, device: torch.device, dtype: torch.dtype) -> Problem:
    bias, down_bias = weights.gate_bias is not None or weights.up_bias is not None, weights.down_bias is not None
    hidden, packed = weights.gate.shape[1], weights.up is None
    return Problem(Route.FUSED, device, dtype, hidden, weights.inner, activation, bias, packed, down_bias)


def _try_pointwise(
    layout: Layout,
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    activation: str,
    why_not_fused: Reason,
) -> Verdict:
    """The pointwise route if there could be a kernel for it, because the fused one declined with the reason given."""
    if not layout.pointwise:
        return _declined(why_not_fused)
    hidden, inner = _sizes(layout, module)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    packed = layout.up is None
    found = choose(Problem(Route.POINTWISE, device, dtype, hidden, inner, activation, False, packed), tokens)
    if isinstance(found, Reason):
        # A backend that has the fused route alone says nothing of this call by not having the other.
        return _declined(why_not_fused if found is Reason.NO_KERNEL else found)
    return Verdict(decision(Route.POINTWISE, why_not_fused), activation)


def _sizes(layout: Layout, module: nn.Module) -> tuple[int, int]:
    """Hidden and intermediate size as the first projection states them; adapters and quantised layers do too."""
    projection = module.__dict__["_modules"].get(layout.gate)
    hidden, width = getattr(projection, "in_features", 0), getattr(projection, "out_features", 0)
    return hidden, width if layout.up is not None else width // 2


def choose_act_mul(gate: Any, up: Any, activation: str, hidden: int, packed: bool) -> Backend | Reason:
    """The backend of the pointwise route for what the projections returned, or why there is none."""
    for tensor in (gate, up):
        if type(tensor) is not Tensor:
            return guard.why_not_plain_call(tensor) or Reason.TENSOR_SUBCLASS
    if gate.dtype is not up.dtype:
        return Reason.DTYPE
    if gate.device != up.device:
        return Reason.DEVICE
    if gate.shape != up.shape:
        return Reason.SHAPE
    if gate.stride(-1) != 1 or up.stride(-1) != 1:
        return Reason.STRIDES
    inner = gate.shape[-1]
    problem = Problem(Route.POINTWISE, gate.device, gate.dtype, hidden, inner, activation, False, packed)
    return choose(problem, gate.numel() // inner if inner else 0, gate, up)


# -------------------------------------------------------------------------------------------------------- running


def make_forward(
    library_forward: Callable[..., Any], switch: Switch, record: Record, layout: Layout
) -> Callable[..., Any]:
    """The function that stands in for `library_forward`: the same signature, and the library's code where it declines.

    It is `forward(self, x)`, or `forward(self, x, **ignored)`.
    """
    _, first, *rest = inspect.signature(library_forward).parameters.values()
    ignores_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in rest)

    note_trace = traced.tracing_noted(record)

    @traced.constant
    def note_fused() -> None:
        count_trace(record, Route.FUSED)

    @functools.wraps(library_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if not traced.is_exporting() and len(args) == 1 and (not kwargs or ignores_keywords):
                out = traced.run(layout, self, args[0], switch)
                if out is not None:
                    note_fused()
                    return out
            note_trace()
            return library_forward(self, *args, **kwargs)
        x = args[0] if args else kwargs.get(first.name)
        named_twice = args and first.name in kwargs
        if x is None or len(args) > 1 or named_twice or (not ignores_keywords and len(args) + len(kwargs) != 1):
            return library_forward(self, *args, **kwargs)  # raises the TypeError that the caller deserves
        off = switch.why_off(self)
        verdict = _declined(off) if off is not None else decide(layout, self, x)
        made = verdict.decision
        if switch.strict:
            raise_if_short(made, record)
        if made.route is Route.ORIGINAL:
            count(record, made, self)
            return library_forward(self, *args, **kwargs)
        if made.route is Route.POINTWISE:
            return _run_pointwise(layout, self, x, verdict, switch, record)
        count(record, made, self)
        if verdict.backend.note:  # type: ignore[union-attr]
            note(record, verdict.backend.note)  # type: ignore[union-attr]
        gate, up, down, gate_bias, up_bias, down_bias = verdict.weights  # type: ignore[misc]
        try:
            return run_gated_mlp(verdict.backend, x, gate, up, down, gate_bias, up_bias, down_bias, verdict.activation)
        except Exception as error:
            count_error(record, error)
            raise

    return forward


def _run_pointwise(
    layout: Layout, module: nn.Module, x: Tensor, verdict: Verdict, switch: Switch, record: Record
) -> Any:
    """The library's forward, with its activation and product replaced where a kernel takes what they are given."""
    first = getattr(module, layout.gate)(x)
    second = None if layout.up is None else getattr(module, layout.up)(x)
    gate, up = first.chunk(2, dim=-1) if second is None else (first, second)
    backend = choose_act_mul(gate, up, verdict.activation, x.shape[-1], layout.up is None)
    if isinstance(backend, Reason):
        made = original(backend)
        if switch.strict:
            raise_if_short(made, record)
        count(record, made, module)
        activate = torch.nn.functional.silu if layout.act is None else getattr(module, layout.act)
        product = activate(gate) * up
    else:
        count(record, verdict.decision, module)
        try:
            product = run_act_mul(backend, first, second, verdict.activation)
        except Exception as error:
            count_error(record, error)
            raise
    return getattr(module, layout.down)(product)
