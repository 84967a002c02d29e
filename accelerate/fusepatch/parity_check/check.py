"""`fusepatch.parity()`: three arms, one after another, and the verdict on them."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import catalogue, entry, ledger, settings
from ..decline import DeclinedError, Route, native_of
from ..explanation import ITSELF, Explanation, explain
from . import arms, bound, in_place, routing, watching
from .arms import Batch, Build, Call, Counts, Loss, Options, Result, Source
from .bound import TensorError, TensorName
from .in_place import Judged
from .report import ParityReport, Verdict
from .surroundings import exact_arithmetic

_ALL_OPS = tuple(settings.OPS)


def parity(
    build_or_model: Build | nn.Module,
    batch: Batch,
    *,
    ops: str | Sequence[str] | None = None,
    loss: Loss | None = None,
    native_calls: int | None = None,
    seed: int = 0,
    gradients: bool = True,
    poison: bool = True,
) -> ParityReport:
    """Compares a model with and without `accelerate(ops)`, by their errors against fp32. Runs it three times.

    `build_or_model` is a function that builds the model, or a built model, which is copied and stays as it is. `batch`
    is what the model is called with: a dictionary for `model(**batch)`, or a tuple. The backward pass starts at
    `loss(outputs)`, else at the output `loss`, else at a random gradient of every output.

    The arms have the same weights, data, random numbers and routing (what `topk` chooses in the reference): an fp32
    reference, unpatched (widened weights, no TF32); unpatched; patched, as by `accelerate(ops, model=...)`. Two things
    must be as near to fp32 as the unpatched library's: what each patched module gave in the patched arm, tensor by
    tensor; and what came out of the whole model (each output, each parameter's gradient and that of `inputs_embeds`),
    taken together: `bound.py` says why.
    `native_calls` is how many calls must have run natively; None asks for each call that `explain()` promises. It
    promises none of a layer that calls a function of its library, such as FLA's `chunk_kda`, since it can't know what
    the call passes: a note says how many ran natively. What such a layer gave is judged like that of a patched module.
    `gradients=False` leaves the backward pass out. `poison` fills memory that nobody has written with NaN.

    What was applied before the call is back in place after it. Raises TypeError or ValueError for arguments of another
    kind, SettingsError for the environment; an exception in the model itself is part of the report.
    """
    catalogue.check_ops(ops)
    _check(build_or_model, batch, loss, native_calls, seed)
    names = catalogue.ops_meant(ops, settings.read())  # raises now, and not after the first arm
    source = Source(build_or_model, seed)
    options = Options(batch, loss, seed, gradients, poison)
    found = _Found(native_asked=native_calls)
    with _outside_inference_mode():
        with entry.disabled():
            _run_reference(source, options, found)
            if not found.baseline_failed:
                _run_unpatched(source, options, found)
        if not found.baseline_failed:
            _run_patched(source, options, names, None if ops is None else names, found)
    return _report(found, names, seed)


def _check(build_or_model: Any, batch: Any, loss: Any, native_calls: Any, seed: Any) -> None:
    if not callable(build_or_model):
        raise TypeError(
            f"parity() takes a torch.nn.Module or a function that builds one, got {type(build_or_model).__name__}"
        )
    if not isinstance(batch, (Mapping, tuple, list)):
        raise TypeError(f"batch must be a dictionary or a tuple, got {type(batch).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's outputs, got {loss!r}")
    for name, value in (("native_calls", native_calls), ("seed", seed)):
        if name == "native_calls" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def _outside_inference_mode() -> contextlib.AbstractContextManager[Any]:
    """In it no gradient is recorded, whatever is asked for. Left alone elsewhere, since leaving turns gradients on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@dataclass
class _Found:
    """What has been found so far."""

    native_asked: int | None
    model: str = ""
    device: str = ""
    dtypes: tuple[str, ...] = ()
    parameters: int = 0
    reference: Result = field(default_factory=Result)
    unpatched: Result = field(default_factory=Result)
    patched: Result = field(default_factory=Result)
    reference_dtype: str = ""
    sizes: dict[TensorName, int] = field(default_factory=dict)
    off_unpatched: dict[TensorName, float] = field(default_factory=dict)
    off_patched: dict[TensorName, float] = field(default_factory=dict)
    choices: routing.Choices = field(default_factory=routing.Choices)
    calls: list[Call] = field(default_factory=list)
    """Of the modules that ops of ours could serve, in the unpatched arm."""
    in_place: Judged = field(default_factory=Judged)
    native_expected: int = 0
    why_not_native: dict[str, str] = field(default_factory=dict)
    """By reason, what to do about it."""
    baseline_failed: list[str] = field(default_factory=list)
    """Why nothing can be said of the patches."""
    notes: list[str] = field(default_factory=list)

    @property
    def native_in_baseline(self) -> int:
        """Native calls where there must be none."""
        return self.reference.counts.native + self.unpatched.counts.native


# ------------------------------------------------------------------------------------------------------ the three arms


def _run_reference(source: Source, options: Options, found: _Found) -> None:
    model = source.make()
    found.model = type(model).__name__
    found.parameters = sum(parameter.numel() for parameter in model.parameters())
    tensors = list(model.parameters())
    found.dtypes = tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    found.device = _name_of(tensors[0].device) if tensors else "cpu"
    dtype = arms.reference_dtype(model)
    found.reference_dtype = str(dtype).removeprefix("torch.")
    arms.widen(model)
    with exact_arithmetic(model) as notes, routing.recorded(found.choices):
        found.notes += notes
        result = arms.run(model, options, _ALL_OPS, dtype)
    # On the CPU until the last arm has been compared with it.
    on_cpu = {name: tensor.cpu() for name, tensor in result.tensors.items()}
    found.reference = Result(on_cpu, result.counts, result.seconds, result.error, result.traceback)
    found.sizes = {name: tensor.numel() for name, tensor in on_cpu.items()}
    broken = [name for name, tensor in on_cpu.items() if not bool(torch.isfinite(tensor).all())]
    if result.error is not None:
        found.baseline_failed.append(f"the {found.reference_dtype} reference raised {result.error}")
    elif broken:
        found.baseline_failed.append(f"the {found.reference_dtype} reference is not finite in {_listed(broken)}")


def _run_unpatched(source: Source, options: Options, found: _Found) -> None:
    model = source.make()
    found.calls = arms.watch_calls(model, _served(model, _ALL_OPS))
    with _routed(found, "unpatched"):
        result = arms.run(model, options, _ALL_OPS)
    found.off_unpatched = _compare(result, found)
    found.unpatched = _without_tensors(result)
    broken = [name for name, error in found.off_unpatched.items() if not math.isfinite(error)]
    if result.error is not None:
        found.baseline_failed.append(f"the unpatched arm raised {result.error}")
    elif broken:
        found.baseline_failed.append(f"the unpatched arm is not finite, or lacks or adds a tensor: {_listed(broken)}")
    else:
        _check_use(found)


def _run_patched(
    source: Source, options: Options, names: tuple[str, ...], ops: tuple[str, ...] | None, found: _Found
) -> None:
    model = source.make()
    if not any(catalogue.find_served(target, model) for name in names for target in catalogue.targets_of(name)):
        _expect(model, names, found)
        found.notes.append("the patched arm did not run: there is nothing to patch")
        return
    result = Result()
    was_on = entry.is_on()
    # In strict mode the end of the block raises where nothing ran natively: the verdict says so.
    with contextlib.suppress(DeclinedError), entry.accelerated(ops, model=model):
        if not was_on:
            ledger.watch_first_step(None)  # no summary of a first step: it is ours, not the program's
        _expect(model, names, found)
        with watching.watch(model, _served(model, names)) as seen, _routed(found, "patched"):
            result = arms.run(model, options, names)
    found.off_patched = _compare(result, found)
    found.patched = _without_tensors(result)
    for op, calls in result.counts.functions.items():
        found.notes.append(f"{native_of(calls)} of {sum(calls.values())} calls of the function of {op} ran natively")
    if result.error is None and result.counts.native:
        found.in_place = in_place.judge(model, seen)
        found.notes += found.in_place.notes


@contextlib.contextmanager
def _routed(found: _Found, arm: str) -> Iterator[None]:
    with routing.replayed(found.choices):
        yield
    note = found.choices.note(arm)
    if note is not None:
        found.notes.append(note)


def _served(model: nn.Module, names: tuple[str, ...]) -> list[str]:
    """The modules that these ops could serve; "" is the model itself."""
    rows = explain(model).modules
    return ["" if row.name == ITSELF else row.name for row in rows if row.op in names]


def _compare(result: Result, found: _Found) -> dict[TensorName, float]:
    if result.error is not None:
        return {}
    errors = bound.errors_of(result.tensors, found.reference.tensors)
    for name, tensor in result.tensors.items():
        if name not in errors:  # a tensor that the reference does not have
            errors[name] = math.inf
            found.sizes[name] = tensor.numel()
    return errors


def _without_tensors(result: Result) -> Result:
    return Result({}, result.counts, result.seconds, result.error, result.traceback)


def _expect(model: nn.Module, names: tuple[str, ...], found: _Found) -> None:
    """How many native calls `explain()` promises: each call that the unpatched arm made of a module, by its size."""
    explained: dict[int | None, Explanation] = {}
    for tokens in dict.fromkeys(call.tokens for call in found.calls):
        explained[tokens] = explain(model) if tokens is None else explain(model, tokens=tokens)
    found.native_expected = 0
    for call in found.calls:
        rows = explained[call.tokens].modules
        row = next((row for row in rows if row.name == (call.module or ITSELF)), None)
        if row is None or row.op not in names:
            continue
        if row.route != Route.ORIGINAL.value:
            found.native_expected += row.certain
        elif row.reason is not None:
            found.why_not_native[row.reason] = row.fix or ""


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


# --------------------------------------------------------------------------------------------------------- the verdict


def _check_use(found: _Found) -> None:
    """Is the unpatched arm near enough to the reference to be a measure?"""
    judged = {name: e for name, e in found.off_unpatched.items() if found.sizes[name] >= bound.LEAST_ELEMENTS}
    far = {name: error for name, error in judged.items() if error > bound.USABLE_ERROR}
    if not far:
        return
    gradients = [name for name in judged if name.kind != "output"]
    if any(name.kind == "output" for name in far) or all(name in far for name in gradients):
        worst = max(far, key=lambda name: far[name])
        found.baseline_failed.append(
            f"the unpatched arm is no measure: {worst.kind} {worst.name} is off by {far[worst]:.2f} of its size "
            "(dropout whose mask depends on the dtype, a model that amplifies rounding, weights that can't be widened)"
        )
    else:
        found.notes.append(
            f"the bound says little of {_listed(list(far))}: there the unpatched library itself is off by more than "
            f"{bound.USABLE_ERROR:g}"
        )


def _listed(names: list[TensorName]) -> str:
    few = ", ".join(f"{name.kind} {name.name}" for name in names[:3])
    return f"{few} and {len(names) - 3} more" if len(names) > 3 else few


def _report(found: _Found, names: tuple[str, ...], seed: int) -> ParityReport:
    errors = _errors(found)
    large = [error for error in errors if error.bound == bound.STANDARD]
    whole = bound.together(found.model, large) if large else None
    errors = bound.in_a_whole_model(errors)
    verdict, reasons = _judge(found, errors, whole)
    return ParityReport(
        verdict=verdict,
        reasons=tuple(reasons),
        model=found.model,
        parameters=found.parameters,
        dtypes=found.dtypes,
        reference_dtype=found.reference_dtype,
        device=found.device,
        ops=names,
        seed=seed,
        in_place=found.in_place.errors,
        whole=whole,
        tensors=tuple(errors),
        native_expected=found.native_expected if found.native_asked is None else found.native_asked,
        unpatched_native=found.unpatched.counts.native,
        patched_native=found.patched.counts.native,
        calls=dict(found.patched.counts.calls),
        declines=dict(found.patched.counts.declines),
        seconds={
            name: result.seconds
            for name, result in (
                ("reference", found.reference),
                ("unpatched", found.unpatched),
                ("patched", found.patched),
            )
        },
        notes=tuple(found.notes),
        traceback=next((r.traceback for r in (found.reference, found.unpatched, found.patched) if r.traceback), None),
    )


def _errors(found: _Found) -> list[TensorError]:
    if not found.off_patched:
        return []
    every = dict.fromkeys((*found.off_unpatched, *found.off_patched))
    tokens = max((call.tokens for call in found.calls if call.tokens is not None), default=None)
    if tokens is not None and tokens < bound.LEAST_TOKENS:
        found.notes.append(f"{tokens} tokens are too few to tell errors from chance; take {bound.LEAST_TOKENS} or more")
    return [
        TensorError(
            name.kind,
            name.name,
            found.sizes[name],
            found.off_unpatched.get(name, 0.0),
            found.off_patched.get(name, math.inf),
            bound.bound_of(name, found.sizes[name], tokens),
        )
        for name in every
    ]


def _judge(found: _Found, errors: list[TensorError], whole: TensorError | None) -> tuple[Verdict, list[str]]:
    if found.native_in_baseline:
        return Verdict.FAILED, [f"{found.native_in_baseline} native calls in an arm that must be unpatched"]
    if found.baseline_failed:
        return Verdict.BASELINE_FAILED, found.baseline_failed
    reasons = []
    if found.patched.error is not None:
        reasons.append(f"the patched arm raised {found.patched.error}")
    for every in (found.in_place.errors, errors):
        broken = [error for error in every if not error.holds]
        if broken:
            listed = _listed([TensorName(error.kind, error.name) for error in broken])
            reasons.append(f"outside the bound: {len(broken)} of {len(every)} tensors, {listed}")
    if whole is not None and not whole.holds:
        reasons.append(
            f"the whole model is outside the bound: the root mean square of its errors is {whole.patched:.2e}, and "
            f"unpatched {whole.unpatched:.2e}"
        )
    if reasons:
        return Verdict.FAILED, reasons
    native = found.patched.counts.native
    if not native:
        return Verdict.NOTHING_NATIVE, [_why_nothing_native(found)]
    if found.native_asked is not None and native != found.native_asked:
        return Verdict.FAILED, [f"{native} native calls, and native_calls={found.native_asked}"]
    native = found.patched.counts.native_of_modules
    if native < found.native_expected:
        return Verdict.FAILED, [
            f"{native} native calls, where explain() promises {found.native_expected}{_declined(found.patched.counts)}"
        ]
    return Verdict.PASSED, []


def _why_nothing_native(found: _Found) -> str:
    if found.native_expected:
        return f"no native call, where explain() promises {found.native_expected}{_declined(found.patched.counts)}"
    if found.why_not_native:
        why = "; ".join(f"{reason} ({fix})" if fix else reason for reason, fix in found.why_not_native.items())
        return f"no native call: {why}"
    if found.patched.counts.functions:
        return f"no native call{_declined(found.patched.counts)}"
    return f"no native call: {'the model called' if found.calls else 'the model has, or called,'} nothing of ours"


def _declined(counts: Counts) -> str:
    return "".join(f"; declined {count} for {reason}" for reason, count in counts.declines.items())
