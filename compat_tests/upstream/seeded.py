"""A pytest plugin: each test starts from the same random numbers, so that two runs of a suite compare."""

from __future__ import annotations

import random

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
