"""The CUDA and cuDNN libraries: which are loaded, which others are installed, and what is wrong with the mixture.

Imports nothing of ours but the record of a finding, and torch not either. torch loads copies of its own; a wheel of
another package, or a folder in LD_LIBRARY_PATH, may hold others, and a library that is loaded later may take those. Two
copies in one process do not share their state, and two versions need not agree.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .findings import Finding

_FILE = re.compile(r"(libcudart|libcublasLt|libcublas|libcudnn|libnvrtc)(?:-[0-9a-f]+)?\.so(?:\.(\d+(?:\.\d+)*))?")
"""The name of the file, with the hash that repaired wheels put into it."""
_OWNERS = re.compile(r"(nvidia|torch|pytorch|cuda)\b", re.IGNORECASE)
"""Names of the distributions that bring such files."""


@dataclass(frozen=True)
class Library:
    """One copy of a library."""

    name: str
    path: str
    owners: tuple[str, ...]
    """The pip distributions that installed the file, each with its version."""
    in_library_path: bool
    """Whether its folder is in LD_LIBRARY_PATH."""
    loaded_by: str
    """The module after whose import it was loaded; empty where it is not loaded."""
    reported: str
    """The version that the loaded library itself answers with; empty where it was not asked."""

    @property
    def version(self) -> str:
        """As exact as is known."""
        return self.reported or self.packaged or self._in_file_name()

    @property
    def packaged(self) -> str:
        """The version of NVIDIA's wheel that brought it, which is the library's own; empty for any other origin."""
        owner, _, version = self.owners[0].rpartition(" ") if len(self.owners) == 1 else ("", "", "")
        return version if owner.startswith("nvidia-") else ""

    @property
    def major(self) -> str:
        """By which programs link to it."""
        return (self._in_file_name() or self.version).partition(".")[0]

    def _in_file_name(self) -> str:
        match = _FILE.fullmatch(Path(self.path).name)
        return (match and match[2]) or ""

    def __str__(self) -> str:
        where = f" of {' and '.join(self.owners)}" if self.owners else ""
        return f"{self.name} {self.version or 'of unknown version'}{where} ({self.path})"


# --------------------------------------------------------------------------------------------------- what is there


def loaded_now() -> tuple[str, ...]:
    """The CUDA libraries that this process has loaded; none where the system does not tell."""
    try:
        return parse_maps(Path("/proc/self/maps").read_text(errors="surrogateescape"))
    except OSError:
        return ()


def parse_maps(text: str) -> tuple[str, ...]:
    """The paths of the CUDA libraries in the text of /proc/<pid>/maps, each once."""
    paths = []
    for line in text.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6:
            path = fields[5].removesuffix(" (deleted)")  # replaced on disk since, as an upgrade does
            if path.startswith("/") and _FILE.fullmatch(Path(path).name):
                paths.append(path)
    return tuple(dict.fromkeys(paths))


def installed_by_pip(
    distributions: Iterable[importlib.metadata.Distribution] | None = None,
) -> tuple[dict[str, tuple[str, ...]], list[Finding]]:
    """The distributions that own each such file, and those whose metadata can't be read."""
    owners: dict[str, tuple[str, ...]] = {}
    findings = []
    for distribution in importlib.metadata.distributions() if distributions is None else distributions:
        name = ""
        try:
            name = distribution.metadata["Name"] or ""
            if not _OWNERS.match(name):
                continue
            label = f"{name} {distribution.version}"
            for file in filter(lambda file: _FILE.fullmatch(file.name), distribution.files or ()):
                path = os.path.realpath(str(distribution.locate_file(file)))
                if label not in owners.get(path, ()) and Path(path).exists():
                    owners[path] = (*owners.get(path, ()), label)
        except Exception as error:  # whatever a damaged folder of metadata makes the standard library raise
            what = f"the metadata of {name or 'a distribution'} can't be read: {type(error).__name__}: {error}"
            findings.append(Finding("warning", what, "install it again: pip install --force-reinstall"))
    return owners, findings


def in_library_path(value: str) -> tuple[str, ...]:
    """The CUDA libraries in the folders of an LD_LIBRARY_PATH."""
    found = []
    for folder in filter(None, value.split(":")):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue  # the loader passes over it too
        found += [os.path.realpath(Path(folder, name)) for name in names if _FILE.fullmatch(name)]
    return tuple(dict.fromkeys(path for path in found if _name_of(path)))


def gather(
    loaded_by: Mapping[str, str], owners: Mapping[str, tuple[str, ...]], library_path: Iterable[str]
) -> tuple[Library, ...]:
    """Every copy, loaded ones first. `loaded_by` is by path: the module that brought it."""
    loaded = {os.path.realpath(path): module for path, module in loaded_by.items()}
    offered = set(library_path)
    paths = [path for path in dict.fromkeys([*loaded, *owners, *sorted(offered)]) if _name_of(path)]
    copies = [
        Library(
            name=_name_of(path),
            path=path,
            owners=owners.get(path, ()),
            in_library_path=path in offered,
            loaded_by=loaded.get(path, ""),
            reported=ask_version(path) if path in loaded else "",
        )
        for path in paths
    ]
    return tuple(sorted(copies, key=lambda copy: (copy.name, not copy.loaded_by)))


def _name_of(path: str) -> str:
    match = _FILE.fullmatch(Path(path).name)
    return match[1] if match else ""


def ask_version(path: str) -> str:
    """What the library says its version is, where this process has it loaded; no GPU is touched."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        name = _name_of(path)
        if name == "libcudart":
            number = ctypes.c_int()
            return "" if library.cudaRuntimeGetVersion(ctypes.byref(number)) else cuda_version(number.value)
        ask = {"libcublasLt": "cublasLtGetVersion", "libcudnn": "cudnnGetVersion"}.get(name)
        if ask is None:
            return ""
        function = getattr(library, ask)
        function.restype = ctypes.c_size_t
        value = int(function())
    except (OSError, AttributeError):  # not loaded here, or no such function
        return ""
    return dotted(value)


def dotted(number: int) -> str:
    """91501 is 9.15.1; up to cuDNN 8 there was a digit less, and 8902 is 8.9.2."""
    unit = 1000 if number < 10000 else 10000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def cuda_version(number: int) -> str:
    """13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_supports() -> str:
    """The newest CUDA that the driver can run, asked without initialising it; empty where there is no driver."""
    try:
        driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return "" if driver.cuDriverGetVersion(ctypes.byref(number)) else cuda_version(number.value)
    except (OSError, AttributeError):
        return ""


# -------------------------------------------------------------------------------------------------- what is wrong


def judge(libraries: Iterable[Library], torch_cuda: str | None) -> list[Finding]:
    """What is wrong with the mixture. `torch_cuda` is the CUDA version that torch was built for."""
    by_name: dict[str, list[Library]] = {}
    for library in libraries:
        by_name.setdefault(library.name, []).append(library)
    findings = []
    for name, copies in by_name.items():
        loaded = [copy for copy in copies if copy.loaded_by]
        idle = [copy for copy in copies if not copy.loaded_by]
        findings += _mixed(name, "loaded in one process", loaded)
        if loaded:
            findings += [found for copy in idle for found in _not_the_installed_one(loaded, copy)]
        else:
            findings += _mixed(name, "installed", idle, same_major=False)
        findings += [found for copy in copies for found in _file_differs(copy)]
        if name == "libcudart":
            findings += _not_what_torch_was_built_for(loaded, torch_cuda)
    return findings


def _mixed(name: str, how: str, copies: list[Library], *, same_major: bool = True) -> list[Finding]:
    majors = {copy.major for copy in copies}
    if len(majors) < 2 and (len(copies) < 2 or not same_major):
        return []
    count = f"{len(majors)} majors" if len(majors) > 1 else f"{len(copies)} copies"
    what = f"{count} of {name} are {how}: {'; '.join(map(str, copies))}"
    return [Finding("warning", what, _how_to_drop(*sorted(copies, key=lambda copy: copy.loaded_by == "torch")))]


def _not_the_installed_one(loaded: list[Library], idle: Library) -> list[Finding]:
    same = [copy for copy in loaded if copy.major == idle.major]
    if not same:
        others = "; ".join(map(str, loaded))
        what = f"two majors of {idle.name} are mixed: loaded is {others}; installed is {idle}"
    elif any(_agree(copy.version, idle.version) for copy in same):
        return []
    else:
        what = f"the loaded {idle.name} is not the installed one: loaded is {same[0]}; installed is {idle}"
    return [Finding("warning", f"{what}. What is loaded later may take the other.", _how_to_drop(idle, *same))]


def _not_what_torch_was_built_for(loaded: list[Library], torch_cuda: str | None) -> list[Finding]:
    if not loaded or torch_cuda is None or torch_cuda.partition(".")[0] in {copy.major for copy in loaded}:
        return []
    what = f"torch was built for CUDA {torch_cuda}, and loaded is {'; '.join(map(str, loaded))}"
    return [Finding("warning", what, _how_to_drop(*loaded))]


def _file_differs(copy: Library) -> list[Finding]:
    if len(copy.owners) > 1:
        what = f"{' and '.join(copy.owners)} installed the same file, {copy.path}: the one installed last is there"
    elif copy.packaged and copy.reported and not _agree(copy.reported, copy.packaged):
        what = f"{copy.path} says that it is version {copy.reported}, but {copy.owners[0]} is what pip installed there"
    else:
        return []
    names = " ".join(owner.partition(" ")[0] for owner in copy.owners)
    fix = f"pip uninstall {names}; then install again the one that your torch requires"
    return [Finding("warning", what, fix)]


def _agree(one: str, other: str) -> bool:
    """Whether two versions are the same as far as both are written out."""
    parts = list(zip(one.split("."), other.split("."), strict=False))
    return bool(one and other) and len(parts) > 1 and all(a == b for a, b in parts)


def _how_to_drop(*copies: Library) -> str:
    """What to do about the first copy that the user can do something about."""
    for copy in copies:
        if copy.in_library_path:
            return f"take {Path(copy.path).parent} out of LD_LIBRARY_PATH"
    for copy in copies:
        if copy.owners and copy.owners[0].startswith("nvidia-"):
            return f"pip uninstall {copy.owners[0].partition(' ')[0]}, where nothing else needs it"
    return "start from an environment in which only torch's own copies are found"
