"""FLA's own `chunk_kda` and `chunk_gated_delta_rule` need a GPU: a backend that stands in for them on a CPU."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from fusepatch.kernels.linear_attention import arguments
from fusepatch.kernels.linear_attention import reference as definition
from fusepatch.shims import fla_linear_attention as shim

pytest.importorskip("fla")
fla_backends = pytest.importorskip("fla.backends")
import fla.ops.gated_delta_rule  # noqa: E402
import fla.ops.kda  # noqa: E402

OPS = ("kda", "gated_delta_rule")
FUNCTIONS = {"kda": fla.ops.kda.chunk_kda, "gated_delta_rule": fla.ops.gated_delta_rule.chunk_gated_delta_rule}


def registry(op: str) -> Any:
    """FLA's registry of backends for the op."""
    if op == "kda":
        return fla_backends._function_registries[inspect.unwrap(FUNCTIONS["kda"])]
    return fla_backends._operation_registries["gated_delta_rule"]


class Library(fla_backends.BaseBackend):
    """The stand-in for FLA's own code: comes after ours."""

    backend_type = "stand_in"
    priority = 9

    def __init__(self) -> None:
        self.calls = 0

    def _run(self, op: str, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        names = tuple(inspect.signature(FUNCTIONS[op]).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        known = {name: value for name, value in given.items() if name in shim._READ}
        request = arguments.read(op == "kda", **known)
        assert isinstance(request, arguments.Request), request
        return definition.run(request.call, request.inputs, bool(given.get("output_final_state")))

    def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("kda", *args, **kwargs)

    def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("gated_delta_rule", *args, **kwargs)


@contextlib.contextmanager
def standing_in() -> Iterator[Library]:
    """Registers the stand-in for both ops."""
    found, registries = Library(), [registry(op) for op in OPS]
    for each in registries:
        each.register(found)
    try:
        yield found
    finally:
        for each in registries:
            each._backends.pop("stand_in", None)
