"""`tune()`, its profile, and how choosing a backend follows it. What it measures on a GPU: compat_tests/gpu."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusepatch
from fusepatch import catalogue, cli, disk, profiles, selfcheck, settings
from fusepatch.decline import Reason, Route, decision
from fusepatch.kernels import backends
from fusepatch.kernels.gated_mlp import choose, library
from fusepatch.profiles import Measured, Profile
from fusepatch.tuning import measure, timing
from fusepatch.tuning import tune as tuning
from support import tiny_llama

CUDA = torch.device("cuda", 0)
KIND = "NVIDIA Test (9, 0)"
FUSED, POINTWISE, ORIGINAL = Route
PLAIN = choose.Problem(FUSED, CUDA, torch.bfloat16, 64, 96, "silu", bias=False)
BETWEEN = PLAIN._replace(route=POINTWISE)

QUICK = choose.Backend(
    name="hopper",  # names that the environment may give
    module="no.such.module",
    routes=frozenset({FUSED}),
    dtypes=frozenset({torch.bfloat16}),
    fused_bias=False,
    admits=lambda problem, tokens: tokens >= 1000,
)
SLOW = dataclasses.replace(
    QUICK, name="triton", routes=frozenset({POINTWISE}), admits=lambda problem, tokens: tokens >= 10
)
TABLE = (SLOW, QUICK)
CHOSEN = dataclasses.replace(QUICK, choice="large-groups", note="in large groups")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A GPU that looks like a Hopper, a table with one backend per route, and a cache of our own."""
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(selfcheck, "device_kind", lambda device: KIND if device.type == "cuda" else device.type)
    monkeypatch.setattr(choose, "BACKENDS", TABLE)
    monkeypatch.setattr(choose, "CHOICES", (CHOSEN,))
    begin_anew()
    yield
    begin_anew()


def begin_anew() -> None:
    """As a new `accelerate()` does."""
    settings.install(None)
    choose.TABLE.forget()


def keep(*found: tuple[int, str | None], problems: tuple[choose.Problem, ...] = (PLAIN, BETWEEN)) -> Path:
    """Writes a profile that says so, for this kind of GPU."""
    identity = profiles.identity(KIND)
    for tokens, backend in found:
        assert profiles.add(identity, of(tokens, backend, *problems))
    begin_anew()
    return profiles.place(identity)


def of(tokens: int, backend: str | None, *problems: choose.Problem, module: str = "module") -> Measured:
    names = tuple(map(backends.described, problems))
    return Measured("gated_mlp", module, names, tokens, ("train",), backend, {})


# -------------------------------------------------------------------------------------------------------- following it


def test_without_a_profile_the_table_decides() -> None:
    assert choose.choose(PLAIN, 999) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN, 1000) is QUICK


def test_a_winner_serves_from_where_it_was_measured() -> None:
    """Below the fewest tokens that were measured, the table decides."""
    keep((100, "hopper"))
    assert choose.choose(PLAIN, 99) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN, 100) is QUICK
    assert choose.choose(PLAIN, 10**6) is QUICK


def test_where_the_library_was_fastest_nothing_serves() -> None:
    keep((2000, None))
    assert choose.choose(PLAIN, 1999) is QUICK
    assert choose.choose(PLAIN, 2000) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(BETWEEN, 2000) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(BETWEEN, 1999) is SLOW
    assert choose.choose(PLAIN, 2001) is QUICK  # more than any that was measured: the table's


def test_between_two_that_were_measured_the_lower_one_counts() -> None:
    keep((2000, None), (4000, "hopper"))
    assert choose.choose(PLAIN, 3999) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN, 4001) is QUICK


@pytest.mark.parametrize("other", [None, "hopper", "triton"])
def test_two_kinds_of_modules_that_pose_one_problem(other: str | None) -> None:
    """Two classes of the same sizes: where either was slower so, nothing serves; whatever the order."""
    for first, second in (("hopper", other), (other, "hopper")):
        identity = profiles.identity(KIND)
        for module, backend in (("one", first), ("another", second)):
            assert profiles.add(identity, of(100, backend, PLAIN, module=module))
        begin_anew()
        assert choose.choose(PLAIN, 100) is (QUICK if other == "hopper" else Reason.SIZE_NOT_ADMITTED)


def test_what_won_where_the_route_is_not_asked_says_nothing_there() -> None:
    """A plain module, served whole, and one with adapters, of which only the pointwise part can be."""
    identity = profiles.identity(KIND)
    profiles.add(identity, of(5, "hopper", PLAIN, BETWEEN, module="plain"))
    profiles.add(identity, of(5, "triton", BETWEEN, module="adapters"))
    begin_anew()
    assert choose.choose(PLAIN, 5) is QUICK
    assert choose.choose(BETWEEN, 5) is SLOW


def test_a_winner_that_waits_for_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the table decides."""
    monkeypatch.setattr(choose, "BACKENDS", (SLOW, dataclasses.replace(QUICK, warmed_only=True, named_only=True)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=0))
    winner = choose.BACKENDS[1]
    keep((100, "hopper"))
    assert choose.choose(PLAIN, 100) is Reason.NO_KERNEL
    assert choose.choose(BETWEEN, 100) is SLOW
    choose.admit(winner, PLAIN, 100)
    assert choose.choose(PLAIN, 100) is winner


def test_where_another_route_was_fastest() -> None:
    """The fused route declines for the pointwise one; and a pointwise call is the table's where the fused one won."""
    keep((100, "triton"), (4000, "hopper"))
    assert choose.choose(PLAIN, 3999) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(BETWEEN, 3999) is SLOW
    assert choose.choose(PLAIN, 4000) is QUICK
    assert choose.choose(BETWEEN, 4000) is SLOW
    assert choose.choose(BETWEEN, 9) is Reason.SIZE_NOT_ADMITTED


def test_winners_with_few_tokens_are_not_declined_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "BACKENDS", (dataclasses.replace(QUICK, fewest_tokens=1000),))
    assert choose.is_too_few(100, CUDA)
    keep((50, None), (100, "hopper"))
    assert choose.is_too_few(99, CUDA)
    assert not choose.is_too_few(100, CUDA)


def test_another_problem_is_the_tables() -> None:
    keep((1, "hopper"))
    for changes in ({"inner": 128}, {"activation": "gelu"}, {"hidden": 128}):
        assert choose.choose(PLAIN._replace(**changes), 999) is Reason.SIZE_NOT_ADMITTED
    keep((1, "hopper"), problems=(PLAIN._replace(device=torch.device("cuda", 1)),))
    assert choose.choose(PLAIN, 1) is QUICK  # another device of this kind


def test_backends_that_serve_only_where_named_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    unproved = dataclasses.replace(QUICK, named_only=True)
    monkeypatch.setattr(choose, "BACKENDS", (SLOW, unproved))
    assert choose.choose(PLAIN, 5000) is Reason.NO_KERNEL
    keep((100, "hopper"))
    assert choose.choose(PLAIN, 5000) is unproved


@pytest.mark.parametrize("outcome", [selfcheck.Outcome.FAILED, selfcheck.Outcome.INCONCLUSIVE])
def test_a_winner_is_still_checked_first(monkeypatch: pytest.MonkeyPatch, outcome: selfcheck.Outcome) -> None:
    checked = dataclasses.replace(QUICK, check="some.module")
    monkeypatch.setattr(choose, "BACKENDS", (SLOW, checked))
    monkeypatch.setattr(selfcheck, "verdict", lambda *_: selfcheck.Verdict(outcome))
    keep((100, "hopper"))
    assert choose.choose(PLAIN, 100) is selfcheck.Verdict(outcome).reason


def test_a_winner_that_can_not_serve_here() -> None:
    keep((100, "hopper"), problems=(PLAIN._replace(dtype=torch.float16),))
    assert choose.choose(PLAIN._replace(dtype=torch.float16), 100) is Reason.DTYPE


def test_a_backend_that_is_gone() -> None:
    keep((100, "gone"))
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN, 1000) is QUICK


def test_a_choice_serves_where_it_won() -> None:
    """With no profile, for fewer tokens, and for a direct call of the op, the backend's own rules do."""
    assert choose.choose(PLAIN, 5000) is QUICK
    keep((100, "hopper"), (2000, "hopper/large-groups"))
    assert choose.choose(PLAIN, 1999) is QUICK
    assert choose.choose(PLAIN, 2000) is CHOSEN
    assert choose.choose(PLAIN, 10**6) is CHOSEN
    assert choose.choose(PLAIN, 2000, any_size=True) is QUICK
    assert choose.choose(BETWEEN, 2000) is SLOW  # of the route that it does not have, it says nothing
    assert choose.choose(PLAIN._replace(inner=128), 2000) is QUICK


def test_a_choice_that_is_measured_serves_where_it_would_run_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dataclasses.replace(CHOSEN, admits=lambda problem, tokens: tokens >= 300)
    monkeypatch.setattr(choose, "CHOICES", (chosen,))
    settings.install(measure._naming("gated_mlp", "hopper/large-groups"))
    assert choose.choose(PLAIN, 299) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN, 300) is chosen
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "hopper/large-groups")
    with pytest.raises(settings.SettingsError):
        settings.read()


@pytest.mark.parametrize("first", ["hopper", "hopper/large-groups"])
def test_a_choice_that_there_is_not(caplog: pytest.LogCaptureFixture, first: str) -> None:
    """The whole profile is ignored, which is said once, and is measured anew."""
    caplog.set_level(logging.INFO, "fusepatch")
    keep((50, None), (100, first), (2000, "hopper/odd"))
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN, 2000) is QUICK
    assert choose.choose(PLAIN._replace(inner=128), 2000) is QUICK
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("a profile is ignored, since it was made with hopper/odd (here -). `fusepatch tune` makes")
    identity = profiles.identity(KIND)
    assert profiles.read(identity) is None
    keep((100, "hopper/large-groups"))
    assert [each.tokens for each in profiles.read(identity).measured] == [100]  # type: ignore[union-attr]


PASSED = selfcheck.Verdict(selfcheck.Outcome.PASSED)
FAILED = selfcheck.Verdict(selfcheck.Outcome.FAILED)


@pytest.mark.parametrize(
    ("winner", "checked", "failing", "asked", "served"),
    [
        (None, True, "", ["hopper"], "hopper"),
        ("hopper", True, "", ["hopper", "hopper"], "hopper"),
        ("hopper/large-groups", True, "", ["hopper", "hopper", "hopper/large-groups"], "hopper/large-groups"),
        ("hopper/large-groups", False, "", ["hopper", "hopper"], "hopper/large-groups"),
        ("hopper/large-groups", True, "hopper", ["hopper", "hopper", "hopper"], Reason.SELFCHECK_FAILED),
        (
            "hopper/large-groups",
            True,
            "hopper/large-groups",
            ["hopper", "hopper", "hopper/large-groups", "hopper"],
            "hopper",
        ),
    ],
)
def test_a_choice_is_checked_where_it_won_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
    winner: str | None,
    checked: bool,
    failing: str,
    asked: list[str],
    served: Any,
) -> None:
    """After the backend's own check, whose kernels it launches too; asked first for what the table says. Where the
    choice's own fails, the backend serves without it."""
    found: list[str] = []

    def verdict(check: selfcheck.Check, device: torch.device) -> selfcheck.Verdict:
        label, _, case = check.case.partition(" ")
        found.append(label)
        assert (check.module, case) == ("some.module", "fused bfloat16 silu")
        return FAILED if label == failing else PASSED

    own = dataclasses.replace(QUICK, check="some.module")
    monkeypatch.setattr(choose, "BACKENDS", (SLOW, own))
    choice = dataclasses.replace(CHOSEN, check="some.module" if checked else None)
    monkeypatch.setattr(choose, "CHOICES", (choice,))
    monkeypatch.setattr(selfcheck, "verdict", verdict)
    if winner is not None:
        keep((5000, winner))
    chosen = choose.choose(PLAIN, 5000)
    assert (chosen if isinstance(chosen, Reason) else chosen.label) == served
    assert found == asked


def test_a_graph_is_captured_with_the_choice_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(QUICK, compiled=lambda problem, tokens: True)
    choice = dataclasses.replace(CHOSEN, compiled=lambda problem, tokens: tokens >= 200)
    monkeypatch.setattr(choose, "BACKENDS", (SLOW, own))
    monkeypatch.setattr(choose, "CHOICES", (choice,))
    keep((100, "hopper/large-groups"))
    choose.choose(PLAIN, 100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose.choose(PLAIN, 100) is Reason.CAPTURE_COLD
    assert choose.choose(PLAIN, 200) is choice


def test_compiled_code_runs_the_backends_own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    own, choice = (dataclasses.replace(each, fewest_compiled=lambda problem: 77) for each in (QUICK, CHOSEN))
    monkeypatch.setattr(choose, "BACKENDS", (SLOW, own))
    monkeypatch.setattr(choose, "CHOICES", (choice,))
    keep((100, "hopper/large-groups"))
    assert choose.choose(PLAIN, 100) is choice
    assert library.serving(PLAIN) == ("hopper", 77)


FRESH = """
import sys, torch
from fusepatch import selfcheck, settings
from fusepatch.kernels import backends
from fusepatch.kernels.gated_mlp import choose, hopper_configuration, hopper_products
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.is_current_stream_capturing = lambda: False
selfcheck.device_kind = lambda device: sys.argv[1]
selfcheck.verdict = lambda check, device: selfcheck.Verdict(selfcheck.Outcome.PASSED)
backends.missing = lambda backend: ()
hopper_products.clusters_of = lambda device: 66
settings.install(settings.read())
problem = choose.Problem(choose.Route.FUSED, torch.device("cuda", 0), torch.bfloat16, 4096, 14336, "silu", bias=False)
for tokens in (4096, 8192):
    found = choose.choose(problem, tokens)
    print(tokens, found.label, backends.load(found).dual_gemm_act)
"""


def test_a_fresh_process_follows_it(tmp_path: Path) -> None:
    """The real table's choices, on a GPU that looks like a Hopper."""
    large = choose.Problem(FUSED, CUDA, torch.bfloat16, 4096, 14336, "silu", bias=False)
    keep((4096, "hopper"), (8192, "hopper/small-groups"), problems=(large,))
    environ = {**os.environ, "PYTHONPATH": str(Path(fusepatch.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, KIND], env=environ, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("4096 hopper <function dual_gemm_act")
    assert second.startswith("8192 hopper/small-groups functools.partial(<function dual_gemm_act")
    assert "choice='small-groups'" in second


@pytest.mark.parametrize(("variable", "value"), [("BACKEND", "hopper"), ("ROUTE", "original")])
def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(f"FUSEPATCH_GATED_MLP_{variable}", value)
    keep((100, None))
    assert choose.choose(PLAIN, 100) is (QUICK if variable == "BACKEND" else Reason.ROUTE_BOUND)


def test_a_direct_call_of_the_op_does_not_ask_it() -> None:
    keep((100, None))
    assert choose.choose(PLAIN, 100, any_size=True) is QUICK


def test_a_profile_that_is_written_meanwhile_changes_nothing() -> None:
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    profiles.add(profiles.identity(KIND), of(100, "hopper", PLAIN))
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN._replace(inner=128), 100) is Reason.SIZE_NOT_ADMITTED
    in_force = settings.current()
    for _ in range(20):  # as nested accelerated() blocks
        settings.install(settings.read())
        choose.choose(PLAIN, 1)
    settings.install(in_force)
    choose.TABLE.forget()
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    begin_anew()
    assert choose.choose(PLAIN, 100) is QUICK


# ------------------------------------------------------------------------------------------------------ whose it is


@pytest.mark.parametrize("what", sorted(profiles.identity("cpu")))
def test_a_profile_from_elsewhere_is_ignored_and_said(caplog: pytest.LogCaptureFixture, what: str) -> None:
    profiles.add({**profiles.identity(KIND), what: "another"}, of(100, "hopper", PLAIN))
    begin_anew()
    caplog.set_level(logging.INFO, "fusepatch")
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    assert choose.choose(PLAIN._replace(inner=128), 100) is Reason.SIZE_NOT_ADMITTED
    (said,) = [record.getMessage() for record in caplog.records]  # once
    assert f"a profile is ignored, since it was made with {what} another (here " in said


def test_a_profile_under_anothers_name_is_ignored() -> None:
    path = keep((100, "hopper"))
    stored = json.loads(path.read_text())
    stored["identity"]["driver"] = "another"
    path.write_text(json.dumps(stored))
    begin_anew()
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: "", id="empty"),
        pytest.param(lambda text: text[: len(text) // 2], id="cut short"),
        pytest.param(lambda text: "[]", id="a list"),
        *(
            pytest.param(lambda text, n=number: text.replace('"tokens": 100', f'"tokens": {n}'), id=number[:9])
            for number in ('"100"', "-1", "0", "true", "1e999", "1.5", "9" * 5000, "null", "[" * 100_000)
        ),
        pytest.param(lambda text: text.replace('"over_library": {}', '"over_library": {"a": {"b": "c"}}'), id="text"),
        pytest.param(lambda text: text.replace('"hopper"', "7"), id="no name"),
        pytest.param(lambda text: text.replace('"measured"', '"other"'), id="a key is gone"),
    ],
)
def test_a_damaged_profile_is_ignored_and_said(caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]) -> None:
    path = keep((100, "hopper"))
    path.write_text(damage(path.read_text()))
    begin_anew()
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_profile_that_others_could_have_written_is_ignored(caplog: pytest.LogCaptureFixture, mode: int) -> None:
    path = keep((100, "hopper"))
    path.parent.chmod(mode)
    begin_anew()
    disk._warned.clear()
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED
    assert f"has mode {mode:04o}" in caplog.text


def test_a_cache_that_can_not_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """As root's, after a run under sudo."""
    keep((100, "hopper"))

    def closed(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", closed)
    monkeypatch.setattr(Path, "read_text", closed)
    assert choose.choose(PLAIN, 100) is Reason.SIZE_NOT_ADMITTED


def test_two_processes_that_tune_at_once() -> None:
    """Neither loses what the other measured."""
    identity = profiles.identity(KIND)
    threads = [
        threading.Thread(target=lambda n=n: [profiles.add(identity, of(t, None, module=f"m{n}")) for t in range(1, 6)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = profiles.read(identity)
    assert found is not None
    assert len(found.measured) == 20
    assert not list(profiles.place(identity).parent.glob("*.half"))


def test_a_profile_that_is_in_force_is_said(caplog: pytest.LogCaptureFixture) -> None:
    keep((100, "hopper"), (200, None))
    caplog.set_level(logging.INFO, "fusepatch")
    choose.choose(PLAIN, 100)
    assert f"the profile that `fusepatch tune` made for {KIND} is in force: 2 sizes" in caplog.text


def test_what_is_written_is_what_is_read() -> None:
    identity = profiles.identity(KIND)
    whole = Measured("gated_mlp", "m", ("a", "b"), 7, ("train",), None, {"triton": {"train": 1.5}}, {"hopper": "dtype"})
    for each in (whole, dataclasses.replace(whole, tokens=8), whole):
        assert profiles.add(identity, each)
    found = profiles.read(identity)
    assert found == Profile(identity, (dataclasses.replace(whole, tokens=8), whole))
    assert found.find("gated_mlp", "m", 7, ("train",)) == whole
    assert found.find("gated_mlp", "m", 7, ("forward",)) is None


# ---------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A CPU, with times that the test says: by arm, in milliseconds, or a function of the mode."""
    said: dict[str, Any] = {"library": 10.0, "reference": 5.0, "compared": []}
    monkeypatch.setattr(choose, "BACKENDS", (choose.REFERENCE,))

    def compare(arms: dict[str, Callable[[], object]], seconds: float, device: torch.device) -> dict[str, timing.Times]:
        said["compared"].append({name: arm() for name, arm in arms.items()})
        times = {name: said[name] for name in arms}
        return {
            name: time if isinstance(time, timing.Times) else timing.Times(time * 0.99, time, time * 1.01)
            for name, time in times.items()
        }

    monkeypatch.setattr(timing, "compare", compare)
    return said


def test_each_arm_runs_what_it_is_named_after(rehearsal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's arm is not served by us, the others are; and both compute the same."""
    ran: list[str] = []
    real = choose.REFERENCE.module
    module = __import__(real, fromlist=["dual_gemm_act"])
    forward = module.dual_gemm_act
    monkeypatch.setattr(module, "dual_gemm_act", lambda *a, **k: (ran.append("ours"), forward(*a, **k))[1])
    model = tiny_llama(torch.float32)
    report = tuning.tune(model, 32, device="cpu")
    assert len(ran) == 5  # while warming, and twice in both modes
    train, alone = rehearsal["compared"]
    for compared in (train, alone):
        ours, stock = compared["reference"], compared["library"]
        for a, b in zip(*((each if isinstance(each, tuple) else (each,)) for each in (ours, stock)), strict=True):
            torch.testing.assert_close(a, b)
    assert len(train["library"]) == 4  # gradients of x and three weights
    assert isinstance(alone["library"], torch.Tensor)
    (found,) = report.measured
    assert found.backend == "reference"
    assert found.over_library == {"reference": {"train": 0.5, "forward": 0.5}}
    described = backends.described(PLAIN._replace(dtype=torch.float32))
    assert described in found.problems
    assert (report.new, report.left, report.profile) == (1, 0, None)  # a rehearsal is not kept
    assert fusepatch.status().targets[0].state == "restored"
    assert not list(settings.current().cache_dir.rglob("*.json"))


@pytest.mark.parametrize(
    ("ours", "wins"),
    [
        (9.7, True),
        (9.85, False),  # ranges meet
        (11.0, False),
        (timing.Times(4.0, 9.0, 10.5), False),  # faster in the middle, and not apart
    ],
)
def test_what_wins(rehearsal: dict[str, Any], ours: Any, wins: bool) -> None:
    rehearsal["reference"] = ours
    (found,) = tuning.tune(tiny_llama(torch.float32), 32, device="cpu").measured
    assert (found.backend == "reference") is wins


def test_a_backend_that_loses_in_one_mode_does_not_win(
    rehearsal: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compare = tiny_llama(torch.float32), timing.compare

    def slow_forward(arms: Any, seconds: float, device: torch.device) -> Any:
        rehearsal["reference"] = 5.0 if len(rehearsal["compared"]) % 2 == 0 else 10.2
        return compare(arms, seconds, device)

    monkeypatch.setattr(timing, "compare", slow_forward)
    (found,) = tuning.tune(model, 32, device="cpu").measured
    assert found.backend is None
    assert found.over_library == {"reference": {"train": 0.5, "forward": 1.02}}
    (found,) = tuning.tune(model, 32, modes=("train",), device="cpu").measured
    assert found.backend == "reference"


@pytest.fixture
def choices(rehearsal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three ways for the reference to do the same: those that ran, in order. Some other backend has one too."""
    ran: list[str] = []
    wide, narrow, same = (
        dataclasses.replace(choose.REFERENCE, choice=name, note=f"cut {name}") for name in ("wide", "narrow", "same")
    )
    monkeypatch.setattr(choose, "CHOICES", (wide, narrow, same, CHOSEN))
    labels = tuple(each.label for each in choose.CHOICES)
    options = dataclasses.replace(settings.OPS["gated_mlp"], choices=labels)
    monkeypatch.setitem(settings.OPS, "gated_mlp", options)
    module: Any = __import__(choose.REFERENCE.module, fromlist=["dual_gemm_act"])

    def with_choice(choice: str) -> types.SimpleNamespace:
        def forward(*given: Any, **flags: Any) -> Any:
            ran.append(choice)
            return module.dual_gemm_act(*given, **flags)

        return types.SimpleNamespace(dual_gemm_act=forward, gemm_dact=module.gemm_dact)

    monkeypatch.setattr(module, "with_choice", with_choice, raising=False)
    plain = choose.choose

    def without_same(*given: Any, **flags: Any) -> Any:
        found = plain(*given, **flags)
        return Reason.SIZE_NOT_ADMITTED if found is same else found

    monkeypatch.setattr("fusepatch.shims.gated_mlp.choose", without_same)
    rehearsal |= {"reference/wide": 4.0, "reference/narrow": 4.5}
    return ran


def test_the_winners_choices_are_measured_after_it(rehearsal: dict[str, Any], choices: list[str]) -> None:
    """Against the backend without one, those alone that would run anything else; no other backend's."""
    told: list[str] = []
    report = tuning.tune(tiny_llama(torch.float32), 32, device="cpu", tell=told.append)
    (found,) = report.measured
    backend, chosen = ["library", "reference"], ["reference", "reference/wide", "reference/narrow"]
    assert [list(arms) for arms in rehearsal["compared"]] == [backend, backend, chosen, chosen]
    assert choices == [*["wide"] * 3, *["narrow"] * 3, *["wide", "narrow"] * 2]
    for arms in rehearsal["compared"]:
        first, *others = (each if isinstance(each, tuple) else (each,) for each in arms.values())
        for other in others:
            torch.testing.assert_close(other, first)
    assert found.backend == "reference/wide"
    assert found.over_library == {
        "reference": {"train": 0.5, "forward": 0.5},
        "reference/wide": {"train": 0.4, "forward": 0.4},
        "reference/narrow": {"train": 0.45, "forward": 0.45},
    }
    assert found.why_not == {}
    assert len(found.problems) == len(set(found.problems))
    assert told == ["[1/1] LlamaMLP x2, 32 tokens: reference/wide"]
    assert "reference/wide 0.400 train / 0.400 forward" in str(report)


@pytest.mark.parametrize(
    ("train", "forward", "wins"),
    [
        (4.85, 5.0, True),
        (4.92, 4.0, False),  # in the first mode, ranges meet
        (4.0, 5.05, True),  # in another mode, they may
        (4.0, 5.2, False),
        (6.0, 4.0, False),
    ],
)
def test_which_choice_wins(
    rehearsal: dict[str, Any],
    choices: list[str],
    monkeypatch: pytest.MonkeyPatch,
    train: float,
    forward: float,
    wins: bool,
) -> None:
    compare = timing.compare

    def by_mode(arms: Any, seconds: float, device: torch.device) -> Any:
        rehearsal["reference/wide"] = train if len(rehearsal["compared"]) % 2 == 0 else forward
        return compare(arms, seconds, device)

    monkeypatch.setattr(timing, "compare", by_mode)
    rehearsal["reference/narrow"] = 5.0
    (found,) = tuning.tune(tiny_llama(torch.float32), 32, device="cpu").measured
    assert found.backend == ("reference/wide" if wins else "reference")


def test_a_choice_that_would_be_slower_than_the_library_somewhere_does_not_win(
    rehearsal: dict[str, Any], choices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = timing.compare

    def close_forward(arms: Any, seconds: float, device: torch.device) -> Any:
        is_train = len(rehearsal["compared"]) % 2 == 0
        rehearsal["reference"] = 5.0 if is_train else 10.0
        rehearsal["reference/wide"] = rehearsal["reference/narrow"] = 4.0 if is_train else 10.05
        return compare(arms, seconds, device)

    monkeypatch.setattr(timing, "compare", close_forward)
    (found,) = tuning.tune(tiny_llama(torch.float32), 32, device="cpu").measured
    assert found.backend == "reference"


def test_where_no_backend_won_no_choice_is_measured(rehearsal: dict[str, Any], choices: list[str]) -> None:
    rehearsal["reference"] = 11.0
    (found,) = tuning.tune(tiny_llama(torch.float32), 32, device="cpu").measured
    assert found.backend is None
    assert choices == []


def test_a_choice_that_raises_does_not_stop_the_others(
    rehearsal: dict[str, Any], choices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = __import__(choose.REFERENCE.module, fromlist=["dual_gemm_act"])
    plain = module.with_choice

    def failing(choice: str) -> Any:
        if choice == "wide":
            raise RuntimeError("launch failed\nand more")
        return plain(choice)

    monkeypatch.setattr(module, "with_choice", failing)
    (found,) = tuning.tune(tiny_llama(torch.float32), 32, device="cpu").measured
    assert found.backend == "reference/narrow"
    assert dict(found.why_not) == {"reference/wide": "RuntimeError: launch failed"}


def test_a_dispatch_mode_sees_the_choice_and_status_says_it(rehearsal: dict[str, Any], choices: list[str]) -> None:
    """Operators are given its label: eager code inside of a mode runs what it runs outside."""
    model, seen = tiny_llama(torch.float32), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is library._dual_gemm_act._opoverload:
                seen.append(args[-1])
            return function(*args, **(kwargs or {}))

    with fusepatch.accelerated("gated_mlp"), settings.in_force(measure._naming("gated_mlp", "reference/wide")):
        out = mlp_of(model)(torch.ones(4, 64))
        with Mode():
            assert torch.equal(mlp_of(model)(torch.ones(4, 64)), out)
        status = fusepatch.status()
        assert str(fusepatch.explain(model)).endswith("\ncut wide")  # once for both of its layers
        (target,) = (each for each in catalogue.TARGETS if each.name == "gated_mlp/transformers")
        forward = catalogue.forward_of(type(mlp_of(model)))
        explained = target.shim.decide(mlp_of(model), forward, catalogue.Assumed(4))
    assert explained is decision(FUSED, note="cut wide")
    assert seen == ["reference/wide"]
    assert choices == ["wide", "wide"]
    assert "cut wide" in str(status)


def test_what_can_not_be_served_is_said(rehearsal: dict[str, Any]) -> None:
    model = tiny_llama(torch.float32)
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.act_fn = nn.ReLU()
    (found,) = tuning.tune(model, 32, device="cpu").measured
    assert (found.backend, dict(found.why_not)) == (None, {"reference": "activation"})
    assert rehearsal["compared"] == []


def test_each_kind_is_measured_once_and_the_model_is_left_alone(rehearsal: dict[str, Any]) -> None:
    model = tiny_llama(torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told: list[str] = []
    report = tuning.tune(model, [64, 32, 64], device="cpu", tell=told.append)
    assert [each.tokens for each in report.measured] == [32, 64]
    assert told == ["[1/2] LlamaMLP x2, 32 tokens: reference", "[2/2] LlamaMLP x2, 64 tokens: reference"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_on_the_meta_device(rehearsal: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = tiny_llama(torch.float32)
    (found,) = tuning.tune(model, 32, device="cpu", dtype=torch.bfloat16).measured
    assert found.module.endswith("bfloat16")
    assert any("dtype=torch.bfloat16" in problem for problem in found.problems)


# ---------------------------------------------------------------------------------- resuming, and ending in time


@pytest.fixture
def kept(rehearsal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[measure.Case]:
    """A GPU whose measurements take no GPU: what is measured, in order."""
    done: list[measure.Case] = []

    def one(case: measure.Case, modes: Any, seconds: float, device: torch.device) -> Measured:
        done.append(case)
        return Measured(case.target.op, case.name, ("problem",), case.tokens, modes, "hopper", {})

    monkeypatch.setattr(tuning, "measure", one)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return done


def test_what_was_measured_is_not_measured_again(kept: list[measure.Case]) -> None:
    model = tiny_llama(torch.float32)
    assert tuning.tune(model, [8], device="cuda:0").new == 1
    report = tuning.tune(model, [8, 16], device="cuda:0")
    assert [(case.tokens, case.modules) for case in kept] == [(8, 2), (16, 2)]
    assert (report.new, report.left, len(report.measured)) == (1, 0, 2)
    assert report.profile is not None
    assert len(json.loads(report.profile.read_text())["measured"]) == 2
    assert tuning.tune(model, [8, 16], device="cuda:0", again=True).new == 2
    assert "2 measured now, 0 before; kept in" in str(tuning.tune(model, [8, 16], device="cuda:0", again=True))


def test_a_choice_that_won_is_kept_and_not_measured_again(
    kept: list[measure.Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tuning.measure
    winner = lambda *given: dataclasses.replace(one(*given), backend="hopper/large-groups")
    monkeypatch.setattr(tuning, "measure", winner)
    model, told = tiny_llama(torch.float32), list[str]()
    report = tuning.tune(model, 8, device="cuda:0")
    assert report.profile is not None
    assert json.loads(report.profile.read_text())["measured"][0]["backend"] == "hopper/large-groups"
    again = tuning.tune(model, 8, device="cuda:0", tell=told.append)
    assert (again.new, again.measured) == (0, report.measured)
    assert told == ["[1/1] LlamaMLP x2, 8 tokens: measured before, hopper/large-groups"]


def test_what_is_stopped_is_kept(kept: list[measure.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    model, one = tiny_llama(torch.float32), tuning.measure

    def stopped(case: measure.Case, *more: Any) -> Measured:
        if case.tokens == 16:
            raise KeyboardInterrupt
        return one(case, *more)

    monkeypatch.setattr(tuning, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(model, [8, 16, 32], device="cuda:0")
    monkeypatch.setattr(tuning, "measure", one)
    assert tuning.tune(model, [8, 16, 32], device="cuda:0").new == 2


def test_it_ends_in_time(kept: list[measure.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    one = tuning.measure

    def slow(*arguments: Any) -> Measured:
        clock[0] += 40.0
        return one(*arguments)

    monkeypatch.setattr(tuning, "measure", slow)
    report = tuning.tune(tiny_llama(torch.float32), [1, 2, 3, 4, 5], device="cuda:0", seconds=60.0)
    assert (report.new, report.left) == (2, 3)
    assert "3 left: run it again to go on" in str(report)


def test_a_case_without_enough_memory_is_left_out(kept: list[measure.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    one = tuning.measure

    def large(case: measure.Case, *more: Any) -> Measured:
        if case.tokens == 2:
            raise torch.OutOfMemoryError
        return one(case, *more)

    monkeypatch.setattr(tuning, "measure", large)
    told: list[str] = []
    report = tuning.tune(tiny_llama(torch.float32), [1, 2, 3], device="cuda:0", tell=told.append)
    assert (report.new, report.left, report.left_out) == (2, 0, ("LlamaMLP, 2 tokens: not enough memory",))
    assert "not enough memory" in told[1]
    assert "left out: LlamaMLP, 2 tokens" in str(report)


def test_other_modes_or_another_activation_are_measured_anew(kept: list[measure.Case]) -> None:
    model = tiny_llama(torch.float32)
    tuning.tune(model, 8, modes=("forward",), device="cuda:0")
    assert tuning.tune(model, 8, modes=("forward",), device="cuda:0").new == 0
    assert tuning.tune(model, 8, modes=("train",), device="cuda:0").new == 1
    for name, module in model.named_modules():
        if name.endswith("0.mlp"):
            module.act_fn = nn.GELU()
    report = tuning.tune(model, 8, modes=("train",), device="cuda:0")
    assert (report.new, len(report.measured)) == (1, 2)  # one layer has another activation


@pytest.mark.parametrize("reason", measure.TRANSIENT)
def test_what_may_pass_is_not_kept(kept: list[measure.Case], monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    one = tuning.measure
    busy = lambda *given: dataclasses.replace(one(*given), backend=None, why_not={"hopper": reason})
    monkeypatch.setattr(tuning, "measure", busy)
    report = tuning.tune(tiny_llama(torch.float32), 8, device="cuda:0")
    assert report.profile is None
    assert report.left_out == (f"LlamaMLP, 8 tokens, is not kept: {reason}",)
    monkeypatch.setattr(tuning, "measure", one)
    assert tuning.tune(tiny_llama(torch.float32), 8, device="cuda:0").new == 1


def test_one_write_that_fails_does_not_stop_the_next(kept: list[measure.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = disk.write_whole, []
    monkeypatch.setattr(disk, "write_whole", lambda *a: (calls.append(a), len(calls) != 2 and write(*a))[1])
    report = tuning.tune(tiny_llama(torch.float32), [1, 2, 3], device="cuda:0")
    assert report.profile is not None
    assert len(json.loads(report.profile.read_text())["measured"]) == 2


# --------------------------------------------------------------------------------------------------- odd models


def mlp_of(model: nn.Module) -> Any:
    return model.model.layers[0].mlp  # type: ignore[union-attr]


def freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


def quantise(model: nn.Module) -> None:
    weight = mlp_of(model).up_proj.weight
    mlp_of(model).up_proj.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)


def empty(model: nn.Module) -> None:
    mlp_of(model).up_proj.weight = nn.Parameter(torch.zeros(0, 64))


def scalar(model: nn.Module) -> None:
    mlp_of(model).scale = nn.Parameter(torch.ones(()))


def uncopyable(model: nn.Module) -> None:
    mlp_of(model).lock = threading.Lock()


def raising(model: nn.Module) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no\nmore")

    mlp_of(model).register_forward_pre_hook(fail)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (freeze, ()),
        (scalar, ()),
        (quantise, ("quantised",)),
        (empty, ("sharded",)),
        (uncopyable, ("can't be copied: TypeError",)),
        (raising, ("the library's own code fails: RuntimeError: no",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_module_that_can_not_be_measured_does_not_stop_the_others(
    rehearsal: dict[str, Any], change: Callable[[nn.Module], None], says: tuple[str, ...]
) -> None:
    model = tiny_llama(torch.float32)
    change(model)
    report = tuning.tune(model, 8, device="cpu")
    assert report.new == {scalar: 2, uncopyable: 0, raising: 0}.get(change, 1)
    assert len(report.left_out) == len(says)
    assert all(text in found for text, found in zip(says, report.left_out, strict=True))


def test_a_backend_that_raises_does_not_stop_the_others(
    rehearsal: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__(choose.REFERENCE.module, fromlist=["gemm_dact"])

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("launch failed\nand more")

    monkeypatch.setattr(module, "gemm_dact", fail)
    (found,) = tuning.tune(tiny_llama(torch.float32), 8, device="cpu").measured
    assert (found.backend, dict(found.why_not)) == (None, {"reference": "RuntimeError: launch failed"})
    assert fusepatch.status().targets[0].state == "restored"


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_what_surrounds_it_does_not_matter(rehearsal: dict[str, Any], context: Callable[[], Any]) -> None:
    expected = tuning.tune(tiny_llama(torch.float32), 8, device="cpu").measured
    with context():
        assert tuning.tune(tiny_llama(torch.float32), 8, device="cpu").measured == expected


def test_strict_mode_from_the_environment(rehearsal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_STRICT", "1")
    model = tiny_llama(torch.float32)
    assert tuning.tune(model, 8, device="cpu").new == 1
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.act_fn = nn.ReLU()
    (found,) = tuning.tune(model, 8, device="cpu").measured
    assert dict(found.why_not) == {"reference": "activation"}


def test_random_numbers_stay_the_users(rehearsal: dict[str, Any]) -> None:
    model = tiny_llama(torch.float32)
    before = torch.random.get_rng_state()
    tuning.tune(model, 8, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_where_nothing_could_run_natively_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(torch.float32)
    with fusepatch.disabled(), pytest.raises(RuntimeError, match="inside disabled"):
        tuning.tune(model, 8, device="cpu")
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match="global module hooks"):
            tuning.tune(model, 8, device="cpu")
    finally:
        handle.remove()
    monkeypatch.setenv("FUSEPATCH", "0")
    with pytest.raises(ValueError, match="FUSEPATCH=0 turns every op off"):
        tuning.tune(model, 8, device="cpu")


def test_an_op_that_is_off_is_not_tuned(rehearsal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP", "0")
    with pytest.raises(ValueError, match="has no module that could be tuned"):
        tuning.tune(tiny_llama(torch.float32), 8, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((None, 8), TypeError, "takes a torch.nn.Module"),
        (("model", []), TypeError, "must be a positive whole number, or several"),
        (("model", [8, 0]), ValueError, "must be a positive whole number, or several"),
        (("model", True), TypeError, "must be a positive whole number, or several"),
        (("model", "8"), TypeError, "must be a positive whole number, or several"),
        (("model", 1.5), TypeError, "must be a positive whole number, or several"),
        (("model", None), TypeError, "must be a positive whole number, or several"),
        ((nn.Linear(2, 2), 8), ValueError, "has no module that could be tuned"),
    ],
)
def test_arguments_of_another_kind(arguments: tuple[Any, Any], error: type[Exception], says: str) -> None:
    model, counts = arguments
    with pytest.raises(error, match=says):
        fusepatch.tune(tiny_llama(torch.float32) if model == "model" else model, counts, device="cpu")


def test_modes_of_another_kind() -> None:
    for modes in ((), ("inference",), ("train", "train")):
        with pytest.raises(ValueError, match="modes must be some of train, forward"):
            fusepatch.tune(tiny_llama(torch.float32), 8, modes=modes, device="cpu")


def test_while_accelerate_is_on() -> None:
    fusepatch.accelerate()
    with pytest.raises(RuntimeError, match="after restore"):
        fusepatch.tune(tiny_llama(torch.float32), 8, device="cpu")


# ------------------------------------------------------------------------------------------------ timing, the command


def test_timing_tells_apart_what_differs() -> None:
    """On a CPU, by a factor that no load hides; and each arm runs as often in every place of the order."""
    work = torch.randn(64, 64)
    found = timing.compare(
        {"one": lambda: work @ work, "ten": lambda: [work @ work for _ in range(100)]}, 0.2, work.device
    )
    assert found["ten"].p50 > 5 * found["one"].p50
    assert all(each.p20 <= each.p50 <= each.p80 for each in found.values())


@pytest.fixture
def folder(tmp_path: Path) -> str:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, dtype="float32"
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_command(rehearsal: dict[str, Any], folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", folder, "--tokens", "32", "64", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "reference 0.500 train / 0.500 forward" in said.out
    assert "2 measured now, 0 before; kept nowhere" in said.out
    assert said.err.count("fusepatch: [") == 2
    arguments = ["--tokens", "32", "--device", "cpu", "--for", "inference", "--dtype", "bfloat16", "--json"]
    assert cli.main(["tune", folder, *arguments]) == 0
    (found,) = json.loads(capsys.readouterr().out)["measured"]
    assert found["over_library"] == {"reference": {"forward": 0.5}}
    assert found["module"].endswith("bfloat16")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope/here/not", "--tokens", "8", "--device", "cpu"], "does not exist"),
        (["FOLDER", "--tokens", "8", "--device", "cuda:99"], "there is no device cuda:99"),
        (["FOLDER", "--tokens", "8", "--device", "nonsense"], "there is no device nonsense"),
    ],
)
def test_what_the_command_can_not_do(
    folder: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert cli.main(["tune", *(folder if each == "FOLDER" else each for each in arguments)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--tokens"], ["--tokens", "0"], ["--tokens", "8", "--minutes", "-1"]])
def test_wrong_usage(folder: str, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["tune", folder, *arguments])
    assert raised.value.code == 2
