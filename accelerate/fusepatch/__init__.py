"""fusepatch: one line makes the models you have train and run on fused GPU kernels, says what it did, and undoes it.

    import fusepatch

    fusepatch.accelerate()

Importing this module imports torch, no other library, and starts no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import ops
    from .decline import DeclinedError, Reason, Route
    from .entry import accelerate, accelerated, disabled, restore, status
    from .explanation import explain
    from .parity_check.check import parity
    from .settings import SettingsError
    from .tuning.tune import tune
    from .warming import warmup

__version__ = "0.1.0.dev0"

_HOME = {
    "accelerate": "entry",
    "accelerated": "entry",
    "disabled": "entry",
    "restore": "entry",
    "status": "entry",
    "explain": "explanation",
    "DeclinedError": "decline",
    "Reason": "decline",
    "Route": "decline",
    "SettingsError": "settings",
    "parity": "parity_check.check",
    "tune": "tuning.tune",
    "warmup": "warming",
    "ops": "",
}

__all__ = [
    "DeclinedError",
    "Reason",
    "Route",
    "SettingsError",
    "accelerate",
    "accelerated",
    "disabled",
    "explain",
    "ops",
    "parity",
    "restore",
    "status",
    "tune",
    "warmup",
]


def __getattr__(name: str) -> Any:
    import importlib

    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fusepatch' has no attribute {name!r}")
    if not home:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
