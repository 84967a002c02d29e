"""Which GPUs there are, and whether kernels are made for them."""

from __future__ import annotations

import warnings
from typing import Any

from .. import arch
from ..decline import Reason
from . import cuda_libraries
from .diagnosis import Gpu
from .findings import WARNING, Examination


def _has_gpu(it: Examination, torch: Any) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = bool(torch.cuda.is_available())
    for warning in caught:
        it.add(
            WARNING,
            f"torch says of CUDA: {str(warning.message).strip()}",
            "update the driver, or install a torch that fits it",
        )
    if not found and torch.version.cuda is None and cuda_libraries.driver_supports():
        it.add(
            WARNING,
            f"this machine has a CUDA driver, but torch {torch.__version__} is not built for CUDA",
            "install a CUDA build of torch, as its install page says",
        )
    return found


def visible_gpus(it: Examination, torch: Any) -> tuple[Gpu, ...]:
    """Those that torch sees; one that no kernel is made for is a finding."""
    found: list[Gpu] = []
    if not _has_gpu(it, torch):
        return ()
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        family = arch.ARCHITECTURES.get(capability)
        gpu = Gpu(
            device=f"cuda:{index}",
            name=torch.cuda.get_device_name(index),
            capability=".".join(map(str, capability)),
            family=None if family is None else family.name,
            fused=family is not None and family.fused,
        )
        if family is None:
            what = f"{gpu.device}, {gpu.name}: {Reason.ARCHITECTURE.meaning} ({gpu.capability})"
            it.add(WARNING, what, Reason.ARCHITECTURE.fix)
        found.append(gpu)
    return tuple(found)
