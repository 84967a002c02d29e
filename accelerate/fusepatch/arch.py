"""The exact table of compute capabilities that kernels are made for.

A leaf: imports nothing of ours. Exact, because neither ">= 10" nor "== (10, 0)" is right: SM120 has no tcgen05
instructions, and B300 is (10, 3). What is not in the table is declined by name.
"""

from __future__ import annotations

from dataclasses import dataclass

Capability = tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """One family of GPUs, and whether kernels of the fused route are made for it."""

    name: str
    fused: bool


_HOPPER = Architecture("Hopper", fused=True)
_BLACKWELL = Architecture("Blackwell data-centre", fused=True)
_AMPERE = Architecture("Ampere", fused=False)
_ADA = Architecture("Ada", fused=False)
_THOR = Architecture("Thor", fused=False)
_BLACKWELL_RTX = Architecture("Blackwell RTX", fused=False)

ARCHITECTURES: dict[Capability, Architecture] = {
    (8, 0): _AMPERE,
    (8, 6): _AMPERE,
    (8, 7): _AMPERE,
    (8, 9): _ADA,
    (9, 0): _HOPPER,
    (10, 0): _BLACKWELL,
    (10, 3): _BLACKWELL,
    (11, 0): _THOR,
    (12, 0): _BLACKWELL_RTX,
    (12, 1): _BLACKWELL_RTX,
}
