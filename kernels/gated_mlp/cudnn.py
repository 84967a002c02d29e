"""NVIDIA's own gated MLP as a backend: `swiglu_mlp` of nvidia-cudnn-frontend, called as the autograd function it is.

    out = (silu(x Wg^T) * (x Wu^T)) Wd^T          bf16, no biases, gate and up in two weights

Followed as of release 1.32.0. What it saves is its own affair, so nothing of ours comes between it and autograd: x, the
weights, gate, up and h, where all gradients are wanted; 3*M*I elements besides x. A FLOP counter does not see its
GEMMs, which are no operators of torch.

It checks neither the GPU nor any version, so both are checked here. It keeps a plan for each GEMM, number of tokens and
stream, for good, and finds the fastest by stopping the device: so only `warmup()` admits a number of tokens.

Tensors: M tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

import ast
import functools
import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...decline import Reason
from ...errors import type_and_first_line
from .. import vendor_sources
from ..vendor_sources import DISTRIBUTION

log = logging.getLogger("fusepatch")

OLDEST_FRONTEND = (1, 32)
OLDEST_CUDNN = 91900
"""9.19, the oldest that it was seen to run with: on an H200, where it then ran with no other."""
PUBLISHED_CUDNN = 92600
"""9.26, with which its published figures were measured. Before it, the backward pass takes more kernels."""

MODULE = "gemm/ops/swiglu_mlp.py"
INTERFACE: dict[str, tuple[str, ...] | None] = {
    "swiglu_mlp": ("x", "Wg", "Wu", "Wd"),
    # That it is one autograd function, told at the call which gradients are wanted: what it saves follows from that.
    "_GatedMLP.forward": ("ctx", "x", "Wg", "Wu", "Wd", "grad_mask", "activation", "situ_beta", "situ_linear_beta"),
    "_GatedMLP.backward": ("ctx", "dout"),
    # Whose plans depend on what: a warm-up with all gradients, and one with none, makes each plan that a call may need.
    "_swiglu_act": ("x", "Wg", "Wu", "save_preacts", "activation", "situ_beta", "situ_linear_beta"),
    "_mm": ("a2", "b2"),
    "_dswiglu": ("dh", "gate", "up", "activation", "situ_beta", "situ_linear_beta"),
    "_frost_dswiglu": ("dout2", "Wd", "gate", "up", "activation", "situ_beta", "situ_linear_beta"),
    "_handle": ("device",),
    # Where the plans are kept, for good.
    "_HANDLES": None,
    "_MM_CACHE": None,
    "_SWIGLU_CACHE": None,
    "_DSWIGLU_CACHE": None,
    "_FROST_DSWIGLU_CACHE": None,
}
"""What of the module must be there, and the parameters of what is a function."""


def gated_mlp(x_MH: Tensor, w_gate_IH: Tensor, w_up_IH: Tensor, w_down_HI: Tensor) -> Tensor:
    """`(silu(x Wg^T) * (x Wu^T)) Wd^T` [M, H], of dense bf16 tensors. Has a first derivative only, and says so."""
    out_MH: Tensor = _swiglu_mlp()(x_MH, w_gate_IH, w_up_IH, w_down_HI)
    return _Once.apply(out_MH) if out_MH.requires_grad else _no_view(out_MH)  # type: ignore[no-untyped-call]


class _Once(Function):
    """Nothing but a refusal to be differentiated twice: cuDNN's backward pass would leave a part of it out."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return _no_view(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "trying to differentiate (create_graph=True) through the backward pass of cuDNN's gated MLP, which has "
                "a first derivative only; run this part inside `with fusepatch.disabled():`"
            )
        return dout


def _no_view(out: Tensor) -> Tensor:
    """The same memory, and no view: autograd lets nobody write to a view that was made inside a Function."""
    return torch.empty(0, dtype=out.dtype, device=out.device).set_(out.detach())  # type: ignore[call-overload,no-any-return]


@functools.cache
def _swiglu_mlp() -> Any:
    found = importlib.import_module("cudnn.gemm").swiglu_mlp
    return getattr(found, "swiglu_mlp", found)  # the module of that name, where someone imported that first


# ------------------------------------------------------------------------------------------------- what can be served


def why_not() -> Reason | None:
    """Why no call can be served here, if so. Imports the frontend, and has it load cuDNN."""
    found = _cudnn_version()
    return None if found is not None and found >= OLDEST_CUDNN else Reason.PACKAGE_DIFFERS


def is_as_published() -> bool:
    """Whether this cuDNN is the one that its vendor measured with, or newer."""
    return (_cudnn_version() or 0) >= PUBLISHED_CUDNN


def not_supported() -> tuple[type[Exception], ...]:
    """What the frontend raises for what it does not support. Any other exception is an error."""
    return NotImplementedError, importlib.import_module("cudnn").cudnnGraphNotSupportedError


@functools.cache
def _cudnn_version() -> int | None:
    """The version of the cuDNN that the frontend loads, which need not be torch's; None where it finds none."""
    try:
        found = int(importlib.import_module("cudnn").backend_version())
    except Exception as error:  # whatever a broken installation makes it raise
        log.warning("cuDNN's frontend can't be used: %s", type_and_first_line(error))
        return None
    if found < OLDEST_CUDNN:
        log.warning("cuDNN's frontend found cuDNN %d; the backend `cudnn` needs %d", found, OLDEST_CUDNN)
    return found


@functools.cache
def drift() -> tuple[str, ...]:
    """Where the installed frontend is not the one that this file was written against, in words; it is not imported."""
    version = vendor_sources.version_of(DISTRIBUTION)
    if version is None:
        return (f"there is a package `cudnn` that {DISTRIBUTION} did not bring",)
    if vendor_sources.leading_numbers(version) < OLDEST_FRONTEND:
        return (f"{DISTRIBUTION} is {version}, older than {'.'.join(map(str, OLDEST_FRONTEND))}",)
    path = _path()
    try:
        defined = _definitions(path.read_text())
    except (OSError, SyntaxError) as error:
        return (f"{DISTRIBUTION} {version}: {path} can't be read: {error}",)
    return tuple(
        f"{DISTRIBUTION} {version}: {MODULE} has {_described(name, defined)}, not {_described(name, INTERFACE)}"
        for name, parameters in INTERFACE.items()
        if name not in defined or defined[name] != parameters
    )


def _path() -> Path:
    return vendor_sources.path_of(MODULE)


def _definitions(source: str) -> dict[str, tuple[str, ...] | None]:
    """The parameters of each function and method at the top of a module; None for a name that is assigned there."""
    found: dict[str, tuple[str, ...] | None] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            found |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": _parameters(method) for method in methods}
    return found


def _parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    arguments = node.args
    stars = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return tuple(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars))


def _described(name: str, among: dict[str, tuple[str, ...] | None]) -> str:
    if name not in among:
        return f"no `{name}`"
    parameters = among[name]
    return f"`{name}`" if parameters is None else f"`{name}({', '.join(parameters)})`"
