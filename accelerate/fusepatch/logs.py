"""The `fusepatch` logger: how much it says is `FUSEPATCH_LOG`, and where to is the program's business."""

from __future__ import annotations

import logging

_LEVELS = {"off": logging.CRITICAL + 1, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}

_logger = logging.getLogger("fusepatch")
_handler: logging.Handler | None = None


def configure(level: str) -> None:
    """Sets the level. Our lines go where the program sends its log, and to stderr where it has configured none."""
    global _handler
    _logger.setLevel(_LEVELS[level])
    if _handler is None and not _logger.hasHandlers():
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        _handler.addFilter(lambda record: len(logging.getLogger().handlers) == 0)  # the program configured it since
        _logger.addHandler(_handler)
