"""The shim of `Qwen4ExpTextPLELayer`: it computes what the library does, and every reason for which it declines."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qwen4_exp import D, Layer, S, config, modeling, on_a_cpu, randomised
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrize

import fusepatch
from fusepatch import selfcheck
from fusepatch.catalogue import Assumed
from fusepatch.decline import DeclinedError, Reason, Route
from fusepatch.kernels import backends
from fusepatch.kernels.engram_gate import choose, op
from fusepatch.shims import hf_engram_gate
from support import grads_of, is_within_parity, needs_transformers, relative_error

POINTWISE, ORIGINAL = Route.POINTWISE, Route.ORIGINAL
CACHE = list(inspect.signature(Layer.forward).parameters)[3]  # `cache`, or `past_key_values` in transformers 5.17


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs the reference backend, unless it says otherwise."""
    monkeypatch.setenv("FUSEPATCH_ENGRAM_GATE_BACKEND", "reference")


def tiny_layer(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layer = Layer(config(), 0, 0)
    torch.manual_seed(0)
    return randomised(layer).to(dtype)


def call(dtype: torch.dtype = torch.float32, batch: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, S * D, generator=generator).to(dtype).requires_grad_()
    return x, torch.randint(1, 128, (batch, length), generator=generator)


def counted() -> dict[tuple[str, str | None], int]:
    status = fusepatch.status().to_dict()
    classes = [
        each for target in status["targets"] if target["name"].startswith("engram_gate/") for each in target["classes"]
    ]
    (found,) = classes
    (route,) = found["calls"]
    reasons = list(found["declines"]) or [None]
    return {(route, reasons[0]): found["calls"][route]}


def check(run: Callable[[], Any], route: Route, reason: Reason, calls: int = 1, tolerance: float = 1e-5) -> None:
    """All `calls` of `run()` take `route` because of `reason`, and give what the unpatched library gives."""
    stock = run()
    fusepatch.accelerate("engram_gate")
    patched = run()
    assert counted() == {(route.value, reason.value): calls}
    for ours, theirs in zip(patched, stock, strict=True):
        assert torch.equal(ours, theirs) if route is ORIGINAL else relative_error(ours, theirs) < tolerance


def train(layer: nn.Module, x: Tensor | None = None, **more: Any) -> list[Tensor]:
    """Output and every gradient of one call."""
    tokens, ids = call()
    x = tokens if x is None else x
    for parameter in layer.parameters():
        parameter.grad = None
    out = layer(x, ids, more.pop("cache", None), **more)
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def infer(layer: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    tokens, ids = call()
    return [layer(tokens if x is None else x, ids[:, : tokens.shape[1]], None).detach()]


# --------------------------------------------------------------------------------------------------------------- parity


def test_the_class_matches_and_nothing_else_of_its_module() -> None:
    assert hf_engram_gate.matches(vars(Layer)["forward"])
    others = [k for k in vars(modeling).values() if isinstance(k, type) and "forward" in vars(k) and k is not Layer]
    assert not [kind for kind in others if hf_engram_gate.matches(vars(kind)["forward"])]
    assert hf_engram_gate.looks_alike(tiny_layer())


def test_output_and_gradients() -> None:
    layer = tiny_layer()
    check(lambda: train(layer), POINTWISE, Reason.NO_KERNEL)
    assert len(train(layer)) == 2 + len(list(layer.parameters()))


@pytest.mark.parametrize("mask", [torch.ones(2, 7), (torch.arange(7) > 2).float().expand(2, 7)])
def test_a_mask_of_padding(mask: Tensor) -> None:
    layer = tiny_layer()
    check(lambda: train(layer, conv_mask=mask), POINTWISE, Reason.NO_KERNEL)


def test_spellings_of_the_call() -> None:
    layer, (x, ids) = tiny_layer(), call()
    spellings = [
        lambda: layer(x, ids, None),
        lambda: layer(x, ids, None, None),
        lambda: layer(hidden_states=x, input_ids=ids, **{CACHE: None}),
        lambda: layer(x, **{CACHE: None}, input_ids=ids, conv_mask=None),
    ]
    check(lambda: [each().detach() for each in spellings], POINTWISE, Reason.NO_KERNEL, calls=4)
    for wrong in (lambda: layer(x), lambda: layer(x, ids, None, None, None), lambda: layer(x, ids, None, nope=1)):
        with pytest.raises(TypeError):
            wrong()


def test_the_bf16_layer_is_as_near_to_fp32_as_the_library() -> None:
    """Streams that lean towards their keys: near a dot product of 0 the gradient is all rounding, in any code."""
    exact, ids = tiny_layer(), call()[1]
    with torch.no_grad():
        keys = exact.key_proj(exact.ple_embedding(ids, None))
        side = torch.where(torch.rand(2, 7, S, 1) < 0.5, -1.0, 1.0).expand(2, 7, S, D).flatten(-2)
        x = (side * keys + 0.3 * keys.std() * torch.randn_like(keys)).bfloat16()
    layer = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({name: t.float() for name, t in layer.state_dict().items()})
    dout = torch.randn(x.shape).bfloat16()

    def run(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        leaf = x.to(dtype).requires_grad_()
        named = {"x": leaf, **dict(module.named_parameters())}
        return grads_of(lambda: module(leaf, ids, None), named, dout.to(dtype))

    expected, theirs = run(exact, torch.float32), run(layer, torch.bfloat16)
    fusepatch.accelerate("engram_gate")
    ours = run(layer, torch.bfloat16)
    assert counted() == {("pointwise", "no-kernel"): 1}
    for name, truth in expected.items():
        error, stock = relative_error(ours[name], truth), relative_error(theirs[name], truth)
        assert is_within_parity(error, stock), (name, error, stock)
        assert ours[name].dtype is theirs[name].dtype


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch)


@pytest.fixture
def model(plain_torch: None) -> nn.Module:
    torch.manual_seed(0)
    whole = modeling.Qwen4ExpForCausalLM(config())
    torch.manual_seed(0)
    return randomised(whole)


def test_a_whole_model(model: nn.Module) -> None:
    ids = call()[1]

    def run() -> list[Tensor]:
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        return [out.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    check(run, POINTWISE, Reason.NO_KERNEL, calls=2, tolerance=1e-3)


def test_generation_with_a_cache(model: nn.Module) -> None:
    run = lambda: model.generate(call()[1], max_new_tokens=6, do_sample=False)
    stock = run()
    fusepatch.accelerate("engram_gate")
    assert torch.equal(run(), stock)
    assert counted() == {("pointwise", "no-kernel"): 12}


def test_undo_and_default_off(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vars(Layer)["forward"]
    fusepatch.accelerate()  # nothing was measured, so the op is off unless it is asked for
    assert vars(Layer)["forward"] is before
    monkeypatch.setenv("FUSEPATCH_ENGRAM_GATE", "1")
    fusepatch.accelerate()
    assert vars(Layer)["forward"] is not before
    fusepatch.restore()
    assert vars(Layer)["forward"] is before


def test_explain_and_warmup(model: nn.Module) -> None:
    fusepatch.accelerate("engram_gate")
    assert "pointwise" in str(fusepatch.explain(model, tokens=64))
    grads = [p.grad for p in model.parameters()]
    report = fusepatch.warmup(model, 64)
    assert [(row.route, row.modules) for row in report.rows] == [("pointwise", 2)]
    assert [p.grad for p in model.parameters()] == grads


def test_an_error_of_ours_is_recorded_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiny_layer()
    fusepatch.accelerate("engram_gate")
    monkeypatch.setattr(hf_engram_gate, "run_engram_gate", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        infer(layer)
    assert "ZeroDivisionError" in str(fusepatch.status())


# -------------------------------------------------------------------------------------- declines: how the layer is held


def set_on(name: str, **values: Any) -> Callable[[nn.Module], None]:
    return lambda layer: [setattr(getattr(layer, name), key, value) for key, value in values.items()] and None


def hook(layer: nn.Module) -> None:
    layer.norm_key.register_forward_hook(lambda *args: None)


def backward_hook(layer: nn.Module) -> None:
    layer.norm_query.register_full_backward_hook(lambda *args: None)


def own_forward(layer: nn.Module) -> None:
    layer.norm_key.forward = layer.norm_key.forward


def parametrised(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer.norm_query, "weight", nn.Identity())


def partitioned(layer: nn.Module) -> None:
    layer.norm_key.weight.ds_id = 1


def other_norm(layer: nn.Module) -> None:
    class Other(type(layer.norm_key)):
        def forward(self, x):
            return super().forward(x) * 1.0

    layer.norm_query.__class__ = Other


def hidden_weight(layer: nn.Module) -> None:
    weight = layer.norm_key.weight.detach().clone()
    del layer.norm_key.weight
    layer.norm_key.weight = weight


HELD = {
    "a hook": (hook, Reason.HOOKS),
    "a backward hook": (backward_hook, Reason.HOOKS),
    "a forward of its own": (own_forward, Reason.INSTANCE_FORWARD),
    "a parametrisation": (parametrised, Reason.PARAMETRISED),
    "ZeRO-3": (partitioned, Reason.ZERO3),
    "another norm": (other_norm, Reason.STRUCTURE),
    "no group": (set_on("norm_key", group_size=S * D), Reason.STRUCTURE),
    "two eps": (set_on("norm_query", eps=1e-5), Reason.STRUCTURE),
    "eps 0": (lambda layer: [set_on(n, eps=0.0)(layer) for n in ("norm_key", "norm_query")] and None, Reason.STRUCTURE),
    "weight is no parameter": (hidden_weight, Reason.STRUCTURE),
    "weight in fp64": (lambda layer: layer.norm_key.double() and None, Reason.DTYPE),
}


@pytest.mark.parametrize("held", HELD)
def test_how_the_norms_are_held(held: str) -> None:
    change, reason = HELD[held]
    layer = tiny_layer()
    change(layer)
    if held == "no group":  # another result, so that a mistake would show
        layer.norm_query.group_size = S * D
    check(lambda: infer(layer), ORIGINAL, reason)


def test_what_may_be_held_in_any_way() -> None:
    """Projections, the norm of the convolution, and the embedding are called as they are."""
    layer, seen = tiny_layer(), []
    for name in ("key_proj", "value_proj", "norm_conv", "conv1d", "ple_embedding"):
        getattr(layer, name).register_forward_hook(lambda *args, name=name: seen.append(name))
    check(lambda: infer(layer), POINTWISE, Reason.NO_KERNEL)
    assert seen[:5] == seen[5:] == ["ple_embedding", "key_proj", "value_proj", "norm_conv", "conv1d"]


def test_weights_that_are_not_there() -> None:
    layer = tiny_layer()
    layer.norm_key.weight = nn.Parameter(torch.empty(0))
    assert hf_engram_gate.read_parts(layer) is Reason.FSDP
    layer.norm_key.to("meta")
    assert hf_engram_gate.read_parts(layer) is Reason.META
    del layer._modules["norm_key"]
    assert hf_engram_gate.read_parts(layer) is Reason.STRUCTURE
    layer.hc_count = None
    assert hf_engram_gate.read_parts(layer) is Reason.STRUCTURE


def test_quantised_weights() -> None:
    layer = tiny_layer()
    layer.norm_key.weight = nn.Parameter(layer.norm_key.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert hf_engram_gate.read_parts(layer) is Reason.QUANTISED


def test_functional_call() -> None:
    layer, (x, ids) = tiny_layer(), call()
    weights = {name: t.detach() for name, t in layer.named_parameters()}
    run = lambda: [functional_call(layer, weights, (x, ids, None)).detach()]
    check(run, ORIGINAL, Reason.WEIGHT_NOT_PARAMETER)


# ------------------------------------------------------------------------------------------- declines: what is returned


class Wrapped(nn.Module):
    """A projection whose result is changed."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


RETURNED = {
    "another dtype": (lambda t: t.bfloat16(), Reason.DTYPE),
    "one for all tokens": (lambda t: t[:, :1], Reason.SHAPE),
    "a subclass": (lambda t: nn.Parameter(t.detach()), Reason.TENSOR_SUBCLASS),
}


@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("name", ["key_proj", "value_proj"])
def test_what_a_projection_returns(name: str, returned: str) -> None:
    """Decided after the projections ran: they run once, and the library's operations follow."""
    change, reason = RETURNED[returned]
    layer = tiny_layer()
    setattr(layer, name, Wrapped(getattr(layer, name), change))
    calls = []
    getattr(layer, name).register_forward_hook(lambda *args: calls.append(1))
    check(lambda: infer(layer), ORIGINAL, reason)
    assert len(calls) == 2


# ---------------------------------------------------------------------------------------------- declines: what is given


def test_the_input() -> None:
    layer = tiny_layer()
    assert not isinstance(hf_engram_gate.read_parts(layer), Reason)
    for x, reason in (
        (torch.ones(2, 7, S * D + 8), Reason.SHAPE),
        (torch.ones(7, S * D), Reason.SHAPE),
        (torch.ones(2, 7, S * D).to_sparse(), Reason.STRIDES),
        (torch.ones(2, 0, S * D), Reason.ZERO_TOKENS),
        (nn.Parameter(torch.ones(2, 7, S * D)), Reason.TENSOR_SUBCLASS),
        (torch.ones(2, 7, S * D, device="meta"), Reason.DEVICE),
        (torch.ones(2, 7, S * D).double(), Reason.DTYPE),
    ):
        assert hf_engram_gate.decide_call(layer, x).decision.reason is reason


def test_widths_that_are_no_multiple_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = dataclasses.replace(choose.REFERENCE, width_multiple=32)
    monkeypatch.setattr(choose, "BACKENDS", (picky,))
    layer = tiny_layer()
    choose.TABLE.forget()
    check(lambda: infer(layer), ORIGINAL, Reason.ALIGNMENT)
    choose.TABLE.forget()


def in_context(context: Callable[[], Any]) -> Callable[[nn.Module], list[Tensor]]:
    def run(layer: nn.Module) -> list[Tensor]:
        with context():
            return infer(layer)

    return run


def vmapped(layer: nn.Module) -> list[Tensor]:
    x, ids = call()
    return [torch.func.vmap(lambda t: layer(t, ids, None))(x.detach()[None])]


def with_global_hook(layer: nn.Module) -> list[Tensor]:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        return infer(layer)
    finally:
        handle.remove()


class OfOneInput(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.ids = nn.Buffer(call()[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.ids, None)


def traced(layer: nn.Module) -> list[Tensor]:
    x = call()[0].detach()
    return [torch.jit.trace(OfOneInput(layer), x, check_trace=False)(x).detach()]


KINDS_OF_CALL = {
    Reason.FUNCTORCH: vmapped,
    Reason.FORWARD_AD: in_context(forward_ad.dual_level),
    Reason.AUTOCAST: in_context(lambda: torch.autocast("cpu", torch.bfloat16)),
    Reason.GLOBAL_HOOKS: with_global_hook,
    Reason.DISABLED: in_context(fusepatch.disabled),
    Reason.EXPORTING: traced,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("reason", KINDS_OF_CALL, ids=lambda reason: reason.value)
def test_kinds_of_call(reason: Reason) -> None:
    layer = tiny_layer()
    check(lambda: KINDS_OF_CALL[reason](layer), ORIGINAL, reason)


@needs_transformers("5.24")
def test_the_old_keyword() -> None:
    layer, (x, ids) = tiny_layer(), call()
    with pytest.warns(FutureWarning, match="past_key_values"):
        check(lambda: [layer(x, ids, past_key_values=None).detach()], ORIGINAL, Reason.STRUCTURE)


def test_dispatch_modes_see_operators() -> None:
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer = tiny_layer()
    plain = train(layer)
    fusepatch.accelerate("engram_gate")
    outside = train(layer)
    with Mode():
        inside = train(layer)
    assert counted() == {("pointwise", "no-kernel"): 2}
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(inside, plain, strict=True))
    assert [name for name in seen if "fusepatch" in name] == [
        "fusepatch.engram_gate.default", "fusepatch.engram_gate_backward.default"
    ]  # fmt: skip


def test_compiling() -> None:
    layer, (x, ids) = tiny_layer(), call()
    fusepatch.accelerate("engram_gate")
    torch.compile(layer, backend="eager")(x, ids, None)
    assert "compiling 1" in str(fusepatch.status())
    torch._dynamo.reset()


def test_other_models_and_restored() -> None:
    layer, other = tiny_layer(), tiny_layer()
    fusepatch.accelerate("engram_gate", model=other)
    infer(layer)
    assert counted() == {("original", "other-model"): 1}
    kept = vars(Layer)["forward"]
    fusepatch.restore()
    x, ids = call()
    assert torch.equal(kept(layer, x, ids, None), layer(x, ids, None))


# ------------------------------------------------------------------------------------ declines: which kernels there are


def test_on_a_cpu_nothing_native_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiny_layer()
    for backend in ("auto", "triton"):
        monkeypatch.setenv("FUSEPATCH_ENGRAM_GATE_BACKEND", backend)
        check(lambda: infer(layer), ORIGINAL, Reason.CPU)
        fusepatch.restore()


def test_route_bound_and_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiny_layer()
    fusepatch.accelerate("engram_gate", strict=True)
    infer(layer)
    hook(layer)
    with pytest.raises(DeclinedError, match="hooks"):
        infer(layer)
    fusepatch.restore()
    monkeypatch.setenv("FUSEPATCH_ENGRAM_GATE_ROUTE", "original")
    check(lambda: infer(tiny_layer()), ORIGINAL, Reason.ROUTE_BOUND)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Asks for the route on a GPU that is not there."""
    monkeypatch.delenv("FUSEPATCH_ENGRAM_GATE_BACKEND")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(backends, "missing", lambda backend: ())

    def ask(capability=(9, 0), outcome=selfcheck.Outcome.PASSED, dtype=torch.bfloat16, named=False, **more: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(selfcheck, "verdict", lambda *args: selfcheck.Verdict(outcome))
        for name, value in more.items():
            monkeypatch.setattr(choose, name, value)
        if named:
            monkeypatch.setenv("FUSEPATCH_ENGRAM_GATE_BACKEND", "triton")
        fusepatch.settings.install(None)
        choose.TABLE.forget()
        problem = choose.Problem(torch.device("cuda", 0), dtype, torch.float32, 4, 2048, False, "sign", False)
        return choose.choose(problem, 4096)

    yield ask
    choose.TABLE.forget()


def test_nothing_is_admitted_until_it_is_measured(on_a_gpu: Callable[..., Any]) -> None:
    assert on_a_gpu() is Reason.SIZE_NOT_ADMITTED
    assert on_a_gpu(named=True).name == "triton"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_architectures(on_a_gpu: Callable[..., Any], capability: tuple[int, int]) -> None:
    assert on_a_gpu(capability, named=True).name == "triton"


def test_why_the_kernels_do_not_serve(on_a_gpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_gpu((7, 5), named=True) is Reason.ARCHITECTURE
    assert on_a_gpu(dtype=torch.float64, named=True) is Reason.DTYPE
    assert on_a_gpu(outcome=selfcheck.Outcome.FAILED, named=True) is Reason.SELFCHECK_FAILED
    assert on_a_gpu(outcome=selfcheck.Outcome.INCONCLUSIVE, named=True) is Reason.SELFCHECK_INCONCLUSIVE
    monkeypatch.setattr(backends, "missing", lambda backend: ("triton",))
    assert on_a_gpu(named=True) is Reason.MISSING_PACKAGE
    monkeypatch.setattr(backends, "missing", lambda backend: ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert on_a_gpu(named=True) is Reason.CAPTURE_COLD


def test_a_direct_call_of_the_op_never_declines(on_a_gpu: Callable[..., Any]) -> None:
    on_a_gpu((7, 5))
    problem = choose.Problem(torch.device("cuda", 0), torch.bfloat16, torch.float32, 4, 2048, False, "sign", False)
    assert choose.for_op(problem, 9) is choose.REFERENCE


def test_decide_from_what_is_assumed() -> None:
    layer, forward = tiny_layer(), vars(Layer)["forward"]
    decide = lambda **assumed: hf_engram_gate.decide(layer, forward, Assumed(**{"tokens": 64, **assumed}))
    assert decide().route is POINTWISE
    assert decide(tokens=0).reason is Reason.ZERO_TOKENS
    assert decide(device=torch.device("meta")).reason is Reason.DEVICE
    assert decide(dtype=torch.float64).reason is Reason.DTYPE
    assert hf_engram_gate.decide(layer, lambda self: 1, Assumed(64)).reason is Reason.FORWARD_DIFFERS
    assert hf_engram_gate.warm(layer, lambda self: 1, 64).reason is Reason.FORWARD_DIFFERS
    assert layer.norm_key.eps > op.SMALLEST_EPS
