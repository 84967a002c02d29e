"""Follows every element through a kernel: which elements of which tensors each value is made from, and where it goes.

A `Machine` that carries, beside each value, where it comes from: from TMA's boxes to slots of shared memory, to the
operands of the tensor cores, to columns of tensor memory, to registers of the epilogue's threads, to slots again, and
through TMA's boxes to the results. Numbers play no part, so nothing can come out right by chance, and what an edge cuts
off is followed like everything else. The maps are those of the compiled program; what they must be is said here, and
plainly: h[m, n] is made from gate[m, n] and up[m, n], gate[m, n] from x[m, k] and w_gate[n, k] for each k once, and so
on.

A place is 1 + row * 2^24 + column of a tensor, 0 where nothing of that tensor is in a value, and -1 where too much is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ptx_machine
from ptx_machine import LANES, Barrier, Descriptor, Fault, Instruction, Machine, Warp

_ROW = 1 << 24
TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"


def places(rows: Any, columns: Any) -> Any:
    """Of elements."""
    return 1 + np.asarray(rows, np.int64) * _ROW + np.asarray(columns, np.int64)


@dataclass(frozen=True)
class Product:
    """A matrix that the tensor cores make: [M, N] from a's [M, K] and from b's [N, K], or [K, N] where `b_is_kn`."""

    name: str
    a: str
    b: str
    b_is_kn: bool


@dataclass(frozen=True)
class Plan:
    """What a kernel must do."""

    products: tuple[Product, ...]
    results: dict[str, tuple[str, ...]]
    """Of which matrices the element at the same place goes into each result."""
    reads: int
    """How often the epilogue reads each sum."""


class Followed(Machine):
    """`names` says what lies at the start of which descriptor; `plan` what must come of it; `depth` is K."""

    def __init__(self, *arguments: Any, names: dict[int, str], plan: Plan, depth: int) -> None:
        super().__init__(*arguments)
        self.names, self.plan, self.depth = names, plan, depth
        self.kinds = sorted({*names.values(), *(product.name for product in plan.products)})
        words = len(self.shared) // 2
        self.slots = np.full((words, len(self.kinds)), -1, np.int64)
        # Of tensor memory: the row of a that a lane holds, the row of b that a column does, and each column's sum.
        self.lane_rows = np.full((128, 512), -1, np.int64)
        self.column_rows = np.full((512,), -1, np.int64)
        self.column_products = np.full((512,), -1, np.int64)
        self.column_sums = np.full((512,), -1, np.int64)
        self.sums: list[list[int]] = []
        """The k of which each sum consists, in the order in which they were added."""
        self.whence: list[dict[str, tuple[Any, ...]]] = [{} for _ in self.warps]
        """Of each register's 16- or 32-bit parts: [lane, kind]."""
        self.reads: dict[str, dict[int, int]] = {product.name: {} for product in plan.products}
        self.written: dict[str, list[tuple[Descriptor, int, int]]] = {}
        self.loaded: list[tuple[str, int, int, int, int]] = []
        """(tensor, row, column, its slot, bytes) of every box."""
        self.stored: set[tuple[int, int]] = set()
        """(slot, bytes)"""
        self.address_slot = -1
        """Where the address of tensor memory is kept."""

    # --- what each instruction does to where values come from

    def step(self, warp: Warp) -> None:
        self.meet(warp)
        instruction = self.program.instructions[warp.at]
        products, events = len(self.tensor_queue), self.next_event
        follow = _FOLLOW.get(instruction.name)
        after = follow(self, warp, instruction) if follow else self.combine(warp, instruction)
        super().step(warp)
        if after is None:
            return
        # TMA and the tensor cores do it later, together with the thing itself.
        if len(self.tensor_queue) > products:
            self.tensor_queue[-1] = _both(after, self.tensor_queue[-1])
        if self.next_event > events:
            self.events[self.next_event] = _both(after, self.events[self.next_event])

    def parts(self, warp: Warp, operand: str) -> tuple[Any, ...]:
        return self.whence[warp.index].get(operand, ())

    def note(self, warp: Warp, target: str, parts: tuple[Any, ...]) -> None:
        known = self.whence[warp.index]
        if not warp.active.all() and (parts or known.get(target)):
            raise Fault(f"{target} is written by a part of a warp")
        known.pop(target, None)
        if parts:
            known[target] = parts

    def combine(self, warp: Warp, instruction: Instruction) -> None:
        """An instruction of which nothing is known but its operands: the result is made from all of them."""
        if not instruction.operands or not instruction.operands[0].startswith("%"):
            return
        target, *sources = instruction.operands
        known = [found for source in sources if (found := self.parts(warp, source))]
        if not known:
            self.note(warp, target, ())
            return
        if instruction.name not in _ARITHMETIC or any(len(found) != 1 for found in known):
            raise Fault(f"{instruction.name} of what was loaded")
        made = known[0][0]
        for (other,) in known[1:]:
            apart = (made != other) & (made != 0) & (other != 0)
            made = np.where(apart, -1, np.where(made == 0, other, made))
        self.note(warp, target, (made,))

    # --- judging

    def finish(self) -> None:
        """Of what must not be left out or done twice, what one CTA alone can show."""
        for product, seen in self.reads.items():
            wrong = {count for count in seen.values() if count != self.plan.reads}
            if wrong:
                raise Fault(f"sums of {product} are read {wrong} times and not {self.plan.reads}")


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run


_ARITHMETIC = {
    *(f"{name}.f32" for name in ("mul", "add", "sub", "max", "abs", "neg", "mov", "fma.rn", "selp")),
    "ex2.approx.ftz.f32",
    "rcp.approx.ftz.f32",
    "cvt.f32.bf16",
    "cvt.f32.f16",
    "mov.b16",
    "setp.lt.f16",
    "setp.lt.bf16",
}


class Alone(Machine):
    """One warp by itself, for which whatever it waits for is there: the boxes that it asks TMA for, and little work."""

    def boxes(self, index: int) -> list[tuple[int, int, int]]:
        """(address of the descriptor's tensor, row, column), in order."""
        warp, found = self.warps[index], []
        while not warp.done:
            self.meet(warp)
            instruction = self.program.instructions[warp.at]
            if instruction.name in (TMA_LOAD, TMA_STORE):
                at = 1 if instruction.name == TMA_LOAD else 0
                source, coordinates = ptx_machine._split_source(instruction.operands, at)[at : at + 2]
                descriptor, row, column = ptx_machine._tensor(self, warp, source, coordinates)
                found.append((descriptor.address, row, column))
            if instruction.name in (TMA_LOAD, TMA_STORE, "bar.sync"):
                warp.at += 1
            else:
                self.step(warp)
        return found

    def barrier(self, warp: Warp, operand: str, of_hardware: bool = False) -> Barrier:
        return Barrier(1 << 30, 1 << 30)


# ------------------------------------------------------------------------------------------------------- instructions

_FOLLOW: dict[str, Callable[[Followed, Warp, Instruction], Callable[[], None] | None]] = {}


def _on(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for name in names:
            assert name in ptx_machine._HANDLERS, name
            _FOLLOW[name] = function
        return function

    return register


@_on("mov.b32", "mov.b64")
def _move(machine: Followed, warp: Warp, instruction: Instruction) -> None:
    target, source = instruction.operands
    found: tuple[Any, ...] = ()
    for part in ptx_machine._parts(source):
        found += machine.parts(warp, part)
    targets = ptx_machine._parts(target)
    size = len(found) // len(targets)
    if found and size * len(targets) != len(found):
        raise Fault(f"{instruction} takes apart what is no pair")
    for index, each in enumerate(targets):
        machine.note(warp, each, found[index * size : (index + 1) * size])


@_on("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32")
def _round_two(machine: Followed, warp: Warp, instruction: Instruction) -> None:
    target, high, low = instruction.operands
    found = machine.parts(warp, low), machine.parts(warp, high)
    if any(len(each) != 1 for each in found):
        raise Fault("a rounding of what comes from nowhere")
    machine.note(warp, target, found[0] + found[1])


def _of_lanes(machine: Followed, warp: Warp, place: str) -> Any:
    """[lane, word] of 16 bytes from an address each."""
    addresses = np.broadcast_to(machine.address(warp, place), LANES).astype(np.int64)
    return addresses[:, None] // 2 + np.arange(8)


@_on("st.shared.v4.b32")
def _write(machine: Followed, warp: Warp, instruction: Instruction) -> None:
    place, values = instruction.operands
    parts = [machine.parts(warp, each) for each in ptx_machine._parts(values)]
    if any(len(each) != 2 for each in parts):
        raise Fault("a thread writes what comes from nowhere")
    machine.slots[_of_lanes(machine, warp, place)] = np.stack([half for each in parts for half in each], 1)


@_on("ld.shared.v4.b32")
def _read(machine: Followed, warp: Warp, instruction: Instruction) -> None:
    targets, place = instruction.operands
    found = machine.slots[_of_lanes(machine, warp, place)]
    for index, each in enumerate(ptx_machine._parts(targets)):
        machine.note(warp, each, (found[:, 2 * index], found[:, 2 * index + 1]))


@_on(TMA_LOAD)
def _load(machine: Followed, warp: Warp, instruction: Instruction) -> Callable[[], None]:
    target, source, coordinates = ptx_machine._split_source(instruction.operands, 1)[:3]
    descriptor, row, column = ptx_machine._tensor(machine, warp, source, coordinates)
    base, name = machine.shared_address(warp, target), machine.names[descriptor.address]
    machine.loaded.append((name, row, column, base, 2 * descriptor.box[0] * descriptor.box[1]))

    def happen() -> None:
        rows, columns = row + np.arange(descriptor.box[0]), column + np.arange(descriptor.box[1])
        inside = (rows < descriptor.shape[0])[:, None] & (columns < descriptor.shape[1])
        found = np.zeros((*descriptor.box, len(machine.kinds)), np.int64)
        found[..., machine.kinds.index(name)] = np.where(inside, places(rows[:, None], columns), 0)
        machine.slots[ptx_machine._box(descriptor, base) // 2] = found

    return happen


@_on(TMA_STORE)
def _store(machine: Followed, warp: Warp, instruction: Instruction) -> Callable[[], None]:
    target, coordinates, source = ptx_machine._split_source(instruction.operands, 0)[:3]
    descriptor, row, column = ptx_machine._tensor(machine, warp, target, coordinates)
    base, name = machine.shared_address(warp, source), machine.names[descriptor.address]

    machine.stored.add((base, 2 * descriptor.box[0] * descriptor.box[1]))

    def happen() -> None:
        rows, columns = ptx_machine._inside(descriptor, row, column)
        found = machine.slots[ptx_machine._box(descriptor, base) // 2]
        found = found[: rows.stop - rows.start, : columns.stop - columns.start]
        right = np.zeros_like(found)
        here = places(np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop))
        for each in machine.plan.results[name]:
            right[..., machine.kinds.index(each)] = here
        if (found != right).any():
            m, n, kind = (int(each[0]) for each in np.nonzero(found != right))
            raise Fault(
                f"{name}[{rows.start + m}, {columns.start + n}] has of {machine.kinds[kind]} {_said(found[m, n, kind])}"
            )
        machine.written.setdefault(name, []).append((descriptor, row, column))

    return happen


@_on("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32")
def _allocate(machine: Followed, warp: Warp, instruction: Instruction) -> None:
    machine.address_slot = machine.shared_address(warp, instruction.operands[0])


def _said(place: int) -> str:
    if place <= 0:
        return "nothing" if place == 0 else "several elements"
    return str(divmod(int(place) - 1, _ROW))


@_on("tcgen05.ld.sync.aligned.32x32b.x32.b32")
def _load_tensor_memory(machine: Followed, warp: Warp, instruction: Instruction) -> None:
    registers = ptx_machine._parts(instruction.operands[0])
    address = int(machine.uniform(warp, instruction.operands[1].strip("[]")))
    lanes, first = slice(address >> 16, (address >> 16) + LANES), address & 0xFFFF
    for column, register in enumerate(registers, first):
        if machine.column_sums[column] < 0:
            raise Fault(f"column {column} of tensor memory is read, and holds no sum")
        if sorted(machine.sums[machine.column_sums[column]]) != list(range(machine.depth)):
            raise Fault(f"column {column} of tensor memory is read before its sum is whole, or it has a term twice")
        product = machine.plan.products[machine.column_products[column]]
        rows, n = machine.lane_rows[lanes, column], machine.column_rows[column]
        found = np.zeros((LANES, len(machine.kinds)), np.int64)
        found[:, machine.kinds.index(product.name)] = np.where((rows >= 0) & (n >= 0), places(rows, n), 0)
        machine.note(warp, register, (found,))
        seen = machine.reads[product.name]
        for place in found[:, machine.kinds.index(product.name)].tolist():
            if place:
                seen[place] = seen.get(place, 0) + 1


@_on("tcgen05.mma.cta_group::1.kind::f16.collector::a::discard")
def _multiply(machine: Followed, warp: Warp, instruction: Instruction) -> Callable[[], None]:
    place, a, b, kind, _, accumulate = instruction.operands
    idesc = int(machine.uniform(warp, kind))
    rows, columns = (idesc >> 24 & 31) << 4, (idesc >> 17 & 63) << 3
    descriptors = [int(machine.uniform(warp, each, np.uint64)) for each in (a, b)]
    first = int(machine.uniform(warp, place.strip("[]"))) & 0xFFFF
    adds = bool(machine.uniform(warp, accumulate, bool))

    def happen() -> None:
        products = machine.plan.products
        a_kind, a_rows, a_ks = _operand(machine, descriptors[0], rows, False, False)
        b_kind, b_rows, b_ks = _operand(machine, descriptors[1], columns, bool(idesc >> 16 & 1), products[0].b_is_kn)
        if (a_ks != b_ks).any():
            raise Fault(f"columns {a_ks} of A are multiplied with columns {b_ks} of B")
        if adds and (a_ks < 0).all():
            return  # beyond the edge of K: zeros
        which = np.full(columns, -1)
        for index, product in enumerate(products):
            if (a_kind[a_kind >= 0] != machine.kinds.index(product.a)).any():
                raise Fault("A is something else")
            which[b_kind == machine.kinds.index(product.b)] = index
        own = slice(first, first + columns)
        made = np.broadcast_to(a_rows[:, None], (rows, columns)), b_rows, which
        held = machine.lane_rows[:rows, own], machine.column_rows[own], machine.column_products[own]
        sums = set(machine.column_sums[own].tolist())
        if adds:
            if len(sums) != 1 or min(sums) < 0 or any((new != old).any() for new, old in zip(made, held, strict=True)):
                raise Fault("a product is added to the sums of something else")
        else:
            sums = {len(machine.sums)}
            machine.column_sums[np.isin(machine.column_sums, machine.column_sums[own])] = -1
            machine.sums.append([])
            for new, old in zip(made, held, strict=True):
                old[:] = new
            machine.column_sums[own] = max(sums)
        machine.sums[max(sums)].extend(a_ks[a_ks >= 0].tolist())

    return happen


def _operand(machine: Followed, descriptor: int, rows: int, mn_major: bool, is_kn: bool) -> tuple[Any, Any, Any]:
    """(which tensor, which row of it, which k) of A or B: of each row the first two, of each of 16 columns the last.

    -1 where the edge of the tensor cut it off.
    """
    at = ptx_machine._operand_addresses(descriptor, rows, mn_major)
    found = machine.slots[at // 2]
    if (found < 0).any():
        raise Fault("the tensor cores multiply what was never loaded")
    kind = np.where(found.any(-1), found.argmax(-1), -1)
    row, k = np.divmod(found.max(-1) - 1, _ROW)
    if is_kn:
        row, k = k, row
    row, k = np.where(kind >= 0, row, -1), np.where(kind >= 0, k, -1)
    of_rows, of_ks = row.max(1), k.max(0)
    there = (of_rows[:, None] >= 0) & (of_ks >= 0)
    of_kinds = kind.max(1)
    right = np.where(there, of_rows[:, None], -1), np.where(there, of_ks, -1), np.where(there, of_kinds[:, None], -1)
    if any((one != other).any() for one, other in zip((row, k, kind), right, strict=True)):
        raise Fault("an operand of the tensor cores is no part of a matrix")
    return of_kinds, of_rows, of_ks
