"""Who waits for whom in the Blackwell kernels, in the model of the GPU: for no tile, one and many, and with faults.

These faults are beside those of test_blackwell.py, and as there: something that someone could write, as an edit of the
PTX.
Legend as in blackwell_forward.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import machine_code
import ptx_machine
import pytest
from blackwell_kernels import (
    ARCHS,
    EVERY,
    OFTEN,
    Build,
    Call,
    Configuration,
    Launch,
    builder,
    edited,
    kinds,
    launcher,
    named,
    needs_a_compiler,
)
from ptx_machine import Fault, Program, parse

from fusepatch.kernels.gated_mlp.blackwell_configuration import Backward

pytestmark = [machine_code.needs_the_dsl, needs_a_compiler]
BOTH = [OFTEN[1], replace(OFTEN[2], keep_gate_up=True)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return builder(tmp_path_factory)


@pytest.fixture(scope="module")
def launch(compiled: Build) -> Launch:
    return launcher(compiled)


# ------------------------------------------------------------------------------------------------ no tile, one and many


def run_beyond_the_tiles(call: Call, program: Program, seeds: range) -> dict[str, int]:
    """The block behind the last one that has a tile: what it did."""
    blocks = call.launched.grid[0]
    done: dict[str, int] = {}
    for seed in seeds:
        machine = ptx_machine.Machine(
            program,
            call.launched.arguments,
            {},  # it touches no tensor
            blocks,
            blocks + 1,
            call.configuration.dtype,
            seed,
            call.launched.shared_bytes,
        )
        machine.run()
        for name, count in machine.counts.items():
            done[name] = done.get(name, 0) + count
    return done


@pytest.mark.parametrize("configuration", kinds(3))
def test_a_block_without_a_tile_ends_and_does_nothing(launch: Launch, configuration: Configuration) -> None:
    """No kernel is launched so today; it holds for any grid."""
    call = launch(configuration, 128, 64, 64, 1)
    seeds = range(8)
    done = run_beyond_the_tiles(call, call.program, seeds)
    quiet = "cp.async.bulk.tensor", "tcgen05.mma", "tcgen05.ld", "tcgen05.commit", "mbarrier.arrive", "st.shared"
    assert not [name for name in done if name.startswith(quiet)]
    for name in ("alloc", "relinquish_alloc_permit", "dealloc"):  # by one warp each
        assert sum(count for each, count in done.items() if each.startswith(f"tcgen05.{name}")) == len(seeds)


@pytest.mark.parametrize("what", ["dealloc", "alloc", "relinquish_alloc_permit"])
@pytest.mark.parametrize("configuration", BOTH, ids=named)
def test_what_only_a_block_with_tiles_does_is_seen(
    compiled: Build, launch: Launch, configuration: Configuration, what: str
) -> None:
    """Here block 0 alone has a tile: the instruction is put behind a branch that the others take."""
    kernel, _ = compiled(configuration)
    call = launch(configuration, 128, 64, 64, 1)
    jump = "mov.u32 %r90001, %ctaid.x;\nsetp.ne.b32 %p90001, %r90001, 0;\n@%p90001 bra $L__OVER;\n"
    ptx = edited(kernel.artifacts.PTX, rf"(tcgen05\.{what}[^;]*;)", jump + r"\1" + "\n$L__OVER:\n")
    call.run(1, parse(ptx))  # it shows in no block that has a tile
    assert max(call.errors().values()) < 5e-4
    with pytest.raises(Fault):
        run_beyond_the_tiles(call, parse(ptx), range(8))


@pytest.mark.parametrize("configuration", BOTH, ids=named)
def test_a_loop_that_runs_at_least_once_is_seen(compiled: Build, launch: Launch, configuration: Configuration) -> None:
    kernel, _ = compiled(configuration)
    call = launch(configuration, 128, 64, 64, 1)
    first_check = r"setp\.ge\.s32\s+(%p\d+), %r\d+, %r\d+;"
    places = len(re.findall(first_check, kernel.artifacts.PTX))
    assert places == (5 if isinstance(configuration, Backward) else 3)  # one for each warp that goes through tiles
    for place in range(places):
        numbers = iter(range(places))
        ptx = edited(
            kernel.artifacts.PTX,
            first_check,
            lambda match, place=place, numbers=numbers: (
                f"mov.pred {match[1]}, 0;" if next(numbers) == place else match[0]
            ),
        )
        with pytest.raises(Fault):
            run_beyond_the_tiles(call, parse(ptx), range(4))


@pytest.mark.parametrize("steps", ["one", "one less than", "as many as", "one more than"])
@pytest.mark.parametrize("configuration", kinds(3))
def test_as_many_steps_as_stages(launch: Launch, configuration: Configuration, steps: str) -> None:
    """Of K, about as many as there are stages, of one tile and of one more than there are accumulators."""
    stages = configuration.tile.stages
    k_tiles = {"one": 1, "one less than": stages - 1, "as many as": stages, "one more than": stages + 1}[steps]
    for tiles in (1, 3):
        call = launch(configuration, 128 * (tiles - 1) + 1, 64 * k_tiles, 8, 1)
        assert call.launched.grid[0] == 1
        call.run(seed=k_tiles)
        assert max(call.errors().values()) < 5e-4


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in OFTEN[:2]), id=named(each)) for each in EVERY],
)
def test_the_program_is_the_same_on_sm_103(compiled: Build, configuration: Configuration) -> None:
    """So what is said of the PTX of sm_100a, here and in test_blackwell_maps.py, is said of both."""
    programs = [compiled(configuration, arch)[0].artifacts.PTX for arch in ARCHS]
    assert [len(re.findall(r"^\.target .*$", ptx, re.MULTILINE)) for ptx in programs] == [1, 1]
    first, second = (edited(ptx, r"^\.target [^\n]*", "", flags=re.MULTILINE) for ptx in programs)
    assert first == second


# -------------------------------------------------------------------------------------------------------------- faults


def is_seen(call: Call, ptx: str, seeds: int = 12) -> bool:
    """A fault in the order of things need not show every time: on one of a few seeds."""
    program = parse(ptx)
    for seed in range(seeds):
        try:
            call.run(seed, program)
        except Fault:
            return True
        except NotImplementedError as error:
            if "cta_group::2" in str(error):  # the model knows no pairs of CTAs: nothing of ours is for them
                return True
            raise
        if max(call.errors().values()) > 5e-4:
            return True
    return False


@pytest.mark.parametrize("configuration", BOTH, ids=named)
def test_what_is_right_is_not_taken_for_a_fault(compiled: Build, launch: Launch, configuration: Configuration) -> None:
    kernel, _ = compiled(configuration)
    assert not is_seen(launch(configuration, 520, 456, 72, 1), kernel.artifacts.PTX, seeds=1)


_WAIT = (
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*"
    r"mbarrier\.try_wait\.parity\.shared\.b64 P1, (\[[^\]]*\]), (%r\d+), \d+;.*?DONE:\s*\}"
)


def waits_in_loops(ptx: str) -> list[re.Match[str]]:
    """All but those with which a warp lets what it has started come to an end.

    Forward: for a free stage, free accumulators, a full stage, full accumulators. Backward: for a free stage, a free
    slot, one whose results are done, free accumulators, a full stage, full accumulators, a full slot.
    """
    labels = {match[1]: match.start() for match in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    jumps = [(labels[match[1]], match.start()) for match in re.finditer(r"bra(?:\.uni)?\s+(\$L\w+);", ptx)]
    return [
        match
        for match in re.finditer(_WAIT, ptx, re.DOTALL)
        if any(start < match.start() < end for start, end in jumps)
    ]


def _without(match: re.Match[str]) -> str:
    return ""


def _of_the_other_phase(match: re.Match[str]) -> str:
    return f"xor.b32 %r90001, {match[2]}, 1;\n" + match[0].replace(f" {match[2]},", " %r90001,")


@pytest.mark.parametrize("change", [_without, _of_the_other_phase], ids=["left out", "of the other phase"])
@pytest.mark.parametrize(
    ("configuration", "which"),
    [
        pytest.param(
            configuration,
            which,
            marks=[pytest.mark.slow] if isinstance(configuration, Backward) and which not in (1, 2, 6) else [],
            id=f"{type(configuration).__name__.lower()}-{which}",
        )
        for configuration in BOTH
        for which in range(7 if isinstance(configuration, Backward) else 4)
    ],
)
def test_every_wait_is_needed(
    compiled: Build,
    launch: Launch,
    configuration: Configuration,
    which: int,
    change: Callable[[re.Match[str]], str],
) -> None:
    kernel, _ = compiled(configuration)
    ptx = kernel.artifacts.PTX
    waits = waits_in_loops(ptx)
    assert len(waits) == (7 if isinstance(configuration, Backward) else 4)
    start, end = waits[which].span()
    assert is_seen(launch(configuration, 520, 456, 72, 1), ptx[:start] + change(waits[which]) + ptx[end:])


_COMMIT = r"tcgen05\.commit[^;]*;"
_ARRIVE = r"mbarrier\.arrive\.shared\.b64 (%rd\d+), (\[[^\]]*\]), (%r\d+);"
_BY_ONE = "elect.sync %r90002|%p90002, -1;\nnot.pred %p90003, %p90002;\n@%p90003 bra $L__ONE;\n{}\n$L__ONE:\n"
_AFTER = r"tcgen05\.fence::after_thread_sync;"
_OTHER_INSTRUCTIONS = r"(?:(?!tcgen05\.fence::after).)*?"


def _committed_first(ptx: str) -> str:
    """A tile's commit, before its first instruction."""
    commit = re.findall(_COMMIT, ptx)[1]
    return edited(ptx.replace(commit, "", 1), _AFTER, lambda match: match[0] + "\n" + _BY_ONE.format(commit), 1)


def _released_first(ptx: str) -> str:
    """Accumulators, before the epilogue reads them."""
    arrive = list(re.finditer(_ARRIVE, ptx))[-1]
    move = f"mov.b32 %r90003, 1;\nmbarrier.arrive.shared.b64 %rd90001, {arrive[2]}, %r90003;"
    rest = ptx[: arrive.start()] + ptx[arrive.end() :]
    return edited(
        rest, rf"{_AFTER}(?={_OTHER_INSTRUCTIONS}tcgen05\.ld)", lambda match: match[0] + "\n" + _BY_ONE.format(move), 1
    )


def _by_all_lanes(ptx: str) -> str:
    """The last thing that one lane says for its warp: that accumulators are free."""
    arrive = list(re.finditer(_ARRIVE, ptx))[-1].start()
    elected = list(re.finditer(r"not\.pred\s+(%p\d+), %p\d+;", ptx[:arrive]))[-1]
    return ptx[: elected.start()] + f"mov.pred {elected[1]}, 0;" + ptx[elected.end() :]


def _by_one_lane(ptx: str) -> str:
    return edited(ptx, r"tcgen05\.relinquish[^;]*;", lambda match: _BY_ONE.format(match[0]))


def _last_commit_left_out(ptx: str) -> str:
    commits = list(re.finditer(_COMMIT, ptx))
    return ptx[: commits[1].start()] + ptx[commits[1].end() :]


FAULTS: dict[str, Callable[[str], str]] = {
    "the right to allocate is kept": lambda ptx: edited(ptx, r"tcgen05\.relinquish[^;]*;", ""),
    "one lane gives back the right to allocate": _by_one_lane,
    "accumulators are released before they are read": _released_first,
    "every lane releases accumulators": _by_all_lanes,
    "a tile is committed before its instructions": _committed_first,
    "no commit behind a stage": lambda ptx: edited(ptx, _COMMIT, "", 1),
    "no commit behind a tile": _last_commit_left_out,
    "mbarriers are not shown to TMA": lambda ptx: edited(ptx, r"fence\.mbarrier_init[^;]*;", ""),
    "mbarriers are used before they are set up": lambda ptx: edited(ptx, r"bar\.sync\s+0;", ""),
    "tensor memory is used before it is there": lambda ptx: edited(ptx, r"bar\.sync\s+2, 160;", ""),
    "the multiplying warp does not wait for tensor memory": lambda ptx: edited(ptx, r"bar\.sync\s+2, 160;", "", 1),
    "tensor memory is freed before all have read it": lambda ptx: edited(ptx, r"bar\.sync\s+3, 128;", ""),
    "lanes are not brought together": lambda ptx: edited(ptx, r"bar\.warp\.sync\s+-1;", ""),
    "lanes are brought together before their fences": lambda ptx: edited(
        ptx, r"(fence\.proxy\.async\S*;)(\s+)(bar\.warp\.sync\s+-1;)", r"\3\2\1"
    ),
    "a commit for a pair of CTAs": lambda ptx: edited(ptx, r"(tcgen05\.commit\.cta_group::)1", r"\g<1>2"),
}


@pytest.mark.parametrize(
    ("configuration", "fault"),
    [
        pytest.param(
            configuration,
            fault,
            marks=[pytest.mark.slow] if isinstance(configuration, Backward) and "lanes" not in fault else [],
            id=f"{type(configuration).__name__.lower()}-{fault}",
        )
        for configuration in BOTH
        for fault in FAULTS
        # The forward kernel's epilogue meets at a barrier before it stores, and then no warp reads any more.
        if isinstance(configuration, Backward) or not re.search("brought together|before all have read", fault)
    ],
)
def test_a_fault_is_seen(compiled: Build, launch: Launch, configuration: Configuration, fault: str) -> None:
    kernel, _ = compiled(configuration)
    assert is_seen(launch(configuration, 520, 456, 72, 1), FAULTS[fault](kernel.artifacts.PTX))
