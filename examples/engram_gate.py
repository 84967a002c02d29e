"""Conditional memory for a language model: n-gram lookup, projection to keys and a value, and the Engram gate.

    python examples/engram_gate.py [--device cuda] [--steps 60]

Trains on a text whose next token is a function of the last two, which the token itself does not tell: what the model
learns, it has from its memory. Prints the loss. On a GPU, FUSEPATCH_ENGRAM_GATE_BACKEND=triton runs the kernels.

Tensors: B batch, T length, S streams, D width of a stream, E width of a looked-up embedding, N sizes of n-grams.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusepatch.ops import EngramGate

VOCABULARY, PADDING = 32, 0


class NGramMemory(nn.Module):
    """Embeddings of the n-grams that end at each token, found by hashing: ids [B, T] to [B, T, E]."""

    def __init__(self, sizes: tuple[int, ...], rows: int, width: int) -> None:
        super().__init__()
        self.sizes, self.rows = sizes, rows
        self.tables = nn.ModuleList(nn.Embedding(rows, width // len(sizes)) for _ in sizes)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """One table for each size of n-grams; before the first token there is padding."""
        found = []
        for size, table in zip(self.sizes, self.tables, strict=True):
            hashed = torch.zeros_like(ids_BT)
            for back in range(size):
                earlier = F.pad(ids_BT, (back, 0), value=PADDING)[:, : ids_BT.shape[1]]
                hashed = (hashed * 1_000_003 + earlier + 1) % self.rows
            found.append(table(hashed))
        return torch.cat(found, -1)


class Engram(nn.Module):
    """Adds what is remembered of the last tokens to every stream, as far as the stream asks for it.

    One projection makes the S keys and the value, which the gate reads as they are, with no copy in between.
    """

    def __init__(self, streams: int, width: int, memory_width: int, rows: int) -> None:
        super().__init__()
        self.memory = NGramMemory((2, 3), rows, memory_width)
        self.kv_proj = nn.Linear(memory_width, (streams + 1) * width, bias=False)
        self.gate = EngramGate(streams, width)

    def forward(self, x_BTSD: Tensor, ids_BT: Tensor) -> Tensor:
        """Padding is left as it is."""
        return self.gate(x_BTSD, self.kv_proj(self.memory(ids_BT)), ids_BT != PADDING)


class Model(nn.Module):
    """Token embedding, streams, memory, head: no attention, so that nothing but the memory sees an earlier token."""

    def __init__(self, streams: int = 4, width: int = 64, memory_width: int = 96, rows: int = 4096) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.streams = nn.Parameter(torch.randn(streams, width))
        self.engram = Engram(streams, width, memory_width, rows)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, VOCABULARY]."""
        x_BTSD = self.embedding(ids_BT).unsqueeze(-2) + self.streams
        return self.head(self.engram(x_BTSD, ids_BT).mean(-2))


def text(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Sequences in which each token follows from the two before it, and the first two are random; some padding."""
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    for at in range(2, length):
        ids[:, at] = 1 + (ids[:, at - 1] * 7 + ids[:, at - 2] * 11) % (VOCABULARY - 1)
    ids[0, -3:] = PADDING
    return ids


def train(steps: int, device: str = "cpu") -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(steps):
        ids = text(32, 24, generator).to(device)
        logits = model(ids[:, :-1])[:, 1:]  # the second token can't be foretold
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    losses = train(arguments.steps, arguments.device)
    for step in range(0, len(losses), max(1, len(losses) // 6)):
        print(f"step {step:3d}   loss {losses[step]:.3f}")
    print(f"last       loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
