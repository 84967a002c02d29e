"""Which kernels would serve here, which would not and why, and their self-checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .. import settings
from ..decline import Reason
from .diagnosis import CheckResult, Gpu, Kernel
from .findings import PROBLEM, WARNING, Examination
from .packages import requirement

if TYPE_CHECKING:
    import torch

    from ..selfcheck import Check, Standing, Verdict

_CHECKS_AT_ONCE = 4
"""Each is a process of its own, which imports torch and compiles for most of its time, and uses the GPU for little."""


def all_kernels(gpus: Sequence[Gpu], cuda: str | None, renew: bool, tell: Callable[[str], None]) -> tuple[Kernel, ...]:
    """Every backend of every op, on each kind of device. `renew` runs the self-checks anew."""
    import torch

    kinds: dict[tuple[str, str], list[torch.device]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.capability), []).append(torch.device(gpu.device))
    return tuple(
        _kernel(op, standing, devices, cuda, renew, tell)
        for op in settings.OPS
        if settings.current().considers(op)
        for devices in (kinds.values() or [[torch.device("cpu")]])
        for standing in _survey(op, devices[0])
    )


def _survey(op: str, device: torch.device) -> tuple[Standing, ...]:
    """What the op's table of backends says: `survey()` beside the public function of the op."""
    from .. import ops

    folder = getattr(ops, op).__module__.rpartition(".")[0]
    found: tuple[Standing, ...] = importlib.import_module(f"{folder}.choose").survey(device)
    return found


def _kernel(
    op: str,
    standing: Standing,
    devices: Sequence[torch.device],
    cuda: str | None,
    renew: bool,
    tell: Callable[[str], None],
) -> Kernel:
    on_gpu = devices[0].type == "cuda"
    checks: tuple[CheckResult, ...] = ()
    if standing.reason is None and on_gpu:
        look = _renew if renew else _remembered
        with ThreadPoolExecutor(_CHECKS_AT_ONCE) as pool:
            found = list(pool.map(lambda check: look(check, devices, tell), standing.checks))
        checks = tuple(result for results in found for result in results)
    serves, reason = _serves(op, standing, checks)
    return Kernel(
        op=op,
        backend=standing.backend,
        route=standing.route.value,
        devices=tuple(map(str, devices)),
        serves=serves,
        reason=None if reason is None else reason.value,
        fix=_fix(op, standing, serves, reason, cuda),
        checks=checks,
        drift=standing.drift,
    )


def _renew(check: Check, devices: Sequence[torch.device], tell: Callable[[str], None]) -> list[CheckResult]:
    from .. import selfcheck

    tell(f"checking {check} on {', '.join(map(str, devices))}")
    found = selfcheck.renew(check, devices)
    return [_result(check, str(device), verdict) for device, verdict in zip(devices, found, strict=True)]


def _remembered(check: Check, devices: Sequence[torch.device], _: Callable[[str], None]) -> list[CheckResult]:
    from .. import selfcheck

    return [_result(check, ", ".join(map(str, devices)), selfcheck.on_disk(check, devices[0]))]


def _result(check: Check, device: str, verdict: Verdict | None) -> CheckResult:
    outcome, what = (None, "") if verdict is None else (verdict.outcome.value, verdict.what)
    return CheckResult(check.case, device, outcome, what)


def _serves(op: str, standing: Standing, checks: Sequence[CheckResult]) -> tuple[str, Reason | None]:
    current = settings.current()
    chosen = current.ops[op]
    if not current.allows(op):
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
        return f"pip install {requirement('cuda', cuda)} (missing: {', '.join(standing.missing)})"
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
    outcomes = [check.outcome for kernel in kernels for check in kernel.checks]
    if not gpus:
        return "no CUDA device: there is nothing to check"
    if not outcomes:
        return "no native kernel can run on the GPUs here: there is nothing to check"
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "inconclusive"))
    return f"{len(outcomes)} self-checks ran: {counts}"
