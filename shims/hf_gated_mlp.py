"""Gated MLPs of Hugging Face transformers (5.17 to 5.24): which classes, how to read them, what runs instead.

Classes are found by what the code of their `forward` does, not by name: every template below is the text of one body,
compiled by the running interpreter and compared instruction by instruction. Nearly all of the library's gated MLPs are
the first two. Look-alikes (a clamp, a multiplier, an inner norm, dropout, sparsity, swapped halves) compile to other
code and never match. docs/matches/ lists what matches in a release, and a test keeps the list true.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .. import fingerprint
from ..catalogue import Assumed
from ..decline import Decision, Reason, original
from ..ledger import Record
from ..patch import Switch
from . import gated_mlp, hf
from .gated_mlp import Layout


@dataclass(frozen=True)
class Template:
    """One spelling of a gated MLP: the text of the forward, and where it keeps its parts."""

    layout: Layout
    source: str
    reads: tuple[tuple[str, Any], ...] = ()
    """Global names that the text uses, and what they must mean."""


_SEPARATE = Layout("gate_proj", "up_proj", "down_proj", "act_fn")

TEMPLATES: tuple[Template, ...] = (
    # LlamaMLP and 135 more
    Template(
        _SEPARATE,
        """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
""",
    ),
    # Idefics2MLP and 8 more
    Template(
        _SEPARATE,
        """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
    ),
    # Llama4TextMLP
    Template(
        Layout("gate_proj", "up_proj", "down_proj", "activation_fn"),
        """
def forward(self, x):
    product = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(product)
""",
    ),
    # RecurrentGemmaMlp
    Template(
        _SEPARATE,
        """
def forward(self, x):
    gate = self.act_fn(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x))
""",
    ),
    # Phi3MLP and 9 more: gate and up packed in one projection, the gate first
    Template(
        Layout("gate_up_proj", None, "down_proj", "activation_fn"),
        """
def forward(self, x):
    up = self.gate_up_proj(x)
    gate, up = up.chunk(2, dim=-1)
    up = up * self.activation_fn(gate)
    return self.down_proj(up)
""",
    ),
    # GraniteMoeSharedMLP and 2 more: packed, the gate first
    Template(
        Layout("input_linear", None, "output_linear", "activation"),
        """
def forward(self, x):
    x = self.input_linear(x)
    halves = x.chunk(2, dim=-1)
    x = self.activation(halves[0]) * halves[1]
    x = self.output_linear(x)
    return x
""",
    ),
    # Lfm2MLP and 3 more
    Template(
        Layout("w1", "w3", "w2", None),
        """
def forward(self, x):
    return self.w2(F.silu(self.w1(x)) * self.w3(x))
""",
        reads=(("F", F),),
    ),
)


@functools.cache
def _by_fingerprint() -> dict[fingerprint.Fingerprint, Template]:
    return {fingerprint.of_source(template.source): template for template in TEMPLATES}


def template_of(forward: Any) -> Template | None:
    """The template that `forward` is a spelling of."""
    found = _by_fingerprint().get(fingerprint.of(forward) or ())
    if found is None or not fingerprint.reads_globals(forward, dict(found.reads)):
        return None
    return found


# --------------------------------------------------------------------------------------------- the catalogue's side


wants_module = hf.wants_module


def matches(forward: Any) -> bool:
    """Whether `forward` is a spelling of a gated MLP."""
    return template_of(forward) is not None


def looks_alike(module: nn.Module) -> bool:
    """Whether `module` has the projections of a gated MLP."""
    children = module.__dict__["_modules"]
    return any(
        all(name in children for name in (t.layout.gate, t.layout.up, t.layout.down) if name is not None)
        for t in TEMPLATES
    )


def size_of(module: nn.Module) -> tuple[object, ...]:
    """Shapes, dtypes and devices of the weights."""
    return gated_mlp.size_of(module)


def warm(module: nn.Module, forward: Callable[..., Any], tokens: int) -> Decision:
    """Runs the route that `module(x)` would take, on dummy data."""
    template = template_of(forward)
    return gated_mlp.warm(template.layout, module, tokens) if template else original(Reason.FORWARD_DIFFERS)


def example_input(module: nn.Module, forward: Callable[..., Any], tokens: int) -> Tensor | None:
    """An input of `module(x)`, for `tune()`."""
    template = template_of(forward)
    return gated_mlp.example_input(template.layout, module, tokens) if template else None


def decide(module: nn.Module, forward: Callable[..., Any], assumed: Assumed) -> Decision:
    """The route that `module(x)` would take."""
    template = template_of(forward)
    return gated_mlp.decide_module(template.layout, module, assumed) if template else original(Reason.FORWARD_DIFFERS)


def make_forward(library_forward: Callable[..., Any], switch: Switch, record: Record) -> Callable[..., Any]:
    """The forward that stands in for `library_forward`, with its signature."""
    template = template_of(library_forward)
    assert template is not None
    return gated_mlp.make_forward(library_forward, switch, record, template.layout)
