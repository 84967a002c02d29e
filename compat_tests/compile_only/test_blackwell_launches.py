"""What the kernels of the Blackwell backend would launch, as a process has them that finds them on disk (L8).

Each kernel is kept as artefacts.py keeps it, and loaded again by a process that has neither the DSL nor a GPU, under a
CUDA runtime that writes down what is launched. Legend as in blackwell_forward.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_cuda
import machine_code
import ptx_machine
import pytest
import torch
from blackwell_kernels import (
    ARCHS,
    EVERY,
    OFTEN,
    Build,
    Configuration,
    builder,
    named,
    needs_a_compiler,
    shapes_of,
)

from fusepatch.kernels.cute import artefacts
from fusepatch.kernels.cute.tile import SHARED_LIMIT
from fusepatch.kernels.gated_mlp.blackwell_configuration import NARROW, Forward, forward_configuration

pytestmark = [machine_code.needs_the_dsl, needs_a_compiler]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return builder(tmp_path_factory)


@dataclass(frozen=True)
class Case:
    """One call: sizes, the most CTAs, how much further apart rows are than they are long, and what is moved."""

    M: int
    H: int
    I: int  # noqa: E741
    ctas: int
    apart: int = 0
    moved: str = ""

    def operands(self, configuration: Configuration) -> dict[str, fake_cuda.Operand]:
        shapes = shapes_of(configuration, self.M, self.H, self.I)
        return {
            name: fake_cuda.Operand(
                0x7F1000000000 + index * 0x1000000000 + 0x1000 * (name == self.moved), shape, shape[1] + self.apart
            )
            for index, (name, shape) in enumerate(shapes.items())
        }


PLAIN = Case(300, 64, 960, ctas=3)
SHAPES = [
    PLAIN,
    Case(1, 8, 8, ctas=148),
    Case(129, 72, 136, ctas=148),
    Case(128, 200, 264, ctas=160, apart=8),
    Case(8192, 4096, 14336, ctas=148),
    Case(2055, 2056, 3080, ctas=160, apart=1024),
    Case(2**17 + 3, 64, 2**13 + 8, ctas=148),  # gate_up has more than 2^31 elements
]


def expected(configuration: Configuration, case: Case) -> list[ptx_machine.Descriptor]:
    """What TMA must be told, in the order of the kernel's parameters: gate and up are halves of one tensor."""
    operands = case.operands(configuration)

    def whole(name: str, columns: int = 64, rows: int = 128) -> ptx_machine.Descriptor:
        given = operands[name]
        return ptx_machine.Descriptor(given.address, 2 * given.pitch, given.shape, (rows, columns))

    def halves(name: str) -> list[ptx_machine.Descriptor]:
        both = dataclasses.replace(whole(name), shape=(case.M, case.I))
        return [both, dataclasses.replace(both, address=both.address + 2 * case.I)]

    if isinstance(configuration, Forward):
        weights = [whole(name, rows=configuration.half) for name in ("w_gate", "w_up")]
        return [whole("x"), *weights, *(halves("gate_up") if "gate_up" in operands else []), whole("h")]
    inputs = [whole("dout"), whole("w_down", rows=64), *halves("gate_up")]
    return [*inputs, *halves("d_gate_up"), *([whole("h")] if "h" in operands else [])]


def judge(configuration: Configuration, case: Case, seen: fake_cuda.Launched) -> None:
    columns = configuration.half if isinstance(configuration, Forward) else configuration.tile.columns
    m_tiles, n_tiles, k_tiles = -(-case.M // 128), -(-case.I // columns), -(-case.H // 64)
    assert seen.grid == (min(m_tiles * n_tiles, case.ctas), 1, 1)
    assert seen.block == (192 if isinstance(configuration, Forward) else 256, 1, 1)
    assert seen.cluster == (0, 0, 0)  # none
    assert configuration.shared_bytes - 1536 < seen.shared_bytes <= configuration.shared_bytes <= SHARED_LIMIT
    right = expected(configuration, case)
    assert [ptx_machine.Descriptor.read(each) for each in descriptors(seen)] == right
    # Bit 21 of the second word, which CUTLASS has to correct for some drivers: 128 KiB or more.
    is_large = [bool(each[10] >> 5 & 1) for each in descriptors(seen)]
    assert is_large == [each.shape[0] * each.row_bytes >= 2**17 for each in right]
    numbers = [int.from_bytes(each, "little") for each in seen.arguments if len(each) == 4]
    assert numbers == [m_tiles, n_tiles, k_tiles]


def descriptors(seen: fake_cuda.Launched) -> list[bytes]:
    """The second half of each is whatever was there before."""
    return [each[:64] for each in seen.arguments if len(each) == 128]


def kept(compiled: Build, configuration: Configuration, arch: str, cases: list[Case]) -> fake_cuda.Entry:
    """On disk, as a process leaves it for the next one."""
    kernel, folder = compiled(configuration, arch)
    key = artefacts.key_of(configuration, f"--enable-tvm-ffi --gpu-arch {arch}")
    artefacts.store(folder / "entry.so", key, kernel)
    calls = []
    for case in cases:
        operands = list(case.operands(configuration).values())
        calls.append((*operands, *[None] * (5 - len(operands)), case.ctas))
    sizes = fake_cuda.argument_sizes(kernel.artifacts.PTX)
    return fake_cuda.Entry(folder / "entry.so", key, sizes, configuration.dtype, tuple(calls))


def cases_of(configuration: Configuration) -> list[Case]:
    """Every shape; and the plain one with each operand in turn moved, and with another number of rows."""
    names = shapes_of(configuration, 1, 8, 8)
    return [*SHAPES, *(dataclasses.replace(PLAIN, moved=name) for name in names), dataclasses.replace(PLAIN, M=301)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "configurations", [pytest.param(OFTEN[:2], id="two"), pytest.param(EVERY, id="every", marks=pytest.mark.slow)]
)
def test_what_a_later_process_launches(
    compiled: Build, tmp_path: Path, configurations: list[Configuration], arch: str
) -> None:
    """Grid, cluster, shared memory and each TMA descriptor, of each kernel, for several shapes."""
    entries = [kept(compiled, each, arch, cases_of(each)) for each in configurations]
    for configuration, found in zip(configurations, fake_cuda.launched_elsewhere(entries, tmp_path), strict=True):
        cases = cases_of(configuration)
        for case, seen in zip(cases, found, strict=True):
            print(named(configuration), case)  # shown where it fails
            judge(configuration, case, seen)
        by_case = dict(zip(cases, found, strict=True))
        # The layout of a descriptor is known by differences alone: moving one pointer changes its own, and no other.
        first = descriptors(by_case[PLAIN])
        changed = {case: _changed(first, descriptors(seen)) for case, seen in by_case.items()}
        moved = {case.moved: changed[case] for case in cases if case.moved}
        assert {name: len(each) for name, each in moved.items()} == {name: 1 + ("gate_up" in name) for name in moved}
        assert sorted(index for each in moved.values() for index in each) == list(range(len(first)))
        # Another number of rows is in the descriptors of all but the weights.
        assert changed[cases[-1]] == {i for name, each in moved.items() if not name.startswith("w_") for i in each}
        # What is read of none of them, the swizzle and the kind of element among it, is the same in all.
        assert len({_unread(each) for seen in found for each in descriptors(seen)}) == 1


def _changed(before: list[bytes], after: list[bytes]) -> set[int]:
    return {index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other}


def _unread(descriptor: bytes) -> bytes:
    """All but address, pitch, shape and box, and whether the tensor is large."""
    read = {*range(8), 10, *range(12, 16), *range(32, 40), 55, 56}
    return bytes(byte for index, byte in enumerate(descriptor) if index not in read) + bytes([descriptor[10] & ~0x20])


def test_a_launch_that_differs_is_seen(compiled: Build, tmp_path: Path) -> None:
    """Of each thing that is judged: what is wrong by one fails."""
    configuration = OFTEN[0]
    entry = kept(compiled, configuration, ARCHS[0], [PLAIN])
    ((right,),) = fake_cuda.launched_elsewhere([entry], tmp_path)
    judge(configuration, PLAIN, right)
    swapped = [*right.arguments]
    order = [index for index, each in enumerate(swapped) if len(each) == 128]
    swapped[order[1]], swapped[order[2]] = swapped[order[2]], swapped[order[1]]
    changes: list[dict[str, Any]] = [
        {"grid": (4, 1, 1)},
        {"block": (384, 1, 1)},
        {"cluster": (2, 1, 1)},
        {"shared_bytes": SHARED_LIMIT + 1},
        {"arguments": tuple(swapped)},  # the weights
        {"arguments": (*right.arguments[:-1], (99).to_bytes(4, "little"))},
    ]
    for change in changes:
        with pytest.raises(AssertionError):
            judge(configuration, PLAIN, dataclasses.replace(right, **change))
    for other in (dataclasses.replace(PLAIN, I=952), dataclasses.replace(PLAIN, apart=8)):
        with pytest.raises(AssertionError):
            judge(configuration, other, right)


def test_a_damaged_kernel_is_not_launched(compiled: Build, tmp_path: Path) -> None:
    entry = kept(compiled, OFTEN[0], ARCHS[0], [PLAIN])
    whole = entry.path.read_bytes()
    damaged = dataclasses.replace(entry, path=tmp_path / "damaged.so")
    damaged.path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    with pytest.raises(AssertionError, match="not loaded"):
        fake_cuda.launched_elsewhere([damaged], tmp_path)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(8, 12), (16, 12), (16, 12), (8, 16)], "divisible by 8"),
        ([(8, 16), (16, 16), (24, 16), (8, 16)], "shape"),
        ([(8, 16), (16, 16), (16, 16), (9, 16)], "shape"),
    ],
    ids=["H not in eighths", "unlike weights", "another number of rows"],
)
def test_what_a_launch_refuses(compiled: Build, shapes: list[tuple[int, int]], message: str) -> None:
    start, launched = fake_cuda.load(*compiled(forward_configuration(torch.bfloat16, "silu", False, NARROW)))
    before = launched().count
    with pytest.raises(ValueError, match=message):
        start(*(fake_cuda.tensor(0x7F1000000000, shape) for shape in shapes), None, 1)
    assert launched().count == before
