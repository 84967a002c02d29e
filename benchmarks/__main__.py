"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from . import results
from .cases import ACTIVATIONS, DTYPES, GROUPS, LAYOUTS, MODES, Case, parse_shapes

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="The benchmarks of fusepatch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_gated_mlp,
        _add_gated_mlp_kernels,
        _add_linear_attention,
        _add_engram_gate,
        _add_list,
        _add_plot,
        _add_table,
        _add_merge,
    ):
        add(commands)
    return parser


def _add_gated_mlp(commands: _Commands) -> None:
    parser = commands.add_parser("gated_mlp", help="check and time every arm of the gated MLP")
    parser.add_argument("--arms", help="comma list of names, `default`, `all`; see `list`")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help=f"{', '.join(GROUPS)}, all, or M,H,I such as 8192,2048,8192 (default: bench; tiny on a CPU)",
    )
    parser.add_argument(
        "--modes",
        help=f"comma list of {', '.join(MODES)} (default: all but power; of decode shapes forward). memory: a stack of "
        "eight MLPs. host: the host's time, at a small shape of its own. power: clock and power of the GPU",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--activation", default="silu", help=f"comma list of {', '.join(ACTIVATIONS)} (default: silu)")
    parser.add_argument("--layout", choices=LAYOUTS, default="separate", help="of gate and up in the stock module")
    _limits(parser, 4, "for timing one shape in one mode, all arms together")
    parser.add_argument(
        "--prepare-seconds",
        type=_positive,
        default=120.0,
        help="within which an arm must have compiled and tuned for all shapes (default: 120)",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keeps what arms printed while they were tried")
    _where(parser)
    parser.set_defaults(run=_gated_mlp)


def _add_gated_mlp_kernels(commands: _Commands) -> None:
    parser = commands.add_parser("gated_mlp_kernels", help="the fused kernels against the matrix products they replace")
    parser.add_argument("--backend", help="of the fused route (default: hopper; reference on a CPU)")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="as for gated_mlp")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="silu")
    _limits(parser, 2, "for timing one part of one shape")
    _where(parser)
    parser.set_defaults(run=_gated_mlp_kernels)


def _add_linear_attention(commands: _Commands) -> None:
    parser = commands.add_parser("linear_attention", help="KDA, the gated delta rule: FLA's kernels, others, ours")
    parser.add_argument("--ops", default="kda", help="comma list of kda, gated_delta_rule (default: kda)")
    parser.add_argument("--arms", help="comma list of fla, fla_tilelang, flash_qla, fusepatch (default: all of the op)")
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="compile what would be timed into the caches on disk, and time nothing; others may use the GPU meanwhile",
    )
    parser.add_argument(
        "--shapes", nargs="+", metavar="B,T,H", help="batch, tokens, heads of 128 (default: 1,8192,32 and 4,2048,16)"
    )
    parser.add_argument(
        "--scopes", default="op,layer", help="comma list: the op alone, FLA's layer (default: op,layer)"
    )
    parser.add_argument("--modes", help="comma list of train, train_graph, forward, host, memory (default: all)")
    parser.add_argument("--model", action="store_true", help="a training step of a language model instead")
    _limits(parser, 4, "as for gated_mlp")
    _where(parser)
    parser.set_defaults(run=_linear_attention)


def _add_engram_gate(commands: _Commands) -> None:
    parser = commands.add_parser("engram_gate", help="check and time every arm of the Engram gate")
    parser.add_argument(
        "--arms", help="comma list of names, `default`, `variants` (other launch shapes of the kernels)"
    )
    parser.add_argument("--tokens", help="comma list (default: 4096,16384; 48 on a CPU)")
    parser.add_argument("--streams", type=_positive_int, help="(default: 4)")
    parser.add_argument("--width", type=_positive_int, help="of a stream (default: 5120; 40 on a CPU)")
    parser.add_argument("--embedding", type=_positive_int, help="width of what is projected (default: 6144)")
    parser.add_argument(
        "--scopes", default="gate,consumer", help="comma list: the gate alone, and with projection and its gradients"
    )
    parser.add_argument("--modes", help="comma list of forward, train, backward, host (default: all)")
    _limits(parser, 4, "as for gated_mlp")
    _where(parser)
    parser.set_defaults(run=_engram_gate)


def _add_list(commands: _Commands) -> None:
    parser = commands.add_parser("list", help="the arms, shapes and modes there are, and what is missing here")
    parser.set_defaults(run=_list)


def _add_plot(commands: _Commands) -> None:
    parser = commands.add_parser("plot", help="draw the pictures from the results")
    _reading(parser)
    parser.add_argument(
        "--base", choices=("gemm_floor", "eager"), default="gemm_floor", help="what times are drawn over"
    )
    parser.add_argument(
        "--to", type=Path, default=Path(__file__).parent / "pictures", help="the folder of the pictures"
    )
    parser.set_defaults(run=_plot)


def _add_table(commands: _Commands) -> None:
    parser = commands.add_parser("table", help="a table in markdown from the results")
    _reading(parser)
    parser.add_argument("--modes", default="train,forward", help="comma list (default: train,forward)")
    parser.add_argument("--base", default="eager", help="the arm that the others are compared with (default: eager)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it between the marker comments of FILE")
    parser.set_defaults(run=_table)


def _add_merge(commands: _Commands) -> None:
    parser = commands.add_parser("merge", help="add the rows of another results folder that are not here yet")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.set_defaults(run=_merge)


def _limits(parser: argparse.ArgumentParser, seconds: int, what: str) -> None:
    """What `timing.Limits` is made of."""
    parser.add_argument("--repeats", type=_positive_int, default=50, help="batches of each arm, at most (default: 50)")
    parser.add_argument(
        "--seconds-per-case", type=_positive, default=float(seconds), help=f"{what} (default: {seconds})"
    )


def _where(parser: argparse.ArgumentParser) -> None:
    """What `_is_on_cpu` reads."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, for the harness itself"
    )
    parser.add_argument("--save", action="store_true", help="append the rows to the results")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="the folder to append to with --save")


def _is_on_cpu(arguments: argparse.Namespace) -> bool:
    """Raises ValueError for a device that is not there, and for a rehearsal among the results."""
    import torch

    on_cpu = arguments.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here. --device cpu rehearses the harness")
    if on_cpu and arguments.save and arguments.results.resolve() == results.RESULTS.resolve():
        raise ValueError("a dry run is no result: --save needs --results with a folder of its own")
    return on_cpu


def _reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--benchmark", default="gated_mlp")
    parser.add_argument("--run", action="append", dest="runs", help="a run to show (default: the latest); repeatable")
    parser.add_argument("--results", type=Path, default=results.RESULTS)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _positive_int(text: str) -> int:
    return int(_positive(text)) or 1


def _known(text: str, kind: str, known: Sequence[str]) -> tuple[str, ...]:
    """The words of a comma list. Raises ValueError for one that is not known."""
    words = tuple(text.split(","))
    for word in words:
        if word not in known:
            raise ValueError(f"there is no {kind} {word!r}: known are {', '.join(known)}")
    return words


def _gated_mlp(arguments: argparse.Namespace) -> None:
    from . import arms, gated_mlp, timing

    on_cpu = _is_on_cpu(arguments)
    modes = None if arguments.modes is None else _known(arguments.modes, "mode", MODES)
    activations = _known(arguments.activation, "activation", ACTIVATIONS)
    shapes = parse_shapes(arguments.shapes or ["tiny" if on_cpu else "bench"])
    dtype = DTYPES[arguments.dtype]
    gated_mlp.run(
        gated_mlp.Options(
            arms=tuple(arms.select(arguments.arms)),
            cases=tuple(
                Case(shape, dtype, activation, arguments.layout, arguments.device)
                for activation in activations
                for shape in shapes
            ),
            modes=modes,
            limits=timing.Limits(arguments.repeats, arguments.seconds_per_case),
            prepare_seconds=arguments.prepare_seconds,
            logs=arguments.logs,
            save_to=arguments.results if arguments.save else None,
        )
    )


def _gated_mlp_kernels(arguments: argparse.Namespace) -> None:
    from fusepatch.decline import Route
    from fusepatch.kernels.gated_mlp import choose

    from . import mlp_kernels, timing

    on_cpu = _is_on_cpu(arguments)
    fused = {each.name: each for each in choose.BACKENDS if Route.FUSED in each.routes and not each.whole}
    fused[choose.REFERENCE.name] = choose.REFERENCE
    (name,) = _known(arguments.backend or ("reference" if on_cpu else "hopper"), "fused backend", tuple(fused))
    mlp_kernels.run(
        mlp_kernels.Options(
            backend=fused[name],
            cases=tuple(
                Case(shape, DTYPES[arguments.dtype], arguments.activation, device=arguments.device)
                for shape in parse_shapes(arguments.shapes or ["tiny" if on_cpu else "bench"])
            ),
            limits=timing.Limits(arguments.repeats, arguments.seconds_per_case),
            save_to=arguments.results if arguments.save else None,
        )
    )


def _linear_attention(arguments: argparse.Namespace) -> None:
    from . import linear_arms, linear_attention, linear_cases, timing

    on_cpu = _is_on_cpu(arguments)
    save_to = arguments.results if arguments.save else None
    if arguments.model:
        from . import linear_model

        linear_model.run_model(linear_model.Model(), save_to)
        return
    shapes = linear_cases.TINY if on_cpu else linear_cases.SHAPES
    if arguments.shapes:
        shapes = tuple(linear_cases.parse_shape(word) for word in arguments.shapes)
    names = [arm.name for arm in linear_arms.ARMS]
    linear_attention.run(
        linear_attention.Options(
            shapes=shapes,
            ops=_known(arguments.ops, "op", tuple(linear_cases.OPS)),
            arms=None if arguments.arms is None else _known(arguments.arms, "arm", names),
            only_prepare=arguments.prepare_only,
            scopes=_known(arguments.scopes, "scope", linear_cases.SCOPES),
            modes=linear_attention.MODES
            if arguments.modes is None
            else _known(arguments.modes, "mode", linear_attention.MODES),
            device=arguments.device,
            limits=timing.Limits(arguments.repeats, arguments.seconds_per_case),
            save_to=save_to,
        )
    )


def _engram_gate(arguments: argparse.Namespace) -> None:
    from . import engram_arms, engram_gate, timing

    on_cpu = _is_on_cpu(arguments)
    usual = engram_arms.Case(1)
    all_tokens, width, embedding = engram_gate.TOKENS, usual.width, usual.embedding
    if on_cpu:
        all_tokens, width, embedding = engram_gate.TINY
    if arguments.tokens is not None:
        all_tokens = tuple(_positive_int(text) for text in arguments.tokens.split(","))
    engram_gate.run(
        engram_gate.Options(
            arms=tuple(engram_arms.select(arguments.arms)),
            cases=tuple(
                engram_arms.Case(
                    tokens,
                    arguments.streams or usual.streams,
                    arguments.width or width,
                    arguments.embedding or embedding,
                    scope,
                    arguments.device,
                )
                for scope in _known(arguments.scopes, "scope", engram_arms.SCOPES)
                for tokens in all_tokens
            ),
            modes=engram_gate.MODES if arguments.modes is None else _known(arguments.modes, "mode", engram_gate.MODES),
            limits=timing.Limits(arguments.repeats, arguments.seconds_per_case),
            save_to=arguments.results if arguments.save else None,
        )
    )


def _list(arguments: argparse.Namespace) -> None:
    from . import listing

    print(listing.render())


def _plot(arguments: argparse.Namespace) -> None:
    from . import plot

    for path in plot.draw_all(arguments.benchmark, arguments.runs, arguments.base, arguments.results, arguments.to):
        print(path)


def _table(arguments: argparse.Namespace) -> None:
    from . import markdown

    text = markdown.tables(
        arguments.benchmark, arguments.runs, arguments.modes.split(","), arguments.results, arguments.base
    )
    print(text)
    if arguments.write is not None:
        markdown.put_between_markers(arguments.write, arguments.benchmark, text)


def _merge(arguments: argparse.Namespace) -> None:
    print(f"{results.merge(arguments.folder, arguments.results)} rows added")


def main(words: list[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = _parser().parse_args(words)
    try:
        arguments.run(arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
