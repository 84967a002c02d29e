"""What a command can't do, and any exception in one line. A leaf: imports nothing of ours."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def type_and_first_line(error: BaseException) -> str:
    """`ValueError: the first line of its message`; the type alone where it has none."""
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error).strip() else kind


class CommandError(Exception):
    """What a command can't do, in one line for the user. The exit code is 2, and nothing was changed."""
