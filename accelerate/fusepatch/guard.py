"""Is this call plain eager execution, and is this projection exactly what it looks like?

Two kinds of function. The fast ones say yes or no and run on every call. The slow ones (`why_*`) run only after a
no, and find the reason that helps the user most. Nothing here knows a model or a kernel.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from . import fingerprint
from .decline import Reason

LINEAR_FORWARD = fingerprint.genuine(
    nn.Linear.forward, "def forward(self, input):\n    return F.linear(input, self.weight, self.bias)", {"F": F}
)
"""`nn.Linear.forward` as torch ships it; None where something had replaced it before we came, and nothing is plain."""

_interpreter_stack = torch._C._functorch.peek_interpreter_stack
_dispatch_stack = torch._C._len_torch_dispatch_stack
_mode = torch._C._get_dispatch_mode
_MODES_OF_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_tracing_state = torch._C._get_tracing_state


# --------------------------------------------------------------------------------------------------- the call


def why_not_plain_call(x: Any) -> Reason | None:
    """None where a call on the input `x` is ordinary eager execution, else the reason. About 0.3 us.

    `torch.compile` is not looked for here: the patched forward asks `is_compiling()` before anything else, since
    nothing of this function may be traced.
    """
    if type(x) is not Tensor:
        return _why_not_tensor(x)
    if _interpreter_stack() is not None:
        return Reason.FUNCTORCH
    if _dispatch_stack() and _is_traced():
        return Reason.DISPATCH_MODE
    if forward_ad._current_level >= 0:
        return Reason.FORWARD_AD
    if _tracing_state() is not None:
        return Reason.EXPORTING
    if has_global_hooks():
        return Reason.GLOBAL_HOOKS
    return None


def has_global_hooks() -> bool:
    """Whether calling any module would run a hook that is registered for all."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def is_transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode AD is on."""
    return _interpreter_stack() is not None or forward_ad._current_level >= 0


def _is_traced() -> bool:
    """Whether a mode runs that stands for a graph or for fake data. Any other sees our kernels as operators."""
    return any(_mode(key) is not None for key in _MODES_OF_TRACERS)


def _why_not_tensor(x: Any) -> Reason:
    if isinstance(x, _loaded("torch.distributed.tensor", "DTensor")):
        return Reason.DTENSOR
    if isinstance(x, _loaded("torch.fx", "Proxy")):
        return Reason.EXPORTING
    if isinstance(x, _loaded("torch._subclasses.fake_tensor", "FakeTensor")):
        return Reason.DISPATCH_MODE
    return Reason.TENSOR_SUBCLASS


def why_autocast(x: Tensor, weight: Tensor) -> Reason | None:
    """None where autocast is off for the device of `x`, or would leave both tensors as they are."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return None if x.dtype is dtype and weight.dtype is dtype else Reason.AUTOCAST


# ----------------------------------------------------------------------------------------------- the projections


def is_plain_linear(module: Any) -> bool:
    """Whether `module` is exactly an nn.Linear whose call does nothing but `x @ weight.T + bias`. About 0.4 us.

    Read without `nn.Module.__getattr__`, which costs 0.4 us each. Hooks on the weight *tensor* are welcome:
    gradients still flow to the leaf, where they fire (optimizer-in-backward lives on them).
    """
    if type(module) is not nn.Linear:
        return False
    state = module.__dict__
    if (
        "forward" in state
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "weight" in state  # would hide the parameter
        or "bias" in state
    ):
        return False
    parameters = state["_parameters"]
    if type(parameters.get("weight")) is not nn.Parameter or nn.Linear.forward is not LINEAR_FORWARD:
        return False
    bias = parameters.get("bias", False)
    return (bias is None or type(bias) is nn.Parameter) and len(parameters) == 2


def why_not_plain_linear(module: Any) -> Reason:
    """The reason why `is_plain_linear(module)` is False, the most telling one first."""
    if not isinstance(module, nn.Module):
        return Reason.STRUCTURE
    of_class = _reason_of_class(type(module))  # type: ignore[arg-type]
    if of_class is not None:
        return of_class
    parameters = list(module.parameters(recurse=True))
    if any(nn.parameter.is_lazy(p) for p in parameters):
        return Reason.NOT_LINEAR
    if any(_is_quantised(p) for p in parameters):
        return Reason.QUANTISED
    if is_partitioned(module):
        return Reason.ZERO3
    if isinstance(module, _loaded("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")):
        return Reason.FSDP
    if any(isinstance(p, _loaded("torch.distributed.tensor", "DTensor")) for p in parameters):
        return Reason.DTENSOR
    if "_hf_hook" in module.__dict__:
        return Reason.ACCELERATE_HOOKS
    if any(p.device.type == "meta" for p in parameters):
        return Reason.META
    if nn.utils.parametrize.is_parametrized(module):
        return Reason.PARAMETRISED
    if "forward" in module.__dict__:
        return Reason.INSTANCE_FORWARD
    if has_hooks(module):
        return Reason.HOOKS
    if type(module) is not nn.Linear:
        return Reason.NOT_LINEAR
    if nn.Linear.forward is not LINEAR_FORWARD:
        return Reason.FOREIGN_FORWARD
    return Reason.WEIGHT_NOT_PARAMETER


def is_partitioned(module: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 holds a parameter in `module`."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def why_not_plain_linear_weight(weight: Tensor) -> Reason:
    """The reason why a plain linear layer holds a weight of an unexpected shape."""
    if hasattr(weight, "ds_id"):
        return Reason.ZERO3
    return Reason.SHAPE if weight.numel() else Reason.FSDP


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` would run any hook of its own."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )


def why_not_plain_activation(module: Any) -> Reason | None:
    """None where calling the activation `module` runs its class's forward and nothing else."""
    if not isinstance(module, nn.Module):
        return None
    if "forward" in module.__dict__:
        return Reason.ACCELERATE_HOOKS if "_hf_hook" in module.__dict__ else Reason.INSTANCE_FORWARD
    return Reason.HOOKS if has_hooks(module) else None


# ----------------------------------------------------------------------------------------------- libraries, unimported

_QUANTISERS = (
    "bitsandbytes",
    "torchao",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "hqq",
    "quanto",
    "optimum.quanto",
    "compressed_tensors",
    "eetq",
    "aqlm",
    "transformers.integrations.finegrained_fp8",
    "transformers.integrations.bitnet",
    "torch.ao.nn",
)


def _is_quantised(parameter: Tensor) -> bool:
    if not parameter.dtype.is_floating_point or parameter.element_size() == 1:
        return True
    return any(_within(kind.__module__, _QUANTISERS) for kind in type(parameter).__mro__)


@functools.lru_cache(maxsize=1024)
def _reason_of_class(kind: type) -> Reason | None:
    """What the library that a projection's class comes from says of it: adapters are met on every call of theirs."""
    modules = [base.__module__ for base in kind.__mro__]
    if any(_within(name, ("peft",)) for name in modules):
        return Reason.PEFT
    return Reason.QUANTISED if any(_within(name, _QUANTISERS) for name in modules) else None


def _within(module_name: str, packages: Iterable[str]) -> bool:
    return any(module_name == package or module_name.startswith(package + ".") for package in packages)


def _loaded(module_name: str, *names: str) -> tuple[type, ...]:
    """Those of the classes `names` that exist, where `module_name` is imported already; () where it is not."""
    module = sys.modules.get(module_name)
    found = (getattr(module, name, None) for name in names)
    return tuple(kind for kind in found if isinstance(kind, type))
