"""The gated MLP as differentiable ops: `gated_mlp`, `gated_mlp_packed` and, for what lies between the projections,
`act_mul`.

    out = (act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd          act in silu, gelu (erf), gelu_tanh

Only what the wanted gradients need is saved: at most x and [gate | up], 2*M*I elements. Nothing that was saved, and no
incoming gradient, is ever written to, so a second backward pass with `retain_graph=True` is right. A gradient of a
gradient raises.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ...decline import Route
from ..autograd import differentiable_once, tie
from ..backends import load, with_choice
from .choose import ACTIVATIONS, REFERENCE, Backend, Problem, for_op

# ---------------------------------------------------------------------------------------------------- public ops


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    recompute: bool = False,
) -> Tensor:
    """`(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd`.

    x [..., H], gate_weight and up_weight [I, H], down_weight [H, I], gate_bias and up_bias [I] (both or neither),
    down_bias [H]; one floating dtype and one device. Returns [..., H] in that dtype. `activation` is one of `silu`,
    `gelu`, `gelu_tanh`. `recompute=True` saves x instead of gate and up, and pays two GEMMs in the backward pass.

    Follows `LlamaMLP` of Hugging Face transformers, with one rounding of the product instead of two. Raises
    TypeError for what is no tensor, and ValueError for shapes, dtypes, devices or an activation that do not fit.
    """
    _require("up_weight", up_weight)
    return run_gated_mlp(
        None, x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation, recompute
    )


def gated_mlp_packed(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    recompute: bool = False,
) -> Tensor:
    """`gated_mlp` with gate and up in one tensor, the gate first: gate_up_weight [2*I, H], gate_up_bias [2*I].

    The weight is never split or copied, and its gradient is one [2*I, H] tensor. Follows `Phi3MLP` of Hugging Face
    transformers.
    """
    return run_gated_mlp(
        None, x, gate_up_weight, None, down_weight, gate_up_bias, None, down_bias, activation, recompute
    )


def act_mul(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """`act(gate) * up`, rounded once. gate and up [..., I] of one shape, floating dtype and device.

    Saves gate and up. Raises TypeError for what is no tensor, and ValueError for shapes, dtypes, devices or an
    activation that do not fit.
    """
    _require("up", up)
    return run_act_mul(None, gate, up, activation)


def act_mul_packed(gate_up: Tensor, *, activation: str = "silu") -> Tensor:
    """`act_mul` of the two halves of gate_up [..., 2*I], the gate first; its gradient is one tensor of that shape."""
    return run_act_mul(None, gate_up, None, activation)


# ------------------------------------------------------------------- the same, for callers that chose a backend


def run_gated_mlp(
    backend: Backend | None,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    recompute: bool = False,
) -> Tensor:
    """`gated_mlp`, or `gated_mlp_packed` where up_weight is None. With a backend given, the inputs were checked."""
    out_MH: Tensor
    tensors = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    chosen_here = backend is None
    if backend is None:
        backend = _check_gated_mlp(tensors, activation)
    if chosen_here and torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(x.device.type):
        # Called directly the op computes in the dtype it is given; backward passes run without autocast in any case.
        with torch.autocast(x.device.type, enabled=False):
            return run_gated_mlp(backend, *tensors, activation, recompute)
    if backend.whole:
        if not recompute:
            out_MH = load(backend).gated_mlp(rows(x), gate_weight, up_weight, down_weight)
            return out_MH.view(*x.shape[:-1], down_weight.shape[0])
        backend = REFERENCE  # what it saves is its own affair
    call = _Call(backend, activation, recompute, packed=up_weight is None)
    # Both are read here and not inside apply(), where grad mode is always off.
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        # What needs a gradient, and is not saved (see _GatedMLP.forward) because no first derivative reads it.
        needs = [tensor is not None and tensor.requires_grad for tensor in tensors]
        x_is_saved, weights_are_saved = needs[1] or needs[2] or recompute, needs[0] or recompute
        is_saved = (x_is_saved, weights_are_saved, weights_are_saved, True, recompute, recompute, True)
        unsaved = [t for t, need, saved in zip(tensors, needs, is_saved, strict=True) if need and not saved]
        out_MH = _GatedMLP.apply(call, tie(*unsaved), *tensors)  # type: ignore[no-untyped-call,arg-type]
    else:
        h_MI, _ = call.forward(rows(x), gate_weight, up_weight, gate_bias, up_bias, want_gate_up=False)
        out_MH = F.linear(h_MI, down_weight, down_bias)
    # Out here, since autograd lets nobody write to a view that was made inside a Function.
    return out_MH.view(*x.shape[:-1], down_weight.shape[0])


def run_act_mul(backend: Backend | None, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """`act_mul`, or `act_mul_packed` where up is None. With a backend given, the inputs were checked."""
    if backend is None:
        backend = _check_act_mul(gate, up, activation)
    if torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
        result: Tensor = _ActMul.apply(backend, activation, gate, up)  # type: ignore[no-untyped-call]
        return result
    product: Tensor = _kernels(backend).act_mul(*_halves(gate, up), activation)
    return product


_dispatch_stack = torch._C._len_torch_dispatch_stack


def _kernels(backend: Backend) -> Any:
    """The backend's functions; as operators of torch where a dispatch mode looks on. About 0.1 us where none does."""
    if _dispatch_stack():
        from .library import operators

        return operators(backend)
    return load(backend)


@functools.cache
def products_of(backend: Backend) -> Any:
    """The functions of the backend's own products, for `gradients`; None where it has none."""
    return None if backend.products is None else with_choice(importlib.import_module(backend.products), backend.choice)


@dataclass(frozen=True)
class _Call:
    """What of a call is no tensor, and the two fused kernels as the chosen backend has them."""

    backend: Backend
    activation: str
    recompute: bool
    packed: bool

    def forward(
        self,
        x_MH: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        *,
        want_gate_up: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """h [M, I] and, where wanted, gate_up [M, 2*I]."""
        if self.packed:
            inner = gate_weight.shape[0] // 2
            gate_weight, up_weight = gate_weight[:inner], gate_weight[inner:]
            if gate_bias is not None:
                gate_bias, up_bias = gate_bias[:inner], gate_bias[inner:]
        result: tuple[Tensor, Tensor | None] = _kernels(self.backend).dual_gemm_act(
            x_MH, gate_weight, up_weight, gate_bias, up_bias, self.activation, want_gate_up=want_gate_up
        )
        return result

    def backward(
        self, dout_MH: Tensor, down_weight: Tensor, gate_up_M2I: Tensor, *, want_h: bool
    ) -> tuple[Tensor, Tensor | None]:
        """d_gate_up [M, 2*I] and, where wanted, h [M, I]."""
        result: tuple[Tensor, Tensor | None] = _kernels(self.backend).gemm_dact(
            dout_MH, down_weight, gate_up_M2I, self.activation, want_h=want_h
        )
        return result


class _GatedMLP(Function):
    """Inputs: call, a tie to what is not saved (for second derivatives), then x, gate_weight, up_weight, down_weight,
    gate_bias, up_bias, down_bias. Output: [M, H]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, tied: Tensor | None, *tensors: Tensor | None) -> Tensor:
        x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = tensors
        assert x is not None and gate_weight is not None and down_weight is not None
        needs = ctx.needs_input_grad[2:]
        need_x, need_gate, need_up, need_down, need_gate_bias, need_up_bias, _ = needs
        past_gate_up = need_x or need_gate or need_up or need_gate_bias or need_up_bias
        keep_gate_up = past_gate_up and not call.recompute
        recompute = call.recompute and (past_gate_up or need_down)

        h_MI, gate_up_M2I = call.forward(rows(x), gate_weight, up_weight, gate_bias, up_bias, want_gate_up=keep_gate_up)
        ctx.call = call
        ctx.x_shape = x.shape
        ctx.past_gate_up = past_gate_up
        # One slot per tensor, None where no wanted gradient reads it. Weights are saved only where they are read, so
        # that updating one in place raises in exactly the cases in which autograd's own formula would.
        ctx.save_for_backward(
            x if need_gate or need_up or recompute else None,
            gate_weight if need_x or recompute else None,
            up_weight if need_x or recompute else None,
            down_weight if past_gate_up else None,
            gate_bias if recompute else None,
            up_bias if recompute else None,
            gate_up_M2I,
            h_MI if need_down and not past_gate_up and not recompute else None,
            tied,
        )
        return F.linear(h_MI, down_weight, down_bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Any, ...], dout: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        need_down = ctx.needs_input_grad[5]
        x, gate_weight, up_weight, down_weight, gate_bias, up_bias, gate_up_M2I, h_MI, _ = saved
        x_MH: Any = None if x is None else rows(x)
        dout_MH = rows(dout)

        if gate_up_M2I is None and h_MI is None and x_MH is not None:  # recompute=True
            h_MI, gate_up_M2I = call.forward(
                x_MH, gate_weight, up_weight, gate_bias, up_bias, want_gate_up=ctx.past_gate_up
            )
        d_gate_up_M2I = None
        if ctx.past_gate_up:
            d_gate_up_M2I, h_MI = call.backward(dout_MH, down_weight, gate_up_M2I, want_h=need_down)
        need_x, need_gate, need_up, _, need_gate_bias, need_up_bias, need_down_bias = ctx.needs_input_grad[2:]
        products = None if _dispatch_stack() else products_of(call.backend)  # a mode must see what is multiplied
        d_down_weight, d_down_bias = down_gradients((need_down, need_down_bias), dout_MH, h_MI, products)
        del h_MI  # half as large as d_gate_up, and gone before the other gradients are made
        needs = need_x, need_gate, need_up, need_gate_bias, need_up_bias
        dx, d_gate_weight, d_up_weight, d_gate_bias, d_up_bias = gradients(
            needs, call.packed, d_gate_up_M2I, x_MH, gate_weight, up_weight, products
        )
        dx = None if dx is None else dx.view(ctx.x_shape)
        return None, None, dx, d_gate_weight, d_up_weight, d_down_weight, d_gate_bias, d_up_bias, d_down_bias


def down_gradients(
    needs: tuple[bool, bool], dout_MH: Tensor, h_MI: Any, products: Any = None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of down_weight and down_bias that `needs` asks for; `products` as for `gradients`."""
    need_weight, need_bias = needs
    d_weight = products.d_down(dout_MH, h_MI) if need_weight and products is not None else None
    if need_weight and d_weight is None:
        d_weight = dout_MH.t() @ h_MI
    return d_weight, dout_MH.sum(0) if need_bias else None


def gradients(
    needs: tuple[bool, bool, bool, bool, bool],
    packed: bool,
    d_gate_up_M2I: Tensor | None,
    x_MH: Any,
    gate_weight: Any,
    up_weight: Any,
    products: Any = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x [M, H], gate_weight, up_weight, gate_bias and up_bias that `needs` asks for: plain GEMMs and
    sums. What they do not read may be None.

    `products` has some of the GEMMs, where they are faster than cuBLAS's: as hopper_products.py.
    """
    need_x, need_gate, need_up, need_gate_bias, need_up_bias = needs
    dx = d_gate_weight = d_up_weight = d_gate_bias = d_up_bias = None
    if d_gate_up_M2I is None:
        return dx, d_gate_weight, d_up_weight, d_gate_bias, d_up_bias
    if products is not None:
        if need_x:
            dx = products.dx(d_gate_up_M2I, gate_weight, up_weight)
        if need_gate and (packed or need_up):
            d_gate_weight, d_up_weight = products.d_weights(d_gate_up_M2I, x_MH, packed=packed)
        need_x = need_x and dx is None
        need_gate, need_up = need_gate and d_gate_weight is None, need_up and d_up_weight is None
    inner = d_gate_up_M2I.shape[1] // 2
    d_gate_MI, d_up_MI = d_gate_up_M2I[:, :inner], d_gate_up_M2I[:, inner:]
    if packed:
        dx = d_gate_up_M2I @ gate_weight if need_x else dx
        d_gate_weight = d_gate_up_M2I.t() @ x_MH if need_gate else d_gate_weight
        d_gate_bias = d_gate_up_M2I.sum(0) if need_gate_bias else None
    else:
        dx = _plus_product(d_gate_MI @ gate_weight, d_up_MI, up_weight) if need_x else dx
        # Two tensors, never halves of one: two .grad fields must not share storage.
        d_gate_weight = d_gate_MI.t() @ x_MH if need_gate else d_gate_weight
        d_up_weight = d_up_MI.t() @ x_MH if need_up else d_up_weight
        d_gate_bias = d_gate_MI.sum(0) if need_gate_bias else None
        d_up_bias = d_up_MI.sum(0) if need_up_bias else None
    return dx, d_gate_weight, d_up_weight, d_gate_bias, d_up_bias


def _plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`total + a @ b`, into `total` (docs/performance.md). FLOP counters know only the other."""
    return torch.addmm(total, a, b) if _dispatch_stack() else total.addmm_(a, b)


class _ActMul(Function):
    """Inputs: backend, activation, gate and up, or both packed in the first."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, activation: str, gate: Tensor, up: Tensor | None) -> Tensor:
        ctx.backend, ctx.activation = backend, activation
        ctx.save_for_backward(gate, up if ctx.needs_input_grad[2] else None)
        ctx.packed = up is None
        product: Tensor = _kernels(backend).act_mul(*_halves(gate, up), activation)
        return product

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Any, ...], dh: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        _, _, need_gate, need_up = ctx.needs_input_grad
        gate, up = saved
        d_first = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if need_gate else None
        d_second = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if need_up else None
        if ctx.packed:
            gate, up = _halves(gate, None)
            d_gate, d_up = _halves(d_first, None)
        else:
            d_gate, d_up = d_first, d_second  # type: ignore[assignment]
            # Where only up wants a gradient, up itself was not saved: its values are not read.
            up = gate if up is None else up
        _kernels(ctx.backend).act_mul_backward(dh, gate, up, ctx.activation, d_gate=d_gate, d_up=d_up)
        return None, None, d_first, d_second


def _halves(gate: Any, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up, or the two halves of the packed tensor where up is None."""
    if up is not None:
        return gate, up
    inner = gate.shape[-1] // 2
    return gate[..., :inner], gate[..., inner:]


def rows(t: Tensor) -> Tensor:
    """`t [..., W]` as `[M, W]` rows of unit inner stride: a view where the layout allows it, else a copy."""
    rows = t.reshape(-1, t.shape[-1]) if t.numel() else t.new_empty(t.shape[:-1].numel(), t.shape[-1])
    is_rows = rows.stride(-1) == 1 and (rows.stride(0) >= rows.shape[1] or rows.shape[0] <= 1)
    return rows if is_rows else rows.contiguous()


# ---------------------------------------------------------------------------------------------------- bad input


def _check_gated_mlp(tensors: tuple[Tensor | None, ...], activation: str) -> Backend:
    """Raises ValueError for what does not fit, else chooses the backend."""
    x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = tensors
    packed = up_weight is None
    names = ("x", "gate_up_weight" if packed else "gate_weight", "up_weight", "down_weight")
    biases = ("gate_up_bias" if packed else "gate_bias", "up_bias", "down_bias")
    _check_common(dict(zip((*names, *biases), tensors, strict=True)), activation, optional=("up_weight", *biases))
    assert x is not None and gate_weight is not None and down_weight is not None
    if gate_weight.dim() != 2 or down_weight.dim() != 2 or x.dim() < 1:
        raise ValueError(
            f"x must be [..., H] and the weights matrices, got {_shapes(x=x, gate=gate_weight, down=down_weight)}"
        )
    hidden, inner = down_weight.shape
    rows = 2 * inner if packed else inner
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("x", x, (*x.shape[:-1], hidden)),
        ("gate_up_weight" if packed else "gate_weight", gate_weight, (rows, hidden)),
        ("up_weight", up_weight, (inner, hidden)),
        ("gate_up_bias" if packed else "gate_bias", gate_bias, (rows,)),
        ("up_bias", up_bias, (inner,)),
        ("down_bias", down_bias, (hidden,)),
    ]
    for name, tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)}, but must be {list(shape)} beside down_weight {[hidden, inner]} [H, I]"
            )
    if not packed and (gate_bias is None) is not (up_bias is None):
        raise ValueError("gate_bias and up_bias must be given together or not at all")
    has_bias = gate_bias is not None, down_bias is not None
    problem = Problem(
        Route.FUSED, x.device, x.dtype, hidden, inner, activation, has_bias[0], packed=packed, down_bias=has_bias[1]
    )
    return for_op(problem, x.shape[:-1].numel(), *(tensor for tensor in tensors if tensor is not None))


def _check_act_mul(gate: Tensor, up: Tensor | None, activation: str) -> Backend:
    _check_common({"gate" if up is not None else "gate_up": gate, "up": up}, activation, optional=("up",))
    if up is None and (gate.dim() < 1 or gate.shape[-1] % 2):
        raise ValueError(f"gate_up must be [..., 2*I], got {_shapes(gate_up=gate)}")
    if up is not None and (gate.shape != up.shape or gate.dim() < 1):
        raise ValueError(f"gate and up must be [..., I] of one shape, got {_shapes(gate=gate, up=up)}")
    halves = _halves(gate, up)
    inner = halves[0].shape[-1]
    problem = Problem(Route.POINTWISE, gate.device, gate.dtype, 0, inner, activation, False, packed=up is None)
    return for_op(problem, gate.shape[:-1].numel(), *halves)


def _check_common(tensors: dict[str, Tensor | None], activation: str, optional: tuple[str, ...]) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    present: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor is not None or name not in optional:
            present[name] = _require(name, tensor)
    first_name, first = next(iter(present.items()))
    for name, tensor in present.items():
        if not tensor.dtype.is_floating_point or (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"all tensors must have one floating dtype and one device, got {name} in {tensor.dtype} on "
                f"{tensor.device}, and {first_name} in {first.dtype} on {first.device}"
            )


def _require(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    return tensor


def _shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
