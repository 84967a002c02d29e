"""The benchmark of the Engram gate, rehearsed on a CPU: what is checked, what is dropped, and what is made of times."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import engram_arms, engram_gate, results, timing
from benchmarks.__main__ import main
from benchmarks.engram_arms import Arm, Case, Data
from benchmarks.results import Figure

CASE = Case(24, 4, 16, 24, device="cpu")
LIMITS = timing.Limits(5, 0.05)


def run(*arms: Arm, modes: tuple[str, ...] = ("train",), case: Case = CASE, **more: Any) -> list[Figure]:
    chosen = (*engram_arms.select("eager"), *arms)
    return engram_gate.run(engram_gate.Options(chosen, (case,), modes, LIMITS, **more))


def arm(name: str, gate: Callable[..., Tensor], **more: Any) -> Arm:
    build = lambda data: engram_arms._of_function(engram_arms._function(gate, data), data)
    return Arm(name, name, build, devices=("cpu",), **more)


def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engram_gate", "--device", "cpu", "--repeats", "5", "--seconds-per-case", "0.05", "--save"]
    assert main([*words, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "DRY RUN" in printed
    assert "compile: unavailable: needs a cuda device" in printed
    (path,) = results.files_of("engram_gate", tmp_path)
    rows = [row.figure for row in results.read(path)]
    found = {(row.case, row.mode, row.arm) for row in rows if row.metric == "time"}
    modes = ("forward", "train", "backward", "host")
    for mode in modes:
        for name in ("eager", "fusepatch", "fusepatch_plan"):
            assert {("M48_S4_D40", mode, name), ("M48_S4_D40_E24", mode, name)} <= found
    assert ("M48_S4_D40", "train", "copy") in found
    metrics = {row.metric for row in rows}
    assert metrics == {"time", "bandwidth_fraction", "blocks_won", "error_ratio"}
    assert all(row.p50 <= 1.25 for row in rows if row.metric == "error_ratio")
    assert main([*words]) == 1  # never among the results


def test_bytes_that_must_move() -> None:
    case = Case(4096)
    row = 4096 * 5120 * 2
    assert case.least_bytes("forward") == 13 * row + 4096 * 64 + 4 * 5120 * 4
    assert case.least_bytes("backward") == 22 * row + 4096 * 64 + 2 * 4 * 5120 * 4
    assert case.least_bytes("train") == case.least_bytes("forward") + case.least_bytes("backward")


@pytest.mark.parametrize("scope", engram_arms.SCOPES)
def test_input_generations_are_what_they_say(scope: str) -> None:
    data = engram_arms.make(dataclasses.replace(CASE, scope=scope, tokens=200))
    seen = {}
    for generation in engram_arms.GENERATIONS:
        data.fill(generation)
        seen[generation] = {name: t.detach().clone() for name, t in data.tensors.items()}, data.mask.float().mean()
    assert seen["random"][1] == 1 and seen["masked"][1] == 0
    assert 0.6 < seen["holes"][1] < 1
    assert not seen["no_x"][0]["x"].any()
    assert not seen["no_embedding"][0]["kv" if scope == "gate" else "embedding"].any()
    assert seen["tiny"][0]["x"].abs().max() < 1e-3
    data.fill("random")
    assert all(torch.equal(t, seen["random"][0][name]) for name, t in data.tensors.items())


def _scaled(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: plain(*tensors) * 1.01


def _unmasked(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, kv, weight, mask: plain(x, kv, weight, torch.ones_like(mask))


def _without_a_gradient(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, kv, weight, mask: plain(x, kv, weight.detach(), mask) + 0 * weight.sum().to(x.dtype)


def _writing(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def gate(x: Tensor, kv: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        kv.data[0, 0] += 1
        return plain(x, kv, weight, mask)

    return gate


WRONG = {
    "output": (_scaled, "out has"),
    "mask": (_unmasked, "on other: out has"),
    "gradient": (_without_a_gradient, "weight"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_arm_has_no_figures(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = WRONG[what]
    figures = run(arm("wrong_one", change(engram_arms.plain_gate)))
    assert {figure.arm for figure in figures} == {"eager", "copy"}
    assert "wrong_one: wrong: " in (printed := capsys.readouterr().out)
    assert message in printed


def test_an_arm_that_goes_wrong_while_timed_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def gate(*tensors: Tensor) -> Tensor:
        calls.append(1)
        out = engram_arms.plain_gate(*tensors)
        return out if len(calls) < 20 else out * 1.5

    assert "late" not in {figure.arm for figure in run(arm("late", gate))}
    assert "late: wrong: after timing" in capsys.readouterr().out


def test_an_arm_that_writes_to_its_inputs_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="wrote to its inputs"):
        run(arm("writer", _writing(engram_arms.plain_gate)))


def test_an_arm_that_leaves_something_unwritten_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def build(data: Data) -> engram_arms.Built:
        built = engram_arms._of_function(engram_arms._function(engram_arms.plain_gate, data), data)
        out = built.forward().clone()

        def forward() -> Tensor:
            out[1:] = built.forward()[1:]
            return out

        return dataclasses.replace(built, forward=forward, owned=(out,))

    run(Arm("lazy", "lazy", build, devices=("cpu",)))
    assert "lazy: wrong: on other: the forward pass alone has a relative error of inf" in capsys.readouterr().out


class Capture(TorchDispatchMode):
    """Stands in for the capture of a CUDA graph, which replays addresses: notes the memory that it found, not made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[StorageWeakRef] = set()
        self.made: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.found |= memory(args, kwargs) - self.made
        self.made |= memory(results) - self.found
        return results


def memory(*tensors: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(t.untyped_storage()) for t in tree_leaves(tensors) if isinstance(t, Tensor)}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Capture]:
    """Those that an arm makes on a CPU, whose graphs replay nothing."""
    made: list[Capture] = []

    def capture(graph: object) -> Capture:
        made.append(Capture())
        return made[-1]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return made


@pytest.mark.parametrize("scope", engram_arms.SCOPES)
@pytest.mark.parametrize("name", ["eager_graph", "fusepatch_graph", "fusepatch_plan_graph"])
def test_a_graph_keeps_the_memory_that_it_replays_into(captures: list[Capture], name: str, scope: str) -> None:
    """What is freed becomes other tensors', such as the truth that arms are judged by."""
    _, chosen = engram_arms.select(name)  # the first is always eager
    case = dataclasses.replace(CASE, scope=scope)
    data = engram_arms.make(case)
    with chosen.context(case):
        built = chosen.build(data)
    gc.collect()
    given = memory(data.leaves, data.mask, data.grad_out)
    assert len(captures) == 2
    for capture in captures:
        assert capture.found >= memory(data.leaves)
        assert not [each for each in capture.found if each.expired()]
        # Else a replay that leaves something unwritten would find what the last one wrote.
        assert capture.found - given <= memory(built.owned)
    del built
    gc.collect()
    lost = [each for capture in captures for each in capture.found - given if each.expired()]
    assert bool(lost) == (name == "fusepatch_plan_graph")  # whose memory it is, and nobody else's


def test_the_check_is_tested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(engram_gate, "error_of", lambda actual, expected: 0.0)
    run()
    assert "the check is no check" in capsys.readouterr().out


@pytest.mark.parametrize("scope", engram_arms.SCOPES)
def test_the_plain_gate_is_what_compilers_can_follow(scope: str) -> None:
    data = engram_arms.make(dataclasses.replace(CASE, scope=scope))
    function = engram_arms._function(engram_arms.plain_gate, data)
    built = engram_arms._of_function(torch.compile(function, backend="aot_eager", fullgraph=True), data)
    expected = engram_arms._eager(data).train()
    found = built.train()
    assert all(engram_gate.error_of(found[name], expected[name].float()) < 1e-2 for name in expected)
    torch._dynamo.reset()


def test_errors() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    assert engram_gate.error_of(one, one) == engram_gate.error_of(zero, zero) == 0
    assert engram_gate.error_of(one, zero) == engram_gate.error_of(one[:2], one) == math.inf
    assert engram_gate.error_of(one * math.nan, one) == math.inf


def test_what_arrives_at_the_consumer() -> None:
    make = partial(Figure, "engram_gate", metric="time", unit="ms", p20=0.0, p80=0.0, n=5)
    whole = "M64_S4_D40_E24"
    figures = [
        make(case="M64_S4_D40", mode="train", arm="eager", p50=3.0),
        make(case="M64_S4_D40", mode="train", arm="fusepatch", p50=1.0),
        make(case=whole, mode="train", arm="eager", p50=10.0),
        make(case=whole, mode="train", arm="fusepatch", p50=8.2),
    ]
    assert engram_gate.arrival(figures) == (
        f"{whole} train: of what fusepatch saves over eager in the gate alone, 0.90 arrives"
    )


def test_selecting() -> None:
    names = [each.name for each in engram_arms.select(None)]
    assert "fusepatch_plan_graph" in names and "three_kernels_graph" in names
    assert not [name for name in names if name.startswith("variant_")]
    variants = [each.name for each in engram_arms.select("variants")]
    assert variants[0] == "eager" and len(variants) == 1 + len(engram_arms.VARIANTS)
    with pytest.raises(ValueError, match="no arm 'nobody'"):
        engram_arms.select("nobody")
