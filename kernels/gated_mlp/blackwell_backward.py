"""`dh = dout Wd`, and from it d_gate, d_up and h, as one kernel for Blackwell (SM100, SM103), in the CuTe DSL.

dh is never stored. No GPU has run this kernel yet. The GEMM is that of blackwell_gemm.py, with Wd read as it lies,
[H, I]: the tensor cores take an operand B whose columns, and not whose K, are contiguous. The epilogue moves gate and
up in, and d_gate, d_up and h out, by TMA, in chunks of 128 rows x 64 columns, with two warps more:

    warp 6        loads gate and up of the next chunk into a free slot, running ahead across the borders of tiles
    warps 0 to 3  wait for the slot, compute in place (a thread reads and writes its own row only), say that it is done
    warp 7        stores the slot and h, and frees both once TMA has read them

dh stays in fp32: it is rounded nowhere, unlike in the library's own code.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

# No `from __future__ import annotations`: the DSL reads the annotations of a struct as types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait

from ..cute import blackwell_gemm, gemm
from ..cute.activations import MINUS_LOG2E, activate_and_slope, round_to
from ..cute.blackwell_gemm import PIECE
from ..cute.tile import ACCUMULATORS, WIDTH_K
from .blackwell_configuration import CHUNK, CHUNK_BYTES, ROWS, Backward

_INPUT_WARP = 6
_STORE_WARP = 7
_THREADS = 256


def build(configuration: Backward, options: str) -> Any:
    """Compiles; the result takes (dout, w_down, gate_up, d_gate_up, h or None, CTAs at most)."""
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
        """As TMA sees shared memory: the stages of dout, those of Wd, and the chunks of the epilogue."""
        tile = self.configuration.tile
        kinds = tcgen05.SmemLayoutAtomKind
        k_major = tcgen05.make_smem_layout_atom(kinds.K_SW128, self.dtype)
        mn_major = tcgen05.make_smem_layout_atom(kinds.MN_SW128, self.dtype)
        return (
            cute.tile_to_shape(k_major, (tile.rows, WIDTH_K, tile.stages), order=(0, 1, 2)),
            cute.tile_to_shape(mn_major, (tile.columns, WIDTH_K, tile.stages), order=(1, 0, 2)),
            cute.tile_to_shape(k_major, (ROWS, CHUNK, self.configuration.buffers), order=(0, 1, 2)),
        )

    def storage(self) -> Any:
        """What lies in shared memory."""
        stages, slots, dtype = self.configuration.tile.stages, self.configuration.slots, self.dtype
        dout_size, w_size, chunk_size = (cute.cosize(layout) for layout in self.layouts())

        @cute.struct
        class Storage:
            load_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            accumulator_barriers: cute.struct.MemRange[cutlass.Int64, 2 * ACCUMULATORS]
            slot_barriers: cute.struct.MemRange[cutlass.Int64, 2 * slots]
            done_barriers: cute.struct.MemRange[cutlass.Int64, slots]
            tensor_memory: Int32
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
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        tile = self.configuration.tile
        hidden, inner = w_down_HI.shape
        w_down_IH = gemm.transposed(w_down_HI)
        dout_layout, w_layout, chunk_layout = self.layouts()
        operands = (
            gemm.load_atom(dout_MH, dout_layout, (tile.rows, WIDTH_K)),
            gemm.load_atom(w_down_IH, w_layout, (tile.columns, WIDTH_K)),
        )
        tokens = dout_MH.shape[0]
        box = (ROWS, CHUNK)
        inputs = [gemm.load_atom(half, chunk_layout, box) for half in gemm.halves(gate_up_M2I, tokens, inner)]
        outputs = list(gemm.halves(d_gate_up_M2I, tokens, inner)) + ([h_MI] if self.configuration.want_h else [])
        stores = [gemm.store_atom(output, chunk_layout, box) for output in outputs]
        m_tiles = cute.ceil_div(tokens, tile.rows)
        n_tiles = cute.ceil_div(inner, tile.columns)
        k_tiles = cute.ceil_div(hidden, WIDTH_K)
        self.kernel(
            tuple(atom for atom, _ in operands),
            tuple(tensor for _, tensor in operands),
            tuple(atom for atom, _ in inputs),
            tuple(tensor for _, tensor in inputs),
            tuple(atom for atom, _ in stores),
            tuple(tensor for _, tensor in stores),
            blackwell_gemm.tiled_mma(self.dtype, tile.rows, tile.columns, OperandMajorMode.MN),
            Int32(m_tiles),
            Int32(n_tiles),
            Int32(k_tiles),
        ).launch(
            grid=[cutlass.min(Int32(m_tiles) * Int32(n_tiles), ctas), 1, 1],
            block=[_THREADS, 1, 1],
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
        mma: cute.TiledMma,
        m_tiles: Int32,
        n_tiles: Int32,
        k_tiles: Int32,
    ) -> None:
        tile, slots = self.configuration.tile, self.configuration.slots
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == blackwell_gemm.LOAD_WARP:
            for atom in operand_atoms + input_atoms + store_atoms:
                cpasync.prefetch_descriptor(atom)
        shared = SmemAllocator().allocate(self.storage())
        done = shared.done_barriers.data_ptr()
        if thread == 0:
            for slot in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(done + slot, blackwell_gemm.EPILOGUE_WARPS)
        loads = blackwell_gemm.ring(shared.load_barriers.data_ptr(), tile.stages, tile.stage_bytes)
        accumulating = blackwell_gemm.accumulator_ring(shared.accumulator_barriers.data_ptr())
        ring = gemm.ring(shared.slot_barriers.data_ptr(), slots, 2 * CHUNK_BYTES, 1, 1)
        tensor_memory = blackwell_gemm.tensor_memory(shared.tensor_memory.ptr)
        pipeline_init_arrive(is_relaxed=True)
        dout_layout, w_layout, chunk_layout = self.layouts()
        dout_operand, w_operand = blackwell_gemm.operand_layouts(mma, self.dtype, tile)
        dout_stages = shared.dout.get_tensor(dout_layout.outer, swizzle=dout_layout.inner)
        w_stages = shared.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        a_stages = mma.make_fragment_A(shared.dout.get_tensor(dout_operand.outer, swizzle=dout_operand.inner))
        b_stages = mma.make_fragment_B(shared.w.get_tensor(w_operand.outer, swizzle=w_operand.inner))
        chunks = shared.chunks.get_tensor(chunk_layout.outer, swizzle=chunk_layout.inner)
        accumulators_layout = blackwell_gemm.accumulators_layout(mma, tile)
        pipeline_init_wait()

        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        work = (first, step, m_tiles, n_tiles)
        if warp == blackwell_gemm.LOAD_WARP:
            self.load_operands(loads, operand_atoms, operand_tensors, dout_stages, w_stages, k_tiles, *work)
        if warp == _INPUT_WARP:
            self.load_inputs(ring, input_atoms, input_tensors, chunks, *work)
        if warp == _STORE_WARP:
            self.store(ring, done, store_atoms, store_tensors, chunks, *work)
        if warp == blackwell_gemm.MULTIPLY_WARP:
            tensor_memory.wait_for_alloc()
            accumulators = cute.make_tensor(tensor_memory.retrieve_ptr(Float32), accumulators_layout)
            blackwell_gemm.multiply_tiles(
                loads, accumulating, mma, a_stages, b_stages, accumulators, first, step, m_tiles * n_tiles, k_tiles,
                tile.stages,
            )  # fmt: skip
        if warp < blackwell_gemm.EPILOGUE_WARPS:
            tensor_memory.allocate(self.configuration.tensor_columns)
            tensor_memory.wait_for_alloc()
            pointer = tensor_memory.retrieve_ptr(Float32)
            accumulators = cute.make_tensor(pointer, accumulators_layout)
            self.compute(accumulating, ring, done, accumulators, chunks, first, step, m_tiles * n_tiles)
            tensor_memory.relinquish_alloc_permit()
            blackwell_gemm.finish_reading()
            tensor_memory.free(pointer)

    @cute.jit
    def load_operands(
        self, loads: Any, atoms: Any, tensors: Any, dout_stages: cute.Tensor, w_stages: cute.Tensor, k_tiles: Int32,
        first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32,
    ) -> None:  # fmt: skip
        """Every tile's stages of dout and Wd, in order."""
        tile, width = self.configuration.tile, WIDTH_K
        dout_to, dout_from = gemm.shares(atoms[0], tensors[0], dout_stages, (tile.rows, width), Int32(0), 1)
        w_to, w_from = gemm.shares(atoms[1], tensors[1], w_stages, (tile.columns, width), Int32(0), 1)
        filling = make_pipeline_state(PipelineUserType.Producer, tile.stages)
        number = first
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, tile.group)
            dout_tile, w_tile = dout_from[(None, m, None)], w_from[(None, n, None)]
            for k in cutlass.range(k_tiles, unroll=1):
                loads.producer_acquire(filling)
                full = loads.producer_get_barrier(filling)
                cute.copy(atoms[0], dout_tile[(None, k)], dout_to[(None, filling.index)], tma_bar_ptr=full)
                cute.copy(atoms[1], w_tile[(None, k)], w_to[(None, filling.index)], tma_bar_ptr=full)
                filling.advance()
            number += step
        loads.producer_tail(filling)  # shared memory must outlive what the tensor cores read and signal

    @cute.jit
    def load_inputs(
        self, ring: Any, atoms: Any, tensors: Any, chunks: cute.Tensor,
        first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32,
    ) -> None:  # fmt: skip
        """gate and up of every tile's chunks, in order."""
        parts = [gemm.boxes(atom, tensor, chunks, (ROWS, CHUNK)) for atom, tensor in zip(atoms, tensors, strict=True)]
        once = gemm.hint(gemm.EVICT_FIRST)
        filling = make_pipeline_state(PipelineUserType.Producer, self.configuration.slots)
        number = first
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, self.configuration.tile.group)
            for chunk in cutlass.range(self.configuration.chunks, unroll=1):
                ring.producer_acquire(filling)
                full = ring.producer_get_barrier(filling)
                for which in cutlass.range_constexpr(2):
                    target, source = parts[which]
                    at, slot = (m, n * self.configuration.chunks + chunk), target[(None, 2 * filling.index + which)]
                    cute.copy(atoms[which], source[(None, at)], slot, tma_bar_ptr=full, **once)
                filling.advance()
            number += step
        ring.producer_tail(filling)

    @cute.jit
    def store(
        self, ring: Any, done: cute.Pointer, atoms: Any, tensors: Any, chunks: cute.Tensor,
        first: Int32, step: Int32, m_tiles: Int32, n_tiles: Int32,
    ) -> None:  # fmt: skip
        """Every chunk's results, in order, and its slot back to the warp that loads."""
        slots = self.configuration.slots
        parts = [gemm.boxes(atom, tensor, chunks, (ROWS, CHUNK)) for atom, tensor in zip(atoms, tensors, strict=True)]
        once = gemm.hint(gemm.EVICT_FIRST)
        storing = make_pipeline_state(PipelineUserType.Consumer, slots)
        number = first
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, self.configuration.tile.group)
            for chunk in cutlass.range(self.configuration.chunks, unroll=1):
                cute.arch.mbarrier_wait(done + storing.index, storing.phase)
                for which in cutlass.range_constexpr(len(parts)):
                    source, target = parts[which]
                    buffer = 2 * storing.index + which if const_expr(which < 2) else 2 * slots + storing.index
                    at = (m, n * self.configuration.chunks + chunk)
                    cute.copy(atoms[which], source[(None, buffer)], target[(None, at)], **once)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                ring.consumer_release(storing)
                storing.advance()
            number += step

    @cute.jit
    def compute(
        self, accumulating: Any, ring: Any, done: cute.Pointer, accumulators: cute.Tensor, chunks: cute.Tensor,
        first: Int32, step: Int32, tiles: Int32,
    ) -> None:  # fmt: skip
        """The epilogue of every tile."""
        slots, per_tile = self.configuration.slots, self.configuration.chunks
        load, sources, shape = blackwell_gemm.reading(accumulators, ROWS)
        copy, buffers = blackwell_gemm.rows_of(load, chunks)
        ready = make_pipeline_state(PipelineUserType.Consumer, ACCUMULATORS)
        current = make_pipeline_state(PipelineUserType.Consumer, slots)
        number = first
        while number < tiles:
            accumulating.consumer_wait(ready)
            blackwell_gemm.after_sync()
            for chunk in cutlass.range(per_tile, unroll=1):
                ring.consumer_wait(current)
                # A loop at run time: unrolled, ptxas would start on all pieces at once, and spill registers.
                for piece in cutlass.range(CHUNK // PIECE, unroll=1):
                    dh = cute.make_rmem_tensor(shape, Float32)
                    cute.copy(load, sources[(None, None, None, 0, chunk * (CHUNK // PIECE) + piece, ready.index)], dh)
                    slot, h_buffer = 2 * current.index, 2 * slots + current.index
                    self.piece(dh, copy, buffers[(None, None, piece, None)], slot, h_buffer)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(done + current.index)
                current.advance()
            blackwell_gemm.release(accumulating, ready)
            ready.advance()
            number += step

    def piece(self, dh: cute.Tensor, copy: Any, buffers: cute.Tensor, slot: Int32, h_buffer: Int32) -> None:
        """This thread's row of one piece: gate and up from the slot, d_gate and d_up in their places, and h."""
        gate, up, h = (cute.make_rmem_tensor(cute.shape(buffers)[:2], self.dtype) for _ in range(3))
        cute.copy(copy, buffers[(None, None, slot)], gate)
        cute.copy(copy, buffers[(None, None, slot + 1)], up)
        cute.arch.fence_view_async_tmem_load()
        activation, minus_log2e = self.configuration.activation, Float32(MINUS_LOG2E)
        acts = [activate_and_slope(Float32(gate[value]), minus_log2e, activation) for value in range(PIECE)]
        ups = [Float32(up[value]) for value in range(PIECE)]
        sums = [dh[value] for value in range(PIECE)]
        if self.configuration.want_h:
            round_to(h, [act * value for (act, _), value in zip(acts, ups, strict=True)])
            cute.copy(copy, h, buffers[(None, None, h_buffer)])
        round_to(gate, [d * value * slope for d, value, (_, slope) in zip(sums, ups, acts, strict=True)])
        round_to(up, [d * act for d, (act, _) in zip(sums, acts, strict=True)])
        cute.copy(copy, gate, buffers[(None, None, slot)])
        cute.copy(copy, up, buffers[(None, None, slot + 1)])
