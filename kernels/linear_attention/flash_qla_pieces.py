"""How FlashQLA's kernels cut the tokens up: sequences, the pieces of them that run side by side, and chunks of 64.

FlashQLA's own code reads the ends of sequences on the host, and keeps what it made of them by the identity of the
tensor. Here everything is made on the device: no call waits for it, a CUDA graph can hold it, and a tensor of ends
that is written to again is read again. Where the lengths are known on the device only, the table of chunks has as many
rows as there could be; the rows beyond name chunks after the end of the last sequence, in which no token is.

FlashQLA's numbering of chunks skips sequences without a token, and gives their chunks to the next; this one does not.

Tensors: N sequences, P pieces (at least one for each sequence), C chunks (at least as many as there are).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
_PREPARED = "_flash_qla_prepared_varlen"
"""Where FlashQLA looks for the chunks that belong to a tensor of ends."""


class Pieces(NamedTuple):
    """All int32, on the device."""

    ends: Tensor
    """[P + 1]: where the pieces begin, and the last one ends. FlashQLA finds the chunks by it."""
    sequence_ends: Tensor
    """[N + 1], the same of the sequences."""
    first_of: Tensor
    """[N + 1]: the first piece of each sequence, and P."""
    sequence_of: Tensor
    """[P]: whose piece it is."""
    per_sequence: int
    """1 where no sequence is cut."""

    @property
    def number(self) -> int:
        """P."""
        return self.sequence_of.numel()

    @property
    def is_cut(self) -> bool:
        """Whether there are more pieces than sequences."""
        return self.per_sequence > 1

    def at_an_end(self) -> tuple[Tensor, Tensor]:
        """[P] booleans: which pieces are the last of their sequence, and which the first."""
        place = torch.arange(self.number, device=self.ends.device) % self.per_sequence
        return place == self.per_sequence - 1, place == 0


def of_batch(batch: int, length: int, chunks_per_piece: int | None, device: torch.device) -> Pieces:
    """`batch` sequences of `length` tokens, each in pieces of so many chunks where that is given."""
    chunks = -(-length // CHUNK)
    per_sequence = 1 if chunks_per_piece is None else -(-chunks // chunks_per_piece)
    tokens_per_piece = length if chunks_per_piece is None else chunks_per_piece * CHUNK
    piece = torch.arange(batch * per_sequence + 1, dtype=torch.int32, device=device)
    sequence_of = piece // per_sequence
    ends = sequence_of * length + piece % per_sequence * tokens_per_piece
    sequences = torch.arange(batch + 1, dtype=torch.int32, device=device)
    _note_chunks(ends, batch * chunks)
    return Pieces(ends, sequences * length, sequences * per_sequence, sequence_of[:-1], per_sequence)


def of_sequences(cu_seqlens: Tensor, tokens: int) -> Pieces:
    """The sequences of a row of `tokens` tokens, none of them cut: on the host, nobody knows how long they are."""
    ends = cu_seqlens.to(torch.int32, copy=True).contiguous()  # a copy, since the chunks are noted on it
    sequences = torch.arange(ends.numel(), dtype=torch.int32, device=ends.device)
    _note_chunks(ends, (tokens + (CHUNK - 1) * (ends.numel() - 1)) // CHUNK)
    return Pieces(ends, ends, sequences, sequences[:-1], 1)


def _note_chunks(ends: Tensor, most: int) -> None:
    """Where each piece's chunks begin among all [P + 1], how many there are at most, and [C, 2]: piece, chunk of it."""
    chunks = (ends.diff() + (CHUNK - 1)) // CHUNK
    offsets = torch.nn.functional.pad(chunks.cumsum(0), (1, 0)).to(torch.int32)
    row = torch.arange(most, dtype=torch.int32, device=ends.device)
    piece = torch.searchsorted(offsets[1:], row, right=True, out_int32=True).clamp_(max=chunks.numel() - 1)
    setattr(ends, _PREPARED, (CHUNK, offsets, most, torch.stack([piece, row - offsets[piece]], 1)))
