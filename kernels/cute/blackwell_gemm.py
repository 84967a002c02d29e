"""What warp-specialised persistent GEMMs on Blackwell (SM100, SM103) have in common, in the CuTe DSL.

A CTA has six warps. Warp 5 fills a ring of shared-memory stages with TMA, one stage per 64 columns of K. Warp 4 has the
tensor cores multiply them into tensor memory, which holds the accumulators of two tiles. Warps 0 to 3 run the epilogue
of one tile while the next one is multiplied: warp w can read lanes 32 w to 32 w + 31, which are rows of the tile.
CTAs are persistent: with G of them, CTA z works on tiles z, z + G, z + 2 G, ...

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
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.memory import TmemAllocator

EPILOGUE_WARPS = 4
MULTIPLY_WARP = 4
LOAD_WARP = 5
THREADS = 192
EPILOGUE_THREADS = 32 * EPILOGUE_WARPS

# Named barriers; 0 is the whole block's.
STORED = 1
ALLOCATED = 2


def tiled_mma(dtype: Any, rows: int, columns: int) -> cute.TiledMma:
    """`A B^T` by one CTA's tensor cores: K-major operands in shared memory, fp32 accumulators."""
    major = OperandMajorMode.K
    source, ctas = tcgen05.OperandSource.SMEM, tcgen05.CtaGroup.ONE
    return cute.make_tiled_mma(tcgen05.MmaF16BF16Op(dtype, Float32, (rows, columns, 16), ctas, source, major, major))


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


def accumulator_ring(barriers: cute.Pointer, stages: int) -> Any:
    """Accumulators that the tensor cores fill, each free again once one thread of each epilogue warp has said so."""
    return pipeline.PipelineUmmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS),
        defer_sync=True,
    )


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
def multiply(
    loads: pipeline.PipelineTmaUmma,
    filled: pipeline.PipelineState,
    k_tiles: Int32,
    mma: cute.TiledMma,
    a_stages: cute.Tensor,
    b_stages: cute.Tensor,
    accumulators: cute.Tensor,
) -> pipeline.PipelineState:
    """`accumulators = A B^T` over one tile's `k_tiles` stages; returns where the next tile's begin.

    Each stage is released behind its last instruction. The first instruction of a tile overwrites, all others add.
    """
    blocks = const_expr(cute.size(a_stages, mode=[2]))
    for k in cutlass.range(k_tiles, unroll=1):
        loads.consumer_wait(filled)
        after_sync()
        for block in cutlass.range_constexpr(blocks):
            # A fresh atom: the flag of one that is carried through a loop does not dominate its uses.
            atom = cute.make_mma_atom(mma.op)
            atom.set(tcgen05.Field.ACCUMULATE, k > 0 if const_expr(block == 0) else True)
            at = (None, None, block, filled.index)
            cute.gemm(atom, accumulators, a_stages[at], b_stages[at], accumulators)
        loads.consumer_release(filled)
        filled.advance()
    return filled
