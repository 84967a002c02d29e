"""`h = act(x Wg^T) * (x Wu^T)` as one kernel for Blackwell (SM100, SM103), in the CuTe DSL. No GPU has run it yet.

Each stage of the ring holds rows of x and, as one operand B of the tensor cores, the same rows of both weights: gate
in its first half, up in its second, as in hopper_forward.py. So the first half of a tile's columns of tensor memory
are gates, the second ups, and a thread of the epilogue, whose lane is a row, reads both of an element. gate and up
are rounded to the I/O dtype before the activation, as reference.py does.

The epilogue goes through 64 columns at a time: tensor memory, registers, two buffers in shared memory, TMA stores. TMA
clips what lies outside of a tensor, so that no tail needs a predicate.

Tensors: M tokens, H hidden size, I intermediate size, M2I = [M, 2*I] with the gate in the first I columns.
"""

# No `from __future__ import annotations`: the DSL reads the annotations of a struct as types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait

from ..cute import blackwell_gemm, gemm
from ..cute.activations import MINUS_LOG2E, activate, round_to
from ..cute.blackwell_gemm import PIECE
from ..cute.tile import ACCUMULATORS, WIDTH_K
from .blackwell_configuration import BUFFERS, CHUNK, ROWS, Forward

THREADS = 192


def build(configuration: Forward, options: str) -> Any:
    """Compiles; the result takes (x, w_gate, w_up, h, gate_up or None, CTAs at most)."""
    dtype = gemm.TYPES[configuration.dtype]
    tokens, hidden, inner = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    inner_2 = cute.sym_int(divisibility=16)
    return cute.compile(
        _Kernel(configuration),
        gemm.fake(dtype, tokens, hidden),
        gemm.fake(dtype, inner, hidden),
        gemm.fake(dtype, inner, hidden),
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

    def layouts(self) -> tuple[Any, Any, Any]:
        """As TMA sees shared memory: the stages of x, of each weight alone, and the epilogue's buffers."""
        tile, half = self.configuration.tile, self.configuration.half
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, self.dtype)
        order = (0, 1, 2)
        return (
            cute.tile_to_shape(atom, (tile.rows, WIDTH_K, tile.stages), order=order),
            cute.tile_to_shape(atom, (half, WIDTH_K, 2 * tile.stages), order=order),
            cute.tile_to_shape(atom, (ROWS, CHUNK, BUFFERS), order=order),
        )

    def storage(self) -> Any:
        """What lies in shared memory."""
        stages, dtype = self.configuration.tile.stages, self.dtype
        x_size, w_size, result_size = (cute.cosize(layout) for layout in self.layouts())

        @cute.struct
        class Storage:
            load_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            accumulator_barriers: cute.struct.MemRange[cutlass.Int64, 2 * ACCUMULATORS]
            tensor_memory: Int32
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
        h_MI: cute.Tensor,
        gate_up_M2I: Any,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        tile, half = self.configuration.tile, self.configuration.half
        x_layout, half_layout, result_layout = self.layouts()
        loads = (
            gemm.load_atom(x_MH, x_layout, (tile.rows, WIDTH_K)),
            gemm.load_atom(w_gate_IH, half_layout, (half, WIDTH_K)),
            gemm.load_atom(w_up_IH, half_layout, (half, WIDTH_K)),
        )
        results = [h_MI]
        if const_expr(self.configuration.keep_gate_up):
            results = [*gemm.halves(gate_up_M2I, *h_MI.shape), h_MI]
        stores = [gemm.store_atom(result, result_layout, (ROWS, CHUNK)) for result in results]
        m_tiles = cute.ceil_div(cute.size(x_MH, mode=[0]), tile.rows)
        n_tiles = cute.ceil_div(cute.size(w_gate_IH, mode=[0]), half)
        k_tiles = cute.ceil_div(cute.size(x_MH, mode=[1]), WIDTH_K)
        self.kernel(
            tuple(atom for atom, _ in loads),
            tuple(tensor for _, tensor in loads),
            tuple(atom for atom, _ in stores),
            tuple(tensor for _, tensor in stores),
            blackwell_gemm.tiled_mma(self.dtype, tile.rows, tile.columns),
            Int32(m_tiles),
            Int32(n_tiles),
            Int32(k_tiles),
        ).launch(
            grid=[cutlass.min(Int32(m_tiles) * Int32(n_tiles), ctas), 1, 1],
            block=[THREADS, 1, 1],
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
        mma: cute.TiledMma,
        m_tiles: Int32,
        n_tiles: Int32,
        k_tiles: Int32,
    ) -> None:
        tile = self.configuration.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == blackwell_gemm.LOAD_WARP:
            for atom in load_atoms + store_atoms:
                cpasync.prefetch_descriptor(atom)
        shared = SmemAllocator().allocate(self.storage())
        loads = blackwell_gemm.ring(shared.load_barriers.data_ptr(), tile.stages, tile.stage_bytes)
        accumulating = blackwell_gemm.accumulator_ring(shared.accumulator_barriers.data_ptr())
        tensor_memory = blackwell_gemm.tensor_memory(shared.tensor_memory.ptr)
        pipeline_init_arrive(is_relaxed=True)
        x_layout, half_layout, result_layout = self.layouts()
        x_operand, w_operand = blackwell_gemm.operand_layouts(mma, self.dtype, tile)
        x_stages = shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        w_halves = shared.w.get_tensor(half_layout.outer, swizzle=half_layout.inner)
        a_stages = mma.make_fragment_A(shared.x.get_tensor(x_operand.outer, swizzle=x_operand.inner))
        b_stages = mma.make_fragment_B(shared.w.get_tensor(w_operand.outer, swizzle=w_operand.inner))
        result_buffers = shared.results.get_tensor(result_layout.outer, swizzle=result_layout.inner)
        accumulators_layout = blackwell_gemm.accumulators_layout(mma, tile)
        pipeline_init_wait()

        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        if warp == blackwell_gemm.LOAD_WARP:
            self.load(loads, load_atoms, load_tensors, x_stages, w_halves, first, step, m_tiles, n_tiles, k_tiles)
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
            self.finish(
                accumulating, store_atoms, store_tensors, accumulators, result_buffers, warp, first, step, m_tiles,
                n_tiles,
            )  # fmt: skip
            tensor_memory.relinquish_alloc_permit()
            blackwell_gemm.finish_reading()
            tensor_memory.free(pointer)

    @cute.jit
    def load(
        self,
        loads: Any,
        atoms: Any,
        tensors: Any,
        x_stages: cute.Tensor,
        w_halves: cute.Tensor,
        first: Int32,
        step: Int32,
        m_tiles: Int32,
        n_tiles: Int32,
        k_tiles: Int32,
    ) -> None:
        """Every tile's stages, in order."""
        tile, half, width = self.configuration.tile, self.configuration.half, WIDTH_K
        x_to, x_from = gemm.shares(atoms[0], tensors[0], x_stages, (tile.rows, width), Int32(0), 1)
        gate_to, gate_from = gemm.shares(atoms[1], tensors[1], w_halves, (half, width), Int32(0), 1)
        up_to, up_from = gemm.shares(atoms[2], tensors[2], w_halves, (half, width), Int32(0), 1)
        filling = make_pipeline_state(PipelineUserType.Producer, tile.stages)
        number = first
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, tile.group)
            x_tile, gate_tile, up_tile = x_from[(None, m, None)], gate_from[(None, n, None)], up_from[(None, n, None)]
            for k in cutlass.range(k_tiles, unroll=1):
                loads.producer_acquire(filling)
                full = loads.producer_get_barrier(filling)
                stage = filling.index
                cute.copy(atoms[0], x_tile[(None, k)], x_to[(None, stage)], tma_bar_ptr=full)
                cute.copy(atoms[1], gate_tile[(None, k)], gate_to[(None, 2 * stage)], tma_bar_ptr=full)
                cute.copy(atoms[2], up_tile[(None, k)], up_to[(None, 2 * stage + 1)], tma_bar_ptr=full)
                filling.advance()
            number += step
        loads.producer_tail(filling)  # shared memory must outlive what the tensor cores read and signal

    @cute.jit
    def finish(
        self,
        accumulating: Any,
        atoms: Any,
        tensors: Any,
        accumulators: cute.Tensor,
        result_buffers: cute.Tensor,
        warp: Int32,
        first: Int32,
        step: Int32,
        m_tiles: Int32,
        n_tiles: Int32,
    ) -> None:
        """The epilogue of every tile."""
        chunks = const_expr(self.configuration.chunks)
        load, sources, shape = blackwell_gemm.reading(accumulators, ROWS)
        to_shared, buffers = blackwell_gemm.rows_of(load, result_buffers)
        targets = [
            gemm.boxes(atom, tensor, result_buffers, (ROWS, CHUNK)) for atom, tensor in zip(atoms, tensors, strict=True)
        ]
        ready = make_pipeline_state(PipelineUserType.Consumer, ACCUMULATORS)
        slot = Int32(0)
        number = first
        while number < m_tiles * n_tiles:
            m, n = gemm.place_of(number, m_tiles, n_tiles, self.configuration.tile.group)
            accumulating.consumer_wait(ready)
            blackwell_gemm.after_sync()
            for chunk in cutlass.range_constexpr(chunks):
                for role, atom, (source, target) in zip(self.configuration.results, atoms, targets, strict=True):
                    # A loop at run time: unrolled, ptxas would start on all pieces at once, and spill registers.
                    for piece in cutlass.range(CHUNK // PIECE, unroll=1):
                        at = (None, None, None, 0, chunk * (CHUNK // PIECE) + piece, ready.index)
                        place = buffers[(None, None, piece, slot)]
                        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
                        result = cute.make_rmem_tensor(place.shape, self.dtype)
                        self.piece(role, load, sources, at, sums, result)
                        cute.copy(to_shared, result, place)
                    if const_expr(chunk == chunks - 1 and role == "h"):
                        blackwell_gemm.release(accumulating, ready)
                    self.store(atom, source, target, slot, warp == 0, m, n * chunks + chunk)
                    slot = 1 - slot
            ready.advance()
            number += step
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the reads

    def piece(
        self,
        role: str,
        load: cute.TiledCopy,
        sources: cute.Tensor,
        at: Any,
        sums: list[cute.Tensor],
        result: cute.Tensor,
    ) -> None:
        """gate, up or h of this thread's row and of one piece's columns, from its sums at `at` (that of gate)."""
        to_up = self.configuration.half // PIECE
        needed = {"gate": [0], "up": [1], "h": [0, 1]}[role]
        for which in needed:
            place = (*at[:4], at[4] + which * to_up, at[5])
            cute.copy(load, sources[place], sums[which])
        cute.arch.fence_view_async_tmem_load()
        rounded = [cute.make_rmem_tensor(result.shape, self.dtype) if role == "h" else result for _ in needed]
        for which, each in zip(needed, rounded, strict=True):
            round_to(each, [sums[which][value] for value in range(PIECE)])
        if role == "h":
            gate, up = rounded
            activation, minus_log2e = self.configuration.activation, Float32(MINUS_LOG2E)
            acts = [activate(Float32(gate[value]), minus_log2e, activation) for value in range(PIECE)]
            round_to(result, [act * Float32(up[value]) for value, act in enumerate(acts)])

    @cute.jit
    def store(
        self, atom: Any, source: Any, target: Any, slot: Int32, is_storing: Any, row: Int32, column: Int32
    ) -> None:
        """From a buffer to memory, with one barrier, which also frees the buffer that comes next."""
        cute.arch.fence_proxy("async.shared", space="cta")
        if is_storing:
            cute.arch.cp_async_bulk_wait_group(BUFFERS - 2, read=True)
        cute.arch.barrier(barrier_id=blackwell_gemm.STORED, number_of_threads=blackwell_gemm.EPILOGUE_THREADS)
        if is_storing:
            cute.copy(atom, source[(None, slot)], target[(None, (row, column))])
            cute.arch.cp_async_bulk_commit_group()
