"""What warp-specialised persistent GEMMs on Blackwell (SM100, SM103) have in common, in the CuTe DSL.

Warp 5 fills a ring of shared-memory stages with TMA, one stage per 64 columns of K. Warp 4 has the tensor cores
multiply them into tensor memory, which holds the accumulators of two tiles. Warps 0 to 3 run the epilogue of one tile
while the next one is multiplied: warp w can read lanes 32 w to 32 w + 31, which are rows of the tile. CTAs are
persistent: with G of them, CTA z works on tiles z, z + G, z + 2 G, ...

Who waits for whom: a stage is full once TMA's bytes are there, and free once the tensor cores have read it, which a
commit signals; accumulators are full once a commit says that all of a tile's instructions are done, and free once
each of the four warps has read its lanes.

Tensors: [rows, K] and [columns, K], as the tensor cores see A and B; C is [rows, columns].
"""

# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell_helpers
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.memory import TmemAllocator

from .tile import ACCUMULATORS, WIDTH_K, Tile

EPILOGUE_WARPS = 4
MULTIPLY_WARP = 4
LOAD_WARP = 5
EPILOGUE_THREADS = 32 * EPILOGUE_WARPS
PIECE = 32
"""Columns that a thread of the epilogue works on at a time."""

# Named barriers; 0 is the whole block's.
STORED = 1
ALLOCATED = 2
FINISHED = 3


def tiled_mma(dtype: Any, rows: int, columns: int, b_major: OperandMajorMode = OperandMajorMode.K) -> cute.TiledMma:
    """`A B^T` by one CTA's tensor cores: operands in shared memory, A K-major, fp32 accumulators."""
    source, ctas = tcgen05.OperandSource.SMEM, tcgen05.CtaGroup.ONE
    operation = tcgen05.MmaF16BF16Op(dtype, Float32, (rows, columns, 16), ctas, source, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(operation)


def operand_layouts(mma: cute.TiledMma, dtype: Any, tile: Tile) -> tuple[Any, Any]:
    """Of the stages of A and of B, as the tensor cores see them; TMA sees the same bytes as rows of 128."""
    shape = (tile.rows, tile.columns, WIDTH_K)
    return (
        blackwell_helpers.make_smem_layout_a(mma, shape, dtype, tile.stages),
        blackwell_helpers.make_smem_layout_b(mma, shape, dtype, tile.stages),
    )


def accumulators_layout(mma: cute.TiledMma, tile: Tile) -> cute.Layout:
    """[lane and column, 1, 1, which of the two]."""
    shape = mma.partition_shape_C((tile.rows, tile.columns))
    return mma.make_fragment_C(cute.append(shape, ACCUMULATORS)).layout


def ring(barriers: cute.Pointer, stages: int, transaction_bytes: int) -> Any:
    """A ring of stages that TMA fills, each free again once the tensor cores have read it."""
    return pipeline.PipelineTmaUmma.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        tx_count=transaction_bytes,
        defer_sync=True,
    )


def accumulator_ring(barriers: cute.Pointer) -> Any:
    """Accumulators that the tensor cores fill, each free again once one thread of each epilogue warp has said so."""
    return pipeline.PipelineUmmaAsync.create(
        barrier_storage=barriers,
        num_stages=ACCUMULATORS,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS),
        defer_sync=True,
    )


def finish_reading() -> None:
    """Between the epilogue's warps: each has read all that it will of tensor memory, which may be freed then."""
    before_sync()
    cute.arch.barrier(barrier_id=FINISHED, number_of_threads=EPILOGUE_THREADS)
    after_sync()


def tensor_memory(address: cute.Pointer) -> TmemAllocator:
    """Warp 0 asks for it; the warps that read and fill it wait for that."""
    barrier = pipeline.NamedBarrier(barrier_id=ALLOCATED, num_threads=EPILOGUE_THREADS + 32)
    return TmemAllocator(address, barrier_for_retrieve=barrier, allocator_warp_id=0)


def before_sync() -> None:
    """Orders what this thread asked of tensor memory before the synchronisation that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def after_sync() -> None:
    """Orders what this thread asks of tensor memory next after the synchronisation that went before."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


@cute.jit
def multiply_tiles(
    loads: pipeline.PipelineTmaUmma,
    accumulating: pipeline.PipelineUmmaAsync,
    mma: cute.TiledMma,
    a_stages: cute.Tensor,
    b_stages: cute.Tensor,
    accumulators: cute.Tensor,
    first: Int32,
    step: Int32,
    tiles: Int32,
    k_tiles: Int32,
    stages: cutlass.Constexpr,
) -> None:
    """`A B^T` of every tile of this CTA, each over `k_tiles` stages, into whichever accumulators are free.

    A stage is released behind its last instruction. The first instruction of a tile overwrites, all others add.
    """
    blocks = const_expr(cute.size(a_stages, mode=[2]))
    filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
    free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACCUMULATORS)
    number = first
    while number < tiles:
        accumulating.producer_acquire(free)
        after_sync()
        into = accumulators[(None, None, None, free.index)]
        for k in cutlass.range(k_tiles, unroll=1):
            loads.consumer_wait(filled)
            after_sync()
            for block in cutlass.range_constexpr(blocks):
                # A fresh atom: the flag of one that is carried through a loop does not dominate its uses.
                atom = cute.make_mma_atom(mma.op)
                atom.set(tcgen05.Field.ACCUMULATE, k > 0 if const_expr(block == 0) else True)
                at = (None, None, block, filled.index)
                cute.gemm(atom, into, a_stages[at], b_stages[at], into)
            loads.consumer_release(filled)
            filled.advance()
        accumulating.producer_commit(free)
        free.advance()
        number += step
    accumulating.producer_tail(free)


def release(accumulating: pipeline.PipelineUmmaAsync, state: pipeline.PipelineState) -> None:
    """Of accumulators that this warp has read all of its lanes of."""
    before_sync()
    with cute.arch.elect_one():
        accumulating.consumer_release(state)


def reading(accumulators: cute.Tensor, rows: int) -> tuple[Any, cute.Tensor, Any]:
    """(the copy to registers, this thread's share of the accumulators [..., 0, piece, stage], its shape in registers).

    That is a lane, which is a row, and `PIECE` columns.
    """
    thread, _, _ = cute.arch.thread_idx()
    pieces = cute.flat_divide(accumulators[((None, None), 0, 0, None)], (rows, PIECE))
    operation = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(PIECE)), Float32)
    copy = tcgen05.make_tmem_copy(operation, pieces[(None, None, 0, 0, 0)])
    own = copy.get_slice(thread)
    return copy, own.partition_S(pieces), cute.shape(own.partition_D(cute.make_identity_tensor((rows, PIECE))))


def rows_of(copy: Any, buffers: cute.Tensor) -> tuple[Any, cute.Tensor]:
    """(a copy, this thread's share [values, 1, piece, buffer]) of buffers in shared memory, as `reading` deals it."""
    thread, _, _ = cute.arch.thread_idx()
    operation = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), buffers.element_type, num_bits_per_copy=128)
    shared = cute.make_tiled_copy_D(operation, copy)
    return shared, shared.get_slice(thread).partition_D(buffers)
