"""Compiled kernels on disk, so that a later process need neither compile them nor import the CuTe DSL.

An entry is one shared library that tvm-ffi loads: what the DSL exports, linked by the system's C compiler. Behind the
library's last byte, where the loader does not look, stands the SHA-256 of what the entry is for and of the library; so
an entry that was cut short, damaged or written for something else is not loaded, and is written again. A library needs
the DSL's runtime, which is linked by its path: an entry whose runtime is gone does not load either.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import disk, selfcheck

log = logging.getLogger("fusepatch")

FOLDER = "kernels"
NAME = "kernel"
"""Of the function in every library."""
LINK_LIMIT_S = 60.0

Launch = Callable[..., Any]


def key_of(configuration: object, options: str) -> str:
    """All that an entry holds for: the kernel, its sources, and what they were compiled with and for."""
    parts = (
        repr(configuration),
        options,
        selfcheck.sources_hash(),
        selfcheck.version("nvidia-cutlass-dsl"),
        selfcheck.version("apache-tvm-ffi"),
        selfcheck.driver(),  # by which the DSL picks the CUDA version that it compiles with
        _processor(),
    )
    return "\n".join(parts)


def place(key: str) -> Path | None:
    """Where the entry of a key lies; None where no folder may hold code."""
    folder = disk.private_folder(FOLDER)
    return None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"


def load(path: Path, key: str) -> Launch | None:
    """The kernel that the entry holds; None where it is not there, or is not what was written for this key."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if data[-hashlib.sha256().digest_size :] != _seal(key, data[: -hashlib.sha256().digest_size]):
        log.info("%s is damaged, or another program's: compiled again", path)
        return None
    try:
        import tvm_ffi

        launch: Launch = getattr(tvm_ffi.load_module(str(path)), NAME)
    except Exception as error:  # the DSL's runtime is gone, or tvm-ffi can't read it: as if it were not there
        log.info("%s can't be loaded, and is compiled again: %s", path, error)
        return None
    return launch


def store(path: Path, key: str, compiled: Any) -> None:
    """Writes the entry; where that can't be done the next process compiles again, and nothing else is lost."""
    try:
        library = _link(compiled)
    except Exception as error:  # the DSL's exporter raises what it likes; the kernel itself is there
        log.info("a compiled kernel is not kept: %s", error)
        return
    if not disk.write_whole(path, library + _seal(key, library)):
        log.info("a compiled kernel is not kept: %s can't be written", path)


@functools.cache
def _processor() -> str:
    """The host's instruction set: the code that launches a kernel is compiled for it, AVX-512 and all.

    A home folder may be shared by machines that differ.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"


def _seal(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + library).digest()


def linker() -> str | None:
    """The C compiler that entries are linked with; None where there is none, and nothing can be kept."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def _link(compiled: Any) -> bytes:
    """A shared library of the kernel. Raises OSError where there is no C compiler to link it."""
    from cutlass.cute import runtime

    program = linker()
    if program is None:
        raise FileNotFoundError("no C compiler (cc, gcc, clang) to link it with")
    libraries = [Path(path) for path in runtime.find_runtime_libraries(enable_tvm_ffi=False)]
    with tempfile.TemporaryDirectory(prefix="fusepatch-") as folder:
        source, target = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        compiled.export_to_c(str(source), function_name=NAME)
        places = [f"-Wl,-rpath,{path.parent}" for path in libraries]
        command = [program, "-shared", "-o", str(target), str(source), *map(str, libraries), *places]
        subprocess.run(command, check=True, capture_output=True, timeout=LINK_LIMIT_S)
        return target.read_bytes()
