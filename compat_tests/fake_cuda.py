"""Runs the host side of an exported CuTe DSL kernel on a machine without a GPU: fake_cuda.c writes down the launch."""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
_CUDA = (2, 0)
"""DLPack's number of CUDA, and the index of the device."""
_TYPES = {"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32)}


@dataclass(frozen=True)
class Launched:
    """The last launch."""

    count: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    """Zeros where the launch names none."""
    shared_bytes: int
    arguments: tuple[bytes, ...]
    """The bytes of each. A TMA descriptor has 128, of which the first 64 say something."""


def load(compiled: Any, folder: Path) -> tuple[Callable[..., Any], Callable[[], Launched]]:
    """The kernel's host side, and what tells of its last launch. Compiled with `--keep-ptx`."""
    import tvm_ffi

    kernel, library = folder / "kernel.o", folder / "fake.so"
    compiled.export_to_c(str(kernel), function_name="kernel")
    # Bsymbolic: the DSL's own runtime, which compiling has loaded, would be found first.
    _link(library, "-Wl,-Bsymbolic", str(kernel))
    return tvm_ffi.load_module(str(library)).kernel, watch(library, argument_sizes(compiled.artifacts.PTX))


def _link(library: Path, *more: str) -> None:
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", "-w", "-o", str(library), *more, str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)


def argument_sizes(ptx: str) -> tuple[int, ...]:
    """Bytes of each argument of the kernel: `.param .align 64 .b8 name[128]` and `.param .u32 name`."""
    parameters = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+) \w+(?:\[(\d+)\])?", ptx)
    return tuple(int(bits) // 8 * int(count or 1) for bits, count in parameters)


def watch(library: Path, sizes: tuple[int, ...]) -> Callable[[], Launched]:
    """What tells of the last launch under the runtime in `library`, of a kernel with such arguments."""
    seen = ctypes.CDLL(str(library))
    room = (ctypes.c_int * 32).in_dll(seen, "fake_argument_bytes")
    room[:] = [*sizes, *[0] * (32 - len(sizes))]

    def three(name: str) -> tuple[int, int, int]:
        x, y, z = (ctypes.c_uint32 * 3).in_dll(seen, name)
        return x, y, z

    def launched() -> Launched:
        kept = (ctypes.c_char * 128 * 32).in_dll(seen, "fake_argument")
        return Launched(
            ctypes.c_int.in_dll(seen, "fake_launches").value,
            three("fake_grid"),
            three("fake_block"),
            three("fake_cluster"),
            ctypes.c_uint64.in_dll(seen, "fake_shared_bytes").value,
            tuple(each.raw[:size] for each, size in zip(kept, sizes, strict=False)),
        )

    return launched


# --------------------------------------------------------------------------------------------------- another process


@dataclass(frozen=True)
class Operand:
    """Rows of a tensor that claims to lie on a GPU."""

    address: int
    shape: tuple[int, int]
    pitch: int
    """Elements from one row to the next."""


@dataclass(frozen=True)
class Entry:
    """A kernel on disk, as artefacts.py keeps it, and the calls that are to be made of it."""

    path: Path
    key: str
    sizes: tuple[int, ...]
    dtype: str
    calls: tuple[tuple[Operand | int | None, ...], ...]


def launched_elsewhere(entries: list[Entry], folder: Path) -> list[list[Launched]]:
    """What each call launches in a process of its own, which never has the DSL: by entry, then by call."""
    runtime = folder / "runtime.so"
    _link(runtime)
    child = Path(__file__).with_name("fake_cuda_child.py")
    done = subprocess.run(
        [sys.executable, str(child), str(runtime)],
        input=pickle.dumps(entries),
        env={**os.environ, "LD_PRELOAD": str(runtime)},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found: list[list[Launched]] = pickle.loads(done.stdout)
    return found


# ------------------------------------------------------------------------------------------------------------ tensors


def tensor(address: int, shape: tuple[int, ...], dtype: str = "bfloat16", pitch: int | None = None) -> Any:
    """A tensor that claims to lie on a GPU, at an address that is never read: contiguous, or rows `pitch` apart."""
    import tvm_ffi

    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))) if pitch is None else (pitch, 1)
    return tvm_ffi.from_dlpack(_Capsule(address, shape, strides, dtype))


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_alive: list[Any] = []
"""Nothing tells us when a consumer is done: they are small, and there are few."""


class _Capsule:
    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> None:
        sizes = ctypes.c_int64 * len(shape)
        tensor = _Tensor(
            address, _Device(*_CUDA), len(shape), _Type(*_TYPES[dtype], 1), sizes(*shape), sizes(*strides), 0
        )
        self.managed = _Managed(tensor, None, None)
        _alive.append(self)

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA
