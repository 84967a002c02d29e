"""`chunk_kda` and `chunk_gated_delta_rule` of FLA, by way of its registry: reached by every reference, undone whatever
the order, and every reason for which a call is declined.

FLA's own code needs a GPU. So `library` stands in for it: a backend that comes after ours in the same registry.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from fla_stand_in import FUNCTIONS, OPS, Library, fla, fla_backends, registry, standing_in
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fusepatch
from fusepatch import catalogue, doctor, importhook, settings
from fusepatch.decline import DeclinedError, Reason
from fusepatch.doctor import packages
from fusepatch.doctor.findings import Examination
from fusepatch.kernels.linear_attention import arguments, cudnn_hopper
from fusepatch.kernels.linear_attention import reference as definition
from fusepatch.kernels.linear_attention.kda import choose
from fusepatch.shims import fla_linear_attention as shim
from support import PROVOKED_BY_LINEAR_ATTENTION, relative_error

BOTH = pytest.mark.parametrize("op", OPS)
PROVOKED: set[Reason] = set()


def provokes(*reasons: Reason) -> Callable[[Any], Any]:
    """Marks a test as one that provokes `reasons`; the last test of this file counts them."""
    PROVOKED.update(reasons)
    return lambda test: test


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Every test here runs the reference backend, unless it says otherwise."""
    for op in OPS:
        monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "reference")
    with standing_in() as found:
        yield found


def tensors(
    op: str, tokens: int = 5, requires_grad: bool = True, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    gate = (2, tokens, 4, 8) if op == "kda" else (2, tokens, 4)
    found = {
        "q": normal(2, tokens, 2, 8), "k": normal(2, tokens, 2, 8), "v": normal(2, tokens, 4, 6),
        "g": -normal(*gate).abs(), "beta": normal(2, tokens, 4).sigmoid(),
    }  # fmt: skip
    return {name: t.requires_grad_(requires_grad) for name, t in found.items()}


def counted(op: str) -> tuple[dict[str, int], dict[str, int]]:
    (target,) = (each for each in fusepatch.status().targets if each.name == f"{op}/fla")
    return target.total("calls"), target.total("declines")


def check(op: str, library: Library, reason: Reason, call: Callable[[], Any], calls: int = 1) -> None:
    """`call()` runs the library's own code because of `reason`, and gives what it gives without us."""
    stock = call()
    before = library.calls
    fusepatch.accelerate(op)
    patched = call()
    assert counted(op) == ({"original": calls}, {reason.value: calls})
    assert library.calls == before + calls
    for ours, theirs in zip(patched, stock, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


# ------------------------------------------------------------------------------------------------------ reached, undone


@BOTH
def test_results_and_gradients(op: str) -> None:
    given = tensors(op)
    leaves = list(given.values())
    expected, state = FUNCTIONS[op](**given, output_final_state=True)
    wanted = torch.autograd.grad(expected.sum() + state.sum(), leaves)
    fusepatch.accelerate(op)
    out, final = FUNCTIONS[op](**given, output_final_state=True)
    assert counted(op) == ({"fused": 1}, {})
    assert relative_error(out, expected) < 1e-6
    assert relative_error(final, state) < 1e-6
    for found, correct in zip(torch.autograd.grad(out.sum() + final.sum(), leaves), wanted, strict=True):
        assert relative_error(found, correct) < 1e-6


@BOTH
def test_positional_arguments_mean_what_they_mean_to_the_library(op: str) -> None:
    given = tensors(op)
    state = torch.randn(2, 4, 8, 6)
    expected = FUNCTIONS[op](**given, scale=0.3, initial_state=state, output_final_state=True)
    fusepatch.accelerate(op)
    found = FUNCTIONS[op](*given.values(), 0.3, state, True)
    assert counted(op) == ({"fused": 1}, {})
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))


@BOTH
def test_every_captured_reference_is_reached(op: str) -> None:
    given = tensors(op)
    name = FUNCTIONS[op].__name__
    module = importlib.import_module(f"fla.ops.{op}.chunk")
    layer = importlib.import_module("fla.layers.kda" if op == "kda" else "fla.layers.gated_deltanet")
    references = [getattr(fla.ops, name), getattr(module, name), getattr(layer, name), copy.copy(FUNCTIONS[op])]
    if op == "gated_delta_rule":
        references.append(fla.ops.gated_delta_rule.chunk_gdn)
    fusepatch.accelerate(op)
    for reference in references:
        reference(**given)
    assert counted(op)[0] == {"fused": len(references)}


def snapshot() -> dict[str, Any]:
    logged = {op: {key for key in registry(op)._logged if "stand_in" not in key} for op in OPS}
    return {op: (list(registry(op)._backends.items()), logged[op]) for op in OPS}


def test_restore_leaves_the_registries_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    before, modules = snapshot(), dict(vars(fla_backends))
    fusepatch.accelerate(list(OPS))
    for op in OPS:
        FUNCTIONS[op](**tensors(op))
        FUNCTIONS[op](**tensors(op), chunk_size=32)
        assert "fusepatch" in registry(op)._backends
    fusepatch.restore()
    assert snapshot() == before
    assert vars(fla_backends) == modules


ORDERS = [
    order
    for order in itertools.permutations(["ours", "theirs", "restore", "unregister"])
    if order.index("ours") < order.index("restore") and order.index("theirs") < order.index("unregister")
]


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_with_another_backend(order: tuple[str, ...]) -> None:
    """Theirs is registered and taken out, ours accelerated and restored."""
    backends = registry("kda")._backends
    before = list(backends.items())
    other = type("Other", (fla_backends.BaseBackend,), {"backend_type": "other", "is_enabled": lambda self: False})()
    steps = {
        "ours": lambda: fusepatch.accelerate("kda"),
        "restore": fusepatch.restore,
        "theirs": lambda: registry("kda").register(other),
        "unregister": lambda: backends.pop("other"),
    }
    for step in order:
        steps[step]()
    assert list(backends.items()) == before


def test_a_backend_of_our_name_that_is_not_ours_stays() -> None:
    fusepatch.accelerate("kda")
    other = fla_backends.BaseBackend()
    registry("kda")._backends["fusepatch"] = other
    try:
        (target,) = (each for each in fusepatch.status().targets if each.name == "kda/fla")
        assert [each.state for each in target.classes] == ["wrapped"]
        fusepatch.restore()
        assert registry("kda")._backends["fusepatch"] is other
    finally:
        registry("kda")._backends.pop("fusepatch")


def test_accelerate_again_after_restore() -> None:
    for _ in range(2):
        fusepatch.accelerate("kda")
        FUNCTIONS["kda"](**tensors("kda"))
        assert counted("kda") == ({"fused": 1}, {})
        fusepatch.restore()
    with fusepatch.accelerated("kda"):
        FUNCTIONS["kda"](**tensors("kda"))
    assert "fusepatch" not in registry("kda")._backends


def test_ops_that_nobody_named_are_left_alone() -> None:
    fusepatch.accelerate()
    assert all("fusepatch" not in registry(op)._backends for op in OPS)
    assert not [each for each in fusepatch.status().targets if each.name.partition("/")[0] in OPS]


def test_a_model_has_no_modules_of_a_function() -> None:
    with pytest.raises(ValueError, match="no module that an op of fusepatch serves"):
        fusepatch.accelerate("kda", model=nn.Linear(2, 2))
    assert "fusepatch" not in registry("kda")._backends
    assert fusepatch.explain(nn.Linear(2, 2)).modules == ()


def test_a_library_that_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    target = next(found for found in catalogue.TARGETS if found.op == "kda")
    assert target.wants_module("fla.ops.kda")
    assert not target.wants_module("fla.ops.kda.chunk")  # its registry may not be whole yet
    from fusepatch import entry

    monkeypatch.setattr(catalogue, "places_in_library", lambda target: [])
    fusepatch.accelerate("kda")
    assert next(t for t in fusepatch.status().targets if t.name == "kda/fla").state == "pending"
    entry._after_import(fla.ops.kda)
    assert next(t for t in fusepatch.status().targets if t.name == "kda/fla").state == "patched"


# -------------------------------------------------------------------------------------------------- errors, strict mode


def test_an_error_while_deciding_is_recorded_and_raised(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    """FLA takes an exception in a verifier for a decline; ours must not be lost in one."""

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(shim, "decide", fail)
    fusepatch.accelerate("kda")
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        FUNCTIONS["kda"](**tensors("kda"))
    (target,) = (each for each in fusepatch.status().targets if each.name == "kda/fla")
    assert target.total("errors") == {"ZeroDivisionError": 1}
    assert not library.calls


def test_an_error_of_the_kernel_is_recorded_and_raised(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(definition, "run", fail)
    fusepatch.accelerate("kda")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        FUNCTIONS["kda"](**tensors("kda"))
    (target,) = (each for each in fusepatch.status().targets if each.name == "kda/fla")
    assert target.total("errors") == {"RuntimeError": 1}


def test_strict_mode_raises_for_a_decline(library: Library) -> None:
    fusepatch.accelerate("kda", strict=True)
    with pytest.raises(DeclinedError, match="because option: ") as raised:
        FUNCTIONS["kda"](**tensors("kda"), chunk_size=32)
    assert raised.value.reason is Reason.OPTION
    assert not library.calls
    FUNCTIONS["kda"](**tensors("kda"))  # serves, so that restore() does not complain


def test_strict_restore_raises_where_nothing_ran() -> None:
    fusepatch.accelerate("kda", strict=True)
    with pytest.raises(DeclinedError, match="kda was asked for by name and never ran natively"):
        fusepatch.restore()
    assert "fusepatch" not in registry("kda")._backends


def test_threads_do_not_mix_their_calls() -> None:
    given = [tensors("kda", tokens=3 + number, requires_grad=False) for number in range(4)]
    expected = [FUNCTIONS["kda"](**each)[0] for each in given]
    fusepatch.accelerate("kda")
    found: list[list[Tensor]] = [[] for _ in given]

    def run(number: int) -> None:
        found[number] += [FUNCTIONS["kda"](**given[number])[0] for _ in range(20)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, wanted in zip(found, expected, strict=True):
        assert len(outs) == 20
        assert all(relative_error(out, wanted) < 1e-6 for out in outs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_both_checkpointing_modes_take_one_route(use_reentrant: bool) -> None:
    given = tensors("kda")
    fusepatch.accelerate("kda")
    out = checkpoint(lambda *leaves: FUNCTIONS["kda"](*leaves)[0], *given.values(), use_reentrant=use_reentrant)
    out.sum().backward()
    assert counted("kda") == ({"fused": 2}, {})


# --------------------------------------------------------------------------------------------- declines, each for real


@BOTH
@provokes(Reason.UNKNOWN_ARGUMENT)
def test_unknown_arguments(op: str, library: Library) -> None:
    check(op, library, Reason.UNKNOWN_ARGUMENT, lambda: FUNCTIONS[op](**tensors(op), newer_than_us=True))


@BOTH
def test_arguments_that_the_library_refuses_are_its_own_to_refuse(op: str) -> None:
    registry(op)._backends.pop("stand_in")
    given = tensors(op)
    fusepatch.accelerate(op)
    with pytest.raises(TypeError, match=r"multiple values for argument 'q'|missing 1 required"):
        FUNCTIONS[op](given["q"], **given)
    with pytest.raises(TypeError, match="missing 1 required"):
        FUNCTIONS[op](*list(given.values())[:4])
    assert counted(op) == ({"original": 2}, {"unknown-argument": 2})


OPTIONS: dict[str, Any] = {
    "chunk_size": 32,
    "transpose_state_layout": True,
    "use_graph": True,
    "max_num_seqs": 4,
    "return_intermediate_states": True,
    "cp_context": object(),
    "chunk_indices": torch.zeros(1, 2, dtype=torch.int64),
}


@BOTH
@pytest.mark.parametrize("option", OPTIONS)
@provokes(Reason.OPTION)
def test_options(op: str, option: str, library: Library) -> None:
    check(op, library, Reason.OPTION, lambda: FUNCTIONS[op](**tensors(op), **{option: OPTIONS[option]}))


@BOTH
def test_options_at_their_defaults_do_not_decline(op: str) -> None:
    fusepatch.accelerate(op)
    unset = {name: False if isinstance(value, bool) else None for name, value in OPTIONS.items()}
    del unset["transpose_state_layout"]
    FUNCTIONS[op](**tensors(op), **unset | {"chunk_size": 64}, cu_seqlens_cpu=None)
    assert counted(op) == ({"fused": 1}, {})


@BOTH
@pytest.mark.parametrize("size", [None, False, 0, 64.0, torch.tensor([64, 64])])
@provokes(Reason.OPTION)
def test_chunk_sizes_that_are_not_64(op: str, size: object, library: Library) -> None:
    check(op, library, Reason.OPTION, lambda: FUNCTIONS[op](**tensors(op), chunk_size=size))


@BOTH
@provokes(Reason.OPTION)
def test_what_the_library_says_is_deprecated_is_left_to_it(op: str, library: Library) -> None:
    check(op, library, Reason.OPTION, lambda: FUNCTIONS[op](**tensors(op), transpose_state_layout=False))


@pytest.mark.parametrize("bound", [None, -6.0, 0.5])
def test_safe_gate_without_a_bound_is_the_librarys_error(bound: float | None) -> None:
    registry("kda")._backends.pop("stand_in")
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "safe_gate": True, "lower_bound": bound}
    fusepatch.accelerate("kda")
    with pytest.raises(ValueError, match="`lower_bound` must be"):
        FUNCTIONS["kda"](**tensors("kda"), **gate)
    assert counted("kda") == ({"original": 1}, {"option": 1})


@BOTH
def test_varlen_with_a_batch_is_the_librarys_error(op: str) -> None:
    registry(op)._backends.pop("stand_in")
    fusepatch.accelerate(op)
    with pytest.raises(ValueError, match="batch size is expected to be 1"):
        FUNCTIONS[op](**tensors(op), cu_seqlens=torch.tensor([0, 2, 5]))
    assert counted(op) == ({"original": 1}, {"shape": 1})


def test_a_state_of_the_wrong_dtype_is_the_librarys_error() -> None:
    registry("kda")._backends.pop("stand_in")
    fusepatch.accelerate("kda")
    with pytest.raises(AssertionError, match="initial_state must be in float32"):
        FUNCTIONS["kda"](**tensors("kda"), initial_state=torch.zeros(2, 4, 8, 6, dtype=torch.bfloat16))
    assert counted("kda") == ({"original": 1}, {"dtype": 1})


class Odd(Tensor):
    """A subclass of Tensor."""


@BOTH
@pytest.mark.parametrize("name", ["q", "k", "beta"])
def test_tensor_subclasses(op: str, name: str, library: Library) -> None:
    given = tensors(op)
    given[name] = given[name].detach().as_subclass(Odd)
    check(op, library, Reason.TENSOR_SUBCLASS, lambda: FUNCTIONS[op](**given))


@BOTH
def test_parameters_are_tensors(op: str) -> None:
    given = tensors(op)
    given["beta"] = nn.Parameter(given["beta"].detach())
    fusepatch.accelerate(op)
    FUNCTIONS[op](**given)
    assert counted(op) == ({"fused": 1}, {})


@BOTH
def test_no_tokens(op: str, library: Library) -> None:
    check(op, library, Reason.ZERO_TOKENS, lambda: FUNCTIONS[op](**tensors(op, tokens=0)))


@BOTH
def test_transforms(op: str, library: Library) -> None:
    given = tensors(op, requires_grad=False)
    fusepatch.accelerate(op)
    torch.func.grad(lambda q: FUNCTIONS[op](**{**given, "q": q})[0].sum())(given["q"])
    with forward_ad.dual_level():
        FUNCTIONS[op](**{**given, "q": forward_ad.make_dual(given["q"], given["q"])})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(t) for name, t in given.items()}
        FUNCTIONS[op](**fake)
    assert counted(op)[1] == {"functorch": 1, "forward-ad": 1, "dispatch-mode": 1}
    assert library.calls == 3


@BOTH
def test_the_meta_device(op: str, library: Library) -> None:
    given = {name: t.detach().to("meta") for name, t in tensors(op).items()}
    fusepatch.accelerate(op)
    FUNCTIONS[op](**given)
    assert counted(op) == ({"original": 1}, {"meta": 1})


@BOTH
def test_the_cpu_unless_the_reference_is_named(op: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_BACKEND", "auto")
    check(op, library, Reason.CPU, lambda: FUNCTIONS[op](**tensors(op)))


@BOTH
def test_what_the_user_asked_for(op: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    fusepatch.accelerate(op)
    with fusepatch.disabled():
        FUNCTIONS[op](**tensors(op))
    assert counted(op) == ({"original": 1}, {"disabled": 1})
    fusepatch.restore()
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}_ROUTE", "original")
    fusepatch.accelerate(op)
    FUNCTIONS[op](**tensors(op))
    assert counted(op) == ({"original": 1}, {"route-bound": 1})
    fusepatch.restore()
    monkeypatch.setenv(f"FUSEPATCH_{op.upper()}", "0")
    fusepatch.accelerate(op)
    FUNCTIONS[op](**tensors(op))
    assert library.calls == 3
    assert "fusepatch" not in registry(op)._backends


# -------------------------------------------------------------------------------------- declines of cuDNN's kernels


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend for Hopper as the table sees it there, on CPU tensors: its device checks and its library pass."""
    backend = choose.BACKENDS[0]
    assert backend.name == "cudnn_hopper"
    here = type(backend)(**{**vars(backend), "native": False, "packages": (), "check": None, "drift": tuple})
    monkeypatch.setattr(choose, "BACKENDS", (here, *choose.BACKENDS[1:]))
    monkeypatch.setattr(cudnn_hopper, "why_no_library", lambda: None)
    monkeypatch.setattr(cudnn_hopper, "run", definition.run)
    monkeypatch.setenv("FUSEPATCH_KDA_BACKEND", "cudnn_hopper")
    choose.TABLE.forget()
    yield
    choose.TABLE.forget()


def layer_call(**changes: Any) -> dict[str, Any]:
    """A call as FLA's layer makes it, with a safe gate."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    call: dict[str, Any] = {
        "q": normal(1, 3, 1, 128), "k": normal(1, 3, 1, 128), "v": normal(1, 3, 2, 128), "g": normal(1, 3, 2, 128),
        "beta": normal(1, 3, 2), "A_log": nn.Parameter(torch.zeros(2)), "dt_bias": nn.Parameter(torch.zeros(256)),
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True, "lower_bound": -5.0, "state_v_first": True,
    }  # fmt: skip
    return call | changes


def test_a_layers_call_is_served(hopper: None) -> None:
    fusepatch.accelerate("kda")
    FUNCTIONS["kda"](**layer_call())
    FUNCTIONS["kda"](**layer_call(state_v_first=False, initial_state=torch.zeros(1, 2, 128, 128)))
    FUNCTIONS["kda"](**layer_call(use_gate_in_kernel=False, g=-layer_call()["g"].abs().requires_grad_()))
    assert counted("kda") == ({"fused": 3}, {})
    assert "gradients of dt_bias, A_log, the gate and the initial state are less exact" in str(fusepatch.status())


FORWARDS: dict[str, dict[str, Any]] = {
    "as the layer calls it": {},
    "no promise beside the bound": {"safe_gate": False},
    "a given gate": {"use_gate_in_kernel": False, "lower_bound": None, "A_log": None, "dt_bias": None},
    "the other layout, and a state": {"state_v_first": False, "initial_state": torch.zeros(1, 2, 128, 128)},
    "sequences": {"cu_seqlens": torch.tensor([0, 1, 3])},
}


@pytest.mark.parametrize("case", FORWARDS)
def test_the_forward_pass_is_the_librarys_with_the_callers_own_options(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever changes FLA's result must arrive as it was passed: the output is to be the library's, bit for bit."""
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(cudnn_hopper, "_chunk_kda", lambda: lambda **given: called.append(given) or (given["v"], None))
    given = layer_call(**FORWARDS[case])
    request = arguments.read(True, **given)
    assert isinstance(request, arguments.Request)
    cudnn_hopper._forward(request.call, request.inputs, False)
    (passed,) = called
    defaults = {name: p.default for name, p in inspect.signature(FUNCTIONS["kda"]).parameters.items()}
    for name in {*given, *passed} - {"scale", "output_final_state"}:
        theirs = given.get(name, defaults.get(name))
        assert passed.get(name, defaults.get(name)) is theirs or passed.get(name) == theirs, name
    assert passed["scale"] == 128**-0.5


def test_the_librarys_function_is_called_without_its_registry() -> None:
    found = cudnn_hopper._chunk_kda()
    assert found is inspect.unwrap(FUNCTIONS["kda"])
    assert found is not FUNCTIONS["kda"]
    assert found.__module__ == "fla.ops.kda.chunk"


UNBOUNDED: dict[str, dict[str, Any]] = {
    "a softplus gate": {"safe_gate": False, "lower_bound": None},
    "a bound below -5": {"safe_gate": False, "lower_bound": -6.0},
    "a given gate that is not promised": {"use_gate_in_kernel": False, "safe_gate": False},
    "keys of any length": {"use_qk_l2norm_in_kernel": False},
    "write strengths that may be above 1": {"use_beta_sigmoid_in_kernel": False},
}


@pytest.mark.parametrize("case", UNBOUNDED)
@provokes(Reason.UNBOUNDED)
def test_what_the_kernels_take_for_granted_must_be_promised(case: str, hopper: None, library: Library) -> None:
    given = layer_call(**UNBOUNDED[case])
    given["q"].requires_grad_()
    check("kda", library, Reason.UNBOUNDED, lambda: FUNCTIONS["kda"](**given))


@provokes(Reason.NO_GRADIENT)
def test_inference(hopper: None, library: Library) -> None:
    given = layer_call(A_log=torch.zeros(2), dt_bias=torch.zeros(256))
    check("kda", library, Reason.NO_GRADIENT, lambda: FUNCTIONS["kda"](**given))


def test_the_grad_mode_decides_nothing(hopper: None) -> None:
    """Reentrant checkpointing runs its first pass without gradients, and the second must take the same route."""
    fusepatch.accelerate("kda")
    with torch.no_grad():
        FUNCTIONS["kda"](**layer_call())
    with torch.inference_mode():
        FUNCTIONS["kda"](**layer_call())
    assert counted("kda") == ({"fused": 2}, {})


@pytest.mark.parametrize(("name", "width"), [("q", 64), ("v", 64), ("v", 256)])
@provokes(Reason.HEAD_SIZE)
def test_head_sizes(name: str, width: int, hopper: None, library: Library) -> None:
    given = layer_call()
    if name == "v":
        given["v"] = torch.randn(1, 3, 2, width).bfloat16()
    else:
        given |= {each: torch.randn(1, 3, 1, width).bfloat16() for each in ("q", "k")}
        given |= {"g": torch.randn(1, 3, 2, width).bfloat16(), "dt_bias": torch.zeros(2 * width)}
    check("kda", library, Reason.HEAD_SIZE, lambda: FUNCTIONS["kda"](**given))


@pytest.mark.parametrize("option", [{"scale": 0.1}, {"allow_neg_eigval": True}], ids=str)
def test_options_that_the_backward_kernel_does_not_have(option: dict[str, Any], hopper: None, library: Library) -> None:
    check("kda", library, Reason.OPTION, lambda: FUNCTIONS["kda"](**layer_call(**option)))


@pytest.mark.parametrize(
    "change",
    [
        {name: layer_call()[name].float() for name in ("q", "k", "v")},
        {name: layer_call()[name].half() for name in ("q", "k", "v")},
        {"beta": layer_call()["beta"].double()},
        {"A_log": nn.Parameter(torch.zeros(2).double())},
    ],
    ids=["fp32", "fp16", "beta", "A_log"],
)
def test_dtypes(change: dict[str, Any], hopper: None, library: Library) -> None:
    check("kda", library, Reason.DTYPE, lambda: FUNCTIONS["kda"](**layer_call(**change)))


@provokes(Reason.INDEX_RANGE)
def test_more_sequences_than_the_scan_can_launch(
    hopper: None, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_hopper, "MOST_BLOCKS", 5)
    given = layer_call(cu_seqlens=torch.tensor([0, 1, 2, 3]))
    check("kda", library, Reason.INDEX_RANGE, lambda: FUNCTIONS["kda"](**given))


@pytest.mark.parametrize("reason", [Reason.MISSING_PACKAGE, Reason.NO_KERNEL])
def test_a_library_that_is_not_there(
    reason: Reason, hopper: None, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_hopper, "why_no_library", lambda: reason)
    check("kda", library, reason, lambda: FUNCTIONS["kda"](**layer_call()))


def test_the_backend_for_hopper_does_not_run_on_a_cpu(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_KDA_BACKEND", "cudnn_hopper")
    fusepatch.accelerate("kda")
    FUNCTIONS["kda"](**layer_call())
    (reason,) = counted("kda")[1]
    assert reason in ("cpu", "missing-package")


# ------------------------------------------------------------------------------------------------- what status() says


def status_of(op: str) -> tuple[str, str | None]:
    (target,) = (each for each in fusepatch.status().targets if each.name == f"{op}/fla")
    return target.state, target.reason


@BOTH
@provokes(Reason.DISPATCH_DISABLED)
def test_dispatch_disabled(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_backends, "_DISPATCH_DISABLED", True)
    fusepatch.accelerate(op)
    assert status_of(op) == ("off", "dispatch-disabled")
    assert "FLA_DISABLE_BACKEND_DISPATCH" in str(fusepatch.status())
    assert "fusepatch" not in registry(op)._backends


@BOTH
@provokes(Reason.LIBRARY_TOO_OLD)
def test_a_library_without_a_registry(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_backends, "_function_registries", {})
    monkeypatch.setattr(fla_backends, "_operation_registries", {})
    fusepatch.accelerate(op)
    assert status_of(op) == ("off", "library-too-old")


@BOTH
@provokes(Reason.HUB_KERNEL)
def test_a_kernel_from_the_hub_is_reported(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Func(nn.Module):
        """How transformers holds a function that a kernel from the hub may stand in for."""

    function, stand_in = shim._FUNCTIONS[op], Func()
    modeling = ModuleType("transformers.models.made_up.modeling_made_up")
    setattr(modeling, function.hub_name, stand_in)
    monkeypatch.setitem(importlib.import_module("sys").modules, modeling.__name__, modeling)
    fusepatch.accelerate(op)
    assert status_of(op) == ("patched", None)
    stand_in.forward = lambda *args: None
    assert status_of(op) == ("patched", "hub-kernel")
    assert "use_kernels" in str(fusepatch.status())


def test_registries_of_the_older_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.2 holds them by operation in a class, filled at first use, which importing the backends' package does."""

    class BackendRegistry:
        _registries: ClassVar[dict[str, Any]] = {}

        def __init__(self, operation: str) -> None:
            self._backends: dict[str, Any] = {}
            self._logged = {"kda:chunk_kda:fusepatch:fail", "kda:chunk_kda:flash_kda"}
            BackendRegistry._registries[operation] = self

        @classmethod
        def ensure_initialized(cls, operation: str) -> None:
            cls._registries.get(operation) or cls(operation)

    for name in ("_function_registries", "_operation_registries"):
        monkeypatch.delattr(fla_backends, name)
    monkeypatch.setattr(fla_backends, "BackendRegistry", BackendRegistry)
    fusepatch.accelerate("kda")
    (found,) = BackendRegistry._registries.values()
    backend = found._backends["fusepatch"]
    assert backend.verify("another_function", 1) == (False, "another function")
    assert backend.verify("chunk_kda", **tensors("kda")) == (True, None)
    assert len(backend.chunk_kda(**tensors("kda"))) == 2
    fusepatch.restore()
    assert not found._backends
    assert found._logged == {"kda:chunk_kda:flash_kda"}


DOCTORED: dict[str, tuple[dict[str, str | None], str, bool, bool]] = {
    "Triton 3.6 on Hopper": ({}, "9.0", False, True),
    "a local version": ({"triton": "3.7.0+cu130"}, "9.0", False, True),
    "Triton 3.7.1": ({"triton": "3.7.1"}, "9.0", False, False),
    "Triton 3.3": ({"triton": "3.3.1"}, "9.0", False, False),
    "Blackwell": ({}, "10.0", False, False),
    "tilelang": ({}, "9.0", True, False),
    "no FLA": ({"flash-linear-attention": None}, "9.0", False, False),
    "no Triton": ({"triton": None}, "9.0", False, False),
}


@pytest.mark.parametrize("case", DOCTORED)
def test_doctor_says_where_the_library_itself_cannot_train(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, capability, has_tilelang, warns = DOCTORED[case]
    versions = {"triton": "3.6.0", "flash-linear-attention": "0.6.0", **changes}
    monkeypatch.setattr(packages, "_recorded_version", lambda name: (versions[name], ""))
    monkeypatch.setattr(importhook, "is_installed", lambda name: has_tilelang)
    it = Examination()
    packages.judge_fla(it, [doctor.Gpu("cuda:0", "a GPU", capability, None, True)])
    assert [finding.level for finding in it.findings] == ([doctor.WARNING] if warns else [])


def test_off_by_default_and_its_variables() -> None:
    assert not any(settings.OPS[op].default for op in OPS)
    assert {"FUSEPATCH_KDA", "FUSEPATCH_GATED_DELTA_RULE"} <= settings.TABLE.keys()


def test_every_reason_is_provoked() -> None:
    assert PROVOKED == PROVOKED_BY_LINEAR_ATTENTION
