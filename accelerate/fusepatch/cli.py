"""The `fusepatch` command: run a script accelerated, explain a model, judge it, see it work on real weights.

Nothing heavy is imported before a command needs it, so that `--help` and a mistyped name answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from . import __version__, settings
from .errors import CommandError, first_line

if TYPE_CHECKING:
    import torch

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's arguments) names; returns its exit code."""
    ours, theirs = _split_off_script_arguments(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(ours)
    try:
        code: int = options.command(options, theirs)
    except CommandError as error:
        print(f"fusepatch: {error}", file=sys.stderr)
        return USAGE_ERROR
    return code


# ---------------------------------------------------------------------------------------------------- the arguments

_RUN_NOTES = """\
SCRIPT or MODULE runs as Python itself would run it, unedited; everything after its name belongs to it. The summary
line that fusepatch writes after the first step, or at the exit, goes to stderr (FUSEPATCH_LOG=off silences it).

What is accelerated: this process, what it forks, and the children that multiprocessing and torch.multiprocessing
start with `spawn` or `forkserver`. Python processes that it starts in another way (subprocess, loky) are not, unless
they call fusepatch.accelerate() themselves. Launchers go in front:
  torchrun --nproc-per-node 8 -m fusepatch run train.py --lr 1e-4
"""


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusepatch", description="Runs the models you have on fused GPU kernels, says what it did, and undoes it."
    )
    parser.add_argument("--version", action="version", version=f"fusepatch {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_demo, _add_explain, _add_doctor, _add_parity, _add_tune, _add_run):
        add(commands)
    return parser


def _add_demo(commands: _Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="see it work on the real weights of a small model",
        description="Patches SmolLM2-135M-Instruct with its real weights, compares text, loss, every gradient, time "
        "and memory with and without, and undoes it. Exit code 1 where a promise did not hold.",
    )
    parser.add_argument("--prompt", help="what to ask the model")
    parser.add_argument(
        "--tokens", type=positive_number, default=48, help="how many tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file of another model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.set_defaults(command=_demo)


def _add_explain(commands: _Commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="say which route each module of a model would take, and why",
        description="Builds a model from its configuration, without weights, and says which route each of its modules "
        "would take on this machine's GPU (its CPU, where it has none), and why not a faster one.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, or a name on the Hugging Face hub")
    parser.add_argument(
        "--tokens", type=positive_number, default=2048, help="tokens in one call (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="assume this dtype, not the configuration's"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gguf", metavar="FILE", help="the GGUF file in MODEL to read the configuration from")
    parser.set_defaults(command=_explain)


def _add_doctor(commands: _Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, what would serve here and why not, and what is wrong",
        description="Shows versions, GPUs, which kernels would serve and why not, CUDA libraries that are loaded or "
        "installed, settings and the cache. Exit code 1 where it found a problem; warnings alone are none.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--selfcheck",
        nargs="*",
        choices=_checked_names(),
        metavar="NAME",
        help="check every native kernel anew on every visible GPU, and remember it; with names, those of these ops and "
        "backends",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="run the self-checks, parity and the benchmark of the gated MLP with every backend that can serve here, "
        "and write what came of it to FILE (Markdown), to be attached to an issue; up to 10 minutes "
        "for each backend on each of its routes, and 30 for the benchmark",
    )
    parser.set_defaults(command=_doctor)


def _add_parity(commands: _Commands) -> None:
    from .parity_check import command as parity_command

    parser = commands.add_parser(
        "parity",
        help="compare a model with and without us, by their errors against fp32",
        description=parity_command.DESCRIPTION,
        epilog=parity_command.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parity_command.add_arguments(parser)
    parser.set_defaults(command=lambda options, _: parity_command.main(options))


def _add_tune(commands: _Commands) -> None:
    from .tuning import command as tuning_command

    parser = commands.add_parser(
        "tune",
        help="measure on this GPU which kernels are fastest for a model, and follow that from then on",
        description=tuning_command.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tuning_command.add_arguments(parser)
    parser.set_defaults(command=lambda options, _: tuning_command.main(options))


def _add_run(commands: _Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a script or a module, accelerated and unedited",
        usage="fusepatch run [--ops OPS] [--strict] (SCRIPT | -m MODULE) [ARGS ...]",
        description="Calls fusepatch.accelerate(), then runs a script or a module.",
        epilog=_RUN_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ops", help="the ops to turn on, separated by commas (default: all that are on by default)")
    parser.add_argument("--strict", action="store_true", help="raise where the library's own code would run")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m` does")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="run a file, as `python SCRIPT` does")
    parser.set_defaults(command=_run)


def _checked_names() -> tuple[str, ...]:
    """What can be told to check: ops, and backends with kernels of their own."""
    backends = dict.fromkeys(name for op in settings.OPS.values() for name in op.backends if name != "reference")
    return (*settings.OPS, *backends)


def positive_number(text: str) -> int:
    """What argparse makes of a whole number of at least 1."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def torch_device(name: str) -> torch.device:
    """The device of that name; `auto` is the GPU, or the CPU where there is none. Raises CommandError for no device."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"there is no device {name}: {first_line(error)}") from None
    return device


def _split_off_script_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(ours, the script's): after the script's name, or `-m MODULE`, nothing is ours to parse.

    argparse can't be told so: its REMAINDER still takes an option of ours that follows `-m MODULE`.
    """
    if arguments[:1] != ["run"]:
        return arguments, []
    at = 1
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return [*arguments[:at], *arguments[at + 1 : at + 2]], arguments[at + 2 :]
        if word == "-m":
            return arguments[: at + 2], arguments[at + 2 :]
        if not word.startswith("-") or word.startswith("-m"):
            return arguments[: at + 1], arguments[at + 1 :]
        at += 2 if word == "--ops" else 1
    return arguments, []


# ------------------------------------------------------------------------------------------------------ the commands


def _run(options: argparse.Namespace, theirs: list[str]) -> int:
    from . import run

    if options.module is None and options.script is None:
        raise CommandError("name a script to run, or a module with -m MODULE")
    ops = None if options.ops is None else tuple(name.strip() for name in options.ops.split(","))
    if options.module is not None:
        run.run_module(options.module, theirs, ops, strict=options.strict)
    else:
        run.run_script(options.script, theirs, ops, strict=options.strict)
    return 0


def _demo(options: argparse.Namespace, _: list[str]) -> int:
    from . import demo

    prompt = demo.PROMPT if options.prompt is None else options.prompt
    return demo.run(demo.Options(prompt, options.tokens, options.gguf, options.json))


def _explain(options: argparse.Namespace, _: list[str]) -> int:
    from .model_on_meta import model_on_meta

    model, dtype = model_on_meta(options.model, options.gguf, "fusepatch.explain(model)"), None
    import torch

    from .explanation import explain
    from .settings import SettingsError

    if options.dtype is not None:
        dtype = getattr(torch, options.dtype)
    try:
        found = explain(
            model, tokens=options.tokens, device="cuda" if torch.cuda.is_available() else "cpu", dtype=dtype
        )
    except SettingsError as error:
        raise CommandError(str(error)) from None
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0


def _doctor(options: argparse.Namespace, _: list[str]) -> int:
    from . import doctor

    def tell(line: str) -> None:
        sys.stderr.write(f"fusepatch: {line}\n")  # in one piece: several threads tell
        sys.stderr.flush()

    if options.report is not None:
        if options.selfcheck:
            raise CommandError("--report checks everything: leave out --selfcheck and its names")
        from .doctor import report_file

        try:
            report = report_file.write(options.report, tell)
        except OSError as error:
            raise CommandError(f"can't write {options.report}: {error.strerror}") from None
        tell(f"written: {options.report}")
        if options.json:
            print(json.dumps(report.to_dict(), indent=2))
        return report.exit_code
    found = doctor.examine(selfcheck=options.selfcheck is not None, only=options.selfcheck or (), tell=tell)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return found.exit_code
