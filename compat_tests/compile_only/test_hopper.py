"""Every kernel of the Hopper backend, compiled for sm_90a without a GPU, and what its machine code says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine_code
import pytest
import torch
from plain_products import PlainProducts, with_products
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fusepatch import selfcheck, settings
from fusepatch.decline import Reason, Route
from fusepatch.kernels import backends
from fusepatch.kernels.cute import artefacts, compiling
from fusepatch.kernels.gated_mlp import (
    check,
    choose,
    hopper,
    hopper_configuration,
    hopper_products,
    launching,
    library,
    op,
    reference,
)
from fusepatch.kernels.gated_mlp.hopper_configuration import Kind

DTYPES = [torch.bfloat16, torch.float16]
# Two dtypes, three activations, three sizes, two kernels, and what each writes: 72, at 1 to 3 s.
KINDS = [
    pytest.param(
        dtype,
        activation,
        size,
        marks=[] if (dtype, activation) in [(torch.bfloat16, "silu"), (torch.float16, "gelu")] else [pytest.mark.slow],
        id=f"{str(dtype).removeprefix('torch.')}-{activation}-{size.value}",
    )
    for dtype in DTYPES
    for activation in choose.ACTIVATIONS
    for size in hopper.Size
]


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


@machine_code.needs_the_dsl
@machine_code.needs_the_tools
@pytest.mark.parametrize("which", range(4), ids=["h", "h and gate_up", "d_gate_up", "d_gate_up and h"])
@pytest.mark.parametrize(("dtype", "activation", "size"), KINDS)
def test_machine_code(
    sm90: None, tmp_path: Path, dtype: torch.dtype, activation: str, size: hopper.Size, which: int
) -> None:
    operations = _inspected(hopper.configurations(dtype, activation, size)[which], tmp_path)
    assert not operations.keys() & {"LDG", "STG", "LD", "ST", "LDGSTS"}, operations


# Two dtypes, three activations, two sizes (the forward kernels of shallow and deep sizes are the same): 24.
@machine_code.needs_the_dsl
@machine_code.needs_the_tools
@pytest.mark.parametrize("which", range(2), ids=["h", "h and gate_up"])
@pytest.mark.parametrize(("dtype", "activation", "size"), [kind for kind in KINDS if "shallow" not in str(kind.id)])
def test_machine_code_with_biases(
    sm90: None, tmp_path: Path, dtype: torch.dtype, activation: str, size: hopper.Size, which: int
) -> None:
    """Elements of the biases are read one by one, each once per chunk; nothing else bypasses TMA."""
    configuration = hopper.configurations(dtype, activation, size, biased=True)[which]
    operations = _inspected(configuration, tmp_path)
    assert not operations.keys() & {"STG", "LD", "ST", "LDGSTS"}, operations
    of_a_chunk = 2 * configuration.chunk // 4  # of gate and up; two of each eight columns
    assert operations["LDG"] == configuration.parts * of_a_chunk


@machine_code.needs_the_dsl
@machine_code.needs_the_tools
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "columns"),
    [(kind, columns) for kind, all_of_it in hopper_configuration.COLUMNS.items() for columns in all_of_it],
)
def test_machine_code_of_the_products(
    sm90: None, tmp_path: Path, kind: hopper_configuration.Kind, columns: int, dtype: torch.dtype
) -> None:
    configuration = hopper_configuration.product(kind, dtype, columns)
    operations = _inspected(configuration, tmp_path)
    assert not operations.keys() & {"LDG", "STG", "LD", "ST", "LDGSTS"}, operations
    assert operations["UTMASTG"] == configuration.parts * configuration.outputs


def _inspected(configuration: Any, folder: Path) -> Counter[str]:
    """Compiles it, and holds its machine code to what is so of every kernel; returns its operations."""
    launching.build(configuration, f"--enable-tvm-ffi --keep-cubin --dump-dir={folder}")
    text = machine_code.disassembled(folder)
    assert "EF_CUDA_ACCELERATORS" in text  # the features of sm_90a, and not of sm_90 alone
    assert "EF_CUDA_SM90" in text
    lines = machine_code.instructions(text)
    operations = Counter(line.split()[0].split(".")[0] for line in lines)

    # The tensor cores: all of a stage's instructions, once for the first stage of a tile and once in the loop.
    tile = configuration.tile
    assert operations["HGMMA"] == 2 * (tile.rows // 64) * 4, operations
    shape = f"64x{tile.columns}x16"
    assert all(line.split()[0].startswith(f"HGMMA.{shape}.F32") for line in lines if line.startswith("HGMMA"))

    # TMA for all that is loaded and stored, and nothing besides; the operand that a cluster shares is multicast.
    assert operations["UTMALDG"] >= 3
    assert operations["UTMASTG"] >= 1
    assert any("MULTICAST" in line for line in lines if line.startswith("UTMALDG")) is (tile.cluster > 1)

    # Registers: nothing spilled, warp groups trade them, and rounding takes two values at a time (F2F takes one, and
    # costs as much as a sigmoid).
    assert not operations.keys() & {"LDL", "STL"}, operations
    assert sum(line.startswith("USETMAXREG") for line in lines) >= 2
    assert "F2F" not in operations
    assert configuration.shared_bytes <= 232448
    return operations


@machine_code.needs_the_dsl
@pytest.mark.parametrize("columns", [128, 192])
def test_where_an_accumulator_lies(sm90: None, columns: int) -> None:
    """The biases are added by what `Forward.add_biases` takes for granted: a thread's columns, by its number."""
    cute = pytest.importorskip("cutlass.cute")
    from cutlass import BFloat16, Float32
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.utils import hopper_helpers

    layouts = []

    @cute.jit
    def look() -> None:
        major = OperandMajorMode.K
        mma = hopper_helpers.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, (1, 1, 1), (64, columns))
        layouts.append(str(mma.tv_layout_C_tiled))

    look()
    # Thread 4 a + b of a warp w, value 4 e + 2 r + c -> row 16 w + a + 8 r, column 8 e + 2 b + c, at row + 64 column.
    assert layouts == [f"((4,8,4),((2,2,{columns // 8}),(1,1))):((128,1,16),((64,8,512),(0,0)))"]


# -------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "size"),
    [
        (1, 1024, 3072, "small"),
        (64, 5120, 17408, "small"),
        (128, 4096, 14336, "small"),
        (129, 4096, 14336, "deep"),
        (384, 1024, 3072, "small"),
        (512, 1024, 3072, "shallow"),
        (257, 1024, 3072, "small"),
        (300, 1024, 6400, "shallow"),
        (16384, 1024, 3072, "shallow"),
        (8192, 2048, 8192, "deep"),
        (8192, 5120, 17408, "deep"),
    ],
)
def test_which_tiles_serve_which_sizes(tokens: int, hidden: int, inner: int, size: str) -> None:
    assert hopper.size_of(tokens, hidden, inner).value == size


def test_the_self_check_has_a_shape_for_each_way_of_cutting_the_work_up() -> None:
    assert {hopper.size_of(*shape) for shape in check._FUSED_SHAPES} == set(hopper.Size)


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "clusters", "served"),
    [
        (8192, 5120, 17408, 66, {"dx": 160, "d_weights": 192, "d_down": 192}),
        (8192, 4096, 14336, 66, {"d_weights": 192}),
        (8192, 2048, 8192, 66, {}),
        (16384, 1024, 3072, 66, {"d_weights": 192, "d_down": 192}),
        (4099, 4096, 11008, 66, {}),
        (8191, 5120, 17408, 66, {}),
        (8192, 5120, 17408, 57, {}),  # another GPU
        (8192, 5120, 17408, 0, {}),
        (65536, 512, 8192, 66, {}),  # narrower than what was timed
        (65536, 5120, 64, 66, {}),
        (0, 5120, 17408, 66, {}),
    ],
)
def test_which_products_serve_which_sizes(
    tokens: int, hidden: int, inner: int, clusters: int, served: dict[str, int]
) -> None:
    """On an H200, of 66 clusters: as measured there."""
    sizes = tokens, hidden, inner, clusters
    found = {kind.value: hopper_configuration.columns_for(kind, *sizes) for kind in hopper_configuration.Kind}
    assert {name: columns for name, columns in found.items() if columns is not None} == served
    configurations = hopper_configuration.products_for(torch.bfloat16, *sizes)
    assert sorted(each.tile.columns for each in configurations) == sorted(served.values())


def test_a_round_that_is_not_full_keeps_cublas() -> None:
    """Where a choice lets them serve anywhere, the rounds of tiles are those of the GPU that is there."""
    cut = dataclasses.replace(hopper_configuration.CUTS[""], anywhere=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hopper_configuration.CUTS, "", cut)
        columns = {
            clusters: [hopper_configuration.columns_for(kind, 8192, 5120, 17408, clusters) for kind in Kind]
            for clusters in (66, 57, 39)
        }
    assert columns == {66: [160, 192, 192], 57: [None, 192, 192], 39: [160, 192, 192]}


def test_the_self_check_and_gpu_tests_give_each_warp_group_several_tiles() -> None:
    """Of 66 clusters with two warp groups, in every product kernel: phases and buffers go on from tile to tile."""
    tokens, hidden, inner = check._PRODUCT_SHAPE
    for kind in Kind:
        for columns in hopper_configuration.COLUMNS[kind]:
            across = tokens if kind is Kind.DX else inner
            each = -(-hidden // 256) * -(-across // columns)
            assert each * (2 if kind is Kind.D_WEIGHTS else 1) > 3 * 66, (kind, columns)


def test_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(compiling, "_compiled", {})
    monkeypatch.setattr(artefacts, "place", lambda key: None)  # test_artefacts.py has what happens on disk

    def build(configuration: str, options: str) -> object:
        made.append((configuration, options))
        return lambda: configuration

    first = compiling.compiled("a", build, "sm_90a")
    assert compiling.compiled("a", build, "sm_90a") is first
    assert compiling.is_compiled("a", "sm_90a")
    assert not compiling.is_compiled("b", "sm_90a")
    assert compiling.compiled("b", build, "sm_90a")() == "b"
    assert not compiling.is_compiled("a", "sm_100a")
    assert made == [(each, "--enable-tvm-ffi --gpu-arch sm_90a") for each in "ab"]


def test_capture_waits_for_every_kernel_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_products, "clusters_of", lambda device: 66)
    products = hopper_configuration.products_for(torch.bfloat16, 16384, 1024, 3072, 66)
    assert len(products) == 2
    needed = *hopper.configurations(torch.bfloat16, "silu", hopper.Size.SHALLOW), *products
    assert len(set(needed)) == 6
    for missing in needed:
        monkeypatch.setattr(compiling, "_compiled", {(each, "sm_90a"): print for each in needed if each != missing})
        assert not hopper.is_compiled(PLAIN, 16384)
    monkeypatch.setattr(compiling, "_compiled", {(each, "sm_90a"): print for each in needed})
    assert hopper.is_compiled(PLAIN, 16384)
    assert not hopper.is_compiled(PLAIN, 1)
    assert not hopper.is_compiled(PLAIN._replace(bias=True), 16384)


# ---------------------------------------------------------------------------------------- the table, and the self-check


@functools.cache
def _hopper() -> choose.Backend:
    (found,) = (backend for backend in choose.BACKENDS if backend.name == "hopper")
    return found


PLAIN = choose.Problem(Route.FUSED, torch.device("cuda", 0), torch.bfloat16, 1024, 3072, "silu", bias=False)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], list[str]]:
    """Puts a GPU of some capability there, whose self-checks pass; returns the checks that are asked for."""

    def put(capability: tuple[int, int]) -> list[str]:
        asked: list[str] = []

        def verdict(which: selfcheck.Check, device: torch.device) -> selfcheck.Verdict:
            asked.append(which.case)
            return selfcheck.Verdict(selfcheck.Outcome.PASSED)

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(selfcheck, "verdict", verdict)
        monkeypatch.setattr(choose, "BACKENDS", (_hopper(), choose.REFERENCE))
        monkeypatch.setattr(backends, "missing", lambda backend: ())
        choose.TABLE.forget()
        return asked

    yield put
    choose.TABLE.forget()


def test_what_was_measured_to_win_is_served(on: Callable[[tuple[int, int]], list[str]]) -> None:
    asked = on((9, 0))
    for (hidden, inner), fewest in choose._FUSED_WINS.items():
        problem = PLAIN._replace(hidden=hidden, inner=inner)
        assert choose.choose(problem, fewest) == _hopper()
        assert choose.choose(problem, fewest - 1) is Reason.SIZE_NOT_ADMITTED
    assert set(asked) == {"hopper fused bfloat16 silu"}


def test_biases_are_served_where_the_backend_is_named(
    on: Callable[[tuple[int, int]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = on((9, 0))
    biased = PLAIN._replace(bias=True)
    assert choose.choose(biased, 16384) is Reason.SIZE_NOT_ADMITTED  # not measured
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "hopper")
    settings.install(settings.read())
    assert choose.choose(biased, 16384) == _hopper()
    assert asked == ["hopper fused bfloat16 silu biased"]


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_decode_sizes_decline(on: Callable[[tuple[int, int]], list[str]], tokens: int) -> None:
    on((9, 0))
    for hidden, inner in choose._FUSED_WINS:
        assert choose.choose(PLAIN._replace(hidden=hidden, inner=inner), tokens) is Reason.SIZE_NOT_ADMITTED


def test_what_was_never_measured_is_not_checked(on: Callable[[tuple[int, int]], list[str]]) -> None:
    asked = on((9, 0))
    assert choose.choose(PLAIN._replace(hidden=1032), 2**20) is Reason.SIZE_NOT_ADMITTED
    assert asked == []
    assert choose.choose(PLAIN._replace(hidden=1032), 1, any_size=True) == _hopper()
    assert asked == ["hopper fused bfloat16 silu"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (12, 0)])
def test_no_other_gpu_gets_it(on: Callable[[tuple[int, int]], list[str]], capability: tuple[int, int]) -> None:
    on(capability)
    assert choose.choose(PLAIN, 2**20) is Reason.ARCHITECTURE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": 1028}, Reason.ALIGNMENT),
        ({"inner": 3076}, Reason.ALIGNMENT),
        ({"dtype": torch.float32}, Reason.DTYPE),
    ],
)
def test_what_it_declines(
    on: Callable[[tuple[int, int]], list[str]], changes: dict[str, object], reason: Reason
) -> None:
    on((9, 0))
    assert choose.choose(PLAIN._replace(**changes), 2**20) is reason


class _Steps:
    def reference(self) -> None: ...

    def kernel(self, case: str) -> None: ...


def _differences(monkeypatch: pytest.MonkeyPatch, **faults: Callable[..., object]) -> list[str]:
    """What the self-check says of plain PyTorch with some functions replaced, in the backend's place."""
    module = types.SimpleNamespace(dual_gemm_act=reference.dual_gemm_act, gemm_dact=reference.gemm_dact)
    module.__dict__.update(faults)
    stand_in = dataclasses.replace(choose.REFERENCE, name="hopper")
    monkeypatch.setattr(op, "load", lambda backend: module if backend is stand_in else reference)
    monkeypatch.setattr(check, "_FUSED_SHAPES", ((7, 72, 136), (40, 16, 24)))
    return check._fused(stand_in, torch.device("cpu"), torch.bfloat16, "silu", _Steps())


def test_the_self_check_accepts_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _differences(monkeypatch) == []


def _skip_the_last_row_of_h(*arguments: object, **flags: bool) -> object:
    h, gate_up = reference.dual_gemm_act(*arguments, **flags)
    h[-1] = float("nan")
    return h, gate_up


def _swap_gate_and_up(*arguments: object, **flags: bool) -> object:
    h, gate_up = reference.dual_gemm_act(*arguments, **flags)
    return h, None if gate_up is None else gate_up.roll(gate_up.shape[1] // 2, dims=1)


def _scale_one_gradient(*arguments: object, **flags: bool) -> object:
    d_gate_up, h = reference.gemm_dact(*arguments, **flags)
    d_gate_up[:, : d_gate_up.shape[1] // 2] *= 1.02
    return d_gate_up, h


def _spoil_h_where_wanted(*arguments: object, **flags: bool) -> object:
    d_gate_up, h = reference.gemm_dact(*arguments, **flags)
    return d_gate_up, None if h is None else torch.cat([h[1:], h[:1]])


@pytest.mark.parametrize(
    ("name", "fault", "seen"),
    [
        ("dual_gemm_act", _skip_the_last_row_of_h, "out"),
        ("dual_gemm_act", _swap_gate_and_up, "dx"),
        ("gemm_dact", _scale_one_gradient, "d_gate_weight"),
        ("gemm_dact", _spoil_h_where_wanted, "d_down_weight"),
    ],
)
def test_the_self_check_sees_a_fault(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., object], seen: str
) -> None:
    assert any(text.startswith(f"{seen} of") for text in _differences(monkeypatch, **{name: fault}))


# ----------------------------------------------------------------------------------------------- the backend's products


@pytest.mark.parametrize("left_out", [(), ("dx",), ("d_weights",), ("d_down",), ("dx", "d_weights", "d_down")], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_every_gradient_is_there_whoever_multiplies(
    monkeypatch: pytest.MonkeyPatch, packed: bool, left_out: tuple[str, ...]
) -> None:
    """For every choice of wanted gradients; and nobody multiplies for one that is not wanted."""
    products = PlainProducts(*left_out)
    backend = with_products(monkeypatch, products)
    weights = torch.randn(48, 16, dtype=torch.float64)
    x, down = torch.randn(5, 16, dtype=torch.float64), torch.randn(16, 24, dtype=torch.float64)
    tensors = [x, weights, None, down] if packed else [x, *(half.clone() for half in weights.chunk(2)), down]
    wanted = [number for number, tensor in enumerate(tensors) if tensor is not None]
    for chosen in (each for count in range(1, 5) for each in itertools.combinations(wanted, count)):
        given = [None if t is None else t.detach().requires_grad_(n in chosen) for n, t in enumerate(tensors)]
        leaves = [given[number] for number in chosen]
        out, plain = (op.run_gated_mlp(each, *given, None, None, None, "silu") for each in (backend, choose.REFERENCE))
        products.asked.clear()
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert set(products.asked) == {
            *(["dx"] if 0 in chosen else []),
            *(["d_weights"] if 1 in chosen and (packed or 2 in chosen) else []),
            *(["d_down"] if 3 in chosen else []),
        }
        for mine, theirs in zip(found, torch.autograd.grad(plain, leaves, torch.ones_like(out)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_h_is_gone_before_the_gradients_that_do_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack's peak is where its first backward pass is: what is still there then counts."""
    alive: list[weakref.ref[Tensor]] = []

    def gemm_dact(*arguments: Any, **flags: Any) -> Any:
        d_gate_up, h = reference.gemm_dact(*arguments, **flags)
        alive.append(weakref.ref(h))
        return d_gate_up, h

    products = PlainProducts()
    plain = products.dx

    def dx(*arguments: Any, **options: Any) -> Any:
        assert alive[-1]() is None
        return plain(*arguments, **options)

    monkeypatch.setattr(products, "dx", dx)
    backend = with_products(monkeypatch, products)
    module = types.SimpleNamespace(dual_gemm_act=reference.dual_gemm_act, gemm_dact=gemm_dact)
    monkeypatch.setattr(op, "load", lambda backend: module)
    x, gate, up = (torch.randn(5, 8, requires_grad=True) for _ in range(3))
    down = torch.randn(8, 5, requires_grad=True)
    op.run_gated_mlp(backend, x, gate, up, down, None, None, None, "silu").sum().backward()
    assert len(alive) == 1
    assert down.grad is not None


def test_the_self_check_covers_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PRODUCT_SHAPE", (7, 24, 40))
    right = PlainProducts()
    backend = with_products(monkeypatch, right)
    assert check._products(backend, torch.device("cpu"), torch.bfloat16, _Steps()) == []
    assert sorted(right.asked) == sorted(["dx"] * 4 + ["d_weights"] * 2 + ["d_down"])
    for name, spoil in {
        "dx": lambda found: found.roll(1, 0),
        "d_weights": lambda found: (found[0], None if found[1] is None else found[1] * 1.02),  # of up alone
        "d_down": lambda found: found.roll(1, 1),
    }.items():
        wrong = PlainProducts()
        backend = with_products(monkeypatch, wrong)
        plain = getattr(wrong, name)
        setattr(wrong, name, lambda *given, plain=plain, spoil=spoil, **options: spoil(plain(*given, **options)))
        seen = check._products(backend, torch.device("cpu"), torch.bfloat16, _Steps())
        assert seen
        assert all(text.startswith(f"{name} of") for text in seen)


def test_what_hoppers_self_check_does_besides_the_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled ahead, for this very case; and its products are checked."""
    asked: list[Any] = []
    assert choose.labelled("hopper").products == hopper_products.__name__
    monkeypatch.setattr(hopper, "compile_ahead", lambda *case: asked.append(case))
    own = dataclasses.replace(choose.labelled("hopper"), module=reference.__name__)
    stand_in = with_products(monkeypatch, PlainProducts(), own)
    monkeypatch.setattr(choose, "BACKENDS", (stand_in, choose.REFERENCE))
    monkeypatch.setattr(check, "_FUSED_SHAPES", ((7, 24, 40),))
    monkeypatch.setattr(check, "_products", lambda *given: ["of the products"])
    device = torch.device("cpu")
    assert check.run("hopper fused bfloat16 gelu biased", device, _Steps()) == ["of the products"]
    assert asked == [(device, torch.bfloat16, "gelu", True)]


def test_a_mode_sees_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products = PlainProducts()
    backend = with_products(monkeypatch, products)
    tensors = [torch.randn(*shape, requires_grad=True) for shape in ((5, 8), (12, 8), (12, 8), (8, 12))]
    monkeypatch.setattr(library, "_named", lambda name: backend)
    with FlopCounterMode(display=False) as counter:
        op.run_gated_mlp(backend, *tensors, None, None, None, "silu").sum().backward()
    assert products.asked == []
    assert counter.get_total_flops() == 3 * 3 * 2 * 5 * 8 * 12
