"""What each kernel of the Blackwell backend takes of a multiprocessor, as the compiler made it; kept in a table.

The command in COMMAND makes the table anew, where a change is meant.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

import blackwell_kernels
import fake_cuda
import machine_code
from blackwell_kernels import ARCHS, EVERY, Configuration

from fusepatch.kernels.gated_mlp import launching

TABLE = Path(__file__).with_suffix(".csv")
COLUMNS = ("kernel", "arch", "registers", "stack_bytes", "shared_bytes", "tensor_columns", "instruction")
COMMAND = "PYTHONPATH=accelerate python compat_tests/blackwell_resources.py"
Row = dict[str, str]


def compiler(kernel: Any) -> str:
    """What made a kernel: ptxas, which deals registers, is the DSL's, of the CUDA version that the PTX tells."""
    (version,) = re.findall(r"^\.version (\S+)", kernel.artifacts.PTX, re.MULTILINE)
    return f"nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')} with PTX {version}"


def measured(configuration: Configuration, arch: str, kernel: Any, folder: Path) -> Row:
    """A row of the table, of a kernel that was compiled with `--keep-ptx --keep-cubin --dump-dir=folder`."""
    used, ptx = machine_code.resources(folder), kernel.artifacts.PTX
    start, launched = fake_cuda.load(kernel, folder)
    shapes = blackwell_kernels.shapes_of(configuration, 8, 8, 8).values()
    start(
        *(fake_cuda.tensor(0x7F1000000000, each, configuration.dtype) for each in shapes),
        *[None] * (5 - len(shapes)),
        1,
    )
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    (columns,) = re.findall(r"tcgen05\.alloc\S+\s+\[%r\d+\], (%r\d+);", ptx)
    multiplications = re.findall(r"tcgen05\.mma\.cta_group::(\d)\S*\s+\[%r\d+\], %rd\d+, %rd\d+, (%r\d+),", ptx)
    values = (
        blackwell_kernels.named(configuration),
        arch,
        used["REG"],
        used["STACK"] + used["LOCAL"],
        launched().shared_bytes,
        constants[columns],
        " or ".join(sorted({f"{_described(int(constants[word]))}, {ctas} CTA" for ctas, word in multiplications})),
    )
    return dict(zip(COLUMNS, map(str, values), strict=True))


def _described(word: int) -> str:
    """What an instruction descriptor of tcgen05.mma.kind::f16 says, as the PTX manual has it."""
    a, b = (("f16", "bf16")[word >> at & 7] for at in (7, 10))
    b_major = "MN" if word >> 16 & 1 else "K"
    return f"{(word >> 24 & 31) << 4}x{(word >> 17 & 63) << 3}x16 {a} {b} {('f16', 'f32')[word >> 4 & 3]}, B {b_major}"


@functools.cache
def kept() -> tuple[str, dict[tuple[str, str], Row]]:
    """What the table was made with, and its rows by kernel and architecture."""
    first, *rows = TABLE.read_text().splitlines()
    return first, {(row["kernel"], row["arch"]): row for row in csv.DictReader(rows)}


def _renew() -> None:
    with tempfile.TemporaryDirectory() as name, TABLE.open("w") as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        for number, (arch, configuration) in enumerate(itertools.product(ARCHS, EVERY)):
            folder = Path(name) / str(number)
            folder.mkdir()
            options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir={folder}"
            kernel = launching.build(configuration, options)
            if not number:
                file.write(f"{compiler(kernel)}\n")
                rows.writeheader()
            rows.writerow(measured(configuration, arch, kernel, folder))


if __name__ == "__main__":
    _renew()
