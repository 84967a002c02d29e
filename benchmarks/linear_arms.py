"""Who computes linear attention: FLA's own kernels, other packages in FLA's registry of backends, and fusepatch.

FLA reads the variables by which its backends are turned off on every call, so they are set while an arm runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import fusepatch

from .linear_cases import Case, Op

Context = Callable[[Op, str], AbstractContextManager[Any]]
"""Takes the op and the kind of device."""


@dataclass(frozen=True, eq=False)
class Arm:
    """Who computes."""

    name: str
    what: str
    context: Context
    packages: tuple[str, ...] = ("fla", "triton")
    devices: tuple[str, ...] = ("cuda",)
    ops: tuple[str, ...] = ("kda", "gated_delta_rule")
    why_no_layer: str = ""
    """Why FLA's layer does not come to it, if so."""
    proof: tuple[str, str] | None = None
    """A module's function that must be called where the arm computes, as it does only where it takes the call."""


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These variables in the environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _backends(*, flash_qla: bool = False, tilelang: bool = False) -> Context:
    """FLA with these of the backends that it knows, and none of the others."""
    switches = {"FLA_FLASH_QLA": flash_qla, "FLA_TILELANG": tilelang, "FLA_FLASH_KDA": False, "FLA_GLUON": False}
    return lambda op, device: environment(**{name: str(int(on)) for name, on in switches.items()})


def _backend_of(op: Op) -> str:
    """Ours for the GPU that there is."""
    if op.name == "kda":
        return "cudnn_hopper"
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "flash_qla" if on_hopper and importlib.util.find_spec("flash_qla") is not None else "cudnn_frost"


@contextlib.contextmanager
def _accelerated(op: Op, device: str) -> Iterator[None]:
    """`accelerated(op)` with the backend by name, as long as these serve only where they are named."""
    name = f"FUSEPATCH_{op.name.upper()}_BACKEND"
    backend = "reference" if device == "cpu" else _backend_of(op)
    chosen = {"FUSEPATCH_LOG": "warning", name: backend}
    with (
        _backends()(op, device),
        environment(**{variable: os.environ.get(variable, value) for variable, value in chosen.items()}),
        fusepatch.accelerated(op.name),
    ):
        yield


ARMS = (
    Arm("fla", "FLA's own Triton kernels", _backends()),
    Arm(
        "fla_tilelang",
        "FLA's, with its TileLang kernel in the backward pass",
        _backends(tilelang=True),
        packages=("fla", "triton", "tilelang"),
        ops=("gated_delta_rule",),
        proof=("fla.ops.common.backends.tilelang.chunk_bwd", "chunk_bwd_dqkwg_tilelang"),
    ),
    Arm(
        "flash_qla",
        "FlashQLA, through FLA's registry",
        _backends(flash_qla=True),
        packages=("fla", "triton", "tilelang", "flash_qla"),
        ops=("gated_delta_rule",),
        why_no_layer="FLA's layer leaves gate and sigmoid to the kernel, which FlashQLA does not take",
        proof=("flash_qla", "chunk_gated_delta_rule"),
    ),
    Arm("fusepatch", "under fusepatch.accelerate(op)", _accelerated, devices=("cuda", "cpu")),
)
"""The first is the one that the others are held to."""


def select(names: Sequence[str] | None, op: Op) -> list[Arm]:
    """The arms of an op, in order; all where none is named."""
    return [arm for arm in ARMS if op.name in arm.ops and (names is None or arm.name in names)]


def why_unavailable(arm: Arm, case: Case) -> str | None:
    """Why the arm is not even tried, if so."""
    if case.device not in arm.devices:
        return f"unavailable: needs a {' or '.join(arm.devices)} device"
    if case.device == "cpu" and case.scope == "layer":
        return "unavailable: FLA's layer needs a cuda device"
    missing = [package for package in arm.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"unavailable: no package {', '.join(missing)}"
    return f"unavailable: {arm.why_no_layer}" if case.scope == "layer" and arm.why_no_layer else None


@contextlib.contextmanager
def watched(arm: Arm) -> Iterator[Callable[[], str | None]]:
    """Yields what says, once the arm has run in here, why it was not this arm that computed, if so."""
    if arm.name == "fusepatch":
        # The counts are those of the patch, and gone once the arm's context is left.
        yield lambda: None if fusepatch.status().native_calls() else fusepatch.status().summary()
        return
    if arm.proof is None:
        yield lambda: None
        return
    module, name = importlib.import_module(arm.proof[0]), arm.proof[1]
    function, calls = getattr(module, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    setattr(module, name, counting)
    try:
        yield lambda: None if calls else f"FLA never called {'.'.join(arm.proof or ())}"
    finally:
        setattr(module, name, function)
