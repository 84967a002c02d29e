"""What is wrong, and what to do about it. A leaf, besides errors.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import type_and_first_line

PROBLEM, WARNING = "problem", "warning"

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and what to do about it."""

    level: str
    """`problem`: fusepatch refuses, or a kernel is off. `warning`: it may go wrong."""
    what: str
    fix: str

    def __str__(self) -> str:
        stop = "" if self.what.endswith((".", "?", "!")) else "."
        return f"{self.level}: {self.what}{stop} Fix: {self.fix}."


class Examination:
    """Collects findings. What a section can't find out is a finding too, and the others go on."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, level: str, what: str, fix: str) -> None:
        """One more thing that is wrong."""
        self.findings.append(Finding(level, what, fix))

    def attempt(self, what: str, look: Callable[[], T], otherwise: T) -> T:
        """What `look` returns; where it raises, that is a finding, and `otherwise` is returned."""
        try:
            return look()
        except Exception as error:
            why = type_and_first_line(error)
            self.add(WARNING, f"can't find out {what}: {why}", "please report it, with all of this output")
            return otherwise
