"""`accelerate(model=...)`, `explain()`, `warmup()` and `parity()` of layers that call a function of FLA.

FLA's own layers need a GPU for what comes before and after the call, so most tests here have a layer that does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fla_stand_in import FUNCTIONS, Library, fla_backends, registry, standing_in
from torch import Tensor, nn

import fusepatch
from fusepatch import catalogue, entry
from fusepatch.decline import Reason
from fusepatch.kernels.linear_attention import dispatch
from fusepatch.kernels.linear_attention.arguments import Request
from fusepatch.parity_check.report import ParityReport, Verdict
from fusepatch.shims import fla_linear_attention as shim
from fusepatch.shims import gated_mlp
from support import tiny_llama_mlp

HIDDEN, HEADS, WIDTH, TOKENS = 32, 2, 16, 80
chunk_kda = FUNCTIONS["kda"]


class Kda(nn.Module):
    """Calls `chunk_kda` as FLA's layer does, and returns what that returns."""

    def __init__(self, index: int = 0, **options: Any) -> None:
        super().__init__()
        self.layer_idx, self.hidden_size = index, HIDDEN
        self.safe_gate = True
        self.options = options
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (nn.Linear(HIDDEN, HEADS * WIDTH) for _ in range(4))
        self.b_proj, self.o_proj = nn.Linear(HIDDEN, HEADS), nn.Linear(HEADS * WIDTH, HIDDEN)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS * WIDTH))

    def forward(self, hidden_states: Tensor, cache: object = None) -> tuple[Tensor, None, object]:
        q, k, v, g = (
            projected(hidden_states).unflatten(-1, (HEADS, WIDTH))
            for projected in (self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        )
        out, _ = chunk_kda(
            q, k, v, g, self.b_proj(hidden_states), A_log=self.A_log, dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=self.safe_gate, lower_bound=-5.0, **self.options,
        )  # fmt: skip
        return self.o_proj(out.flatten(-2)), None, cache


class Model(nn.Module):
    """Layers one after the other, each given `cache`."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x, cache=cache)[0] if isinstance(layer, Kda) else layer(x))
        return x


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(*(Kda(index, **options) for index in range(2)))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setenv("FUSEPATCH_KDA_BACKEND", "reference")
    with standing_in() as found:
        yield found


def target() -> fusepatch.report.TargetStatus:
    return next(each for each in fusepatch.status().targets if each.name == "kda/fla")


def is_registered() -> bool:
    return "fusepatch" in registry("kda")._backends


# -------------------------------------------------------------------------------------------------- accelerate(model=)


def test_a_model_with_such_layers_registers_the_backend_for_every_model() -> None:
    found = fusepatch.accelerate("kda", model=model())
    assert is_registered()
    note = next(each.note for each in found.targets if each.name == "kda/fla")
    assert note is not None
    assert "in every model" in note
    assert f"kda/fla: {note}" in str(found)
    assert [patch.switch.only for patch in entry._state.patches.values() if patch.op == "kda"] == [None]
    model()(torch.randn(1, 5, HIDDEN))  # another one
    assert target().total("calls") == {"fused": 2}
    fusepatch.restore()
    assert not is_registered()
    assert target().note is None


def test_a_model_without_them_does_not() -> None:
    with pytest.raises(ValueError, match="no module that an op of fusepatch serves"):
        fusepatch.accelerate("gated_delta_rule", model=model())
    fusepatch.accelerate(["gated_mlp", "kda"], model=tiny_llama_mlp())
    assert not is_registered()
    assert fusepatch.accelerate(["gated_mlp", "kda"], model=Model(Kda(), tiny_llama_mlp())).native_calls() == 0
    assert is_registered()


def test_a_block_takes_the_backend_out_again() -> None:
    with fusepatch.accelerated("kda", model=model()):
        assert is_registered()
        model()(torch.randn(1, 5, HIDDEN))
    assert not is_registered()


def test_a_library_that_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_backends, "_DISPATCH_DISABLED", True)
    fusepatch.accelerate("kda", model=model())
    assert (target().state, target().reason, target().note) == ("off", "dispatch-disabled", None)


# ------------------------------------------------------------------------------------------------------------- explain


def explained(found: nn.Module | None = None, **kwargs: Any) -> list[tuple[str, str | None, str | None, bool]]:
    rows = fusepatch.explain(model() if found is None else found, **kwargs).modules
    return [(row.route, row.reason, row.backend, row.patched) for row in rows]


def test_before_and_after_accelerate() -> None:
    assert explained() == [("original", "env-disabled", None, False)] * 2
    fusepatch.accelerate("kda")
    assert explained() == [("fused", None, "reference", True)] * 2
    found = fusepatch.explain(model())
    assert [row.name for row in found.modules] == ["layers.0", "layers.1"]
    assert {(row.op, row.class_name.rpartition(".")[2], row.certain) for row in found.modules} == {
        ("kda", "Kda", False)
    }
    assert "fused (reference), if it fits" in str(found)
    assert "what a layer passes to the function of kda" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["modules"][0]["backend"] == "reference"


def test_by_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_KDA", "1")
    assert explained() == [("fused", None, "reference", False)] * 2


def test_explaining_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("run")

    fusepatch.accelerate("kda")
    monkeypatch.setattr(nn.Module, "__call__", fail)
    monkeypatch.setattr(dispatch, "run_by", fail)
    assert len(explained()) == 2
    assert not target().total("calls")


def test_what_the_user_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fusepatch.accelerate("kda")
    assert {row[1] for row in explained(tokens=0)} == {"zero-tokens"}
    with fusepatch.disabled():
        assert {row[1:] for row in explained()} == {("disabled", None, True)}
    monkeypatch.setenv("FUSEPATCH_KDA_ROUTE", "original")
    fusepatch.accelerate("kda")
    assert {row[1] for row in explained()} == {"route-bound"}
    monkeypatch.setenv("FUSEPATCH_KDA", "0")
    fusepatch.accelerate("kda")
    assert {row[1:] for row in explained()} == {("env-disabled", None, False)}


def test_what_no_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    fusepatch.accelerate("kda")
    assert {row[1] for row in explained(device="meta")} == {"meta"}
    assert {row[1] for row in explained(dtype=torch.float8_e4m3fn)} == {"dtype"}
    assert {row[1] for row in explained(model().to("meta"))} == {"meta"}
    monkeypatch.setenv("FUSEPATCH_KDA_BACKEND", "auto")
    fusepatch.accelerate("kda")
    assert {row[1] for row in explained()} == {"cpu"}
    monkeypatch.setenv("FUSEPATCH_KDA_BACKEND", "cudnn_hopper")
    fusepatch.accelerate("kda")
    assert {row[1] for row in explained()} <= {"cpu", "missing-package"}


def test_what_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    fusepatch.accelerate("kda")
    with monkeypatch.context() as patched:
        patched.setattr(fla_backends, "_DISPATCH_DISABLED", True)
        assert {row[1] for row in explained()} == {"dispatch-disabled"}
    with monkeypatch.context() as patched:
        patched.setattr(fla_backends, "_function_registries", {})
        patched.setattr(fla_backends, "_operation_registries", {})
        assert {row[1] for row in explained()} == {"library-too-old"}


def test_a_kernel_from_the_hub_hides_the_function_of_its_own_layer() -> None:
    def stand_in(inner: Any) -> nn.Module:
        class Func(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return inner(*args, **kwargs)

        return Func()

    class Holds(Kda):
        def forward(self, hidden_states: Tensor, cache: object = None) -> Any:
            return self.__dict__["function"](hidden_states)

    layer, function = Holds(), stand_in(chunk_kda)
    layer.__dict__["function"] = function
    fusepatch.accelerate("kda")
    assert explained(layer) == [("fused", None, "reference", True)]
    function.forward = lambda *args: None  # type: ignore[method-assign]
    assert explained(layer) == [("original", "hub-kernel", None, True)]
    assert warmed(layer) == [("original", "hub-kernel", 5, 1)]
    assert explained(Kda()) == [("fused", None, "reference", True)]


def test_a_layer_without_weights() -> None:
    layer = Kda()
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "o_proj"):
        delattr(layer, name)
    fusepatch.accelerate("kda")
    assert explained(layer) == [("original", "structure", None, True)]


# -------------------------------------------------------------------------------------------------------------- warmup


def warmed(found: nn.Module, tokens: Any = 5) -> list[tuple[str, str | None, int, int]]:
    return [(row.route, row.reason, row.tokens, row.modules) for row in fusepatch.warmup(found, tokens).rows]


def test_each_kind_of_call_is_run_once_forward_and_backward(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    real, ran = dispatch.run_by, []

    def run_by(backend: Any, request: Request, output_final_state: bool) -> Any:
        out, state = real(backend, request, output_final_state)
        inputs = request.inputs
        assert all(t.is_leaf and t.requires_grad for t in inputs if t is not None)
        out.register_hook(lambda grad: ran.append((tuple(inputs.v.shape), request.call.lower_bound)))
        return out, state

    found = model()
    fusepatch.accelerate("kda")
    before = {name: p.clone() for name, p in found.named_parameters()}
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "run_by", run_by)
        report = fusepatch.warmup(found, [7, 5, 7])
    assert [(row.route, row.tokens, row.modules) for row in report.rows] == [("fused", 5, 2), ("fused", 7, 2)]
    assert report.native == 2
    assert "Kda" in str(report)
    assert ran == [((1, 5, HEADS, WIDTH), -5.0), ((1, 7, HEADS, WIDTH), -5.0)]
    assert not library.calls
    assert not target().total("calls")  # what a warm-up runs is not counted
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in found.named_parameters())
    found(torch.randn(1, 3, HIDDEN))  # and calls that come after it are
    assert target().total("calls") == {"fused": 2}


@pytest.mark.parametrize("mode", ["eval", "no_grad", "frozen"])
def test_the_call_is_one_of_training(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = shim.decide

    def decide(*args: Any) -> Any:
        made = real(*args)
        seen.append(made[0].problem.trains)
        return made

    monkeypatch.setattr(shim, "decide", decide)
    found = model()
    if mode == "frozen":
        found.requires_grad_(False)
    found.train(mode != "eval")
    fusepatch.accelerate("kda")
    with torch.set_grad_enabled(mode != "no_grad"):
        assert warmed(found) == [("fused", None, 5, 2)]
    assert seen == [True]


def test_layers_with_other_options_are_another_kind() -> None:
    found = model()
    found.layers[1].safe_gate = False
    fusepatch.accelerate("kda")
    assert warmed(found) == [("fused", None, 5, 1)] * 2


def test_no_hook_fires() -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a hook fired")

    found = model()
    for module in found.modules():
        module.register_forward_pre_hook(fail)
        module.register_full_backward_hook(fail)
    fusepatch.accelerate("kda")
    assert warmed(found) == [("fused", None, 5, 2)]


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_declines(strict: bool, library: Library) -> None:
    found = model(chunk_size=32)
    fusepatch.accelerate("kda", strict=strict)
    report = fusepatch.warmup(found, 5)
    assert [(row.route, row.reason) for row in report.rows] == [("original", "option")]
    assert report.native == 0
    assert not library.calls
    assert not target().total("declines")
    entry._state.strict = False  # else restore() raises, since nothing ran


def test_what_the_library_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError("no such plan")

    monkeypatch.setattr(dispatch, "not_supported", lambda backend: (NotImplementedError,))
    monkeypatch.setattr(dispatch, "run_by", fail)
    fusepatch.accelerate("kda")
    assert warmed(model()) == [("original", "no-kernel", 5, 2)]


def test_a_layer_that_can_not_be_run_by_itself() -> None:
    layers = pytest.importorskip("fla.layers")
    fusepatch.accelerate("kda")
    report = fusepatch.warmup(layers.KimiDeltaAttention(32, head_dim=8, num_heads=2), 5)
    (row,) = report.rows
    assert row.route == "not run"
    assert ": " in str(row.reason)  # what was raised
    assert report.native == 0


def test_a_layer_that_says_too_little_or_makes_no_call() -> None:
    fusepatch.accelerate("kda")
    layer = Kda()
    del layer.hidden_size
    assert warmed(layer) == [("not run", "the layer does not say how wide its input is", 5, 1)]

    class Other(Kda):
        def forward(self, hidden_states: Tensor, cache: object = None) -> Any:
            return chunk_kda(hidden_states) if cache else hidden_states

    assert warmed(Other()) == [("not run", "the layer made no call", 5, 1)]


def test_a_layer_that_handles_exceptions_is_left_all_the_same() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden_size, self.proj = HIDDEN, nn.Linear(HIDDEN, HEADS * WIDTH)

        def forward(self, hidden_states: Tensor) -> Tensor:
            x = self.proj(hidden_states).unflatten(-1, (HEADS, WIDTH))
            try:
                return chunk_kda(x, x, x, -x.abs(), x[..., 0])[0]
            except Exception:
                return hidden_states

    fusepatch.accelerate("kda")
    assert warmed(Careful()) == [("fused", None, 5, 1)]


def test_an_error_of_ours_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(shim, "decide", fail)
    fusepatch.accelerate("kda")
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        fusepatch.warmup(model(), 5)
    with pytest.raises(ZeroDivisionError):
        model()(torch.randn(1, 3, HIDDEN))  # in this thread again as ever


def test_nothing_to_warm() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nothing that Model uses is patched"):
            fusepatch.warmup(model(), 5)
        fusepatch.accelerate()
    fusepatch.accelerate("kda")
    with fusepatch.disabled(), pytest.raises(RuntimeError, match="nothing that Model uses is patched"):
        fusepatch.warmup(model(), 5)
    with pytest.raises(RuntimeError, match="nothing that Linear uses is patched"):
        fusepatch.warmup(nn.Linear(2, 2), 5)


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        (0, ValueError),
        ([5, -1], ValueError),
        ([], TypeError),
        (True, TypeError),
        ("5", TypeError),
        ([1.5], TypeError),
        (1.5, TypeError),
        (None, TypeError),
        (torch.tensor(5), TypeError),
    ],
    ids=repr,
)
def test_token_counts_of_another_kind(counts: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"token_counts must be a positive whole number, or several.*; got"):
        fusepatch.warmup(model(), counts)


# -------------------------------------------------------------------------------------------------------------- parity


def parity(found: nn.Module | None = None, ops: Any = "kda", cache: object = None, **kwargs: Any) -> ParityReport:
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    built = (model() if found is None else found).bfloat16()
    return fusepatch.parity(built, (x, cache) if cache is not None else (x,), ops=ops, **kwargs)


def test_a_model_is_judged_with_its_calls_on() -> None:
    report = parity()
    assert report.verdict is Verdict.PASSED, report
    assert (report.patched_native, report.unpatched_native, report.native_expected) == (2, 0, 0)
    assert "2 of 2 calls of the function of kda ran natively" in report.notes
    judged = {error.name for error in report.in_place}
    assert {f"layers.{i}: {what}" for i in (0, 1) for what in ("output", "gradient of the input")} <= judged
    assert {f"layers.1: gradient of {name}" for name, _ in Kda().named_parameters()} <= judged
    assert report.whole is not None
    assert not is_registered()


def test_what_is_wrong_in_the_op_is_found_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dispatch.run_by

    def wrong(*args: Any) -> Any:
        out, state = real(*args)
        return out * 1.02, state

    monkeypatch.setattr(dispatch, "run_by", wrong)
    report = parity()
    assert report.verdict is Verdict.FAILED
    broken = {error.name for error in report.in_place if not error.holds}
    assert {"layers.0: output", "layers.1: output", "layers.1: gradient of q_proj.weight"} <= broken


def test_calls_that_decline_are_no_pass() -> None:
    report = parity(model(chunk_size=32))
    assert report.verdict is Verdict.NOTHING_NATIVE
    assert report.reasons == ("no native call; declined 2 for option",)


def test_how_many_calls_must_be_native() -> None:
    assert parity(native_calls=2).verdict is Verdict.PASSED
    report = parity(native_calls=3)
    assert report.verdict is Verdict.FAILED
    assert report.reasons == ("2 native calls, and native_calls=3",)


def test_calls_of_functions_do_not_make_up_for_those_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "reference")
    ops = ("gated_mlp", "kda")

    def build() -> Model:
        torch.manual_seed(0)
        return Model(Kda(), tiny_llama_mlp(hidden_size=HIDDEN), Kda())

    assert parity(build(), ops).verdict is Verdict.PASSED
    monkeypatch.setattr(gated_mlp, "decide", lambda *_: gated_mlp._declined(Reason.ALIGNMENT))
    report = parity(build(), ops)
    assert report.verdict is Verdict.FAILED
    assert report.reasons == ("0 native calls, where explain() promises 1; declined 1 for alignment",)
    assert report.patched_native == 2


def test_a_layer_that_is_given_a_cache_is_not_judged_alone() -> None:
    report = parity(cache=object())
    assert report.verdict is Verdict.PASSED
    assert not report.in_place
    assert sum("can't be judged alone: it was given a cache" in note for note in report.notes) == 2


def test_without_such_layers() -> None:
    report = parity(nn.Linear(HIDDEN, HIDDEN))
    assert report.verdict is Verdict.NOTHING_NATIVE
    assert "the patched arm did not run: there is nothing to patch" in report.notes


def test_the_catalogue_knows_which_targets_are_of_functions() -> None:
    assert {target.op for target in catalogue.REGISTRY_TARGETS} == {"kda", "gated_delta_rule"}
    assert set(catalogue.REGISTRY_TARGETS) | set(catalogue.CLASS_TARGETS) == set(catalogue.TARGETS)
