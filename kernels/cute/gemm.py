"""What persistent GEMMs whose operands TMA moves have in common, on every GPU: in the CuTe DSL.

Where a tile lies, TMA's loads and stores, and the fake tensors that kernels are compiled against.

Tensors: [rows, K] and [columns, K], as the tensor cores see A and B; C is [rows, columns].
"""

# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float16, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

TYPES = {"bfloat16": BFloat16, "float16": Float16}

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
"""TMA's cache hints for L2, as the hardware encodes them."""


# ----------------------------------------------------------------------------------------------------- scheduling


@cute.jit
def place_of(tile: Int32, m_tiles: Int32, n_tiles: Int32, group: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Where the tile with this number lies: `group` tiles along M (the last may be fewer), then the next along N."""
    per_group = n_tiles * group
    before = tile // per_group
    inside = tile - before * per_group
    first = before * group
    height = cutlass.min(m_tiles - first, Int32(group))
    n = inside // height
    return first + (inside - n * height), n


# ------------------------------------------------------------------------------------------------ moving data by TMA


def load_atom(tensor: cute.Tensor, buffers: cute.ComposedLayout, box: tuple[int, int], copies: int = 1) -> Any:
    """A TMA load of boxes of `tensor` into one of `buffers`, written to `copies` CTAs of the cluster at once."""
    operation = cpasync.CopyBulkTensorTileG2SOp() if copies == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    one = cute.slice_(buffers, (None, None, 0))
    return cpasync.make_tiled_tma_atom(operation, tensor, one, box, num_multicast=copies)


def store_atom(tensor: cute.Tensor, buffers: cute.ComposedLayout, box: tuple[int, int]) -> Any:
    """A TMA store of boxes from one of `buffers`; what of a box lies outside of `tensor` is not written."""
    one = cute.slice_(buffers, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, one, box)


def hint(policy: int, asked: bool = True) -> dict[str, Any]:
    """What a TMA copy takes as a hint to L2; nothing where none is asked for."""
    return {"cache_policy": cutlass.Int64(policy)} if asked else {}


def boxes(atom: cute.CopyAtom, tensor: cute.Tensor, buffers: cute.Tensor, box: tuple[int, int]) -> Any:
    """(buffers, boxes of `tensor`) as a TMA copy by one CTA takes them."""
    divided = cute.zipped_divide(tensor, box)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), divided)


def shares(
    atom: cute.CopyAtom, tensor: cute.Tensor, buffers: cute.Tensor, box: tuple[int, int], rank: Int32, cluster: int
) -> Any:
    """(buffers, tiles of `tensor` [box, tile, k]): the share of each box that this CTA of the cluster fetches."""
    tiles = cute.group_modes(cute.local_tile(tensor, box, (None, None)), 0, 2)
    return cpasync.tma_partition(atom, rank, cute.make_layout(cluster), cute.group_modes(buffers, 0, 2), tiles)


def swizzled(width: int) -> Any:
    """The widest swizzle of K-major rows of `width` 16-bit elements."""
    kinds = warpgroup.SmemLayoutAtomKind
    return kinds.K_SW128 if width % 64 == 0 else kinds.K_SW64


def ring(barriers: cute.Pointer, stages: int, transaction_bytes: int, arrivals: int, cluster: int) -> Any:
    """A ring of stages that TMA fills, each free again after `arrivals` releases per CTA of the cluster."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals * cluster),
        tx_count=transaction_bytes,
        cta_layout_vmnk=cute.make_layout((1, cluster, 1, 1)),
        defer_sync=True,
    )


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """[columns, rows], without moving anything."""
    rows, columns = tensor.shape
    return cute.make_tensor(tensor.iterator, cute.make_layout((columns, rows), stride=(1, tensor.stride[0])))


def halves(packed: cute.Tensor, rows: Any, columns: Any) -> tuple[cute.Tensor, cute.Tensor]:
    """Of [rows, 2 * columns]. Tensors of their own: a tile that ends in the first one's last columns stays in it."""
    layout = cute.make_layout((rows, columns), stride=packed.stride)
    return cute.make_tensor(packed.iterator, layout), cute.make_tensor(packed.iterator + columns, layout)


# ------------------------------------------------------------------------------------------------------ fake tensors


def fake(dtype: Any, rows: Any, columns: Any) -> Any:
    """Rows of unit inner stride, any stride between them that TMA takes: a multiple of 16 bytes, in 64 bits."""
    stride = (cute.sym_int64(divisibility=8), 1)
    return cute.runtime.make_fake_tensor(dtype, (rows, columns), stride=stride, assumed_align=16)


def fake_vector(dtype: Any, size: Any) -> Any:
    """Elements side by side, aligned as elements are."""
    return cute.runtime.make_fake_tensor(dtype, (size,), stride=(1,), assumed_align=dtype.width // 8)


def fake_stream() -> Any:
    """PyTorch's current stream on the tensors' device, found at each launch."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
