"""Which libraries are installed, in which versions, and whether they import: asked in a child process first."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__, importhook
from ..errors import type_and_first_line
from .child import MARK
from .diagnosis import Gpu, Version
from .findings import PROBLEM, WARNING, Examination

IMPORT_LIMIT_S = 180.0


@dataclass(frozen=True)
class Package:
    """A library that fusepatch works with: the name it is installed under, the one it is imported by, our extra."""

    distribution: str
    module: str
    extra: str
    """Empty for torch, which fusepatch itself requires; `cuda` for that of torch's CUDA version."""


PACKAGES = (
    Package("torch", "torch", ""),
    Package("triton", "triton", "cuda"),
    Package("transformers", "transformers", "hf"),
    Package("flash-linear-attention", "fla", "fla"),
    Package("nvidia-cutlass-dsl", "cutlass", "cuda"),
    Package("nvidia-cudnn-frontend", "cudnn", "cuda"),
)


@dataclass(frozen=True)
class Imported:
    """How the import of a library went in a child process."""

    version: str
    error: str
    loaded: tuple[str, ...]
    """The CUDA libraries that were loaded after it."""


def import_in_child(modules: Sequence[str], *, limit_s: float = IMPORT_LIMIT_S) -> dict[str, Imported]:
    """Imports each module in a child process; one that kills or hangs the child is noted, and the rest go on."""
    results: dict[str, Imported] = {}
    left = list(modules)
    while left:
        marks, ending = _run_child(left, limit_s)
        done = {mark["name"]: mark for mark in marks if "error" in mark}
        for name, mark in done.items():
            results[name] = Imported(mark["version"], mark["error"], tuple(mark["loaded"]))
        left = [name for name in left if name not in done]
        if left:
            results[left.pop(0)] = Imported("", ending, ())
    return results


def _run_child(modules: Sequence[str], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """The child's marks, and how it ended."""
    command = [sys.executable, "-m", "fusepatch.doctor.child", *modules]
    try:
        # In our own folder, for the reason that selfcheck.run() gives.
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
        output, code = done.stdout, done.returncode
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        ending = f"the interpreter ended while it was imported: {': '.join([how, *last])}"
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"the import did not end within {limit_s:.0f} s"
    except OSError as error:
        output, ending = b"", f"no child process could be started: {error}"
    lines = output.decode(errors="replace").splitlines()
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)], ending


def import_torch(it: Examination, imported: Mapping[str, Imported]) -> Any:
    """torch, or None. Where the child could not import it this process does not try, since it may not survive."""
    if "torch" not in imported or imported["torch"].error:
        return None
    return it.attempt("what torch says", lambda: importlib.import_module("torch"), None)


def installed_versions(it: Examination, imported: Mapping[str, Imported], cuda: str | None) -> tuple[Version, ...]:
    """Python, fusepatch and the libraries that it works with; what is wrong with them is a finding."""
    nothing: dict[str, Any] = {}
    wanted = it.attempt("which versions fusepatch requires", lambda: _requirements(cuda), nothing)
    rows = [Version("fusepatch", __version__, ""), Version("Python", platform.python_version(), sys.executable)]
    rows += [_version(it, package, imported.get(package.module), wanted, cuda) for package in PACKAGES]
    _judge_cutlass(it, cuda)
    return tuple(rows)


def _version(
    it: Examination, package: Package, imported: Imported | None, wanted: Mapping[str, Any], cuda: str | None
) -> Version:
    name = package.distribution
    install = f"pip install {requirement(package.extra, cuda)}"
    recorded, damage = _recorded_version(name)
    if damage:
        it.add(WARNING, f"the metadata of {name} can't be read: {damage}", f"pip install --force-reinstall {name}")
    if imported is None:
        if recorded is not None:
            it.add(
                PROBLEM,
                f"{name} {recorded} is half-installed: pip lists it, and there is no module `{package.module}`",
                f"pip install --force-reinstall {name}",
            )
        elif not package.extra:
            it.add(PROBLEM, f"{name} is not installed", install)
        return Version(name, recorded, "half-installed" if recorded else f"not installed; {install}")
    version = recorded or imported.version or None
    if imported.error:
        it.add(PROBLEM, f"{name} does not import: {imported.error}", f"pip install --force-reinstall {name}")
        return Version(name, version, "does not import")
    if version is not None and name in wanted and not wanted[name].contains(version, prereleases=True):
        it.add(WARNING, f"{name} is {version}, and fusepatch is made for {wanted[name]}", install)
        return Version(name, version, f"fusepatch is made for {wanted[name]}")
    return Version(name, version, "")


def requirement(extra: str, cuda: str | None) -> str:
    """What to install to have the libraries of one of our extras; torch where it is empty."""
    if not extra:
        return '"torch>=2.11"'
    return f'"fusepatch[{_cuda_extra(cuda) if extra == "cuda" else extra}]"'


_IN_NO_EXTRA = {"flash_qla": "flash-qla", "tilelang": "flash-qla"}
"""Modules that none of our extras brings, and what does."""


def install(missing: Sequence[str], cuda: str | None) -> str:
    """The command that brings these modules, which a backend needs."""
    wanted = dict.fromkeys(_IN_NO_EXTRA.get(module) or requirement("cuda", cuda) for module in missing)
    return f"pip install {' '.join(wanted)}"


def _cuda_extra(cuda: str | None) -> str:
    return "cuda12" if (cuda or "").startswith("12.") else "cuda13"


def _recorded_version(distribution: str) -> tuple[str | None, str]:
    """The version that pip's records give, None where there is none; and what is wrong with the records."""
    try:
        version: str | None = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    except Exception as error:  # whatever a damaged folder makes the standard library raise
        return None, type_and_first_line(error)
    return version, "" if version else "it names no version"


def _requirements(cuda: str | None) -> dict[str, Any]:
    """The versions that our own metadata asks for, as far as there is metadata and a library that can read it."""
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires("fusepatch") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return {}
    extras = ("", "hf", "fla", _cuda_extra(cuda))
    parsed = [Requirement(line) for line in lines]
    return {
        each.name: each.specifier
        for each in parsed
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    }


def _judge_cutlass(it: Examination, cuda: str | None) -> None:
    """The DSL takes its libraries from a wheel per CUDA major; that of torch's major must be among those installed."""
    major = (cuda or "").partition(".")[0]
    if not major or _recorded_version("nvidia-cutlass-dsl")[0] is None:
        return
    libraries = f"nvidia-cutlass-dsl-libs-cu{major}"
    if _recorded_version(libraries) == (None, ""):
        it.add(
            WARNING,
            f"torch is built for CUDA {cuda}, and nvidia-cutlass-dsl is installed without {libraries}",
            f"pip install {requirement('cuda', cuda)}",
        )


def judge_fla(it: Examination, gpus: Sequence[Gpu]) -> None:
    """FLA refuses the backward pass of its scalar-gated ops on Hopper with those Tritons that compile it wrongly."""
    triton = _recorded_version("triton")[0] or ""
    numbers = tuple(int(part) for part in triton.split("+")[0].split(".")[:3] if part.isdigit())
    if (
        any(gpu.capability == "9.0" for gpu in gpus)
        and _recorded_version("flash-linear-attention")[0] is not None
        and (3, 4) <= numbers < (3, 7, 1)
        and not importhook.is_installed("tilelang")
    ):
        it.add(
            WARNING,
            f"flash-linear-attention can't train Gated DeltaNet here: with Triton {triton} on Hopper the backward pass "
            "of its ops with one gate per head raises (KDA is not concerned)",
            "pip install -U 'triton>=3.7.1', or pip install tilelang",
        )
