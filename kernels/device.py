"""The device that kernels are launched on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def made_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The device as the current one, where Triton and cuDNN launch. It nearly always is: then no context is entered.

    A CPU, where Triton's interpreter runs, is left alone.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()
