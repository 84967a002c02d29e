"""How the demo talks: numbered headings, indented text, and a spinner where somebody watches."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Iterator

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


def mebibytes(size: int | None) -> str:
    """A number of bytes, to read."""
    return "n/a" if size is None else f"{size / 2**20:.0f} MiB"
