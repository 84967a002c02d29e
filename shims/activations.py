"""Which activation a live object computes: judged by the object itself, never by a config's name for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional as F

from .. import fingerprint, guard
from ..decline import Reason


def _torch_gelu(act: Any) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(act.approximate)


def _hf_gelu(act: Any) -> str | None:
    return "gelu" if act.__dict__.get("act") is F.gelu else None


def _hf_gelu_tanh(act: Any) -> str | None:
    inner = act.__dict__.get("act")
    is_tanh = (
        type(inner) is functools.partial
        and inner.func is F.gelu
        and not inner.args
        and inner.keywords == {"approximate": "tanh"}
    )
    return "gelu_tanh" if is_tanh else None


_KindOf = Callable[[Any], "str | None"]

# Class name -> what its forward must compute, and which activation an instance then is.
_TORCH: dict[str, tuple[str, _KindOf]] = {
    "SiLU": ("def forward(self, input):\n    return F.silu(input, inplace=self.inplace)", lambda act: "silu"),
    "GELU": ("def forward(self, input):\n    return F.gelu(input, approximate=self.approximate)", _torch_gelu),
}
# transformers.activations, 5.17 and 5.24.
_TRANSFORMERS: dict[str, tuple[str, _KindOf]] = {
    "SiLUActivation": ("def forward(self, input):\n    return nn.functional.silu(input)", lambda act: "silu"),
    "GELUActivation": ("def forward(self, input):\n    return self.act(input)", _hf_gelu),
    "GELUTanh": ("def forward(self, input):\n    return self.act(input)", _hf_gelu_tanh),
    "PytorchGELUTanh": ("def forward(self, input):\n    return self.act(input)", _hf_gelu_tanh),
}


_GLOBALS = {"F": F, "nn": nn}

_known: dict[type, tuple[Any, _KindOf]] = {}
"""Classes that were found genuine: the forward that makes them so, and which activation an instance is."""


def _look_up(kind: type) -> tuple[Any, _KindOf] | None:
    """What `_known` should say of a class; None for a stranger, or one whose forward somebody replaced."""
    for module_name, table in (("torch.nn", _TORCH), ("transformers.activations", _TRANSFORMERS)):
        if kind.__name__ in table and getattr(sys.modules.get(module_name), kind.__name__, None) is kind:
            source, which = table[kind.__name__]
            names = {name: value for name, value in _GLOBALS.items() if f"{name}." in source}
            forward = fingerprint.genuine(vars(kind).get("forward"), source, names)
            return None if forward is None else (forward, which)
    return None


def formula_of(kind: type) -> str | None:
    """What instances of an activation class compute: `silu`, or a formula that their attributes choose the kind of."""
    known = _known.get(kind) or _look_up(kind)
    if known is None or kind.forward is not known[0]:  # type: ignore[attr-defined]
        return None
    formulas: dict[_KindOf, str] = {_torch_gelu: "torch-gelu", _hf_gelu: "hf-gelu", _hf_gelu_tanh: "hf-gelu-tanh"}
    return formulas.get(known[1], "silu")


def kind_of(act: Any) -> str | Reason:
    """`silu`, `gelu` or `gelu_tanh`, or why calling `act` is not exactly that."""
    if act is F.silu:
        return "silu"
    kind = type(act)
    known = _known.get(kind)
    if known is None:
        known = _look_up(kind)
        if known is None:
            return Reason.ACTIVATION
        _known[kind] = known
    forward, which = known
    if kind.forward is not forward:
        return Reason.FOREIGN_FORWARD
    why = guard.why_not_plain_activation(act)
    if why is not None:
        return why
    return which(act) or Reason.ACTIVATION
