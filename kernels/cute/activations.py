"""Activations and their derivatives on fp32 registers, in the CuTe DSL: two special-function instructions for each.

Each takes -log2(e) as a register. Kernels read it from shared memory once per chunk of an epilogue: were it a constant,
ptxas would compute the activation of every chunk before the first is stored, and spill (12 to 18 registers in the
forward kernel that stores gate and up).
"""

# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call, no-any-return, misc"

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

MINUS_LOG2E = -math.log2(math.e)

_TANH_SCALE = 2.0 * math.sqrt(2.0 / math.pi)  # (1 + tanh(z)) / 2 is sigmoid(2 z): no tanh, no cancellation near -1
_TANH_CUBIC = 0.044715
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
# erfc(a) = exp(-a^2) t (e1 + t (e2 + ...)) with t = 1 / (1 + p a), to 1.5e-7: Abramowitz and Stegun, 7.1.26.
_ERF_P = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def round_to(fragment: cute.Tensor, values: list[Float32]) -> None:
    """Rounds to the 16-bit fragment, two values per instruction.

    The DSL's own conversion, where its result is widened again, becomes one F2F per value: as slow as a sigmoid's MUFU,
    and 192 per tile and thread in the forward kernel.
    """
    kind = "bf16x2" if fragment.element_type is BFloat16 else "f16x2"
    pairs = cute.recast_tensor(fragment, Int32)
    for pair in range(len(values) // 2):
        low, high = values[2 * pair], values[2 * pair + 1]
        pairs[pair] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
        )


def _exp2(exponent: Float32) -> Float32:
    return cute.math.exp2(exponent, fastmath=True)


def _sigmoid(z: Float32, minus_log2e: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + _exp2(z * minus_log2e))


def _normal_tail(gate: Float32, minus_log2e: Float32) -> tuple[Float32, Float32]:
    """(the normal distribution's tail beyond |gate|, exp(-gate^2 / 2)): small tails keep their relative accuracy."""
    distance = cute.arch.fmax(gate, -gate)
    t = cute.arch.rcp_approx(1.0 + (_ERF_P * math.sqrt(0.5)) * distance)
    bell = _exp2((0.5 * minus_log2e) * gate * gate)
    poly = Float32(_ERF[-1])
    for coefficient in _ERF[-2::-1]:
        poly = poly * t + coefficient
    return (0.5 * t) * poly * bell, bell


@cute.jit
def activate(gate: Float32, minus_log2e: Float32, activation: cutlass.Constexpr) -> Float32:
    """`act(gate)`."""
    if const_expr(activation == "silu"):
        value = gate * _sigmoid(gate, minus_log2e)
    elif const_expr(activation == "gelu_tanh"):
        z = gate * (_TANH_SCALE + (_TANH_SCALE * _TANH_CUBIC) * gate * gate)
        value = gate * _sigmoid(z, minus_log2e)
    else:
        tail, _ = _normal_tail(gate, minus_log2e)
        value = cute.arch.fmax(gate, Float32(0.0)) - cute.arch.fmax(gate, -gate) * tail
    return value


@cute.jit
def activate_and_slope(gate: Float32, minus_log2e: Float32, activation: cutlass.Constexpr) -> tuple[Float32, Float32]:
    """`act(gate)` and its derivative; the value is that of `activate`, bit for bit."""
    if const_expr(activation == "silu"):
        s = _sigmoid(gate, minus_log2e)
        value = gate * s
        slope = s + (value - value * s)
    elif const_expr(activation == "gelu_tanh"):
        square = gate * gate
        z = gate * (_TANH_SCALE + (_TANH_SCALE * _TANH_CUBIC) * gate * gate)
        s = _sigmoid(z, minus_log2e)
        value = gate * s
        slope = s + (value - value * s) * (_TANH_SCALE + (3.0 * _TANH_SCALE * _TANH_CUBIC) * square)
    else:
        tail, bell = _normal_tail(gate, minus_log2e)
        value = cute.arch.fmax(gate, Float32(0.0)) - cute.arch.fmax(gate, -gate) * tail
        below = tail if gate < 0.0 else 1.0 - tail
        slope = below + _INV_SQRT_2PI * gate * bell
    return value, slope
