"""`fusepatch.parity()`: what passes, what must fail, what is no verdict, and that nothing is left behind."""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

import fusepatch
from fusepatch import entry, settings
from fusepatch.decline import Reason
from fusepatch.errors import CommandError
from fusepatch.kernels.gated_mlp import reference
from fusepatch.parity_check import bound, command, models, surroundings
from fusepatch.parity_check.bound import TensorError, TensorName
from fusepatch.parity_check.check import parity
from fusepatch.parity_check.report import ParityReport, Verdict
from fusepatch.shims import gated_mlp as shim
from support import tiny_llama, tiny_llama_mlp

IDS = torch.randint(0, 128, (2, 48), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}


def build_llama() -> nn.Module:
    return tiny_llama(torch.bfloat16)


def llama_parity(**more: Any) -> ParityReport:
    return parity(build_llama, BATCH, **more)


def broken(report: ParityReport) -> set[str]:
    return {error.name for error in (*in_place(report), *report.tensors) if not error.holds}


def in_place(report: ParityReport) -> list[TensorError]:
    """Without what is said of rows."""
    return [error for error in report.in_place if not error.name.endswith(", worst row")]


def check(report: ParityReport, verdict: Verdict, reason: str) -> None:
    assert report.verdict is verdict, report
    assert reason in "; ".join(report.reasons), report
    assert not report.passed


# ------------------------------------------------------------------------------------------------------- the bound


A = TensorName("gradient", "a")
LOSS = TensorName("output", "loss")


def test_errors_are_relative_l2_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    actual = expected + 0.01 * noise
    right = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert bound.error_of(A, actual, expected) == pytest.approx(right, rel=1e-12)
    monkeypatch.setattr(bound, "_CHUNK", 7)
    assert bound.error_of(A, actual.reshape(10, 100).t(), expected.reshape(10, 100).t()) == pytest.approx(right)
    assert bound.error_of(A, expected, expected) == 0


@pytest.mark.parametrize(
    "actual",
    [torch.full((4,), math.nan), torch.tensor([1.0, 1.0, 1.0, math.inf]), torch.ones(2, 2), torch.ones(5), None],
)
def test_what_is_not_finite_missing_or_of_another_shape_is_infinitely_wrong(actual: Tensor | None) -> None:
    tensors = {} if actual is None else {A: actual}
    assert bound.errors_of(tensors, {A: torch.ones(4)}) == {A: math.inf}


def test_a_scalar_output_is_measured_against_one_and_a_scalar_gradient_against_itself() -> None:
    assert bound.error_of(LOSS, torch.tensor(0.03), torch.tensor(0.01)) == pytest.approx(0.02)
    assert bound.error_of(LOSS, torch.tensor(8.08), torch.tensor(8.0)) == pytest.approx(0.01)
    assert bound.error_of(A, torch.tensor([0.03]), torch.tensor([0.01])) == pytest.approx(2)


def test_a_gradient_that_is_zero_must_be_zero() -> None:
    assert bound.error_of(A, torch.zeros(300), torch.zeros(300)) == 0
    assert bound.error_of(A, torch.full((300,), 1e-6), torch.zeros(300)) > 1e20


@pytest.mark.parametrize(
    ("name", "elements", "expected"),
    [
        (A, 256, bound.STANDARD),
        (A, 255, bound.SMALL),
        (A, 1, bound.SMALL),
        (LOSS, 1, bound.SCALAR),
        (TensorName("output", "logits"), 2, bound.SMALL),
        (TensorName("output", "logits"), 256, bound.STANDARD),
    ],
)
def test_which_bound(name: TensorName, elements: int, expected: bound.Bound) -> None:
    assert bound.bound_of(name, elements) == expected


@pytest.mark.parametrize(
    ("unpatched", "patched", "holds"),
    [
        (0.01, 0.0126, True),
        (0.01, 0.012601, False),
        (0.0, 1e-4, True),
        (0.0, 1.01e-4, False),
        (0.0, math.inf, False),
        (math.inf, 0.0, False),
    ],
)
def test_what_holds(unpatched: float, patched: float, holds: bool) -> None:
    assert TensorError("gradient", "a", 256, unpatched, patched).holds is holds


# ------------------------------------------------------------------------------------------------------- what passes


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 64), ("INTERMEDIATE", 96), ("VOCABULARY", 128), ("HEADS", 4)):
        monkeypatch.setattr(models, name, value)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_real_models_pass(reference_backend: None, small_models: None, name: str) -> None:
    chosen = models.built_in(name, 2, torch.bfloat16, torch.device("cpu"))
    report = parity(chosen.build, BATCH)
    assert report.passed, report
    assert (report.patched_native, report.native_expected, report.unpatched_native) == (2, 2, 0)
    assert report.exit_code == 0
    assert dict(report.calls) == {"fused": 2}
    kinds = {(error.kind, error.name) for error in report.tensors}
    gradients = {("gradient", name) for name, _ in chosen.build().named_parameters()}
    assert kinds == {("output", "loss"), ("output", "logits"), *gradients}
    # What the ratio is taken of is rounding, not nothing.
    assert all(1e-3 < error.unpatched < 0.05 for error in report.tensors if error.elements >= 256)


@pytest.mark.parametrize("name", [name for name in models.CONFIGS if not name.startswith("fla-")])
def test_activations_of_the_built_in_models_are_of_unit_scale(small_models: None, name: str) -> None:
    """At a library's own 0.02, what the MLP adds would vanish beside the rest, and its errors with it."""
    model = models.built_in(name, 2, torch.float32, torch.device("cpu")).build()
    scales = {}
    for part, module in model.named_modules():
        if part.endswith(("mlp", "lm_head")):
            module.register_forward_hook(
                lambda module, args, out, part=part: scales.update({part: float(out.detach().std())})
            )
    model(IDS, use_cache=False)
    assert len(scales) == 3
    assert all(0.2 < scale < 3 for scale in scales.values()), scales


def test_lora_passes_on_the_pointwise_route(reference_backend: None) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        targets = ["gate_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)
        model: nn.Module = peft.get_peft_model(build_llama(), config)
        return model

    report = parity(build, BATCH)
    assert report.passed, report
    assert dict(report.calls) == {"pointwise": 2}
    gradients = [error for error in report.tensors if error.kind == "gradient"]
    assert len(gradients) == 2 * 3 * 2
    assert all("lora_" in error.name for error in gradients)


def test_fp32_and_fp64_models_pass(reference_backend: None) -> None:
    for dtype, wide in ((torch.float32, "float32"), (torch.float64, "float64")):
        report = parity(lambda dtype=dtype: tiny_llama(dtype, layers=1), BATCH)
        assert report.passed, report
        assert report.reference_dtype == wide


def test_a_tuple_batch_and_gradients_of_the_input(reference_backend: None) -> None:
    x = torch.randn(300, 64, dtype=torch.bfloat16)
    report = parity(tiny_llama_mlp(torch.bfloat16), (x,))
    assert report.passed, report
    assert [(error.kind, error.name) for error in report.tensors if error.kind != "gradient"] == [
        ("output", "output"),
        ("input gradient", "0"),
    ]
    embedded = {"inputs_embeds": torch.randn(2, 8, 64, dtype=torch.bfloat16), "use_cache": False}
    report = parity(build_llama, embedded)
    assert report.passed, report
    assert ("input gradient", "inputs_embeds") in {(error.kind, error.name) for error in report.tensors}
    assert embedded["inputs_embeds"].grad is None
    assert not embedded["inputs_embeds"].requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_calls_are_expected_twice(reference_backend: None, use_reentrant: bool) -> None:
    def build() -> nn.Module:
        model: Any = build_llama()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    report = parity(build, BATCH)
    assert report.passed, report
    assert report.patched_native == report.native_expected == 4


def test_modules_that_the_batch_does_not_reach_are_not_expected(reference_backend: None) -> None:
    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.vision = tiny_llama_mlp(torch.bfloat16), tiny_llama_mlp(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.text(x)

    report = parity(TwoTowers, (torch.randn(8, 64).bfloat16(),))
    assert report.passed, report
    assert report.native_expected == 1


def test_calls_without_tokens_are_not_expected(reference_backend: None) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.busy, self.idle = tiny_llama_mlp(torch.bfloat16), tiny_llama_mlp(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.busy(x) + self.idle(x[:0]).sum()

    report = parity(Experts, (torch.randn(8, 64).bfloat16(),))
    assert report.passed, report
    assert report.native_expected == 1


def test_chance_is_the_same_in_every_arm_and_follows_the_seed(reference_backend: None) -> None:
    class Chancy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = tiny_llama_mlp(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.mlp(x), 0.5) * (1 + random.random()) * (1 + numpy.random.rand())

    model, x = Chancy(), torch.randn(64, 64).bfloat16()
    reports = []
    for seed in (3, 3, 4):
        reports.append(parity(model, (x,), seed=seed))
        assert reports[-1].passed, reports[-1]
        assert all(error.unpatched < 0.05 for error in reports[-1].tensors)
        for draw in (torch.rand, numpy.random.rand, lambda _: random.random()):
            draw(1)
    assert reports[0].tensors == reports[1].tensors
    assert reports[0].tensors != reports[2].tensors


def test_autocast_is_off_in_the_reference_only(reference_backend: None) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = parity(lambda: tiny_llama(torch.float32), BATCH)
    assert report.passed, report
    assert dict(report.calls) == {"pointwise": 2}
    assert next(error for error in report.tensors if error.name == "logits").unpatched > 1e-3


def test_a_loss_of_ones_own_and_no_backward_pass(reference_backend: None) -> None:
    def loss(out: Any) -> Tensor:
        return out.logits.float().square().mean()

    report = llama_parity(loss=loss)
    assert report.passed, report
    assert next(error for error in report.tensors if error.name == "loss").bound == bound.SCALAR
    report = llama_parity(gradients=False)
    assert report.passed, report
    assert {error.kind for error in report.tensors} == {"output"}


def test_native_calls_can_be_stated(reference_backend: None) -> None:
    assert llama_parity(native_calls=2).passed
    check(llama_parity(native_calls=3), Verdict.FAILED, "2 native calls, and native_calls=3")


# ---------------------------------------------------------------------------------------------------------- in place


class Twice(nn.Module):
    """One MLP that is called twice, and one whose weight is another's too."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.tied = tiny_llama_mlp(torch.bfloat16), tiny_llama_mlp(torch.bfloat16)
        self.head = nn.Linear(96, 64, bias=False).bfloat16()
        self.head.weight = self.tied.down_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(self.shared(self.shared(x)))
        return out + self.head(x[..., :1].expand(*x.shape[:-1], 96))


ALL_FIVE = ["output", "gradient of the input"] + [f"gradient of {name}_proj.weight" for name in ("gate", "up", "down")]


def judged_in_place(report: ParityReport) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for error in in_place(report):
        module, _, what = error.name.partition(": ")
        found.setdefault(module, []).append(what)
    return found


def test_every_call_is_judged_in_place_by_its_own_part_of_each_gradient(reference_backend: None) -> None:
    report = parity(Twice, (torch.randn(64, 64).bfloat16(),))
    assert report.passed, report
    assert judged_in_place(report) == {"shared": ALL_FIVE, "shared, call 2": ALL_FIVE, "tied": ALL_FIVE}
    assert all(1e-3 < error.unpatched < 0.02 for error in in_place(report)), report
    assert bound.kind_of("layers.3.mlp, call 12: output") == "layers.*.mlp: output"


class Wrapped(nn.Module):
    """A gated MLP behind a linear layer, called in a way of one's own."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.mlp, self.lift, self.call = tiny_llama_mlp(dtype), nn.Linear(64, 64).to(dtype), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, self.lift(x))


def in_threads(model: Any, x: Tensor) -> Tensor:
    barrier, out = threading.Barrier(4), [x] * 4

    def run(i: int) -> None:
        mine = x * (i + 1)
        barrier.wait()
        out[i] = model.mlp(mine)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(out)


def under_no_grad_too(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model.mlp(x)
    out: Tensor = model.mlp(x) - target * 2
    return out


def backward_in_forward(model: Any, x: Tensor) -> Tensor:
    model.mlp(x.detach()).float().square().mean().backward()
    out: Tensor = model.mlp(x)
    return out


def with_a_penalty(model: Any, x: Tensor) -> Tensor:
    penalty = sum(weight.float().square().sum() for weight in model.mlp.parameters())
    out: Tensor = model.mlp(x).float().square().mean() + penalty
    return out


@pytest.mark.parametrize(
    ("forward", "judged"),
    [
        (lambda model, x: model.mlp(x=x), 5),
        (lambda model, x: model.mlp(x).mul_(2).add_(x), 5),  # the output is written to in place
        (lambda model, x: model.mlp(x) + F.linear(x[:, :1].expand(-1, 96), model.mlp.down_proj.weight), 5),
        (with_a_penalty, 5),
        (under_no_grad_too, 6),
        (backward_in_forward, 9),
        (lambda model, x: checkpoint(model.mlp, x, use_reentrant=True), 6),
        (lambda model, x: checkpoint(model.mlp, x, use_reentrant=False), 5),
        (in_threads, 20),
    ],
)
def test_ways_to_call_a_module(reference_backend: None, forward: Callable[[Any, Tensor], Tensor], judged: int) -> None:
    report = parity(lambda: Wrapped(forward), (torch.randn(96, 64).bfloat16(),))
    assert report.passed, report
    assert len(in_place(report)) == judged, report
    assert all(1e-3 < error.unpatched < 0.02 for error in in_place(report)), report
    assert not report.notes


@pytest.mark.parametrize("hook", ["optimizer", "scale"])
def test_hooks_on_the_weights_are_not_blamed_on_the_module(reference_backend: None, hook: str) -> None:
    def build() -> nn.Module:
        model = build_llama()
        for weight in model.parameters():
            if hook == "optimizer":  # one that steps during the backward pass, and frees the gradient
                weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
            else:
                weight.register_hook(lambda gradient: gradient * 0.9)
        return model

    report = parity(build, BATCH)
    assert report.passed, report
    assert len(in_place(report)) == 10
    assert all(1e-3 < error.unpatched < 0.02 for error in in_place(report)), report


def test_dropout_in_a_module_is_the_same_in_place(reference_backend: None) -> None:
    class Dropped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.1)

    def build() -> nn.Module:
        model = Wrapped(lambda model, x: model.mlp(x))
        model.mlp.up_proj = Dropped(64, 96, bias=False).bfloat16()
        return model

    before = torch.get_rng_state()
    report = parity(build, (torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16(),))
    assert report.passed, report
    assert torch.equal(torch.get_rng_state(), before)
    assert len(in_place(report)) == 5
    assert all(1e-3 < error.unpatched < 0.02 for error in in_place(report)), report


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_that_the_model_enters_or_leaves_itself(reference_backend: None, inside: bool) -> None:
    """As in a model that accelerate has prepared: the reference must be in fp32 all the same."""

    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out: Tensor = model.mlp(x.float())
            return out

    enter = torch.autocast.__enter__
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        report = parity(lambda: Wrapped(forward, torch.float32), (torch.randn(96, 64),))
    assert report.passed, report
    assert torch.autocast.__enter__ is enter
    assert len(in_place(report)) == 5
    output = report.in_place[0].unpatched  # the backward pass is outside of the model, and so in what it is called in
    assert output > 1e-3 if inside else output < 1e-5, report


def test_inference_mode_is_left_for_the_while(reference_backend: None) -> None:
    with torch.inference_mode():
        report = llama_parity()
        assert torch.is_inference_mode_enabled()
    assert report.passed, report
    assert len(in_place(report)) == 10


def test_without_a_backward_pass_the_output_is_judged_in_place(reference_backend: None) -> None:
    report = llama_parity(gradients=False)
    assert report.passed, report
    assert [error.name for error in in_place(report)] == [f"model.layers.{i}.mlp: output" for i in (0, 1)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_modules_are_judged_in_place(reference_backend: None, use_reentrant: bool) -> None:
    def build() -> nn.Module:
        model: Any = tiny_llama(torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    report = parity(build, {**BATCH, "use_cache": False})
    assert report.passed, report
    # The first of two calls records nothing, and yet it is its output that goes on in the model.
    assert len(in_place(report)) == 2 * (6 if use_reentrant else 5)


def test_autocast_is_on_for_the_librarys_module_in_place(reference_backend: None) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.lift = tiny_llama_mlp(), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.mlp(self.lift(x))
            return out

    with torch.autocast("cpu", torch.bfloat16):
        report = parity(Cast, (torch.randn(64, 64),))
    assert report.passed, report
    assert report.calls == {"pointwise": 1}
    assert not report.notes
    assert len(in_place(report)) == 5
    assert all(1e-4 < error.unpatched < 0.02 for error in in_place(report)), report


def test_a_module_that_is_another_each_time_is_noted(reference_backend: None) -> None:
    calls: list[int] = []

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x) * (-1) ** len(calls)  # the same in every arm, which has one call

    def build() -> nn.Module:
        calls.clear()
        mlp: Any = tiny_llama_mlp(torch.bfloat16)
        mlp.up_proj = Noisy(64, 96, bias=False).bfloat16()
        return mlp

    report = parity(build, (torch.randn(64, 64).bfloat16(),))
    assert report.passed, report
    assert report.calls == {"pointwise": 1}
    assert not any("up_proj" in error.name or "output" in error.name for error in in_place(report)), report
    assert any("is not judged alone" in note for note in report.notes), report


def test_a_batch_of_few_tokens_is_noted(reference_backend: None) -> None:
    report = parity(tiny_llama_mlp(torch.bfloat16), (torch.randn(7, 64).bfloat16(),))
    assert any(note.startswith("7 tokens are too few") for note in report.notes)
    assert {error.bound for error in (*report.in_place, *report.tensors)} == {bound.SMALL}
    assert report.whole is None


# --------------------------------------------------------------------------------------------------- what must fail


Sabotage = Callable[[str, Callable[..., Any]], None]


@pytest.fixture
def sabotage(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> Sabotage:
    """Wraps a function of the reference kernels: `sabotage(name, lambda real, *args: ...)`."""

    def wrap(name: str, wrong: Callable[..., Any]) -> None:
        real = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda *args, **kwargs: wrong(lambda: real(*args, **kwargs), *args))

    return wrap


def test_one_gradient_that_is_one_percent_off_fails(sabotage: Sabotage) -> None:
    calls = []

    def wrong(real: Callable[[], tuple[Tensor, Tensor]], *_: Any) -> tuple[Tensor, Tensor]:
        d_gate_up, h = real()
        calls.append(1)
        return d_gate_up, h * 1.01 if len(calls) == 1 else h

    sabotage("gemm_dact", wrong)
    report = llama_parity()
    check(report, Verdict.FAILED, "outside the bound: 1 of ")
    assert broken(report) == {"model.layers.1.mlp: gradient of down_proj.weight"}
    assert report.exit_code == 1


def test_what_is_wrong_in_a_second_call_only_fails(sabotage: Sabotage) -> None:
    calls = []

    def wrong(real: Callable[[], tuple[Tensor, Tensor]], *_: Any) -> tuple[Tensor, Tensor]:
        h, gate_up = real()
        calls.append(1)
        return h * 1.01 if len(calls) == 2 else h, gate_up

    sabotage("dual_gemm_act", wrong)
    report = parity(lambda: Wrapped(lambda model, x: model.mlp(x) + model.mlp(-x)), (torch.randn(96, 64).bfloat16(),))
    check(report, Verdict.FAILED, "outside the bound: 1 of 20 tensors, in place mlp, call 2: output")


def test_what_is_wrong_where_no_gradient_is_recorded_fails(sabotage: Sabotage) -> None:
    """Reentrant checkpoints run the forward pass so; another path of the kernel serves it."""

    def build() -> nn.Module:
        model: Any = build_llama()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return model.train()

    def wrong(real: Callable[[], tuple[Tensor, Tensor | None]], *_: Any) -> tuple[Tensor, Tensor | None]:
        h, gate_up = real()
        return h * 1.01 if gate_up is None else h, gate_up

    sabotage("dual_gemm_act", wrong)
    report = parity(build, BATCH)
    check(report, Verdict.FAILED, "outside the bound: 2 of 24 tensors, in place model.layers.0.mlp: output")


def test_an_output_of_the_previous_call_fails(sabotage: Sabotage) -> None:
    """As of a workspace that is used again too early: the first call of a module is right."""
    previous = []

    def stale(real: Callable[[], tuple[Tensor, Tensor]], *_: Any) -> tuple[Tensor, Tensor]:
        h, gate_up = real()
        previous.append(h)
        return previous[max(0, len(previous) - 2)], gate_up

    sabotage("dual_gemm_act", stale)
    report = llama_parity()
    check(report, Verdict.FAILED, "outside the bound")
    assert {"logits", "loss"} & broken(report)


def test_a_tile_of_nan_fails(sabotage: Sabotage) -> None:
    def wrong(real: Callable[[], tuple[Tensor, Tensor]], *_: Any) -> tuple[Tensor, Tensor]:
        d_gate_up, h = real()
        d_gate_up[:1, :1] = math.nan
        return d_gate_up, h

    sabotage("gemm_dact", wrong)
    report = llama_parity()
    check(report, Verdict.FAILED, "outside the bound")
    assert "model.layers.0.mlp.gate_proj.weight" in broken(report)
    assert "model.norm.weight" not in broken(report)


def test_memory_that_a_kernel_did_not_write_fails(sabotage: Sabotage) -> None:
    """Also where the test runner does not poison memory: the last rows hold what was there before."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False

    def wrong(real: Callable[[], tuple[Tensor, Tensor]], *_: Any) -> tuple[Tensor, Tensor]:
        h, gate_up = real()
        out = torch.empty_like(h)
        out[:-1] = h[:-1]
        return out, gate_up

    sabotage("dual_gemm_act", wrong)
    check(llama_parity(), Verdict.FAILED, "output loss, output logits")
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_what_is_behind_a_nan_is_not_judged_in_place(sabotage: Sabotage) -> None:
    def wrong(real: Callable[[], tuple[Tensor, Tensor]], *_: Any) -> tuple[Tensor, Tensor]:
        h, gate_up = real()
        return torch.full_like(h, math.nan), gate_up

    sabotage("dual_gemm_act", wrong)
    report = llama_parity()
    check(report, Verdict.FAILED, "outside the bound: 2 of 2 tensors, in place model.layers.0.mlp: output")
    assert report.notes == ("model.layers.1.mlp can't be judged alone: what it was given is not finite",)


def test_gate_and_up_swapped_fails(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference.dual_gemm_act

    def swapped(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Any, up_bias: Any, *args: Any, **kwargs: Any) -> Any:
        return real(x, up, gate, up_bias, gate_bias, *args, **kwargs)

    monkeypatch.setattr(reference, "dual_gemm_act", swapped)
    check(llama_parity(), Verdict.FAILED, "outside the bound")


def test_a_missing_gradient_fails(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shim.run_gated_mlp
    monkeypatch.setattr(
        shim, "run_gated_mlp", lambda backend, x, gate, up, *rest: real(backend, x, gate, up.detach(), *rest)
    )
    report = llama_parity()
    check(report, Verdict.FAILED, "outside the bound: 2 of ")
    names = [f"model.layers.{layer}.mlp{what}up_proj.weight" for layer in (0, 1) for what in (".", ": gradient of ")]
    assert broken(report) == set(names)


def test_a_missing_gradient_of_the_input_fails(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shim.run_gated_mlp
    monkeypatch.setattr(shim, "run_gated_mlp", lambda backend, x, *rest: real(backend, x.detach(), *rest))
    report = llama_parity()
    check(report, Verdict.FAILED, "outside the bound: 2 of 18 tensors")
    assert {f"model.layers.{layer}.mlp: gradient of the input" for layer in (0, 1)} <= broken(report)


def test_a_gradient_that_should_not_be_there_fails(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.spare = tiny_llama_mlp(torch.bfloat16), nn.Parameter(torch.ones(64).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x) + (self.spare if extra else 0)

    extra: list[int] = []
    real = shim.run_gated_mlp
    monkeypatch.setattr(shim, "run_gated_mlp", lambda *args: (extra.append(1), real(*args))[1])
    report = parity(Spare, (torch.randn(8, 64).bfloat16(),))
    check(report, Verdict.FAILED, "gradient spare")


def test_what_is_wrong_behind_the_modules_fails(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module is right in place, and yet the gradients of the model are not."""
    real = shim.run_gated_mlp

    def wrong(backend: Any, x: Tensor, *rest: Any) -> Tensor:
        x.register_hook(lambda dx: dx * 3)
        return real(backend, x, *rest)

    monkeypatch.setattr(shim, "run_gated_mlp", wrong)
    report = llama_parity()
    check(report, Verdict.FAILED, "the whole model is outside the bound")
    assert all(error.holds for error in report.in_place)
    assert "model.embed_tokens.weight" in broken(report)


@pytest.mark.parametrize("factor", [0.0, 1.05])
@pytest.mark.parametrize("name", ["dual_gemm_act", "gemm_dact"])
def test_a_last_row_that_is_wrong_among_many_fails(sabotage: Sabotage, name: str, factor: float) -> None:
    def wrong(real: Callable[[], tuple[Tensor, Tensor]], *_: Any) -> tuple[Tensor, Tensor]:
        first, second = real()
        first[-1] *= factor
        return first, second

    sabotage(name, wrong)
    report = parity(tiny_llama_mlp(torch.bfloat16), (torch.randn(2048, 64).bfloat16(),))
    found = "output" if name == "dual_gemm_act" else "gradient of the input"
    check(report, Verdict.FAILED, f"{found}, worst row")


def test_the_worst_row() -> None:
    expected = torch.ones(4, 16)
    expected[1] *= 100
    expected[2] *= 1e-6  # a small difference of large sums, which may be wrong altogether
    expected[3] = 0
    actual = expected.clone()
    assert bound.worst_row_of(actual, expected) == 0
    actual[1] *= 1.01
    actual[2] = -1e-6
    assert bound.worst_row_of(actual, expected) == pytest.approx(0.01)
    actual[0] = 0
    assert bound.worst_row_of(actual, expected) == pytest.approx(1.0)
    actual[3, 3] = math.nan
    assert bound.worst_row_of(actual, expected) == math.inf
    assert bound.worst_row_of(actual[:3], expected) == math.inf
    assert bound.worst_row_of(torch.zeros(2, 3), torch.zeros(2, 3)) == 0


def test_a_tensor_that_few_elements_carry_has_a_wider_bound() -> None:
    name = TensorName("in place", "mlp: output")
    even, spiked = torch.ones(1024), torch.full((1024,), 1e-3)
    spiked[:4] = 100.0
    assert bound.elements_that_carry(even) == pytest.approx(1024)
    assert bound.elements_that_carry(spiked) == pytest.approx(4, rel=1e-3)
    assert bound.elements_that_carry(torch.zeros(8)) == 8
    assert bound.elements_that_carry(torch.tensor([1e30, 1e30], dtype=torch.float64)) == pytest.approx(2)
    assert bound.bound_in_place(name, even, 64) == bound.STANDARD
    wider = bound.bound_in_place(name, spiked, 64)
    assert (wider.factor, wider.floor) == (pytest.approx(3, rel=1e-3), bound.STANDARD.floor)
    assert bound.bound_in_place(name, even, 63) == bound.SMALL
    assert bound.bound_in_place(name, spiked[:255], 64) == bound.SMALL


def test_one_stray_gradient_of_many_fails(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tensors together, one that is off by 5% is not seen."""
    ours = [TensorError("gradient", f"layers.{i}.weight", 1024, 0.01, 0.01) for i in range(99)]
    ours.append(TensorError("gradient", "layers.99.weight", 1024, 0.01, 0.05))
    assert bound.together("all", ours).holds
    assert [error.name for error in bound.in_a_whole_model(ours) if not error.holds] == ["layers.99.weight"]
    small = [TensorError("output", "loss", 1, 0.0, 0.001, bound.SCALAR)]
    assert bound.in_a_whole_model(small) == small


def test_an_exception_in_the_patched_arm_fails(sabotage: Sabotage) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("the launch failed\nat length")

    sabotage("dual_gemm_act", wrong)
    report = llama_parity()
    check(report, Verdict.FAILED, "the patched arm raised RuntimeError: the launch failed")
    assert report.traceback is not None
    assert "at length" in report.traceback
    assert not report.tensors
    assert "the launch failed" in str(report)


def test_one_module_that_silently_ran_the_original_fails(
    reference_backend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = shim.decide, []

    def decide(layout: Any, module: nn.Module, x: Any) -> Any:
        seen.append(module)
        return real(layout, module, x) if module is seen[0] else shim._declined(Reason.ALIGNMENT)

    monkeypatch.setattr(shim, "decide", decide)
    reason = "1 native calls, where explain() promises 2; declined 1 for alignment"
    check(llama_parity(), Verdict.FAILED, reason)


def test_native_calls_in_the_unpatched_arm_fail(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "disabled", contextlib.nullcontext)
    fusepatch.accelerate()
    check(llama_parity(), Verdict.FAILED, "native calls in an arm that must be unpatched")


# ------------------------------------------------------------------------------------------------- what is no verdict


def test_an_arm_that_silently_ran_the_original_passes_nothing(
    reference_backend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "decide", lambda *_: shim._declined(Reason.CPU))
    report = llama_parity()
    check(report, Verdict.NOTHING_NATIVE, "no native call, where explain() promises 2; declined 2 for cpu")
    assert report.exit_code == 3


def test_a_cpu_without_the_reference_backend_has_nothing_native() -> None:
    report = llama_parity()
    check(report, Verdict.NOTHING_NATIVE, f"no native call: cpu ({Reason.CPU.fix})")
    assert all(error.patched == error.unpatched for error in report.tensors)


def test_a_model_without_targets_has_nothing_native() -> None:
    report = parity(lambda: nn.Linear(16, 32), (torch.randn(4, 16),))
    check(report, Verdict.NOTHING_NATIVE, "nothing of ours")
    assert report.notes == ("the patched arm did not run: there is nothing to patch",)


def test_an_op_that_is_off_has_nothing_native(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP", "0")
    check(llama_parity(), Verdict.NOTHING_NATIVE, "env-disabled")


@pytest.mark.parametrize("ops", [None, "gated_mlp"])
def test_strict_mode_gives_a_verdict_too(monkeypatch: pytest.MonkeyPatch, ops: str | None) -> None:
    monkeypatch.setenv("FUSEPATCH_STRICT", "1")
    check(llama_parity(ops=ops), Verdict.FAILED, "the patched arm raised DeclinedError: strict")


class Odd(nn.Module):
    """A gated MLP, and something that goes wrong in given dtypes."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], wrong: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp, self.dtypes, self.wrong = tiny_llama_mlp(torch.bfloat16), dtypes, wrong

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        return self.wrong(out) if x.dtype in self.dtypes else out


def crash(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this")


@pytest.mark.parametrize(
    ("dtypes", "wrong", "reason"),
    [
        ((torch.float32,), crash, "the float32 reference raised RuntimeError: no kernel for this"),
        ((torch.bfloat16,), crash, "the unpatched arm raised RuntimeError: no kernel for this"),
        ((torch.float32,), lambda x: x / 0, "the float32 reference is not finite in output output"),
        ((torch.bfloat16,), lambda x: x * math.nan, "the unpatched arm is not finite, or lacks or adds a tensor"),
        ((torch.bfloat16,), lambda x: x.detach().requires_grad_(), "lacks or adds a tensor: gradient mlp.gate_proj"),
        ((torch.bfloat16,), lambda x: x.flip(0), "the unpatched arm is no measure: "),
        ((torch.bfloat16,), lambda x: x.detach() * 2 - x, "the unpatched arm is no measure: gradient mlp."),
    ],
)
def test_a_baseline_that_fails_is_neither_blamed_nor_claimed(
    reference_backend: None, dtypes: tuple[torch.dtype, ...], wrong: Callable[[Tensor], Tensor], reason: str
) -> None:
    report = parity(Odd(dtypes, wrong), (torch.randn(64, 64).bfloat16(),), gradients=True)
    check(report, Verdict.BASELINE_FAILED, reason)
    assert report.exit_code == 3
    assert report.patched_native == 0


def test_fla_can_not_run_on_a_cpu() -> None:
    mlp = pytest.importorskip("fla.modules.mlp")
    report = parity(lambda: mlp.GatedMLP(hidden_size=64).bfloat16(), (torch.randn(1, 8, 64).bfloat16(),))
    check(report, Verdict.BASELINE_FAILED, "the float32 reference raised RuntimeError: 0 active drivers")


def test_one_gradient_that_is_noise_by_nature_is_noted(reference_backend: None) -> None:
    """A bias in front of a softmax has a gradient of exactly zero; in every arm there is only rounding."""

    class Softmaxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = tiny_llama_mlp(torch.bfloat16)
            self.shift = nn.Parameter(torch.zeros(300, 1).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.mlp(x) + self.shift, dim=-1)

    report = parity(Softmaxed, (torch.randn(300, 64).bfloat16(),))
    assert report.verdict is not Verdict.BASELINE_FAILED, report
    assert any("the bound says little of gradient shift" in note for note in report.notes)


# --------------------------------------------------------------------------------------------- nothing is left behind


def process_state() -> dict[str, object]:
    return {
        "forward": vars(LlamaMLP)["forward"],
        "finders": [type(finder) for finder in sys.meta_path],
        "settings": settings._current,
        "states": [(target.name, target.state, target.reason) for target in fusepatch.status().targets],
        "strict": fusepatch.status().strict,
        "disabled": fusepatch.status().disabled,
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [str(part) for part in numpy.random.get_state()],
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision": precisions(),
        "grad mode": torch.is_grad_enabled(),
    }


def precisions() -> list[str]:
    return [torch._C._get_fp32_precision_getter(*key) for key in (*surroundings._PARENTS, *surroundings._LEAVES)]


def off() -> None:
    pass


def on_for_another_model() -> object:
    other = build_llama()
    fusepatch.accelerate(model=other)
    return other


@pytest.mark.parametrize("before", [off, fusepatch.accelerate, on_for_another_model])
@pytest.mark.parametrize("end", ["verdict", "crash", "interrupt", "bad builder"])
def test_the_process_is_as_it_was(
    reference_backend: None, monkeypatch: pytest.MonkeyPatch, before: Callable[[], object], end: str
) -> None:
    torch.set_float32_matmul_precision("high")
    for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        set_seed(1234)
    kept = before()
    builds = []

    def build() -> nn.Module:
        builds.append(1)
        if end == "bad builder" and len(builds) == 3:
            raise LookupError("no third model")
        model = build_llama()
        if end in ("crash", "interrupt") and len(builds) == 3:
            error: type[BaseException] = RuntimeError if end == "crash" else KeyboardInterrupt

            def fail(*_: Any) -> None:
                raise error

            model.register_forward_hook(fail)
        return model

    try:
        state = process_state()
        raised = {"interrupt": KeyboardInterrupt, "bad builder": LookupError}.get(end)
        with pytest.raises(raised) if raised else contextlib.nullcontext():
            report = parity(build, BATCH)
            assert report.verdict is (Verdict.FAILED if end == "crash" else Verdict.PASSED), report
        assert process_state() == state
    finally:
        torch.set_float32_matmul_precision("highest")
    del kept


def test_the_unpatched_arms_of_an_accelerated_process_are_unpatched(reference_backend: None) -> None:
    fusepatch.accelerate()
    report = llama_parity()
    assert report.passed, report
    assert report.unpatched_native == 0
    assert fusepatch.status().targets[0].total("declines") == {"disabled": 8}
    mlp = tiny_llama_mlp()
    native = fusepatch.status().native_calls()
    mlp(torch.randn(2, 64))
    assert fusepatch.status().native_calls() == native + 1


def test_no_summary_of_a_first_step_is_printed(reference_backend: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fusepatch")
    mlp = tiny_llama_mlp()
    assert parity(mlp, (torch.randn(8, 64),)).passed
    entry._report_at_exit()
    assert not caplog.records
    fusepatch.accelerate()
    mlp(torch.randn(8, 64))
    assert parity(mlp, (torch.randn(8, 64),)).passed
    entry._report_at_exit()
    assert len(caplog.records) == 1  # that of the program's own first step


def test_a_built_model_is_untouched(reference_backend: None) -> None:
    model: Any = build_llama()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
            parameter.register_post_accumulate_grad_hook(lambda p: pytest.fail("the user's own parameter was reached"))
    batch = {**BATCH, "attention_mask": torch.ones_like(IDS)}

    def state() -> dict[str, object]:
        return {
            **{
                name: (id(t), t.data_ptr(), t.dtype, t.requires_grad, id(t.grad))
                for name, t in model.named_parameters()
            },
            **{name: (id(t), t.data_ptr(), t.dtype) for name, t in model.named_buffers()},
            "training": [module.training for module in model.modules()],
            "forwards": [list(vars(module)) for module in model.modules()],
            "batch": [(id(value), getattr(value, "grad", None)) for value in batch.values()],
            "attention": model.config._attn_implementation,
        }

    before, weights = state(), copy.deepcopy(model.state_dict())
    report = parity(model, batch)
    assert report.passed, report
    assert "model.embed_tokens.weight" not in {error.name for error in report.tensors}
    assert state() == before
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.requires_grad)


@pytest.fixture
def no_automatic_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("refers_to_itself", [False, True])
def test_one_model_at_a_time_is_in_memory(
    reference_backend: None, no_automatic_gc: None, refers_to_itself: bool
) -> None:
    built: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        assert [ref for ref in built if ref() is not None] == []
        model = build_llama()
        if refers_to_itself:
            vars(model)["itself"] = model
        built.append(weakref.ref(model))
        return model

    report = parity(build, BATCH)
    assert report.passed, report
    assert len(built) == 3


def test_every_arm_has_the_weights_of_the_first(reference_backend: None) -> None:
    """Buffers too, and whatever the function leaves to chance that no seed reaches."""

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            chance = torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8).float()
            self.mlp = tiny_llama_mlp(torch.bfloat16)
            self.scale = nn.Parameter(chance.bfloat16())
            self.register_buffer("shift", chance.bfloat16(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x) * self.scale + self.shift

    report = parity(Buffered, (torch.randn(8, 64).bfloat16(),))
    assert report.passed, report


# --------------------------------------------------------------------------------------------------------- arguments


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise RuntimeError("can't be copied")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, BATCH), {}, TypeError, "or a function that builds one, got int"),
        ((lambda: 3, BATCH), {}, TypeError, "must return a torch.nn.Module, got int"),
        ((build_llama, IDS), {}, TypeError, "a dictionary or a tuple, got Tensor"),
        ((build_llama, BATCH), {"loss": "loss"}, TypeError, "loss must be a function"),
        ((build_llama, BATCH), {"ops": "nope"}, ValueError, "unknown op 'nope'"),
        ((build_llama, BATCH), {"native_calls": -1}, ValueError, "native_calls must not be negative"),
        ((build_llama, BATCH), {"native_calls": True}, TypeError, "native_calls must be a whole number"),
        ((build_llama, BATCH), {"seed": 1.5}, TypeError, "seed must be a whole number"),
        ((NoCopy(4, 4), (torch.ones(1, 4),)), {}, ValueError, "Pass a function that builds it"),
        ((lambda: nn.Linear(4, 4, device="meta"), (torch.ones(1, 4),)), {}, ValueError, "weight is on the meta device"),
        (
            (lambda: nn.Linear(4, random.SystemRandom().randrange(10**6)), (torch.ones(1, 4),)),
            {},
            ValueError,
            "another",
        ),
    ],
)
def test_wrong_arguments(
    arguments: tuple[Any, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parity(*arguments, **options)


def test_the_environment_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "fast")
    with pytest.raises(settings.SettingsError):
        parity(lambda: pytest.fail("was built"), BATCH)


# -------------------------------------------------------------------------------------------------------- the report


def example(count: int = 4, **changes: Any) -> ParityReport:
    tensors = tuple(
        TensorError("gradient", f"model.layers.{i}.mlp.gate_proj.weight", 1024, 0.01, 0.01 + 0.0001 * (i % 30))
        for i in range(count - 2)
    )
    tensors += (
        TensorError("output", "loss", 1, 0.0, 0.001, bound.SCALAR),
        TensorError("output", "logits", 1024, 0.01, math.inf),
    )
    found: dict[str, Any] = {
        "verdict": Verdict.FAILED,
        "reasons": ("because",),
        "model": "Model",
        "parameters": 12345,
        "dtypes": ("bfloat16",),
        "reference_dtype": "float32",
        "device": "cpu",
        "ops": ("gated_mlp",),
        "seed": 0,
        "in_place": (TensorError("in place", "model.layers.0.mlp: output", 1024, 0.003, 0.0031),),
        "whole": TensorError("root mean square", "Model", 4096, 0.01, 0.012, bound.WHOLE),
        "tensors": tensors,
        "native_expected": 2,
        "unpatched_native": 0,
        "patched_native": 2,
        "calls": {"fused": 2},
        "declines": {},
        "seconds": {"patched": 0.5},
        "notes": ("note this",),
        "traceback": None,
    }
    return ParityReport(**{**found, **changes})


def test_what_is_outside_its_bound_comes_first_and_all_are_to_be_had() -> None:
    report = example(20)
    lines = str(report).splitlines()
    assert lines[0] == "parity of gated_mlp: FAILED"
    assert lines[1] == "  because"
    first = next(index for index, line in enumerate(lines) if line.startswith("Outside their bound")) + 4
    assert lines[first].split()[:7] == ["logits", "output", "1024", "1.00e-02", "inf", "inf", "inf"]
    assert lines[first + 1] == "note: note this"  # all others hold
    kind = next(line.split() for line in lines if line.startswith("model.layers.*.mlp.gate_proj.weight"))
    assert kind[1:3] == ["18", "1.00e-02"]
    assert "1 of 1 tensors are within their bound" in str(report)
    assert "Root mean square: unpatched 1.00e-02, patched 1.20e-02" in str(report)
    assert len(report.table().splitlines()) == 23
    assert report.table(2).splitlines()[3].split()[0] == "model.layers.17.mlp.gate_proj.weight"
    assert "unpatched + 0.01" in report.table()


def test_many_broken_tensors_are_cut_short() -> None:
    wrong = tuple(TensorError("gradient", f"a{i}", 1024, 0.01, 0.5 + i) for i in range(50))
    text = str(example(tensors=wrong))
    assert "... and 30 more, in report.table()" in text
    assert "a49 " in text
    assert "a29 " not in text.split("Outside their bound")[1]


def test_a_dictionary_for_json() -> None:
    found = json.loads(json.dumps(example().to_dict(), allow_nan=False))
    assert (found["verdict"], found["passed"], found["exit_code"]) == ("failed", False, 1)
    worst = found["tensors"][-1]
    assert (worst["name"], worst["patched"], worst["use"], worst["holds"]) == ("logits", None, None, False)
    assert worst["bound"] == {"factor": 1.25, "floor": 1e-4}
    assert found["in_place"][0]["holds"] is True
    assert found["whole"]["patched"] == 0.012
    assert set(found["versions"]) == {"fusepatch", "torch", "transformers", "fla"}
    assert found["calls"] == {"fused": 2}


def test_exit_codes() -> None:
    codes = {verdict.value: verdict.exit_code for verdict in Verdict}
    assert codes == {"passed": 0, "failed": 1, "baseline-failed": 3, "nothing-native": 3}


def test_the_picture_of_many_tensors_is_as_large_as_its_labels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    sizes = {}
    for count in (4, 299):
        path = tmp_path / f"{count}.png"
        example(count).plot(path)
        sizes[count] = Image.open(path).size
    assert sizes[299][1] > 150 * 15  # pixels for each of 150 rows
    assert sizes[299][0] > 1.8 * sizes[4][0]  # in two columns
    text = tmp_path / "few.svg"
    example().plot(text)
    assert "not finite" in text.read_text() or text.stat().st_size > 10_000


def test_the_picture_needs_matplotlib_and_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"fusepatch\[plot\]"):
        example().plot(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace())
    with pytest.raises(ValueError, match="nothing to plot: because"):
        example(tensors=(), in_place=()).plot(tmp_path / "a.png")


# ----------------------------------------------------------------------------------------------------- surroundings


PRECISION = """
import torch
from torch import nn
from fusepatch.parity_check import surroundings

KEYS = (*surroundings._PARENTS, *surroundings._LEAVES)
state = lambda: [torch._C._get_fp32_precision_getter(*key) for key in KEYS]
set_precision = torch._C._set_fp32_precision_setter
fresh = state()
for through in ("nothing", "legacy", "new", "both"):
    if through in ("legacy", "both"):
        torch.set_float32_matmul_precision("medium")
    if through in ("new", "both"):
        set_precision("generic", "all", "tf32")
        set_precision("cuda", "matmul", "tf32")
    before = state()
    with surroundings.exact_arithmetic(nn.Linear(2, 2)) as notes:
        assert notes == ()
        assert state()[3:] == ["ieee"] * 6, (through, state())
    assert state() == before, (through, state(), before)
    if through in ("nothing", "legacy"):
        assert torch.get_float32_matmul_precision() == ("medium" if through == "legacy" else "highest")
    set_precision("generic", "all", "none")
    if through in ("new", "both"):  # what had inherited inherits still
        assert torch._C._get_fp32_precision_getter("mkldnn", "conv") == "none"
    torch.set_float32_matmul_precision("highest")
    for key, precision in zip(KEYS, fresh):
        set_precision(*key, precision)
"""


def test_tf32_is_off_in_exact_arithmetic_and_put_back() -> None:
    """In a process of its own: once both of torch's interfaces were used, its functions no longer say what is set."""
    done = subprocess.run([sys.executable, "-c", PRECISION], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_flash_attention_gives_way_in_the_reference_only() -> None:
    asked = []

    class Flash(nn.Linear):
        config = SimpleNamespace(_attn_implementation="flash_attention_2")

        def set_attn_implementation(self, name: str) -> None:
            asked.append(name)

    with surroundings.exact_arithmetic(Flash(2, 2)) as notes:
        assert asked == ["sdpa"]
        assert "sdpa, since flash_attention_2 takes no fp32" in notes[0]
    assert asked == ["sdpa", "flash_attention_2"]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """By its definition, one query at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    groups, late = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    for i in range(q.shape[1]):
        first = 0 if window[0] < 0 else max(0, i + late - window[0])
        last = i + late if causal else k.shape[1] - 1 if window[1] < 0 else min(k.shape[1] - 1, i + late + window[1])
        for head in range(q.shape[2]):
            keys, values = k[:, first : last + 1, head // groups], v[:, first : last + 1, head // groups]
            weights = torch.softmax(torch.einsum("bd,bkd->bk", q[:, i, head], keys) / q.shape[-1] ** 0.5, dim=-1)
            out[:, i, head] = torch.einsum("bk,bkd->bd", weights, values)
    return out


@pytest.mark.parametrize("keys", [6, 9])
@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (True, (2, 0)), (False, (-1, -1)), (False, (1, 2))])
def test_attention_like_flash(keys: int, causal: bool, window: tuple[int, int]) -> None:
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, keys, 2, 8), torch.randn(2, keys, 2, 8)
    out = surroundings.attention_like_flash(q, k, v, causal=causal, window_size=window)
    torch.testing.assert_close(out, dense_attention(q, k, v, causal, window))


def test_kernels_of_fla_are_compiled_anew_and_given_back() -> None:
    triton = pytest.importorskip("triton")
    solve = pytest.importorskip("fla.ops.utils.solve_tril")
    kernels = surroundings._fla_kernels()
    assert len(kernels) > 100
    tuner = next(kernel for kernel in kernels if "cache" in vars(kernel))
    function = next(kernel for kernel in kernels if "device_caches" in vars(kernel))
    before = [dict(vars(kernel)) for kernel in kernels]
    with surroundings.ieee_dots_in_fla() as notes:
        assert triton.knobs.language.fp32_default == os.environ["TRITON_F32_DEFAULT"] == "ieee"
        assert notes == ["FLA's kernels were compiled with IEEE fp32 dots for the reference"]
        assert function.device_caches is not before[kernels.index(function)]["device_caches"]
        assert tuner.cache is not before[kernels.index(tuner)]["cache"]
    assert "TRITON_F32_DEFAULT" not in os.environ
    for kernel, state in zip(kernels, before, strict=True):
        assert all(vars(kernel)[name] is value for name, value in state.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "FLA_TRIL_PRECISION", "tf32x3")
        with surroundings.ieee_dots_in_fla() as notes:
            assert "the triangular solve of fla.ops.utils.solve_tril" in notes[1]


def test_kernels_of_fla_run_untuned_and_are_given_back() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("fla.ops.utils.solve_tril")
    tuned = [kernel for kernel in surroundings._fla_kernels() if len(vars(kernel).get("configs", ())) > 1]
    before = [list(kernel.configs) for kernel in tuned]
    assert tuned
    with surroundings.untuned_fla():
        for kernel, configs in zip(tuned, before, strict=True):
            (kept,) = kernel.configs
            assert kept in configs
            assert kept.num_warps == max(each.num_warps for each in configs if each.kwargs == kept.kwargs)
    assert [kernel.configs for kernel in tuned] == before


def test_the_configuration_that_is_kept_is_quick_to_compile() -> None:
    triton = pytest.importorskip("triton")

    def config(warps: int, stages: int, **blocks: object) -> Any:
        return triton.Config(blocks, num_warps=warps, num_stages=stages)

    few_warps, many_stages = config(2, 2, BK=64, BV=64), config(4, 3, BK=64, BV=64)
    large, best = config(4, 2, BK=128, BV=128), config(4, 2, BK=64, BV=64)
    ordered = sorted([many_stages, large, few_warps, best], key=surroundings._length_of_code)
    assert ordered == [best, many_stages, few_warps, large]
    assert surroundings._length_of_code(config(2, 3, BK=32, FAST=False)) == (16, 3)  # a flag is no block


# --------------------------------------------------------------------------------------------------------- the command


def run_command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([str(argument) for argument in arguments]))


def test_the_command_on_a_built_in_model(
    reference_backend: None, small_models: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert run_command("--config", "llama", "--tokens", 32, "--json", path, "--all") == 0
    out = capsys.readouterr().out
    assert out.startswith("parity of gated_mlp: PASSED\nLlamaForCausalLM, ")
    assert out.count("model.embed_tokens.weight") >= 1
    assert "every tensor:" in out
    found = json.loads(path.read_text())
    assert found["passed"]
    assert len(found["tensors"]) == 2 + 2 * 9 + 3


@pytest.mark.parametrize(("dtype", "full"), [("fp16", "float16"), ("fp32", "float32")])
def test_the_command_in_other_dtypes(
    reference_backend: None, small_models: None, capsys: pytest.CaptureFixture[str], dtype: str, full: str
) -> None:
    assert run_command("--config", "phi3", "--tokens", 32, "--layers", 1, "--dtype", dtype) == 0
    assert f"parameters, {full} on cpu" in capsys.readouterr().out


def test_the_command_on_a_folder(reference_backend: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = tiny_llama(torch.bfloat16, layers=3)
    model.save_pretrained(tmp_path)
    assert run_command(tmp_path, "--tokens", 32) == 0
    assert "native calls: 3 patched (expected 3)" in capsys.readouterr().out
    assert run_command(tmp_path, "--tokens", 32, "--layers", 1) == 0
    assert "native calls: 1 patched (expected 1)" in capsys.readouterr().out


def test_the_command_warms_up_where_it_is_asked_to(
    reference_backend: None, small_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[int] = []
    monkeypatch.setattr("fusepatch.warming.warmup", lambda model, tokens: warmed.append(tokens))
    assert run_command("--config", "llama", "--tokens", 8, "--layers", 1) == 0
    assert warmed == []
    assert run_command("--config", "llama", "--tokens", 8, "--layers", 1, "--warmup") == 0
    assert warmed == [8]


def test_the_command_says_that_nothing_was_native(small_models: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--config", "llama", "--tokens", 8, "--layers", 1) == 3
    assert "FUSEPATCH_<OP>_BACKEND=reference" in capsys.readouterr().out


def test_the_kda_model_is_one_that_cudnns_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla.models.kda")
    from fusepatch.kernels.linear_attention import cudnn_hopper
    from fusepatch.kernels.linear_attention.problem import Call, Problem

    monkeypatch.setattr(cudnn_hopper, "why_no_library", lambda: None)
    with models.surroundings("fla-kda"):
        model: Any = models.built_in("fla-kda", 1, torch.bfloat16, torch.device("cpu")).build()
    layer = model.model.layers[0].attn
    assert layer.safe_gate
    call = Call(
        layer.head_k_dim**-0.5, l2norm=True, gate="bounded", lower_bound=layer.lower_bound, beta_sigmoid=True,
        negative_eigenvalues=layer.allow_neg_eigval, state_v_first=True, safe_gate=layer.safe_gate,
    )  # fmt: skip
    problem = Problem(
        layer.q_proj.weight.device, layer.q_proj.weight.dtype, layer.num_heads, layer.num_v_heads, layer.head_k_dim,
        layer.head_v_dim, True, call, torch.bfloat16, torch.bfloat16, (layer.A_log.dtype, layer.dt_bias.dtype),
    )  # fmt: skip
    assert cudnn_hopper.why_not(problem) is None


@pytest.mark.parametrize("config", ["fla-gdn", "fla-kda", "fla-transformer"])
def test_the_command_on_fla_without_a_gpu(small_models: None, capsys: pytest.CaptureFixture[str], config: str) -> None:
    pytest.importorskip("fla")
    assert run_command("--config", config, "--tokens", 64, "--layers", 1) == 3
    assert "BASELINE-FAILED\n  the float32 reference raised RuntimeError: 0 active drivers" in capsys.readouterr().out
    assert sys.modules["fla.layers.attn"].flash_attn_func is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/folder"], "there is no folder /no/such/folder"),
        ([Path(__file__).parent], "has no file config.json"),
        (["--config", "llama", "--json", "/no/such/folder/a.json"], "can't write /no/such/folder/a.json"),
        (["--config", "llama", "--json", Path(__file__).parent], "not a file in a folder that exists"),
        (["--config", "llama", "--device", "cuda:77"], "there is no device cuda:77"),
        (["--config", "llama", "--device", "gpu"], "there is no device gpu"),
        (["--config", "llama", "--ops", "gated_mlp,nope"], "unknown op 'nope'"),
    ],
)
def test_what_the_command_can_not_do(arguments: list[object], message: str) -> None:
    with pytest.raises(CommandError) as found:
        run_command(*arguments)
    assert message in str(found.value)


def test_a_folder_whose_weights_are_missing(tmp_path: Path) -> None:
    model: Any = tiny_llama(layers=1)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CommandError, match="can't load"):
        run_command(tmp_path)


@pytest.mark.parametrize("path", ["a.png", "a.txt"])
def test_a_picture_that_can_not_be_drawn_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    from fusepatch import importhook

    monkeypatch.setattr(importhook, "is_installed", lambda name: path == "a.txt")
    expected = r"must end in .png" if path == "a.txt" else r"pip install \"fusepatch\[plot\]\""
    with pytest.raises(CommandError, match=expected):
        run_command("--config", "llama", "--plot", tmp_path / path)


def test_the_arguments_are_listed_without_importing_torch() -> None:
    code = (
        "import argparse, sys\n"
        "from fusepatch.parity_check.command import add_arguments\n"
        "parser = argparse.ArgumentParser(); add_arguments(parser); parser.format_help()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(command.CONFIG_NAMES) == set(models.CONFIGS)


def wrong_usages() -> Iterator[list[str]]:
    yield []
    yield ["folder", "--config", "llama"]
    yield ["--config", "gpt9"]
    yield ["--config", "llama", "--tokens", "0"]
    yield ["--config", "llama", "--dtype", "int8"]


@pytest.mark.parametrize("arguments", list(wrong_usages()))
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(*arguments)
    assert left.value.code == 2
