"""The child process of `doctor`: `python -m fusepatch.doctor.child NAME ...` imports each library in turn.

A child, because a half-installed library may crash the interpreter, and because some initialise CUDA when they are
imported. It prints one marked line before each import and one after it; packages.import_in_child() reads them.
"""

from __future__ import annotations

import importlib
import json
import sys

from ..errors import type_and_first_line
from .cuda_libraries import loaded_now

MARK = "fusepatch-doctor "


def say(**fields: object) -> None:
    """Prints one marked line."""
    print(MARK + json.dumps(fields), flush=True)


def main(names: list[str]) -> int:
    """Imports `names`, and says after each what it is and which CUDA libraries are loaded."""
    for name in names:
        say(name=name)
        version = error = ""
        try:
            version = str(getattr(importlib.import_module(name), "__version__", ""))
        except BaseException as raised:  # whatever a broken library raises, SystemExit among it, is what is asked for
            error = type_and_first_line(raised)
        say(name=name, version=version, error=error, loaded=list(loaded_now()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
