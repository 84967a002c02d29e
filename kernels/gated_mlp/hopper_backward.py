"""`dh = dout Wd`, and from it d_gate, d_up and h, as one kernel for Hopper (SM90), in the CuTe DSL. dh is never stored.

The GEMM is that of hopper_gemm.py, with Wd read as it lies, [H, I]: the tensor cores take an operand B whose columns,
and not whose K, are contiguous. What the epilogue moves is what bounds it at small H: gate and up in, d_gate, d_up and
h out, 10 bytes per element of dh. So it moves by TMA, by warps of group 0 that have nothing else to do, in chunks of 64
rows x 64 columns:

    warp 1   loads gate and up of the next chunk into a free slot, running ahead across the borders of tiles
    groups   wait for the slot, compute in place (a warp reads and writes its own 16 rows only), say that it is done
    warp 2   stores the slot, and frees it once TMA has read it

Both groups use one ring of slots, in the order of the tiles; h has buffers of its own, fewer than there are slots.
dh stays in fp32: it is rounded nowhere, unlike in the library's own code.

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
from ..cute.activations import MINUS_LOG2E, activate_and_slope, round_to
from ..cute.tile import WIDTH_K
from .hopper_configuration import CHUNK, CHUNK_BYTES, Backward

_STRIPS = CHUNK // 16
"""A chunk is computed 16 columns at a time: 8 values per thread, which is all that registers have room for."""


def build(configuration: Backward, options: str) -> Any:
    """Compiles; the result takes (dout, w_down, gate_up, d_gate_up, h or None, clusters)."""
    dtype = gemm.TYPES[configuration.dtype]
    tokens, hidden, inner = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    inner_2 = cute.sym_int(divisibility=16)
    return cute.compile(
        _Kernel(configuration),
        gemm.fake(dtype, tokens, hidden),
        gemm.fake(dtype, hidden, inner),
        gemm.fake(dtype, tokens, inner_2),
        gemm.fake(dtype, tokens, inner_2),
        gemm.fake(dtype, tokens, inner) if configuration.want_h else None,
        Int32(1),
        gemm.fake_stream(),
        options=options,
    )


class _Kernel:
    def __init__(self, configuration: Backward) -> None:
        self.configuration = configuration
        self.dtype = gemm.TYPES[configuration.dtype]

    def layouts(self) -> tuple[Any, Any, Any]:
        """Of the stages of dout, of those of Wd, and of the chunks of the epilogue."""
        tile, width = self.configuration.tile, WIDTH_K
        kinds = warpgroup.SmemLayoutAtomKind
        k_major = warpgroup.make_smem_layout_atom(kinds.K_SW128, self.dtype)
        mn_major = warpgroup.make_smem_layout_atom(kinds.MN_SW128, self.dtype)
        return (
            cute.tile_to_shape(k_major, (tile.rows, width, tile.stages), order=(0, 1, 2)),
            cute.tile_to_shape(mn_major, (tile.columns, width, tile.stages), order=(1, 0, 2)),
            cute.tile_to_shape(k_major, (64, CHUNK, self.configuration.buffers), order=(0, 1, 2)),
        )

    def storage(self) -> Any:
        """What lies in shared memory."""
        stages, slots, dtype = self.configuration.tile.stages, self.configuration.slots, self.dtype
        dout_size, w_size, chunk_size = (cute.cosize(layout) for layout in self.layouts())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            slot_barriers: cute.struct.MemRange[cutlass.Int64, 2 * slots]
            done_barriers: cute.struct.MemRange[cutlass.Int64, slots]
            constants: cute.struct.MemRange[Float32, 2]
            dout: cute.struct.Align[cute.struct.MemRange[dtype, dout_size], 1024]
            w: cute.struct.Align[cute.struct.MemRange[dtype, w_size], 1024]
            chunks: cute.struct.Align[cute.struct.MemRange[dtype, chunk_size], 1024]

        return Storage

    @cute.jit
    def __call__(
        self,
        dout_MH: cute.Tensor,
        w_down_HI: cute.Tensor,
        gate_up_M2I: cute.Tensor,
        d_gate_up_M2I: cute.Tensor,
        h_MI: Any,
        clusters: Int32,
        stream: CUstream,
    ) -> None:
        tile, width = self.configuration.tile, WIDTH_K
        hidden, inner = w_down_HI.shape
        w_down_IH = gemm.transposed(w_down_HI)
        dout_layout, w_layout, chunk_layout = self.layouts()
        operands = (
            gemm.load_atom(dout_MH, dout_layout, (tile.rows, width)),
            gemm.load_atom(w_down_IH, w_layout, (tile.columns, width), tile.cluster),
        )
        tokens = dout_MH.shape[0]
        halves = gemm.halves(gate_up_M2I, tokens, inner)
        d_halves = gemm.halves(d_gate_up_M2I, tokens, inner)
        box = (64, CHUNK)
        inputs = [gemm.load_atom(half, chunk_layout, box) for half in halves]
        outputs = list(d_halves) + ([h_MI] if self.configuration.want_h else [])
        stores = [gemm.store_atom(output, chunk_layout, box) for output in outputs]
        m_tiles = cute.ceil_div(tokens, tile.rows * tile.cluster)
        n_tiles = cute.ceil_div(inner, tile.columns)
        k_tiles = cute.ceil_div(hidden, width)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        self.kernel(
            tuple(atom for atom, _ in operands),
            tuple(tensor for _, tensor in operands),
            tuple(atom for atom, _ in inputs),
            tuple(tensor for _, tensor in inputs),
            tuple(atom for atom, _ in stores),
            tuple(tensor for _, tensor in stores),
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, k_major, mn_major, Float32, (1, 1, 1), (64, tile.columns)
            ),
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), (64, 16)
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
        operand_atoms: Any,
        operand_tensors: Any,
        input_atoms: Any,
        input_tensors: Any,
        store_atoms: Any,
        store_tensors: Any,
        tiled_mma: cute.TiledMma,
        strip_mma: cute.TiledMma,
        m_tiles: Int32,
        n_tiles: Int32,
        k_tiles: Int32,
    ) -> None:
        tile, slots = self.configuration.tile, self.configuration.slots
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warp_group = cute.arch.make_warp_uniform(thread // hopper_gemm.GROUP_THREADS)
        if warp == 0:
            for atom in operand_atoms + input_atoms + store_atoms:
                cpasync.prefetch_descriptor(atom)
        shared = SmemAllocator().allocate(self.storage())
        constants = shared.constants.get_tensor(cute.make_layout(2))
        done = shared.done_barriers.data_ptr()
        if thread == 0:
            constants[0] = Float32(MINUS_LOG2E)
            for slot in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(done + slot, 4)  # the warps of a group
        loads = gemm.ring(shared.barriers.data_ptr(), tile.stages, tile.stage_bytes, 4, tile.cluster)
        ring = gemm.ring(shared.slot_barriers.data_ptr(), slots, 2 * CHUNK_BYTES, 1, 1)
        freed = shared.slot_barriers.data_ptr() + slots
        pipeline_init_arrive(cluster_shape_mn=(tile.cluster, 1), is_relaxed=True)
        dout_layout, w_layout, chunk_layout = self.layouts()
        dout_stages = shared.dout.get_tensor(dout_layout.outer, swizzle=dout_layout.inner)
        w_stages = shared.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        chunks = shared.chunks.get_tensor(chunk_layout.outer, swizzle=chunk_layout.inner)
        rank, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        pipeline_init_wait(cluster_shape_mn=(tile.cluster, 1))
        cute.arch.sync_threads()  # the constants, and the barriers of `done`

        work = (rank, first, step, m_tiles, n_tiles)
        if warp_group == 0:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.load_operands(loads, operand_atoms, operand_tensors, dout_stages, w_stages, k_tiles, *work)
            if warp == 1:
                self.load_inputs(ring, input_atoms, input_tensors, chunks, *work)
            if warp == 2:
                self.store(ring, done, store_atoms, store_tensors, chunks, *work)
        else:
            cute.arch.setmaxregister_increase(240)
            group, group_thread = warp_group - 1, thread % hopper_gemm.GROUP_THREADS
            self.compute(
                loads, ring, freed, done, tiled_mma, strip_mma, dout_stages, w_stages, chunks, constants,
                group, group_thread, k_tiles, first, step, m_tiles * n_tiles,
            )  # fmt: skip

    @cute.jit
    def load_operands(
        self, loads: Any, atoms: Any, tensors: Any, dout_stages: cute.Tensor, w_stages: cute.Tensor, k_tiles: Int32,
        rank: Int32, first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32,
    ) -> None:  # fmt: skip
        """Warp 0: every tile's stages of dout and Wd, in order."""
        tile, width = self.configuration.tile, WIDTH_K
        dout_to, dout_from = gemm.shares(atoms[0], tensors[0], dout_stages, (tile.rows, width), Int32(0), 1)
        w_to, w_from = gemm.shares(atoms[1], tensors[1], w_stages, (tile.columns, width), rank, tile.cluster)
        everyone = cutlass.Int16((1 << tile.cluster) - 1)
        hint = gemm.hint(gemm.EVICT_LAST, self.configuration.keep_operands)
        filling = make_pipeline_state(PipelineUserType.Producer, tile.stages)
        number = first
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, tile.group)
            dout_tile, w_tile = dout_from[(None, m * tile.cluster + rank, None)], w_from[(None, n, None)]
            for k in cutlass.range(k_tiles, unroll=1):
                loads.producer_acquire(filling)
                full = loads.producer_get_barrier(filling)
                stage = filling.index
                cute.copy(atoms[0], dout_tile[(None, k)], dout_to[(None, stage)], tma_bar_ptr=full, **hint)
                cute.copy(
                    atoms[1], w_tile[(None, k)], w_to[(None, stage)], tma_bar_ptr=full, mcast_mask=everyone, **hint
                )
                filling.advance()
            number += step
        loads.producer_tail(filling)  # a CTA must not end while the other one still signals its barriers

    @cute.jit
    def load_inputs(
        self, ring: Any, atoms: Any, tensors: Any, chunks: cute.Tensor,
        rank: Int32, first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32,
    ) -> None:  # fmt: skip
        """Warp 1: gate and up of every tile's chunks, in order."""
        parts = [gemm.boxes(atom, tensor, chunks, (64, CHUNK)) for atom, tensor in zip(atoms, tensors, strict=True)]
        once = gemm.hint(gemm.EVICT_FIRST)
        filling = make_pipeline_state(PipelineUserType.Producer, self.configuration.slots)
        number = first
        while number < m_tiles * n_tiles:
            row, column = self.corner(number, rank, m_tiles, n_tiles)
            for chunk in cutlass.range(self.configuration.chunks, unroll=1):
                at = self.chunk_at(row, column, chunk)
                ring.producer_acquire(filling)
                full = ring.producer_get_barrier(filling)
                for which in cutlass.range_constexpr(2):
                    target, source = parts[which]
                    slot = target[(None, 2 * filling.index + which)]
                    cute.copy(atoms[which], source[(None, at)], slot, tma_bar_ptr=full, **once)
                filling.advance()
            number += step

    @cute.jit
    def store(
        self, ring: Any, done: cute.Pointer, atoms: Any, tensors: Any, chunks: cute.Tensor,
        rank: Int32, first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32,
    ) -> None:  # fmt: skip
        """Warp 2: every chunk's results, in order, and its slot back to warp 1."""
        slots, h_buffers, lag = self.configuration.slots, self.configuration.h_buffers, self.configuration.lag
        parts = [gemm.boxes(atom, tensor, chunks, (64, CHUNK)) for atom, tensor in zip(atoms, tensors, strict=True)]
        once = gemm.hint(gemm.EVICT_FIRST)
        storing = make_pipeline_state(PipelineUserType.Consumer, slots)
        freeing = storing.clone()
        h_buffer = Int32(0)
        number = first
        while number < m_tiles * n_tiles:
            row, column = self.corner(number, rank, m_tiles, n_tiles)
            for chunk in cutlass.range(self.configuration.chunks, unroll=1):
                at = self.chunk_at(row, column, chunk)
                cute.arch.mbarrier_wait(done + storing.index, storing.phase)
                for which in cutlass.range_constexpr(2):
                    source, target = parts[which]
                    cute.copy(atoms[which], source[(None, 2 * storing.index + which)], target[(None, at)], **once)
                if const_expr(h_buffers > 0):
                    source, target = parts[2]
                    cute.copy(atoms[2], source[(None, 2 * slots + h_buffer)], target[(None, at)], **once)
                    h_buffer = 0 if h_buffer == h_buffers - 1 else h_buffer + 1
                cute.arch.cp_async_bulk_commit_group()
                storing.advance()
                if const_expr(lag == 0):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    ring.consumer_release(freeing)
                    freeing.advance()
                elif chunk > 0:  # the chunk before has been read
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    ring.consumer_release(freeing)
                    freeing.advance()
            if const_expr(lag == 1):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                ring.consumer_release(freeing)
                freeing.advance()
            number += step
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the reads

    @cute.jit
    def corner(self, number: Int32, rank: Int32, m_tiles: Int32, n_tiles: Int32) -> tuple[Int32, Int32]:
        """Row and column of a tile's first chunk, in chunks."""
        tile = self.configuration.tile
        m, n = gemm.place_of(number, m_tiles, n_tiles, tile.group)
        return (m * tile.cluster + rank) * (tile.rows // 64), n * (tile.columns // CHUNK)

    def chunk_at(self, row: Int32, column: Int32, chunk: Int32) -> tuple[Int32, Int32]:
        """Where a tile's chunk lies: along a row of chunks, then the next, as the accumulators do."""
        across = self.configuration.tile.columns // CHUNK
        return row + chunk // across, column + chunk % across

    @cute.jit
    def compute(
        self, loads: Any, ring: Any, freed: cute.Pointer, done: cute.Pointer, tiled_mma: cute.TiledMma,
        strip_mma: cute.TiledMma, dout_stages: cute.Tensor, w_stages: cute.Tensor, chunks: cute.Tensor,
        constants: cute.Tensor, group: Int32, thread: Int32, k_tiles: Int32, first: Int32, step: Int32, tiles: Int32,
    ) -> None:  # fmt: skip
        """A consumer warp group: every second tile of this CTA."""
        tile, slots = self.configuration.tile, self.configuration.slots
        h_buffers, per_tile = self.configuration.h_buffers, self.configuration.chunks
        across = tile.columns // CHUNK
        slice_ = tiled_mma.get_slice(0)
        a_stages = tiled_mma.make_fragment_A(slice_.partition_A(dout_stages))
        b_stages = tiled_mma.make_fragment_B(slice_.partition_B(w_stages))
        accumulators = cute.make_rmem_tensor(slice_.partition_shape_C((tile.rows, tile.columns)), Float32)
        store_op = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        load_op = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        strip = cute.make_tiled_copy_C_atom(store_op, strip_mma)
        to_shared, to_registers = cute.make_tiled_copy_S(store_op, strip), cute.make_tiled_copy_S(load_op, strip)
        targets = to_shared.get_slice(thread).partition_D(chunks)  # [8 values, 1, strip, buffer]
        sources = to_registers.get_slice(thread).partition_S(chunks)
        if group == 1:  # the first turns are group 0's
            hopper_gemm.pass_turn(hopper_gemm.MAIN_LOOP, group)
            hopper_gemm.pass_turn(hopper_gemm.EPILOGUE, group)
        number = first + step * group
        used, chunks_before = k_tiles * group, per_tile * group
        while number < tiles:
            hopper_gemm.multiply(loads, used, k_tiles, tiled_mma, a_stages, b_stages, accumulators, group, tile.stages)
            used += 2 * k_tiles
            # In turns here too: a barrier's phase says one bit, so nobody may wait for a slot two rounds ahead.
            hopper_gemm.wait_for_turn(hopper_gemm.EPILOGUE, group)
            current = hopper_gemm.state_after(chunks_before, slots)
            for chunk in cutlass.range_constexpr(per_tile):
                ring.consumer_wait(current)
                if const_expr(chunk == per_tile - 1):
                    hopper_gemm.pass_turn(hopper_gemm.EPILOGUE, group)
                h_buffer = 2 * slots
                if const_expr(h_buffers > 0):
                    if const_expr(h_buffers < slots):
                        self.wait_until_freed(freed, chunks_before + chunk - h_buffers)
                    h_buffer = 2 * slots + (chunks_before + chunk) % h_buffers
                for part in cutlass.range_constexpr(_STRIPS):
                    at = chunk // across * (tile.columns // 2) + chunk % across * (CHUNK // 2) + part * 8
                    self.strip(
                        [accumulators[at + value] for value in range(8)],
                        sources[(None, None, part, None)], targets[(None, None, part, None)],
                        to_registers, to_shared, constants[0], 2 * current.index, h_buffer,
                    )  # fmt: skip
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(done + current.index)
                current.advance()
            chunks_before += 2 * per_tile
            number += 2 * step

    @cute.jit
    def wait_until_freed(self, freed: cute.Pointer, chunk: Int32) -> None:
        """Until the stores of this chunk (of all that this CTA works on) have been read from shared memory."""
        slots = self.configuration.slots
        if chunk >= 0:
            rounds = chunk // slots
            cute.arch.mbarrier_wait(freed + (chunk - rounds * slots), rounds & 1)

    def strip(
        self, dh: list[Float32], sources: cute.Tensor, targets: cute.Tensor, to_registers: Any, to_shared: Any,
        minus_log2e: Float32, slot: Int32, h_buffer: Int32,
    ) -> None:  # fmt: skip
        """64 rows x 16 columns of a warp group: gate and up from the slot, d_gate and d_up in their places, and h."""
        gate, up, h = (cute.make_rmem_tensor(((8, 1), 1), self.dtype) for _ in range(3))
        for fragment, buffer in ((gate, slot), (up, slot + 1)):
            cute.copy(to_registers, sources[(None, None, buffer)], fragment)
        activation = self.configuration.activation
        acts = [activate_and_slope(Float32(gate[value]), minus_log2e, activation) for value in range(8)]
        ups = [Float32(up[value]) for value in range(8)]
        if self.configuration.want_h:
            round_to(h, [act * value for (act, _), value in zip(acts, ups, strict=True)])
            cute.copy(to_shared, h, targets[(None, None, h_buffer)])
        round_to(gate, [d * value * slope for d, value, (_, slope) in zip(dh, ups, acts, strict=True)])
        round_to(up, [d * act for d, (act, _) in zip(dh, acts, strict=True)])
        for fragment, buffer in ((gate, slot), (up, slot + 1)):
            cute.copy(to_shared, fragment, targets[(None, None, buffer)])
