"""What a compiled CuTe DSL kernel says: its PTX, its machine code (SASS), and the compiler's remarks."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


def _absent() -> list[str]:
    return [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]


def _tool(name: str) -> str | None:
    """Of the CUDA toolkit, or the one that Triton brings."""
    found = importlib.util.find_spec("triton")
    bundled = (
        []
        if found is None
        else [str(Path(place) / "backends/nvidia/bin") for place in found.submodule_search_locations or ()]
    )
    return shutil.which(name, path=os.pathsep.join([*bundled, os.environ.get("PATH", "")]))


needs_the_dsl = pytest.mark.skipif(bool(_absent()), reason=f"not installed: {', '.join(_absent())}")
needs_the_tools = pytest.mark.skipif(
    _tool("nvdisasm") is None or _tool("cuobjdump") is None,
    reason="no nvdisasm and cuobjdump: neither Triton nor a CUDA toolkit is installed",
)


def disassembled(folder: Path) -> str:
    """The machine code of the one kernel that was compiled with `--keep-cubin --dump-dir=folder`."""
    (cubin,) = folder.glob("*.cubin")
    command = [str(_tool("nvdisasm")), "-c", str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions(text: str) -> list[str]:
    """Without addresses and predicates."""
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.+?);", text, re.MULTILINE)


def resources(folder: Path) -> dict[str, int]:
    """REG, STACK and more of the same kernel, per thread."""
    (cubin,) = folder.glob("*.cubin")
    command = [str(_tool("cuobjdump")), "-res-usage", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
