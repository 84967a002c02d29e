"""The two steps of the demo that compare results with a reference in a wider dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import entry
from . import alone, bound, control, page, training
from .weights import Loaded, wider


@dataclass
class Shown:
    """What has been found so far, for the JSON file and the verdict."""

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, held: bool, failure: str) -> str:
        """`PASS`, or `FAIL` with the failure noted."""
        if not held:
            self.failures.append(failure)
        return "PASS" if held else "FAIL"

    def expect_native(self, calls: int, when: str, expected: int | None = None) -> None:
        """Says how many calls ran natively. Fewer than expected, or none, is a failure: nothing was shown then."""
        held = calls > 0 and expected in (None, calls)
        of = "" if expected is None else f" of {expected}"
        verdict = self.expect(held, f"{calls}{of} calls ran natively {when}")
        page.say(f"{verdict}: {calls}{of} calls ran natively.")


def show_alone(shown: Shown, loaded: Loaded, ids: Tensor, names: Sequence[str]) -> None:
    """Every patched module alone: the bound, tensor by tensor."""
    page.heading(4, "Parity: every gated MLP alone, on the input and the gradient it gets while the model trains")
    if not names:
        page.say(f"{shown.expect(False, 'no module is served natively')}: no module is served natively.")
        return
    with page.working("one training step of the reference, then every MLP in three arms"):
        given = alone.record(loaded, training.widen(loaded), ids, names)
        errors, native = alone.compare(loaded, given)
    page.say(f"Relative L2 error against the {_reference(loaded)} reference, which has the same rounded weights.\n")
    page.say(bound.render("tensor", errors))
    judged = bound.judged(errors)
    worst = max(judged, key=lambda error: error.use)
    within = sum(error.use <= 1 for error in judged)
    verdict = shown.expect(worst.use <= 1, f"{worst.name} is outside the parity bound")
    page.say(
        f"\n{verdict}: {within} of {len(judged)} tensors are within {bound.BOUND} (those of at least "
        f"{bound.LEAST_ELEMENTS} elements are judged).\nNearest to the bound: {_describe(worst)}."
    )
    shown.expect_native(native, "while the MLPs were compared", len(given))
    shown.figures["alone"] = {
        "bound": bound.BOUND,
        "native_calls": native,
        "errors": errors,
        "worst": worst.name,
        "worst_use": worst.use,
        "within": within,
        "judged": len(judged),
    }


def show_whole(shown: Shown, loaded: Loaded, ids: Tensor, names: Sequence[str]) -> dict[str, training.Step]:
    """Loss and gradients of the whole model in three arms, one after another. Leaves the model patched."""
    page.heading(5, f"Parity: a training step of the whole model on {ids.shape[1]} tokens of 'Pride and Prejudice'")
    with page.working("training step, reference"):
        reference = training.measure(training.widen(loaded), ids)
    with page.working("training step, unpatched"):
        unpatched = training.measure(loaded.model, ids)
    stock = bound.errors_of(unpatched.tensors, reference.tensors)
    unpatched.tensors.clear()
    with page.working("training step, unpatched, channels reordered"):
        other = _control(loaded, ids, names, reference.tensors)
    entry.accelerate()
    with page.working("training step, patched"):
        patched = training.measure(loaded.model, ids)
    native = entry.status().native_calls()
    ours = bound.errors_of(patched.tensors, reference.tensors)
    sizes = {name: tensor.numel() for name, tensor in reference.tensors.items()}
    for step in (reference, patched):
        step.tensors.clear()

    found = [bound.TensorError(name, size, stock[name], ours[name]) for name, size in sizes.items()]
    noise = [bound.TensorError(name, size, stock[name], other[name]) for name, size in sizes.items() if other]
    page.say(f"Relative L2 error against the {_reference(loaded)} reference, of the logits and of every gradient.\n")
    page.say(bound.render("logits, and gradients of", found, noise))
    judged, judged_noise = bound.judged(found), bound.judged(noise)
    whole = _whole(judged, judged_noise)
    verdict = shown.expect(whole.use <= 1, "the errors of the whole model are outside the parity bound")
    if noise:
        page.say(
            "\nThe control is the unpatched library itself with the channels of its MLPs in another order: the same\n"
            "function, summed in another order. Through a whole model one rounding moves all that follow, so a single\n"
            f"tensor's ratio says little: {_over(judged_noise)} of {len(judged)} exceed the bound in the control, and "
            f"{_over(judged)} in the patched model.\nJudged is therefore the root mean square over all tensors."
        )
    page.say(
        f"\n{verdict}: unpatched {whole.unpatched:.2e}{' (both orders)' if noise else ''}, patched "
        f"{whole.patched:.2e}; the bound is {bound.BOUND}."
    )
    off_stock, off_ours = (each.loss - reference.loss for each in (unpatched, patched))
    verdict = shown.expect(abs(off_ours) <= abs(off_stock) + bound.LOSS_FLOOR, "the loss is too far off")
    page.say(
        f"{verdict}: the loss is {reference.loss:.5f}, unpatched {off_stock:+.5f}, patched {off_ours:+.5f} "
        f"(may be {bound.LOSS_FLOOR} further off than unpatched)."
    )
    shown.expect_native(native, "while training", training.FORWARDS * len(names))
    steps = {"reference": reference, "unpatched": unpatched, "patched": patched}
    shown.figures["whole"] = {
        "tokens": ids.shape[1],
        "bound": bound.BOUND,
        "loss": {name: step.loss for name, step in steps.items()},
        "native_calls": native,
        "errors": found,
        "control_errors": other,
        "unpatched": whole.unpatched,
        "patched": whole.patched,
        "over_bound": {"patched": _over(judged), "control": _over(judged_noise)},
    }
    return steps


def _control(loaded: Loaded, ids: Tensor, names: Sequence[str], reference: dict[str, Tensor]) -> dict[str, float]:
    """Errors of the unpatched library with its channels reordered; {} where the model can't be reordered."""
    reordered = control.Reordered(loaded, names)
    if not reordered:
        return {}
    _, logits = training.run_step(reordered.model, ids)
    tensors = {"logits": logits, **training.gradients(reordered.model)}
    return bound.errors_of(reordered.in_model_order(tensors), reference)


def _whole(judged: list[bound.TensorError], noise: list[bound.TensorError]) -> bound.TensorError:
    """All tensors together; the unpatched library counts with both of its arms, where it has two."""
    both = [error.unpatched for error in judged] + [error.patched for error in noise]
    ours = bound.together("all", judged)
    return bound.TensorError("all", ours.elements, bound.root_mean_square(both), ours.patched)


def _over(errors: list[bound.TensorError]) -> int:
    return sum(error.use > 1 for error in errors)


def _describe(error: bound.TensorError) -> str:
    return f"{error.name}, unpatched {error.unpatched:.2e}, patched {error.patched:.2e}, {error.use:.0%} of it"


def _reference(loaded: Loaded) -> str:
    return dtype_name(wider(loaded.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
