"""Runs the host side of an exported CuTe DSL kernel on a machine without a GPU: fake_cuda.c writes down the launch."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
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

    assert COMPILER is not None
    kernel, library = folder / "kernel.o", folder / "fake.so"
    compiled.export_to_c(str(kernel), function_name="kernel")
    # Bsymbolic: the DSL's own runtime, which compiling has loaded, would be found first.
    command = [COMPILER, "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic", "-o", str(library), str(kernel), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    launch = tvm_ffi.load_module(str(library)).kernel
    seen = ctypes.CDLL(str(library))
    # `.param .align 64 .b8 name[128]` and `.param .u32 name`
    parameters = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+) \w+(?:\[(\d+)\])?", compiled.artifacts.PTX)
    sizes = [int(bits) // 8 * int(count or 1) for bits, count in parameters]
    (ctypes.c_int * 32).in_dll(seen, "fake_argument_bytes")[: len(sizes)] = sizes

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

    return launch, launched


def tensor(address: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    """A contiguous tensor that claims to lie on a GPU, at an address that is never read."""
    import tvm_ffi

    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return tvm_ffi.from_dlpack(_Capsule(address, shape, strides, dtype))


# ------------------------------------------------------------------------------------------------------------- DLPack


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
