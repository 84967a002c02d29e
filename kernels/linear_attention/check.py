"""The self-check of this folder's kernels: a few small shapes and awkward ones, against the definition in fp64.

`run(case, device, steps)` with `case` as `<backend> <op> <dtype>` returns what differs, in words. Of a backend whose
forward pass is the library's own, the backward pass is checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import Backend, load
from ..relative_error import relative_error
from . import reference
from .gated_delta_rule import choose as gated_delta_rule
from .kda import choose as kda
from .problem import Call, Inputs


class Shape(NamedTuple):
    """One size, and one set of options."""

    batch: int
    tokens: int
    heads: int
    groups: int
    gate: str
    state_v_first: bool
    ends: tuple[int, ...] | None = None
    """Where the sequences of a row end."""
    negative_eigenvalues: bool = False
    has_state: bool = True
    """Whether there is an initial state."""
    spreads: bool = False
    """Heads from such as hardly decay to such as forget within a few tokens."""
    width: int = 128


_SHAPES = (
    Shape(1, 128, 8, 1, "bounded", True),  # one sequence of whole chunks; cuDNN has a scan of its own for 8 heads
    Shape(2, 77, 2, 1, "bounded", False),  # a tail; the other layout of states
    Shape(1, 200, 2, 3, "bounded", True, (0, 1, 1, 66, 200)),  # a sequence of one token, an empty one, grouped heads
    Shape(1, 1, 1, 1, "given", True),
    Shape(1, 300, 1, 1, "given", False),  # pieces that start late: the state must have decayed by then
)
FLASH_QLA_SHAPES = (
    Shape(1, 200, 4, 2, "bounded", True, (0, 0, 1, 66, 66, 200)),  # empty sequences, one of them the first
    Shape(2, 77, 4, 2, "bounded", False, negative_eigenvalues=True),
    Shape(1, 1024, 4, 2, "bounded", True, has_state=False, spreads=True),  # long enough for pieces that are joined
)
"""Few, and of one number of heads, since TileLang compiles for long: but for the joining, all take the same kernels."""
_BOUNDS = {"A_log": 5e-2, "dt_bias": 5e-2, "g": 5e-2}
_BOUND = 2e-2
"""Relative L2: the kernels multiply in bf16. The gate's gradients are differences of sums, and noisier."""


def run(case: str, device: torch.device, steps: Any) -> list[str]:
    """What differs; nothing where the kernels of the case are right."""
    name, op, dtype_name = case.split()
    table = kda.BACKENDS if op == "kda" else gated_delta_rule.BACKENDS
    (backend,) = (found for found in table if found.name == name)
    dtype = getattr(torch, dtype_name)
    differences = []
    for shape in FLASH_QLA_SHAPES if name == "flash_qla" else _SHAPES:
        differences += _compare(backend, op, device, dtype, shape, steps)
    return differences


def _compare(
    backend: Backend, op: str, device: torch.device, dtype: torch.dtype, shape: Shape, steps: Any
) -> list[str]:
    steps.reference()
    call, inputs = _inputs(shape, op, device, dtype)
    exact, incoming = _exact(call, inputs, dtype)
    steps.kernel(f"{backend.name} {shape}")
    kernels = load(backend)
    if hasattr(kernels, "backward"):
        exact = {name: exact[name] for name in inputs._fields if name in exact}
        ours, again = (kernels.backward(call, inputs, *incoming)._asdict() for _ in range(2))
    else:
        _poison(device)
        ours, again = (_results(kernels.run, call, inputs, incoming) for _ in range(2))
    differences = []
    for name, expected in exact.items():
        error, bound = relative_error(ours[name], expected), _BOUNDS.get(name, _BOUND)
        if not error <= bound:  # NaN too
            differences.append(f"{name} of {shape}: relative error {error:.2e}, allowed {bound:.2e}")
        if not torch.equal(ours[name], again[name]):
            differences.append(f"{name} of {shape}: not the same bits a second time")
    return differences


def _poison(device: torch.device) -> None:
    """Leaves NaN, of any dtype, in the memory that is handed out next: the kernels allocate what they write."""
    if device.type == "cuda":
        for elements, times in ((1 << 26, 1), (1 << 17, 64)):  # PyTorch keeps blocks below 1 MiB by themselves
            held = [torch.full((elements,), -1, dtype=torch.int32, device=device) for _ in range(times)]
            del held


def _inputs(shape: Shape, op: str, device: torch.device, dtype: torch.dtype) -> tuple[Call, Inputs]:
    generator = torch.Generator().manual_seed(0)
    batch, tokens, heads = shape.batch, shape.tokens, shape.heads
    values = heads * shape.groups
    sequences = batch if shape.ends is None else len(shape.ends) - 1

    def normal(*size: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, to)

    width = shape.width
    channels = (width,) if op == "kda" else ()
    gate = "softplus" if op != "kda" and shape.gate == "bounded" else shape.gate
    g = normal(batch, tokens, values, *channels)
    if gate == "given":
        g = (-5 * torch.sigmoid(g.float() - 2)).to(dtype)
    rate = torch.linspace(-6, 1, values, device=device) if shape.spreads else normal(values, to=torch.float32)
    state = normal(sequences, values, width, width, to=torch.float32) if shape.has_state else None
    return (
        Call(width**-0.5, True, gate, -5.0, True, shape.negative_eigenvalues, shape.state_v_first, True),
        Inputs(
            q=normal(batch, tokens, heads, width),
            k=normal(batch, tokens, heads, width),
            v=normal(batch, tokens, values, width),
            g=g,
            beta=normal(batch, tokens, values),
            A_log=None if gate == "given" else rate,
            dt_bias=None if gate == "given" else normal(values, *channels, to=torch.float32),
            initial_state=state,
            cu_seqlens=None if shape.ends is None else torch.tensor(shape.ends, device=device),
        ),
    )


def _exact(call: Call, inputs: Inputs, dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Results and gradients in fp64, and the incoming ones as the kernels get them: of the output in `dtype`."""
    wide = inputs._replace(
        **{name: t.double() for name, t in inputs._asdict().items() if t is not None and t.is_floating_point()}
    )
    out, state = reference.run(call, wide, True)
    assert state is not None
    generator = torch.Generator().manual_seed(1)
    incoming = (
        torch.randn(out.shape, generator=generator).to(out.device, dtype),
        torch.randn(state.shape, generator=generator).to(out.device),
    )
    return _results(reference.run, call, wide, incoming), incoming


def _results(run_op: Any, call: Call, inputs: Inputs, incoming: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Output, final state, and the gradient of every input."""
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in inputs._asdict().items()
        if t is not None and t.is_floating_point()
    }
    out, state = run_op(call, inputs._replace(**leaves), True)
    grads = torch.autograd.grad(
        (out, state), list(leaves.values()), (incoming[0].to(out.dtype), incoming[1].to(state.dtype))
    )
    return {"out": out.detach(), "state": state.detach(), **dict(zip(leaves, grads, strict=True))}
