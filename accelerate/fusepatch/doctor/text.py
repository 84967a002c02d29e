"""A diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import table
from ..decline import Reason

if TYPE_CHECKING:
    from .cuda_libraries import Library
    from .diagnosis import CheckResult, Diagnosis, Gpu, Kernel


def sections(found: Diagnosis) -> Iterator[str]:
    """The parts of the text, which empty lines divide."""
    yield f"fusepatch in {found.package}"
    rows = [(each.name, each.version or "-", each.note) for each in found.versions]
    yield table.render(("what", "version", "note"), rows)
    yield _gpu_text(found.gpus)
    yield _kernel_text(found.kernels)
    yield _library_text(found.libraries)
    yield table.render(
        ("setting", "value", "from"),
        [(each.name, each.value, "environment" if each.is_set else "default") for each in found.settings],
    )
    yield f"cache {found.cache.path}: {'writable' if found.cache.writable else 'not writable, ' + found.cache.why_not}"
    if found.selfcheck:
        yield f"self-check: {found.selfcheck}"
    if found.findings:
        yield "\n".join(map(str, found.findings))
    else:
        yield "nothing is wrong"


def _gpu_text(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "no CUDA device that torch can use"
    rows = [
        (each.device, each.name, each.capability, each.family or "not in the table", "yes" if each.fused else "no")
        for each in gpus
    ]
    return table.render(("device", "GPU", "capability", "family", "fused kernels"), rows)


def _kernel_text(kernels: Sequence[Kernel]) -> str:
    if not kernels:
        return "no kernel could be asked about"
    rows = [
        (
            each.op,
            each.backend,
            each.route,
            ", ".join(each.devices),
            each.serves,
            each.reason or "-",
            checks_in_words(each.checks),
            each.fix or "-",
        )
        for each in kernels
    ]
    text = table.render(("op", "backend", "route", "on", "serves", "why not", "self-checks", "what to do"), rows)
    reasons = {each.reason for each in kernels}
    return "\n".join([text, *(f"{each.value}: {each.meaning}." for each in Reason if each.value in reasons)])


def checks_in_words(checks: Sequence[CheckResult]) -> str:
    """How many had which outcome, and how long those took that ran just now."""
    outcomes = [check.outcome or "not run yet" for check in checks]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)) or "-"
    seconds = [check.seconds for check in checks if check.seconds is not None]
    return f"{counts} ({min(seconds):.0f} to {max(seconds):.0f} s each)" if seconds else counts


def _library_text(libraries: Sequence[Library]) -> str:
    if not libraries:
        return "no CUDA library is loaded, or installed by pip, or in LD_LIBRARY_PATH"
    rows = [
        (
            each.name,
            each.version or "-",
            f"by {each.loaded_by}" if each.loaded_by else "no",
            ", ".join(each.owners) or ("LD_LIBRARY_PATH" if each.in_library_path else "-"),
            each.path,
        )
        for each in libraries
    ]
    return table.render(("library", "version", "loaded", "installed by", "path"), rows)
