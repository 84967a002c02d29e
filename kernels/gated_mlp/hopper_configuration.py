"""The kernels of the Hopper backend: which there are, and which one serves a call. Without the CuTe DSL.

Tensors: M tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from ..cute.tile import BARRIER_BYTES, SHARED_LIMIT, Tile

FORWARD_BUFFERS = 2
"""Of the forward kernel's epilogue, per warp group."""
CHUNK = 64
"""Columns that the backward kernel's epilogue works on at a time, of 64 rows."""
CHUNK_BYTES = 64 * CHUNK * 2


@dataclass(frozen=True)
class Forward:
    """One compiled kernel."""

    dtype: str
    activation: str
    keep_gate_up: bool
    biased: bool
    tile: Tile

    def __post_init__(self) -> None:
        tile = self.tile
        assert tile.rows % 64 == 0 and tile.columns % 64 == 0 and 64 <= tile.columns <= 256 and tile.cluster in (1, 2)
        assert self.shared_bytes <= SHARED_LIMIT, self

    @property
    def half(self) -> int:
        """Columns of h in a tile."""
        return self.tile.columns // 2

    @property
    def chunk(self) -> int:
        """Columns of h that the epilogue stores at a time."""
        return 64 if self.half % 64 == 0 else 32

    @property
    def parts(self) -> int:
        """Chunks of a tile."""
        return self.tile.rows // 64 * (self.half // self.chunk)

    @property
    def stores(self) -> int:
        """Of a tile, by one warp group."""
        return self.parts * (3 if self.keep_gate_up else 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, at most."""
        return self.tile.stages * self.tile.stage_bytes + 2 * FORWARD_BUFFERS * 64 * self.chunk * 2 + BARRIER_BYTES


@dataclass(frozen=True)
class Backward:
    """One compiled kernel."""

    dtype: str
    activation: str
    want_h: bool
    tile: Tile
    slots: int
    """Of gate and up, which become d_gate and d_up."""
    h_buffers: int
    """At most as many as slots; 0 where h is not wanted."""
    lag: int = 0
    """Chunks whose stores may still be reading shared memory when the next one's are issued: 0 or 1."""
    keep_operands: bool = False
    """Whether L2 is asked to keep dout and Wd before all else."""

    def __post_init__(self) -> None:
        tile = self.tile
        assert tile.rows % 64 == 0 and tile.columns % 64 == 0 and 64 <= tile.columns <= 256 and tile.cluster in (1, 2)
        assert self.slots >= 2 and (2 <= self.h_buffers <= self.slots if self.want_h else self.h_buffers == 0), self
        assert self.shared_bytes <= SHARED_LIMIT, self

    @property
    def chunks(self) -> int:
        """Of a tile."""
        return self.tile.rows // 64 * (self.tile.columns // CHUNK)

    @property
    def buffers(self) -> int:
        """Of one chunk of one tensor: 2 * slot and 2 * slot + 1 for gate and up, then those of h."""
        return 2 * self.slots + self.h_buffers

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, at most."""
        return self.tile.stages * self.tile.stage_bytes + self.buffers * CHUNK_BYTES + BARRIER_BYTES


# ------------------------------------------------------------------------------------------------- which one serves

_ENOUGH_TILES = 100
"""Of the large kind, for the 132 multiprocessors of an H200. Large over small, measured: at H 1024, I 3072 forward 1.08
with 64 tiles, 0.74 with 128; backward 1.42 and 1.12, then 0.86 with 256. At H 4096, I 14336 with M 256: 0.68 and 0.96;
with M 128, where half of every cluster is empty, 1.33 and 1.65."""


class Size(Enum):
    """What decides how the work is cut up."""

    SMALL = "small"
    """Little work: large tiles would leave multiprocessors idle, or lie mostly beyond M."""
    SHALLOW = "shallow"
    """A short K: the backward kernel is bound by what its epilogue moves."""
    DEEP = "deep"


def size_of(tokens: int, hidden: int, inner: int) -> Size:
    """Large tiles have 128 rows, in clusters of 256 whatever M is, x 96 columns of h (192 of dh)."""
    if tokens <= 128 or -(-tokens // 128) * -(-inner // 96) < _ENOUGH_TILES:
        return Size.SMALL
    return Size.SHALLOW if hidden < 2048 else Size.DEEP


def forward_configuration(
    dtype: torch.dtype, activation: str, keep_gate_up: bool, size: Size, *, biased: bool = False
) -> Forward:
    """The forward kernel of a call."""
    if size is Size.SMALL:
        shape = Tile(rows=64, columns=128, stages=8, cluster=1, group=8)
    else:
        # 128 x (96 + 96) was the fastest of five shapes at each of three sizes on an H200, the cluster of two gave 3 to
        # 7 %; groups of 4, 8 and 16, and hints to L2, are within 2 % of each other and none is ahead everywhere.
        shape = Tile(rows=128, columns=192, stages=5, cluster=2, group=8)
    return Forward(_name(dtype), activation, keep_gate_up, biased, shape)


def backward_configuration(dtype: torch.dtype, activation: str, want_h: bool, size: Size) -> Backward:
    """The backward kernel of a call."""
    slots, h_buffers = (3, 2) if want_h else (4, 0)
    if size is Size.SMALL:
        shape = Tile(rows=64, columns=128, stages=6, cluster=1, group=8)
    else:
        shape = Tile(rows=128, columns=192, stages=4, cluster=2, group=4)
    # On an H200, over cuBLAS's GEMM alone: with H 1024, 1.12 so and 1.25 to 1.27 with a lag of 1, which frees slots
    # later; with H 2048, 1.00 with the lag and 1.04 without; from H 4096 on all are within 3 %.
    shallow = size is Size.SHALLOW
    lag = 0 if shallow else 1
    return Backward(_name(dtype), activation, want_h, shape, slots, h_buffers, lag, keep_operands=shallow)


def configurations(
    dtype: torch.dtype, activation: str, size: Size, *, biased: bool = False
) -> tuple[Forward | Backward, ...]:
    """Every kernel that a call of this kind, or its gradients, may need."""
    flags = (False, True)
    forward = (forward_configuration(dtype, activation, flag, size, biased=biased) for flag in flags)
    return *forward, *(backward_configuration(dtype, activation, flag, size) for flag in flags)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
