"""Strict mode's rule, the same for every shim."""

from __future__ import annotations

from .. import settings
from ..decline import Decision, DeclinedError, Route
from ..ledger import Record


def raise_if_short(made: Decision, record: Record) -> None:
    """Raises DeclinedError where the route taken is slower than what was asked for, and nobody chose that."""
    reason = made.reason
    if reason is None or reason.chosen:
        return
    asked = settings.current().ops[record.op].route
    if made.route is Route.ORIGINAL if asked is None else made.route.rank > asked.rank:
        raise DeclinedError(
            f"strict: {record.class_name} would run the route {made.route.value!r}, because {reason.in_words}", reason
        )
