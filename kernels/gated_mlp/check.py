"""The self-check of this folder's kernels: a few small shapes and an awkward one, against the reference in fp64.

`run(case, device, steps)` with `case` as `<backend> <route> <dtype> <activation>`, and ` biased` where gate and up have
biases, returns what differs, in words. Biases are a case of their own, since they have kernels of their own; and so is
each choice of a backend that has, as `<backend>/<choice>`: the backend's own case is passed before one is asked for.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor

from ...decline import Route
from ..relative_error import over_bound
from . import choose, op

_SHAPES = ((64, 256), (1, 264), (7, 3, 331))
_FUSED_SHAPES = ((7, 72, 136), (72, 136, 20488), (4099, 72, 1352), (2055, 2056, 3080))
"""(M, H, I): odd tails everywhere; few tiles and many, with a short K and a long one, so that each way of cutting the
work up serves one of them, with more than one tile per block."""
_WHOLE_SHAPES = ((7, 72, 136), (264, 136, 1352))
"""Of a library's op, which searches for a plan for each GEMM of each."""


def run(case: str, device: torch.device, steps: Any) -> list[str]:
    """What differs; nothing where the kernels of the case are right."""
    label, route, dtype_name, activation, *biased = case.split()
    backend = choose.labelled(label)
    dtype = getattr(torch, dtype_name)
    if Route(route) is Route.POINTWISE:
        return _pointwise(backend, device, dtype, activation, steps)
    backend.compile_ahead(device, dtype, activation, biased == ["biased"])
    return _fused(backend, device, dtype, activation, steps, biased == ["biased"])


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
                for what, error, bound in over_bound(ours, plain, exact)
            ]
    return differences


def _fused(
    backend: choose.Backend,
    device: torch.device,
    dtype: torch.dtype,
    activation: str,
    steps: Any,
    biased: bool = False,
) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    differences = []
    packings = (False, True) if backend.packed else (False,)
    for shape, packed in itertools.product(_shapes(backend), packings):
        steps.reference()
        made = _made(*shape, packed, biased, generator, apart=0 if backend.whole else 8)
        inputs = {
            name: torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device).copy_(t)
            for name, t in made.items()
        }
        exact = _fused_results(choose.REFERENCE, {name: t.double() for name, t in inputs.items()}, activation)
        plain = _fused_results(choose.REFERENCE, inputs, activation)
        what = f"{'packed ' if packed else ''}{'biased ' if biased else ''}{list(shape)}"
        steps.kernel(f"{backend.label} {what} {dtype} {activation}")
        ours = _fused_results(backend, inputs, activation)
        differences += [
            f"{name} of {what}: relative error {error:.2e}, allowed {bound:.2e}"
            for name, error, bound in over_bound(ours, plain, exact)
        ]
    has_products = backend.products is not None and not backend.choice  # which launches none but those of the backend
    return differences + _products(backend, device, dtype, steps) if has_products else differences


_PRODUCT_SHAPE = (4300, 2056, 4360)
"""(M, H, I): the last tile is a part of one along each, and each warp group has more than one."""


def _products(backend: choose.Backend, device: torch.device, dtype: torch.dtype, steps: Any) -> list[str]:
    """The products that follow the backward kernel, in each kernel that they may launch."""
    assert backend.products is not None
    module: Any = importlib.import_module(backend.products)
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, inner = _PRODUCT_SHAPE
    shapes = {"d_gate_up": (tokens, 2 * inner), "x": (tokens, hidden), "weights": (2 * inner, hidden)}
    shapes |= {"dout": (tokens, hidden), "h": (tokens, inner)}
    given = {key: torch.randn(*shape, generator=generator).to(device, dtype) for key, shape in shapes.items()}
    differences = []
    for name, variants in module.VARIANTS.items():
        steps.reference()
        exact = _defined(name, **{key: tensor.double() for key, tensor in given.items()})
        plain = _defined(name, **given)
        packings = (False,) if name == "d_down" else (False, True)
        for columns, packed in itertools.product(variants, packings):
            steps.reference()
            what = f"{'packed ' if packed else ''}{name} in tiles of {columns} columns"
            steps.kernel(f"{backend.name} {what} {dtype}")
            ours = _multiplied(module, name, columns, packed, **given)
            differences += [
                f"{key} of {what}: relative error {error:.2e}, allowed {bound:.2e}"
                for key, error, bound in over_bound(ours, plain, exact)
            ]
    return differences


def _defined(name: str, d_gate_up: Tensor, x: Tensor, weights: Tensor, dout: Tensor, h: Tensor) -> dict[str, Tensor]:
    if name == "dx":
        return {name: d_gate_up @ weights}
    return {name: d_gate_up.t() @ x if name == "d_weights" else dout.t() @ h}


def _multiplied(
    module: Any, name: str, columns: int, packed: bool, d_gate_up: Tensor, x: Tensor, weights: Tensor, dout: Tensor,
    h: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    if name == "dx":
        return {name: module.dx(d_gate_up, *((weights, None) if packed else weights.chunk(2)), columns=columns)}
    if name == "d_down":
        return {name: module.d_down(dout, h, columns=columns)}
    found = module.d_weights(d_gate_up, x, packed=packed, columns=columns)
    return {name: found[0] if packed else torch.cat(found)}


def _shapes(backend: choose.Backend) -> tuple[tuple[int, int, int], ...]:
    return _WHOLE_SHAPES if backend.whole else _FUSED_SHAPES


def _made(
    tokens: int, hidden: int, inner: int, packed: bool, biased: bool, generator: torch.Generator, apart: int
) -> dict[str, Tensor]:
    """Tensors by the names of the op's parameters, and dout: of unit scale at every place, x and dout with rows that
    are so much further apart than they are long."""
    shapes = {"x": (tokens, hidden + apart), "dout": (tokens, hidden + apart), "down_weight": (hidden, inner)}
    if packed:
        shapes["gate_up_weight"] = (2 * inner, hidden)
    else:
        shapes |= {"gate_weight": (inner, hidden), "up_weight": (inner, hidden)}
    made = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    for name in made:
        made[name] = made[name][:, :hidden] if name in ("x", "dout") else made[name] * shapes[name][1] ** -0.5
    if biased:
        widths = {"gate_up_bias": 2 * inner} if packed else {"gate_bias": inner, "up_bias": inner}
        made |= {name: torch.randn(width, generator=generator) for name, width in widths.items()}
    return made


def _fused_results(backend: choose.Backend, inputs: dict[str, Tensor], activation: str) -> dict[str, Tensor]:
    """Output and gradients, with all of them wanted, only that of x, and none: each has kernels of its own."""
    everything = tuple(name for name in inputs if name != "dout")
    return {
        **_fused_once(backend, inputs, activation, everything, ""),
        **_fused_once(backend, inputs, activation, ("x",), " alone"),
        **_fused_once(backend, inputs, activation, (), " in inference"),
    }


def _fused_once(
    backend: choose.Backend, inputs: dict[str, Tensor], activation: str, wanted: tuple[str, ...], how: str
) -> dict[str, Tensor]:
    given = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in inputs.items()}
    gate, up = given.get("gate_up_weight", given.get("gate_weight")), given.get("up_weight")
    gate_bias, up_bias = given.get("gate_up_bias", given.get("gate_bias")), given.get("up_bias")
    assert gate is not None
    out = op.run_gated_mlp(backend, given["x"], gate, up, given["down_weight"], gate_bias, up_bias, None, activation)
    found = torch.autograd.grad(out, [given[name] for name in wanted], given["dout"]) if wanted else ()
    named = {"dx" if name == "x" else f"d_{name}": gradient for name, gradient in zip(wanted, found, strict=True)}
    return {f"{name}{how}": result for name, result in {"out": out.detach(), **named}.items()}


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
