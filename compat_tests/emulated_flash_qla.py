"""FlashQLA's kernels on a CPU, by what their sources of 0.1.3 compute, in the dtype of what they are given.

Chunks are taken from the table that is noted on the ends of pieces, as the kernels take them, and every output starts
as NaN: what no chunk covers stays so.

Tensors: as in kernels/linear_attention/flash_qla.py; S states [G, K, V]; one chunk at a time has L <= 64 tokens.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_SIZE = 64


def library() -> SimpleNamespace:
    """What `flash_qla._library()` gives."""
    names = (
        chunk_local_cumsum, kkt_solve, get_warmup_chunks_bidi, fused_gdr_h, correct_initial_states, fused_gdr_fwd,
        fused_gdr_dh, correct_terminal_states, fused_gdr_bwd,
    )  # fmt: skip
    return SimpleNamespace(CHUNK_SIZE=CHUNK_SIZE, **{function.__name__: function for function in names})


class Chunk(NamedTuple):
    piece: int
    index: int
    """Among the chunks of its piece."""
    rows: slice


def chunks_of(ends: Tensor) -> list[Chunk]:
    """Those with a token in them, of the table that comes with `ends`."""
    size, _, most, table = ends._flash_qla_prepared_varlen  # type: ignore[attr-defined]
    assert size == CHUNK_SIZE
    assert table.shape == (most, 2)
    assert ends.dtype == table.dtype == torch.int32
    found = []
    for piece, index in table.tolist():
        left = int(ends[piece]) + index * CHUNK_SIZE
        right = min(left + CHUNK_SIZE, int(ends[piece + 1]))
        if left < right:
            found.append(Chunk(piece, index, slice(left, right)))
    assert len({chunk[:2] for chunk in found}) == len(found), "a chunk twice"
    return found


def by_piece(ends: Tensor) -> list[list[Chunk]]:
    found: list[list[Chunk]] = [[] for _ in range(ends.numel() - 1)]
    for chunk in chunks_of(ends):
        found[chunk.piece].append(chunk)
    return found


def fits(state_v_first: bool, *tensors: Tensor | None) -> None:
    """What all kernels ask of what they read: states of the keys first, and every tensor contiguous."""
    assert not state_v_first
    assert all(t.is_contiguous() for t in tensors if t is not None)


def nothing(*size: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(size, math.nan, dtype=dtype or like.dtype)


# ------------------------------------------------------------------------------------------------------ whole kernels


def chunk_local_cumsum(
    g: Tensor, chunk_size: int = 64, cu_seqlens: Tensor | None = None, reverse: bool = False,
    zero_last_chunk: bool = False,
) -> Tensor:  # fmt: skip
    assert g.is_contiguous()
    assert cu_seqlens is not None
    out = torch.zeros_like(g) if zero_last_chunk else torch.full_like(g, math.nan)
    for chunk in chunks_of(cu_seqlens):
        part = g[0, chunk.rows]
        out[0, chunk.rows] = part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)
    return out


def kkt_solve(k: Tensor, b: Tensor, chunk_size: int = 64, cu_seqlens: Tensor | None = None) -> Tensor:
    fits(False, k, b, cu_seqlens)
    assert cu_seqlens is not None
    out = nothing(1, k.shape[1], b.shape[2], CHUNK_SIZE, like=k)
    for chunk in chunks_of(cu_seqlens):
        length = chunk.rows.stop - chunk.rows.start
        out[0, chunk.rows, :, :length] = inverse(of_heads(k, b, chunk), b[0, chunk.rows].t()).transpose(0, 1)
    return out


def of_heads(x: Tensor, b: Tensor, chunk: Chunk) -> Tensor:
    """[G, L, ...] of a chunk, each head as often as value heads share it."""
    return x[0, chunk.rows].repeat_interleave(b.shape[2] // x.shape[2], 1).transpose(0, 1)


def inverse(k: Tensor, b: Tensor) -> Tensor:
    """(I + tril(b k k^T, -1))^-1, without the decay: k [G, L, K], b [G, L]."""
    return torch.linalg.inv(torch.eye(k.shape[1]) + (b.unsqueeze(-1) * k @ k.mT).tril(-1))


def step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, b: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One chunk's output and the state after it, for [G, L, ...]; `g` summed from the chunk's start."""
    between = torch.exp((g.unsqueeze(-1) - g.unsqueeze(-2)).tril()).tril()
    new = (a * between * b.unsqueeze(-2)) @ (v - g.exp().unsqueeze(-1) * (k @ state))
    out = scale * (g.exp().unsqueeze(-1) * (q @ state) + (between * (q @ k.mT)) @ new)
    last = g[:, -1:]
    return out, last.exp().unsqueeze(-1) * state + ((last - g).exp().unsqueeze(-1) * k).mT @ new


def taken(q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, b: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
    length = chunk.rows.stop - chunk.rows.start
    return (
        of_heads(q, b, chunk), of_heads(k, b, chunk), v[0, chunk.rows].transpose(0, 1),
        a[0, chunk.rows, :, :length].transpose(0, 1), g[0, chunk.rows].t(), b[0, chunk.rows].t(),
    )  # fmt: skip


def fused_gdr_fwd(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, b: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = True, output_h: bool = False,
    output_o: bool = True, cu_seqlens: Tensor | None = None, cp_seq_map: Tensor | None = None,
    raw_cu_seqlens: Tensor | None = None, state_v_first: bool = False,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    fits(state_v_first, q, k, v, a, g, b, initial_state, cu_seqlens, cp_seq_map, raw_cu_seqlens)
    assert scale
    assert cu_seqlens is not None
    assert cp_seq_map is not None
    assert raw_cu_seqlens is not None
    heads, width = v.shape[2:]
    out = torch.full_like(v, math.nan)
    finals = nothing(raw_cu_seqlens.numel() - 1, heads, k.shape[3], width, like=g)
    for piece, chunks in enumerate(by_piece(cu_seqlens)):
        state = g.new_zeros(heads, k.shape[3], width) if initial_state is None else initial_state[piece]
        for chunk in chunks:
            part, state = step(*taken(q, k, v, a, g, b, chunk), state, scale)
            out[0, chunk.rows] = part.transpose(0, 1)
        sequence = int(cp_seq_map[piece])
        if cu_seqlens[piece + 1] == raw_cu_seqlens[sequence + 1]:
            finals[sequence] = state
    return out, None, finals if output_final_state else None


def fused_gdr_h(
    k: Tensor, v: Tensor, a: Tensor, g: Tensor, b: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = True, output_h: bool = True, cu_seqlens: Tensor | None = None,
    num_warmup_chunks: Tensor | None = None, state_v_first: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The states before each chunk; or, of so many last chunks of each piece, what they make of 0 and their product."""
    fits(state_v_first, k, v, a, g, b, initial_state, cu_seqlens, num_warmup_chunks)
    assert cu_seqlens is not None
    heads, width, key_width = v.shape[2], v.shape[3], k.shape[3]
    pieces = by_piece(cu_seqlens)
    if num_warmup_chunks is None:
        _, offsets, most, _ = cu_seqlens._flash_qla_prepared_varlen  # type: ignore[attr-defined]
        states = nothing(1, most, heads, key_width, width, like=g)
        for piece, chunks in enumerate(pieces):
            state = g.new_zeros(heads, key_width, width) if initial_state is None else initial_state[piece]
            for chunk in chunks:
                states[0, int(offsets[piece]) + chunk.index] = state
                _, state = step(*taken(k, k, v, a, g, b, chunk), state, 1.0)
        return states, None, None
    assert initial_state is None
    made = nothing(len(pieces), heads, key_width, width, like=g)
    products = nothing(len(pieces), heads, key_width, key_width, like=g)
    for (piece, chunks), head in itertools.product(enumerate(pieces), range(heads)):
        count = int(num_warmup_chunks[piece, head])
        state, product = g.new_zeros(heads, key_width, width), torch.eye(key_width).expand(heads, -1, -1)
        for chunk in chunks[len(chunks) - count :]:
            values = taken(k, k, v, a, g, b, chunk)
            _, state = step(*values, state, 1.0)
            _, product = step(*values[:2], torch.zeros_like(values[1]), *values[3:], product, 1.0)
        made[piece, head] = state[head]
        if count == len(chunks):
            products[piece, head] = product[head]
    return None, made, products


def get_warmup_chunks_bidi(
    g: Tensor, cu_seqlens: Tensor, ht_mask_fwd: Tensor, ht_mask_bwd: Tensor, chunk_size: int = 64,
    threshold: float = -10.0, seq_map_r2c: Tensor | None = None, force_inter_boundaries: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """For how many chunks to look back from a piece's end, and on from its start; and whether over all of them."""
    fits(False, g, cu_seqlens, ht_mask_fwd, ht_mask_bwd, seq_map_r2c)
    pieces = by_piece(cu_seqlens)
    counts = torch.zeros(2, len(pieces), g.shape[2], dtype=torch.int32)
    reaches = torch.zeros(2, len(pieces), g.shape[2], dtype=torch.bool)
    for (piece, chunks), head in itertools.product(enumerate(pieces), range(g.shape[2])):
        sums = [float(g[0, chunk.rows.stop - 1, head]) for chunk in chunks]
        for way, (masked, ordered) in enumerate(((ht_mask_fwd, sums[::-1]), (ht_mask_bwd, sums))):
            if masked[piece]:
                continue
            far = [n + 1 for n, total in enumerate(itertools.accumulate(ordered)) if total < threshold]
            counts[way, piece, head] = far[0] if far else len(chunks)
            reaches[way, piece, head] = not far
    return counts.amax(0), counts[1], reaches[0], reaches[1]


def correct_initial_states(
    raw_h0: Tensor | None, ht_buffer: Tensor, mt_buffer: Tensor, fallback_mask: Tensor, seq_map_r2c: Tensor,
    state_v_first: bool = False,
) -> Tensor:  # fmt: skip
    fits(state_v_first, raw_h0, ht_buffer, mt_buffer, fallback_mask, seq_map_r2c)
    return _join(raw_h0, ht_buffer, mt_buffer, fallback_mask, seq_map_r2c, reverse=False)


def correct_terminal_states(
    raw_dht: Tensor | None, dht_buffer: Tensor, mt_buffer: Tensor, fallback_mask: Tensor, seq_map_r2c: Tensor,
    state_v_first: bool = False,
) -> Tensor:  # fmt: skip
    fits(state_v_first, raw_dht, dht_buffer, mt_buffer, fallback_mask, seq_map_r2c)
    return _join(raw_dht, dht_buffer, mt_buffer, fallback_mask, seq_map_r2c, reverse=True)


def _join(
    first: Tensor | None, made: Tensor, products: Tensor, reaches: Tensor, first_of: Tensor, *, reverse: bool
) -> Tensor:
    out = torch.full_like(made, math.nan)
    for sequence, (begin, end) in enumerate(itertools.pairwise(first_of.tolist())):
        state = torch.zeros_like(made[0]) if first is None else first[sequence]
        for piece in reversed(range(begin, end)) if reverse else range(begin, end):
            out[piece] = state
            product = products[piece].mT if reverse else products[piece]
            carried = torch.where(reaches[piece].view(-1, 1, 1), product @ state, torch.zeros_like(state))
            state = made[piece] + carried
    return out


def fused_gdr_dh(
    q: Tensor, k: Tensor, a: Tensor, g: Tensor, b: Tensor, do: Tensor, dht: Tensor | None = None,
    output_dh0: bool = True, output_dh: bool = True, scale: float | None = None, cu_seqlens: Tensor | None = None,
    num_warmup_chunks: Tensor | None = None, state_v_first: bool = False,
) -> tuple[None, Tensor]:  # fmt: skip
    """The gradient of each piece's first state, from the outputs of so many first chunks."""
    fits(state_v_first, q, k, a, g, b, do, cu_seqlens, num_warmup_chunks)
    assert dht is None
    assert scale
    assert cu_seqlens is not None
    assert num_warmup_chunks is not None
    heads, width = do.shape[2:]
    pieces = by_piece(cu_seqlens)
    out = nothing(len(pieces), heads, k.shape[3], width, like=g)
    for (piece, chunks), head in itertools.product(enumerate(pieces), range(heads)):
        with torch.enable_grad():
            state = first = g.new_zeros(heads, k.shape[3], width).requires_grad_()
            total = (0 * first).sum()
            for chunk in chunks[: int(num_warmup_chunks[piece, head])]:
                values = taken(q, k, torch.zeros_like(do), a, g, b, chunk)
                part, state = step(*values, state, scale)
                total = total + (part * do[0, chunk.rows].transpose(0, 1)).sum()
            (grad,) = torch.autograd.grad(total, [first])
        out[piece, head] = grad[head]
    return None, out


def fused_gdr_bwd(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, b: Tensor, do: Tensor, dht: Tensor | None, h: Tensor,
    scale: float | None = None, cu_seqlens: Tensor | None = None, chunk_size: int = 64, state_v_first: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of q and k one gradient for each value head; of `g`, which is summed from each chunk's start."""
    fits(state_v_first, q, k, v, a, g, b, do, dht, h, cu_seqlens)
    assert scale
    assert cu_seqlens is not None
    heads, width = v.shape[2:]
    pieces = by_piece(cu_seqlens)
    _, offsets, _, _ = cu_seqlens._flash_qla_prepared_varlen  # type: ignore[attr-defined]
    grads = [torch.full_like(t, math.nan) for t in (v[..., :1].expand(*v.shape[:3], k.shape[3]),) * 2 + (v, g, b)]
    starts = nothing(len(pieces), heads, k.shape[3], width, like=g)
    wide = heads // q.shape[2]
    for piece, chunks in enumerate(pieces):
        with torch.enable_grad():
            leaves = [t.repeat_interleave(n, 2).requires_grad_() for t, n in ((q, wide), (k, wide), (v, 1))]
            leaves += [t.clone().requires_grad_() for t in (g, b)]
            first = h[0, int(offsets[piece])] if chunks else g.new_zeros(heads, k.shape[3], width)
            state = first = first.clone().requires_grad_()
            total = (0 * first).sum() + sum((0 * leaf).sum() for leaf in leaves)
            for chunk in chunks:
                values = list(taken(*leaves[:3], a, *leaves[3:], chunk))
                solved = inverse(values[1], values[5])
                assert torch.allclose(solved, values[3], atol=1e-4)
                values[3] = solved
                part, state = step(*values, state, scale)
                total = total + (part * do[0, chunk.rows].transpose(0, 1)).sum()
            if dht is not None:
                total = total + (state * dht[piece]).sum()
            *found, starts[piece] = torch.autograd.grad(total, [*leaves, first])
        rows = slice(int(cu_seqlens[piece]), int(cu_seqlens[piece + 1]))
        for grad, part in zip(grads, found, strict=True):
            grad[0, rows] = part[0, rows]
    dq, dk, dv, dg, db = grads
    return dq, dk, dv, dg, db, starts
