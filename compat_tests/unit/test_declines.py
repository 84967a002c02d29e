"""Every reason for which a call is declined, provoked by a real call; and what must not decline.

`check()` runs a case before and after `accelerate()`: the patched run must be counted by route and reason as expected,
and give the library's own result, bit for bit where the library's own code ran.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

import fusepatch
from fusepatch import arch, selfcheck
from fusepatch.catalogue import Assumed
from fusepatch.decline import Reason, Route
from fusepatch.kernels.gated_mlp import choose, library, reference
from fusepatch.shims import activations, hf_gated_mlp
from support import PROVOKED_BY_LINEAR_ATTENTION, relative_error, tiny_llama, tiny_llama_mlp

FUSED, POINTWISE, ORIGINAL = Route
PROVOKED: set[Reason] = set()
MLPS = Callable[[nn.Module], "nn.Module | None"]


def provokes(*reasons: Reason) -> Callable[[Any], Any]:
    """Marks a test as one that provokes `reasons`; the last test of this file counts them."""
    PROVOKED.update(reasons)
    return lambda test: test


def fault(what: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=what)


@pytest.fixture(autouse=True)
def rehearsal(reference_backend: None) -> None:
    """Every test here runs the reference backend, unless it says otherwise."""


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (1,))


def counted() -> tuple[dict[str, int], dict[str, int]]:
    """Calls by route, and declines by reason, over all classes."""
    classes = [each for target in fusepatch.status().to_dict()["targets"] for each in target["classes"]]
    total = lambda what: {key: count for each in classes for key, count in each[what].items()}
    return total("calls"), total("declines")


def traced() -> dict[str, int]:
    classes = [each for target in fusepatch.status().to_dict()["targets"] for each in target["classes"]]
    return {key: count for each in classes for key, count in each["traces"].items()}


def assert_counted(route: Route, reason: Reason | None, calls: int = 1) -> None:
    assert counted() == ({route.value: calls}, {} if reason is None else {reason.value: calls})


def check(
    run: Callable[[], Any], route: Route, reason: Reason | None, *, calls: int = 1, tolerance: float = 1e-6
) -> None:
    """All `calls` of `run()` take `route` because of `reason`, and give what the unpatched library gives."""
    stock = run()
    fusepatch.accelerate()
    patched = run()
    assert_counted(route, reason, calls)
    for ours, theirs in zip(tree_leaves(patched), tree_leaves(stock), strict=True):
        if route is ORIGINAL:
            assert torch.equal(ours, theirs)
        else:
            assert relative_error(ours, theirs) <= tolerance


def tokens(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape or (3, 64), generator=generator).to(dtype).requires_grad_(requires_grad)


def train(mlp: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """Output and every gradient of one call."""
    x = tokens() if x is None else x
    torch.manual_seed(2)  # the dropout of adapters
    out = mlp(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype))
    return [out.detach(), x.grad, *(p.grad for p in mlp.parameters() if p.requires_grad)]


def infer(mlp: nn.Module, x: Tensor | None = None) -> Tensor:
    return mlp(tokens() if x is None else x).detach()


def changed(change: MLPS, **overrides: Any) -> nn.Module:
    """A LlamaMLP after `change`, which works in place or returns another."""
    mlp = tiny_llama_mlp(**overrides)
    return change(mlp) or mlp


# ------------------------------------------------------------------------------- a projection is not a plain nn.Linear


def adapted(config: str, **options: Any) -> MLPS:
    peft = pytest.importorskip("peft")

    def change(mlp: nn.Module) -> nn.Module:
        torch.manual_seed(5)
        return peft.inject_adapter_in_model(getattr(peft, config)(**options), mlp)

    return change


def hook(name: str, function: Callable[..., Any] = lambda *args: None) -> MLPS:
    return lambda mlp: getattr(mlp.up_proj, name)(function) and None


def on(name: str, function: Callable[[nn.Module], Any]) -> MLPS:
    """`function` applied to one sub-module, in place."""

    def change(mlp: nn.Module) -> None:
        torch.manual_seed(4)
        function(getattr(mlp, name))

    return change


def swap(name: str, make: Callable[[nn.Module], Any]) -> MLPS:
    """One sub-module replaced."""

    def change(mlp: nn.Module) -> None:
        torch.manual_seed(4)
        new = make(getattr(mlp, name))
        if not isinstance(new, nn.Module):
            delattr(mlp, name)
        setattr(mlp, name, new)

    return change


def own_forward(module: nn.Module) -> None:
    """As `kernelize`, Liger on an instance, and HF tensor parallelism do."""
    module.forward = types.MethodType(type(module).forward, module)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnParameter(nn.Parameter):
    pass


def with_weight(weight: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    def change(linear: nn.Module) -> None:
        value = weight(linear.weight.detach())
        if not isinstance(value, nn.Parameter):
            del linear.weight
        linear.weight = value

    return change


def zero3(mlp: nn.Module) -> None:
    """As DeepSpeed leaves a module: the weights are elsewhere until a hook gathers them."""

    def partition(linear: nn.Module) -> None:
        whole = linear.weight.data
        linear.weight.ds_id = 0
        linear.weight.data = torch.empty(0)
        linear.register_forward_pre_hook(lambda module, args: setattr(module.weight, "data", whole))

    for name in ("gate_proj", "up_proj", "down_proj"):
        partition(getattr(mlp, name))


def bitsandbytes_4bit(mlp: nn.Module) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for name, linear in list(mlp.named_children())[:3]:
        new = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32)
        new.load_state_dict(linear.state_dict())
        new.weight._quantize("cpu")
        setattr(mlp, name, new)


def bitsandbytes_8bit(mlp: nn.Module) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for name, linear in list(mlp.named_children())[:3]:
        new = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
        new.load_state_dict(linear.state_dict())
        setattr(mlp, name, new.to("cpu"))


def hf_hook(module: nn.Module) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.ModelHook())


def offload(mlp: nn.Module) -> None:
    pytest.importorskip("accelerate").cpu_offload(mlp, torch.device("cpu"))


LORA = {"target_modules": ["gate_proj", "up_proj"], "r": 4, "lora_dropout": 0.3, "init_lora_weights": False}

TRAINED = {
    "peft-lora": (Reason.PEFT, lambda mlp: adapted("LoraConfig", **LORA)(mlp)),
    "peft-dora": (Reason.PEFT, lambda mlp: adapted("LoraConfig", **LORA, use_dora=True)(mlp)),
    "peft-lora-down": (Reason.PEFT, lambda mlp: adapted("LoraConfig", target_modules=["down_proj"])(mlp)),
    "peft-ia3": (
        Reason.PEFT,
        lambda mlp: adapted("IA3Config", target_modules=["down_proj"], feedforward_modules=["down_proj"])(mlp),
    ),
    "forward-hook": (Reason.HOOKS, hook("register_forward_hook", lambda module, args, out: 3 * out)),
    "forward-pre-hook": (Reason.HOOKS, hook("register_forward_pre_hook", lambda module, args: (2 * args[0],))),
    "backward-hook": (Reason.HOOKS, hook("register_full_backward_hook", lambda module, dx, dout: (2 * dx[0],))),
    "backward-pre-hook": (Reason.HOOKS, hook("register_full_backward_pre_hook", lambda module, dout: (2 * dout[0],))),
    "old-weight-norm": (Reason.HOOKS, on("gate_proj", weight_norm)),
    "old-spectral-norm": (Reason.HOOKS, on("down_proj", spectral_norm)),
    "prune": (Reason.HOOKS, on("up_proj", lambda linear: prune.l1_unstructured(linear, "weight", 0.5))),
    "weight-norm": (Reason.PARAMETRISED, on("gate_proj", parametrizations.weight_norm)),
    "spectral-norm": (Reason.PARAMETRISED, on("down_proj", parametrizations.spectral_norm)),
    "parametrize": (
        Reason.PARAMETRISED,
        on("up_proj", lambda linear: parametrize.register_parametrization(linear, "weight", nn.Tanh())),
    ),
    "hf-hook": (Reason.ACCELERATE_HOOKS, on("gate_proj", hf_hook)),
    "own-forward": (Reason.INSTANCE_FORWARD, on("gate_proj", own_forward)),
    "linear-subclass": (Reason.NOT_LINEAR, swap("up_proj", lambda old: OwnLinear(64, 96, bias=False))),
    "sequential": (Reason.NOT_LINEAR, swap("down_proj", lambda old: nn.Sequential(old, nn.Dropout(0.2)))),
    "scripted": (Reason.INSTANCE_FORWARD, swap("up_proj", torch.jit.script)),
    "parameter-subclass": (Reason.WEIGHT_NOT_PARAMETER, on("up_proj", with_weight(OwnParameter))),
    "plain-tensor": (Reason.WEIGHT_NOT_PARAMETER, on("down_proj", with_weight(lambda weight: weight))),
    "extra-parameter": (
        Reason.WEIGHT_NOT_PARAMETER,
        on("down_proj", lambda linear: linear.register_parameter("scale", None)),
    ),
    "strided-weight": (
        Reason.STRIDES,
        on("up_proj", with_weight(lambda weight: nn.Parameter(weight.t().contiguous().t()))),
    ),
    "other-output-width": (Reason.SHAPE, swap("down_proj", lambda old: nn.Linear(96, 40, bias=False))),
}

INFERRED = {
    "hf-offload": (Reason.ACCELERATE_HOOKS, offload),
    "zero3": (Reason.ZERO3, zero3),
    "bitsandbytes-4bit": (Reason.QUANTISED, bitsandbytes_4bit),
    "bitsandbytes-8bit": (Reason.QUANTISED, bitsandbytes_8bit),
    "dynamic-quantisation": (
        Reason.QUANTISED,
        lambda mlp: torch.ao.quantization.quantize_dynamic(mlp, {nn.Linear}),
    ),
}


@provokes(*(reason for reason, _ in (*TRAINED.values(), *INFERRED.values())))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*TRAINED, *INFERRED])
def test_projection_is_called(case: str) -> None:
    reason, change = (TRAINED | INFERRED)[case]
    check(lambda: (train if case in TRAINED else infer)(changed(change)), POINTWISE, reason)


@provokes(Reason.BIAS)
def test_bias() -> None:
    check(lambda: train(tiny_llama_mlp(mlp_bias=True)), POINTWISE, Reason.BIAS)


@provokes(Reason.FSDP, Reason.DTENSOR, Reason.WEIGHT_NOT_PARAMETER)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("reason", "shard"),
    [
        (Reason.FSDP, lambda mlp: fully_shard(mlp.gate_proj, mesh=mesh()) and None),
        (Reason.DTENSOR, lambda mlp: tensor_parallel(mlp)),
        (Reason.WEIGHT_NOT_PARAMETER, lambda mlp: FullyShardedDataParallel(mlp, device_id=torch.device("cpu"))),
    ],
    ids=["fsdp2-projection", "tensor-parallel", "fsdp1"],
)
def test_sharded(process_group: None, reason: Reason, shard: MLPS) -> None:
    check(lambda: train(changed(shard))[:2], POINTWISE, reason)


def tensor_parallel(mlp: nn.Module) -> nn.Module:
    from torch.distributed.tensor import parallel

    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    return parallel.parallelize_module(mlp, mesh(), {"gate_proj": columns, "up_proj": columns, "down_proj": rows})


@provokes(Reason.FSDP, Reason.ZERO3)
@pytest.mark.parametrize(("mark", "reason"), [(False, Reason.FSDP), (True, Reason.ZERO3)])
def test_weights_are_elsewhere(mark: bool, reason: Reason) -> None:
    mlp = tiny_llama_mlp()
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        linear.weight.data = torch.empty(0)
        if mark:
            linear.weight.ds_id = 0
    (row,) = fusepatch.explain(mlp).modules
    assert (row.route, row.reason) == ("pointwise", reason.value)


@provokes(Reason.ZERO3)
def test_hooks_of_zero3_are_told_from_others_before_a_call_too() -> None:
    mlp = changed(zero3)
    mlp.act_fn.register_forward_pre_hook(lambda module, args: None)
    assert fusepatch.explain(mlp).modules[0].reason == "zero3"
    check(lambda: infer(mlp), ORIGINAL, Reason.ZERO3)


@provokes(Reason.WEIGHT_NOT_PARAMETER)
def test_functional_call() -> None:
    mlp = tiny_llama_mlp()
    weights = {name: 2 * weight.detach() for name, weight in mlp.named_parameters()}
    check(lambda: functional_call(mlp, weights, (tokens(),)), POINTWISE, Reason.WEIGHT_NOT_PARAMETER)


@provokes(Reason.FOREIGN_FORWARD)
def test_linear_forward_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fusepatch.accelerate()
    library = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * library(self, x))
    fusepatch.restore()
    check(lambda: train(tiny_llama_mlp()), POINTWISE, Reason.FOREIGN_FORWARD)


@provokes(Reason.AUTOCAST)
@pytest.mark.parametrize(("x", "weights"), [("float32", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_autocast(x: str, weights: str) -> None:
    def run() -> list[Tensor]:
        mlp = tiny_llama_mlp(getattr(torch, weights))
        with torch.autocast("cpu", torch.bfloat16):
            return train(mlp, tokens(dtype=getattr(torch, x)))

    check(run, POINTWISE, Reason.AUTOCAST, tolerance=1e-2)


@provokes(Reason.DTYPE)
def test_mixed_weights_under_autocast() -> None:
    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return train(changed(on("down_proj", lambda linear: linear.bfloat16())))

    check(run, POINTWISE, Reason.AUTOCAST, tolerance=1e-2)


# ---------------------------------------------------------------------------------------- what the activation is


@provokes(Reason.ACTIVATION, Reason.INSTANCE_FORWARD, Reason.HOOKS, Reason.ACCELERATE_HOOKS)
@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Reason.ACTIVATION, swap("act_fn", lambda old: nn.ReLU())),
        (Reason.ACTIVATION, swap("act_fn", lambda old: torch.tanh)),
        (Reason.INSTANCE_FORWARD, on("act_fn", own_forward)),
        (Reason.ACCELERATE_HOOKS, on("act_fn", hf_hook)),
        (Reason.HOOKS, on("act_fn", lambda act: act.register_forward_hook(lambda module, args, out: 2 * out))),
    ],
    ids=["relu", "function", "kernelize", "hf-hook", "hook"],
)
def test_activation(reason: Reason, change: MLPS) -> None:
    check(lambda: train(changed(change)), ORIGINAL, reason)


@provokes(Reason.FOREIGN_FORWARD)
def test_activation_forward_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert activations.kind_of(SiLUActivation()) == "silu"
    monkeypatch.setattr(SiLUActivation, "forward", lambda self, x: torch.tanh(x))
    check(lambda: train(tiny_llama_mlp()), ORIGINAL, Reason.FOREIGN_FORWARD)


class OwnMLP(LlamaMLP):
    """Hides a projection of its base class."""

    @property
    def up_proj(self) -> Callable[[Tensor], Tensor]:
        return lambda x: x.repeat(1, 2)[:, :96]


@provokes(Reason.STRUCTURE)
def test_projection_is_a_property() -> None:
    def run() -> list[Tensor]:
        mlp = OwnMLP(tiny_llama(layers=1).config)
        mlp.load_state_dict(tiny_llama_mlp().state_dict())
        return train(mlp)[:2]

    check(run, ORIGINAL, Reason.STRUCTURE)


@provokes(Reason.FORWARD_DIFFERS, Reason.FOREIGN_FORWARD)
@pytest.mark.parametrize("wraps", [False, True])
def test_class_was_patched_before(monkeypatch: pytest.MonkeyPatch, wraps: bool) -> None:
    """As Liger does (a new function), and as tracers do (a wrapper of the library's)."""
    library = LlamaMLP.forward

    def foreign(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * library(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", functools.wraps(library)(foreign) if wraps else foreign)
    mlp = tiny_llama_mlp()
    stock = mlp(tokens())
    fusepatch.accelerate()
    assert LlamaMLP.forward is foreign
    assert torch.equal(mlp(tokens()), stock)
    (row,) = fusepatch.explain(mlp).modules
    assert (row.route, row.reason) == ("original", "foreign-forward" if wraps else "forward-differs")


# ----------------------------------------------------------------------------------------------- what kind of call


def in_dual_level(mlp: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(mlp(forward_ad.make_dual(tokens(), torch.ones(3, 64)))).tangent


def counting_flops(mlp: nn.Module) -> tuple[list[Tensor], Tensor]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        return train(mlp), torch.tensor(counter.get_total_flops())


def selectively_checkpointed(mlp: nn.Module) -> list[Tensor]:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return train(Checkpointed(mlp, use_reentrant=False, context_fn=contexts))


class Checkpointed(nn.Module):
    def __init__(self, mlp: nn.Module, **options: Any) -> None:
        super().__init__()
        self.mlp, self.options = mlp, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mlp, x, **self.options)


def faked(mlp: nn.Module) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = mlp(mode.from_tensor(tokens(requires_grad=False)))
    return torch.tensor(out.shape)


def with_global_hook(mlp: nn.Module) -> list[Tensor]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: 2 * out)
    try:
        return train(mlp)
    finally:
        handle.remove()


def proxy_traced(mlp: nn.Module) -> Tensor:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(mlp)(tokens(requires_grad=False))(tokens(requires_grad=False))


class Tagged(Tensor):
    pass


CALLS = {
    "grad": (Reason.FUNCTORCH, lambda mlp: grad(lambda x: mlp(x).sum())(tokens())),
    "grad-of-weights": (
        Reason.FUNCTORCH,
        lambda mlp: grad(lambda weights: functional_call(mlp, weights, (torch.ones(3, 64),)).sum())(mlp.state_dict()),
    ),
    "vmap": (Reason.FUNCTORCH, lambda mlp: vmap(mlp)(tokens())),
    "jvp": (Reason.FUNCTORCH, lambda mlp: jvp(mlp, (tokens(),), (torch.ones(3, 64),))),
    "dual": (Reason.FORWARD_AD, in_dual_level),
    "flop-counter": (Reason.GLOBAL_HOOKS, counting_flops),  # it counts by module
    "fake-mode": (Reason.DISPATCH_MODE, faked),
    "make-fx": (Reason.DISPATCH_MODE, proxy_traced),
    "global-hook": (Reason.GLOBAL_HOOKS, with_global_hook),
    "fx": (Reason.EXPORTING, lambda mlp: train(torch.fx.symbolic_trace(mlp))),
    "subclass": (Reason.TENSOR_SUBCLASS, lambda mlp: mlp(tokens().as_subclass(Tagged)).as_subclass(Tensor)),
    "parameter": (Reason.TENSOR_SUBCLASS, lambda mlp: train(mlp, nn.Parameter(tokens()))),
    "zero-tokens": (Reason.ZERO_TOKENS, lambda mlp: train(mlp, tokens(2, 0, 64))),
    "meta": (Reason.META, lambda mlp: torch.tensor(mlp.to("meta")(tokens().to("meta")).shape)),
    "broadcast-up": (Reason.SHAPE, lambda mlp: train(changed(swap("up_proj", lambda old: nn.Linear(64, 1))))),
}


@provokes(*(reason for reason, _ in CALLS.values()))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", CALLS)
def test_call(case: str) -> None:
    reason, run = CALLS[case]
    check(lambda: run(tiny_llama_mlp()), ORIGINAL, reason)


def test_selective_checkpointing() -> None:
    check(lambda: selectively_checkpointed(tiny_llama_mlp()), FUSED, None, calls=2)


@pytest.mark.parametrize("route", [FUSED, POINTWISE])
def test_selective_checkpointing_may_keep_our_kernels(route: Route) -> None:
    """What the policy saves is not run again."""
    assert library.operators(choose.REFERENCE).backend == "reference"  # importing it makes the operators
    operators = [torch.ops.fusepatch.dual_gemm_act.default, torch.ops.fusepatch.act_mul.default]
    ran: list[str] = []
    real = reference.dual_gemm_act, reference.act_mul

    def run() -> list[Tensor]:
        contexts = functools.partial(create_selective_checkpoint_contexts, operators)
        mlp = tiny_llama_mlp()
        if route is POINTWISE:
            mlp.gate_proj.register_parameter("bias", nn.Parameter(torch.full((96,), 0.5)))
        return train(Checkpointed(mlp, use_reentrant=False, context_fn=contexts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "dual_gemm_act", lambda *a, **k: (ran.append("fused"), real[0](*a, **k))[1])
        patch.setattr(reference, "act_mul", lambda *a, **k: (ran.append("pointwise"), real[1](*a, **k))[1])
        check(run, route, None if route is FUSED else Reason.BIAS, calls=2)
    # The fused kernels of the reference backend call act_mul themselves, the backward one too.
    assert ran == (["fused", "pointwise", "pointwise"] if route is FUSED else ["pointwise"])


class Recording(TorchDispatchMode):
    """A mode as a user writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("route", [FUSED, POINTWISE])
def test_a_mode_around_the_forward_alone(route: Route) -> None:
    """What is recomputed without the mode takes the same route, and saves the same tensors."""

    def run() -> list[Tensor]:
        x, mlp = tokens(), tiny_llama_mlp()
        if route is POINTWISE:
            mlp.gate_proj.register_parameter("bias", nn.Parameter(torch.full((96,), 0.5)))
        with Recording():
            out = checkpoint(mlp, x, use_reentrant=False)
        out.sum().backward()
        return [x.grad, *(p.grad for p in mlp.parameters())]

    check(run, route, None if route is FUSED else Reason.BIAS, calls=2)


def test_a_mode_sees_our_kernels_as_operators() -> None:
    def run() -> list[Tensor]:
        with Recording() as mode:
            out = train(tiny_llama_mlp())
        seen.append(mode.seen)
        return out

    seen: list[list[str]] = []
    check(run, FUSED, None)
    ours = [name for name in seen[-1] if name.startswith("fusepatch")]
    assert ours == ["fusepatch.dual_gemm_act.default", "fusepatch.gemm_dact.default"]


def test_zero_tokens() -> None:
    mlp = tiny_llama_mlp()
    fusepatch.accelerate()
    out, dx, *d_weights = train(mlp, tokens(0, 64))
    assert out.shape == dx.shape == (0, 64)
    assert [d_weight.shape for d_weight in d_weights] == [(96, 64), (96, 64), (64, 96)]
    assert not any(d_weight.any() for d_weight in d_weights)


@provokes(Reason.DTENSOR)
def test_dtensor_input(process_group: None) -> None:
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    def run() -> Tensor:
        mlp = distribute_module(tiny_llama_mlp(), mesh())
        return mlp(distribute_tensor(tokens(), mesh(), [Replicate()])).full_tensor()

    check(run, ORIGINAL, Reason.DTENSOR)


@provokes(Reason.EXPORTING)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace() -> None:
    x = tokens(requires_grad=False)
    run = lambda: torch.jit.trace(tiny_llama_mlp(), x, check_trace=False)(x)
    check(run, ORIGINAL, Reason.EXPORTING)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_script_reads_the_library() -> None:
    stock = infer(tiny_llama_mlp())
    fusepatch.accelerate()
    assert torch.equal(infer(torch.jit.script(tiny_llama_mlp())), stock)


@provokes(Reason.EXPORTING)
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    run = lambda: torch.export.export(tiny_llama_mlp(), (tokens(),), strict=strict)
    stock = run()
    fusepatch.accelerate()
    program = run()
    assert [node.target for node in program.graph.nodes] == [node.target for node in stock.graph.nodes]
    assert torch.equal(program.module()(tokens()), stock.module()(tokens()))
    assert counted() == ({}, {})
    assert set(traced()) == {"exporting"}


@provokes(Reason.COMPILING)
@pytest.mark.parametrize("whole_model", [False, True])
def test_compile(whole_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no backend serves; what is served is in test_compile.py."""
    monkeypatch.delenv("FUSEPATCH_GATED_MLP_BACKEND")

    def run() -> tuple[list[list[str]], Tensor]:
        torch._dynamo.reset()
        graphs = []

        def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
            return graph

        if whole_model:
            model = torch.compile(tiny_llama(), backend=backend, fullgraph=True)
            out = model(torch.arange(6)[None], use_cache=False).logits
        else:
            out = torch.compile(tiny_llama_mlp(), backend=backend, fullgraph=True)(tokens())
        return graphs, out.detach()

    stock_graphs, stock = run()
    fusepatch.accelerate()
    graphs, out = run()
    assert graphs == stock_graphs
    assert len(graphs) == 1
    assert torch.equal(out, stock)
    assert counted() == ({}, {})
    assert set(traced()) == {"compiling"}
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------------ the tensors


@provokes(Reason.STRIDES)
@pytest.mark.parametrize(
    "x",
    [
        lambda: tokens(1, 64).expand(3, 64),
        lambda: tokens(64, 3).t(),
        lambda: tokens(3, 128)[:, ::2],
        lambda: tokens(4, 3, 64).transpose(0, 1),
    ],
    ids=["expanded", "transposed", "strided", "batch-transposed"],
)
def test_strides(x: Callable[[], Tensor]) -> None:
    def run() -> list[Tensor]:
        view = x()
        view.retain_grad()
        return train(tiny_llama_mlp(), view)

    check(run, POINTWISE, Reason.STRIDES)


def test_input_hooks_fire_once_and_may_change_the_gradient() -> None:
    def run() -> list[Tensor]:
        x = tokens()
        y = x * 1
        fired: list[Tensor] = []
        y.register_hook(lambda dy: fired.append(dy) or 2 * dy)
        tiny_llama_mlp()(y).sum().backward()
        assert len(fired) == 1
        return [*fired, x.grad]

    check(run, FUSED, None)


@provokes(Reason.STRIDES, Reason.TENSOR_SUBCLASS, Reason.DTYPE)
@pytest.mark.parametrize(
    ("reason", "given"),
    [
        (Reason.STRIDES, lambda out: out.t().contiguous().t()),
        (Reason.TENSOR_SUBCLASS, lambda out: out.as_subclass(Tagged)),
        (Reason.DTYPE, lambda out: out.double()),
    ],
    ids=["strides", "subclass", "dtype"],
)
def test_what_a_projection_returned(reason: Reason, given: Callable[[Tensor], Tensor]) -> None:
    """The projections ran already when their result declines: the rest is the library's own code all the same."""

    def run() -> list[Tensor]:
        mlp = tiny_llama_mlp()
        mlp.up_proj.register_forward_hook(lambda module, args, out: given(out))
        mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0].as_subclass(Tensor).float(),))
        return train(mlp)

    check(run, ORIGINAL, reason)


@provokes(Reason.DTYPE, Reason.SHAPE)
@pytest.mark.parametrize(
    "x",
    [
        lambda: torch.ones(3, 64, dtype=torch.int64),
        lambda: tokens(dtype=torch.bfloat16),
        lambda: tokens(3, 65),
        lambda: torch.ones(3, 64, dtype=torch.complex64),
        lambda: "text",
    ],
    ids=["int", "mixed", "width", "complex", "text"],
)
def test_bad_input_raises_what_the_library_raises(x: Callable[[], Any]) -> None:
    mlp = tiny_llama_mlp()
    with pytest.raises((RuntimeError, TypeError)) as stock:
        mlp(x())
    fusepatch.accelerate()
    with pytest.raises(stock.type) as ours:
        mlp(x())
    assert str(ours.value) == str(stock.value)
    assert "fused" not in counted()[0]


@provokes(Reason.DTYPE)
def test_integers() -> None:
    fusepatch.accelerate()
    with pytest.raises(RuntimeError, match="same dtype"):
        tiny_llama_mlp()(torch.ones(3, 64, dtype=torch.int64))
    assert_counted(ORIGINAL, Reason.DTYPE)


@provokes(Reason.DEVICE)
def test_devices() -> None:
    """There is no second device here to call on."""
    mlp = tiny_llama_mlp()
    mlp.down_proj.to("meta")
    (row,) = fusepatch.explain(mlp).modules
    assert (row.route, row.reason) == ("pointwise", "device")


@provokes(Reason.META)
def test_meta_weights_are_explained_for_another_device() -> None:
    with torch.device("meta"):
        mlp = tiny_llama_mlp()
    (row,) = fusepatch.explain(mlp).modules
    assert (row.route, row.reason) == ("original", "meta")
    (row,) = fusepatch.explain(mlp, device="cpu").modules
    assert row.route == "fused"


# ---------------------------------------------------------------------------------------------- the kernels there are


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`put(...)` gives the reference backend other limits."""

    def change(**limits: Any) -> None:
        backend = dataclasses.replace(choose.REFERENCE, **limits)
        monkeypatch.setattr(choose, "BACKENDS", (backend,))
        choose.TABLE.forget()

    yield change
    choose.TABLE.forget()


def verdict(outcome: selfcheck.Outcome) -> Callable[..., selfcheck.Verdict]:
    return lambda check, device: selfcheck.Verdict(outcome)


def unaligned() -> Tensor:
    return tokens(1 + 3 * 64).detach()[1:].view(3, 64).requires_grad_()


@provokes(
    Reason.ALIGNMENT, Reason.MISSING_PACKAGE, Reason.NO_KERNEL, Reason.SELFCHECK_FAILED, Reason.SELFCHECK_INCONCLUSIVE,
    Reason.PACKAGE_DIFFERS,
)  # fmt: skip
@pytest.mark.parametrize(
    ("limits", "route", "reason"),
    [
        ({"byte_alignment": 16}, POINTWISE, Reason.ALIGNMENT),
        ({"width_multiple": 96}, POINTWISE, Reason.ALIGNMENT),
        ({"width_multiple": 64}, ORIGINAL, Reason.ALIGNMENT),
        ({"packages": ("no_such_package",)}, ORIGINAL, Reason.MISSING_PACKAGE),
        ({"drift": lambda: ("its interface changed",)}, ORIGINAL, Reason.PACKAGE_DIFFERS),
        ({"routes": frozenset({POINTWISE})}, POINTWISE, Reason.NO_KERNEL),
        ({"routes": frozenset({FUSED})}, FUSED, None),
        ({"routes": frozenset()}, ORIGINAL, Reason.NO_KERNEL),
        ({"dtypes": frozenset({torch.float64})}, ORIGINAL, Reason.DTYPE),
        ({"check": selfcheck.Outcome.FAILED}, ORIGINAL, Reason.SELFCHECK_FAILED),
        ({"check": selfcheck.Outcome.INCONCLUSIVE}, ORIGINAL, Reason.SELFCHECK_INCONCLUSIVE),
        ({"check": selfcheck.Outcome.PASSED}, FUSED, None),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),
)
def test_backend_limits(
    put: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any],
    route: Route,
    reason: Reason | None,
) -> None:
    if "check" in limits:
        monkeypatch.setattr(selfcheck, "verdict", verdict(limits["check"]))
        limits = {"check": "some.module"}
    put(**limits)
    check(lambda: train(tiny_llama_mlp(), unaligned()), route, reason)


@provokes(Reason.PACKED_WEIGHT)
@pytest.mark.parametrize(
    ("packed", "route", "reason"), [(True, FUSED, None), (False, POINTWISE, Reason.PACKED_WEIGHT)], ids=str
)
def test_gate_and_up_in_one_weight(put: Callable[..., None], packed: bool, route: Route, reason: Reason | None) -> None:
    from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

    put(packed=packed)
    torch.manual_seed(0)
    mlp = Phi3MLP(Phi3Config(hidden_size=64, intermediate_size=96, pad_token_id=0))
    check(lambda: train(mlp), route, reason)


@provokes(Reason.ARCHITECTURE, Reason.SIZE_NOT_ADMITTED, Reason.CAPTURE_COLD)
@pytest.mark.parametrize(
    ("limits", "capability", "route", "reason"),
    [
        ({}, (9, 0), FUSED, None),
        ({}, (8, 0), POINTWISE, Reason.ARCHITECTURE),
        ({}, (7, 5), ORIGINAL, Reason.ARCHITECTURE),
        ({"admits": lambda problem, tokens: tokens > 2048}, (9, 0), ORIGINAL, Reason.SIZE_NOT_ADMITTED),
        ({"admits": lambda problem, tokens: problem.route is POINTWISE}, (9, 0), POINTWISE, Reason.SIZE_NOT_ADMITTED),
        ({"compiled": lambda problem, tokens: False}, (9, 0), ORIGINAL, Reason.CAPTURE_COLD),
    ],
)
def test_native_backend(
    put: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any],
    capability: tuple[int, int],
    route: Route,
    reason: Reason | None,
) -> None:
    """There is no GPU here: the decision is on a module's metadata, for a device that is assumed."""
    monkeypatch.delenv("FUSEPATCH_GATED_MLP_BACKEND")
    put(native=True, **limits)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forward = LlamaMLP.forward
    decide = lambda: hf_gated_mlp.decide(tiny_llama_mlp(), forward, Assumed(2048, torch.device("cuda", 0)))
    if reason is Reason.CAPTURE_COLD:
        assert decide().route is FUSED
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made = decide()
    assert (made.route, made.reason) == (route, reason)
    assert (capability in arch.ARCHITECTURES) == (capability != (7, 5))


@provokes(Reason.NO_KERNEL)
def test_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEPATCH_GATED_MLP_BACKEND")
    (row,) = fusepatch.explain(tiny_llama_mlp(), device="xpu").modules
    assert (row.route, row.reason) == ("original", "no-kernel")


@provokes(Reason.CPU)
def test_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEPATCH_GATED_MLP_BACKEND")
    check(lambda: train(tiny_llama_mlp()), ORIGINAL, Reason.CPU)


@provokes(Reason.ROUTE_BOUND)
@pytest.mark.parametrize("route", [POINTWISE, ORIGINAL])
def test_route_bound(monkeypatch: pytest.MonkeyPatch, route: Route) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", route.value)
    check(lambda: train(tiny_llama_mlp()), route, Reason.ROUTE_BOUND)


@provokes(Reason.MISSING_PACKAGE)
def test_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    target = {each["name"]: each for each in fusepatch.accelerate().to_dict()["targets"]}["gated_mlp/fla"]
    assert (target["state"], target["reason"]) == ("off", "missing-package")


# -------------------------------------------------------------------------------------------------- the user's choice


@provokes(Reason.DISABLED)
def test_disabled() -> None:
    def run() -> list[Tensor]:
        with fusepatch.disabled():
            return train(tiny_llama_mlp())

    check(run, ORIGINAL, Reason.DISABLED)


@provokes(Reason.ENV_DISABLED)
@pytest.mark.parametrize("variable", ["FUSEPATCH", "FUSEPATCH_GATED_MLP"])
def test_env_disabled(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    before = vars(LlamaMLP)["forward"]
    found = fusepatch.accelerate().to_dict()["targets"]
    assert {target["reason"] for target in found} == {"env-disabled"}
    assert vars(LlamaMLP)["forward"] is before


@provokes(Reason.OTHER_MODEL)
def test_other_model() -> None:
    chosen, other = tiny_llama_mlp(), tiny_llama_mlp()
    stock = train(other)
    other.zero_grad()
    fusepatch.accelerate(model=chosen)
    assert all(map(torch.equal, train(other), stock))
    assert_counted(ORIGINAL, Reason.OTHER_MODEL)


@provokes(Reason.RESTORED)
def test_forward_was_kept_past_restore() -> None:
    mlp = tiny_llama_mlp()
    stock = infer(mlp)
    fusepatch.accelerate()
    kept = mlp.forward  # as accelerate's hooks and torch.compile do
    fusepatch.restore()
    assert torch.equal(kept(tokens()), stock)
    assert_counted(ORIGINAL, Reason.RESTORED)


# ------------------------------------------------------------------------------------------------ what must not decline


def strided_rows() -> Tensor:
    return tokens(2, 3, 128)[..., 32:96]


def twice(mlp: nn.Module) -> list[Tensor]:
    return train(nn.Sequential(mlp, nn.Identity(), mlp))


def under_autocast(mlp: nn.Module) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return train(mlp.bfloat16(), tokens(dtype=torch.bfloat16))


def without_autograd(mlp: nn.Module) -> Tensor:
    with torch.inference_mode():
        return mlp(tokens(requires_grad=False))


def under_a_device(mlp: nn.Module) -> list[Tensor]:
    with torch.device("cpu"):
        return train(mlp)


def saved_on_cpu(mlp: nn.Module) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return train(mlp)


def frozen(mlp: nn.Module, *names: str) -> nn.Module:
    for name in names:
        getattr(mlp, name).weight.requires_grad_(False)
    return mlp


def tied(mlp: nn.Module) -> nn.Module:
    """Two layers that share every weight."""
    other = tiny_llama_mlp()
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(other, name).weight = getattr(mlp, name).weight
    return nn.Sequential(mlp, other)


SERVED = {
    "1d": (1, lambda mlp: train(mlp, tokens(64))),
    "2d": (1, lambda mlp: train(mlp, tokens(5, 64))),
    "3d": (1, lambda mlp: train(mlp, tokens(2, 5, 64))),
    "one-token": (1, lambda mlp: train(mlp, tokens(1, 1, 64))),
    "keyword": (1, lambda mlp: mlp(x=tokens())),
    "strided-rows": (1, lambda mlp: infer(mlp, strided_rows())),
    "non-leaf": (1, lambda mlp: train(nn.Sequential(nn.LayerNorm(64), mlp))),
    "frozen": (1, lambda mlp: train(frozen(mlp, "gate_proj", "up_proj", "down_proj"))),
    "half-frozen": (1, lambda mlp: train(frozen(mlp, "gate_proj"))),
    "no-input-gradient": (1, lambda mlp: mlp(tokens(requires_grad=False))),
    "autocast-same-dtype": (1, under_autocast),
    "inference-mode": (1, without_autograd),
    "no-grad": (1, torch.no_grad()(lambda mlp: mlp(tokens()))),
    "save-on-cpu": (1, saved_on_cpu),
    "device-context": (1, under_a_device),
    "eval": (1, lambda mlp: train(mlp.eval())),
    "down-bias-only": (1, lambda mlp: train(changed(swap("down_proj", lambda old: nn.Linear(96, 64))))),
    "deepcopy": (1, lambda mlp: train(copy.deepcopy(mlp))),
    "pickle": (1, lambda mlp: train(pickle.loads(pickle.dumps(mlp)))),
    "subclass": (1, lambda mlp: train(Subclass.of(mlp))),
    "hf-hook-on-the-mlp": (1, lambda mlp: train(changed(hf_hook))),
    "used-twice": (2, twice),
    "tied-layers": (2, lambda mlp: train(tied(mlp))),
    "tied-gate-and-up": (1, lambda mlp: train(changed(swap("up_proj", lambda old: old)) and same_gate_and_up(mlp))),
    "merged-lora": (1, lambda mlp: train(merged_lora(mlp))),
    "parametrisation-removed": (1, lambda mlp: train(parametrised_and_not(mlp))),
    "functional-call-with-parameters": (
        1,
        lambda mlp: functional_call(mlp, dict(tiny_llama_mlp().named_parameters()), (tokens(),)),
    ),
}


class Subclass(LlamaMLP):
    """Inherits the patched forward, and calls it."""

    @classmethod
    def of(cls, mlp: nn.Module) -> nn.Module:
        new = cls(tiny_llama(layers=1).config)
        new.load_state_dict(mlp.state_dict())
        return new

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def same_gate_and_up(mlp: nn.Module) -> nn.Module:
    mlp.up_proj.weight = mlp.gate_proj.weight
    return mlp


def merged_lora(mlp: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    merged = peft.get_peft_model(mlp, peft.LoraConfig(**LORA)).merge_and_unload()
    return merged.requires_grad_()


def parametrised_and_not(mlp: nn.Module) -> nn.Module:
    parametrizations.weight_norm(mlp.up_proj)
    parametrize.remove_parametrizations(mlp.up_proj, "weight")
    return mlp


@pytest.mark.parametrize("case", SERVED)
def test_served(case: str) -> None:
    calls, run = SERVED[case]
    check(lambda: run(tiny_llama_mlp()), FUSED, None, calls=calls, tolerance=1e-2 if "autocast" in case else 1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda mlp: fully_shard(mlp, mesh=mesh()) and None,
        lambda mlp: fully_shard(nn.Sequential(mlp), mesh=mesh()),
        nn.parallel.DistributedDataParallel,
    ],
    ids=["fsdp2-mlp", "fsdp2-layer", "ddp"],
)
def test_served_when_distributed(process_group: None, wrap: MLPS) -> None:
    def run() -> list[Tensor]:
        found = train(changed(wrap))
        return [getattr(each, "full_tensor", lambda each=each: each)() for each in found]

    check(run, FUSED, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_fsdp_and_checkpointing(process_group: None, use_reentrant: bool) -> None:
    def run() -> list[Tensor]:
        mlp = tiny_llama_mlp()
        fully_shard(mlp, mesh=mesh())
        found = train(Checkpointed(mlp, use_reentrant=use_reentrant))
        return [getattr(each, "full_tensor", lambda each=each: each)() for each in found]

    check(run, FUSED, None, calls=2)


def test_hooks_on_weights_fire_once() -> None:
    mlp = tiny_llama_mlp()
    fired: list[str] = []
    for name, weight in mlp.named_parameters():
        weight.register_hook(lambda d_weight, name=name: fired.append(name))
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: fired.append(f"{name} accumulated"))
    fusepatch.accelerate()
    train(mlp)
    names = [name for name, _ in mlp.named_parameters()]
    assert sorted(fired) == sorted([*names, *(f"{name} accumulated" for name in names)])
    assert_counted(FUSED, None)


def step(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_optimizer_in_backward() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(tiny_llama_mlp(), tiny_llama_mlp())
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(functools.partial(step, torch.optim.SGD([weight], lr=0.1)))
        for _ in range(2):
            model(tokens()).square().mean().backward()
        assert all(weight.grad is None for weight in model.parameters())
        return [weight.detach() for weight in model.parameters()]

    check(run, FUSED, None, calls=4)


def test_hooks_on_the_mlp_itself_fire_once() -> None:
    def run() -> list[Tensor]:
        mlp = tiny_llama_mlp()
        fired: list[str] = []
        mlp.register_forward_pre_hook(lambda module, args: fired.append("before") or (2 * args[0],))
        mlp.register_forward_hook(lambda module, args, out: fired.append("after") or 2 * out)
        mlp.register_full_backward_pre_hook(lambda module, dout: fired.append("backward before"))
        mlp.register_full_backward_hook(lambda module, dx, dout: fired.append("backward after"))
        found = train(mlp)
        assert fired == ["before", "after", "backward before", "backward after"]
        return found

    check(run, FUSED, None)


def test_hooked_before_accelerate() -> None:
    """accelerate's hook keeps the forward that it found: ours is passed by, and `explain()` says so."""
    mlp = tiny_llama_mlp()
    hf_hook(mlp)
    stock = infer(mlp)
    fusepatch.accelerate()
    assert torch.equal(infer(mlp), stock)
    assert counted() == ({}, {})
    (row,) = fusepatch.explain(mlp).modules
    assert (row.route, row.reason) == ("original", "accelerate-hooks")


# ----------------------------------------------------------------------------------------------------------- purity


PURITY = {
    "plain": (FUSED, None, lambda mlp: None),
    "lora": (POINTWISE, Reason.PEFT, lambda mlp: adapted("LoraConfig", **LORA)(mlp)),
    "autocast": (POINTWISE, Reason.AUTOCAST, lambda mlp: None),
    "hooked": (POINTWISE, Reason.HOOKS, hook("register_forward_hook")),
    "relu": (ORIGINAL, Reason.ACTIVATION, swap("act_fn", lambda old: nn.ReLU())),
    "disabled": (ORIGINAL, Reason.DISABLED, lambda mlp: None),
}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("case", PURITY)
def test_recomputation_takes_the_same_route(case: str, use_reentrant: bool) -> None:
    """Gradients equal those without checkpointing, bit for bit, and both forward passes took one route."""
    route, reason, change = PURITY[case]

    def run(wrap: MLPS) -> list[Tensor]:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
            fusepatch.disabled() if case == "disabled" else torch.enable_grad(),
        ):
            return train(wrap(changed(change)))

    fusepatch.accelerate()
    plain = run(lambda mlp: mlp)
    assert_counted(route, reason, 1)
    recomputed = run(lambda mlp: Checkpointed(mlp, use_reentrant=use_reentrant))
    assert_counted(route, reason, 3)
    assert all(map(torch.equal, recomputed, plain))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_with_gradient_checkpointing(use_reentrant: bool) -> None:
    def run() -> list[Tensor]:
        model = tiny_llama().train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        ids = torch.arange(12).view(2, 6)
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [weight.grad for weight in model.parameters()]

    check(run, FUSED, None, calls=4, tolerance=1e-5)


# ------------------------------------------------------------------------------------------------- found by trying hard


@pytest.mark.parametrize("owner", ["Linear", "SiLU"])
def test_patched_between_import_and_accelerate(owner: str) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import fusepatch, torch
from torch import nn
from support import relative_error, tiny_llama_mlp
library = nn.{owner}.forward
nn.{owner}.forward = lambda self, x: 2 * library(self, x)
mlp, x = tiny_llama_mlp(hidden_act="swish"), torch.randn(3, 64)
stock = mlp(x)
fusepatch.accelerate()
assert relative_error(mlp(x), stock) < 1e-6
"""
    environ = {**os.environ, "FUSEPATCH_GATED_MLP_BACKEND": "reference"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, capture_output=True)


def shadow(name: str, value: Callable[[nn.Module], Any]) -> MLPS:
    """An attribute of the instance, which Python finds before nn.Module's own."""

    def change(mlp: nn.Module) -> None:
        owner, _, attribute = name.rpartition(".")
        object.__setattr__(mlp.get_submodule(owner), attribute, value(mlp))

    return change


@pytest.mark.parametrize(
    "change",
    [
        shadow("up_proj", lambda mlp: lambda x: x.repeat(1, 2)[:, :96]),
        shadow("act_fn", lambda mlp: torch.tanh),
        shadow("gate_proj.weight", lambda mlp: torch.ones(96, 64)),
    ],
    ids=["projection", "activation", "weight"],
)
def test_shadowed(change: MLPS) -> None:
    stock = infer(changed(change))
    fusepatch.accelerate()
    assert relative_error(infer(changed(change)), stock) < 1e-6


def test_no_bias_parameter() -> None:
    def change(linear: nn.Module) -> None:
        del linear.bias
        linear.bias = None
        linear.register_parameter("scale", nn.Parameter(torch.ones(1)))

    check(lambda: infer(changed(on("gate_proj", change))), POINTWISE, Reason.WEIGHT_NOT_PARAMETER)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "run",
    [
        lambda mlp: mlp(torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)])),
        lambda mlp: mlp(tokens().detach().to_sparse_csr()),
        lambda mlp: mlp(torch.tensor(1.0)),
        lambda mlp: changed(swap("up_proj", lambda old: nn.LazyLinear(96, bias=False)))(tokens()),
        lambda mlp: changed(on("up_proj", with_weight(lambda w: nn.Parameter(w.to_sparse_csr(), requires_grad=False))))(
            tokens()
        ),
    ],
    ids=["nested", "sparse", "0d", "lazy", "sparse-weight"],
)
def test_unusual_tensors(run: Callable[[nn.Module], Any]) -> None:
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(type(run(tiny_llama_mlp())))
        except Exception as error:
            outcomes.append(type(error))
        fusepatch.accelerate()
    assert outcomes[0] is outcomes[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_hooked_input_and_checkpointing(use_reentrant: bool) -> None:
    """Hooked before the reentrant forward (which recomputes on a detached x), and after the other one."""

    def run() -> list[Tensor]:
        x = tokens()
        y = x * 1
        fired: list[Tensor] = []
        if use_reentrant:
            y.register_hook(fired.append)
        out = checkpoint(tiny_llama_mlp(), y, use_reentrant=use_reentrant)
        if not use_reentrant:
            y.register_hook(fired.append)
        out.sum().backward()
        return [x.grad, *fired]

    check(run, FUSED, None, calls=2)


@fault("a global hook around the forward pass alone, as a FLOP counter's, gives its recomputation another route")
@pytest.mark.parametrize("around", ["flop-counter", "global-hook"])
def test_state_around_the_forward_alone(around: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def run() -> Tensor:
        x = tokens()
        if around == "flop-counter":
            with FlopCounterMode(display=False):
                out = checkpoint(tiny_llama_mlp(), x, use_reentrant=False)
        else:
            handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
            out = checkpoint(tiny_llama_mlp(), x, use_reentrant=False)
            handle.remove()
        out.sum().backward()
        return x.grad

    stock = run()
    fusepatch.accelerate()
    assert relative_error(run(), stock) < 1e-6


@pytest.mark.parametrize("down_bias", [False, True])
@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 2, 3, 64)], ids=str)
def test_output_may_be_written_to(shape: tuple[int, ...], down_bias: bool) -> None:
    def run() -> list[Tensor]:
        x = tokens(*shape)
        mlp = tiny_llama_mlp()
        mlp.down_proj = nn.Linear(96, 64, bias=down_bias)
        nn.init.constant_(mlp.down_proj.weight, 0.1)
        out = mlp(x)
        out += 1
        out[..., 0] *= 2
        out.sum().backward()
        return [out.detach(), x.grad]

    check(run, FUSED, None)


def test_gradient_penalty_raises_instead_of_being_wrong() -> None:
    fusepatch.accelerate()
    x = tokens()
    (dx,) = torch.autograd.grad(tiny_llama_mlp()(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.square().sum().backward()


SECOND_DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "hessian": torch.autograd.functional.hessian,
    "hvp": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
    "double-backward-jvp": lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
}


@pytest.mark.parametrize("frozen_weights", [False, True])
@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_second_derivatives_raise(name: str, frozen_weights: bool) -> None:
    mlp = tiny_llama_mlp().requires_grad_(not frozen_weights)
    fusepatch.accelerate()
    with pytest.raises(RuntimeError, match="differentiate twice"):
        SECOND_DERIVATIVES[name](lambda x: mlp(x).sum(), tokens(64).detach())


def test_gradients_with_a_graph_may_be_written_to() -> None:
    def run() -> Tensor:
        x = tokens()
        (dx,) = torch.autograd.grad(tiny_llama_mlp()(x).sum(), x, create_graph=True)
        return dx.mul_(2).detach()

    check(run, FUSED, None)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_create_graph_without_a_second_derivative(use_reentrant: bool | None) -> None:
    """As optimizers that may want curvature call it; saved tensors are unpacked once under checkpointing."""

    def run() -> list[Tensor]:
        mlp, x = tiny_llama_mlp(), tokens()
        out = mlp(x) if use_reentrant is None else checkpoint(mlp, x, use_reentrant=use_reentrant)
        out.square().sum().backward(create_graph=True)
        nn.utils.clip_grad_norm_(mlp.parameters(), 0.5)
        found = [x.grad.detach().clone(), *(weight.grad.detach().clone() for weight in mlp.parameters())]
        x.grad = None
        mlp.zero_grad(set_to_none=False)
        return found

    check(run, FUSED, None, calls=1 if use_reentrant is None else 2)


def test_autocast_weights() -> None:
    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return train(tiny_llama_mlp(), tokens(dtype=torch.bfloat16))

    check(run, POINTWISE, Reason.AUTOCAST, tolerance=1e-2)


def test_activation_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    activations._known.clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(SiLUActivation, "forward", lambda self, x: torch.tanh(x))
            assert isinstance(activations.kind_of(SiLUActivation()), Reason)
        assert activations.kind_of(SiLUActivation()) == "silu"
    finally:
        activations._known.clear()


@pytest.mark.slow
def test_deepspeed_zero3() -> None:
    pytest.importorskip("deepspeed")
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import deepspeed, fusepatch, torch
from support import tiny_llama_mlp
config = {{
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": 0}},
}}
engine, *_ = deepspeed.initialize(model=tiny_llama_mlp(), config=config)
x = torch.ones(3, 64)
stock = engine(x)
fusepatch.accelerate()
assert torch.equal(engine(x), stock)
assert "zero3 1" in fusepatch.status().summary(), fusepatch.status().summary()
"""
    environ = {
        **os.environ, "FUSEPATCH_GATED_MLP_BACKEND": "reference", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, capture_output=True)


def test_every_reason_is_provoked() -> None:
    assert {reason.value for reason in Reason} == {reason.value for reason in PROVOKED | PROVOKED_BY_LINEAR_ATTENTION}
