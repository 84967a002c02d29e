"""Looks at everything, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import importhook, settings
from . import cuda_libraries
from .cuda_libraries import Library
from .diagnosis import Diagnosis, Gpu, Kernel, Version
from .environment import cache_folder, settings_table, valid_settings
from .findings import PROBLEM, Examination
from .gpus import visible_gpus
from .kernels import all_kernels, judge_checks, what_was_checked
from .packages import PACKAGES, Imported, import_in_child, import_torch, installed_versions, judge_fla


def examine(
    *,
    selfcheck: bool = False,
    only: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Looks at everything. `selfcheck` runs self-checks anew on every visible GPU.

    They are those of every native kernel, or with `only` of the ops and backends of these names; an op that is off by
    default is looked at where it, or a backend of it, is named. `environ` (default: the process's) is where the
    settings are read. `tell` is called with a line before what takes long, and after each self-check, from any thread.
    Nothing is patched, and the settings in force are the same afterwards.
    """
    it = Examination()
    valid = valid_settings(it, os.environ if environ is None else environ)
    with settings.in_force(settings.read(valid)) as current:
        tell("importing the libraries in a child process")
        imported = import_in_child([each.module for each in PACKAGES if importhook.is_installed(each.module)])
        torch = import_torch(it, imported)
        versions = installed_versions(it, imported, None if torch is None else torch.version.cuda)
        nothing: tuple[Any, ...] = ()
        gpus: tuple[Gpu, ...] = nothing
        kernels: tuple[Kernel, ...] = nothing
        if torch is not None:
            gpus = it.attempt("which GPUs there are", lambda: visible_gpus(it, torch), nothing)
        libraries = it.attempt("which CUDA libraries there are", lambda: _libraries(it, imported, torch), nothing)
        if torch is not None:
            versions += _cuda_versions(it, torch, libraries)
            kernels = it.attempt(
                "which kernels serve", lambda: all_kernels(gpus, torch.version.cuda, selfcheck, only, tell), nothing
            )
        judge_checks(it, kernels)
        judge_fla(it, gpus)
        cache = cache_folder(it, current.cache_dir)
        return Diagnosis(
            package=str(Path(__file__).parents[1]),
            versions=versions,
            gpus=gpus,
            kernels=kernels,
            libraries=libraries,
            settings=settings_table(current, valid),
            cache=cache,
            selfcheck=what_was_checked(gpus, kernels) if selfcheck else "",
            findings=tuple(sorted(dict.fromkeys(it.findings), key=lambda finding: finding.level != PROBLEM)),
        )


def _libraries(it: Examination, imported: Mapping[str, Imported], torch: Any) -> tuple[Library, ...]:
    loaded_by = dict.fromkeys(cuda_libraries.loaded_now(), "torch")
    for module, each in imported.items():
        for path in each.loaded:
            loaded_by.setdefault(path, module)
    owners, damaged = cuda_libraries.installed_by_pip()
    offered = cuda_libraries.in_library_path(os.environ.get("LD_LIBRARY_PATH", ""))
    found = cuda_libraries.gather(loaded_by, owners, offered)
    it.findings += [*damaged, *cuda_libraries.judge(found, None if torch is None else torch.version.cuda)]
    return found


def _cuda_versions(it: Examination, torch: Any, libraries: Sequence[Library]) -> tuple[Version, ...]:
    from .. import selfcheck

    def cudnn() -> int | None:
        found: int | None = torch.backends.cudnn.version()
        return found

    number = it.attempt("the version of cuDNN", cudnn, None)
    cudnn_version = None if number is None else cuda_libraries.dotted(number)
    runtime = next((each.reported for each in libraries if each.name == "libcudart" and each.reported), "")
    driver = it.attempt("the version of the driver", selfcheck.driver, "unknown")
    supports = cuda_libraries.driver_supports()
    return (
        Version("cuDNN", cudnn_version, "" if cudnn_version else "torch has none"),
        Version("CUDA runtime", runtime or torch.version.cuda, "" if torch.version.cuda else "torch is a CPU build"),
        Version(
            "CUDA driver",
            None if driver == "unknown" else driver,
            f"runs CUDA up to {supports}" if supports else "no driver",
        ),
    )
