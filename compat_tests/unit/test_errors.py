"""errors.py: an exception in one line."""

from __future__ import annotations

import pytest

from fusepatch.errors import first_line, type_and_first_line


@pytest.mark.parametrize(
    ("error", "first", "with_type"),
    [
        (ValueError("no such size"), "no such size", "ValueError: no such size"),
        (RuntimeError("\n  the launch failed\nat kernel 3"), "the launch failed", "RuntimeError: the launch failed"),
        (KeyError(), "KeyError", "KeyError"),
        (OSError(" \n "), "OSError", "OSError"),
        (SystemExit(3), "3", "SystemExit: 3"),
    ],
)
def test_one_line(error: BaseException, first: str, with_type: str) -> None:
    assert first_line(error) == first
    assert type_and_first_line(error) == with_type
