"""The kernels as operators of torch, for what looks at operators: compilers, selective checkpointing, other modes.

Each operator calls the backend, or the choice of one, that it is given the label of. Calling through one costs tens of
microseconds on the host, so a plain call goes past them (`op.py`); the autograd functions are the same either way, so
that a forward pass inside a mode and its recomputation outside of it save the same tensors.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns. An output
that is not wanted is empty, since an operator can't return None.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ... import settings
from ...decline import Reason
from ...profiles import MOST_TOKENS
from ..autograd import without_autocast
from ..backends import load
from .choose import OP, REFERENCE, Backend, Problem, choose, labelled
from .op import down_gradients, gradients, products_of, rows


@dataclass(frozen=True)
class Operators:
    """The functions of a backend's module, by way of the operators."""

    backend: str

    def dual_gemm_act(
        self,
        x_MH: Tensor,
        w_gate_IH: Tensor,
        w_up_IH: Tensor,
        b_gate_I: Tensor | None,
        b_up_I: Tensor | None,
        activation: str,
        *,
        want_gate_up: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """As in `reference.py`."""
        h_MI, gate_up_M2I = torch.ops.fusepatch.dual_gemm_act(
            x_MH, w_gate_IH, w_up_IH, b_gate_I, b_up_I, activation, want_gate_up, self.backend
        )
        return h_MI, gate_up_M2I if want_gate_up else None

    def gemm_dact(
        self, dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, *, want_h: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As in `reference.py`."""
        d_gate_up_M2I, h_MI = torch.ops.fusepatch.gemm_dact(
            dout_MH, w_down_HI, gate_up_M2I, activation, want_h, self.backend
        )
        return d_gate_up_M2I, h_MI if want_h else None

    def act_mul(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """As in `reference.py`."""
        product: Tensor = torch.ops.fusepatch.act_mul(gate, up, activation, self.backend)
        return product

    def act_mul_backward(
        self, dh: Tensor, gate: Tensor, up: Tensor, activation: str, *, d_gate: Tensor | None, d_up: Tensor | None
    ) -> None:
        """As in `reference.py`."""
        torch.ops.fusepatch.act_mul_backward(dh, gate, up, activation, d_gate, d_up, self.backend)


@functools.cache
def operators(backend: Backend) -> Operators:
    """The operators that end in the kernels of `backend`."""
    return Operators(backend.label)


@functools.cache
def _named(backend: str) -> Backend:
    return labelled(backend)


def _serving_these(backend: str, *tensors: Tensor | None) -> Any:
    """The kernels that can read these: compiled code may hand over what a kernel can't, and can't decline any more."""
    found = _named(backend)
    if found.byte_alignment > 1 and any(t is not None and t.data_ptr() % found.byte_alignment for t in tensors):
        found = REFERENCE
    return load(found)


def serving(problem: Problem) -> tuple[str, int] | None:
    """The backend that serves compiled calls of `problem`, and the fewest tokens of which; None where there is none.

    Never a choice of it: `fusepatch tune` measures calls that are not compiled. A native one that is not named serves
    where it was measured to win against the library's code, compiled too.
    """
    backend = choose(problem, MOST_TOKENS)
    if isinstance(backend, Reason) or backend.whole:
        return None
    if not backend.native or settings.current().ops[OP].backend != "auto":
        return backend.name, 1
    fewest = backend.fewest_compiled(problem)
    return None if fewest is None else (backend.name, fewest)


# --------------------------------------------------------------------------------------------------- the operators


@torch.library.custom_op("fusepatch::dual_gemm_act", mutates_args=())
def _dual_gemm_act(
    x_MH: Tensor,
    w_gate_IH: Tensor,
    w_up_IH: Tensor,
    b_gate_I: Tensor | None,
    b_up_I: Tensor | None,
    activation: str,
    want_gate_up: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    h_MI, gate_up_M2I = load(_named(backend)).dual_gemm_act(
        x_MH, w_gate_IH, w_up_IH, b_gate_I, b_up_I, activation, want_gate_up=want_gate_up
    )
    return h_MI, x_MH.new_empty(0) if gate_up_M2I is None else gate_up_M2I


@_dual_gemm_act.register_fake
def _(
    x_MH: Tensor,
    w_gate_IH: Tensor,
    w_up_IH: Tensor,
    b_gate_I: Tensor | None,
    b_up_I: Tensor | None,
    activation: str,
    want_gate_up: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    tokens, inner = x_MH.shape[0], w_gate_IH.shape[0]
    return x_MH.new_empty(tokens, inner), x_MH.new_empty((tokens, 2 * inner) if want_gate_up else (0,))


@torch.library.custom_op("fusepatch::gemm_dact", mutates_args=())
def _gemm_dact(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, want_h: bool, backend: str
) -> tuple[Tensor, Tensor]:
    kernels = _serving_these(backend, dout_MH, w_down_HI, gate_up_M2I)
    d_gate_up_M2I, h_MI = kernels.gemm_dact(rows(dout_MH), w_down_HI, gate_up_M2I, activation, want_h=want_h)
    return d_gate_up_M2I, dout_MH.new_empty(0) if h_MI is None else h_MI


@_gemm_dact.register_fake
def _(
    dout_MH: Tensor, w_down_HI: Tensor, gate_up_M2I: Tensor, activation: str, want_h: bool, backend: str
) -> tuple[Tensor, Tensor]:
    tokens, inner = dout_MH.shape[0], w_down_HI.shape[1]
    return dout_MH.new_empty(tokens, 2 * inner), dout_MH.new_empty((tokens, inner) if want_h else (0,))


@torch.library.custom_op("fusepatch::act_mul", mutates_args=())
def _act_mul(gate: Tensor, up: Tensor, activation: str, backend: str) -> Tensor:
    product: Tensor = load(_named(backend)).act_mul(gate, up, activation)
    return product


@_act_mul.register_fake
def _(gate: Tensor, up: Tensor, activation: str, backend: str) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("fusepatch::act_mul_backward", mutates_args=("d_gate", "d_up"))
def _act_mul_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, d_gate: Tensor | None, d_up: Tensor | None, backend: str
) -> None:
    load(_named(backend)).act_mul_backward(dh, gate, up, activation, d_gate=d_gate, d_up=d_up)


# ------------------------------------------------------------------------------------------ the whole op, for compilers


@torch.library.custom_op("fusepatch::gated_mlp", mutates_args=())
def _gated_mlp(
    x_MH: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    activation: str,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    gate, up = _split(gate_weight, up_weight)
    kernels = _serving_these(backend, x_MH, gate, up)
    h_MI, gate_up_M2I = kernels.dual_gemm_act(rows(x_MH), gate, up, None, None, activation, want_gate_up=save)
    out_MH = F.linear(h_MI, down_weight, down_bias)
    return out_MH, x_MH.new_empty(0) if gate_up_M2I is None else gate_up_M2I


@_gated_mlp.register_fake
def _(
    x_MH: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    activation: str,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    tokens, (hidden, inner) = x_MH.shape[0], down_weight.shape
    return x_MH.new_empty(tokens, hidden), x_MH.new_empty((tokens, 2 * inner) if save else (0,))


def _split(gate_weight: Tensor, up_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    if up_weight is not None:
        return gate_weight, up_weight
    inner = gate_weight.shape[0] // 2
    return gate_weight[:inner], gate_weight[inner:]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_MH, gate_weight, up_weight, down_weight, _, ctx.activation, save, ctx.backend = inputs
    if not save:
        raise RuntimeError("fusepatch::gated_mlp: a gradient needs save=True")
    ctx.save_for_backward(x_MH, gate_weight, up_weight, down_weight, output[1])


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x_MH, gate_weight, up_weight, down_weight, gate_up_M2I = ctx.saved_tensors
    need_x, need_gate, need_up, need_down, need_down_bias, *_rest = ctx.needs_input_grad
    products = _Products(ctx.backend)
    with without_autocast(dout):
        d_gate_up_M2I, h_MI = torch.ops.fusepatch.gemm_dact(
            dout, down_weight, gate_up_M2I, ctx.activation, need_down, ctx.backend
        )
        of_down = down_gradients((need_down, need_down_bias), dout, h_MI, products)
        needs = need_x, need_gate, need_up, False, False
        operands = d_gate_up_M2I, x_MH, gate_weight, up_weight
        dx, d_gate_weight, d_up_weight, *_biases = gradients(needs, up_weight is None, *operands, products)
    return dx, d_gate_weight, d_up_weight, *of_down, None, None, None


# ------------------------------------------------------------------------------------- products, for compilers alone


@dataclass(frozen=True)
class _Products:
    """The backend's own products as operators, for `gradients`. Which of them serve is settled while it is traced, and
    so by none where the number of tokens is a symbol. A graph that torch kept on disk may hold one that no longer does:
    then the operator multiplies through cuBLAS."""

    backend: str

    def _serves(self, name: str, like: Tensor, tokens: Any, hidden: int, inner: int) -> bool:
        module = products_of(_named(self.backend))
        is_known = not isinstance(tokens, torch.SymInt)
        return is_known and module is not None and module.serves(name, like.device, tokens, hidden, inner)

    def dx(self, d_gate_up_M2I: Tensor, gate_weight: Tensor, up_weight: Tensor | None) -> Tensor | None:
        (tokens, inner_2), hidden = d_gate_up_M2I.shape, gate_weight.shape[1]
        if not self._serves("dx", d_gate_up_M2I, tokens, hidden, inner_2 // 2):
            return None
        result: Tensor = torch.ops.fusepatch.product_dx(d_gate_up_M2I, gate_weight, up_weight, self.backend)
        return result

    def d_weights(self, d_gate_up_M2I: Tensor, x_MH: Tensor, *, packed: bool) -> tuple[Tensor | None, Tensor | None]:
        (tokens, inner_2), hidden = d_gate_up_M2I.shape, x_MH.shape[1]
        if not self._serves("d_weights", d_gate_up_M2I, tokens, hidden, inner_2 // 2):
            return None, None
        first, second = torch.ops.fusepatch.product_d_weights(d_gate_up_M2I, x_MH, packed, self.backend)
        return first, None if packed else second

    def d_down(self, dout_MH: Tensor, h_MI: Tensor) -> Tensor | None:
        (tokens, hidden), inner = dout_MH.shape, h_MI.shape[1]
        if not self._serves("d_down", h_MI, tokens, hidden, inner):
            return None
        result: Tensor = torch.ops.fusepatch.product_d_down(dout_MH, h_MI, self.backend)
        return result


@torch.library.custom_op("fusepatch::product_dx", mutates_args=())
def _product_dx(d_gate_up_M2I: Tensor, gate_weight: Tensor, up_weight: Tensor | None, backend: str) -> Tensor:
    needs, products = (True, False, False, False, False), products_of(_named(backend))
    dx_MH, *_rest = gradients(needs, up_weight is None, d_gate_up_M2I, None, gate_weight, up_weight, products)
    assert dx_MH is not None
    return dx_MH


@_product_dx.register_fake
def _(d_gate_up_M2I: Tensor, gate_weight: Tensor, up_weight: Tensor | None, backend: str) -> Tensor:
    return d_gate_up_M2I.new_empty(d_gate_up_M2I.shape[0], gate_weight.shape[1])


@torch.library.custom_op("fusepatch::product_d_weights", mutates_args=())
def _product_d_weights(d_gate_up_M2I: Tensor, x_MH: Tensor, packed: bool, backend: str) -> tuple[Tensor, Tensor]:
    needs, products = (False, True, not packed, False, False), products_of(_named(backend))
    _, first, second, *_rest = gradients(needs, packed, d_gate_up_M2I, rows(x_MH), None, None, products)
    assert first is not None
    return first, x_MH.new_empty(0) if second is None else second


@_product_d_weights.register_fake
def _(d_gate_up_M2I: Tensor, x_MH: Tensor, packed: bool, backend: str) -> tuple[Tensor, Tensor]:
    inner_2, hidden = d_gate_up_M2I.shape[1], x_MH.shape[1]
    if packed:
        return x_MH.new_empty(inner_2, hidden), x_MH.new_empty(0)
    return x_MH.new_empty(inner_2 // 2, hidden), x_MH.new_empty(inner_2 // 2, hidden)


@torch.library.custom_op("fusepatch::product_d_down", mutates_args=())
def _product_d_down(dout_MH: Tensor, h_MI: Tensor, backend: str) -> Tensor:
    d_down_HI, _ = down_gradients((True, False), rows(dout_MH), h_MI, products_of(_named(backend)))
    assert d_down_HI is not None
    return d_down_HI


@_product_d_down.register_fake
def _(dout_MH: Tensor, h_MI: Tensor, backend: str) -> Tensor:
    return h_MI.new_empty(dout_MH.shape[1], h_MI.shape[1])


_gated_mlp.register_autograd(_differentiate, setup_context=_keep)


# ----------------------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.fusepatch.gated_mlp)
def _(
    x_shape: tuple[int, int],
    gate_shape: object,
    up_shape: object,
    down_shape: tuple[int, int],
    *_: object,
    **__: object,
) -> int:
    return 3 * 2 * x_shape[0] * down_shape[0] * down_shape[1]


@register_flop_formula(torch.ops.fusepatch.dual_gemm_act)
def _(x_shape: tuple[int, int], gate_shape: tuple[int, int], *_: object, **__: object) -> int:
    """Both GEMMs, as FLOP counters have it: multiplications and additions of GEMMs alone."""
    return 2 * 2 * x_shape[0] * x_shape[1] * gate_shape[0]


@register_flop_formula(torch.ops.fusepatch.product_dx)
def _(d_shape: tuple[int, int], weight_shape: tuple[int, int], *_: object, **__: object) -> int:
    return 2 * d_shape[0] * d_shape[1] * weight_shape[1]


@register_flop_formula([torch.ops.fusepatch.product_d_weights, torch.ops.fusepatch.product_d_down])
def _(a_shape: tuple[int, int], b_shape: tuple[int, int], *_: object, **__: object) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


@register_flop_formula(torch.ops.fusepatch.gemm_dact)
def _(dout_shape: tuple[int, int], down_shape: tuple[int, int], *_: object, **__: object) -> int:
    return 2 * dout_shape[0] * down_shape[0] * down_shape[1]
