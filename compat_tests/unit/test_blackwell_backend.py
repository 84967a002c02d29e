"""The backend `blackwell` on GPUs that are not here: where it serves, what it declines, what it would launch, and that
its self-check looks at every kernel. Its kernels are played by plain PyTorch; what they are is tested in compile_only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusepatch import ops, profiles, selfcheck, settings
from fusepatch.decline import Reason, Route
from fusepatch.kernels import backends
from fusepatch.kernels.cute import artefacts, compiling
from fusepatch.kernels.gated_mlp import blackwell, check, choose, launching, library, op, reference
from fusepatch.kernels.gated_mlp.blackwell_configuration import (
    NARROW,
    SQUARE,
    WIDE,
    Backward,
    Forward,
    Size,
    configurations,
    size_of,
)
from fusepatch.profiles import Measured
from support import relative_error

(BLACKWELL,) = (backend for backend in choose.BACKENDS if backend.name == "blackwell")
CUDA = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
PLAIN = choose.Problem(Route.FUSED, CUDA, BF16, 4096, 14336, "silu", bias=False)
BOTH = pytest.mark.parametrize("capability", [(10, 0), (10, 3)], ids=str)
MULTIPROCESSORS = 148
Spoil = Callable[[Tensor, Tensor | None], object]


@dataclasses.dataclass
class Gpu:
    """One that is not here."""

    capability: tuple[int, int] = (10, 0)
    capturing: bool = False
    checked: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    """Every package is there, every self-check passes, and the table is the real one."""
    found = Gpu()

    def verdict(asked: selfcheck.Check, device: torch.device) -> selfcheck.Verdict:
        found.checked.append(asked.case)
        return selfcheck.Verdict(selfcheck.Outcome.PASSED)

    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(selfcheck, "verdict", verdict)
    monkeypatch.setattr(selfcheck, "device_kind", lambda device: f"a GPU {found.capability}")
    monkeypatch.setattr(backends, "missing", lambda backend: ())
    monkeypatch.setattr(compiling, "_compiled", {})
    _begin_anew()
    yield found
    monkeypatch.undo()
    _begin_anew()


def _begin_anew() -> None:
    settings.install(None)
    choose.TABLE.forget()
    for cached in (
        blackwell._arch,
        blackwell._ctas,
        launching.forward,
        launching.backward,
        launching._compile_the_rest,
    ):
        cached.cache_clear()


def name_it() -> None:
    settings.install(settings.read({"FUSEPATCH_GATED_MLP_BACKEND": "blackwell"}))


# ------------------------------------------------------------------------------------------------------ where it serves


@BOTH
@pytest.mark.parametrize("tokens", [1, 300, 8192, 2**20])
def test_only_where_it_is_named(gpu: Gpu, capability: tuple[int, int], tokens: int) -> None:
    gpu.capability = capability
    found = choose.choose(PLAIN, tokens)
    assert found is not BLACKWELL
    assert not any("blackwell" in case for case in gpu.checked)
    name_it()
    assert choose.choose(PLAIN, tokens) is BLACKWELL
    assert gpu.checked[-1] == "blackwell fused bfloat16 silu"


@BOTH
def test_or_where_it_was_measured_to_be_the_fastest(gpu: Gpu, capability: tuple[int, int]) -> None:
    gpu.capability = capability
    identity = profiles.identity(f"a GPU {capability}")
    measured = Measured("gated_mlp", "module", (backends.described(PLAIN),), 2048, ("train",), "blackwell", {})
    assert profiles.add(identity, measured)
    _begin_anew()
    assert choose.choose(PLAIN, 2048) is BLACKWELL
    assert choose.choose(PLAIN, 2047) is not BLACKWELL
    assert choose.choose(PLAIN._replace(inner=11008), 2048) is not BLACKWELL
    assert not choose.is_too_few(2048, CUDA)
    gpu.capability = (10, 3) if capability == (10, 0) else (10, 0)  # what was measured elsewhere says nothing here
    _begin_anew()
    assert choose.choose(PLAIN, 2048) is not BLACKWELL


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 1), (11, 0), (12, 0), (12, 1)], ids=str)
def test_no_other_gpu_gets_it(gpu: Gpu, capability: tuple[int, int]) -> None:
    gpu.capability = capability
    name_it()
    assert choose.choose(PLAIN, 8192) is Reason.ARCHITECTURE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": FP16}, None),
        ({"packed": True}, None),
        ({"down_bias": True}, None),
        *(({"activation": name}, None) for name in choose.ACTIVATIONS),
        ({"hidden": 4100}, Reason.ALIGNMENT),
        ({"inner": 14340}, Reason.ALIGNMENT),
        ({"dtype": torch.float32}, Reason.DTYPE),
        ({"dtype": torch.float64}, Reason.DTYPE),
        ({"activation": "relu"}, Reason.ACTIVATION),
        ({"bias": True}, Reason.BIAS),
        ({"route": Route.POINTWISE}, Reason.NO_KERNEL),
        ({"device": torch.device("cpu")}, Reason.CPU),
        ({"device": torch.device("meta")}, Reason.META),
    ],
    ids=str,
)
def test_what_it_declines(changes: dict[str, Any], reason: Reason | None) -> None:
    name_it()
    assert choose.choose(PLAIN._replace(**changes), 300) is (reason or BLACKWELL)


def test_addresses_that_tma_can_not_read() -> None:
    name_it()
    whole = torch.zeros(65, dtype=BF16)
    assert choose.choose(PLAIN, 1, whole, whole[8:]) is BLACKWELL
    assert choose.choose(PLAIN, 1, whole, whole[1:]) is Reason.ALIGNMENT


def test_without_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "missing", lambda backend: ("cutlass",) if "cutlass" in backend.packages else ())
    name_it()
    assert choose.choose(PLAIN, 300) is Reason.MISSING_PACKAGE


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (selfcheck.Outcome.FAILED, Reason.SELFCHECK_FAILED),
        (selfcheck.Outcome.INCONCLUSIVE, Reason.SELFCHECK_INCONCLUSIVE),
    ],
)
def test_a_self_check_that_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, outcome: selfcheck.Outcome, reason: Reason
) -> None:
    monkeypatch.setattr(selfcheck, "verdict", lambda *_: selfcheck.Verdict(outcome))
    name_it()
    assert choose.choose(PLAIN, 300) is reason


@BOTH
def test_capture_waits_for_every_kernel_of_a_call(gpu: Gpu, capability: tuple[int, int]) -> None:
    """Those of another architecture are none."""
    gpu.capability = capability
    arch, other = (blackwell.ARCHS[each] for each in (capability, (10, 3) if capability == (10, 0) else (10, 0)))
    name_it()
    choose.choose(PLAIN, 8192)
    gpu.capturing = True
    needed = configurations(BF16, "silu", Size.LARGE)
    assert len(set(needed)) == 4
    compiling._compiled.update({(each, other): print for each in needed})
    for each in needed:
        assert choose.choose(PLAIN, 8192) is Reason.CAPTURE_COLD
        compiling._compiled[each, arch] = print
    assert choose.choose(PLAIN, 8192) is BLACKWELL
    assert choose.choose(PLAIN, 1) is Reason.CAPTURE_COLD  # narrow tiles


def test_what_doctor_is_told() -> None:
    (standing,) = (each for each in choose.survey(CUDA) if each.backend == "blackwell")
    assert (standing.reason, standing.missing, standing.route) == (None, (), Route.FUSED)
    assert not standing.native  # only if named
    assert {each.case for each in standing.checks} == {
        f"blackwell fused {dtype} {activation}"
        for dtype in ("bfloat16", "float16")
        for activation in choose.ACTIVATIONS
    }


# -------------------------------------------------------------------------------------------------- which kernel serves


@pytest.mark.parametrize(
    ("tokens", "inner", "size"),
    [
        (1, 3072, Size.SMALL),
        (128, 28672, Size.SMALL),
        (129, 9472, Size.LARGE),
        (129, 9344, Size.SMALL),
        (8192, 14336, Size.LARGE),
        (512, 3072, Size.SMALL),
    ],
)
def test_which_tiles_serve_which_sizes(tokens: int, inner: int, size: Size) -> None:
    assert size_of(tokens, 4096, inner) is size


def test_the_self_check_has_a_shape_for_each_way_of_cutting_the_work_up() -> None:
    """And with each, some CTA has three tiles: the third one reuses what the first had of tensor memory."""
    for multiprocessors in (148, 160):
        deepest: dict[str, int] = {}
        for tokens, hidden, inner in check._FUSED_SHAPES:
            for kernel in configurations(BF16, "silu", size_of(tokens, hidden, inner)):
                columns = kernel.half if isinstance(kernel, Forward) else kernel.tile.columns
                tiles = -(-tokens // 128) * -(-inner // columns)
                name = f"{kernel.kernel} {kernel.tile.columns}"
                deepest[name] = max(deepest.get(name, 0), -(-tiles // multiprocessors))
        assert set(deepest) == {f"blackwell_forward {tile.columns}" for tile in (WIDE, NARROW)} | {
            f"blackwell_backward {SQUARE.columns}"
        }
        assert all(tiles >= 3 for tiles in deepest.values()), deepest


def test_what_ships_is_what_is_tested() -> None:
    pytest.importorskip("numpy")
    from blackwell_kernels import EVERY

    assert set(EVERY) == {
        each
        for dtype in BLACKWELL.dtypes
        for activation in choose.ACTIVATIONS
        for size in Size
        for each in configurations(dtype, activation, size)
    }


def test_a_kernel_on_disk_is_one_architectures() -> None:
    (first, *_) = configurations(BF16, "silu", Size.LARGE)
    options = [f"--enable-tvm-ffi --gpu-arch {arch}" for arch in blackwell.ARCHS.values()]
    assert options == ["--enable-tvm-ffi --gpu-arch sm_100a", "--enable-tvm-ffi --gpu-arch sm_103a"]
    assert len({artefacts.key_of(first, each) for each in options}) == 2


# ---------------------------------------------------------------------------------------------------- what is launched


@dataclasses.dataclass
class Played:
    """The kernels, by plain PyTorch; what was compiled and launched, and what spoils the results of one."""

    compiled: list[tuple[Forward | Backward, str]] = dataclasses.field(default_factory=list)
    launched: list[tuple[Forward | Backward, tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    spoil: dict[Forward | Backward, Spoil] = dataclasses.field(default_factory=dict)

    def get(self, configuration: Forward | Backward, build: object, arch: str) -> Callable[..., None]:
        assert build is launching.build
        if (configuration, arch) not in self.compiled:
            self.compiled.append((configuration, arch))

        def launch(*arguments: Any) -> None:
            *operands, ctas = arguments
            assert ctas == MULTIPROCESSORS
            assert all(t.data_ptr() % 16 == t.stride(0) * 2 % 16 == 0 and t.stride(1) == 1 for t in operands[:3])
            self.launched.append((configuration, arguments))
            results = _play(configuration, *operands)
            self.spoil.get(configuration, lambda *_: None)(*results)

        return launch


def _has_two_results(configuration: Forward | Backward) -> bool:
    return configuration.keep_gate_up if isinstance(configuration, Forward) else configuration.want_h


def _play(configuration: Forward | Backward, *operands: Any) -> tuple[Tensor, Tensor | None]:
    *inputs, first, second = operands
    assert (second is not None) is _has_two_results(configuration)
    if isinstance(configuration, Forward):
        right = reference.dual_gemm_act(*inputs, None, None, configuration.activation, want_gate_up=True)
    else:
        right = reference.gemm_dact(*inputs, configuration.activation, want_h=True)
    first.copy_(right[0])
    if second is not None:
        second.copy_(right[1])
    return first, second


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    found = Played()
    monkeypatch.setattr(compiling, "compiled", found.get)
    return found


def _tensors(tokens: int, hidden: int, inner: int, apart: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens + hidden)
    shapes = {"x": (tokens, hidden + apart), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    made = {name: torch.randn(shape, generator=generator).to(BF16) for name, shape in shapes.items()}
    made["x"] = made["x"][:, :hidden]
    return made


def _step(tensors: dict[str, Tensor], backend: choose.Backend) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = op.run_gated_mlp(backend, *leaves.values(), None, None, None, "silu")
    gradients = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@BOTH
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_a_step(gpu: Gpu, played: Played, capability: tuple[int, int], tokens: int) -> None:
    """The forward kernel that keeps gate and up, the backward kernel with h, for this GPU's architecture; nothing for
    no tokens."""
    gpu.capability = capability
    given = _tensors(tokens, 16, 24)
    found, right = (_step(given, backend) for backend in (BLACKWELL, choose.REFERENCE))
    assert all(torch.equal(found[name], right[name]) for name in right)
    forward, keeping, _, with_h = configurations(BF16, "silu", Size.SMALL)
    assert [configuration for configuration, _ in played.launched] == ([keeping, with_h] if tokens else [])
    arch = "sm_100a" if capability == (10, 0) else "sm_103a"
    assert {each for _, each in played.compiled} == ({arch} if tokens else set())
    if tokens:  # what its gradients may need is compiled with it
        assert {each for each, _ in played.compiled} == set(configurations(BF16, "silu", Size.SMALL))
    played.launched.clear()
    with torch.no_grad():
        op.run_gated_mlp(BLACKWELL, *given.values(), None, None, None, "silu")
    assert [configuration for configuration, _ in played.launched] == ([forward] if tokens else [])


def test_large_calls_get_wide_tiles(played: Played) -> None:
    _step(_tensors(136, 8, 9480), BLACKWELL)
    assert [configuration.tile for configuration, _ in played.launched] == [WIDE, SQUARE]


def test_rows_that_tma_can_not_read_are_copied(played: Played) -> None:
    """`Played` looks at every operand."""
    given = _tensors(9, 16, 24, apart=3)
    assert given["x"].stride(0) % 8
    off = torch.cat([given["gate"].flatten()[:1], given["gate"].flatten()])[1:].view_as(given["gate"])
    assert off.data_ptr() % 16
    found, right = (_step({**given, "gate": off}, backend) for backend in (BLACKWELL, choose.REFERENCE))
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_biases_never_reach_the_kernel(played: Played) -> None:
    given, bias = _tensors(7, 16, 24), torch.zeros(24, dtype=BF16)
    with pytest.raises(AssertionError, match="declines"):
        blackwell.dual_gemm_act(given["x"], given["gate"], given["up"], bias, bias, "silu", want_gate_up=False)


def test_through_the_operators_of_compiled_code(played: Played) -> None:
    """As `torch.compile` calls it; what the kernel can't read is served by plain PyTorch there."""
    assert library.serving(PLAIN) is None
    name_it()
    assert library.serving(PLAIN) == ("blackwell", 1)
    given = _tensors(7, 16, 24)
    for tensors, launches in ((given, 1), ({**given, "x": torch.zeros(7 * 16 + 1, dtype=BF16)[1:].view(7, 16)}, 0)):
        played.launched.clear()
        out, gate_up = torch.ops.fusepatch.gated_mlp(*tensors.values(), None, "silu", True, "blackwell")
        right = op.run_gated_mlp(choose.REFERENCE, *tensors.values(), None, None, None, "silu")
        assert torch.equal(out, right)
        assert gate_up.shape == (7, 48)
        assert len(played.launched) == launches


def test_a_direct_call_is_served_where_it_is_named(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "for_op", lambda problem, tokens, *_: choose.for_op(problem._replace(device=CUDA), tokens))
    given = _tensors(7, 16, 24)
    for named in (False, True):
        if named:
            name_it()
        played.launched.clear()
        out = ops.gated_mlp(given["x"], given["gate"], given["up"], given["down"])
        assert [each.tile for each, _ in played.launched] == ([NARROW] if named else [])
        exact = op.run_gated_mlp(choose.REFERENCE, *(t.double() for t in given.values()), None, None, None, "silu")
        assert relative_error(out, exact) < 1e-2


# ---------------------------------------------------------------------------------- the self-check, rehearsed by faults


class _Steps:
    def reference(self) -> None: ...

    def kernel(self, case: str) -> None: ...


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((7, 72, 136), (136, 8, 9480))
    assert {size_of(*shape) for shape in shapes} == set(Size)
    monkeypatch.setattr(check, "_FUSED_SHAPES", shapes)


def _checked() -> list[str]:
    return check.run("blackwell fused bfloat16 silu", torch.device("cpu"), _Steps())


def test_the_self_check_accepts_what_is_right(played: Played, small_shapes: None) -> None:
    assert _checked() == []
    every = {each for size in Size for each in configurations(BF16, "silu", size)}
    assert {configuration for configuration, _ in played.launched} == every


FAULTS: dict[str, Spoil] = {
    "a corner is not written": lambda first, _: first[-1:, -8:].fill_(float("nan")),
    "a tenth too much in half of the columns": lambda first, _: first[:, : first.shape[1] // 2].mul_(1.1),
    "what is wanted besides is a row off": lambda _, second: (
        None if second is None else second.copy_(second.roll(1, 0))
    ),
}


KERNELS = dict.fromkeys(each for size in Size for each in configurations(BF16, "silu", size))
CASES = [
    (kernel, fault) for kernel in KERNELS for fault in FAULTS if "besides" not in fault or _has_two_results(kernel)
]


@pytest.mark.parametrize(
    ("kernel", "fault"), CASES, ids=lambda each: each if isinstance(each, str) else f"{each.kernel}-{each.tile.columns}"
)
def test_the_self_check_sees_a_fault_of_any_one_kernel(
    played: Played, small_shapes: None, kernel: Forward | Backward, fault: str
) -> None:
    played.spoil[kernel] = FAULTS[fault]
    assert _checked()
