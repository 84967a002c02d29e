"""`fusepatch demo`: patch a small model with real weights, compare everything that counts, and undo it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CommandError, first_line
from .text import PROMPT

__all__ = ["PROMPT", "Options", "run"]

_BACKEND = "FUSEPATCH_GATED_MLP_BACKEND"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    prompt: str
    tokens: int
    gguf: Path | None = None
    json: Path | None = None


def run(options: Options) -> int:
    """The whole demo; 0 where every promise held, else 1.

    Raises CommandError, with nothing patched, where it can't be shown.
    """
    if options.json is not None and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        raise CommandError(f"can't write {options.json}: not a file in a folder that exists")
    # Offline, for the model is here; the log line at info would repeat what the demo prints. The libraries read some
    # of these when they are imported, so nothing that imports them comes before.
    with _environment(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", FUSEPATCH_LOG="warning"):
        from . import weights

        figures = _show(options, weights.find_gguf(options.gguf))
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(figures, indent=2, default=dataclasses.asdict) + "\n")
        except OSError as error:
            raise CommandError(f"can't write {options.json}: {error.strerror or error}") from None
    failures: list[str] = figures["failures"]
    print("\nFAIL: " + "; ".join(failures) if failures else "\nPASS: every check above held.", flush=True)
    return 1 if failures else 0


def _show(options: Options, path: Path) -> dict[str, Any]:
    """Prints the demo; returns its figures."""
    from .. import entry, settings
    from ..decline import DeclinedError

    try:
        settings.read()
    except settings.SettingsError as error:
        raise CommandError(str(error)) from None
    try:
        with _quiet_transformers():
            from .steps import show

            return show(options, path)
    except DeclinedError as error:
        raise CommandError(f"strict mode stopped the demo: {first_line(error)}") from None
    finally:
        with contextlib.suppress(DeclinedError):  # nothing is left, also where a step raised
            entry.restore()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets those of the variables that the user has not set, for as long as the block runs."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def rehearsal(needed: bool) -> Iterator[None]:
    """Names the backend that runs anywhere, where no other serves this device."""
    with _environment(**{_BACKEND: "reference"} if needed else {}):
        yield


def may_rehearse() -> bool:
    """Whether the choice of a backend is ours: the user has made none."""
    return not os.environ.get(_BACKEND)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    import transformers

    log: Any = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)
        sys.stdout.flush()
