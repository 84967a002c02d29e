"""The self-check of this folder's kernels: a few small shapes and awkward ones, against the reference in fp64.

`run(case, device, steps)` with `case` as `<backend> <dtype>` returns what differs, in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import Backend
from ..relative_error import over_bound
from . import choose, op


@dataclass(frozen=True)
class Shape:
    """One size, and one set of options."""

    tokens: int
    streams: int
    width: int
    residual: bool
    zero_dot: str
    masked: bool
    eps: float
    rounded: bool = False


_SHAPES = (
    Shape(1, 4, 5120, True, "copysign", False, 1e-20),  # a head and a tail of powers of two
    Shape(11, 4, 280, True, "copysign", True, 1e-20),  # a tail that ends inside its block; a mask
    Shape(2500, 1, 64, False, "sign", False, 1e-6),  # several tokens per program on any GPU; one stream
    Shape(7, 3, 8, False, "copysign", True, 1e-6),  # the smallest width
    Shape(5, 6, 1032, True, "sign", False, 1e-6),  # more streams than registers hold sums for
    Shape(9, 4, 88, False, "sign", False, 1e-6, True),  # query and key rounded apart
)
_CUDNN_SHAPES = (  # the one form that it takes
    Shape(64, 4, 5120, True, "copysign", False, 1e-20),
    Shape(192, 4, 5120, True, "copysign", False, 1e-6),  # the weight's gradient has 12 parts, no power of two
)


def run(case: str, device: torch.device, steps: Any) -> list[str]:
    """What differs; nothing where the kernels of the case are right."""
    name, dtype_name = case.split()
    (backend,) = (found for found in choose.BACKENDS if found.name == name)
    dtype = getattr(torch, dtype_name)
    shapes = _CUDNN_SHAPES if name == "cudnn_engram" else _SHAPES
    return [difference for shape in shapes for difference in _compare(backend, device, dtype, shape, steps)]


def _compare(backend: Backend, device: torch.device, dtype: torch.dtype, shape: Shape, steps: Any) -> list[str]:
    steps.reference()
    inputs, mask, grad_out = _inputs(shape, device, dtype)
    exact = _results(choose.REFERENCE, [t.double() for t in inputs], mask, grad_out.double(), shape)
    plain = _results(choose.REFERENCE, inputs, mask, grad_out, shape)
    what = f"{[shape.tokens, shape.streams, shape.width]}"
    steps.kernel(f"{backend.name} {what} {dtype}")
    ours = _results(backend, inputs, mask, grad_out, shape)
    again = _results(backend, inputs, mask, grad_out, shape, alone=False)
    differences = [
        f"{name} of {what}: relative error {error:.2e}, allowed {bound:.2e}"
        for name, error, bound in over_bound(ours, plain, exact)
    ]
    differences += [
        f"{name} of {what}: not the same bits a second time"
        for name, found in again.items()
        if not torch.equal(found, ours[name])
    ]
    if mask is not None and shape.residual and not torch.equal(ours["out"][~mask], inputs[0][~mask]):
        differences.append(f"out of {what}: a masked token is not its input")
    return differences


def _inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    tokens, streams, width = shape.tokens, shape.streams, shape.width
    # x and kv are rows of wider tensors. The keys lean towards x, by as much as the token says and either way, so that
    # gates are anywhere between 0 and 1.
    x, kv = torch.empty(tokens, streams + 1, width), torch.empty(tokens, (streams + 2) * width)
    x, kv = x[:, :streams], kv[:, : (streams + 1) * width]
    x.copy_(normal(tokens, streams, width))
    kv.copy_(normal(tokens, (streams + 1) * width))
    lean = torch.linspace(-1, 1, tokens) if tokens > 1 else torch.ones(1)
    kv[:, : streams * width] += (lean.view(-1, 1, 1) * x).flatten(1)
    x, kv = (torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device).copy_(t) for t in (x, kv))
    weight = (1 + 0.3 * normal(streams, width)).to(device)
    mask = (torch.arange(tokens) % 3 != 1).to(device) if shape.masked else None
    return [x, kv, weight], mask, normal(tokens, streams, width).to(device, dtype)


def _results(
    backend: Backend,
    inputs: list[Tensor],
    mask: Tensor | None,
    grad_out: Tensor,
    shape: Shape,
    *,
    alone: bool = True,
) -> dict[str, Tensor]:
    """Output and gradients: with all of them wanted, and each alone, which other launches make."""
    call = op.Call(backend, shape.eps, shape.residual, shape.zero_dot)
    x, kv, weight = (t.detach().requires_grad_() for t in inputs)
    norms = None
    if shape.rounded:
        norms = weight.detach(), 1 + 0.5 * (weight.detach().flip(0) - 1)
        weight = (norms[0] * norms[1]).requires_grad_()
    out = op.run_engram_gate(call, x, kv, None, weight, mask, norms)
    named = {"x": x, "kv": kv, "weight": weight}
    gradients = torch.autograd.grad(out, list(named.values()), grad_out)
    found = {"out": out.detach(), **{f"grad_{n}": g for n, g in zip(named, gradients, strict=True)}}
    for only, leaf in named.items() if alone else ():
        for other in named.values():
            other.requires_grad_(other is leaf)
        (found[f"grad_{only} alone"],) = torch.autograd.grad(
            op.run_engram_gate(call, x, kv, None, weight, mask, norms), leaf, grad_out
        )
    # The gradient of the value is so much larger than those of the keys that beside it theirs could be anything.
    keys = shape.streams * shape.width
    of_keys = {name.replace("kv", "key"): found[name][:, :keys] for name in found if name.startswith("grad_kv")}
    return {**found, **of_keys}
