"""`fusepatch doctor`: what is installed, what would serve here and why not, and what is wrong.

It reports what is broken and never raises for it, so nothing of ours or of others that may be broken is imported at
the top. Libraries are imported in a child process first; torch in this one only where the child survived it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import __version__, arch, doctor_libraries, importhook, settings, table
from .decline import Reason
from .doctor_child import MARK
from .doctor_libraries import Finding, Library

if TYPE_CHECKING:
    import torch

    from .selfcheck import Check, Standing, Verdict

PROBLEM, WARNING = "problem", "warning"
IMPORT_LIMIT_S = 180.0

T = TypeVar("T")


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


@dataclass(frozen=True)
class Version:
    """One line of the list of versions."""

    name: str
    version: str | None
    note: str


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    device: str
    name: str
    capability: str
    family: str | None
    """None where the capability is not in the table of `arch.py`, and no native kernel runs."""
    fused: bool
    """Whether kernels of the fused route are made for it."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict of one self-check, from disk or from a run just now."""

    case: str
    device: str
    outcome: str | None
    """`passed`, `failed` or `inconclusive`; None where it has not run here."""
    what: str


@dataclass(frozen=True)
class Kernel:
    """One backend of one op, on one route and one kind of device."""

    op: str
    backend: str
    route: str
    devices: tuple[str, ...]
    serves: str
    """`yes`; `unchecked` (its self-check runs first); `in part` (some checks failed); `if named` (only where
    `FUSEPATCH_<OP>_BACKEND` names it); `no`."""
    reason: str | None
    fix: str | None
    checks: tuple[CheckResult, ...]
    drift: tuple[str, ...] = ()
    """Where an installed package is not what the backend was written against."""


@dataclass(frozen=True)
class Setting:
    """One environment variable."""

    name: str
    value: str
    is_set: bool


@dataclass(frozen=True)
class Cache:
    """The folder where verdicts are remembered."""

    path: str
    writable: bool
    why_not: str


@dataclass(frozen=True)
class Diagnosis:
    """What `examine()` found; `print()` it for people, `to_dict()` it for programs."""

    package: str
    """The folder that fusepatch was imported from."""
    versions: tuple[Version, ...]
    gpus: tuple[Gpu, ...]
    kernels: tuple[Kernel, ...]
    libraries: tuple[Library, ...]
    settings: tuple[Setting, ...]
    cache: Cache
    selfcheck: str
    """What `--selfcheck` did, in a sentence; empty where it was not asked for."""
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 where something is a problem; warnings alone are not."""
        return int(any(finding.level == PROBLEM for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, fit for JSON."""
        made: dict[str, Any] = json.loads(json.dumps({**dataclasses.asdict(self), "exit_code": self.exit_code}))
        for library, found in zip(made["libraries"], self.libraries, strict=True):
            library["version"] = found.version
        return made

    def __str__(self) -> str:
        return "\n\n".join(_sections(self))


class _Examination:
    """Collects findings. What a section can't find out is a finding too, and the others go on."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, level: str, what: str, fix: str) -> None:
        self.findings.append(Finding(level, what, fix))

    def attempt(self, what: str, look: Callable[[], T], otherwise: T) -> T:
        try:
            return look()
        except Exception as error:
            self.add(
                WARNING, f"can't find out {what}: {_first_line(error)}", "please report it, with all of this output"
            )
            return otherwise


def examine(
    *,
    selfcheck: bool = False,
    environ: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Looks at everything. `selfcheck` runs the self-check of every native kernel anew on every visible GPU.

    `environ` (default: the process's) is where the settings are read. `tell` is called with a line before what takes
    long. Nothing is patched, and the settings in force are the same afterwards.
    """
    it = _Examination()
    valid = _valid_settings(it, os.environ if environ is None else environ)
    with _in_force(settings.read(valid)) as current:
        tell("importing the libraries in a child process")
        imported = import_in_child([each.module for each in PACKAGES if importhook.is_installed(each.module)])
        torch = _import_torch(it, imported)
        versions = _versions(it, imported, None if torch is None else torch.version.cuda)
        nothing: tuple[Any, ...] = ()
        gpus: tuple[Gpu, ...] = nothing
        kernels: tuple[Kernel, ...] = nothing
        if torch is not None:
            gpus = it.attempt("which GPUs there are", lambda: _gpus(it, torch), nothing)
        libraries = it.attempt("which CUDA libraries there are", lambda: _libraries(it, imported, torch), nothing)
        if torch is not None:
            versions += _cuda_versions(it, torch, libraries)
            kernels = it.attempt(
                "which kernels serve", lambda: _kernels(gpus, torch.version.cuda, selfcheck, tell), nothing
            )
        _judge_checks(it, kernels)
        _judge_fla(it, gpus)
        cache = _cache(it, current.cache_dir)
        return Diagnosis(
            package=str(Path(__file__).parent),
            versions=versions,
            gpus=gpus,
            kernels=kernels,
            libraries=libraries,
            settings=_settings(current, valid),
            cache=cache,
            selfcheck=_what_was_checked(gpus, kernels) if selfcheck else "",
            findings=tuple(sorted(dict.fromkeys(it.findings), key=lambda finding: finding.level != PROBLEM)),
        )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


# ----------------------------------------------------------------------------------------------------------- settings


def _valid_settings(it: _Examination, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ours that are valid; each of the others is a finding."""
    valid = {}
    for name, text in environ.items():
        if name == settings.PREFIX or name.startswith(settings.PREFIX + "_"):
            try:
                settings.read({name: text})
            except settings.SettingsError as error:
                what = str(error).splitlines()[0].removesuffix(" Valid ones:").removesuffix(".")
                it.add(PROBLEM, what, "correct or unset it, since accelerate() raises for it")
            else:
                valid[name] = text
    return valid


@contextlib.contextmanager
def _in_force(found: settings.Settings) -> Iterator[settings.Settings]:
    before = settings.installed()
    settings.install(found)
    try:
        yield found
    finally:
        settings.install(before)


def _settings(current: settings.Settings, valid: Mapping[str, str]) -> tuple[Setting, ...]:
    def value(variable: settings.EnvVar) -> str:
        given = valid.get(variable.name)
        is_cache = variable.name == f"{settings.PREFIX}_CACHE_DIR"
        return given or (str(current.cache_dir) if is_cache else variable.default)

    return tuple(
        Setting(variable.name, value(variable), bool(valid.get(variable.name))) for variable in settings.TABLE.values()
    )


def _cache(it: _Examination, path: Path) -> Cache:
    why_not = _why_not_writable(path)
    if why_not:
        it.add(
            WARNING,
            f"the cache folder {path} can't be written: {why_not}. Each process checks its kernels again",
            f"make it writable, or set {settings.PREFIX}_CACHE_DIR to a folder that is",
        )
    return Cache(str(path), not why_not, why_not)


def _why_not_writable(path: Path) -> str:
    """Empty where the folder can be written, or made; it is not made."""
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        if not there.is_dir():
            return f"{there} is not a folder"
        if there == path:
            with tempfile.TemporaryFile(dir=path):
                return ""
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


# ---------------------------------------------------------------------------------------------------------- libraries


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
    command = [sys.executable, "-m", "fusepatch.doctor_child", *modules]
    try:
        # In our own folder, for the reason that selfcheck.run() gives.
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent.parent,
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


def _import_torch(it: _Examination, imported: Mapping[str, Imported]) -> Any:
    """torch, or None. Where the child could not import it this process does not try, since it may not survive."""
    if "torch" not in imported or imported["torch"].error:
        return None
    return it.attempt("what torch says", lambda: importlib.import_module("torch"), None)


def _versions(it: _Examination, imported: Mapping[str, Imported], cuda: str | None) -> tuple[Version, ...]:
    nothing: dict[str, Any] = {}
    wanted = it.attempt("which versions fusepatch requires", lambda: _requirements(cuda), nothing)
    rows = [Version("fusepatch", __version__, ""), Version("Python", platform.python_version(), sys.executable)]
    rows += [_version(it, package, imported.get(package.module), wanted, cuda) for package in PACKAGES]
    _judge_cutlass(it, cuda)
    return tuple(rows)


def _version(
    it: _Examination, package: Package, imported: Imported | None, wanted: Mapping[str, Any], cuda: str | None
) -> Version:
    name = package.distribution
    install = f"pip install {_requirement(package.extra, cuda)}"
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


def _requirement(extra: str, cuda: str | None) -> str:
    if not extra:
        return '"torch>=2.11"'
    return f'"fusepatch[{_cuda_extra(cuda) if extra == "cuda" else extra}]"'


def _cuda_extra(cuda: str | None) -> str:
    return "cuda12" if (cuda or "").startswith("12.") else "cuda13"


def _recorded_version(distribution: str) -> tuple[str | None, str]:
    """The version that pip's records give, None where there is none; and what is wrong with the records."""
    try:
        version: str | None = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    except Exception as error:  # whatever a damaged folder makes the standard library raise
        return None, _first_line(error)
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


def _judge_cutlass(it: _Examination, cuda: str | None) -> None:
    """The DSL takes its libraries from a wheel per CUDA major; that of torch's major must be among those installed."""
    major = (cuda or "").partition(".")[0]
    if not major or _recorded_version("nvidia-cutlass-dsl")[0] is None:
        return
    libraries = f"nvidia-cutlass-dsl-libs-cu{major}"
    if _recorded_version(libraries) == (None, ""):
        it.add(
            WARNING,
            f"torch is built for CUDA {cuda}, and nvidia-cutlass-dsl is installed without {libraries}",
            f"pip install {_requirement('cuda', cuda)}",
        )


def _judge_fla(it: _Examination, gpus: Sequence[Gpu]) -> None:
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


def _libraries(it: _Examination, imported: Mapping[str, Imported], torch: Any) -> tuple[Library, ...]:
    loaded_by = dict.fromkeys(doctor_libraries.loaded_now(), "torch")
    for module, each in imported.items():
        for path in each.loaded:
            loaded_by.setdefault(path, module)
    owners, damaged = doctor_libraries.installed_by_pip()
    offered = doctor_libraries.in_library_path(os.environ.get("LD_LIBRARY_PATH", ""))
    found = doctor_libraries.gather(loaded_by, owners, offered)
    it.findings += [*damaged, *doctor_libraries.judge(found, None if torch is None else torch.version.cuda)]
    return found


def _cuda_versions(it: _Examination, torch: Any, libraries: Sequence[Library]) -> tuple[Version, ...]:
    from . import selfcheck

    def cudnn() -> int | None:
        found: int | None = torch.backends.cudnn.version()
        return found

    number = it.attempt("the version of cuDNN", cudnn, None)
    cudnn_version = None if number is None else doctor_libraries.dotted(number)
    runtime = next((each.reported for each in libraries if each.name == "libcudart" and each.reported), "")
    driver = it.attempt("the version of the driver", selfcheck.driver, "unknown")
    supports = doctor_libraries.driver_supports()
    return (
        Version("cuDNN", cudnn_version, "" if cudnn_version else "torch has none"),
        Version("CUDA runtime", runtime or torch.version.cuda, "" if torch.version.cuda else "torch is a CPU build"),
        Version(
            "CUDA driver",
            None if driver == "unknown" else driver,
            f"runs CUDA up to {supports}" if supports else "no driver",
        ),
    )


# --------------------------------------------------------------------------------------------------------------- GPUs


def _has_gpu(it: _Examination, torch: Any) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = bool(torch.cuda.is_available())
    for warning in caught:
        it.add(
            WARNING,
            f"torch says of CUDA: {str(warning.message).strip()}",
            "update the driver, or install a torch that fits it",
        )
    if not found and torch.version.cuda is None and doctor_libraries.driver_supports():
        it.add(
            WARNING,
            f"this machine has a CUDA driver, but torch {torch.__version__} is not built for CUDA",
            "install a CUDA build of torch, as its install page says",
        )
    return found


def _gpus(it: _Examination, torch: Any) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    if not _has_gpu(it, torch):
        return ()
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        family = arch.ARCHITECTURES.get(capability)
        gpu = Gpu(
            device=f"cuda:{index}",
            name=torch.cuda.get_device_name(index),
            capability=".".join(map(str, capability)),
            family=None if family is None else family.name,
            fused=family is not None and family.fused,
        )
        if family is None:
            what = f"{gpu.device}, {gpu.name}: {Reason.ARCHITECTURE.meaning} ({gpu.capability})"
            it.add(WARNING, what, Reason.ARCHITECTURE.fix)
        found.append(gpu)
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------ kernels


_CHECKS_AT_ONCE = 4
"""Each is a process of its own, which imports torch and compiles for most of its time, and uses the GPU for little."""


def _kernels(gpus: Sequence[Gpu], cuda: str | None, renew: bool, tell: Callable[[str], None]) -> tuple[Kernel, ...]:
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
    from . import ops

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
    from . import selfcheck

    tell(f"checking {check} on {', '.join(map(str, devices))}")
    found = selfcheck.renew(check, devices)
    return [_result(check, str(device), verdict) for device, verdict in zip(devices, found, strict=True)]


def _remembered(check: Check, devices: Sequence[torch.device], _: Callable[[str], None]) -> list[CheckResult]:
    from . import selfcheck

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
        return f"pip install {_requirement('cuda', cuda)} (missing: {', '.join(standing.missing)})"
    if reason is not None:
        return reason.fix
    if serves == "if named":
        return f"set {settings.PREFIX}_{op.upper()}_BACKEND={standing.backend}"
    if serves == "unchecked":
        return "nothing to do: it is checked at first use, or now by `fusepatch doctor --selfcheck`"
    return None


def _judge_checks(it: _Examination, kernels: Sequence[Kernel]) -> None:
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


def _what_was_checked(gpus: Sequence[Gpu], kernels: Sequence[Kernel]) -> str:
    outcomes = [check.outcome for kernel in kernels for check in kernel.checks]
    if not gpus:
        return "no CUDA device: there is nothing to check"
    if not outcomes:
        return "no native kernel can run on the GPUs here: there is nothing to check"
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "inconclusive"))
    return f"{len(outcomes)} self-checks ran: {counts}"


# --------------------------------------------------------------------------------------------------------------- text


def _sections(found: Diagnosis) -> Iterator[str]:
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
        yield "\n".join(f"{each.level}: {each.what}{_stop(each.what)} Fix: {each.fix}." for each in found.findings)
    else:
        yield "nothing is wrong"


def _stop(sentence: str) -> str:
    return "" if sentence.endswith((".", "?", "!")) else "."


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
            _checks_text(each.checks),
            each.fix or "-",
        )
        for each in kernels
    ]
    text = table.render(("op", "backend", "route", "on", "serves", "why not", "self-checks", "what to do"), rows)
    reasons = {each.reason for each in kernels}
    return "\n".join([text, *(f"{each.value}: {each.meaning}." for each in Reason if each.value in reasons)])


def _checks_text(checks: Sequence[CheckResult]) -> str:
    outcomes = [check.outcome or "not run yet" for check in checks]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)) or "-"


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
