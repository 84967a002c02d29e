"""`warmup(model, token_counts)`: compiles and self-checks ahead of time, for the sizes that will come.

Besides `accelerate()` the only way by which what a decision sees may change: what it compiles, CUDA-graph capture may
use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from . import catalogue, entry, table
from .decline import Decision, Route

NOT_RUN = "not run"


@dataclass(frozen=True)
class Warmed:
    """One kind of module at one size."""

    class_name: str
    tokens: int
    modules: int
    """How many modules of the model are of this kind."""
    route: str
    """`not run` where a layer could not be run by itself."""
    reason: str | None
    seconds: float


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup()` did."""

    rows: tuple[Warmed, ...]

    @property
    def native(self) -> int:
        """How many of the rows a native route will serve."""
        return sum(row.route not in (Route.ORIGINAL.value, NOT_RUN) for row in self.rows)

    def __str__(self) -> str:
        rows = [
            (
                row.class_name.rpartition(".")[2],
                row.modules,
                row.tokens,
                row.route,
                row.reason or "-",
                f"{row.seconds:.2f}",
            )
            for row in self.rows
        ]
        return table.render(("class", "modules", "tokens", "route", "why not faster", "seconds"), rows)


def warmup(model: nn.Module, token_counts: int | Sequence[int]) -> WarmupReport:
    """Runs each route that `model` would take with these numbers of tokens, once, forward and backward, on dummy data.

    `token_counts` are numbers of tokens in one call: batch times sequence length. The model's weights are read and
    nothing of it is changed. Call it after `accelerate()` and after the model is on its device.

    Of a layer that calls a function with a backend of ours, such as FLA's `chunk_kda`, what comes before the call is
    run too, since it tells what the layer passes; where that fails, the row says `not run`, and why.

    Raises TypeError or ValueError for arguments of another kind, and RuntimeError where `accelerate()` has patched
    nothing that the model uses: a warm-up that warms nothing must not pass for one that did.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"warmup() takes a torch.nn.Module, got {type(model).__name__}")
    counts = sorted(set(check_token_counts(token_counts)))
    rows = [*_warm_modules(model, counts), *_warm_callers(model, counts)]
    if not rows:
        raise RuntimeError(
            f"nothing that {type(model).__name__} uses is patched: call accelerate() first. "
            "print(fusepatch.explain(model)) says which would be."
        )
    return WarmupReport(tuple(rows))


def check_token_counts(given: int | Sequence[int]) -> list[int]:
    """The numbers of tokens as a list, in the order given.

    Raises TypeError for what is not whole numbers, or none, and ValueError for one below 1.
    """
    wanted = f"token_counts must be a positive whole number, or several as in [4096, 8192]; got {given!r}"
    try:
        counts = [given] if isinstance(given, int) else list(given)
    except TypeError:
        raise TypeError(wanted) from None
    if not counts or any(isinstance(count, bool) or not isinstance(count, int) for count in counts):
        raise TypeError(wanted)
    if min(counts) < 1:
        raise ValueError(wanted)
    return counts


def _warm_modules(model: nn.Module, counts: Sequence[int]) -> list[Warmed]:
    """The modules whose class is patched."""
    kinds: dict[tuple[object, ...], list[tuple[catalogue.Target, nn.Module, type[nn.Module]]]] = {}
    for target, module, owner in entry.live_modules(model):
        key = (owner, target.shim.size_of(module))
        kinds.setdefault(key, []).append((target, module, owner))
    rows = []
    for found in kinds.values():
        target, module, owner = found[0]
        for tokens in counts:
            start = time.perf_counter()
            made = target.shim.warm(module, catalogue.forward_of(owner), tokens)
            rows.append(_row(owner, tokens, len(found), made, start))
    return rows


def _warm_callers(model: nn.Module, counts: Sequence[int]) -> list[Warmed]:
    """The layers that call a function for which a backend of ours is registered."""
    rows = []
    for target in catalogue.REGISTRY_TARGETS:
        backend = entry.live_backend(target)
        if backend is None or backend.switch.off is not None:
            continue
        kinds: dict[tuple[object, ...], list[nn.Module]] = {}
        for _, module in catalogue.find_callers(target, model):
            kinds.setdefault((type(module), target.registry_shim.size_of(module)), []).append(module)
        for found in kinds.values():
            for tokens in counts:
                start = time.perf_counter()
                made = target.registry_shim.warm(found[0], target.op, tokens)
                rows.append(_row(type(found[0]), tokens, len(found), made, start))
    return rows


def _row(kind: type, tokens: int, modules: int, made: Decision | str, start: float) -> Warmed:
    name, seconds = f"{kind.__module__}.{kind.__qualname__}", time.perf_counter() - start
    if isinstance(made, str):
        return Warmed(name, tokens, modules, NOT_RUN, made, seconds)
    return Warmed(name, tokens, modules, made.route.value, None if made.reason is None else made.reason.value, seconds)
