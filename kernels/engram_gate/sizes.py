"""How the Triton kernels of the Engram gate cut a row and are launched for it. Needs neither Triton nor a GPU.

Both kernels are bound by memory bandwidth. What keeps a GPU's memory busy is bytes on their way: rows are copied into
a ring in shared memory, `stages - 1` steps ahead, a step being one stream of one token.

Tensors: M tokens, S streams, D width of a stream.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_MULTIPROCESSORS = 192
"""More than any GPU of arch.py has: what plans leave room for without asking a GPU."""
SHARED_BYTES = 227 * 1024
"""What one program may use on SM90 and SM100. Other GPUs have less: shape_of() takes the GPU's own number."""
_SHARED_SPARE = 4096
"""For reductions across warps, and for what the driver reserves."""
_FORWARD_ELEMENTS, _BACKWARD_ELEMENTS = 40, 20
"""Of a row, at most, in each thread. Forward: few warps wait little for each other, and were fastest, see below.
Backward: with more, the four sums of the weight's gradient do not fit into registers."""
_MOST_WARPS = 16
_FORWARD_WARPS, _BACKWARD_WARPS = 16, 8
"""Of a multiprocessor, in all its programs. Forward: half of the registers there may be for each thread are enough, and
while one program waits for its rows, or for its sums, the others work. Backward: all of them are needed."""
_MOST_BACKWARD_STEPS = 3
"""That one program holds in shared memory. Forward it is one: more programs were faster than more steps, for which
there is no room beside them. Triton copies the next step where one ends, so that nothing of a program is on its way
while it works; the copies of the others are.

This, one step, `_FORWARD_ELEMENTS` and `_FORWARD_WARPS`, and the default of `sum_rows`, are what was fastest at 4
streams of 5120 in bf16 on NVIDIA H200, Triton 3.6:
`python -m benchmarks engram_gate --scopes gate --modes forward,backward --tokens 4096 --arms fusepatch_plan,variants`.
"""
_HELD_STREAMS, _HELD_WARPS = 4, 8
"""Up to this many streams, and warps, a program holds its sums of the weight's gradient in registers: more warps leave
each thread fewer of them."""
_REGISTERS, _MOST_REGISTERS = 65536, 255
"""Of a multiprocessor, and of a thread."""


class Shape(NamedTuple):
    """How a row is cut, and how the kernels are launched for it."""

    head: int
    """Columns in the first block, a power of two; the tail, another power of two, covers the rest."""
    tail: int
    forward_together: int
    """Tokens that are in one step and share its weights."""
    forward_warps: int
    forward_stages: int
    """Of the ring; 1 for none."""
    forward_programs: int
    """On each multiprocessor, with a run of tokens each; 0 for one program per token."""
    backward_warps: int
    backward_stages: int
    backward_programs: int
    held: bool
    """Whether sums of the weight's gradient stay in registers, and not in memory."""
    forward_one_stream: bool = False
    """Whether a program has one stream of its tokens, and keeps its weights; else it has all, and keeps their value."""
    backward_copies_weight: bool = True
    """Whether weights are copied ahead like the rest; else they are read into registers, through the L1 cache."""
    sum_rows: int = 64
    """How many programs' sums of the weight's gradient are added up at a time, and of how many columns.

    Few columns make many programs of the small kernel, and many rows make few rounds of each: it takes as long as its
    loads wait, one after the other."""
    sum_columns: int = 32

    by_thread: bool = True
    """Whether each thread adds up its own columns of head and tail, so that the threads' sums meet once and not twice:
    where each has some of the tail."""

    @property
    def forward_threads(self) -> int:
        """That columns are added up by; 0 where they are not."""
        return self._threads(self.forward_warps)

    @property
    def backward_threads(self) -> int:
        """As forward_threads."""
        return self._threads(self.backward_warps)

    def _threads(self, warps: int) -> int:
        return 32 * warps if self.by_thread and self.tail >= 32 * warps else 0

    @property
    def forward_registers(self) -> int:
        """The most that a thread of the forward pass may have, for its programs to fit side by side."""
        threads = 32 * self.forward_warps * max(1, self.forward_programs)
        return min(_MOST_REGISTERS, _REGISTERS // threads // 8 * 8)


def shape_of(
    streams: int, width: int, item: int = 2, weight_item: int = 4, shared_bytes: int = SHARED_BYTES, weights: int = 1
) -> Shape:
    """The shape for rows of `width` elements of `item` bytes, weights of `weight_item`, on a GPU of `shared_bytes`.

    The forward pass reads one row of weights, or two where query and key are rounded apart.
    """
    head, tail = cut(width)
    row = head + tail
    # A step of the forward pass copies x, key, value and weight; one of the backward pass the incoming gradient too.
    forward_step, backward_step = (3 * item + weights * weight_item) * row, (4 * item + weight_item) * row
    forward_warps, warps = _warps(width, _FORWARD_ELEMENTS), _warps(width, _BACKWARD_ELEMENTS)
    # Each has room for a step; one alone, where there could be more, would leave memory idle while it works. Roundings
    # take registers: with them there are half as many.
    most_programs = max(1, _FORWARD_WARPS // weights // forward_warps)
    forward_programs = min(most_programs, shared_bytes // (forward_step + _SHARED_SPARE))
    if forward_programs < min(2, most_programs):
        forward_programs = 0
    held = streams <= _HELD_STREAMS and warps <= _HELD_WARPS
    programs = programs_per_multiprocessor(width)
    # Triton holds one step more of what is read inside conditions alone: of x and key in fp32, where the weight's
    # gradient is not wanted. There is room for both in every variant, as which rows are held is up to the compiler.
    backward_room = shared_bytes // programs - _SHARED_SPARE - 2 * item * row
    backward_stages = 1 + min(_MOST_BACKWARD_STEPS, max(0, backward_room) // backward_step)
    return Shape(
        head,
        tail,
        forward_together=1,
        forward_warps=forward_warps,
        forward_stages=2 if forward_programs else 1,
        forward_programs=forward_programs,
        backward_warps=warps,
        backward_stages=backward_stages if held else 1,
        backward_programs=programs,
        held=held,
    )


def cut(width: int) -> tuple[int, int]:
    """Head and tail: 5120 = 4096 + 1024, where one block would be padded to 8192."""
    head = 1 << (width.bit_length() - 1)
    rest = width - head
    return head, 1 << (rest - 1).bit_length() if rest else 1  # one column that does not exist


def programs_per_multiprocessor(width: int) -> int:
    """How many programs of the backward pass share a multiprocessor: one of eight warps, or more that are smaller."""
    return max(1, _BACKWARD_WARPS // _warps(width, _BACKWARD_ELEMENTS))


def _warps(width: int, elements: int) -> int:
    """The fewest warps, a power of two, that leave each thread so many elements of a row or fewer."""
    warps = 1
    while warps < _MOST_WARPS and sum(cut(width)) > elements * 32 * warps:
        warps *= 2
    return warps
