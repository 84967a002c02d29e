"""Which backend serves a problem, and why one does not: the rules, for devices that need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusepatch import arch, selfcheck, settings
from fusepatch.decline import Reason, Route
from fusepatch.kernels import backends
from fusepatch.kernels.gated_mlp import choose
from fusepatch.kernels.gated_mlp.choose import Backend, Problem
from fusepatch.selfcheck import Outcome, Verdict

FUSED, POINTWISE, ORIGINAL = Route
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
FUSED_ON = {(9, 0), (10, 0), (10, 3)}
POINTWISE_ON = {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)}
NOWHERE = {(7, 0), (7, 5), (8, 8), (9, 1), (10, 1), (12, 2), (13, 0)}

PLAIN = Problem(FUSED, CUDA, torch.bfloat16, 64, 96, "silu", bias=False)
NATIVE = Backend(
    name="triton",  # one that the environment may name
    module="no.such.module",
    routes=frozenset({FUSED, POINTWISE}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    fused_bias=False,
)


@pytest.fixture(autouse=True)
def a_hopper(monkeypatch: pytest.MonkeyPatch):
    """A GPU that looks like one, and nothing remembered."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    choose.forget()
    yield
    choose.forget()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*backends: Backend) -> None:
        monkeypatch.setattr(choose, "BACKENDS", backends)
        choose.forget()

    return put


def read(**variables: str) -> None:
    settings.install(settings.read({f"FUSEPATCH_GATED_MLP_{name}": value for name, value in variables.items()}))


# ---------------------------------------------------------------------------------------------------------- the table


def test_the_table_and_the_environment_name_the_same_backends() -> None:
    names = [backend.name for backend in choose.BACKENDS]
    assert sorted(names) == sorted(settings.OPS["gated_mlp"].backends)
    assert len(set(names)) == len(names)
    assert choose.REFERENCE.name == "reference"
    assert [backend.name for backend in choose.BACKENDS if not backend.native] == ["reference"]


@pytest.mark.parametrize("backend", choose.BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_has_what_its_routes_call(backend: Backend) -> None:
    if backend.packages:
        pytest.importorskip(backend.packages[0])
    names = {FUSED: ("dual_gemm_act", "gemm_dact"), POINTWISE: ("act_mul", "act_mul_backward")}
    for route in backend.routes:
        assert all(callable(getattr(backends.load(backend), name)) for name in names[route])


@pytest.mark.parametrize("backend", [b for b in choose.BACKENDS if b.native], ids=lambda backend: backend.name)
def test_every_native_backend_is_checked_first(backend: Backend) -> None:
    assert backend.check is not None


# --------------------------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize("capability", sorted(POINTWISE_ON | NOWHERE), ids=str)
def test_architectures(
    monkeypatch: pytest.MonkeyPatch, table: Callable[..., None], capability: arch.Capability
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    table(NATIVE)
    served = {route for route in (FUSED, POINTWISE) if choose.choose(PLAIN._replace(route=route), 9) is NATIVE}
    expected = ({FUSED} if capability in FUSED_ON else set()) | ({POINTWISE} if capability in POINTWISE_ON else set())
    assert served == expected
    for route in {FUSED, POINTWISE} - expected:
        assert choose.choose(PLAIN._replace(route=route), 9) is Reason.ARCHITECTURE


def test_no_architecture_is_untested() -> None:
    assert set(arch.ARCHITECTURES) == POINTWISE_ON


# --------------------------------------------------------------------------------------- reasons, one branch at a time


@pytest.mark.parametrize(
    ("backend", "problem", "reason"),
    [
        ({}, {}, None),
        ({"routes": frozenset({POINTWISE})}, {}, Reason.NO_KERNEL),
        ({"packages": ("torch", "no_such_package")}, {}, Reason.MISSING_PACKAGE),
        ({"packages": ("torch",)}, {}, None),
        ({}, {"device": CPU}, Reason.CPU),
        ({}, {"device": torch.device("meta")}, Reason.META),
        ({}, {"device": torch.device("xpu", 0)}, Reason.NO_KERNEL),
        ({"native": False}, {"device": torch.device("xpu", 0)}, None),
        ({}, {"dtype": torch.float32}, Reason.DTYPE),
        ({}, {"dtype": torch.int8}, Reason.DTYPE),
        ({}, {"activation": "relu"}, Reason.ACTIVATION),
        *(({}, {"activation": name}, None) for name in choose.ACTIVATIONS),
        ({}, {"bias": True}, Reason.BIAS),
        ({"fused_bias": True}, {"bias": True}, None),
        ({}, {"bias": True, "route": POINTWISE}, None),
        ({"width_multiple": 16}, {}, None),
        ({"width_multiple": 16}, {"hidden": 72}, Reason.ALIGNMENT),
        ({"width_multiple": 16}, {"inner": 72}, Reason.ALIGNMENT),
        ({"width_multiple": 16}, {"inner": 96, "hidden": 0, "route": POINTWISE}, None),
        ({"max_elements": 9 * 192}, {}, None),
        ({"max_elements": 9 * 192 - 1}, {}, Reason.INDEX_RANGE),
        ({"max_elements": 9 * 1000 - 1}, {"hidden": 1000}, Reason.INDEX_RANGE),
        ({"compiled": lambda problem, tokens: False}, {}, None),
    ],
)
def test_why_not(
    table: Callable[..., None], backend: dict[str, Any], problem: dict[str, Any], reason: Reason | None
) -> None:
    """The same whether the backend is named in the environment or is the only one there is."""
    changed = dataclasses.replace(NATIVE, **backend)
    table(changed)
    for variables in ({"BACKEND": "triton"}, {}) if changed.native else ({"BACKEND": "triton"},):
        read(**variables)
        assert choose.choose(PLAIN._replace(**problem), 9) is (reason or changed)


def test_admitted_sizes(table: Callable[..., None]) -> None:
    """Judged by problem and number of tokens; not where the user named the backend."""
    large = dataclasses.replace(NATIVE, admits=lambda problem, tokens: problem.inner == 96 and tokens > 9)
    table(large)
    assert choose.choose(PLAIN, 9) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN, 10) is large
    assert choose.choose(PLAIN._replace(inner=64), 10) is Reason.SIZE_NOT_ADMITTED
    read(BACKEND="triton")
    assert choose.choose(PLAIN, 9) is large


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.PASSED, None),
        (Outcome.FAILED, Reason.SELFCHECK_FAILED),
        (Outcome.INCONCLUSIVE, Reason.SELFCHECK_INCONCLUSIVE),
    ],
)
def test_selfcheck(
    monkeypatch: pytest.MonkeyPatch, table: Callable[..., None], outcome: Outcome, reason: Reason | None
) -> None:
    asked: list[tuple[str, torch.device]] = []

    def verdict(check: selfcheck.Check, device: torch.device) -> Verdict:
        asked.append((check.case, device))
        return Verdict(outcome)

    monkeypatch.setattr(selfcheck, "verdict", verdict)
    checked = dataclasses.replace(NATIVE, check="some.module")
    table(checked)
    for tokens in (9, 10):
        assert choose.choose(PLAIN, tokens) is (reason or checked)
    assert asked == [("triton fused bfloat16 silu", CUDA)]
    assert choose.choose(PLAIN._replace(dtype=torch.int8), 9) is Reason.DTYPE
    assert len(asked) == 1  # what can't be served is not checked


def test_alignment_of_addresses(table: Callable[..., None]) -> None:
    aligned = dataclasses.replace(NATIVE, byte_alignment=16)
    table(aligned)
    whole = torch.zeros(65, dtype=torch.bfloat16)
    assert whole.data_ptr() % 16 == 0
    assert choose.choose(PLAIN, 1, whole, whole[8:]) is aligned
    assert choose.choose(PLAIN, 1, whole, whole[1:]) is Reason.ALIGNMENT
    table(NATIVE)
    assert choose.choose(PLAIN, 1, whole[1:]) is NATIVE


def test_capture(monkeypatch: pytest.MonkeyPatch, table: Callable[..., None]) -> None:
    """Under capture: nothing that is not known yet, and nothing that would compile."""
    cold, warm = dataclasses.replace(NATIVE, compiled=lambda problem, tokens: tokens == 9), 9
    table(cold)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose.choose(PLAIN, warm) is Reason.CAPTURE_COLD
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose.choose(PLAIN, 10) is cold
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose.choose(PLAIN, warm) is cold
    assert choose.choose(PLAIN, 10) is Reason.CAPTURE_COLD


# ------------------------------------------------------------------------------------------------------------- order


def test_the_first_that_serves_is_chosen(table: Callable[..., None]) -> None:
    first = dataclasses.replace(NATIVE, name="first", dtypes=frozenset({torch.float16}))
    table(first, NATIVE, choose.REFERENCE)
    assert choose.choose(PLAIN._replace(dtype=torch.float16), 9) is first
    assert choose.choose(PLAIN, 9) is NATIVE


def test_the_reference_serves_only_where_it_is_named(table: Callable[..., None]) -> None:
    table(choose.REFERENCE)
    assert choose.choose(PLAIN, 9) is Reason.NO_KERNEL
    assert choose.choose(PLAIN._replace(device=CPU), 9) is Reason.CPU
    read(BACKEND="reference")
    assert choose.choose(PLAIN, 9) is choose.REFERENCE
    assert choose.choose(PLAIN._replace(device=CPU), 9) is choose.REFERENCE


def test_a_named_backend_is_not_replaced_by_another(table: Callable[..., None]) -> None:
    table(dataclasses.replace(NATIVE, dtypes=frozenset()), dataclasses.replace(NATIVE, name="other"), choose.REFERENCE)
    read(BACKEND="triton")
    assert choose.choose(PLAIN, 9) is Reason.DTYPE


@pytest.mark.parametrize("bound", [None, *Route], ids=str)
def test_route_bound(table: Callable[..., None], bound: Route | None) -> None:
    table(NATIVE)
    read(**({} if bound is None else {"ROUTE": bound.value}))
    allowed = {route for route in (FUSED, POINTWISE) if choose.choose(PLAIN._replace(route=route), 9) is NATIVE}
    assert allowed == {route for route in (FUSED, POINTWISE) if bound is None or route.rank >= bound.rank}
    for route in {FUSED, POINTWISE} - allowed:
        assert choose.choose(PLAIN._replace(route=route), 9) is Reason.ROUTE_BOUND


# ------------------------------------------------------------------------------------------------------------ memory


def test_other_settings_forget_what_was_worked_out(table: Callable[..., None]) -> None:
    table(NATIVE)
    read()
    assert choose.choose(PLAIN, 9) is NATIVE
    read(ROUTE="original")
    assert choose.choose(PLAIN, 9) is Reason.ROUTE_BOUND
    read()
    assert choose.choose(PLAIN, 9) is NATIVE


def test_the_environment_is_not_read_by_a_call(monkeypatch: pytest.MonkeyPatch, table: Callable[..., None]) -> None:
    table(NATIVE)
    read()
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", "original")
    assert choose.choose(PLAIN, 9) is NATIVE
    assert choose.choose(PLAIN._replace(inner=128), 9) is NATIVE


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, table: Callable[..., None]) -> None:
    table(NATIVE)
    monkeypatch.setattr(backends, "KNOWN_LIMIT", 5)
    for inner in range(16, 200, 16):
        assert choose.choose(PLAIN._replace(inner=inner), 9) is NATIVE
    assert len(choose._TABLE.known) <= 5


def test_a_direct_call_of_the_op_never_declines(table: Callable[..., None]) -> None:
    table(NATIVE, choose.REFERENCE)
    assert choose.for_op(PLAIN, 9) is NATIVE
    assert choose.for_op(PLAIN._replace(dtype=torch.float64), 9) is choose.REFERENCE
    read(ROUTE="original")
    assert choose.for_op(PLAIN, 9) is choose.REFERENCE


# ------------------------------------------------------------------------------------------------------------ capture


def test_grad_mode_does_not_pick_the_route_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    pointwise = pytest.importorskip("fusepatch.kernels.gated_mlp.pointwise")
    monkeypatch.setattr(pointwise, "_compiled", {(torch.bfloat16, "silu", 9)})
    with torch.no_grad():
        first = pointwise.is_compiled(torch.bfloat16, "silu", 9)
    assert pointwise.is_compiled(torch.bfloat16, "silu", 9) == first
