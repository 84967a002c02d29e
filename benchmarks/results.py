"""One row per figure, appended to benchmarks/results/<gpu>/<benchmark>.csv: the only source of published figures."""

from __future__ import annotations

import csv
import datetime
import functools
import importlib.metadata
import os
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

DRY_RUN = "dry run: "
"""How the `gpu` of a rehearsal begins: its rows show that the harness works, and nothing else."""

COMMIT_VARIABLE = "BENCHMARKS_COMMIT"
"""Names the commit where the tree was copied without its history, or with that of another commit."""

_PACKAGES = (
    "fusepatch",
    "triton",
    "transformers",
    "flash-linear-attention",
    "liger-kernel",
    "quack-kernels",
    "flash-swiglu-mlp",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-frontend",
    "tilelang",
    "flash-qla",
)


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


@dataclass(frozen=True)
class Row:
    """A row of a results file."""

    figure: Figure
    origin: Provenance


COLUMNS = tuple(field.name for field in (*fields(Figure), *fields(Provenance)))


class RatioError(ValueError):
    """Two figures that must not be divided by each other."""


# --------------------------------------------------------------------------------------------------------- measuring


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    ordered = torch.tensor(sorted(samples), dtype=torch.float64)
    low, middle, high = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return low, middle, high


def summary(samples: Sequence[float]) -> tuple[float, float, float]:
    """`quantiles`, to the six digits that a row keeps."""
    low, middle, high = (float(f"{number:.6g}") for number in quantiles(samples))
    return low, middle, high


@functools.lru_cache(maxsize=2)
def provenance(dry_run: bool = False) -> Provenance:
    """This machine, these versions, now. On a machine without a GPU, `gpu` names the processor."""
    today = datetime.date.today().isoformat()
    if torch.cuda.is_available() and not dry_run:
        gpu = torch.cuda.get_device_name()
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or "-"
    else:
        gpu, driver = f"cpu {_processor()}", "-"
    return Provenance((DRY_RUN if dry_run else "") + gpu, driver, _versions(), _commit(), today, RUN)


def _versions() -> str:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    found.update({package: _version(package) for package in _PACKAGES})
    return "; ".join(f"{name} {version}" for name, version in found.items() if version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return fusepatch.__version__ if package == "fusepatch" else None


def _commit() -> str:
    """The commit, marked where the tree differs from it; `-` where it is not known."""
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    found = _output("git", "rev-parse", "--short=10", "HEAD")
    if not found:
        return "-"
    return found + ("+" if _output("git", "status", "--porcelain", "-uno") else "")


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


# ------------------------------------------------------------------------------------------------------- the files


def append(figures: Iterable[Figure], folder: Path = RESULTS, *, dry_run: bool = False) -> list[Path]:
    """Appends the figures of this run to their files; returns the files."""
    origin = provenance(dry_run)
    return write([Row(figure, origin) for figure in figures], folder)


def write(rows: Iterable[Row], folder: Path = RESULTS) -> list[Path]:
    """Appends rows to their files; returns the files. Raises ValueError for rehearsals among published results."""
    files: dict[Path, list[Row]] = {}
    for row in rows:
        if row.origin.gpu.startswith(DRY_RUN) and folder.resolve() == RESULTS.resolve():
            raise ValueError("a dry run is no result, and is not saved in benchmarks/results/")
        files.setdefault(folder / slug(row.origin.gpu) / f"{row.figure.benchmark}.csv", []).append(row)
    for path, added in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(COLUMNS)
            writer.writerows((*astuple(row.figure), *astuple(row.origin)) for row in added)
    return list(files)


def slug(gpu: str) -> str:
    """The name of a GPU as a folder's."""
    return re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")


def read(path: Path) -> list[Row]:
    """The rows of one file. Raises ValueError where its columns are not those of the design."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has other columns than {', '.join(COLUMNS)}")
        return [_row(record) for record in reader]


def _row(record: dict[str, str]) -> Row:
    numbers = {name: float(record[name]) for name in ("p20", "p50", "p80")}
    texts = {field.name: record[field.name] for field in fields(Figure) if field.name not in (*numbers, "n")}
    figure = Figure(**texts, **numbers, n=int(record["n"]))
    return Row(figure, Provenance(**{field.name: record[field.name] for field in fields(Provenance)}))


def files_of(benchmark: str, folder: Path = RESULTS) -> list[Path]:
    """The results files of a benchmark, one per GPU."""
    return sorted(folder.glob(f"*/{benchmark}.csv"))


def merge(source: Path, folder: Path = RESULTS) -> int:
    """Adds the rows of another results folder that are not here yet; returns how many."""
    added = 0
    for path in sorted(source.glob("*/*.csv")):
        here = folder / path.parent.name / path.name
        known = set(read(here)) if here.exists() else set()
        new = [row for row in read(path) if row not in known]
        write(new, folder)
        added += len(new)
    return added


# ----------------------------------------------------------------------------------------------------------- reading


def latest_run(rows: Sequence[Row]) -> str:
    """The run of the last row: files are only appended to. Raises ValueError where there is none."""
    if not rows:
        raise ValueError("there are no rows")
    return rows[-1].origin.run


def ratio(row: Row, base: Row) -> tuple[float, float, float]:
    """The quantiles of `row` over the median of `base`. Raises RatioError for rows that do not belong together."""
    if row.origin.run != base.origin.run:
        raise RatioError(f"no ratio between the runs {row.origin.run} and {base.origin.run}: times drift between runs")
    for name in ("benchmark", "case", "mode", "metric", "unit"):
        mine, other = getattr(row.figure, name), getattr(base.figure, name)
        if mine != other:
            raise RatioError(f"no ratio between the {name} {mine!r} and {other!r}")
    if not base.figure.p50 > 0:
        raise RatioError(f"no ratio to {base.figure.arm}, which measured {base.figure.p50:g}")
    return row.figure.p20 / base.figure.p50, row.figure.p50 / base.figure.p50, row.figure.p80 / base.figure.p50
