"""What a call passes, read and checked: one function for the public ops and for the shims of libraries.

The names are those of flash-linear-attention. What does not fit comes back as a reason to decline, with a sentence for
whoever called an op of ours directly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...decline import Reason
from .problem import Call, Inputs, Problem, problem_of
from .reference import wide_dtype


class Misfit(NamedTuple):
    """Why the arguments are no call that a kernel could serve."""

    reason: Reason
    message: str


class Request(NamedTuple):
    """A call that makes sense."""

    call: Call
    inputs: Inputs

    @property
    def problem(self) -> Problem:
        """What the tables of backends are asked about."""
        return problem_of(*self)

    @property
    def tokens(self) -> int:
        """All tokens of all sequences."""
        return self.inputs.v.shape[0] * self.inputs.v.shape[1]

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        cu_seqlens = self.inputs.cu_seqlens
        return self.inputs.v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def read(
    per_channel: bool,
    *,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any = None,
    initial_state: Any = None,
    use_qk_l2norm_in_kernel: Any = False,
    use_gate_in_kernel: Any = False,
    use_beta_sigmoid_in_kernel: Any = False,
    allow_neg_eigval: Any = False,
    safe_gate: Any = False,
    lower_bound: Any = None,
    state_v_first: Any = False,
    cu_seqlens: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
) -> Request | Misfit:
    """The call, or what is wrong with it. `per_channel` tells KDA's gate from that of the gated delta rule."""
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    optional = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    tensors = {**given, **{name: t for name, t in optional.items() if t is not None}}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            return Misfit(Reason.TENSOR_SUBCLASS, f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    misfit = _why_shapes(per_channel, tensors, bool(state_v_first)) or _why_kinds(per_channel, tensors)
    if misfit is not None:
        return misfit
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        return Misfit(Reason.OPTION, "allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    for name, number in (("scale", scale), ("lower_bound", lower_bound)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            return Misfit(Reason.OPTION, f"{name} must be a number, got {type(number).__name__}")
    gate, bound = "given", 0.0
    if use_gate_in_kernel:
        gate = "softplus" if lower_bound is None else "bounded"
        if gate == "softplus" and A_log is None:
            return Misfit(Reason.OPTION, "use_gate_in_kernel needs A_log where there is no lower_bound")
        if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
            return Misfit(Reason.OPTION, f"safe_gate needs a lower_bound in [-5, 0), got {lower_bound}")
        bound = 0.0 if lower_bound is None else float(lower_bound)
    call = Call(
        float(q.shape[-1] ** -0.5 if scale is None else scale),
        bool(use_qk_l2norm_in_kernel),
        gate,
        bound,
        bool(use_beta_sigmoid_in_kernel),
        bool(allow_neg_eigval),
        bool(state_v_first),
        bool(safe_gate),
    )
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    return Request(call, inputs)


def _why_shapes(per_channel: bool, tensors: dict[str, Tensor], state_v_first: bool) -> Misfit | None:
    q, v = tensors["q"], tensors["v"]
    if q.dim() != 4 or v.dim() != 4:
        return _shape(f"q and v must be [batch, tokens, heads, width], got {_sizes(q)} and {_sizes(v)}")
    batch, tokens, heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    if not heads or value_heads % heads or not value_heads:
        return _shape(f"v must have a whole multiple of q's heads, got {value_heads} and {heads}")
    cu_seqlens = tensors.get("cu_seqlens")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or batch != 1):
        return _shape(f"cu_seqlens must be [N + 1] beside a batch of 1, got {_sizes(cu_seqlens)} and {batch}")
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    state = [value_width, key_width] if state_v_first else [key_width, value_width]
    expected = {
        "k": [batch, tokens, heads, key_width],
        "v": [batch, tokens, value_heads, value_width],
        "g": [batch, tokens, value_heads, *([key_width] if per_channel else [])],
        "beta": [batch, tokens, value_heads],
        "initial_state": [sequences, value_heads, *state],
    }
    for name, shape in expected.items():
        if name in tensors and list(tensors[name].shape) != shape:
            return _shape(f"{name} must be {shape} beside q {_sizes(q)} and v {_sizes(v)}, got {_sizes(tensors[name])}")
    elements = {"A_log": value_heads, "dt_bias": value_heads * (key_width if per_channel else 1)}
    for name, count in elements.items():
        if name in tensors and tensors[name].numel() != count:
            return _shape(f"{name} must have {count} elements, got {_sizes(tensors[name])}")
    return None


def _why_kinds(per_channel: bool, tensors: dict[str, Tensor]) -> Misfit | None:
    v = tensors["v"]
    for name, tensor in tensors.items():
        if tensor.device != v.device:
            return Misfit(Reason.DEVICE, f"{name} is on {tensor.device} and v on {v.device}")
        if name == "cu_seqlens":
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                return Misfit(Reason.DTYPE, f"cu_seqlens must be of integers, got {tensor.dtype}")
        elif not tensor.dtype.is_floating_point:
            return Misfit(Reason.DTYPE, f"{name} must be of a floating dtype, got {tensor.dtype}")
    if not tensors["q"].dtype == tensors["k"].dtype == v.dtype:
        return Misfit(
            Reason.DTYPE, f"q, k and v must have one dtype, got {[tensors[n].dtype for n in ('q', 'k', 'v')]}"
        )
    state = tensors.get("initial_state")
    if per_channel and state is not None and state.dtype != wide_dtype(v.dtype):
        return Misfit(Reason.DTYPE, f"initial_state must be {wide_dtype(v.dtype)}, got {state.dtype}")
    return None


def _shape(message: str) -> Misfit:
    return Misfit(Reason.SHAPE, message)


def _sizes(tensor: Tensor) -> str:
    return str(list(tensor.shape))
