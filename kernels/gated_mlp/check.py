"""The self-check of this folder's kernels: a few small shapes and an awkward one, against the reference in fp64.

`run(case, device, steps)` with `case` as `<backend> <route> <dtype> <activation>` returns what differs, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...decline import Route
from . import choose, op

_SHAPES = ((64, 256), (1, 264), (7, 3, 331))
_FUSED_SHAPES = ((7, 72, 136), (72, 136, 20488), (4099, 72, 1352), (2055, 2056, 3080))
"""(M, H, I): odd tails everywhere; few tiles and many, with a short K and a long one, so that each way of cutting the
work up serves one of them, with more than one tile per block."""


def run(case: str, device: torch.device, steps: Any) -> list[str]:
    """What differs; nothing where the kernels of the case are right."""
    name, route, dtype_name, activation = case.split()
    (backend,) = (found for found in choose.BACKENDS if found.name == name)
    checks: dict[Route, Callable[..., list[str]]] = {Route.POINTWISE: _pointwise, Route.FUSED: _fused}
    return checks[Route(route)](backend, device, getattr(torch, dtype_name), activation, steps)


def _pointwise(
    backend: choose.Backend, device: torch.device, dtype: torch.dtype, activation: str, steps: Any
) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    differences = []
    for shape in _SHAPES:
        for packed in (False, True):
            steps.reference()
            wide = (*shape[:-1], 2 * shape[-1])
            gate_up = torch.randn(wide, generator=generator).to(device, dtype)
            dh = torch.randn(shape, generator=generator).to(device, dtype)
            exact = _results(choose.REFERENCE, gate_up.double(), dh.double(), activation, packed)
            plain = _results(choose.REFERENCE, gate_up, dh, activation, packed)
            steps.kernel(f"{backend.name} {'packed ' if packed else ''}{list(shape)} {dtype} {activation}")
            ours = _results(backend, gate_up, dh, activation, packed)
            differences += [
                f"{what} of {list(shape)}{' packed' if packed else ''}: relative error {error:.2e}, allowed {bound:.2e}"
                for what, error, bound in _over_bound(ours, plain, exact)
            ]
    return differences


def _fused(backend: choose.Backend, device: torch.device, dtype: torch.dtype, activation: str, steps: Any) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    differences = []
    for tokens, hidden, inner in _FUSED_SHAPES:
        for packed in (False, True):
            steps.reference()
            # Of unit scale at every place; x and the incoming gradient are rows of wider tensors.
            x, dout = (torch.randn(tokens, hidden + 8, generator=generator)[:, :hidden] for _ in range(2))
            gate, up, down = (
                torch.randn(*shape, generator=generator) * shape[1] ** -0.5
                for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
            )
            wide = (x, *((torch.cat([gate, up]),) if packed else (gate, up)), down, dout)
            inputs = [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device).copy_(t) for t in wide]
            exact = _fused_results(choose.REFERENCE, [t.double() for t in inputs], activation)
            plain = _fused_results(choose.REFERENCE, inputs, activation)
            what = f"{'packed ' if packed else ''}{[tokens, hidden, inner]}"
            steps.kernel(f"{backend.name} {what} {dtype} {activation}")
            ours = _fused_results(backend, inputs, activation)
            differences += [
                f"{name} of {what}: relative error {error:.2e}, allowed {bound:.2e}"
                for name, error, bound in _over_bound(ours, plain, exact)
            ]
    return differences


def _fused_results(backend: choose.Backend, inputs: list[Tensor], activation: str) -> dict[str, Tensor]:
    """Output and gradients, with all of them wanted, only that of x, and none: each has kernels of its own."""
    *tensors, dout = inputs
    x, *weights = (tensor.detach().requires_grad_() for tensor in tensors)
    arguments = (*weights[:-1], *((None,) if len(weights) == 2 else ()), weights[-1], None, None, None, activation)
    out = op.run_gated_mlp(backend, x, *arguments)
    gradients = torch.autograd.grad(out, (x, *weights), dout)
    for weight in weights:
        weight.requires_grad_(False)
    (dx_alone,) = torch.autograd.grad(op.run_gated_mlp(backend, x, *arguments), x, dout)
    with torch.no_grad():
        out_alone = op.run_gated_mlp(backend, x, *arguments)
    names = (
        ("d_gate_up_weight", "d_down_weight")
        if len(weights) == 2
        else ("d_gate_weight", "d_up_weight", "d_down_weight")
    )
    named = dict(zip(("dx", *names), gradients, strict=True))
    return {"out": out.detach(), **named, "dx alone": dx_alone, "out alone": out_alone}


def _results(backend: choose.Backend, gate_up: Tensor, dh: Tensor, activation: str, packed: bool) -> dict[str, Tensor]:
    """Output and gradients, as autograd gives them."""
    if packed:
        leaf = gate_up.detach().clone().requires_grad_()
        h = op.run_act_mul(backend, leaf, None, activation)
        (d_gate_up,) = torch.autograd.grad(h, leaf, dh)
        return {"h": h.detach(), "d_gate_up": d_gate_up}
    gate, up = (half.detach().clone().requires_grad_() for half in gate_up.chunk(2, dim=-1))
    h = op.run_act_mul(backend, gate, up, activation)
    d_gate, d_up = torch.autograd.grad(h, (gate, up), dh)
    return {"h": h.detach(), "d_gate": d_gate, "d_up": d_up}


def _over_bound(
    ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> list[tuple[str, float, float]]:
    """(name, error, bound) of each result whose error exceeds the parity bound against that of plain PyTorch."""
    found = []
    for name, expected in exact.items():
        error, bound = _error(ours[name], expected), 1.25 * _error(plain[name], expected) + 1e-4
        if not error <= bound:  # NaN too
            found.append((name, error, bound))
    return found


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())
