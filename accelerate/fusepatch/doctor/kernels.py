"""Which kernels would serve here, which would not and why, and their self-checks."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import settings
from ..decline import Reason
from .diagnosis import CheckResult, Gpu, Kernel
from .findings import PROBLEM, WARNING, Examination
from .packages import install

if TYPE_CHECKING:
    import torch

    from ..selfcheck import Check, Standing, Verdict

_MOST_AT_ONCE = 8
"""Each check is a process of its own, which imports torch and compiles for most of its time, and uses the GPU for
little; the host's memory bounds them."""


@dataclass(frozen=True)
class _Row:
    """One backend of one op, on one route and one kind of device."""

    op: str
    standing: Standing
    devices: tuple[torch.device, ...]
    is_named: bool
    """Whether the op is looked at because of a name that was given."""

    def has_checks(self) -> bool:
        """Whether it can serve there, so that there is something to check."""
        return self.standing.reason is None and self.devices[0].type == "cuda"


_Job = tuple["Check", "tuple[torch.device, ...]"]


def all_kernels(
    gpus: Sequence[Gpu], cuda: str | None, renew: bool, only: Collection[str], tell: Callable[[str], None]
) -> tuple[Kernel, ...]:
    """Every backend of every op, on each kind of device. `renew` runs self-checks anew: see examine()."""
    import torch

    kinds: dict[tuple[str, str], list[torch.device]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.capability), []).append(torch.device(gpu.device))
    rows = [
        _Row(op, standing, tuple(devices), _is_named(op, only))
        for op in settings.OPS
        if settings.current().considers(op) or _is_named(op, only)
        for devices in (kinds.values() or [[torch.device("cpu")]])
        for standing in _survey(op, devices[0])
    ]
    jobs = [
        (check, row.devices)
        for row in rows
        if renew and row.has_checks() and _is_asked_for(row.op, row.standing, only)
        for check in row.standing.checks
    ]
    renewed = _renew(jobs, tell) if jobs else {}
    return tuple(_kernel(row, renewed, cuda) for row in rows)


def _is_named(op: str, only: Collection[str]) -> bool:
    return not {op, *settings.OPS[op].backends}.isdisjoint(only)


def _is_asked_for(op: str, standing: Standing, only: Collection[str]) -> bool:
    return not only or not {op, standing.backend}.isdisjoint(only)


def _survey(op: str, device: torch.device) -> tuple[Standing, ...]:
    """What the op's table of backends says: `survey()` beside the public function of the op."""
    from .. import ops

    folder = getattr(ops, op).__module__.rpartition(".")[0]
    found: tuple[Standing, ...] = importlib.import_module(f"{folder}.choose").survey(device)
    return found


def _kernel(row: _Row, renewed: Mapping[_Job, Sequence[Verdict]], cuda: str | None) -> Kernel:
    standing = row.standing
    checks: tuple[CheckResult, ...] = ()
    if row.has_checks():
        checks = tuple(result for check in standing.checks for result in _results(check, row.devices, renewed))
    serves, reason = _serves(row, checks)
    return Kernel(
        op=row.op,
        backend=standing.backend,
        route=standing.route.value,
        devices=tuple(map(str, row.devices)),
        serves=serves,
        reason=None if reason is None else reason.value,
        fix=_fix(row.op, standing, serves, reason, cuda),
        checks=checks,
        drift=standing.drift,
    )


def _renew(jobs: Sequence[_Job], tell: Callable[[str], None]) -> dict[_Job, tuple[Verdict, ...]]:
    """Runs the checks anew, several side by side, and says when each begins and how it ended."""
    from .. import selfcheck

    stop = threading.Event()

    def renew(job: _Job) -> tuple[Verdict, ...]:
        tell(f"checking {_in_words(job)}")
        return selfcheck.renew(*job, stop)

    at_once = min(_at_once(), len(jobs))
    tell(f"{len(jobs)} self-checks, {at_once} at a time; each is given up after {selfcheck.CHILD_LIMIT_S:.0f} s")
    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {pool.submit(renew, job): job for job in jobs}
        for number, future in enumerate(as_completed(futures), 1):
            ended = ", ".join(f"{each.outcome.value} in {each.seconds:.1f} s" for each in future.result())
            tell(f"{number} of {len(jobs)}: {ended}: {_in_words(futures[future])}")
    except BaseException:  # Ctrl-C among them, which else would wait for what runs
        pool.shutdown(wait=False, cancel_futures=True)
        selfcheck.end_checks(stop)
        raise
    finally:
        pool.shutdown()
    return {job: future.result() for future, job in futures.items()}


def _at_once() -> int:
    """How many checks are run side by side: those of kernels in the CuTe DSL start processes that compile."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(_MOST_AT_ONCE, processors // 2))


def _in_words(job: _Job) -> str:
    check, devices = job
    return f"{check} on {', '.join(map(str, devices))}"


def _results(
    check: Check, devices: tuple[torch.device, ...], renewed: Mapping[_Job, Sequence[Verdict]]
) -> list[CheckResult]:
    from .. import selfcheck

    found = renewed.get((check, devices))
    if found is None:
        return [_result(check, ", ".join(map(str, devices)), selfcheck.on_disk(check, devices[0]))]
    return [_result(check, str(device), verdict) for device, verdict in zip(devices, found, strict=True)]


def _result(check: Check, device: str, verdict: Verdict | None) -> CheckResult:
    if verdict is None:
        return CheckResult(check.case, device, None, "")
    return CheckResult(check.case, device, verdict.outcome.value, verdict.what, verdict.seconds)


def _serves(row: _Row, checks: Sequence[CheckResult]) -> tuple[str, Reason | None]:
    current, standing = settings.current(), row.standing
    chosen = current.ops[row.op]
    if not current.allows(row.op, named=row.is_named):
        return "no", Reason.ENV_DISABLED
    if chosen.route is not None and standing.route.rank < chosen.route.rank:
        return "no", Reason.ROUTE_BOUND
    if standing.reason is not None:
        return "no", standing.reason
    if chosen.backend != standing.backend and not (chosen.backend == "auto" and standing.native):
        return "if named", None
    outcomes = {check.outcome for check in checks}
    bad = {"failed": Reason.SELFCHECK_FAILED, "inconclusive": Reason.SELFCHECK_INCONCLUSIVE}
    reason = next((reason for outcome, reason in bad.items() if outcome in outcomes), None)
    if reason is not None:
        return ("no" if outcomes <= set(bad) else "in part"), reason
    return ("unchecked" if None in outcomes else "yes"), None


def _fix(op: str, standing: Standing, serves: str, reason: Reason | None, cuda: str | None) -> str | None:
    if reason is Reason.MISSING_PACKAGE:
        return f"{install(standing.missing, cuda)} (missing: {', '.join(standing.missing)})"
    if reason is not None:
        return reason.fix
    if serves == "if named":
        return f"set {settings.PREFIX}_{op.upper()}_BACKEND={standing.backend}"
    if serves == "unchecked":
        return "nothing to do: it is checked at first use, or now by `fusepatch doctor --selfcheck`"
    return None


def judge_checks(it: Examination, kernels: Sequence[Kernel]) -> None:
    """A finding for each check that did not pass, and for each package that has drifted."""
    for kernel in kernels:
        for what in kernel.drift:
            it.add(
                WARNING,
                f"the backend {kernel.backend} is off: {what}",
                "install the release that it was written against",
            )
        for check in kernel.checks:
            if check.outcome in ("failed", "inconclusive"):
                failed = check.outcome == "failed"
                reason = Reason.SELFCHECK_FAILED if failed else Reason.SELFCHECK_INCONCLUSIVE
                what = f"self-check {check.case} on {check.device} {check.outcome}: {check.what}"
                it.add(PROBLEM if failed else WARNING, what, reason.fix)


def what_was_checked(gpus: Sequence[Gpu], kernels: Sequence[Kernel]) -> str:
    """A sentence about the self-checks that ran."""
    outcomes = [check.outcome for kernel in kernels for check in kernel.checks if check.seconds is not None]
    if not gpus:
        return "no CUDA device: there is nothing to check"
    if not outcomes:
        return "none of the native kernels asked for can run on the GPUs here: there is nothing to check"
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "inconclusive"))
    return f"{len(outcomes)} self-checks ran: {counts}"
