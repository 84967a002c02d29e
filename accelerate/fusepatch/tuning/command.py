"""`fusepatch tune`: measures which backend is fastest for a model on this machine's GPU."""

from __future__ import annotations

import argparse
import json
import sys

from ..cli import positive_number, torch_device
from ..errors import CommandError, first_line

DESCRIPTION = """\
Builds a model from its configuration, without weights, and measures on this machine's GPU which backend is fastest for
each kind of its modules at each number of tokens, against the library's own code; of the backend that won, which way to
cut up its work, too. What it finds is kept under FUSEPATCH_CACHE_DIR, and accelerate() then follows it, on this kind of
GPU with these versions alone.

It may be stopped at any time: what was measured is kept, and the next run goes on from there.
"""
MODES = {"both": ("train", "forward"), "train": ("train",), "inference": ("forward",)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser. Imports nothing heavy."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, or a name on the Hugging Face hub")
    parser.add_argument(
        "--tokens",
        type=positive_number,
        nargs="+",
        required=True,
        metavar="N",
        help="tokens in one call: batch x length",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="not the configuration's")
    parser.add_argument(
        "--for",
        dest="modes",
        choices=tuple(MODES),
        default="both",
        help="what must not become slower: training steps, inference, or both (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes", type=positive_number, default=10, help="begin nothing new after this (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu rehearses, and keeps nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gguf", metavar="FILE", help="the GGUF file in MODEL to read the configuration from")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises CommandError for what it can't do."""
    from .. import settings
    from ..model_on_meta import model_on_meta

    try:
        settings.read()
    except ValueError as error:
        raise CommandError(str(error)) from None
    import torch

    device = torch_device(options.device)
    model = model_on_meta(options.model, options.gguf, "fusepatch.tune(model, token_counts)")

    from .tune import tune

    try:
        report = tune(
            model,
            options.tokens,
            modes=MODES[options.modes],
            seconds=60.0 * options.minutes,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            device=device,
            again=options.again,
            tell=lambda line: print(f"fusepatch: {line}", file=sys.stderr),
        )
    except (ValueError, RuntimeError) as error:
        raise CommandError(first_line(error)) from None
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0
