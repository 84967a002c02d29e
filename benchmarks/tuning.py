"""How Triton's autotuners, of which some peers are made, choose among their candidates here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WARM_UP_MS, MEASURE_MS = 10, 40
"""For each candidate. With Triton's own 25 and 100 the 156 candidates of two peers take half a minute per shape."""


def keep_one_cache() -> None:
    """Keeps Triton's kernels on disk where they are by default, in this process and in those that it starts.

    torch.compile moves that folder with the first kernel of its own, after which all that the trials compiled would be
    compiled again.
    """
    if importlib.util.find_spec("triton") is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", importlib.import_module("triton.knobs").cache.dir)


def compile_only() -> None:
    """Runs each candidate once and keeps no choice on disk: for processes that share the GPU with others."""
    tuner = _autotuner()
    if tuner is None:
        return

    def run_once(self: Any, kernel_call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        kernel_call()
        return [0.0] * len(quantiles)

    def choose_anew(self: Any, key: Any, configs: Any, measure_all: Callable[[], None]) -> bool:
        measure_all()
        return False

    tuner.do_bench = run_once
    tuner.check_disk_cache = choose_anew


def measure_briefly() -> None:
    """Measures each candidate for a shorter time than Triton does."""
    tuner = _autotuner()
    if tuner is None:
        return
    do_bench = importlib.import_module("triton.testing").do_bench

    def measure(self: Any, kernel_call: Callable[[], None], quantiles: Sequence[float]) -> Any:
        return do_bench(kernel_call, warmup=WARM_UP_MS, rep=MEASURE_MS, quantiles=quantiles)

    tuner.do_bench = measure


def compile_side_by_side(workers: int) -> None:
    """Compiles an autotuner's candidates on so many threads before it runs them one after the other.

    What fails to compile fails again where the autotuner runs it, which knows what to make of that.
    """
    tuner = _autotuner()
    try:
        mode = importlib.import_module("triton.runtime._async_compile").AsyncCompileMode
    except ImportError:  # Triton before 3.5
        return
    prune, pool = tuner.prune_configs, ThreadPoolExecutor(workers)

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> Any:
        candidates = prune(self, kwargs)
        options = {name: value for name, value in kwargs.items() if name != "warmup"}
        with mode(pool, ignore_errors=True):
            for candidate in candidates:
                with contextlib.suppress(Exception):
                    self.fn.warmup(*self.nargs.values(), **options, **candidate.all_kwargs())
        return candidates

    tuner.prune_configs = prune_and_compile


def _autotuner() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("triton.runtime.autotuner").Autotuner
