"""What warp-specialised persistent GEMMs on Hopper (SM90) have in common, in the CuTe DSL.

A CTA has three warp groups of 128 threads. Group 0 moves data: its warp 0 fills a ring of shared-memory stages with
TMA, one stage per 64 columns of K. Groups 1 and 2 compute, in turns ("ping-pong"): each owns a whole tile of the
output, and runs its epilogue while the other one has the tensor cores. CTAs are persistent: with G of them, CTA (or
cluster) z works on tiles z, z + G, z + 2 G, ..., the first of these in group 1, the second in group 2, and so on.

A cluster is two CTAs that lie on top of each other in M, and so read the same columns of B: each fetches half of
them, and TMA's multicast writes both halves into both.

Which stage a tile starts at, and with which phase, follows from how many stages were used before it. So neither group
steps through the other's tiles, and no counter is shared.

Tensors: [rows, K] and [columns, K], as the tensor cores see A and B; C is [rows, columns].
"""

# No `from __future__ import annotations`: the DSL reads the annotations of a struct as types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call, no-any-return, misc"

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

THREADS = 384
GROUP_THREADS = 128

# Named barriers; 0 is the whole block's. Each of these has one for group 1 and the next for group 2.
STORED = 1
MAIN_LOOP = 4
EPILOGUE = 6


# ----------------------------------------------------------------------------------------------------- scheduling


def state_after(used: Int32, stages: int) -> pipeline.PipelineState:
    """Where a consumer stands that has seen `used` stages go by."""
    rounds = used // stages
    return pipeline.PipelineState(stages, Int32(0), used - rounds * stages, rounds & 1)


def wait_for_turn(which: int, group: Int32) -> None:
    """Of two warp groups (0 and 1), until the other one has passed the turn on."""
    cute.arch.barrier(barrier_id=which + group, number_of_threads=2 * GROUP_THREADS)


def pass_turn(which: int, group: Int32) -> None:
    """Lets the other warp group take its turn."""
    cute.arch.barrier_arrive(barrier_id=which + 1 - group, number_of_threads=2 * GROUP_THREADS)


@cute.jit
def hand_to_tma(group: Int32, is_storing: cutlass.Boolean, buffers: cutlass.Constexpr) -> None:
    """What this warp group wrote to a buffer is there for TMA, and the buffer that comes next is free.

    Of `buffers` that the group stores from in turn, with one barrier; the storing warp then stores this one.
    """
    cute.arch.fence_proxy("async.shared", space="cta")
    if is_storing:
        cute.arch.cp_async_bulk_wait_group(buffers - 2, read=True)
    cute.arch.barrier(barrier_id=STORED + group, number_of_threads=GROUP_THREADS)


# ---------------------------------------------------------------------------------------------------- tensor cores


@cute.jit
def multiply(
    loads: pipeline.PipelineTmaAsync,
    used: Int32,
    k_tiles: Int32,
    tiled_mma: cute.TiledMma,
    a_stages: cute.Tensor,
    b_stages: cute.Tensor,
    accumulators: cute.Tensor,
    group: Int32,
    stages: cutlass.Constexpr,
) -> None:
    """`accumulators = A B^T` over one tile's `k_tiles` stages, in this warp group's turn.

    The turn is passed on once the last instruction is issued, before its result is there. One stage stays in flight:
    stage k - 1 is released after the instructions of stage k are issued.
    """
    blocks = const_expr(cute.size(a_stages, mode=[2]))
    filled = state_after(used, stages)
    drained = filled.clone()
    wait_for_turn(MAIN_LOOP, group)
    loads.consumer_wait(filled)
    warpgroup.fence()
    # Fresh atoms: the flag of one that is carried through a loop does not dominate its uses.
    first = cute.make_mma_atom(tiled_mma.op)
    first.set(warpgroup.Field.ACCUMULATE, False)
    for block in cutlass.range_constexpr(blocks):
        at = (None, None, block, filled.index)
        cute.gemm(first, accumulators, a_stages[at], b_stages[at], accumulators)
        first.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    filled.advance()
    for _ in cutlass.range(1, k_tiles, unroll=1):
        loads.consumer_wait(filled)
        warpgroup.fence()
        rest = cute.make_mma_atom(tiled_mma.op)
        rest.set(warpgroup.Field.ACCUMULATE, True)
        for block in cutlass.range_constexpr(blocks):
            at = (None, None, block, filled.index)
            cute.gemm(rest, accumulators, a_stages[at], b_stages[at], accumulators)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        loads.consumer_release(drained)
        drained.advance()
        filled.advance()
    pass_turn(MAIN_LOOP, group)
    warpgroup.wait_group(0)
    loads.consumer_release(drained)
