"""How a kernel cuts its work up. Without the CuTe DSL, so that its rules need no import of that."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH_K = 64
"""Columns of K per stage: 128 bytes, the widest swizzle."""
SHARED_LIMIT = 232448
"""Bytes of shared memory that a block may ask for on SM90, SM100 and SM103."""
BARRIER_BYTES = 1536
"""Set aside for barriers, constants, and the alignment of buffers to 1024 bytes."""
ACCUMULATORS = 2
"""On SM100, tiles whose results tensor memory holds: one that the tensor cores fill, one that the epilogue reads."""


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work up."""

    rows: int
    columns: int
    """Rows of B in a stage; where B has two halves, of both together."""
    stages: int
    cluster: int
    """CTAs that share B: 1 or 2. On SM100, 1."""
    group: int
    """Clusters along M that are worked on before the next columns: what they read of A and B stays in L2."""

    @property
    def stage_bytes(self) -> int:
        """Of one stage of A and B."""
        return (self.rows + self.columns) * WIDTH_K * 2
