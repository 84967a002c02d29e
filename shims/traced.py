"""A gated MLP inside `torch.compile`: the fused route as one operator, decided while the compiler traces.

Nothing here may do what TorchDynamo can't follow. What it reads of the module, it guards: where a hook, an adapter or
another activation comes later, or a patch is turned off, it traces anew. What only we know (which backend serves) is
asked by functions that it runs, and takes the answers of as constants.

The pointwise route is not taken: the compiler fuses what lies between the projections itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import guard
from ..decline import Reason, Route
from ..kernels.gated_mlp.choose import Problem
from ..ledger import Record, count_trace
from ..patch import Switch
from . import activations

if TYPE_CHECKING:
    from .gated_mlp import Layout


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that the compiler runs while it traces, and whose result is then a constant.

    What torch.compiler.assume_constant_result sets; calling that imports the whole compiler, for 2 s.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def is_exporting() -> bool:
    """Whether it is an exporter that traces. Asked directly, torch 2.11 says that of every compiler."""
    return torch.compiler.is_exporting()


@constant
def _is_transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode AD is on: the operator has neither rule. While the compiler
    traces through one, it is on here too.
    """
    return guard.is_transformed()


@constant
def _has_global_hooks() -> bool:
    """As guard.why_not_plain_call asks. Those that come later the compiler sees in no code, the library's neither."""
    return guard.has_global_hooks()


@constant
def _forward_of_activation(kind: type) -> str | None:
    """What the class of an activation computes, where it is one of those we know."""
    return activations.formula_of(kind)


@constant
def _serving(
    device: str, index: int | None, dtype: torch.dtype, hidden: int, inner: int, activation: str
) -> tuple[str, int] | None:
    from ..kernels.gated_mlp import library  # makes the operators

    where = torch.device(device) if index is None else torch.device(device, index)
    return library.serving(Problem(Route.FUSED, where, dtype, hidden, inner, activation, bias=False))


def tracing_noted(record: Record) -> Callable[[], None]:
    """What a patched forward calls where a compiler gets the library's code. It leaves nothing in the graph."""

    @constant
    def note() -> None:
        count_trace(record, Reason.EXPORTING if torch.compiler.is_exporting() else Reason.COMPILING)

    return note


def run(layout: Layout, module: Any, x: Any, switch: Switch) -> Tensor | None:
    """The output of the fused route; None where it does not serve, and the library's own code is to be traced."""
    if switch.off is not None or switch.only is not None or type(x) is not Tensor or x.dim() == 0:
        return None
    if _is_transformed() or _has_global_hooks():
        return None
    if layout.why_not is not None and layout.why_not(module) is not None:
        return None
    activation = _activation(layout, module)
    gate, down = getattr(module, layout.gate), getattr(module, layout.down)
    up = None if layout.up is None else getattr(module, layout.up)
    if activation is None or not (_is_plain(gate) and _is_plain(down) and (up is None or _is_plain(up))):
        return None
    for name in layout.untouched:
        if hasattr(module, name) and not _is_unhooked(getattr(module, name)):
            return None
    if gate.bias is not None or (up is not None and up.bias is not None):
        return None
    hidden, inner = down.weight.shape
    if not _fits(x, gate.weight, (inner if up is not None else 2 * inner, hidden)):
        return None
    if down.weight.dtype != x.dtype or (up is not None and not _fits(x, up.weight, (inner, hidden))):
        return None
    if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != x.dtype:
        return None
    serving = _serving(x.device.type, x.device.index, x.dtype, hidden, inner, activation)
    if serving is None:
        return None
    backend, fewest_tokens = serving
    if x.shape[:-1].numel() < fewest_tokens:  # where the number is dynamic the compiler guards it
        return None
    weights = gate.weight, None if up is None else up.weight, down.weight, down.bias
    save = torch.is_grad_enabled() and (
        x.requires_grad
        or gate.weight.requires_grad
        or down.weight.requires_grad
        or (up is not None and up.weight.requires_grad)
        or (down.bias is not None and down.bias.requires_grad)
    )
    out_MH, _ = torch.ops.fusepatch.gated_mlp(x.reshape(-1, hidden), *weights, activation, save, backend)
    out: Tensor = out_MH.view(*x.shape[:-1], hidden)
    return out


def _fits(x: Tensor, weight: Tensor, shape: tuple[int, int]) -> bool:
    return weight.dtype == x.dtype and weight.device == x.device and x.shape[-1] == shape[1] and weight.shape == shape


def _activation(layout: Layout, module: Any) -> str | None:
    if layout.act is None:
        return "silu"
    act: Any = getattr(module, layout.act)
    if act is F.silu:
        return "silu"
    if not isinstance(act, nn.Module) or not _is_unhooked(act):
        return None
    formula: str | None = _forward_of_activation(type(act))
    if formula == "torch-gelu":
        known = {"none": "gelu", "tanh": "gelu_tanh"}
        return known.get(act.approximate) if isinstance(act.approximate, str) else None
    if formula == "hf-gelu":
        return "gelu" if act.act is F.gelu else None
    if formula == "hf-gelu-tanh":
        inner: Any = act.act
        if not isinstance(inner, functools.partial):
            return None
        return "gelu_tanh" if inner.func is F.gelu and inner.keywords == {"approximate": "tanh"} else None
    return formula


def _is_plain(linear: Any) -> bool:
    """As guard.is_plain_linear, for the compiler to follow."""
    return (
        type(linear) is nn.Linear
        and nn.Linear.forward is guard.LINEAR_FORWARD
        and _is_unhooked(linear)
        and type(linear.weight) is nn.Parameter
    )


def _is_unhooked(module: Any) -> bool:
    return (
        "forward" not in module.__dict__
        and len(module._forward_hooks) == 0
        and len(module._forward_pre_hooks) == 0
        and len(module._backward_hooks) == 0
        and len(module._backward_pre_hooks) == 0
    )
