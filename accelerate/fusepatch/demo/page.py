"""How the demo talks: numbered headings, indented text, a spinner where somebody watches, and what was found so far."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INDENT = "   "


def heading(number: int, text: str) -> None:
    """Begins a step."""
    print(f"\n{number}. {text}", flush=True)


def say(text: object) -> None:
    """Prints lines of a step as they are."""
    print(textwrap.indent(str(text), INDENT), flush=True)


def say_wrapped(text: str) -> None:
    """Prints running text of a step, broken into lines."""
    print(textwrap.fill(text, 116, initial_indent=INDENT, subsequent_indent=INDENT), flush=True)


class Stopwatch:
    """Seconds that a piece of work took."""

    seconds = 0.0


@contextlib.contextmanager
def working(what: str) -> Iterator[Stopwatch]:
    """Says on stderr that `what` is going on, where somebody watches: by a spinner, where rich is installed."""
    watch, start = Stopwatch(), time.perf_counter()
    with _spinner(what) if sys.stderr.isatty() else contextlib.nullcontext():
        yield watch
    watch.seconds = time.perf_counter() - start


def _spinner(what: str) -> contextlib.AbstractContextManager[object]:
    try:
        from rich.console import Console
    except ImportError:
        print(f"{INDENT}... {what}", file=sys.stderr, flush=True)
        return contextlib.nullcontext()
    spinner: contextlib.AbstractContextManager[object] = Console(stderr=True).status(f"{what} ...")
    return spinner


@dataclass
class Shown:
    """What has been found so far, for the JSON file and the verdict."""

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, held: bool, failure: str) -> str:
        """`PASS`, or `FAIL` with the failure noted."""
        if not held:
            self.failures.append(failure)
        return "PASS" if held else "FAIL"

    def expect_native(self, calls: int, when: str, expected: int | None = None) -> None:
        """Says how many calls ran natively. Fewer than expected, or none, is a failure: nothing was shown then."""
        held = calls > 0 and expected in (None, calls)
        of = "" if expected is None else f" of {expected}"
        verdict = self.expect(held, f"{calls}{of} calls ran natively {when}")
        say(f"{verdict}: {calls}{of} calls ran natively.")


def mebibytes(size: int | None) -> str:
    """A number of bytes, to read."""
    return "n/a" if size is None else f"{size / 2**20:.0f} MiB"


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
