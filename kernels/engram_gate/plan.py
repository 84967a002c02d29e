"""The Engram gate for training loops that own their memory: everything is settled before the first call.

    plan = EngramGatePlan(4096, 4, 5120, device="cuda:0", eps=1e-20)     no tensor and no GPU is needed
    plan.compile()
    plan.forward(x, kv, weight, out=out, saved=saved)
    plan.backward(grad_out, x, kv, weight, saved, grad_x=..., grad_kv=..., grad_weight=..., workspace=workspace)

On a GPU `forward` and `backward` allocate, compile and synchronise nothing, so they can be captured in a CUDA graph. On
a CPU they run plain PyTorch, which allocates. Autograd is not involved.

Tensors, all contiguous and on 16 bytes, for M tokens, S streams, D width: x, out, grad_out, grad_x [M, S, D]; kv,
grad_kv [M, (S+1)*D]; weight, grad_weight [S, D]; token_mask [M] bool; saved [M, S, 4]; workspace [bytes] uint8.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...decline import Reason
from .. import backends
from . import choose, op, reference, sizes

_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class EngramGatePlan:
    """One size and one set of options. Raises TypeError or ValueError for what no kernel computes."""

    tokens: int
    streams: int
    width: int
    device: torch.device | str
    """With its index, as `cuda:0`: what is current when the plan is made or run must not matter."""
    eps: float
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    residual: bool = True
    zero_dot: str = "copysign"
    masked: bool = False
    """Whether `forward` takes a token_mask."""
    _compiled: list[ModuleType] = field(default_factory=list, init=False, repr=False)
    """The module with the kernels, once `compile()` has run."""

    def __post_init__(self) -> None:
        for name in ("tokens", "streams", "width"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < (0 if name == "tokens" else 1):
                raise ValueError(f"{name} must be positive, got {value}")
        op.check_options(self.dtype, self.weight_dtype, self.width, self.eps, self.residual, self.zero_dot)
        object.__setattr__(self, "device", torch.device(self.device))
        if self._device.type not in ("cpu", "cuda") or (self._device.type == "cuda" and self._device.index is None):
            raise ValueError(f"device must be `cpu`, or a GPU with its index, as `cuda:0`; got {self._device}")

    @property
    def _device(self) -> torch.device:
        assert isinstance(self.device, torch.device)
        return self.device

    @property
    def saved_dtype(self) -> torch.dtype:
        """That of `saved`."""
        return reference.wide_dtype(self.dtype)

    @property
    def workspace_bytes(self) -> int:
        """How much workspace `backward` needs where the weight's gradient is wanted. It may hold anything."""
        most = sizes.MOST_MULTIPROCESSORS * sizes.programs_per_multiprocessor(self.width)
        programs = min(self.tokens, most) if self._device.type == "cuda" else 0
        return programs * self.streams * self.width * 4

    def compile(self) -> None:
        """Settles which kernels run, checks them where they never ran, and compiles them.

        Raises RuntimeError where no kernel serves the plan's device.
        """
        if self._compiled:
            return
        backend: choose.Backend | Reason = choose.REFERENCE
        if self._device.type == "cuda":
            problem = choose.Problem(
                self._device, self.dtype, self.weight_dtype, self.streams, self.width, self.residual, self.zero_dot,
                self.masked,
            )  # fmt: skip
            backend = choose.choose(problem, self.tokens, any_size=True)
        if isinstance(backend, Reason):
            raise RuntimeError(f"no kernel serves this plan, because {backend.value}: {backend.meaning}")
        if not backend.prepared:
            raise RuntimeError(f"the backend {backend.name} allocates, so it serves no plan: name another, or none")
        kernels = backends.load(backend)
        if backend.native:
            kernels.compile_for(
                self._device, self.tokens, self.dtype, self.weight_dtype, self.streams, self.width, self.residual,
                self.zero_dot, self.masked,
            )  # fmt: skip
        self._compiled.append(kernels)

    def forward(
        self,
        x: Tensor,
        kv: Tensor,
        weight: Tensor,
        token_mask: Tensor | None = None,
        *,
        out: Tensor,
        saved: Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Writes `out` and `saved`, on `stream` or the device's current one.

        Raises RuntimeError before `compile()`, and ValueError for a tensor that does not fit the plan or an output that
        overlaps anything; nothing has run then.
        """
        kernels = self._kernels(stream)
        if (token_mask is not None) is not self.masked:
            raise ValueError(f"the plan was made with masked={self.masked}: token_mask does not fit that")
        inputs = {"x": x, "kv": kv, "weight": weight, **({} if token_mask is None else {"token_mask": token_mask})}
        self._check(inputs, {"out": out, "saved": saved})
        with torch.no_grad(), _on(stream):
            key_MSD, value_MD = op.unpacked(kv, self.streams)
            kernels.engram_forward(
                x, key_MSD, value_MD, weight, token_mask, self.eps, self.residual, self.zero_dot,
                out_MSD=out, saved_MS4=saved,
            )  # fmt: skip

    def backward(
        self,
        grad_out: Tensor,
        x: Tensor,
        kv: Tensor,
        weight: Tensor,
        saved: Tensor,
        *,
        grad_x: Tensor | None = None,
        grad_kv: Tensor | None = None,
        grad_weight: Tensor | None = None,
        workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Writes each gradient that is given. x, kv, weight and saved must be as `forward` had and left them.

        Raises as `forward` does.
        """
        kernels = self._kernels(stream)
        wanted: dict[str, Tensor | None] = {"grad_x": grad_x, "grad_kv": grad_kv, "grad_weight": grad_weight}
        outputs = {name: tensor for name, tensor in wanted.items() if tensor is not None}
        if not outputs:
            raise ValueError("give at least one of grad_x, grad_kv and grad_weight")
        needed = self.workspace_bytes if grad_weight is not None else 0
        if workspace is not None:
            outputs["workspace"] = workspace
        elif needed:
            raise ValueError(f"grad_weight needs a workspace of {needed} bytes")
        self._check({"grad_out": grad_out, "x": x, "kv": kv, "weight": weight, "saved": saved}, outputs, needed)
        partial_PSD = None
        if needed and workspace is not None:
            programs = kernels.programs_of(self.tokens, self.width, self._device)
            used = workspace[: programs * self.streams * self.width * 4]
            partial_PSD = used.view(torch.float32).view(programs, self.streams, self.width)
        with torch.no_grad(), _on(stream):
            key_MSD, value_MD = op.unpacked(kv, self.streams)
            grad_key_MSD, grad_value_MD = (None, None) if grad_kv is None else op.unpacked(grad_kv, self.streams)
            kernels.engram_backward(
                grad_out, x, key_MSD, value_MD, weight, saved, self.residual, self.masked,
                grad_x_MSD=grad_x, grad_key_MSD=grad_key_MSD, grad_value_MD=grad_value_MD,
                grad_weight_SD=grad_weight, partial_PSD=partial_PSD,
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------ checks

    def _kernels(self, stream: torch.cuda.Stream | None) -> Any:
        if not self._compiled:
            raise RuntimeError("call compile() before the plan's first forward or backward")
        if stream is not None and stream.device != self._device:
            raise ValueError(f"the plan is for {self._device}, and stream is one of {stream.device}")
        return self._compiled[0]

    def _expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        tokens, streams, width = self.tokens, self.streams, self.width
        if name in ("kv", "grad_kv"):
            return (tokens, (streams + 1) * width), self.dtype
        if name in ("weight", "grad_weight"):
            return (streams, width), self.weight_dtype
        if name == "token_mask":
            return (tokens,), torch.bool
        if name == "saved":
            return (tokens, streams, 4), self.saved_dtype
        return (tokens, streams, width), self.dtype

    def _check(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor], needed: int = 0) -> None:
        for name, tensor in (*inputs.items(), *outputs.items()):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
            if name == "workspace":
                if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() < needed:
                    raise ValueError(f"workspace must be uint8 [{needed}] or longer, got {_text(tensor)}")
            elif (tuple(tensor.shape), tensor.dtype) != self._expected(name):
                shape, dtype = self._expected(name)
                raise ValueError(f"{name} must be {dtype} {list(shape)}, got {_text(tensor)}")
            if tensor.device != self._device:
                raise ValueError(f"{name} must be on {self._device}, got {tensor.device}")
            if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_neg():
                raise ValueError(f"{name} must be contiguous")
            if tensor.data_ptr() % _ALIGNMENT and name != "token_mask":
                raise ValueError(f"{name} must start on {_ALIGNMENT} bytes")
        _check_apart(inputs, outputs)


def _check_apart(inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
    """Raises ValueError where an output shares a byte with an input or another output."""
    seen = {name: _range(tensor) for name, tensor in inputs.items()}
    for name, tensor in outputs.items():
        first, last = _range(tensor)
        for other, (other_first, other_last) in seen.items():
            if first < other_last and other_first < last:
                raise ValueError(f"{name} overlaps {other} in memory")
        seen[name] = (first, last)


def _range(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the one after the last; of an empty tensor nothing, wherever it lies."""
    first = tensor.data_ptr() if tensor.numel() else 0
    return first, first + tensor.numel() * tensor.element_size()


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
