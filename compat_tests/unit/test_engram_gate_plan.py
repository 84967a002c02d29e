"""Prepared plans of the Engram gate: what they compute on a CPU, and all that they refuse beforehand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from fusepatch import ops, selfcheck
from fusepatch.kernels import backends
from fusepatch.kernels.engram_gate import choose, reference
from fusepatch.ops import EngramGatePlan

M, S, D = 5, 2, 16
SIZE = {"tokens": M, "streams": S, "width": D, "device": "cpu", "eps": 1e-6}


def tensors(dtype: torch.dtype = torch.bfloat16, weight: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of a plan by name; those that are written to are poisoned."""
    torch.manual_seed(0)
    wide = reference.wide_dtype(dtype)
    nothing = lambda *shape, dtype=dtype: torch.full(shape, math.nan, dtype=dtype)
    return {
        "x": torch.randn(M, S, D).to(dtype),
        "kv": torch.randn(M, (S + 1) * D).to(dtype),
        "weight": torch.rand(S, D).to(weight),
        "out": nothing(M, S, D),
        "saved": nothing(M, S, 4, dtype=wide),
        "grad_out": torch.randn(M, S, D).to(dtype),
        "grad_x": nothing(M, S, D),
        "grad_kv": nothing(M, (S + 1) * D),
        "grad_weight": nothing(S, D, dtype=weight),
    }


def forward(plan: EngramGatePlan, t: dict[str, Tensor], **more) -> None:
    plan.forward(t["x"], t["kv"], t["weight"], more.pop("token_mask", None), out=t["out"], saved=t["saved"], **more)


def backward(plan: EngramGatePlan, t: dict[str, Tensor], **more) -> None:
    outputs = {name: t[name] for name in ("grad_x", "grad_kv", "grad_weight")}
    plan.backward(t["grad_out"], t["x"], t["kv"], t["weight"], t["saved"], **{**outputs, **more})


def ready(**options) -> EngramGatePlan:
    plan = EngramGatePlan(**{**SIZE, **options})
    plan.compile()
    return plan


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", [(True, "copysign"), (False, "sign")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_plan_computes_what_the_op_does(dtype: torch.dtype, form, masked: bool) -> None:
    residual, zero_dot = form
    t = tensors(dtype, reference.wide_dtype(dtype))
    mask = torch.arange(M) % 2 == 0 if masked else None
    options = {"residual": residual, "zero_dot": zero_dot}
    plan = ready(dtype=dtype, weight_dtype=t["weight"].dtype, masked=masked, **options)
    assert plan.workspace_bytes == 0
    forward(plan, t, token_mask=mask)
    backward(plan, t)
    leaves = [t[name].clone().requires_grad_() for name in ("x", "kv", "weight")]
    out = ops.engram_gate(*leaves, mask, eps=1e-6, **options)
    expected = (out, *torch.autograd.grad(out, leaves, t["grad_out"]))
    found = [t[name] for name in ("out", "grad_x", "grad_kv", "grad_weight")]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("wanted", ["grad_x", "grad_kv", "grad_weight"])
def test_only_what_is_given_is_written(wanted: str) -> None:
    t, plan = tensors(), ready()
    forward(plan, t)
    others = {name: None for name in ("grad_x", "grad_kv", "grad_weight") if name != wanted}
    backward(plan, t, **others)
    assert torch.isfinite(t[wanted]).all()
    assert all(t[name].isnan().all() for name in others)


def test_inputs_that_require_gradients_build_no_graph() -> None:
    t, plan = tensors(), ready()
    t["x"].requires_grad_()
    forward(plan, t)
    assert not t["out"].requires_grad


def test_no_tokens() -> None:
    t, plan = tensors(), ready(tokens=0)
    t = {name: each if "weight" in name else each[:0] for name, each in t.items()}
    forward(plan, t)
    backward(plan, t)
    assert not t["grad_weight"].any()


# -------------------------------------------------------------------------------------------------------- the plan

BAD_PLANS = {
    "tokens": ({"tokens": -1}, ValueError, "tokens must be positive"),
    "streams": ({"streams": 0}, ValueError, "streams must be positive"),
    "a fraction": ({"tokens": 1.5}, TypeError, "tokens must be a whole number"),
    "a flag": ({"streams": True}, TypeError, "streams must be a whole number"),
    "width": ({"width": 12}, ValueError, "multiple of 8"),
    "eps": ({"eps": 0.0}, ValueError, "eps must be finite"),
    "dtype": ({"dtype": torch.int32}, ValueError, "floating dtype"),
    "weight": ({"weight_dtype": torch.float16}, ValueError, "floating dtype"),
    "zero_dot": ({"zero_dot": "none"}, ValueError, "zero_dot must be one of"),
    "no index": ({"device": "cuda"}, ValueError, "a GPU with its index"),
    "another device": ({"device": "xpu:0"}, ValueError, "a GPU with its index"),
}


@pytest.mark.parametrize("bad", BAD_PLANS)
def test_plans_that_are_refused(bad: str) -> None:
    changes, error, message = BAD_PLANS[bad]
    with pytest.raises(error, match=message):
        EngramGatePlan(**{**SIZE, **changes})


def test_a_plan_for_a_gpu_needs_none() -> None:
    plan = EngramGatePlan(4096, 4, 5120, device="cuda:3", eps=1e-20)
    assert plan.workspace_bytes == 192 * 4 * 5120 * 4
    assert dataclasses.replace(plan, tokens=7).workspace_bytes == 7 * 4 * 5120 * 4


def test_what_no_kernel_serves_is_refused_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(backends, "missing", lambda backend: ())
    choose.TABLE.forget()
    plan = EngramGatePlan(**{**SIZE, "device": "cuda:0"})
    with pytest.raises(RuntimeError, match="no kernel serves this plan, because architecture"):
        plan.compile()
    with pytest.raises(RuntimeError, match="call compile"):
        forward(plan, tensors())
    choose.TABLE.forget()


def test_a_failed_self_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(backends, "missing", lambda backend: ())
    monkeypatch.setattr(selfcheck, "verdict", lambda *a: selfcheck.Verdict(selfcheck.Outcome.FAILED, "wrong"))
    choose.TABLE.forget()
    with pytest.raises(RuntimeError, match="selfcheck-failed"):
        EngramGatePlan(**{**SIZE, "device": "cuda:0"}).compile()
    choose.TABLE.forget()


def test_compile_comes_first() -> None:
    plan, t = EngramGatePlan(**SIZE), tensors()
    for call in (forward, backward):
        with pytest.raises(RuntimeError, match="call compile"):
            call(plan, t)


# ----------------------------------------------------------------------------------------------------------- tensors


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("engram_forward", "engram_backward"):
        monkeypatch.setattr(reference, name, lambda *a, **k: pytest.fail("it ran"))


WRONG = {
    "shape": (lambda t: t[:-1].contiguous(), "must be"),
    "dtype": (lambda t: t.half(), "must be"),
    "device": (lambda t: t.to("meta"), "must be on cpu, got meta"),
    "strides": (lambda t: torch.stack([t, t], -1)[..., 0], "must be contiguous"),
    "alignment": (
        lambda t: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape),
        "must start on 16 bytes",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["x", "kv", "weight", "out", "saved"])
def test_forward_refuses(nothing_runs: None, name: str, wrong: str) -> None:
    t, plan = tensors(), ready()
    change, message = WRONG[wrong]
    t[name] = change(t[name])
    with pytest.raises(ValueError, match=f"{name} {message}"):
        forward(plan, t)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["grad_out", "x", "kv", "weight", "saved", "grad_x", "grad_kv", "grad_weight"])
def test_backward_refuses(nothing_runs: None, name: str, wrong: str) -> None:
    t, plan = tensors(), ready()
    change, message = WRONG[wrong]
    t[name] = change(t[name])
    with pytest.raises(ValueError, match=f"{name} {message}"):
        backward(plan, t)


def laid_over(t: Tensor, other: Tensor, at: int) -> Tensor:
    """A tensor like `t` in the memory of `other`, `at` bytes from its start."""
    storage = torch.empty(0, dtype=torch.uint8).set_(other.untyped_storage())
    return storage[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape)


def roomy(t: dict[str, Tensor], name: str) -> None:
    """Gives a tensor 64 KiB of memory of its own, so that others fit on top of it."""
    room = torch.zeros(65536, dtype=torch.uint8)
    t[name] = room[: t[name].numel() * t[name].element_size()].view(t[name].dtype).view(t[name].shape)


FORWARD_PAIRS = [(o, i) for o in ("out", "saved") for i in ("x", "kv", "weight")] + [("saved", "out")]
GRADS = ("grad_x", "grad_kv", "grad_weight")
BACKWARD_PAIRS = [(o, i) for o in GRADS for i in ("grad_out", "x", "kv", "weight", "saved")]
BACKWARD_PAIRS += [("grad_kv", "grad_x"), ("grad_weight", "grad_x"), ("grad_weight", "grad_kv")]


@pytest.mark.parametrize("at", ["start", "last 16 bytes"])
@pytest.mark.parametrize(("output", "other", "call"), [
    *((*pair, forward) for pair in FORWARD_PAIRS), *((*pair, backward) for pair in BACKWARD_PAIRS)
])  # fmt: skip
def test_every_overlap_is_refused(nothing_runs: None, output: str, other: str, call, at: str) -> None:
    t, plan = tensors(), ready()
    roomy(t, other)
    size = t[other].numel() * t[other].element_size()
    t[output] = laid_over(t[output], t[other], 0 if at == "start" else size - 16)
    with pytest.raises(ValueError, match=f"{output} overlaps {other} in memory"):
        call(plan, t)


def test_neighbours_are_no_overlap() -> None:
    t, plan = tensors(), ready()
    roomy(t, "x")
    t["out"] = laid_over(t["out"], t["x"], t["x"].numel() * 2)
    forward(plan, t)


def test_masks_workspaces_and_streams(nothing_runs: None) -> None:
    t = tensors()
    mask = torch.ones(M, dtype=torch.bool)
    with pytest.raises(ValueError, match="masked=False"):
        forward(ready(), t, token_mask=mask)
    with pytest.raises(ValueError, match="masked=True"):
        forward(ready(masked=True), t)
    for bad in (mask[:-1], mask.int()):
        with pytest.raises(ValueError, match="token_mask must be"):
            forward(ready(masked=True), t, token_mask=bad)
    with pytest.raises(TypeError, match=r"out must be a torch\.Tensor"):
        forward(ready(), {**t, "out": None})
    with pytest.raises(ValueError, match="at least one of"):
        backward(ready(), t, grad_x=None, grad_kv=None, grad_weight=None)
    with pytest.raises(ValueError, match="workspace must be uint8"):
        backward(ready(), t, workspace=torch.empty(64))
    with pytest.raises(ValueError, match="workspace overlaps x"):
        backward(ready(), t, workspace=t["x"].view(torch.uint8).flatten())


def test_a_small_workspace_is_refused(nothing_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngramGatePlan, "workspace_bytes", 1024)  # as on a GPU
    t = tensors()
    with pytest.raises(ValueError, match="grad_weight needs a workspace of 1024 bytes"):
        backward(ready(), t)
    with pytest.raises(ValueError, match=r"workspace must be uint8 \[1024\] or longer"):
        backward(ready(), t, workspace=torch.empty(1023, dtype=torch.uint8))


def test_a_stream_of_another_device_is_refused(nothing_runs: None) -> None:
    class Stream:
        device = torch.device("cuda", 1)

    with pytest.raises(ValueError, match="the plan is for cpu, and stream is one of cuda:1"):
        forward(ready(), tensors(), stream=Stream())
