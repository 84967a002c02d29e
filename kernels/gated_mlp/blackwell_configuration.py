"""The kernels of the Blackwell backend (SM100, SM103): which there are, and which one serves a call. Without the CuTe
DSL.

Each CTA has the tensor cores of its own multiprocessor. Pairs of CTAs that multiply one tile together (cta_group::2)
would halve what each reads of B; they belong in blackwell_gemm.py, are not built, and what they would gain is not
measured. A pair's tile must have 256 rows then: with 128, gate and up of an element lie in different warps.

Tensors: M tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from ..cute.tile import ACCUMULATORS, BARRIER_BYTES, SHARED_LIMIT, Tile

ROWS = 128
"""Of every tile: one lane of tensor memory, and one thread of the epilogue, each."""
TENSOR_COLUMNS = 512
"""Of tensor memory, of a multiprocessor."""
CHUNK = 64
"""Columns that the epilogue loads or stores at a time, of all rows."""
CHUNK_BYTES = ROWS * CHUNK * 2
BUFFERS = 2
"""Of the forward kernel's epilogue: a chunk of one tensor each."""


@dataclass(frozen=True)
class Forward:
    """One compiled kernel."""

    kernel: ClassVar[str] = "blackwell_forward"
    dtype: str
    activation: str
    keep_gate_up: bool
    tile: Tile

    def __post_init__(self) -> None:
        tile = self.tile
        assert tile.rows == ROWS and tile.columns in (128, 256) and tile.cluster == 1, self
        assert self.tensor_columns <= TENSOR_COLUMNS, self
        assert self.shared_bytes <= SHARED_LIMIT, self

    @property
    def half(self) -> int:
        """Columns of h in a tile."""
        return self.tile.columns // 2

    @property
    def chunks(self) -> int:
        """Of a tile."""
        return self.half // CHUNK

    @property
    def results(self) -> tuple[str, ...]:
        """What is stored of each chunk, in this order."""
        return ("gate", "up", "h") if self.keep_gate_up else ("h",)

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory, all of which is asked for at once: a power of two from 32 on."""
        return ACCUMULATORS * self.tile.columns

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, at most."""
        return self.tile.stages * self.tile.stage_bytes + BUFFERS * CHUNK_BYTES + BARRIER_BYTES


@dataclass(frozen=True)
class Backward:
    """One compiled kernel."""

    kernel: ClassVar[str] = "blackwell_backward"
    dtype: str
    activation: str
    want_h: bool
    tile: Tile
    slots: int
    """Of gate and up of one chunk, which become d_gate and d_up, and of h."""

    def __post_init__(self) -> None:
        tile = self.tile
        assert tile.rows == ROWS and tile.columns in (64, 128, 256) and tile.cluster == 1 and self.slots >= 2, self
        assert self.tensor_columns <= TENSOR_COLUMNS, self
        assert self.shared_bytes <= SHARED_LIMIT, self

    @property
    def chunks(self) -> int:
        """Of a tile."""
        return self.tile.columns // CHUNK

    @property
    def buffers(self) -> int:
        """Of one chunk of one tensor: 2 * slot and 2 * slot + 1 for gate and up, 2 * slots + slot for h."""
        return (3 if self.want_h else 2) * self.slots

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory, all of which is asked for at once: a power of two from 32 on."""
        return ACCUMULATORS * self.tile.columns

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, at most."""
        return self.tile.stages * self.tile.stage_bytes + self.buffers * CHUNK_BYTES + BARRIER_BYTES


# ------------------------------------------------------------------------------------------------- which one serves

WIDE = Tile(rows=ROWS, columns=256, stages=4, cluster=1, group=8)
NARROW = Tile(rows=ROWS, columns=128, stages=6, cluster=1, group=8)
"""For little work: twice as many tiles."""
SQUARE = Tile(rows=ROWS, columns=128, stages=4, cluster=1, group=8)
"""Of the backward kernel, whatever the size."""

_ENOUGH_TILES = 148
"""Of the wide kind: one for each multiprocessor of a B200. No GPU has run any of the kernels, so that nothing says yet
where which one is faster."""


class Size(Enum):
    """What decides how the work is cut up."""

    SMALL = "small"
    """Little work: wide tiles would leave multiprocessors idle, or lie mostly beyond M."""
    LARGE = "large"


def size_of(tokens: int, hidden: int, inner: int) -> Size:
    """Wide tiles have 128 rows x 128 columns of h. H does not matter."""
    wide_tiles = -(-tokens // ROWS) * -(-inner // (WIDE.columns // 2))
    return Size.SMALL if tokens <= ROWS or wide_tiles < _ENOUGH_TILES else Size.LARGE


def forward_configuration(dtype: torch.dtype, activation: str, keep_gate_up: bool, tile: Tile) -> Forward:
    """The forward kernel of a call."""
    return Forward(_name(dtype), activation, keep_gate_up, tile)


def backward_configuration(dtype: torch.dtype, activation: str, want_h: bool, tile: Tile) -> Backward:
    """The backward kernel of a call."""
    return Backward(_name(dtype), activation, want_h, tile, slots=2 if want_h else 3)


def configurations(
    dtype: torch.dtype, activation: str, size: Size, *, biased: bool = False
) -> tuple[Forward | Backward, ...]:
    """Every kernel that a call of this kind, or its gradients, may need."""
    assert not biased, "no kernel adds biases: choose.py declines them"
    flags, tile = (False, True), NARROW if size is Size.SMALL else WIDE
    forward = (forward_configuration(dtype, activation, flag, tile) for flag in flags)
    return *forward, *(backward_configuration(dtype, activation, flag, SQUARE) for flag in flags)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
