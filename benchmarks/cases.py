"""What is measured: shapes, and a case, which is a shape with everything else that decides what runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ACTIVATIONS = ("silu", "gelu_tanh")
LAYOUTS = ("separate", "packed")
MODES = ("train", "forward", "backward", "memory", "host", "power")
"""Forward and backward with all gradients; each alone; what a stack of eight holds; the host's time for both; the GPU's
clock and power while both run on and on, where it is asked for."""


@dataclass(frozen=True)
class Shape:
    """M tokens, H hidden size, I intermediate size."""

    tokens: int
    hidden: int
    inner: int

    def __str__(self) -> str:
        return f"M{self.tokens}_H{self.hidden}_I{self.inner}"


GROUPS: dict[str, tuple[Shape, ...]] = {
    "bench": (
        Shape(16384, 1024, 3072),
        Shape(8192, 2048, 8192),
        Shape(8192, 4096, 14336),
        Shape(8192, 5120, 17408),
    ),
    "decode": (Shape(1, 4096, 14336), Shape(7, 4096, 14336), Shape(64, 4096, 14336)),
    "odd": (Shape(4099, 4096, 11008),),
    "tiny": (Shape(48, 64, 96), Shape(7, 64, 96)),
}
ALL = ("bench", "decode", "odd")
"""What `all` means."""


def modes_of(shape: Shape) -> tuple[str, ...]:
    """The modes that say something of a shape: nobody trains on a handful of tokens."""
    return ("forward",) if shape in GROUPS["decode"] else tuple(mode for mode in MODES if mode != "power")


HOST_SHAPE = Shape(64, 1024, 3072)
"""Where the GPU is done before the host is: the shape at which the host's own time is measured."""


@dataclass(frozen=True)
class Case:
    """One problem that every arm solves."""

    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    layout: str = "separate"
    """Whether a model that is stock keeps gate and up in two weights or in one."""
    device: str = "cuda"

    def __str__(self) -> str:
        """The name in the results: the shape, and what is not as it usually is."""
        usual = Case(self.shape)
        (short,) = (name for name, dtype in DTYPES.items() if dtype is self.dtype)
        parts = [
            str(self.shape),
            *([short] if self.dtype is not usual.dtype else []),
            *([self.activation] if self.activation != usual.activation else []),
            *([self.layout] if self.layout != usual.layout else []),
        ]
        return "_".join(parts)


def parse_shapes(words: list[str]) -> list[Shape]:
    """Groups and M,H,I triplets, in the order given and each once. Raises ValueError for what is neither."""
    found: dict[Shape, None] = {}
    for word in words:
        if word == "all":
            found.update(dict.fromkeys(shape for group in ALL for shape in GROUPS[group]))
        elif word in GROUPS:
            found.update(dict.fromkeys(GROUPS[word]))
        else:
            found[_parse_shape(word)] = None
    return list(found)


def _parse_shape(word: str) -> Shape:
    return Shape(*three_sizes(word, f"is neither all, {', '.join(GROUPS)} nor M,H,I such as 8192,2048,8192"))


def three_sizes(word: str, else_it: str) -> tuple[int, int, int]:
    """Three positive numbers with commas between them. Raises ValueError for anything else: `word` and `else_it`."""
    try:
        first, second, third = (int(part) for part in word.split(","))
    except ValueError:
        raise ValueError(f"{word!r} {else_it}") from None
    if min(first, second, third) < 1:
        raise ValueError(f"{word!r} has a size below 1")
    return first, second, third
