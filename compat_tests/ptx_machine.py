"""Runs the PTX of a warp-specialised tcgen05 kernel on a CPU: one CTA at a time, in whatever order a seed says.

It knows the instructions that our kernels for Blackwell consist of, and stops at any other. Warps are interleaved at
random; what the hardware does in the background (TMA, the tensor cores, loads from tensor memory) happens at random
times after it was asked for, in the order that PTX promises and no other. So what is read too early, overwritten too
early or never waited for shows as a wrong number, as NaN, or as a deadlock, on some seed.

Modelled after the PTX ISA: mbarriers with their phases, arrivals and transaction bytes; named barriers; tcgen05.mma's
shared-memory descriptors with the 128-byte swizzle, and its instruction descriptor; the lanes of tensor memory that a
warp can reach; tcgen05.commit; bulk groups. Rules without which hardware promises nothing are errors here: a generic
write that TMA reads without a fence of its proxy, tcgen05 after a wait without a fence, registers that are read before
`wait::ld`, tensor memory that is not allocated, an `.aligned` instruction by a part of a warp, an mbarrier that no
fence has shown to TMA and the tensor cores, a store by TMA of what a warp's lanes have written without `bar.warp.sync`
or a barrier behind it, a right to allocate that is never given back.

A TMA descriptor is read as the CUDA library writes it: its layout is nowhere documented, and was found by differences.
Not modelled, so that what they order goes unseen when it is missing: caches, the order of generic writes to shared
memory (here that of the instructions), lanes of a warp that run apart for other reasons than a branch, and whether a
later fence stands in for one that is gone. Time is not modelled at all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHARED_BASE = 1024
LANES = 32
ELECTED = 5
"""Of a warp: which one hardware elects is its own affair."""
POISON = np.uint32(0x7FC0DEAD)
"""A NaN: what a register holds before its load is waited for."""


class Fault(AssertionError):
    """What the kernel did that hardware does not allow, or that nothing makes safe."""


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: tuple[str, ...]
    predicate: str = ""
    negated: bool = False
    line: int = 0


@dataclass(frozen=True)
class Program:
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]
    threads: int


def parse(ptx: str) -> Program:
    """The one kernel of a module."""
    entry = re.search(r"\.entry\s+(\w+)\((.*?)\)(.*?)^\{(.*)^\}", ptx, re.DOTALL | re.MULTILINE)
    assert entry is not None
    threads = re.search(r"\.reqntid (\d+), 1, 1", entry[3])
    assert threads is not None
    body = re.sub(r"//[^\n]*", "", entry[4])
    # The wait that inline assembly spells as a loop of its own.
    wait = (
        r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared\.b64 P1, ([^;]*), \d+;.*?DONE:\s*\}"
    )
    body = re.sub(wait, r"wait \1;", body, flags=re.DOTALL)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, statement in enumerate(re.split(r"[;\n]", body)):
        text = statement.strip()
        label = re.fullmatch(r"(\$?\w+):", text)
        if label:
            labels[label[1]] = len(instructions)
        elif text and not text.startswith(".") and text not in "{}":
            match = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
            assert match is not None, text
            operands = tuple(part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", match[4]))
            instructions.append(Instruction(match[3], operands, match[2] or "", match[1] == "!", number))
    parameters = tuple(re.findall(r"\.param .*?(\w+)(?:\[\d+\])?,?$", entry[2], re.MULTILINE))
    return Program(tuple(instructions), labels, parameters, int(threads[1]))


@dataclass(frozen=True)
class Descriptor:
    """Of a 2-d tensor of 16-bit elements, in boxes with the 128-byte swizzle."""

    address: int
    row_bytes: int
    shape: tuple[int, int]
    box: tuple[int, int]

    @staticmethod
    def read(data: bytes) -> Descriptor:
        def word(at: int) -> int:
            return int.from_bytes(data[at : at + 4], "little")

        return Descriptor(
            int.from_bytes(data[:8], "little"),
            16 * word(12),
            (word(36) + 1, word(32) + 1),
            (data[56] + 1, data[55] + 1),
        )


# ------------------------------------------------------------------------------------------------------------ the state


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    of_tensor_memory: bool = False
    """The tensor cores arrive at it, or warps that have read tensor memory."""
    unordered: bool = False
    """Some arrival at it was not ordered behind loads from tensor memory."""

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

    def arrive(self) -> None:
        if self.pending == 0:
            raise Fault("more arrivals at an mbarrier than it counts")
        self.pending -= 1
        self.settle()

    def has_passed(self, parity: int) -> bool:
        return self.phase != parity


@dataclass
class Warp:
    index: int
    registers: dict[str, Any] = field(default_factory=dict)
    at: int = 0
    active: Any = field(default_factory=lambda: np.ones(LANES, bool))
    parked: list[tuple[int, Any]] = field(default_factory=list)
    done: bool = False
    waiting: str = ""
    """For what, where it can't go on."""
    loads: list[tuple[list[str], int, int, Any]] = field(default_factory=list)
    """From tensor memory, not waited for: registers, lane, column, and what was read where that was early."""
    not_loaded: set[str] = field(default_factory=set)
    """Registers whose load is not waited for, and those that they were moved to."""
    moves: list[Instruction] = field(default_factory=list)
    """Of such registers. LLVM pairs them up before `wait::ld`, which no instruction of the machine code stands for."""
    unfenced_wait: bool = False
    """A barrier of tensor memory was waited for, and no tcgen05 fence says that what follows comes after it."""
    unfenced_load: bool = False
    """Tensor memory was read, and no tcgen05 fence says that what follows comes after it."""
    has_loaded: bool = False
    saw_unordered: bool = False
    groups: list[int] = field(default_factory=list)
    """Of stores that are not committed, and then of those that are: ids of events."""
    committed: list[list[int]] = field(default_factory=list)


class Machine:
    """One CTA. `memory` maps an address to the 16-bit words of a tensor, [rows, columns], that starts there."""

    def __init__(
        self,
        program: Program,
        arguments: tuple[bytes, ...],
        memory: dict[int, Any],
        block: int,
        blocks: int,
        dtype: str,
        seed: int,
        shared_bytes: int,
    ) -> None:
        self.program, self.arguments, self.memory, self.dtype = program, arguments, memory, dtype
        self.block, self.blocks = block, blocks
        self.random = random.Random(seed)
        self.shared = np.random.default_rng(seed).integers(0, 256, SHARED_BASE + shared_bytes, dtype=np.uint8)
        self.unfenced = np.zeros(SHARED_BASE + shared_bytes, np.uint8)
        self.apart = np.zeros(SHARED_BASE + shared_bytes, np.uint8)
        """Which warp's lanes have written or fenced it each for itself: one lane can't speak for it yet."""
        self.tensor_memory = np.full((128, 512), np.nan, np.float32)
        self.allocated: tuple[int, int] | None = None
        self.may_allocate = True
        self.has_allocated = False
        self.barriers: dict[int, Barrier] = {}
        self.unseen_barriers: dict[int, int] = {}
        """Set up, by which warp, and not fenced: TMA and the tensor cores need not see them."""
        self.named: dict[int, list[int]] = {}
        self.warps = [Warp(index) for index in range(program.threads // LANES)]
        self.events: dict[int, Callable[[], None]] = {}
        self.tensor_queue: list[Callable[[], None]] = []
        self.next_event = 0
        self.bias = [self.random.random() ** 2 + 1e-3 for _ in range(len(self.warps) + 2)]
        """How likely each warp, the tensor cores and TMA are to be next: some are much slower than others."""
        self.counts: dict[str, int] = {}

    # --- scheduling

    def run(self) -> None:
        while True:
            ready = [warp for warp in self.warps if not warp.done and self.can_go(warp)]
            choices: list[Any] = [*ready]
            weights = [self.bias[warp.index] for warp in ready]
            if self.tensor_queue:
                choices.append("tensor")
                weights.append(self.bias[-1])
            if self.events:
                choices.append("events")
                weights.append(self.bias[-2])
            if not choices:
                break
            (choice,) = self.random.choices(choices, weights)
            if choice == "tensor":
                self.tensor_queue.pop(0)()
            elif choice == "events":
                self.events.pop(self.random.choice(list(self.events)))()
            else:
                for _ in range(self.random.choice((1, 8, 200))):
                    if choice.done or not self.can_go(choice):
                        break
                    self.step(choice)
                if choice.done and not any(not warp.done for warp in self.warps) and (self.events or self.tensor_queue):
                    raise Fault("the CTA ended before TMA and the tensor cores were done with its shared memory")
        stuck = [f"warp {warp.index}: {warp.waiting}" for warp in self.warps if not warp.done]
        if stuck:
            raise Fault(f"deadlock: {stuck}")
        if self.allocated is not None:
            raise Fault("tensor memory was not freed")
        if self.has_allocated and self.may_allocate:
            raise Fault("the right to allocate tensor memory was not given back")
        if any(barrier.bytes or barrier.pending != barrier.count for barrier in self.barriers.values()):
            raise Fault("an mbarrier was left in the middle of a phase")

    def can_go(self, warp: Warp) -> bool:
        warp.waiting = ""
        instruction = self.program.instructions[warp.at]
        if instruction.name == "wait":
            barrier = self.barrier(warp, instruction.operands[0])
            if not barrier.has_passed(int(self.uniform(warp, instruction.operands[1])) & 1):
                warp.waiting = f"an mbarrier, at {instruction.line}"
        elif instruction.name == "bar.sync":
            waiting = self.named.setdefault(int(instruction.operands[0]), [])
            if warp.index in waiting:
                warp.waiting = f"named barrier {instruction.operands[0]}"
        elif instruction.name == "cp.async.bulk.wait_group.read" and any(
            each in self.events for group in self.open_groups(warp, instruction) for each in group
        ):
            warp.waiting = "stores"
        return not warp.waiting

    def open_groups(self, warp: Warp, instruction: Instruction) -> list[list[int]]:
        allowed = int(instruction.operands[0])
        return warp.committed[: len(warp.committed) - allowed]

    # --- operands

    def value(self, warp: Warp, operand: str, kind: Any = np.uint32) -> Any:
        if operand.startswith("0f"):
            return np.uint32(int(operand[2:], 16)).view(kind) if kind is np.float32 else np.uint32(int(operand[2:], 16))
        if operand.startswith("0x"):
            return kind(int(operand, 16))
        if re.fullmatch(r"-?\d+", operand):
            bits = 8 * np.dtype(kind).itemsize if kind is not bool else 1
            if kind is bool:
                return np.bool_(int(operand) != 0)
            unsigned = np.dtype(f"u{bits // 8}").type(int(operand) % (1 << bits))
            return unsigned.view(kind)
        if operand == "__dynamic_shmem__0":
            return np.uint32(SHARED_BASE)
        if operand == "%tid.x":
            return np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * warp.index)
        if operand in ("%ctaid.x", "%nctaid.x", "%cluster_ctarank"):
            return np.uint32({"%ctaid.x": self.block, "%nctaid.x": self.blocks, "%cluster_ctarank": 0}[operand])
        if operand in self.program.parameters:
            return np.uint64((self.program.parameters.index(operand) + 1) << 32)
        found = warp.registers.get(operand)
        if found is None:
            raise Fault(f"{operand} is read before it is written, at {self.program.instructions[warp.at]}")
        return found if found.dtype == kind or kind is bool else found.view(kind)

    def uniform(self, warp: Warp, operand: str, kind: Any = np.uint32) -> Any:
        values = np.broadcast_to(self.value(warp, operand, kind), LANES)[warp.active]
        if (values != values[0]).any():
            raise Fault(f"{operand} differs between the lanes of warp {warp.index}")
        return values[0]

    def put(self, warp: Warp, operand: str, values: Any, kind: Any = np.uint32) -> None:
        if operand == "_":
            return
        new = np.array(np.broadcast_to(np.asarray(values), LANES))
        new = new.astype(bool) if kind is bool else new.view(kind)
        if not warp.active.all():
            old = warp.registers.get(operand, np.zeros(LANES, new.dtype))
            new = np.where(warp.active, new, old)
        warp.registers[operand] = new

    def address(self, warp: Warp, operand: str) -> Any:
        match = re.fullmatch(r"\[([%\w]+)(?:\+(\d+))?\]", operand)
        assert match is not None, operand
        kind = np.uint64 if match[1].startswith("%rd") else np.uint32
        return self.value(warp, match[1], kind) + kind(match[2] or 0)

    def shared_address(self, warp: Warp, operand: str) -> int:
        return int(np.broadcast_to(self.address(warp, operand), LANES)[warp.active][0])

    def barrier(self, warp: Warp, operand: str, of_hardware: bool = False) -> Barrier:
        at = self.shared_address(warp, operand)
        if at not in self.barriers:
            raise Fault(f"no mbarrier at {at}")
        if of_hardware and at in self.unseen_barriers:
            raise Fault(f"nothing shows TMA or the tensor cores the mbarrier at {at}")
        return self.barriers[at]

    # --- execution

    def meet(self, warp: Warp) -> None:
        """Lanes that parted at a branch go on together from where it led."""
        while warp.parked and warp.parked[-1][0] == warp.at:
            warp.active = warp.active | warp.parked.pop()[1]
        if warp.parked and warp.at > warp.parked[-1][0]:
            raise Fault(f"warp {warp.index} went past the place where its lanes meet again")

    def step(self, warp: Warp) -> None:
        self.meet(warp)
        instruction = self.program.instructions[warp.at]
        self.counts[instruction.name] = self.counts.get(instruction.name, 0) + 1
        if instruction.name.startswith("bra"):
            self.branch(warp, instruction)
            return
        if instruction.predicate:
            raise Fault(f"a predicate on {instruction}")
        if ".aligned" in instruction.name and not warp.active.all():
            raise Fault(f"{instruction.name} by a part of a warp")
        handler = _HANDLERS.get(instruction.name)
        if handler is None:
            raise NotImplementedError(f"{instruction}")
        if not handler(self, warp, instruction):
            warp.at += 1

    def branch(self, warp: Warp, instruction: Instruction) -> None:
        target = self.program.labels[instruction.operands[0]]
        taken = warp.active.copy()
        if instruction.predicate:
            condition = np.broadcast_to(self.value(warp, instruction.predicate, bool), LANES)
            taken &= ~condition if instruction.negated else condition
        if not taken.any():
            warp.at += 1
        elif (taken == warp.active).all():
            warp.at = target
        else:
            if target <= warp.at:
                raise Fault("lanes part at a jump backwards")
            warp.parked.append((target, taken))
            warp.active = warp.active & ~taken
            warp.at += 1

    def later(self, event: Callable[[], None]) -> int:
        self.next_event += 1
        self.events[self.next_event] = event
        return self.next_event


# ------------------------------------------------------------------------------------------------------- instructions


def _swizzled(address: Any) -> Any:
    """128-byte swizzle: which 16 bytes of a row of 128 depends on the row, modulo 8."""
    return address ^ ((address >> 7 & 7) << 4)


def _widen(dtype: str, words: Any) -> Any:
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def _narrow(dtype: str, values: Any) -> Any:
    """Round to nearest, ties to even; as 16-bit words."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


_HANDLERS: dict[str, Callable[[Machine, Warp, Instruction], bool | None]] = {}
"""Each returns whether the warp stays where it is."""


def _on(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for name in names:
            _HANDLERS[name] = function
        return function

    return register


def _elementwise(name: str, kind: Any, function: Callable[..., Any], result: Any = None) -> None:
    def run(machine: Machine, warp: Warp, instruction: Instruction) -> None:
        target, *sources = instruction.operands
        with np.errstate(all="ignore"):
            values = function(*(machine.value(warp, source, kind) for source in sources))
        wanted = result or kind
        machine.put(warp, target, values if wanted is bool else np.asarray(values, dtype=wanted), wanted)

    _HANDLERS[name] = run


def _divide(a: Any, b: Any) -> Any:
    return np.trunc(a.astype(np.float64) / b.astype(np.float64)).astype(np.int32)


for _suffix, _kind in (("b32", np.uint32), ("s32", np.int32), ("u32", np.uint32), ("b64", np.uint64)):
    _elementwise(f"xor.{_suffix}", _kind, np.bitwise_xor)
    _elementwise(f"and.{_suffix}", _kind, np.bitwise_and)
    _elementwise(f"or.{_suffix}", _kind, np.bitwise_or)
    _elementwise(f"add.{_suffix}", _kind, np.add)
    _elementwise(f"sub.{_suffix}", _kind, np.subtract)
    for _test in ("eq", "ne", "lt", "le", "gt", "ge"):
        _function = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater"}.get(_test)
        _elementwise(f"setp.{_test}.{_suffix}", _kind, getattr(np, _function or "greater_equal"), bool)
_elementwise("mul.lo.s32", np.int32, np.multiply)
_elementwise("div.s32", np.int32, _divide)
_elementwise("min.s32", np.int32, np.minimum)
_elementwise("max.s32", np.int32, np.maximum)
_elementwise("neg.s32", np.int32, np.negative)
_elementwise("shl.b32", np.uint32, np.left_shift)
_elementwise("shr.u32", np.uint32, np.right_shift)
_elementwise("not.pred", bool, np.logical_not, bool)
_elementwise("and.pred", bool, np.logical_and, bool)
_elementwise("or.pred", bool, np.logical_or, bool)
_elementwise("mov.pred", bool, np.asarray, bool)
_elementwise("mul.f32", np.float32, np.multiply)
_elementwise("add.f32", np.float32, np.add)
_elementwise("sub.f32", np.float32, np.subtract)
_elementwise("max.f32", np.float32, np.fmax)
_elementwise("abs.f32", np.float32, np.abs)
_elementwise("neg.f32", np.float32, np.negative)
_elementwise("mov.f32", np.float32, np.asarray)
_elementwise("fma.rn.f32", np.float32, lambda a, b, c: (np.float64(1) * a * b + c).astype(np.float32))
_elementwise("ex2.approx.ftz.f32", np.float32, np.exp2)
_elementwise("rcp.approx.ftz.f32", np.float32, lambda a: np.float32(1) / a)
_elementwise("cvt.f32.bf16", np.uint16, lambda words: _widen("bfloat16", words), np.float32)
_elementwise("cvt.f32.f16", np.uint16, lambda words: _widen("float16", words), np.float32)
_elementwise("mov.u32", np.uint32, np.asarray)
_elementwise("mov.b16", np.uint16, np.asarray)
for _type, _dtype in (("f16", "float16"), ("bf16", "bfloat16")):
    _elementwise(f"setp.lt.{_type}", np.uint16, lambda a, b, of=_dtype: _widen(of, a) < _widen(of, b), bool)


@_on("cvt.u64.u32")
def _widen_integer(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    target, source = instruction.operands
    machine.put(warp, target, np.asarray(machine.value(warp, source)).astype(np.uint64), np.uint64)


@_on("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32")
def _round_two(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    target, high, low = instruction.operands
    dtype = "bfloat16" if ".bf16x2." in instruction.name else "float16"
    words = [_narrow(dtype, np.broadcast_to(machine.value(warp, each, np.float32), LANES)) for each in (low, high)]
    machine.put(warp, target, words[0].astype(np.uint32) | words[1].astype(np.uint32) << 16)


@_on("selp.b32", "selp.f32")
def _select(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    target, yes, no, predicate = instruction.operands
    condition = machine.value(warp, predicate, bool)
    machine.put(warp, target, np.where(condition, machine.value(warp, yes), machine.value(warp, no)).astype(np.uint32))


def _parts(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


@_on("mov.b32", "mov.b64")
def _move(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    """Also takes registers apart, and puts them together."""
    target, source = instruction.operands
    if warp.not_loaded.intersection(_parts(source)):
        warp.not_loaded.update(_parts(target))
        warp.moves.append(instruction)
    whole, half = (np.uint32, np.uint16) if instruction.name == "mov.b32" else (np.uint64, np.uint32)
    bits = 8 * np.dtype(half).itemsize
    if target.startswith("{"):
        value = machine.value(warp, source, whole)
        for index, part in enumerate(_parts(target)):
            machine.put(warp, part, (value >> whole(bits * index)).astype(half), half)
    elif source.startswith("{"):
        low, high = (np.asarray(machine.value(warp, part, half)).astype(whole) for part in _parts(source))
        machine.put(warp, target, low | high << whole(bits), whole)
    else:
        machine.put(warp, target, machine.value(warp, source, whole), whole)


@_on("cvta.param.u64")
def _to_generic(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    machine.put(warp, instruction.operands[0], machine.value(warp, instruction.operands[1], np.uint64), np.uint64)


@_on("ld.param.b32")
def _load_parameter(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    match = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", instruction.operands[1])
    assert match is not None
    data = machine.arguments[machine.program.parameters.index(match[1])]
    at = int(match[2] or 0)
    machine.put(warp, instruction.operands[0], np.uint32(int.from_bytes(data[at : at + 4], "little")))


@_on("ld.shared.b32")
def _load_shared(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    at = machine.shared_address(warp, instruction.operands[1])
    machine.put(warp, instruction.operands[0], machine.shared[at : at + 4].view(np.uint32)[0])


@_on("ld.shared.v4.b32")
def _load_shared_vector(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    targets, place = instruction.operands
    addresses = np.broadcast_to(machine.address(warp, place), LANES)
    if (addresses % 16).any():
        raise Fault("a vector load that is not aligned")
    words = machine.shared[addresses[:, None].astype(np.int64) + np.arange(16)].view(np.uint32)
    for index, each in enumerate(_parts(targets)):
        machine.put(warp, each, np.ascontiguousarray(words[:, index]))


@_on("st.shared.v4.b32")
def _store_shared(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    addresses = np.broadcast_to(machine.address(warp, instruction.operands[0]), LANES)
    if (addresses % 16).any():
        raise Fault("a vector store that is not aligned")
    values = np.stack(
        [np.broadcast_to(machine.value(warp, each), LANES) for each in _parts(instruction.operands[1])], 1
    )
    for lane in range(LANES):
        at = int(addresses[lane])
        machine.shared[at : at + 16] = values[lane].copy().view(np.uint8)
        machine.unfenced[at : at + 16] = machine.apart[at : at + 16] = warp.index + 1


@_on("shfl.sync.idx.b32")
def _shuffle(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    values = np.broadcast_to(machine.value(warp, instruction.operands[1]), LANES)
    machine.put(warp, instruction.operands[0], values[int(instruction.operands[2])])


@_on("elect.sync")
def _elect(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    if not warp.active.all():
        raise Fault("elect.sync by a part of a warp")
    machine.put(warp, instruction.operands[1], np.arange(LANES) == ELECTED, bool)


@_on("prefetch.tensormap")
def _nothing(machine: Machine, warp: Warp, instruction: Instruction) -> None: ...


@_on("bar.warp.sync")
def _together(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    machine.apart[machine.apart == warp.index + 1] = 0


@_on("ret")
def _return(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    if warp.loads:
        raise Fault("a load from tensor memory was never waited for")
    if any(each in machine.events for group in [*warp.committed, warp.groups] for each in group):
        raise Fault("a warp ended while TMA still reads what it stored")
    warp.done = True


@_on("bar.sync")
def _barrier(machine: Machine, warp: Warp, instruction: Instruction) -> bool:
    """The last one to come lets all go; the others stay at the instruction until then."""
    _together(machine, warp, instruction)
    name = int(instruction.operands[0])
    threads = int(instruction.operands[1]) if len(instruction.operands) > 1 else machine.program.threads
    waiting = machine.named.setdefault(name, [])
    if (len(waiting) + 1) * LANES < threads:
        waiting.append(warp.index)
        return True
    for index in waiting:
        machine.warps[index].at += 1
    waiting.clear()
    return False


@_on("fence.proxy.async.shared::cta")
def _fence_proxy(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    own = machine.unfenced == warp.index + 1
    machine.apart[own] = warp.index + 1
    machine.unfenced[own] = 0


# --- mbarriers


@_on("mbarrier.init.shared.b64")
def _init(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    count = int(machine.uniform(warp, instruction.operands[1]))
    at = machine.shared_address(warp, instruction.operands[0])
    if at in machine.barriers or at % 8 or warp.active.sum() != 1:
        raise Fault("an mbarrier is set up twice, by many, or out of place")
    machine.barriers[at] = Barrier(count, count)
    machine.unseen_barriers[at] = warp.index


@_on("fence.mbarrier_init.release.cluster")
def _fence_init(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    machine.unseen_barriers = {at: by for at, by in machine.unseen_barriers.items() if by != warp.index}


@_on("mbarrier.arrive.expect_tx.shared.b64")
def _expect(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    _, place, amount = instruction.operands
    if warp.active.sum() != 1:
        raise Fault("bytes are announced by more than one lane")
    barrier = machine.barrier(warp, place)
    barrier.bytes += int(machine.uniform(warp, amount))
    barrier.arrive()


@_on("mbarrier.arrive.shared.b64")
def _arrive(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    barrier = machine.barrier(warp, instruction.operands[1])
    barrier.of_tensor_memory |= warp.has_loaded
    barrier.unordered |= warp.unfenced_load or bool(warp.loads)
    for _ in range(int(warp.active.sum())):
        barrier.arrive()


@_on("wait")
def _wait(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    barrier = machine.barrier(warp, instruction.operands[0])
    warp.unfenced_wait |= barrier.of_tensor_memory
    warp.saw_unordered |= barrier.unordered


# --- TMA


def _tensor(machine: Machine, warp: Warp, place: str, coordinates: str) -> tuple[Descriptor, int, int]:
    index = (int(np.broadcast_to(machine.address(warp, place), LANES)[warp.active][0]) >> 32) - 1
    column, row = (int(machine.uniform(warp, each, np.int32)) for each in _parts(coordinates))
    return Descriptor.read(machine.arguments[index]), row, column


def _box(descriptor: Descriptor, base: int) -> Any:
    """Where in shared memory each element lies."""
    rows, columns = descriptor.box
    if columns * 2 != 128 or base % 1024:
        raise Fault("a box that the 128-byte swizzle does not fit")
    return _swizzled(base + 128 * np.arange(rows)[:, None] + 2 * np.arange(columns)[None])


def _inside(descriptor: Descriptor, row: int, column: int) -> tuple[slice, slice]:
    (rows, columns), (height, width) = descriptor.shape, descriptor.box
    if row < 0 or column < 0:
        raise Fault("a box that starts before its tensor")
    return slice(row, max(row, min(rows, row + height))), slice(column, max(column, min(columns, column + width)))


def _view(machine: Machine, descriptor: Descriptor) -> Any:
    """The tensor, which may start inside of the memory of a wider one."""
    for start, whole in machine.memory.items():
        offset = descriptor.address - start
        if 0 <= offset < whole.nbytes:
            if descriptor.row_bytes != whole.shape[1] * 2 or offset >= descriptor.row_bytes or offset % 2:
                raise Fault("a descriptor whose rows are not those of the tensor at its address")
            part = whole[:, offset // 2 : offset // 2 + descriptor.shape[1]]
            if part.shape != descriptor.shape:
                raise Fault(f"a descriptor of {descriptor.shape} for a tensor of {part.shape}")
            return part
    raise Fault("a descriptor of memory that is nobody's")


@_on("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint")
def _load(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    target, source, coordinates, place = _split_source(instruction.operands, 1)[:4]
    descriptor, row, column = _tensor(machine, warp, source, coordinates)
    base, barrier = machine.shared_address(warp, target), machine.barrier(warp, place, of_hardware=True)
    if warp.active.sum() != 1:
        raise Fault("TMA is asked by more than one lane")

    def happen() -> None:
        rows, columns = _inside(descriptor, row, column)
        values = np.zeros(descriptor.box, np.uint16)
        values[: rows.stop - rows.start, : columns.stop - columns.start] = _view(machine, descriptor)[rows, columns]
        at = _box(descriptor, base)
        machine.shared[at], machine.shared[at + 1] = (values & 0xFF).astype(np.uint8), (values >> 8).astype(np.uint8)
        barrier.bytes -= values.nbytes
        if barrier.bytes < 0:
            raise Fault("more bytes than an mbarrier was told to expect")
        barrier.settle()

    machine.later(happen)


@_on("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint")
def _store(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    target, coordinates, source = _split_source(instruction.operands, 0)[:3]
    descriptor, row, column = _tensor(machine, warp, target, coordinates)
    base = machine.shared_address(warp, source)  # the whole warp may ask for it: ptxas has it stored once (UTMASTG)

    def happen() -> None:
        at = _box(descriptor, base)
        if machine.unfenced[at].any():
            raise Fault("TMA reads what was written without a fence of its proxy")
        if machine.apart[at].any():
            raise Fault("TMA reads what lanes have written that nothing has brought together since")
        words = machine.shared[at].astype(np.uint16) | machine.shared[at + 1].astype(np.uint16) << 8
        rows, columns = _inside(descriptor, row, column)
        view = _view(machine, descriptor)
        view[rows, columns] = words[: rows.stop - rows.start, : columns.stop - columns.start]

    warp.groups.append(machine.later(happen))


def _split_source(operands: tuple[str, ...], at: int) -> tuple[str, ...]:
    """`[tensor, {column, row}]` is one operand in brackets: taken apart."""
    match = re.fullmatch(r"\[(%\w+),\s*(\{.*?\})\]", operands[at])
    assert match is not None, operands
    return (*operands[:at], f"[{match[1]}]", match[2], *operands[at + 1 :])


@_on("cp.async.bulk.commit_group")
def _commit_group(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    warp.committed.append(warp.groups)
    warp.groups = []


@_on("cp.async.bulk.wait_group.read")
def _wait_group(machine: Machine, warp: Warp, instruction: Instruction) -> None: ...


# --- tensor memory and the tensor cores


@_on("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32")
def _allocate(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    place, amount = instruction.operands
    columns = int(machine.uniform(warp, amount))
    if not machine.may_allocate or machine.allocated is not None or columns not in (32, 64, 128, 256, 512):
        raise Fault("tensor memory can't be allocated so")
    machine.allocated = (512 - columns, columns)  # not always at column 0
    machine.has_allocated = True
    at = machine.shared_address(warp, place)
    machine.shared[at : at + 4] = np.array([512 - columns], np.uint32).view(np.uint8)


@_on("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
def _relinquish(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    machine.may_allocate = False


@_on("tcgen05.dealloc.cta_group::1.sync.aligned.b32")
def _free(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    at, columns = (int(machine.uniform(warp, each)) for each in instruction.operands)
    if machine.allocated != (at, columns):
        raise Fault("tensor memory is freed otherwise than it was allocated")
    if machine.tensor_queue or any(other.loads for other in machine.warps) or warp.unfenced_wait:
        raise Fault("tensor memory is freed while it is used")
    machine.allocated = None
    machine.tensor_memory[:] = np.nan


def _columns(machine: Machine, column: int, amount: int) -> slice:
    if machine.allocated is None:
        raise Fault("tensor memory that is not allocated")
    first, columns = machine.allocated
    if column < first or column + amount > first + columns:
        raise Fault("columns of tensor memory that are not this kernel's")
    return slice(column, column + amount)


@_on("tcgen05.fence::after_thread_sync")
def _fence_after(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    warp.unfenced_wait = False


@_on("tcgen05.fence::before_thread_sync")
def _fence_before(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    if not warp.loads:
        warp.unfenced_load = False


@_on("tcgen05.ld.sync.aligned.32x32b.x32.b32")
def _load_tensor_memory(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    registers = _parts(instruction.operands[0])
    address = int(machine.uniform(warp, instruction.operands[1].strip("[]")))
    lane, column = address >> 16, address & 0xFFFF
    if lane != LANES * (warp.index % 4):
        raise Fault(f"warp {warp.index} can't reach lane {lane} of tensor memory")
    if warp.unfenced_wait:
        raise Fault("a load from tensor memory that is not ordered behind a wait")
    place = machine.tensor_memory[lane : lane + LANES, _columns(machine, column, len(registers))]
    early = machine.random.random() < 0.5
    warp.loads.append((registers, lane, column, place.copy() if early else None))
    warp.unfenced_load = warp.has_loaded = True
    for each in registers:
        machine.put(warp, each, POISON)
    warp.not_loaded.update(registers)


@_on("tcgen05.wait::ld.sync.aligned")
def _wait_load(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    for registers, lane, column, early in warp.loads:
        place = machine.tensor_memory[lane : lane + LANES, _columns(machine, column, len(registers))]
        values = place.copy() if early is None else early
        for index, each in enumerate(registers):
            machine.put(warp, each, np.ascontiguousarray(values[:, index]).view(np.uint32))
    warp.loads.clear()
    warp.not_loaded.clear()
    for move in warp.moves:
        _move(machine, warp, move)
    warp.moves.clear()


def _operand_addresses(descriptor: int, rows: int, mn_major: bool) -> Any:
    """[rows, 16] of A or B, as a shared-memory descriptor says; its K is contiguous, or its rows are."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 61 != 2 or descriptor >> 46 & 7 != 1 or descriptor >> 49 & 7 != 0:
        raise Fault("a shared-memory descriptor of another kind")
    row, k = np.arange(rows)[:, None], np.arange(16)[None]
    if mn_major:
        offset = row // 64 * leading + row % 64 * 2 + k // 8 * stride + k % 8 * 128
    else:
        offset = row // 8 * stride + row % 8 * 128 + k * 2
    return _swizzled(start + offset)


def _matrix(machine: Machine, descriptor: int, rows: int, mn_major: bool) -> Any:
    at = _operand_addresses(descriptor, rows, mn_major)
    words = machine.shared[at].astype(np.uint16) | machine.shared[at + 1].astype(np.uint16) << 8
    return _widen(machine.dtype, words)


@_on("tcgen05.mma.cta_group::1.kind::f16.collector::a::discard")
def _multiply(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    place, a, b, kind, disabled, accumulate = instruction.operands
    if warp.unfenced_wait or warp.active.sum() != 1:
        raise Fault("tcgen05.mma by many lanes, or not ordered behind a wait")
    if warp.saw_unordered:
        raise Fault("tcgen05.mma into what another warp's loads are not ordered before")
    if any(machine.uniform(warp, each) for each in _parts(disabled)):
        raise Fault("lanes of the result are disabled")
    idesc = int(machine.uniform(warp, kind))
    rows, columns = (idesc >> 24 & 31) << 4, (idesc >> 17 & 63) << 3
    type_ = 1 if machine.dtype == "bfloat16" else 0
    if (idesc & 0xFFFF) != (1 << 4 | type_ << 7 | type_ << 10) or idesc >> 29 or idesc >> 23 & 1:
        raise Fault(f"an instruction descriptor of another kind: {idesc:#x}")
    descriptors = [int(machine.uniform(warp, each, np.uint64)) for each in (a, b)]
    address = int(machine.uniform(warp, place.strip("[]")))
    adds = bool(machine.uniform(warp, accumulate, bool))

    def happen() -> None:
        where = machine.tensor_memory[:rows, _columns(machine, address & 0xFFFF, columns)]
        with np.errstate(all="ignore"):
            a_values = _matrix(machine, descriptors[0], rows, mn_major=False)
            b_values = _matrix(machine, descriptors[1], columns, mn_major=bool(idesc >> 16 & 1))
            product = a_values @ b_values.T
            where[:] = where + product if adds else product

    if address >> 16:
        raise Fault("a result that does not start at lane 0")
    machine.tensor_queue.append(happen)


@_on("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64")
def _commit(machine: Machine, warp: Warp, instruction: Instruction) -> None:
    if warp.active.sum() != 1:
        raise Fault("tcgen05.commit by more than one lane")
    barrier = machine.barrier(warp, instruction.operands[0], of_hardware=True)
    barrier.of_tensor_memory = True
    machine.tensor_queue.append(barrier.arrive)
