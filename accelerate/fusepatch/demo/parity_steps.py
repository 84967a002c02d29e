"""The two steps of the demo that compare results with a reference in a wider dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..parity_check.bound import LEAST_ELEMENTS, ROW, STANDARD, STRAY, WHOLE, TensorError, TensorName, by_kind, error_of
from ..parity_check.check import parity
from ..parity_check.report import ParityReport, kinds
from . import control, page, training
from .page import Shown
from .weights import Loaded


def show(shown: Shown, loaded: Loaded, ids: Tensor, names: Sequence[str]) -> None:
    """Both steps, from one `fusepatch.parity()`. The modules named are those that must run natively."""
    page.heading(
        4, f"fusepatch.parity(model, batch): a training step on {ids.shape[1]} tokens of 'Pride and Prejudice'"
    )
    if not names:
        page.say(f"{shown.expect(False, 'no module is served natively')}: no module is served natively.")
        return
    with page.working("one training step of the reference, unpatched and patched; then every MLP alone"):
        report = parity(loaded.model, {"input_ids": ids, "labels": ids, "use_cache": False})
    shown.figures["parity"] = report.to_dict()
    _show_in_place(shown, report, len(names))
    with page.working("the same step unpatched, channels reordered"):
        noise = _control(loaded, ids, names, report)
    _show_whole(shown, report, noise)


def _show_in_place(shown: Shown, report: ParityReport, expected: int) -> None:
    page.say(
        "What each MLP gave on the call that it served in the patched model. Unpatched: the library, on the same\n"
        f"input and gradient. Relative L2 errors against {report.reference_dtype}, with the same rounded weights.\n"
    )
    if report.in_place:
        page.say(kinds(report.in_place))
    broken = [error for error in report.in_place if not error.holds]
    held = bool(report.in_place) and not broken
    failure = f"{broken[0].name} is outside the parity bound" if broken else "; ".join(report.reasons)
    page.say(
        f"\n{shown.expect(held, failure)}: {len(report.in_place) - len(broken)} of {len(report.in_place)} tensors are "
        f"within the bound:\n{STANDARD}; for the worst row of a tensor, {ROW}."
    )
    shown.expect_native(report.patched_native, "in the patched arm", expected)


def _show_whole(shown: Shown, report: ParityReport, noise: dict[str, list[TensorError]] | None) -> None:
    page.heading(5, "The same training step: the whole model")
    page.say(kinds(report.tensors, noise))
    if noise is not None:
        every = [error for found in noise.values() for error in found]
        over = [sum(map(_is_over, errors)) for errors in (report.tensors, every)]
        page.say(
            "\nThe control is the unpatched library itself with the channels of its MLPs in another order: the same\n"
            "function, summed in another order. Through a whole model one rounding moves all that follow, so a single\n"
            f"tensor's ratio says little: {over[1]} of {len(report.tensors)} exceed {STANDARD} in the control, and\n"
            f"{over[0]} in the patched model. Judged are the root mean square over all tensors, by {WHOLE},\n"
            f"and each tensor by {STRAY.factor:g} x the worst unpatched one of its kind."
        )
        shown.figures["over_bound_each"] = {"patched": over[0], "control": over[1]}
    if report.whole is not None:
        page.say(f"\nRoot mean square: unpatched {report.whole.unpatched:.2e}, patched {report.whole.patched:.2e}.")
    verdict = shown.expect(report.passed, f"parity is {report.verdict.value}: {'; '.join(report.reasons)}")
    page.say(f"{verdict}: parity() says {report.verdict.value}.")
    for text in (*report.reasons, *report.notes):
        page.say(text)


def _is_over(error: TensorError) -> bool:
    """Whether a tensor of the whole model is further off than it may be in place."""
    return error.elements >= LEAST_ELEMENTS and error.patched > STANDARD.allows(error.unpatched)


def _control(
    loaded: Loaded, ids: Tensor, names: Sequence[str], report: ParityReport
) -> dict[str, list[TensorError]] | None:
    """By kind, the errors of the unpatched library with its channels reordered, beside those without.

    None where the model can't be reordered.
    """
    reordered = control.Reordered(loaded, names)
    if not reordered:
        return None
    expected = _tensors_of(training.widen(loaded, getattr(torch, report.reference_dtype)), ids)
    actual = reordered.in_model_order(_tensors_of(reordered.model, ids))
    found = [
        TensorError(
            e.kind, e.name, e.elements, e.unpatched, error_of(TensorName(e.kind, e.name), actual[e.name], wanted)
        )
        for e in report.tensors
        if (wanted := expected.get(e.name)) is not None
    ]
    return by_kind(found)


def _tensors_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    loss, logits = training.run_step(model, ids)
    return {"loss": loss, "logits": logits, **training.gradients(model)}
