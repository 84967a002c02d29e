"""`fla.modules.GatedMLP` of flash-linear-attention (0.5.2 to 0.6.0).

One class, which 34 model files import. Its `fuse_swiglu` path is pointwise already, and hands the down projection's
*weight* to a kernel without calling `down_proj`; so there is a fused route or the library's own code, and no
pointwise route of ours. Hooks or adapters on `down_proj` are ignored by the library itself there; we decline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import fingerprint
from ..catalogue import Assumed
from ..decline import Decision, Reason
from ..ledger import Record
from ..patch import Switch
from . import gated_mlp
from .gated_mlp import Layout

_SOURCE = """
def forward(self, x, **kwargs):
    gate, y = self.gate_proj(x), self.up_proj(x)
    if self.hidden_act == 'powlu':
        if self.fuse_swiglu:
            return powglu_linear(gate, y, self.down_proj.weight, self.down_proj.bias, self.powglu_power)
        return self.down_proj(powglu(gate, y, self.powglu_power))
    if self.fuse_swiglu:
        return self.swiglu_linear(gate, y, self.down_proj.weight, self.down_proj.bias)
    return self.down_proj(swiglu(gate, y))
"""


def _why_not_stock(module: nn.Module) -> Reason | None:
    state = module.__dict__
    if state.get("hidden_act") != "swish":
        return Reason.ACTIVATION
    tail = type(state["_modules"].get("swiglu_linear"))
    is_stock = (tail.__module__, tail.__qualname__) == ("fla.modules.mlp", "SwiGLULinear")
    return None if is_stock or not state.get("fuse_swiglu") else Reason.STRUCTURE


_LAYOUT = Layout(
    "gate_proj",
    "up_proj",
    "down_proj",
    None,
    pointwise=False,
    # A sub-module of its own, so that tensor parallelism can hook it.
    untouched=("swiglu_linear",),
    why_not=_why_not_stock,
)


@functools.cache
def _fingerprint() -> fingerprint.Fingerprint:
    return fingerprint.of_source(_SOURCE)


def wants_module(name: str) -> bool:
    """The file that defines the class."""
    return name == "fla.modules.mlp"


def matches(forward: Any) -> bool:
    """Whether `forward` is that of GatedMLP."""
    return fingerprint.of(forward) == _fingerprint()


def looks_alike(module: nn.Module) -> bool:
    """Whether `module` is FLA's, and has the projections of a gated MLP."""
    children = module.__dict__["_modules"]
    return type(module).__module__.startswith("fla.") and all(name in children for name in _LAYOUT.children)


def size_of(module: nn.Module) -> tuple[object, ...]:
    """Shapes, dtypes and devices of the weights."""
    return gated_mlp.size_of(module)


def warm(module: nn.Module, forward: Callable[..., Any], tokens: int) -> Decision:
    """Runs the route that `module(x)` would take, on dummy data."""
    return gated_mlp.warm(_LAYOUT, module, tokens)


def example_input(module: nn.Module, forward: Callable[..., Any], tokens: int) -> Tensor | None:
    """An input of `module(x)`, for `tune()`."""
    return gated_mlp.example_input(_LAYOUT, module, tokens)


def decide(module: nn.Module, forward: Callable[..., Any], assumed: Assumed) -> Decision:
    """The route that `module(x)` would take."""
    return gated_mlp.decide_module(_LAYOUT, module, assumed)


def make_forward(library_forward: Callable[..., Any], switch: Switch, record: Record) -> Callable[..., Any]:
    """The forward that stands in for `library_forward`, with its signature."""
    return gated_mlp.make_forward(library_forward, switch, record, _LAYOUT)
