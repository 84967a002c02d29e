"""The steps of the demo, in the order in which they are shown. The comparisons are in `parity_steps.py`."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import __version__, entry, table
from ..decline import Reason, Route
from ..errors import CommandError
from ..explanation import Explanation, explain
from . import may_rehearse, page, parity_steps, rehearsal, training, undo, weights, writing
from .page import Shown, dtype_name
from .text import TRAINING_TEXT
from .weights import Loaded

if TYPE_CHECKING:
    from . import Options

TRAINING_TOKENS = 384
TIMED_ROUNDS = 3


def show(options: Options, path: Path) -> dict[str, Any]:
    """Prints every step; returns the figures, among them the list `failures`."""
    shown = Shown()
    loaded = _load(shown, path)
    text = loaded.tokenizer(TRAINING_TEXT, return_tensors="pt")["input_ids"]
    ids = text[:, :TRAINING_TOKENS].to(loaded.device)
    before, logits = undo.snapshot(), _logits(loaded.model, ids)
    found = explain(loaded.model, tokens=ids.shape[1])
    rehearse = may_rehearse() and all(module.route == Route.ORIGINAL.value for module in found.modules)
    with rehearsal(rehearse):
        names = _explain(shown, loaded, ids, found, rehearse)
        _write(shown, loaded, options)
        parity_steps.show(shown, loaded, ids, names)
        _measure(shown, loaded, ids, names)
        _report(shown)
        _undo(shown, loaded, ids, before, logits)
    return {**shown.figures, "failures": shown.failures}


def _load(shown: Shown, path: Path) -> Loaded:
    with page.working("importing transformers and reading the model") as watch:
        loaded = weights.load(path)
    import transformers

    count = sum(p.numel() for p in loaded.model.parameters())
    on = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else _cpu()
    print(f"fusepatch {__version__}: gated MLPs with real weights, with and without accelerate()")
    page.heading(1, f"The model: {loaded.name}")
    page.say(f"{path}")
    page.say(
        f"{count / 1e6:.1f} million weights, de-quantised to plain {dtype_name(loaded.dtype)} linears by transformers "
        f"{transformers.__version__}, in {watch.seconds:.1f} s\non {on}, torch {torch.__version__}"
    )
    if loaded.dtype is torch.float32:
        page.say("float32, since this CPU is slow at bfloat16; the reference is float64, and that of parity float32")
    shown.figures["model"] = {
        "name": loaded.name,
        "file": str(path),
        "weights": count,
        "dtype": dtype_name(loaded.dtype),
        "device": on,
        "load_seconds": watch.seconds,
        "versions": {"fusepatch": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    return loaded


def _explain(shown: Shown, loaded: Loaded, ids: Tensor, found: Explanation, rehearse: bool) -> list[str]:
    """The names of the modules that a native route would serve."""
    page.heading(2, "What would run: fusepatch.explain(model)")
    why = {module.reason for module in found.modules}
    if not found.modules:
        raise CommandError(f"{loaded.name} has no module that an op of fusepatch serves")
    if Reason.ENV_DISABLED.value in why:
        raise CommandError("FUSEPATCH or FUSEPATCH_GATED_MLP is 0, which turns off what the demo shows")
    if rehearse:
        page.say(
            f"As it is, every module here would run the library's own code ({', '.join(sorted(filter(None, why)))}).\n"
            "The demo therefore sets FUSEPATCH_GATED_MLP_BACKEND=reference, for itself: the same patches and autograd\n"
            "functions over kernels in plain PyTorch. That rehearses the results on any device, and claims no speed.\n"
        )
        found = explain(loaded.model, tokens=ids.shape[1])
    page.say(found)
    shown.figures["explain"] = found.to_dict()
    shown.figures["rehearsal"] = rehearse
    return [module.name for module in found.modules if module.route != Route.ORIGINAL.value]


def _write(shown: Shown, loaded: Loaded, options: Options) -> None:
    page.heading(3, f"A continuation: {options.tokens} tokens at most, greedy, without and with accelerate()")
    prompt = writing.ask(loaded, options.prompt)
    with page.working("writing, unpatched"):
        unpatched = writing.continue_greedily(loaded.model, prompt, options.tokens)
    with page.working("writing, patched"), entry.accelerated():
        patched = writing.continue_greedily(loaded.model, prompt, options.tokens)
        native = entry.status().native_calls()
    at = writing.parting(unpatched, patched)
    texts = [loaded.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in (unpatched, patched)]
    page.say_wrapped(f"> {options.prompt}")
    page.say_wrapped(f"unpatched: {texts[0]}")
    page.say_wrapped(f"patched:   {texts[1]}")
    difference = None
    if at is None:
        page.say(f"All {len(unpatched)} tokens are the same.")
    else:
        with page.working("asking the reference about the first token that differs"):
            difference = writing.judge_parting(loaded, training.widen(loaded), prompt, unpatched, patched, at)
        page.say(
            f"{at} tokens are the same; then unpatched chose {difference.unpatched!r} and patched "
            f"{difference.patched!r}. The {dtype_name(weights.wider(loaded.dtype))} reference puts\nthe first "
            f"{difference.margin:+.3f} above the second, where all logits spread by {difference.spread:.1f} (standard "
            "deviation)."
        )
    shown.expect_native(native, "while writing")
    shown.figures["continuation"] = {
        "prompt": options.prompt,
        "unpatched": texts[0],
        "patched": texts[1],
        "tokens": (len(unpatched), len(patched)),
        "native_calls": native,
        "difference": difference,
    }


def _measure(shown: Shown, loaded: Loaded, ids: Tensor, names: list[str]) -> None:
    """Leaves the model patched."""
    page.heading(6, "Loss, time and memory of the training step")
    wide = training.widen(loaded)
    with page.working("training step, reference and unpatched"):
        steps = {"reference": training.measure(wide, ids), "unpatched": training.measure(loaded.model, ids)}
    entry.accelerate()
    with page.working("training step, patched"):
        steps["patched"] = training.measure(loaded.model, ids)
    native = entry.status().native_calls()
    with page.working(f"timing, {TIMED_ROUNDS} rounds"):
        arms: training.Arms = {
            "reference": (wide, entry.disabled),
            "unpatched": (loaded.model, entry.disabled),
            "patched": (loaded.model, contextlib.nullcontext),
        }
        seconds = training.time_arms(arms, ids, TIMED_ROUNDS)
    dtypes = {"reference": weights.wider(loaded.dtype)}
    rows = [
        (
            name,
            dtype_name(dtypes.get(name, loaded.dtype)),
            f"{step.loss:.5f}",
            f"{seconds[name] * 1e3:.0f} ms",
            page.mebibytes(step.peak),
            page.mebibytes(step.saved),
        )
        for name, step in steps.items()
    ]
    page.say(table.render(("arm", "dtype", "loss", "time", "peak memory", "saved for backward"), rows))
    page.say(
        f"\nTime: median of {TIMED_ROUNDS}, the arms taking turns; `unpatched` is under fusepatch.disabled() here.\n"
        "Peak memory: above what was there before the step, gradients included. Saved: without parameters."
    )
    shown.expect_native(native, "while training", training.FORWARDS * len(names))
    shown.figures["cost"] = {
        name: {"loss": step.loss, "seconds": seconds[name], "peak_bytes": step.peak, "saved_bytes": step.saved}
        for name, step in steps.items()
    }
    shown.figures["training_native_calls"] = native


def _report(shown: Shown) -> None:
    page.heading(7, "print(fusepatch.status()), counted over step 6")
    status = entry.status()
    page.say(status)
    shown.figures["status"] = status.to_dict()


def _undo(shown: Shown, loaded: Loaded, ids: Tensor, before: undo.Before, logits: Tensor) -> None:
    page.heading(8, "fusepatch.restore(): nothing is left")
    status = entry.status()
    entry.restore()
    left = undo.leftovers(before, status)
    same = torch.equal(_logits(loaded.model, ids), logits)
    count = sum(len(target.classes) for target in status.targets)
    classes = f"{count} patched {'class' if count == 1 else 'classes'}"
    page.say(f"every attribute of {classes} is the object it was, and so is sys.meta_path: {_yes(not left)}")
    page.say(f"the logits are bit-equal to those before: {_yes(same)}")
    shown.failures += [f"left behind: {name}" for name in left]
    if not same:
        shown.failures.append("the logits after restore() differ from those before")
    shown.figures["restored"] = {"leftovers": left, "logits_bit_equal": same}


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def _yes(held: bool) -> str:
    return "yes" if held else "NO"


def _cpu() -> str:
    return f"a CPU ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"
