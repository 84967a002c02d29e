"""One compiled kernel per configuration, kept for the life of the process and on disk, and launched through tvm-ffi.

Kernels are compiled against fake tensors whose sizes and strides are symbols, so that one of them serves every M, H
and I: a configuration is a dtype, an activation, what is written, and how the work is cut into tiles. A compiled
kernel takes torch tensors, checks their shapes and dtypes against each other, runs on their device and on PyTorch's
current stream there. On an H200's host a launch takes 7.8 us so, 87 us through DLPack, and `F.linear` 15 us.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

from ... import disk
from . import artefacts
from .artefacts import Launch

Configuration = TypeVar("Configuration", bound=Hashable)

WAIT_LIMIT_S = 60.0
"""For another process that compiles the same kernel, which takes it 1 to 3 s; then each compiles for itself."""

_compiled: dict[tuple[Hashable, str], Launch] = {}
"""By configuration and architecture."""
_lock = threading.Lock()


def _fresh_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)  # another thread may have been compiling


def compiled(configuration: Configuration, build: Callable[[Configuration, str], Launch], arch: str) -> Launch:
    """The kernel of a configuration for `arch` (as `sm_90a`), from this process, from disk, or compiled now.

    `build(configuration, options)` compiles it. `configuration` says by its repr all that the kernel is made from,
    besides the sources.
    """
    launch = _compiled.get((configuration, arch))
    if launch is None:
        with _lock:  # autograd runs backward passes on threads of its own, and the DSL traces into a global
            launch = _compiled.get((configuration, arch))
            if launch is None:
                launch = _loaded_or_built(configuration, build, options_for(arch))
                _compiled[configuration, arch] = launch
    return launch


def options_for(arch: str) -> str:
    """What the DSL is given to compile for `arch`."""
    return f"--enable-tvm-ffi --gpu-arch {arch}"


def is_compiled(configuration: Hashable, arch: str) -> bool:
    """Whether `compiled` would return at once."""
    return (configuration, arch) in _compiled


def _loaded_or_built(
    configuration: Configuration, build: Callable[[Configuration, str], Launch], options: str
) -> Launch:
    key = artefacts.key_of(configuration, options)
    path = artefacts.place(key)
    if path is None:
        return build(configuration, options)
    launch = artefacts.load(path, key)
    if launch is None:
        with disk.one_process(path.with_suffix(".lock"), WAIT_LIMIT_S):
            launch = artefacts.load(path, key)  # another process may have compiled it while we waited
            if launch is None:
                launch = build(configuration, options)
                artefacts.store(path, key, launch)
    return launch
