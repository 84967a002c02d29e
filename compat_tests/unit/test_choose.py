"""Which backend serves a problem, and why one does not: the rules, for devices that need not be here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    choose.TABLE.forget()
    yield
    choose.TABLE.forget()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*backends: Backend) -> None:
        monkeypatch.setattr(choose, "BACKENDS", backends)
        choose.TABLE.forget()

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
    if backend.whole:
        names[FUSED] = ("gated_mlp", "not_supported")
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


MADE_FOR = {
    **{capability: {"triton"} for capability in POINTWISE_ON},
    (9, 0): {"triton", "hopper", "cudnn", "triton_gemm"},
    (10, 0): {"triton", "cudnn", "triton_gemm", "blackwell"},
    (10, 3): {"triton", "cudnn", "triton_gemm", "blackwell"},
}


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch, table: Callable[..., None]) -> Callable[..., None]:
    """The real table on a GPU of some capability, with every package there and every self-check passed."""

    def put(capability: arch.Capability, **changes: Any) -> None:
        free = {"drift": lambda: (), "why_not": lambda problem: None, "packages": (), **changes}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(selfcheck, "device_kind", lambda device: f"a GPU {capability}")
        monkeypatch.setattr(selfcheck, "verdict", lambda check, device: Verdict(Outcome.PASSED))
        monkeypatch.setattr("fusepatch.kernels.gated_mlp.cudnn.is_as_published", lambda: True)
        table(*(dataclasses.replace(backend, **free) if backend.native else backend for backend in TABLE))

    return put


TABLE = choose.BACKENDS


@pytest.mark.parametrize("capability", sorted(POINTWISE_ON | NOWHERE), ids=str)
def test_which_backends_are_made_for_which_gpu(all_installed: Callable[..., None], capability: arch.Capability) -> None:
    all_installed(capability)
    found = [standing for standing in choose.survey(CUDA) if standing.backend != "reference"]
    assert {s.backend for s in found if s.reason is None} == MADE_FOR.get(capability, set())
    assert {s.reason for s in found if s.backend not in MADE_FOR.get(capability, set())} <= {Reason.ARCHITECTURE}


PUBLISHED = PLAIN._replace(hidden=5120, inner=17408)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)], ids=str)
def test_order_on_blackwell(all_installed: Callable[..., None], capability: arch.Capability) -> None:
    """By itself cuDNN, where its vendor published figures and it was warmed up, and pointwise otherwise."""
    all_installed(capability, named_only=False)
    cudnn = next(backend for backend in choose.BACKENDS if backend.name == "cudnn")
    choose.admit(cudnn, PUBLISHED, 8192)
    choose.admit(cudnn, PLAIN, 8192)

    def names(problem: Problem, tokens: int) -> list[str | None]:
        found = [choose.choose(problem._replace(route=route), tokens) for route in (FUSED, POINTWISE)]
        return [None if isinstance(each, Reason) else each.name for each in found]

    assert names(PUBLISHED, 8192) == ["cudnn" if capability == (10, 0) else None, "triton"]
    assert choose.choose(PUBLISHED, 16384) is Reason.SIZE_NOT_ADMITTED  # not warmed up
    assert choose.choose(PLAIN, 8192) is Reason.SIZE_NOT_ADMITTED  # not published
    assert names(PUBLISHED, 16384) == [None, "triton"]


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)], ids=str)
@pytest.mark.parametrize("name", ["cudnn", "triton_gemm", "hopper", "blackwell"])
def test_by_name_at_any_size(all_installed: Callable[..., None], capability: arch.Capability, name: str) -> None:
    all_installed(capability)
    read(BACKEND=name)
    with backends.warming():
        found = choose.choose(PLAIN, 9)
    if name not in MADE_FOR[capability]:
        assert found is Reason.ARCHITECTURE
    else:
        assert isinstance(found, Backend)
        assert found.name == name


def test_until_they_have_run_they_serve_only_by_name(all_installed: Callable[..., None]) -> None:
    """The table as it is: what has run on no GPU is not chosen."""
    named_only = {backend.name for backend in TABLE if backend.named_only}
    for capability in FUSED_ON:
        all_installed(capability)
        with backends.warming():
            for problem, tokens in itertools.product((PUBLISHED, PLAIN), (9, 8192)):
                found = choose.choose(problem, tokens)
                assert isinstance(found, Reason) or found.name not in named_only


def test_the_reason_is_that_of_a_backend_made_for_the_gpu(all_installed: Callable[..., None]) -> None:
    all_installed((10, 0), named_only=False)
    assert choose.choose(PLAIN, 9) is Reason.SIZE_NOT_ADMITTED  # and not that Hopper's kernels are for another
    all_installed((12, 0), named_only=False)
    assert choose.choose(PLAIN, 9) is Reason.ARCHITECTURE


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
        ({}, {"down_bias": True}, None),
        ({"whole": True}, {"down_bias": True}, Reason.BIAS),
        ({}, {"packed": True}, None),
        ({"packed": False}, {"packed": True}, Reason.PACKED_WEIGHT),
        ({"packed": False}, {}, None),
        ({"activations": ("silu",)}, {"activation": "gelu"}, Reason.ACTIVATION),
        ({"why_not": lambda problem: Reason.SHAPE}, {}, Reason.SHAPE),
        ({"drift": lambda: ("something changed",)}, {}, Reason.PACKAGE_DIFFERS),
        ({"warmed_only": True}, {}, Reason.SIZE_NOT_ADMITTED),
        ({}, {"bias": True, "route": POINTWISE}, None),
        ({"width_multiple": 16}, {}, None),
        ({"width_multiple": 16}, {"hidden": 72}, Reason.ALIGNMENT),
        ({"width_multiple": 16}, {"inner": 72}, Reason.ALIGNMENT),
        ({"width_multiple": 8}, {"hidden": 0}, Reason.SIZE_NOT_ADMITTED),
        ({"width_multiple": 8}, {"inner": 0}, Reason.SIZE_NOT_ADMITTED),
        ({"width_multiple": 16}, {"inner": 96, "hidden": 0, "route": POINTWISE}, None),
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


# -------------------------------------------------------------------------------------------------- too few tokens


def test_few_tokens_are_declined_before_anything_is_looked_at(table: Callable[..., None]) -> None:
    table(
        dataclasses.replace(NATIVE, fewest_tokens=100), dataclasses.replace(NATIVE, fewest_tokens=10, named_only=True)
    )
    assert choose.is_too_few(99, CUDA)
    assert not choose.is_too_few(100, CUDA)
    read(BACKEND="triton")
    assert not choose.is_too_few(1, CUDA)  # a backend that is named serves any number
    read(ROUTE="original")
    assert not choose.is_too_few(1, CUDA)  # the bound is the better reason
    assert choose.choose(PLAIN, 1) is Reason.ROUTE_BOUND
    read()
    table(dataclasses.replace(NATIVE, fewest_tokens=100), NATIVE)
    assert not choose.is_too_few(1, CUDA)


@pytest.mark.parametrize("changes", [{"packages": ("no_such_package",)}, {"capabilities": frozenset({(10, 0)})}])
def test_where_nothing_could_serve_the_number_of_tokens_is_not_why(
    table: Callable[..., None], changes: dict[str, Any]
) -> None:
    table(dataclasses.replace(NATIVE, fewest_tokens=100, **changes))
    assert not choose.is_too_few(1, CUDA)
    assert choose.choose(PLAIN, 1) in (Reason.MISSING_PACKAGE, Reason.ARCHITECTURE)


def test_too_few_is_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real table: nothing that is declined early would have been admitted, and the limit is not idle."""
    monkeypatch.setattr(backends, "missing", lambda backend: ())
    monkeypatch.setattr(selfcheck, "verdict", lambda *_: Verdict(Outcome.PASSED))
    monkeypatch.setattr(
        choose, "BACKENDS", tuple(dataclasses.replace(backend, drift=lambda: ()) for backend in choose.BACKENDS)
    )
    choose.TABLE.forget()
    tokens = 1
    while choose.is_too_few(tokens, CUDA):
        tokens += 1
    assert 1 < tokens < 4096
    for route, hidden, inner in itertools.product(
        (FUSED, POINTWISE), (1024, 2048, 4096, 8192), (3072, 14336, 28672, 65536, 2**20)
    ):
        problem = PLAIN._replace(route=route, hidden=hidden, inner=inner)
        assert isinstance(choose.choose(problem, tokens - 1), Reason)
    assert not isinstance(choose.choose(PLAIN._replace(route=POINTWISE, hidden=8192, inner=65536), tokens), Reason)


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
    assert len(choose.TABLE.known) <= 5


def test_forgetting_leaves_nothing(table: Callable[..., None]) -> None:
    table(NATIVE)
    choose.choose(PLAIN, 9)
    choose.is_too_few(9, CUDA)
    choose.admit(NATIVE, PLAIN, 9)
    kept = (choose.TABLE.known, choose.TABLE.fewest, choose.TABLE.warmed)
    assert all(kept)
    choose.TABLE.forget()
    assert not any(kept)


def test_a_direct_call_of_the_op_never_declines(table: Callable[..., None]) -> None:
    table(NATIVE, choose.REFERENCE)
    assert choose.for_op(PLAIN, 9) is NATIVE
    assert choose.for_op(PLAIN._replace(dtype=torch.float64), 9) is choose.REFERENCE
    read(ROUTE="original")
    assert choose.for_op(PLAIN, 9) is choose.REFERENCE


# ------------------------------------------------------------------------------------------------------------ capture


def test_what_is_compiled_for_one_kind_of_call_is_not_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of one tensor, another width and another device have kernels of their own, and capture must know."""
    pointwise = pytest.importorskip("fusepatch.kernels.gated_mlp.pointwise")
    monkeypatch.setattr(pointwise, "_compiled", set())
    monkeypatch.setattr(pointwise, "_launch", lambda *given, **flags: None)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    calls = [
        (device, tokens, inner, packed)
        for device in (cpu, cuda)
        for tokens in (1, 10)
        for inner in (16, 32)
        for packed in (False, True)
    ]

    def compiled() -> list[tuple[torch.device, int, int, bool]]:
        return [
            (device, tokens, inner, packed)
            for device, tokens, inner, packed in calls
            if choose._is_compiled(
                choose.Problem(Route.POINTWISE, device, torch.float32, 8, inner, "silu", False, packed), tokens
            )
        ]

    assert compiled() == []
    pointwise.act_mul(torch.zeros(2, 5, 16), torch.zeros(2, 5, 16), "silu")
    assert compiled() == [(cpu, 10, 16, False)]
    pointwise.act_mul(*torch.zeros(2, 5, 32).chunk(2, dim=-1), "silu")
    assert compiled() == [(cpu, 10, 16, False), (cpu, 10, 16, True)]
    pointwise.act_mul(*torch.zeros(1, 64).chunk(2, dim=-1), "silu")
    assert compiled()[:2] == [(cpu, 1, 32, False), (cpu, 1, 32, True)]
