"""What `python -m benchmarks list` says."""

from __future__ import annotations

import torch

from fusepatch import table

from .arms import ARMS, why_unavailable
from .cases import ALL, GROUPS, Case


def render() -> str:
    """The arms with what is missing here, and the groups of shapes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arms = table.render(
        ("arm", "by default", f"here ({device})", "what"),
        [
            (
                arm.name,
                "yes" if arm.by_default else "no",
                why_unavailable(arm, Case(GROUPS["bench"][0], device=device)) or "yes",
                arm.what,
            )
            for arm in ARMS
        ],
    )
    shapes = table.render(("shapes", ""), [(name, " ".join(map(str, found))) for name, found in GROUPS.items()])
    return f"{arms}\n\n{shapes}\nall: {', '.join(ALL)}"
