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

_TORCH: dict[type, tuple[Any, _KindOf]] = {
    nn.SiLU: (nn.SiLU.forward, lambda act: "silu"),
    nn.GELU: (nn.GELU.forward, _torch_gelu),
}

# transformers.activations, 5.17 and 5.24: class name -> what its forward must compute, and which activation it then is.
_TRANSFORMERS: dict[str, tuple[str, _KindOf]] = {
    "SiLUActivation": ("def forward(self, input):\n    return nn.functional.silu(input)", lambda act: "silu"),
    "GELUActivation": ("def forward(self, input):\n    return self.act(input)", _hf_gelu),
    "GELUTanh": ("def forward(self, input):\n    return self.act(input)", _hf_gelu_tanh),
    "PytorchGELUTanh": ("def forward(self, input):\n    return self.act(input)", _hf_gelu_tanh),
}


@functools.cache
def _known(kind: type) -> tuple[Any, _KindOf] | None:
    """(the forward that makes instances of `kind` what they are, which activation one is), None for a stranger."""
    if kind in _TORCH:
        return _TORCH[kind]
    library = sys.modules.get("transformers.activations")
    if library is None or getattr(library, kind.__name__, None) is not kind or kind.__name__ not in _TRANSFORMERS:
        return None
    source, kind_of = _TRANSFORMERS[kind.__name__]
    forward = kind.__dict__.get("forward")
    genuine = fingerprint.of(forward) == fingerprint.of_source(source) and fingerprint.reads_globals(
        forward, {"nn": nn} if "nn." in source else {}
    )
    return (forward, kind_of) if genuine else None


def kind_of(act: Any) -> str | Reason:
    """`silu`, `gelu` or `gelu_tanh`, or why calling `act` is not exactly that."""
    if act is F.silu:
        return "silu"
    kind = type(act)
    known = _known(kind)  # type: ignore[arg-type]
    if known is None:
        return Reason.ACTIVATION
    forward, which = known
    if kind.forward is not forward:
        return Reason.FOREIGN_FORWARD
    why = guard.why_not_plain_activation(act)
    if why is not None:
        return why
    return which(act) or Reason.ACTIVATION
