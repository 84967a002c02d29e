"""A pytest plugin: FLA's kernels run in one of the configurations that they would choose from by timing them.

Timing them takes minutes, and how a test ends does not depend on it.
"""

from __future__ import annotations

import contextlib
import importlib

import pytest

_STACK = contextlib.ExitStack()


def pytest_sessionstart() -> None:
    """Before the tests: all of FLA's models are imported, and with them their kernels."""
    with contextlib.suppress(ImportError):
        importlib.import_module("fla.models")
        from fusepatch.parity_check.surroundings import untuned_fla

        _STACK.enter_context(untuned_fla())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Afterwards: the configurations are given back."""
    _STACK.close()
