"""What counts as the same code, and what does not, on every interpreter that fusepatch supports."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType

import pytest
from torch.nn import functional as F

from fusepatch import fingerprint

TEMPLATE = """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
"""

SAME = {
    "verbatim": TEMPLATE,
    "other local names": """
def forward(module, hidden_states):
    out = module.down_proj(module.act_fn(module.gate_proj(hidden_states)) * module.up_proj(hidden_states))
    return out
""",
    "another function name": TEMPLATE.replace("def forward", "def anything"),
    "annotations": TEMPLATE.replace("x):", "x: int) -> str:"),
    "annotated local": TEMPLATE.replace("down_proj = ", "down_proj: int = "),
    "future annotations": "from __future__ import annotations\n" + TEMPLATE.replace("x):", "x: Nowhere) -> Nothing:"),
    "docstring": TEMPLATE.replace("x):", "x):\n    'Says what it does.'"),
    "other lines": """
def forward(self, x):

    down_proj = self.down_proj(
        self.act_fn(self.gate_proj(x))
        * self.up_proj(x)
    )  # a remark

    return down_proj
""",
    "in a class": "class MLP:\n" + textwrap.indent(TEMPLATE, "    ") + "forward = MLP.forward\ndel MLP",
    "in a decorated class": (
        "def keep(kind):\n    return kind\n\n@keep\nclass MLP:\n"
        + textwrap.indent(TEMPLATE, "    ")
        + "forward = MLP.forward\ndel MLP, keep"
    ),
    "nested": (
        "def build():\n    class MLP:\n"
        + textwrap.indent(TEMPLATE, "        ")
        + "    return MLP.forward\nforward = build()\ndel build"
    ),
}

ACT, UP = "self.act_fn(self.gate_proj(x))", "self.up_proj(x)"
DIFFERENT = {
    "another attribute": ("self.up_proj(x)", "self.gate_proj(x)"),
    "another operator": (") * self", ") + self"),
    "in-place operator": ("    return down_proj", "    down_proj *= self.scale\n    return down_proj"),
    "a constant more": (" * self", " * 2 * self"),
    "swapped operands": (f"{ACT} * {UP}", f"{UP} * {ACT}"),
    "another argument": ("self.gate_proj(x)", "self.gate_proj(self)"),
    "a keyword": ("self.up_proj(x)", "self.up_proj(x=x)"),
    "a default argument more": ("(self, x)", "(self, x, scale=1.0)"),
    "keyword only": ("(self, x)", "(self, *, x)"),
    "positional only": ("(self, x)", "(self, x, /)"),
    "*args": ("(self, x)", "(self, x, *args)"),
    "**kwargs": ("(self, x)", "(self, x, **kwargs)"),
    "a generator": ("return down_proj", "yield down_proj"),
    "a coroutine": ("def forward", "async def forward"),
    "nothing returned": ("return down_proj", "return"),
    "a branch": ("    return down_proj", "    if self.training:\n        return x\n    return down_proj"),
    "an exception handler": ("    return down_proj", "    try:\n        return down_proj\n    finally:\n        x"),
    "a global for an attribute": ("self.act_fn", "act_fn"),
}


def function_of(source: str) -> FunctionType:
    namespace: dict[str, object] = {}
    exec(source, namespace)
    (function,) = (value for value in namespace.values() if type(value) is FunctionType)
    return function


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_same_code_matches(source: str) -> None:
    assert fingerprint.of(function_of(source)) == fingerprint.of_source(TEMPLATE)


@pytest.mark.parametrize(("old", "new"), DIFFERENT.values(), ids=DIFFERENT)
def test_one_change_does_not_match(old: str, new: str) -> None:
    assert old in TEMPLATE
    assert fingerprint.of(function_of(TEMPLATE.replace(old, new, 1))) != fingerprint.of_source(TEMPLATE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "2"),
        ("1", "1.0"),
        ("1", "True"),
        ("'a'", "b'a'"),
        ("None", "False"),
        ("x[0]", "x[1]"),
        # Found: of() compares constants by ==, which says 0.0 == -0.0; repr() of the value would tell them apart.
        ("0.0", "-0.0"),
        ("(1, 2)", "(True, 2)"),
        ("x[:1]", "x[:2]"),
        ("f'{x}'", "f'{x!r}'"),
        ("x is None", "x is not None"),
        ("x < 1", "x <= 1"),
        ("x in (1,)", "x not in (1,)"),
        ("x @ x", "x * x"),
        ("lambda: 1", "lambda: 2"),
        ("[i + 1 for i in x]", "[i + 2 for i in x]"),
        ("print", "input"),
    ],
)
def test_small_differences_count(one: str, other: str) -> None:
    template = "def forward(self, x):\n    return {}\n"
    assert fingerprint.of_source(template.format(one)) == fingerprint.of_source(template.format(one))
    assert fingerprint.of_source(template.format(one)) != fingerprint.of_source(template.format(other))


@pytest.mark.parametrize("more", ["*args", "**kwargs", "*, y", "y", "*args, **kwargs"])
def test_unused_argument_counts(more: str) -> None:
    template = "def forward(self, x{}):\n    return self.down_proj(x)"
    assert fingerprint.of_source(template.format("")) != fingerprint.of_source(template.format(f", {more}"))


def test_closure_does_not_match() -> None:
    def build(scale: float) -> FunctionType:
        def forward(self, x):
            return self.down_proj(x) * scale

        return forward

    read_globally = "def forward(self, x):\n    return self.down_proj(x) * scale"
    read_locally = "def forward(self, x, scale):\n    return self.down_proj(x) * scale"
    assert fingerprint.of(build(1.0)) not in (fingerprint.of_source(read_globally), fingerprint.of_source(read_locally))


@pytest.mark.parametrize(
    "value", [None, print, len, object(), classmethod(print), property(), str.upper, type, 3, F.silu.__call__]
)
def test_only_functions_have_one(value: object) -> None:
    assert fingerprint.of(value) is None


def test_wrapper_is_not_the_wrapped() -> None:
    import functools

    forward = function_of(TEMPLATE)
    wrapped = functools.wraps(forward)(lambda self, x: forward(self, x))
    assert fingerprint.of(wrapped) != fingerprint.of(forward)
    assert fingerprint.of(functools.partial(forward)) is None


@pytest.mark.parametrize(("meant", "expected"), [(F, True), (None, False), (F.silu, False)])
def test_reads_globals(meant: object, expected: bool) -> None:
    function = function_of("import torch\nfrom torch.nn import functional as F\ndef forward(self, x): return F.silu(x)")
    function.__globals__["F"] = meant
    assert fingerprint.reads_globals(function, {"F": F}) is expected
    assert not fingerprint.reads_globals(function, {"missing": F})


# Imported by its path, and with an empty torch, so that an interpreter that has none can check it.
OTHER_INTERPRETER = """
import importlib.util, json, sys, types
for name in ("torch", "torch.nn", "torch.nn.functional"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, sys.modules[name])
spec = importlib.util.spec_from_file_location("fingerprint", sys.argv[1])
fingerprint = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fingerprint)
same, different, template = json.loads(sys.stdin.read())
def function_of(source):
    namespace = {}
    exec(source, namespace)
    return next(value for value in namespace.values() if type(value).__name__ == "function")
expected = fingerprint.of_source(template)
assert all(fingerprint.of(function_of(source)) == expected for source in same), "same"
assert not any(fingerprint.of(function_of(source)) == expected for source in different), "different"
def closes_over_a_local(self, x):
    y = x + 1
    def inner():
        return y
    return inner() + sum(y * i for i in x)
def has_a_class(self, x):
    class Inner:
        def inner(self):
            return super().inner() + x
    return Inner
def cleans_up(self, x):
    try:
        y = [z for z in x]
        del x
    except ValueError as error:
        return lambda: error
    with open(y) as file, file:
        return file
for function in (closes_over_a_local, has_a_class, cleans_up):
    assert fingerprint.of(function) == fingerprint.of(function), function
print("checked", sys.version_info[:2])
"""


def interpreter(version: str) -> str | None:
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [
        *sorted(installed.glob(f"{version}.*/bin/python")),
        *(Path(folder) / f"python{version}" for folder in os.get_exec_path() if "shims" not in folder),
    ]
    return next((str(path) for path in found if path.exists()), None)


# Found: on Python 3.13 a cell variable is read by LOAD_FAST and is not in co_varnames: KeyError in of().
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_on_other_interpreters(version: str) -> None:
    import json

    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = sys.executable if version == running else interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    module = importlib.util.find_spec("fusepatch.fingerprint")
    assert module is not None
    different = [TEMPLATE.replace(old, new, 1) for old, new in DIFFERENT.values()]
    done = subprocess.run(
        [python, "-c", OTHER_INTERPRETER, str(module.origin)],
        input=json.dumps([list(SAME.values()), different, TEMPLATE]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
