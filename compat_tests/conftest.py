"""What every test gets: a clean environment, nothing patched before or after, and poisoned empty tensors."""

from __future__ import annotations

import os

import pytest
import torch

import fusepatch
from fusepatch import settings

if not torch.cuda.is_available():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is first imported, by whichever test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def nothing_patched(monkeypatch: pytest.MonkeyPatch):
    """Each test starts with no FUSEPATCH variable and nothing patched, and must be undoable afterwards."""
    for name in list(os.environ):
        if name.startswith("FUSEPATCH"):
            monkeypatch.delenv(name)
    fusepatch.restore()
    settings.install(None)
    yield
    monkeypatch.undo()
    fusepatch.restore()
    settings.install(None)


@pytest.fixture
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that runs on a CPU, chosen as a user chooses it."""
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "reference")


@pytest.fixture(autouse=True)
def poisoned_empties():
    """`torch.empty` and its like are filled with NaN: what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
