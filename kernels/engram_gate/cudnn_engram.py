"""The Engram gate on exactly SM100: NVIDIA's `cudnn.engram`, both passes.

Written against the prepared plans `EngramGateSavedForward` and `EngramGateSavedBackward` of nvidia-cudnn-frontend
1.32.0. Of what reference.py defines they compute one form, with a residual and `zero_dot="copysign"`, in bf16 for four
streams of 5120. What they save is what the op saves. The backward pass takes multiples of 64 up to 8192 tokens; the
forward pass alone would take more, but whether a gradient is wanted must not choose the kernels.

**Where they differ from the definition**, read from their sources:

- A masked token's gate is 0, but its key and value are still multiplied: its gradients, and those of the weight, are
  NaN where they are not finite, its output too, and a -0 of x comes out as 0. The op promises otherwise, so a call with
  a mask is declined.
- A dot product that is NaN is clamped like a small one. So where x or a key is not finite, the output shows it there
  alone and not in the whole row, and gradients may stay finite.
- The slope gate * (1 - gate) is computed as it stands: near 1, what goes through the gate is off by 2^-24 / (1 - gate).

The backward kernels read all inputs and write all gradients. Each number of tokens is compiled by itself, for seconds,
and kept. None of it has run on a GPU through this package.

Tensors: M tokens, S = 4 streams, D = 5120; kv [M, (S+1)*D] packs the keys and the value; saved [M, S, 4].
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...decline import Reason
from .. import vendor_sources

if TYPE_CHECKING:
    from .choose import Problem

STREAMS, WIDTH = 4, 5120
TOKENS_MULTIPLE, MOST_TOKENS = 64, 8192

_SOURCES = ("api.py", "_forward.py", "_backward.py", "_reductions.py", "_math.py")
_DIGEST = "7691ec016658e245ee3d2a47157837f03943999e4095f6a67fe2b3515f2190b5"
"""What all of the above was read from, and the SHA-256 of these files one after the other."""
_OLDEST = {"triton": (3, 7), "nvidia-cutlass-dsl": (4, 7)}
"""What cuDNN's own checks ask for."""


# ------------------------------------------------------------------------------------------------- what it can serve


def why_not(problem: Problem) -> Reason | None:
    """Why neither pass may run for this problem, if so; all but the number of tokens, the GPU and the dtype of x.

    Imports cuDNN's frontend where all else fits.
    """
    if problem.masked or problem.rounded or not problem.residual or problem.zero_dot != "copysign":
        return Reason.OPTION
    if (problem.streams, problem.width) != (STREAMS, WIDTH):
        return Reason.SIZE_NOT_ADMITTED
    return why_no_library()


def takes(tokens: int) -> bool:
    """Whether both passes take so many tokens."""
    return 0 < tokens <= MOST_TOKENS and tokens % TOKENS_MULTIPLE == 0


@functools.cache
def drift() -> tuple[str, ...]:
    """Where an installed package is not one that this file was written against, in words; nothing is imported."""
    found = tuple(
        f"{name} is {version}, and cudnn.engram asks for {'.'.join(map(str, oldest))}"
        for name, oldest in _OLDEST.items()
        if (version := vendor_sources.version_of(name)) is not None and vendor_sources.leading_numbers(version) < oldest
    )
    files = [_folder() / name for name in _SOURCES]
    return found + vendor_sources.why_not_as_read("cudnn.engram", files, _DIGEST)


def _folder() -> Path:
    return vendor_sources.path_of("engram")


@functools.cache
def why_no_library() -> Reason | None:
    """Why cuDNN's plans can't be had here: not installed, or with packages that they say are too old."""
    try:
        _api()._reductions()
    except ImportError:
        return Reason.MISSING_PACKAGE
    except (AttributeError, RuntimeError):
        return Reason.PACKAGE_DIFFERS
    return None


def _api() -> Any:
    return importlib.import_module("cudnn.engram.api")


# ------------------------------------------------------------------------------------------------- the two passes


def engram_forward(
    x_MSD: Tensor,
    key_MSD: Tensor,
    value_MD: Tensor,
    weight_SD: Tensor,
    mask_M: Tensor | None,
    eps: float,
    residual: bool,
    zero_dot: str,
    *,
    out_MSD: Tensor,
    saved_MS4: Tensor,
    key_weight_SD: Tensor | None = None,
) -> None:
    """As in reference.py, of what `why_not` lets through."""
    assert mask_M is None and key_weight_SD is None and residual and zero_dot == "copysign"
    all_on_M = torch.ones(x_MSD.shape[0], dtype=torch.bool, device=x_MSD.device)
    inputs = (x_MSD.contiguous(), _packed(key_MSD, value_MD), weight_SD.float(), all_on_M)
    _plan("EngramGateSavedForward", *inputs, eps=eps).execute(*inputs, out_MSD, saved_MS4)


def engram_backward(
    grad_out_MSD: Tensor,
    x_MSD: Tensor | None,
    key_MSD: Tensor | None,
    value_MD: Tensor | None,
    weight_SD: Tensor | None,
    saved_MS4: Tensor,
    residual: bool,
    masked: bool,
    *,
    grad_x_MSD: Tensor | None,
    grad_key_MSD: Tensor | None,
    grad_value_MD: Tensor | None,
    grad_weight_SD: Tensor | None,
    partial_PSD: Tensor | None = None,
) -> None:
    """As in reference.py; `partial_PSD` is not used, as cuDNN's scratch has another size."""
    assert residual and not masked
    tokens, streams, width = grad_out_MSD.shape
    rows, packed, row = (tokens, streams, width), (tokens, (streams + 1) * width), (streams, width)
    zeros, empty, wide = grad_out_MSD.new_zeros, grad_out_MSD.new_empty, torch.float32
    # What is not given is read for gradients alone that are not wanted.
    x = zeros(rows) if x_MSD is None else x_MSD.contiguous()
    kv = zeros(packed) if key_MSD is None or value_MD is None else _packed(key_MSD, value_MD)
    weight = zeros(row, dtype=wide) if weight_SD is None else weight_SD.float()
    inputs = (x, kv, weight, saved_MS4.contiguous(), grad_out_MSD.contiguous())

    grad_kv = None
    if grad_key_MSD is not None and grad_value_MD is not None:
        grad_kv = _packed_as_they_are(grad_key_MSD, grad_value_MD)
    apart = grad_kv is None
    grad_kv = empty(packed) if grad_kv is None else grad_kv
    grad_x = grad_x_MSD if grad_x_MSD is not None and grad_x_MSD.is_contiguous() else empty(rows)
    is_wide = grad_weight_SD is not None and grad_weight_SD.dtype == wide
    grad_weight = grad_weight_SD if grad_weight_SD is not None and is_wide else empty(row, dtype=wide)
    plan = _plan("EngramGateSavedBackward", *inputs)
    scratch = empty(plan.scratch_workspace_bytes(), dtype=torch.uint8)
    plan.execute(*inputs, grad_x, grad_kv, grad_weight, scratch)

    copies = [(grad_x_MSD, grad_x), (grad_weight_SD, grad_weight)]
    if apart:
        keys = streams * width
        copies += [(grad_key_MSD, grad_kv[:, :keys].reshape(rows)), (grad_value_MD, grad_kv[:, keys:])]
    for wanted, written in copies:
        if wanted is not None and wanted is not written:
            wanted.copy_(written)


def _packed(key_MSD: Tensor, value_MD: Tensor) -> Tensor:
    """kv, contiguous: the memory of keys and value itself where they lie so, else a copy."""
    kv = _packed_as_they_are(key_MSD, value_MD)
    return torch.cat([key_MSD.flatten(1), value_MD], 1) if kv is None else kv


def _packed_as_they_are(key_MSD: Tensor, value_MD: Tensor) -> Tensor | None:
    """kv in the memory of keys and value, where these are halves of one contiguous tensor."""
    tokens, streams, width = key_MSD.shape
    row = (streams + 1) * width
    lies_so = (
        key_MSD.stride() == (row, width, 1)
        and value_MD.stride() == (row, 1)
        and key_MSD.untyped_storage().data_ptr() == value_MD.untyped_storage().data_ptr()
        and value_MD.storage_offset() == key_MSD.storage_offset() + streams * width
    )
    return key_MSD.as_strided((tokens, row), (row, 1)) if lies_so else None


_plans: dict[tuple[Any, ...], Any] = {}


def _plan(name: str, *tensors: Tensor, **options: float) -> Any:
    """cuDNN's plan for tensors like these, compiled. There are as many as numbers of tokens that it takes, 128, for
    each device and eps."""
    key = (name, tensors[0].device, tensors[0].shape[0], *options.values())
    plan = _plans.get(key)
    if plan is None:
        plan = getattr(_api(), name)(*tensors, **options)
        plan.compile()
        _plans[key] = plan
    return plan
