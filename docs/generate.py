"""Writes the documentation that is made from code: the tables of settings and of decline reasons, and the list of
classes that match in the installed transformers.

    python docs/generate.py            writes them
    python docs/generate.py --check    says which are out of date, and exits with 1 if any is
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from fusepatch import catalogue, settings
from fusepatch.decline import Reason

DOCS = Path(__file__).parent
_NOTE = "<!-- Made by `python docs/generate.py` from {source}; do not edit. -->"


def settings_page() -> str:
    """Every environment variable."""
    rows = "\n".join(
        f"| `{v.name}` | {', '.join(f'`{value}`' for value in v.values.split(', '))} | `{v.default}` | {v.meaning} |"
        for v in settings.TABLE.values()
    )
    return f"""# Settings
{_NOTE.format(source="accelerate/fusepatch/settings.py")}

Environment variables, read by `fusepatch.accelerate()`; a change takes effect at the next call of it. An unknown
`FUSEPATCH_*` name or a value that is not listed is an error. An empty value counts as unset.

| variable | values | default | what it does |
| --- | --- | --- | --- |
{rows}
"""


def declines_page() -> str:
    """Every reason."""
    rows = "\n".join(
        f"| `{r.value}` | {r.meaning} | {r.fix} | {'no' if r.chosen else 'yes'} |".replace("<OP>", "&lt;OP&gt;")
        for r in Reason
    )
    return f"""# Why a call was declined
{_NOTE.format(source="accelerate/fusepatch/decline.py")}

The closed list of reasons that `status()` and `explain()` give for a route slower than `fused`. Strict mode raises
`DeclinedError` where the library's own code would run, unless the last column says no.

| reason | what it means | what to do | strict raises |
| --- | --- | --- | --- |
{rows}
"""


def matches_page() -> str:
    """Every class of the installed transformers that is patched, by where it keeps its gate."""
    target = next(target for target in catalogue.TARGETS if target.library == "transformers")
    lines = [
        f"{owner.__module__.removeprefix('transformers.models.')}.{owner.__qualname__}"
        for name in _modelling_modules()
        for owner in catalogue.find_in_module(target, sys.modules.get(name))
    ]
    head = f"# gated MLPs that match in transformers {target.version()}: {len(lines)}; made by python docs/generate.py"
    return "\n".join([head, *sorted(lines), ""])


def _modelling_modules() -> Iterator[str]:
    """Imports every modelling file of transformers, and names those that can be imported here."""
    models = importlib.import_module("transformers.models")
    for package in pkgutil.iter_modules(models.__path__, "transformers.models."):
        folder = [str(Path(path) / package.name.rpartition(".")[2]) for path in models.__path__]
        for module in pkgutil.iter_modules(folder, package.name + "."):
            if ".modeling_" in module.name:
                try:
                    importlib.import_module(module.name)
                except ImportError as error:  # needs a package that is not installed, torchaudio say
                    warnings.warn(f"left out {module.name}: {error}", stacklevel=2)
                    continue
                yield module.name


def pages() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    version = next(target for target in catalogue.TARGETS if target.library == "transformers").version()
    return {
        DOCS / "settings.md": settings_page(),
        DOCS / "declines.md": declines_page(),
        DOCS / "matches" / f"transformers-{version}.txt": matches_page(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is out of date")
    check = parser.parse_args().check
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
