"""The products that follow the backward kernel, as one kernel for Hopper (SM90), in the CuTe DSL.

`C = sum_s A_s B_s^T`, or two such products over one A:

    dx^T = Wg^T d_gate^T + Wu^T d_up^T, in one accumulator
    dWg^T = x^T d_gate and dWu^T = x^T d_up, in one launch
    dWd = dout^T h

Rows of C are H, in most models a multiple of the 256 that a cluster works on; columns, of which a tile has fewer, are
tokens or I. So two of the results are stored transposed: registers go to shared memory by a transposing `stmatrix`.
The GEMM is that of hopper_gemm.py; results leave as in hopper_forward.py.

Tensors: A is [K, R], its rows contiguous; B is [C, K] or [K, C]; the result is [R, C], or [C, R] where transposed.
"""

# No `from __future__ import annotations`: the DSL reads the annotations of a struct as types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper_helpers
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait

from ..cute import gemm, hopper_gemm
from ..cute.activations import round_to
from ..cute.tile import WIDTH_K
from .hopper_configuration import FORWARD_BUFFERS, PRODUCT_CHUNK, Product


def build(configuration: Product, options: str) -> Any:
    """Compiles; the result takes (a, a2 or None, b, b2 or None, c, c2 or None, clusters).

    a2 is there with two sources, c2 with two outputs, b2 with either.
    """
    dtype = gemm.TYPES[configuration.dtype]
    rows, columns = cute.sym_int(divisibility=8), cute.sym_int(divisibility=1 if configuration.b_by_k else 8)
    k = cute.sym_int(divisibility=8 if configuration.b_by_k else 1)

    def fake(by_first: bool, first: Any, second: Any, count: int) -> list[Any]:
        sizes = (first, second) if by_first else (second, first)
        return [gemm.fake(dtype, *sizes) if number < count else None for number in range(2)]

    return cute.compile(
        _Kernel(configuration),
        *fake(False, rows, k, configuration.sources),
        *fake(configuration.b_by_k, columns, k, max(configuration.sources, configuration.outputs)),
        *fake(not configuration.transposed, rows, columns, configuration.outputs),
        Int32(1),
        gemm.fake_stream(),
        options=options,
    )


class _Kernel:
    def __init__(self, configuration: Product) -> None:
        self.configuration = configuration
        self.dtype = gemm.TYPES[configuration.dtype]

    def layouts(self) -> tuple[Any, Any, Any]:
        """Of the stages of A, of those of B, and of the epilogue's buffers."""
        tile, configuration = self.configuration.tile, self.configuration
        kinds = warpgroup.SmemLayoutAtomKind

        def stages(by_k: bool, rows: int) -> Any:
            atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if by_k else kinds.MN_SW128, self.dtype)
            return cute.tile_to_shape(atom, (rows, WIDTH_K, tile.stages), order=(0, 1, 2) if by_k else (1, 0, 2))

        kind = kinds.MN_SW128 if configuration.transposed else gemm.swizzled(PRODUCT_CHUNK)
        result = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return (
            stages(False, tile.rows),
            stages(configuration.b_by_k, tile.columns),
            cute.tile_to_shape(result, (64, PRODUCT_CHUNK, 2 * FORWARD_BUFFERS), order=(0, 1, 2)),
        )

    def storage(self) -> Any:
        """What lies in shared memory."""
        stages, dtype = self.configuration.tile.stages, self.dtype
        a_size, b_size, result_size = (cute.cosize(layout) for layout in self.layouts())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            a: cute.struct.Align[cute.struct.MemRange[dtype, a_size], 1024]
            b: cute.struct.Align[cute.struct.MemRange[dtype, b_size], 1024]
            results: cute.struct.Align[cute.struct.MemRange[dtype, result_size], 1024]

        return Storage

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a2: Any,
        b: cute.Tensor,
        b2: Any,
        c: cute.Tensor,
        c2: Any,
        clusters: Int32,
        stream: CUstream,
    ) -> None:
        tile, configuration = self.configuration.tile, self.configuration
        a_layout, b_layout, result_layout = self.layouts()
        a_s, b_s, c_s = ([t for t in pair if t is not None] for pair in ((a, a2), (b, b2), (c, c2)))
        a_s = [gemm.transposed(t) for t in a_s]
        if const_expr(not configuration.b_by_k):
            b_s = [gemm.transposed(t) for t in b_s]
        if const_expr(configuration.transposed):
            c_s = [gemm.transposed(t) for t in c_s]
        a_loads = [gemm.load_atom(each, a_layout, (tile.rows, WIDTH_K)) for each in a_s]
        b_loads = [gemm.load_atom(each, b_layout, (tile.columns, WIDTH_K), tile.cluster) for each in b_s]
        stores = [gemm.store_atom(each, result_layout, (64, PRODUCT_CHUNK)) for each in c_s]
        m_tiles = cute.ceil_div(cute.size(c_s[0], mode=[0]), tile.rows * tile.cluster)
        n_tiles = cute.ceil_div(cute.size(c_s[0], mode=[1]), tile.columns)
        k_tiles = cute.ceil_div(cute.size(a_s[0], mode=[1]), WIDTH_K)
        tiles = Int32(m_tiles) * Int32(n_tiles) * configuration.outputs
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        b_major = k_major if configuration.b_by_k else mn_major
        self.kernel(
            tuple(atom for atom, _ in a_loads),
            tuple(tensor for _, tensor in a_loads),
            tuple(atom for atom, _ in b_loads),
            tuple(tensor for _, tensor in b_loads),
            tuple(atom for atom, _ in stores),
            tuple(tensor for _, tensor in stores),
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, mn_major, b_major, Float32, (1, 1, 1), (64, tile.columns)
            ),
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), (64, PRODUCT_CHUNK)
            ),
            Int32(m_tiles),
            Int32(n_tiles),
            Int32(k_tiles),
        ).launch(
            grid=[tile.cluster, 1, cutlass.min(tiles, clusters)],
            block=[hopper_gemm.THREADS, 1, 1],
            cluster=[tile.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a_atoms: Any,
        a_tensors: Any,
        b_atoms: Any,
        b_tensors: Any,
        store_atoms: Any,
        store_tensors: Any,
        tiled_mma: cute.TiledMma,
        chunk_mma: cute.TiledMma,
        m_tiles: Int32,
        n_tiles: Int32,
        k_tiles: Int32,
    ) -> None:
        tile = self.configuration.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warp_group = cute.arch.make_warp_uniform(thread // hopper_gemm.GROUP_THREADS)
        if warp == 0:
            for atom in a_atoms + b_atoms + store_atoms:
                cpasync.prefetch_descriptor(atom)
        shared = SmemAllocator().allocate(self.storage())
        loads = gemm.ring(shared.barriers.data_ptr(), tile.stages, tile.stage_bytes, 4, tile.cluster)
        pipeline_init_arrive(cluster_shape_mn=(tile.cluster, 1), is_relaxed=True)
        a_layout, b_layout, result_layout = self.layouts()
        a_stages = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b_stages = shared.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        result_buffers = shared.results.get_tensor(result_layout.outer, swizzle=result_layout.inner)
        rank, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        pipeline_init_wait(cluster_shape_mn=(tile.cluster, 1))

        if warp_group == 0:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.load(
                    loads, a_atoms, a_tensors, b_atoms, b_tensors, a_stages, b_stages, rank, first, step, m_tiles,
                    n_tiles, k_tiles,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(240)
            self.compute(
                loads, store_atoms, store_tensors, tiled_mma, chunk_mma, a_stages, b_stages, result_buffers,
                warp_group - 1, thread % hopper_gemm.GROUP_THREADS, rank, first, step, m_tiles, n_tiles,
                k_tiles * self.configuration.sources,
            )  # fmt: skip

    @cute.jit
    def load(
        self, loads: Any, a_atoms: Any, a_tensors: Any, b_atoms: Any, b_tensors: Any, a_stages: cute.Tensor,
        b_stages: cute.Tensor, rank: Int32, first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32, k_tiles: Int32,
    ) -> None:  # fmt: skip
        """Warp 0: every tile's stages, in order."""
        tile, width, outputs = self.configuration.tile, WIDTH_K, self.configuration.outputs
        a_s = [
            gemm.shares(atom, tensor, a_stages, (tile.rows, width), Int32(0), 1)
            for atom, tensor in zip(a_atoms, a_tensors, strict=True)
        ]
        b_s = [
            gemm.shares(atom, tensor, b_stages, (tile.columns, width), rank, tile.cluster)
            for atom, tensor in zip(b_atoms, b_tensors, strict=True)
        ]
        everyone = cutlass.Int16((1 << tile.cluster) - 1)
        filling = make_pipeline_state(PipelineUserType.Producer, tile.stages)
        number = first
        per_output = m_tiles * n_tiles
        while number < per_output * outputs:
            is_second = number >= per_output
            m, n = gemm.place_of(number - per_output if is_second else number, m_tiles, n_tiles, tile.group)
            for source in cutlass.range_constexpr(self.configuration.sources):
                a_to, a_from = a_s[source]
                a_tile = a_from[(None, m * tile.cluster + rank, None)]
                for k in cutlass.range(k_tiles, unroll=1):
                    loads.producer_acquire(filling)
                    full = loads.producer_get_barrier(filling)
                    stage = filling.index
                    cute.copy(a_atoms[source], a_tile[(None, k)], a_to[(None, stage)], tma_bar_ptr=full)
                    shared = {"tma_bar_ptr": full, "mcast_mask": everyone}
                    b_to, b_from = b_s[source]
                    if const_expr(outputs == 1):
                        cute.copy(b_atoms[source], b_from[(None, n, k)], b_to[(None, stage)], **shared)
                    else:
                        other_to, other_from = b_s[1]
                        if is_second:
                            cute.copy(b_atoms[1], other_from[(None, n, k)], other_to[(None, stage)], **shared)
                        else:
                            cute.copy(b_atoms[0], b_from[(None, n, k)], b_to[(None, stage)], **shared)
                    filling.advance()
            number += step
        loads.producer_tail(filling)  # a CTA must not end while the other one still signals its barriers

    @cute.jit
    def compute(
        self, loads: Any, store_atoms: Any, store_tensors: Any, tiled_mma: cute.TiledMma, chunk_mma: cute.TiledMma,
        a_stages: cute.Tensor, b_stages: cute.Tensor, result_buffers: cute.Tensor, group: Int32, thread: Int32,
        rank: Int32, first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32, k_tiles: Int32,
    ) -> None:  # fmt: skip
        """A consumer warp group: every second tile of this CTA."""
        tile, chunk, outputs = self.configuration.tile, PRODUCT_CHUNK, self.configuration.outputs
        chunks = const_expr(tile.columns // chunk)
        slice_ = tiled_mma.get_slice(0)
        a_fragments = tiled_mma.make_fragment_A(slice_.partition_A(a_stages))
        b_fragments = tiled_mma.make_fragment_B(slice_.partition_B(b_stages))
        accumulators = cute.make_rmem_tensor(slice_.partition_shape_C((tile.rows, tile.columns)), Float32)
        store_op = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(self.configuration.transposed, 4), self.dtype)
        to_shared = cute.make_tiled_copy_S(store_op, cute.make_tiled_copy_C_atom(store_op, chunk_mma))
        buffers = to_shared.get_slice(thread).partition_D(result_buffers)
        targets = [
            gemm.boxes(atom, tensor, result_buffers, (64, chunk))
            for atom, tensor in zip(store_atoms, store_tensors, strict=True)
        ]
        is_storing = cute.arch.make_warp_uniform(thread // 32) == 0
        if group == 1:
            hopper_gemm.pass_turn(hopper_gemm.MAIN_LOOP, group)  # the first turn is group 0's
        number = first + step * group
        used = k_tiles * group
        per_output = m_tiles * n_tiles
        while number < per_output * outputs:
            is_second = number >= per_output
            m, n = gemm.place_of(number - per_output if is_second else number, m_tiles, n_tiles, tile.group)
            hopper_gemm.multiply(
                loads, used, k_tiles, tiled_mma, a_fragments, b_fragments, accumulators, group, tile.stages
            )
            used += 2 * k_tiles
            row = (m * tile.cluster + rank) * (tile.rows // 64)
            for part in cutlass.range_constexpr(self.configuration.parts):
                block, column = part // chunks, part % chunks
                fragment = cute.make_rmem_tensor(cute.shape(buffers)[:3], self.dtype)
                at = block * (tile.columns // 2) + column * (chunk // 2)
                round_to(fragment, [accumulators[at + value] for value in range(chunk // 2)])
                slot = group * FORWARD_BUFFERS + part % FORWARD_BUFFERS
                cute.copy(to_shared, fragment, buffers[(None, None, None, slot)])
                hopper_gemm.hand_to_tma(group, is_storing, FORWARD_BUFFERS)
                if is_storing:
                    self.store(store_atoms, targets, is_second, slot, row + block, n * chunks + column)
            number += 2 * step
        if is_storing:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the reads

    @cute.jit
    def store(self, atoms: Any, targets: Any, is_second: Any, slot: Int32, row: Int32, column: Int32) -> None:
        """A buffer to memory."""
        source, target = targets[0]
        if const_expr(self.configuration.outputs == 1):
            cute.copy(atoms[0], source[(None, slot)], target[(None, (row, column))])
        else:
            other_source, other_target = targets[1]
            if is_second:
                cute.copy(atoms[1], other_source[(None, slot)], other_target[(None, (row, column))])
            else:
                cute.copy(atoms[0], source[(None, slot)], target[(None, (row, column))])
        cute.arch.cp_async_bulk_commit_group()
