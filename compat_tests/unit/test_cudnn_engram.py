"""cuDNN's Engram gate: its own host code against the calls that we make, with its kernels played by the definition.

All of cuDNN's checks run as they are, of shapes, layouts, alignment and overlaps; no GPU has run any of it.

Tensors: M tokens, S = 4 streams, D = 5120.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import itertools
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fusepatch import ops, selfcheck, settings
from fusepatch.decline import Reason
from fusepatch.doctor import kernels
from fusepatch.doctor.findings import Examination
from fusepatch.kernels import vendor_sources
from fusepatch.kernels.engram_gate import check, choose, cudnn_engram, op, reference
from support import relative_error

pytest.importorskip("cuda.bindings")
pytest.importorskip("triton", minversion="3.7.0", reason="cudnn.engram asks for Triton 3.7")
api = pytest.importorskip("cudnn.engram.api", reason="nvidia-cudnn-frontend is not installed")

(CUDNN,) = (backend for backend in choose.BACKENDS if backend.name == "cudnn_engram")
CPU = torch.device("cpu")
NAMES = ("x", "kv", "weight")
M, S, D = 64, 4, 5120
EPS = 1e-6
BOUND = 2.5e-3
"""What rounding once to bf16 leaves, and a half more."""


# ----------------------------------------------------------------------------------------------------------- the stub


def at(pointer: tuple[torch.dtype, int], *shape: int) -> Tensor:
    """The tensor that lies there."""
    dtype, address = pointer
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def halves(kv: Tensor) -> tuple[Tensor, Tensor]:
    return kv[:, : S * D].view(-1, S, D), kv[:, S * D :]


class Played:
    """cuDNN's compiled kernels, in PyTorch. They are given addresses, like the real ones."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, int]] = []
        self.backwards: list[dict[str, int]] = []
        self.compiled = 0
        self.fault = 0.0
        """By how much the gradient of the keys is wrong."""

    def compile_forward(self, d: int, eps: float, device_index: Any, capability: Any) -> Callable[..., None]:
        self.compiled += 1
        assert d == D

        def kernel(x: Any, key: Any, value: Any, weight: Any, mask: Any, out: Any, saved: Any, n: Any, _: Any) -> None:
            tokens = int(n.value)
            self.forwards.append({"x": x[1], "kv": key[1], "weight": weight[1], "out": out[1], "saved": saved[1]})
            assert value[1] == key[1] + S * D * 2
            assert bool(at(mask, tokens).all())
            keys, values = halves(at(key, tokens, (S + 1) * D).double())
            reference.engram_forward(
                at(x, tokens, S, D).double(), keys, values, at(weight, S, D).double(), None, eps, True, "copysign",
                out_MSD=at(out, tokens, S, D), saved_MS4=at(saved, tokens, S, 4),
            )  # fmt: skip

        return kernel

    def compile_backward(self, tokens: int, d: int, device_index: Any, capability: Any) -> tuple[Any, ...]:
        self.compiled += 1
        assert d == D
        known: dict[str, Any] = {}

        def moments(value: int, grad_out: Tensor, saved: Tensor, scratch: int, *_: int, stream: int) -> None:
            known.update(value=value, saved=saved)

        def apply(
            x: Any, key: Any, weight: Any, grad_out: Any, scratch: Any, grad_x: Any, grad_key: Any, grad_value: Any,
            partial: Any, n: Any, _: Any,
        ) -> None:  # fmt: skip
            assert int(n.value) == tokens
            assert known["value"] == key[1] + S * D * 2
            assert grad_value[1] == grad_key[1] + S * D * 2
            self.backwards.append({"x": x[1], "kv": key[1], "weight": weight[1], "grad_kv": grad_key[1]})
            keys, values = halves(at(key, tokens, (S + 1) * D).double())
            grad_keys, grad_values = halves(at(grad_key, tokens, (S + 1) * D))
            known["grad_weight"] = torch.empty(S, D, dtype=torch.float64)
            reference.engram_backward(
                at(grad_out, tokens, S, D).double(), at(x, tokens, S, D).double(), keys, values,
                at(weight, S, D).double(), known["saved"].double(), True, False,
                grad_x_MSD=at(grad_x, tokens, S, D), grad_key_MSD=grad_keys, grad_value_MD=grad_values,
                grad_weight_SD=known["grad_weight"],
            )  # fmt: skip
            grad_keys.mul_(1 + self.fault)

        def reduce(partial: int, grad_weight: Tensor, *_: int, stream: int) -> None:
            grad_weight.copy_(known["grad_weight"])

        return apply, None, None, moments, reduce


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    caches = (cudnn_engram.drift, cudnn_engram.why_no_library)
    monkeypatch.setattr(cudnn_engram, "_plans", {})
    choose.TABLE.forget()
    for each in caches:
        each.cache_clear()
    yield
    choose.TABLE.forget()
    for each in caches:
        each.cache_clear()


def on_a_b200(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (10, 0)) -> None:
    """What cuDNN asks of a device, for tensors that are on none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(api._SavedGate, "_runtime_error_if", lambda self, wrong, message: None)  # "requires CUDA"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    on_a_b200(monkeypatch)
    found = Played()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(api, "_ptr", lambda dtype, address: (dtype, address))
    monkeypatch.setattr(api, "_compile_forward", found.compile_forward)
    monkeypatch.setattr(api, "_compile_backward", found.compile_backward)
    return found


def tensors(tokens: int = M, *, apart: bool = False, weight: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Keys that lean towards x or away, so that |dot| stays off 0, where any rounding counts."""
    torch.manual_seed(0)
    x = torch.randn(tokens, S, D)
    keys = torch.where(torch.rand(tokens, S, 1) < 0.5, -0.7, 0.7) * x + 0.3 * torch.randn(tokens, S, D)
    kv = torch.cat([keys.flatten(1), torch.randn(tokens, D)], 1)
    found = {"x": x.bfloat16(), "kv": kv.bfloat16(), "weight": (1 + 0.2 * torch.randn(S, D)).to(weight)}
    if apart:  # rows of wider tensors
        found = {
            **found,
            "x": torch.cat([found["x"]] * 2, 1)[:, :S],
            "kv": torch.cat([found["kv"], found["kv"][:, :8]], 1)[:, : (S + 1) * D],
        }
    return found


def run(
    backend: choose.Backend, given: dict[str, Tensor], grad_out: Tensor, wanted: tuple[str, ...] = NAMES
) -> dict[str, Tensor]:
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in given.items()}
    call = op.Call(backend, EPS, True, "copysign")
    out = op.run_engram_gate(call, leaves["x"], leaves["kv"], None, leaves["weight"], None)
    gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], grad_out.expand(out.shape))
    found = {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}
    if "kv" in found:  # beside the gradient of the value those of the keys are small
        found |= dict(zip(("key", "value"), halves(found["kv"]), strict=True))
    return found


def compare(given: dict[str, Tensor], grad_out: Tensor, wanted: tuple[str, ...] = NAMES) -> None:
    before = {name: t.clone() for name, t in given.items()}
    found = run(CUDNN, given, grad_out, wanted)
    exact = run(choose.REFERENCE, {name: t.double() for name, t in given.items()}, grad_out.double(), wanted)
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        assert found[name].dtype is (given["weight"] if name == "weight" else given["x"]).dtype
        bound = 1e-6 if found[name].dtype is torch.float32 else BOUND
        assert relative_error(found[name], expected) < bound, name
    assert all(torch.equal(t, before[name]) for name, t in given.items()), "an input was written to"


def gradient(tokens: int = M) -> Tensor:
    return torch.randn(tokens, S, D, generator=torch.Generator().manual_seed(1)).bfloat16()


# --------------------------------------------------------------------------------------- what is passed, and what comes


@pytest.mark.parametrize("apart", [False, True], ids=["dense", "rows apart"])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
def test_output_and_gradients(weight: torch.dtype, apart: bool, played: Played) -> None:
    compare(tensors(apart=apart, weight=weight), gradient())
    assert (len(played.forwards), len(played.backwards)) == (1, 1)


def test_more_tokens_and_a_gradient_of_one_element(played: Played) -> None:
    compare(tensors(192), torch.ones(1, 1, 1, dtype=torch.bfloat16))


@pytest.mark.parametrize("wanted", [w for n in (1, 2) for w in itertools.combinations(NAMES, n)], ids=str)
def test_every_choice_of_wanted_gradients(wanted: tuple[str, ...], played: Played) -> None:
    compare(tensors(), gradient(), wanted)


@pytest.mark.parametrize("wanted", ["key", "value"])
def test_separate_key_and_value(wanted: str, played: Played) -> None:
    given = tensors()
    halved = [t.clone() for t in halves(given["kv"])]
    halved[0] = halved[0].flatten(1)
    leaf = halved[wanted == "value"].requires_grad_()
    out = op.run_engram_gate(op.Call(CUDNN, EPS, True, "copysign"), given["x"], *halved, given["weight"], None)
    (found,) = torch.autograd.grad(out, leaf, gradient())
    exact = run(choose.REFERENCE, {n: t.double() for n, t in given.items()}, gradient().double(), ("kv",))
    assert relative_error(found, exact[wanted].reshape(found.shape)) < BOUND


@pytest.mark.parametrize("other", ["tensor", "row", "column", "stride"])
def test_keys_and_value_that_only_look_packed(other: str, played: Played) -> None:
    """All is as in one kv, but for one thing."""
    given = tensors(128)
    x, kv, weight = given["x"][:M], given["kv"], given["weight"]
    key, value = kv[:M, : S * D], kv[:M, S * D :]
    if other == "tensor":
        value = kv.flip(0)[:M, S * D :]
    elif other == "row":
        value = kv[1:][:M, S * D :]
    elif other == "column":
        value = kv[:M, :D]
    else:
        key = kv[::2, : S * D]
    found = op.run_engram_gate(op.Call(CUDNN, EPS, True, "copysign"), x, key, value, weight, None)
    exact = [t.double() for t in (x, torch.cat([key, value], 1), weight)]
    assert relative_error(found, ops.engram_gate(*exact, eps=EPS)) < BOUND


def test_what_is_dense_is_not_copied(played: Played) -> None:
    given = {name: t.requires_grad_() for name, t in tensors().items()}
    call = op.Call(CUDNN, EPS, True, "copysign")
    out = op.run_engram_gate(call, given["x"], given["kv"], None, given["weight"], None)
    first = torch.autograd.grad(out, [given["kv"]], gradient(), retain_graph=True)
    second = torch.autograd.grad(out, [given["kv"]], gradient())
    assert torch.equal(first[0], second[0])
    (forward,), backwards = played.forwards, played.backwards
    assert forward["out"] == out.data_ptr()
    for name in NAMES:
        assert {forward[name], *(each[name] for each in backwards)} == {given[name].data_ptr()}
    assert [each["grad_kv"] for each in backwards] == [first[0].data_ptr(), second[0].data_ptr()]


def test_a_plan_is_made_once_for_each_number_of_tokens_and_eps(played: Played) -> None:
    for _ in range(2):
        run(CUDNN, tensors(), gradient())
    assert played.compiled == 2
    run(CUDNN, tensors(128), gradient(128))
    assert played.compiled == 4
    given = tensors()
    with torch.no_grad():
        expected = torch.empty(M, S, D, dtype=torch.float64)
        saved = torch.empty(M, S, 4, dtype=torch.float64)
        doubles = [t.double() for t in (given["x"], *halves(given["kv"]), given["weight"])]
        reference.engram_forward(*doubles, None, 1e3, True, "copysign", out_MSD=expected, saved_MS4=saved)
        found = op.run_engram_gate(
            op.Call(CUDNN, 1e3, True, "copysign"), given["x"], given["kv"], None, given["weight"], None
        )
    assert played.compiled == 5
    assert relative_error(found, expected) < BOUND


def test_a_mode_sees_the_same(played: Played) -> None:
    plain = run(CUDNN, tensors(), gradient())
    with FlopCounterMode(display=False):
        seen = run(CUDNN, tensors(), gradient())
    assert len(played.backwards) == 2
    assert all(torch.equal(seen[name], t) for name, t in plain.items())


class Steps:
    def reference(self) -> None: ...
    def kernel(self, what: str) -> None: ...


@pytest.mark.parametrize("fault", [0.0, 0.01])
def test_the_selfcheck(fault: float, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault:
        monkeypatch.setattr(check, "_CUDNN_SHAPES", check._CUDNN_SHAPES[:1])
    played.fault = fault
    found = check.run("cudnn_engram bfloat16", CPU, Steps())
    assert len(played.forwards) >= 5
    assert bool(found) is bool(fault)
    assert all(what.startswith("grad_key") for what in found)


# --------------------------------------------------------------------------------------------- what it takes, and cuDNN


def declared(tokens: int, streams: int = S, width: int = D, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Metadata alone."""
    new = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="meta")
    wide = torch.float32
    return {
        "x": new(tokens, streams, width), "kv": new(tokens, (streams + 1) * width),
        "weight": new(streams, width, dtype=wide), "saved": new(tokens, streams, 4, dtype=wide),
        "grad_out": new(tokens, streams, width),
    }  # fmt: skip


def test_the_plans_of_this_release() -> None:
    assert cudnn_engram.drift() == ()
    assert cudnn_engram.why_no_library() is None
    expected = {
        "EngramGateSavedForward": (
            "self, x, kv, weight, token_mask, eps, backend",
            "self, x, kv, weight, token_mask, out, saved, current_stream",
        ),
        "EngramGateSavedBackward": (
            "self, x, kv, weight, saved, grad_out, backend",
            "self, x, kv, weight, saved, grad_out, grad_x, grad_kv, grad_weight, workspace, current_stream",
        ),
    }
    for name, parameters in expected.items():
        kind = getattr(api, name)
        found = [", ".join(inspect.signature(f).parameters) for f in (kind.__init__, kind.execute)]
        assert found == list(parameters)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 96, 128, 8128, 8191, 8192, 8193, 8256])
def test_numbers_of_tokens_are_those_that_cudnn_takes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_b200(monkeypatch)
    given = declared(tokens)
    forward = api.EngramGateSavedForward(
        *(given[name] for name in NAMES), torch.empty(tokens, dtype=torch.bool, device="meta"), eps=EPS
    )
    assert forward.check_support()
    backward = api.EngramGateSavedBackward(*given.values())
    if cudnn_engram.takes(tokens):
        assert backward.check_support()
    else:
        with pytest.raises(ValueError, match="tokens"):
            backward.check_support()


def test_no_tokens_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_b200(monkeypatch)
    assert not cudnn_engram.takes(0)
    with pytest.raises(ValueError, match="tokens"):
        api.EngramGateSavedBackward(*declared(0).values()).check_support()


PROBLEM = choose.Problem(torch.device("cuda", 0), torch.bfloat16, torch.float32, S, D, True, "copysign", False)


def by_name(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (10, 0), name: str = "cudnn_engram") -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(selfcheck, "device_kind", lambda device: f"a GPU {capability}")
    monkeypatch.setattr(selfcheck, "verdict", lambda check, device: SimpleNamespace(reason=None))
    settings.install(settings.read({"FUSEPATCH_ENGRAM_GATE_BACKEND": name}))


def reason(problem: choose.Problem = PROBLEM, tokens: int = 4096) -> Reason | str:
    found = choose.choose(problem, tokens)
    return found if isinstance(found, Reason) else found.name


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ({"streams": 3}, Reason.SIZE_NOT_ADMITTED),
        ({"width": 2560}, Reason.SIZE_NOT_ADMITTED),
        ({"dtype": torch.float16}, Reason.DTYPE),
        ({"dtype": torch.float32}, Reason.DTYPE),
    ],
    ids=str,
)
def test_sizes_and_dtypes_that_neither_takes(
    size: dict[str, Any], why: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name(monkeypatch)
    assert reason() == "cudnn_engram"
    assert reason(PROBLEM._replace(**size)) is why
    on_a_b200(monkeypatch)
    with pytest.raises(ValueError, match="must be contiguous"):
        api.EngramGateSavedBackward(*declared(4096, **size).values()).check_support()


@pytest.mark.parametrize(
    "option", [{"masked": True}, {"rounded": True}, {"residual": False}, {"zero_dot": "sign"}], ids=str
)
def test_options_that_it_does_not_compute(option: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch)
    assert reason(PROBLEM._replace(**option)) is Reason.OPTION


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)], ids=str)
def test_other_gpus_are_declined_here_and_there(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch, capability)
    found = reason()
    on_a_b200(monkeypatch, capability)
    plan = api.EngramGateSavedBackward(*declared(4096).values())
    if capability == (10, 0):
        assert found == "cudnn_engram"
        assert plan.check_support()
    else:
        assert found is Reason.ARCHITECTURE
        with pytest.raises(NotImplementedError, match="SM100"):
            plan.check_support()


def test_it_serves_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch, name="auto")
    assert CUDNN.named_only
    for any_size in (False, True):
        found = choose.choose(PROBLEM, 4096, any_size=any_size)
        assert (found if isinstance(found, Reason) else found.name) != "cudnn_engram"
    monkeypatch.setattr(choose, "BACKENDS", (CUDNN, choose.REFERENCE))
    choose.TABLE.forget()
    assert reason() is Reason.NO_KERNEL


def test_it_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch)
    assert reason() == "cudnn_engram"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert reason() is Reason.CAPTURE_COLD


def test_a_plan_of_ours_says_that_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch)
    with pytest.raises(RuntimeError, match="cudnn_engram allocates"):
        ops.EngramGatePlan(4096, S, D, "cuda:0", EPS).compile()
    with pytest.raises(RuntimeError, match="size-not-admitted"):
        ops.EngramGatePlan(4095, S, D, "cuda:0", EPS).compile()


def test_the_op_declines_for_real(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public op: what fits goes to cuDNN, and the rest is right without it."""
    free = dataclasses.replace(CUDNN, native=False, check=None)
    monkeypatch.setattr(choose, "BACKENDS", (free, choose.REFERENCE))
    settings.install(settings.read({"FUSEPATCH_ENGRAM_GATE_BACKEND": "cudnn_engram"}))
    given = tensors(65)

    def call(tokens: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Tensor, Tensor]:
        rows = [given["x"][:tokens].to(dtype), given["kv"][:tokens].to(dtype), given["weight"]]
        exact = [t.double() for t in rows]
        return ops.engram_gate(*rows, eps=EPS, **options), ops.engram_gate(*exact, eps=EPS, **options)

    masked = {"token_mask": torch.arange(64) % 3 != 1}
    for served, arguments, options in (
        (1, (64,), {}),
        (0, (65,), {}),
        (0, (0,), {}),
        (0, (64, torch.float16), {}),
        (0, (64,), masked),
        (0, (64,), {"residual": False}),
        (0, (64,), {"zero_dot": "sign"}),
    ):
        played.forwards.clear()
        found, expected = call(*arguments, **options)
        assert len(played.forwards) == served, (arguments, options)
        assert not found.numel() or relative_error(found, expected) < BOUND


def test_a_masked_token_may_hold_anything(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why masks are declined."""
    monkeypatch.setattr(choose, "BACKENDS", (dataclasses.replace(CUDNN, native=False, check=None), choose.REFERENCE))
    settings.install(settings.read({"FUSEPATCH_ENGRAM_GATE_BACKEND": "cudnn_engram"}))
    given = tensors()
    given["kv"][3] = math.nan
    out = ops.engram_gate(*given.values(), token_mask=torch.arange(M) != 3, eps=EPS)
    assert torch.equal(out[3], given["x"][3])
    assert not played.forwards


# --------------------------------------------------------------------------------------------------------------- drift


@pytest.mark.parametrize("name", cudnn_engram._SOURCES)
def test_changed_sources_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "engram"
    shutil.copytree(cudnn_engram._folder(), folder)
    monkeypatch.setattr(cudnn_engram, "_folder", lambda: folder)
    assert cudnn_engram.drift() == ()
    (folder / name).write_text((folder / name).read_text() + "\n")
    cudnn_engram.drift.cache_clear()
    assert "not that of 1.32.0" in " ".join(cudnn_engram.drift())
    by_name(monkeypatch)
    assert reason() is Reason.PACKAGE_DIFFERS
    (folder / name).unlink()
    cudnn_engram.drift.cache_clear()
    assert "no such cudnn.engram" in " ".join(cudnn_engram.drift())


@pytest.mark.parametrize(
    ("distribution", "version", "fits"),
    [
        ("triton", "3.6.0", False), ("triton", "3.7.0", True), ("triton", "4.0.0", True), ("triton", None, True),
        ("nvidia-cutlass-dsl", "4.6.2", False), ("nvidia-cutlass-dsl", "4.7.0", True),
    ],
)  # fmt: skip
def test_versions_that_cudnn_asks_for(
    distribution: str, version: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = vendor_sources.version_of
    monkeypatch.setattr(vendor_sources, "version_of", lambda name: version if name == distribution else real(name))
    assert (cudnn_engram.drift() == ()) is fits
    by_name(monkeypatch)
    assert reason() == "cudnn_engram" if fits else reason() is Reason.PACKAGE_DIFFERS


def test_cudnns_own_check_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch)
    api._reductions.cache_clear()
    monkeypatch.setattr("triton.__version__", "3.6.0")
    assert reason() is Reason.PACKAGE_DIFFERS
    api._reductions.cache_clear()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ImportError("no module named cuda"), Reason.MISSING_PACKAGE),
        (RuntimeError("the CuTe DSL is too old"), Reason.PACKAGE_DIFFERS),
    ],
    ids=str,
)
def test_a_library_that_can_not_be_had(error: Exception, why: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise error

    by_name(monkeypatch)
    monkeypatch.setattr(cudnn_engram, "_api", fail)
    assert reason() is why


def test_doctor_says_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_engram, "_folder", lambda: Path("/no/such/folder"))
    settings.install(settings.read({"FUSEPATCH_ENGRAM_GATE": "1"}))
    it = Examination()
    kernels.judge_checks(it, kernels.all_kernels((), None, False, (), lambda line: None))
    assert any("no such cudnn.engram" in finding.what for finding in it.findings)
