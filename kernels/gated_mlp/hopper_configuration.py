"""The kernels of the Hopper backend: which there are, and which one serves a call. Without the CuTe DSL.

Tensors: M tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from ..cute.tile import BARRIER_BYTES, SHARED_LIMIT, Tile

FORWARD_BUFFERS = 2
"""Of the forward kernel's epilogue, per warp group."""
ARCH = "sm_90a"
PRODUCT_CHUNK = 32
"""Columns that the product kernel's epilogue stores at a time, of 64 rows: two buffers leave room for five stages."""
CHUNK = 64
"""Columns that the backward kernel's epilogue works on at a time, of 64 rows."""
CHUNK_BYTES = 64 * CHUNK * 2


@dataclass(frozen=True)
class Forward:
    """One compiled kernel."""

    kernel: ClassVar[str] = "hopper_forward"
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

    kernel: ClassVar[str] = "hopper_backward"
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


@dataclass(frozen=True)
class Product:
    """One compiled kernel."""

    kernel: ClassVar[str] = "hopper_product"
    dtype: str
    b_by_k: bool
    """Whether what lies side by side in B is neighbours along K; else along the columns of C."""
    transposed: bool
    """Whether what lies side by side in the result is one of its columns."""
    sources: int
    """Pairs of operands whose products are added up: 1 or 2."""
    outputs: int
    """Products over the same A: 1 or 2."""
    tile: Tile

    def __post_init__(self) -> None:
        tile = self.tile
        assert tile.rows % 64 == 0 and tile.columns % PRODUCT_CHUNK == 0 and 64 <= tile.columns <= 256, self
        assert tile.cluster in (1, 2) and self.sources * self.outputs in (1, 2) and self.parts % FORWARD_BUFFERS == 0
        assert self.shared_bytes <= SHARED_LIMIT, self

    @property
    def parts(self) -> int:
        """Chunks of a tile."""
        return self.tile.rows // 64 * (self.tile.columns // PRODUCT_CHUNK)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, at most."""
        return self.tile.stages * self.tile.stage_bytes + 2 * FORWARD_BUFFERS * 64 * PRODUCT_CHUNK * 2 + BARRIER_BYTES


# ----------------------------------------------------------------------------------------------- how work is cut up


@dataclass(frozen=True)
class Cut:
    """What decides how work is cut up, besides its sizes. The defaults are by what was measured on an H200."""

    forward_group: int = 4
    """Of large tiles. Ahead of groups of 8 at the largest size that was tried on an H200, and level elsewhere;
    `fusepatch tune` tries others."""
    backward_groups: tuple[int, int] = (4, 8)
    """Of large tiles, with a short K and a long one."""
    swapped: bool = False
    """Whether a short K gets the backward kernel of a long one, and the other way round."""
    fullness: float = 0.965
    """Of the work of all multiprocessors in all rounds of tiles, what must be there for the result of a product.

    H200, time over cuBLAS's at this fraction: the gradients of both weights 0.96 (0.981), 0.97 (0.979), 0.97 (0.970),
    1.01 (0.940); that of the down projection 0.96 (0.981), 0.99 (0.970), 1.01 (0.953), 1.12 (0.867); dx 0.98 (0.970),
    0.99 (0.955), 1.04 and 1.07 (0.887). By `python -m benchmarks gated_mlp_kernels`.
    """
    fewest_tokens: int = 8192
    """For a product. With fewer nothing was measured."""
    anywhere: bool = False
    """Whether our own products serve on GPUs, and at widths, at which none was timed."""


CUTS = {
    "": Cut(),
    "small-groups": Cut(forward_group=2, backward_groups=(2, 4)),
    "large-groups": Cut(forward_group=16, backward_groups=(16, 16)),
    "swapped-backward": Cut(swapped=True),
    "own-products": Cut(fullness=0.0, fewest_tokens=2048, anywhere=True),
    "cublas-products": Cut(fullness=math.inf),
}
"""By the name of a choice; the first is what serves where `fusepatch tune` found none to be faster."""


# ------------------------------------------------------------------------------------------------- which one serves

_ENOUGH_TILES = 100
"""Of the large kind, for the 132 multiprocessors of an H200. Large over small, measured: at H 1024, I 3072 forward 1.08
with 64 tiles, 0.74 with 128; backward 1.42 and 1.12, then 0.86 with 256. At H 4096, I 14336 with M 256: 0.68 and 0.96;
with M 128, where half of every cluster is empty, 1.33 and 1.65."""


@functools.cache
def clusters_of(device: torch.device) -> int:
    """How many clusters of two the GPU holds at once: one CTA per multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count // 2


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
    dtype: torch.dtype, activation: str, keep_gate_up: bool, size: Size, *, biased: bool = False, choice: str = ""
) -> Forward:
    """The forward kernel of a call."""
    if size is Size.SMALL:
        shape = Tile(rows=64, columns=128, stages=8, cluster=1, group=8)
    else:
        # 128 x (96 + 96) was the fastest of five shapes at each of three sizes on an H200, the cluster of two gave 3 to
        # 7 %.
        shape = Tile(rows=128, columns=192, stages=5, cluster=2, group=CUTS[choice].forward_group)
    return Forward(_name(dtype), activation, keep_gate_up, biased, shape)


def backward_configuration(
    dtype: torch.dtype, activation: str, want_h: bool, size: Size, *, choice: str = ""
) -> Backward:
    """The backward kernel of a call."""
    cut = CUTS[choice]
    slots, h_buffers = (3, 2) if want_h else (4, 0)
    shallow = size is (Size.DEEP if cut.swapped else Size.SHALLOW)
    if size is Size.SMALL:
        shape = Tile(rows=64, columns=128, stages=6, cluster=1, group=8)
    else:
        shape = Tile(rows=128, columns=192, stages=4, cluster=2, group=cut.backward_groups[0 if shallow else 1])
    # On an H200, over cuBLAS's GEMM alone: with H 1024, 1.12 so and 1.25 to 1.27 with a lag of 1, which frees slots
    # later; with H 2048, 1.00 with the lag and 1.04 without; from H 4096 on all are within 3 %.
    lag = 0 if shallow else 1
    return Backward(_name(dtype), activation, want_h, shape, slots, h_buffers, lag, keep_operands=shallow)


def configurations(
    dtype: torch.dtype, activation: str, size: Size, *, biased: bool = False, choice: str = ""
) -> tuple[Forward | Backward, ...]:
    """Every kernel that a call of this kind, or its gradients, may need."""
    flags = (False, True)
    forward = (forward_configuration(dtype, activation, flag, size, biased=biased, choice=choice) for flag in flags)
    return *forward, *(backward_configuration(dtype, activation, flag, size, choice=choice) for flag in flags)


# ------------------------------------------------------------------------------------------- products and their rule


class Kind(Enum):
    """The products that follow the backward kernel."""

    DX = "dx"
    D_WEIGHTS = "d_weights"
    """Of gate and up, in one launch."""
    D_DOWN = "d_down"


_TIMED_CLUSTERS = 66
"""Of an H200, with 132 multiprocessors; no other GPU was timed."""
_TIMED_HIDDEN, _TIMED_INNER = 1024, 3072
"""The smallest that were timed."""
COLUMNS = {Kind.DX: (192, 160), Kind.D_WEIGHTS: (192,), Kind.D_DOWN: (192,)}
"""What a tile may have. Where columns of B are contiguous, as they are in the other two, only multiples of 64."""


def product(kind: Kind, dtype: torch.dtype, columns: int) -> Product:
    """The kernel for products of this kind, with tiles of so many columns."""
    return Product(
        dtype=_name(dtype),
        b_by_k=kind is Kind.DX,
        transposed=kind is not Kind.D_DOWN,
        sources=2 if kind is Kind.DX else 1,
        outputs=_outputs(kind),
        tile=Tile(rows=128, columns=columns, stages=5, cluster=2, group=4),
    )


def columns_for(kind: Kind, tokens: int, hidden: int, inner: int, clusters: int, *, choice: str = "") -> int | None:
    """The columns of a tile in a call's product, on a GPU that holds so many clusters; None where cuBLAS multiplies."""
    cut = CUTS[choice]
    was_timed = clusters == _TIMED_CLUSTERS and hidden >= _TIMED_HIDDEN and inner >= _TIMED_INNER
    if tokens < cut.fewest_tokens or clusters < 1 or not (was_timed or cut.anywhere):
        return None
    across = tokens if kind is Kind.DX else inner
    fullness = {each: _fullness(hidden, across, _outputs(kind), clusters, each) for each in COLUMNS[kind]}
    best = max(fullness, key=fullness.__getitem__)
    return best if fullness[best] >= cut.fullness else None


def products_for(
    dtype: torch.dtype, tokens: int, hidden: int, inner: int, clusters: int, *, choice: str = ""
) -> tuple[Product, ...]:
    """Every product kernel that a call may need."""
    found = {kind: columns_for(kind, tokens, hidden, inner, clusters, choice=choice) for kind in Kind}
    return tuple(product(kind, dtype, columns) for kind, columns in found.items() if columns is not None)


def every_product(dtype: torch.dtype) -> tuple[Product, ...]:
    """Every product kernel that any call may need."""
    return tuple(product(kind, dtype, columns) for kind in Kind for columns in COLUMNS[kind])


def _outputs(kind: Kind) -> int:
    return 2 if kind is Kind.D_WEIGHTS else 1


def _fullness(rows: int, across: int, outputs: int, clusters: int, columns: int) -> float:
    """Elements of the result over those that all rounds of tiles, of 256 rows per cluster, have room for."""
    tiles = -(-rows // 256) * -(-across // columns) * outputs
    return rows * across * outputs / (-(-tiles // clusters) * clusters * 256 * columns)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
