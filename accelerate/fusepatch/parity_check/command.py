"""`fusepatch parity`: the comparison, for a local model or a small built-in one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..cli import positive_number, torch_device
from ..errors import CommandError

CONFIG_NAMES = ("llama", "qwen3", "gemma3", "phi3", "fla-transformer", "fla-gdn", "fla-kda")
"""The built-in models; a test compares it with `models.CONFIGS`, which takes torch to import."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

DESCRIPTION = """\
Runs one training step of a model three times, with the same weights and random tokens: in fp32, unpatched, and patched.
What each patched module gave, and the model as a whole, must be as near to fp32 as the unpatched library's own.
"""

EXIT_CODES = """\
exit codes: 0 passed; 1 failed; 2 wrong usage; 3 nothing could be judged, since the unpatched model failed by itself
or nothing ran natively.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser. Imports nothing heavy."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("model", metavar="MODEL_FOLDER", nargs="?", type=Path, help="a local folder of a causal LM")
    what.add_argument(
        "--config",
        choices=CONFIG_NAMES,
        help="a small model with random weights, of this architecture; FLA's run without its autotuning",
    )
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bf16", help="(default: %(default)s)")
    parser.add_argument(
        "--tokens", type=positive_number, default=256, help="tokens in one sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=positive_number, help="how many layers (default: 2 with --config, else all of the model's)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: %(default)s)")
    parser.add_argument("--ops", help="the ops to judge, separated by commas (default: all that are on by default)")
    parser.add_argument(
        "--warmup", action="store_true", help="call warmup() first, as backends need that serve nothing else"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="list every tensor, not its kind only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw every tensor's error ratio (.png, .svg, .pdf)")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises CommandError for what it can't do."""
    for path in (options.json, options.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise CommandError(f"can't write {path}: not a file in a folder that exists")
    if options.plot is not None:
        _check_plot(options.plot)

    from .. import catalogue, entry, settings
    from ..warming import warmup
    from . import models
    from .check import parity

    ops = None if options.ops is None else tuple(name.strip() for name in options.ops.split(","))
    try:
        catalogue.check_ops(ops)
        settings.read()
    except ValueError as error:
        raise CommandError(str(error)) from None
    import torch

    device, dtype = torch_device(options.device), getattr(torch, _DTYPES[options.dtype])
    if options.config is not None:
        chosen = models.built_in(options.config, options.layers or 2, dtype, device)
    else:
        chosen = models.in_folder(options.model.expanduser(), options.layers, dtype, device)
    with models.surroundings(options.config):
        generator = torch.Generator().manual_seed(options.seed)
        ids = torch.randint(0, chosen.vocabulary, (1, options.tokens), generator=generator).to(device)
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        # A mean over tokens has gradients that fp16 can't hold; the errors are relative, so a factor changes nothing.
        loss = (lambda out: out.loss * 1024) if options.dtype == "fp16" else None
        if options.warmup:
            # Of another model: what it is for holds for all modules of one size.
            with entry.accelerated(ops):
                warmup(chosen.build(), options.tokens)
        report = parity(chosen.build, batch, ops=ops, loss=loss, seed=options.seed)
    print(report)
    if options.all and report.tensors:
        print(f"\nevery tensor:\n{report.table()}")
    if options.json is not None:
        _write(options.json, json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")
    if options.plot is not None and report.tensors:
        report.plot(options.plot)
    return report.exit_code


def _check_plot(path: Path) -> None:
    from .. import importhook

    if not importhook.is_installed("matplotlib"):
        raise CommandError('--plot needs matplotlib: pip install "fusepatch[plot]"')
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CommandError(f"{path} must end in .png, .svg or .pdf")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CommandError(f"can't write {path}: {error.strerror or error}") from None
