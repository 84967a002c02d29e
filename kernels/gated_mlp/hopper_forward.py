"""`h = act(x Wg^T + bg) * (x Wu^T + bu)` as one kernel for Hopper (SM90), in the CuTe DSL.

Each stage of the ring holds rows of x and, as one operand B of the tensor cores, the same rows of both weights: gate
in its first half, up in its second. The weights stay two tensors, each with a TMA map of its own; two halves of one
packed tensor do as well. A thread's accumulators hold gate and up of the same elements, so the product needs no
exchange. gate and up, with their biases, are rounded to the I/O dtype before the activation, as reference.py does.

The epilogue goes through 64 rows x 32 or 64 columns at a time: registers, two buffers per warp group in shared memory,
TMA stores. TMA clips what lies outside of a tensor, so that no tail needs a predicate.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
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
from ..cute.activations import MINUS_LOG2E, activate, round_to
from ..cute.tile import WIDTH_K
from .hopper_configuration import FORWARD_BUFFERS, Forward


def build(configuration: Forward, options: str) -> Any:
    """Compiles; the result takes (x, w_gate, w_up, b_gate or None, b_up or None, h, gate_up or None, clusters)."""
    dtype = gemm.TYPES[configuration.dtype]
    tokens, hidden, inner = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    inner_2 = cute.sym_int(divisibility=16)
    return cute.compile(
        _Kernel(configuration),
        gemm.fake(dtype, tokens, hidden),
        gemm.fake(dtype, inner, hidden),
        gemm.fake(dtype, inner, hidden),
        *(gemm.fake_vector(dtype, inner) if configuration.biased else None for _ in range(2)),
        gemm.fake(dtype, tokens, inner),
        gemm.fake(dtype, tokens, inner_2) if configuration.keep_gate_up else None,
        Int32(1),
        gemm.fake_stream(),
        options=options,
    )


class _Kernel:
    def __init__(self, configuration: Forward) -> None:
        self.configuration = configuration
        self.dtype = gemm.TYPES[configuration.dtype]

    def layouts(self) -> tuple[Any, Any, Any, Any]:
        """Of the stages of x, of both weights, of each weight alone (the same bytes), and of the epilogue's buffers."""
        tile, half, chunk = self.configuration.tile, self.configuration.half, self.configuration.chunk
        operand = warpgroup.make_smem_layout_atom(gemm.swizzled(WIDTH_K), self.dtype)
        result = warpgroup.make_smem_layout_atom(gemm.swizzled(chunk), self.dtype)
        width, order = WIDTH_K, (0, 1, 2)
        return (
            cute.tile_to_shape(operand, (tile.rows, width, tile.stages), order=order),
            cute.tile_to_shape(operand, (tile.columns, width, tile.stages), order=order),
            cute.tile_to_shape(operand, (half, width, 2 * tile.stages), order=order),
            cute.tile_to_shape(result, (64, chunk, 2 * FORWARD_BUFFERS), order=order),
        )

    def storage(self) -> Any:
        """What lies in shared memory."""
        stages, dtype = self.configuration.tile.stages, self.dtype
        x_size, w_size, _, result_size = (cute.cosize(layout) for layout in self.layouts())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            constants: cute.struct.MemRange[Float32, 2]
            x: cute.struct.Align[cute.struct.MemRange[dtype, x_size], 1024]
            w: cute.struct.Align[cute.struct.MemRange[dtype, w_size], 1024]
            results: cute.struct.Align[cute.struct.MemRange[dtype, result_size], 1024]

        return Storage

    @cute.jit
    def __call__(
        self,
        x_MH: cute.Tensor,
        w_gate_IH: cute.Tensor,
        w_up_IH: cute.Tensor,
        b_gate_I: Any,
        b_up_I: Any,
        h_MI: cute.Tensor,
        gate_up_M2I: Any,
        clusters: Int32,
        stream: CUstream,
    ) -> None:
        tile, half, chunk = self.configuration.tile, self.configuration.half, self.configuration.chunk
        x_layout, _, half_layout, result_layout = self.layouts()
        loads = (
            gemm.load_atom(x_MH, x_layout, (tile.rows, WIDTH_K)),
            gemm.load_atom(w_gate_IH, half_layout, (half, WIDTH_K), tile.cluster),
            gemm.load_atom(w_up_IH, half_layout, (half, WIDTH_K), tile.cluster),
        )
        results = [h_MI]
        if const_expr(self.configuration.keep_gate_up):
            results = [*gemm.halves(gate_up_M2I, *h_MI.shape), h_MI]
        stores = [gemm.store_atom(result, result_layout, (64, chunk)) for result in results]
        m_tiles = cute.ceil_div(cute.size(x_MH, mode=[0]), tile.rows * tile.cluster)
        n_tiles = cute.ceil_div(cute.size(w_gate_IH, mode=[0]), half)
        k_tiles = cute.ceil_div(cute.size(x_MH, mode=[1]), WIDTH_K)
        major = OperandMajorMode.K
        self.kernel(
            tuple(atom for atom, _ in loads),
            tuple(tensor for _, tensor in loads),
            tuple(atom for atom, _ in stores),
            tuple(tensor for _, tensor in stores),
            (b_gate_I, b_up_I) if const_expr(self.configuration.biased) else None,
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, tile.columns)
            ),
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, chunk)
            ),
            Int32(m_tiles),
            Int32(n_tiles),
            Int32(k_tiles),
        ).launch(
            grid=[tile.cluster, 1, cutlass.min(Int32(m_tiles) * Int32(n_tiles), clusters)],
            block=[hopper_gemm.THREADS, 1, 1],
            cluster=[tile.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        load_atoms: Any,
        load_tensors: Any,
        store_atoms: Any,
        store_tensors: Any,
        biases: Any,
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
            for atom in load_atoms + store_atoms:
                cpasync.prefetch_descriptor(atom)
        shared = SmemAllocator().allocate(self.storage())
        constants = shared.constants.get_tensor(cute.make_layout(2))
        if thread == 0:
            constants[0] = Float32(MINUS_LOG2E)
        loads = gemm.ring(shared.barriers.data_ptr(), tile.stages, tile.stage_bytes, 4, tile.cluster)
        pipeline_init_arrive(cluster_shape_mn=(tile.cluster, 1), is_relaxed=True)
        x_layout, w_layout, half_layout, result_layout = self.layouts()
        x_stages = shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        w_stages = shared.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        w_halves = shared.w.get_tensor(half_layout.outer, swizzle=half_layout.inner)
        result_buffers = shared.results.get_tensor(result_layout.outer, swizzle=result_layout.inner)
        rank, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        pipeline_init_wait(cluster_shape_mn=(tile.cluster, 1))
        cute.arch.sync_threads()  # the constants

        if warp_group == 0:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.load(
                    loads, load_atoms, load_tensors, x_stages, w_halves, rank, first, step, m_tiles, n_tiles, k_tiles
                )
        else:
            cute.arch.setmaxregister_increase(240)
            self.compute(
                loads, store_atoms, store_tensors, biases, tiled_mma, chunk_mma, x_stages, w_stages, result_buffers,
                constants, warp_group - 1, thread % hopper_gemm.GROUP_THREADS, rank, first, step, m_tiles, n_tiles,
                k_tiles,
            )  # fmt: skip

    @cute.jit
    def load(
        self,
        loads: Any,
        atoms: Any,
        tensors: Any,
        x_stages: cute.Tensor,
        w_halves: cute.Tensor,
        rank: Int32,
        first: Int32,
        step: Int32,
        m_tiles: Int32,
        n_tiles: Int32,
        k_tiles: Int32,
    ) -> None:
        """Warp 0: every tile's stages, in order."""
        tile, half, width = self.configuration.tile, self.configuration.half, WIDTH_K
        x_to, x_from = gemm.shares(atoms[0], tensors[0], x_stages, (tile.rows, width), Int32(0), 1)
        gate_to, gate_from = gemm.shares(atoms[1], tensors[1], w_halves, (half, width), rank, tile.cluster)
        up_to, up_from = gemm.shares(atoms[2], tensors[2], w_halves, (half, width), rank, tile.cluster)
        everyone = cutlass.Int16((1 << tile.cluster) - 1)
        filling = make_pipeline_state(PipelineUserType.Producer, tile.stages)
        number = first
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, tile.group)
            x_tile = x_from[(None, m * tile.cluster + rank, None)]
            gate_tile, up_tile = gate_from[(None, n, None)], up_from[(None, n, None)]
            for k in cutlass.range(k_tiles, unroll=1):
                loads.producer_acquire(filling)
                full = loads.producer_get_barrier(filling)
                stage = filling.index
                cute.copy(atoms[0], x_tile[(None, k)], x_to[(None, stage)], tma_bar_ptr=full)
                shared = {"tma_bar_ptr": full, "mcast_mask": everyone}
                cute.copy(atoms[1], gate_tile[(None, k)], gate_to[(None, 2 * stage)], **shared)
                cute.copy(atoms[2], up_tile[(None, k)], up_to[(None, 2 * stage + 1)], **shared)
                filling.advance()
            number += step
        loads.producer_tail(filling)  # a CTA must not end while the other one still signals its barriers

    @cute.jit
    def compute(
        self,
        loads: Any,
        store_atoms: Any,
        store_tensors: Any,
        biases: Any,
        tiled_mma: cute.TiledMma,
        chunk_mma: cute.TiledMma,
        x_stages: cute.Tensor,
        w_stages: cute.Tensor,
        result_buffers: cute.Tensor,
        constants: cute.Tensor,
        group: Int32,
        thread: Int32,
        rank: Int32,
        first: Int32,
        step: Int32,
        m_tiles: Int32,
        n_tiles: Int32,
        k_tiles: Int32,
    ) -> None:
        """A consumer warp group: every second tile of this CTA."""
        tile, chunk = self.configuration.tile, self.configuration.chunk
        chunks = const_expr(self.configuration.half // chunk)
        slice_ = tiled_mma.get_slice(0)
        a_stages = tiled_mma.make_fragment_A(slice_.partition_A(x_stages))
        b_stages = tiled_mma.make_fragment_B(slice_.partition_B(w_stages))
        accumulators = cute.make_rmem_tensor(slice_.partition_shape_C((tile.rows, tile.columns)), Float32)
        store_op = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        to_shared = cute.make_tiled_copy_S(store_op, cute.make_tiled_copy_C_atom(store_op, chunk_mma))
        buffers = to_shared.get_slice(thread).partition_D(result_buffers)
        box = (64, chunk)
        targets = [
            gemm.boxes(atom, tensor, result_buffers, box)
            for atom, tensor in zip(store_atoms, store_tensors, strict=True)
        ]
        is_storing = cute.arch.make_warp_uniform(thread // 32) == 0
        if group == 1:
            hopper_gemm.pass_turn(hopper_gemm.MAIN_LOOP, group)  # the first turn is group 0's
        number = first + step * group
        used = k_tiles * group
        # Two stores in a row never take the same buffer, from one tile to the next either: each frees the other's.
        before = 0 if const_expr(self.configuration.stores % FORWARD_BUFFERS == 0) else Int32(0)
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, tile.group)
            hopper_gemm.multiply(loads, used, k_tiles, tiled_mma, a_stages, b_stages, accumulators, group, tile.stages)
            used += 2 * k_tiles
            row = (m * tile.cluster + rank) * (tile.rows // 64)
            stored = 0
            for part in cutlass.range_constexpr(self.configuration.parts):
                block, column = part // chunks, part % chunks
                if const_expr(self.configuration.biased):
                    self.add_biases(accumulators, biases, block, column, n, thread)
                fragments = self.product(accumulators, block, column, constants[0], buffers)
                for fragment, atom, (source, target) in zip(fragments, store_atoms, targets, strict=True):
                    slot = group * FORWARD_BUFFERS + (before + stored) % FORWARD_BUFFERS
                    cute.copy(to_shared, fragment, buffers[(None, None, None, slot)])
                    self.store(atom, source, target, slot, group, is_storing, row + block, n * chunks + column)
                    stored += 1
            if const_expr(self.configuration.stores % FORWARD_BUFFERS != 0):
                before = (before + self.configuration.stores) % FORWARD_BUFFERS
            number += 2 * step
        if is_storing:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the reads

    def add_biases(
        self, accumulators: cute.Tensor, biases: Any, block: int, column: int, n: Int32, thread: Int32
    ) -> None:
        """To gate and up of one chunk. Of each eight columns a thread has two neighbours, in two rows.

        I is a multiple of 8: eight columns lie in the tensor or beyond it together, and what lies beyond is not stored,
        so that any bias will do there.
        """
        half, chunk = self.configuration.half, self.configuration.chunk
        at = block * half + column * (chunk // 2)
        for which, bias_I in enumerate(biases):
            last = cute.size(bias_I) - 8
            for eight in range(chunk // 8):
                first = cutlass.min(n * half + column * chunk + 8 * eight, last) + thread % 4 * 2
                for value in range(4):
                    place = at + which * (half // 2) + 4 * eight + value
                    accumulators[place] = accumulators[place] + Float32(bias_I[first + value % 2])

    def product(
        self, accumulators: cute.Tensor, block: int, column: int, minus_log2e: Float32, buffers: cute.Tensor
    ) -> list[cute.Tensor]:
        """The fragments to store of one chunk, in the order of the stores: gate and up where kept, and h.

        A thread's accumulators lie as [block of 64 rows][gate or up][values], the values in the order of a fragment.
        """
        half, chunk = self.configuration.half, self.configuration.chunk
        values = chunk // 2
        at = block * half + column * values
        shape = cute.shape(buffers)[:3]
        gate, up, h = (cute.make_rmem_tensor(shape, self.dtype) for _ in range(3))
        round_to(gate, [accumulators[at + value] for value in range(values)])
        round_to(up, [accumulators[at + half // 2 + value] for value in range(values)])
        activation = self.configuration.activation
        acts = [activate(Float32(gate[value]), minus_log2e, activation) for value in range(values)]
        round_to(h, [act * Float32(up[value]) for value, act in enumerate(acts)])
        return [gate, up, h] if self.configuration.keep_gate_up else [h]

    @cute.jit
    def store(
        self, atom: Any, source: Any, target: Any, slot: Int32, group: Int32, is_storing: Any, row: Int32, column: Int32
    ) -> None:
        """From this warp group's buffer to memory."""
        hopper_gemm.hand_to_tma(group, is_storing, FORWARD_BUFFERS)
        if is_storing:
            cute.copy(atom, source[(None, slot)], target[(None, (row, column))])
            cute.arch.cp_async_bulk_commit_group()
