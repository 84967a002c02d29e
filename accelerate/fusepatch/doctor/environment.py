"""The settings, and the folder where compiled kernels, self-check verdicts and profiles are kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .. import settings
from .diagnosis import Cache, Setting
from .findings import PROBLEM, WARNING, Examination


def valid_settings(it: Examination, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ours that are valid; each of the others is a finding."""
    valid = {}
    for name, text in environ.items():
        if name == settings.PREFIX or name.startswith(settings.PREFIX + "_"):
            try:
                settings.read({name: text})
            except settings.SettingsError as error:
                what = str(error).splitlines()[0].removesuffix(" Valid ones:").removesuffix(".")
                it.add(PROBLEM, what, "correct or unset it, since accelerate() raises for it")
            else:
                valid[name] = text
    return valid


def settings_table(current: settings.Settings, valid: Mapping[str, str]) -> tuple[Setting, ...]:
    """Every environment variable of ours, as it is or by default."""

    def value(variable: settings.EnvVar) -> str:
        given = valid.get(variable.name)
        is_cache = variable.name == f"{settings.PREFIX}_CACHE_DIR"
        return given or (str(current.cache_dir) if is_cache else variable.default)

    return tuple(
        Setting(variable.name, value(variable), bool(valid.get(variable.name))) for variable in settings.TABLE.values()
    )


def cache_folder(it: Examination, path: Path) -> Cache:
    """The folder, and whether it can be written; it is not made."""
    why_not = _why_not_writable(path)
    if why_not:
        it.add(
            WARNING,
            f"the cache folder {path} can't be written: {why_not}. Each process checks its kernels again",
            f"make it writable, or set {settings.PREFIX}_CACHE_DIR to a folder that is",
        )
    return Cache(str(path), not why_not, why_not)


def _why_not_writable(path: Path) -> str:
    """Empty where the folder can be written, or made; it is not made."""
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        if not there.is_dir():
            return f"{there} is not a folder"
        if there == path:
            with tempfile.TemporaryFile(dir=path):
                return ""
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"
