"""One row per figure, appended to benchmarks/results/<gpu>/<benchmark>.csv: the only source of published figures."""

from __future__ import annotations

import csv
import datetime
import platform
import re
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

import fusepatch

RESULTS = Path(__file__).parent / "results"
RUN = uuid.uuid4().hex[:8]
"""Names this run: ratios are computed only between rows that share it."""


@dataclass(frozen=True)
class Figure:
    """One measured quantity, by quantiles over `n` samples."""

    benchmark: str
    case: str
    mode: str
    arm: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    n: int


@dataclass(frozen=True)
class Provenance:
    """Where and when a figure was measured."""

    gpu: str
    driver: str
    versions: str
    commit: str
    date: str
    run: str


def provenance() -> Provenance:
    """This machine, these versions, now. On a machine without a GPU, `gpu` names the processor."""
    versions = f"python {platform.python_version()}; torch {torch.__version__}; fusepatch {fusepatch.__version__}"
    today = datetime.date.today().isoformat()
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    else:
        gpu, driver = f"cpu {_processor()}", "-"
    return Provenance(gpu, driver, versions, _commit(), today, RUN)


def _commit() -> str:
    """The commit, marked where the tree differs from it; `-` outside a checkout."""
    found = _output("git", "rev-parse", "--short=10", "HEAD") or "-"
    return found + ("+" if found != "-" and _output("git", "status", "--porcelain", "-uno") else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    found = re.search(r"model name\s*:\s*(.+)", info)
    return found.group(1).strip() if found else platform.machine()


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    ordered = torch.tensor(sorted(samples), dtype=torch.float64)
    low, middle, high = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return low, middle, high


def append(figures: Iterable[Figure]) -> list[Path]:
    """Appends the figures to their files; returns the files."""
    origin = provenance()
    columns = [field.name for field in (*fields(Figure), *fields(Provenance))]
    files: dict[Path, list[tuple[object, ...]]] = {}
    for figure in figures:
        folder = RESULTS / re.sub(r"[^A-Za-z0-9]+", "-", origin.gpu).strip("-")
        files.setdefault(folder / f"{figure.benchmark}.csv", []).append((*astuple(figure), *astuple(origin)))
    for path, rows in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(columns)
            writer.writerows(rows)
    return list(files)
