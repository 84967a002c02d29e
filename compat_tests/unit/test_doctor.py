"""`fusepatch doctor`: each finding provoked, with real files and processes wherever one can be made without a GPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusepatch import cli, doctor, importhook, selfcheck, settings
from fusepatch.decline import Reason
from fusepatch.doctor import Diagnosis, Finding, Kernel, cuda_libraries, examination, kernels, packages
from fusepatch.doctor.cuda_libraries import Library
from fusepatch.doctor.packages import Imported
from fusepatch.kernels import backends
from fusepatch.kernels.gated_mlp import choose
from fusepatch.selfcheck import Outcome, Verdict

LIBRARY_FILE = "libcudart.so.12"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    selfcheck.device_kind.cache_clear()
    yield
    selfcheck.device_kind.cache_clear()


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child process: whatever is installed is taken to import."""

    def imported(modules: list[str]) -> dict[str, Imported]:
        return {module: Imported(torch.__version__ if module == "torch" else "", "", ()) for module in modules}

    monkeypatch.setattr(examination, "import_in_child", imported)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, no_child: None) -> Callable[..., None]:
    """Makes this machine look as if it had GPUs of these capabilities; triton need not be installed either."""

    def put(*capabilities: tuple[int, int]) -> None:
        def index(device: torch.device | int) -> int:
            return device if isinstance(device, int) else device.index

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[index(device)])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {capabilities[index(device)]}")
        monkeypatch.setattr(backends, "missing", lambda backend: ())

    return put


def findings(found: Diagnosis, text: str) -> list[Finding]:
    return [finding for finding in found.findings if text in finding.what]


def the_finding(found: Diagnosis, text: str, level: str) -> Finding:
    (finding,) = findings(found, text)
    assert finding.level == level
    assert finding.fix
    assert finding.what in str(found)
    assert found.exit_code == int(level == "problem")
    return finding


def kernel(found: Diagnosis, backend: str, route: str = "pointwise") -> Kernel:
    (row,) = [row for row in found.kernels if (row.backend, row.route) == (backend, route)]
    return row


def make_distribution(folder: Path, name: str, version: str, *files: str, **other: str) -> Path:
    """What pip would leave of an installed package, with a real file of each name."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    headers = "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in other.items())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{headers}")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"")
    return info


# ------------------------------------------------------------------------------------------------------ as a whole


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fusepatch", "doctor", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_command_without_a_gpu() -> None:
    done = run_doctor("--json", "--selfcheck")
    found = json.loads(done.stdout)
    assert found["selfcheck"] == "no CUDA device: there is nothing to check"
    assert (done.returncode, found["exit_code"]) == (0, 0), done.stderr
    versions = {row["name"]: row["version"] for row in found["versions"]}
    assert {name: versions[name] for name in ("torch", "transformers")} == {
        name: importlib.metadata.version(name) for name in ("torch", "transformers")
    }
    assert {"fusepatch", "Python", "triton", "cuDNN", "CUDA runtime", "CUDA driver"} <= set(versions)
    assert found["gpus"] == []
    assert [row["name"] for row in found["settings"]] == list(settings.TABLE)
    names = {(row["backend"], row["route"]) for row in found["kernels"]}
    assert names == {(backend.name, route.value) for backend in choose.BACKENDS for route in backend.routes}
    assert not any(finding["level"] == "problem" for finding in found["findings"])


def no_version(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("selfcheck_too", [False, True])
def test_the_text_without_a_gpu(
    no_child: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], selfcheck_too: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importhook, "is_installed", lambda name: name == "torch")
    monkeypatch.setattr(importlib.metadata, "version", no_version)
    assert cli.main(["doctor", *(["--selfcheck"] if selfcheck_too else [])]) == 0
    out = capsys.readouterr().out
    assert "no CUDA device that torch can use" in out
    assert ("there is nothing to check" in out) is selfcheck_too
    assert 'not installed; pip install "fusepatch[hf]"' in out
    assert f"{Reason.CPU.value}: {Reason.CPU.meaning}." in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('libcudnn.so.9: cannot open shared object file')", "ImportError: libcudnn.so.9"),
        ("import os; os.abort()", "the interpreter ended while it was imported: killed by signal 6"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
    ],
)
def test_a_torch_that_does_not_import_is_reported(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_doctor("--json", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert [finding for finding in found["findings"] if says in finding["what"] and finding["level"] == "problem"]
    assert found["kernels"] == []


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "import_in_child", lambda modules: {})
    monkeypatch.setattr(packages, "_recorded_version", lambda name: (None, ""))
    found = doctor.examine()
    assert 'pip install "torch>=2.11"' in the_finding(found, "torch is not installed", "problem").fix
    assert "no kernel could be asked about" in str(found)


def is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(type(key) is str and is_plain(each) for key, each in value.items())
    return all(map(is_plain, value)) if type(value) is list else value is None or type(value) in (str, int, float, bool)


def test_to_dict_is_plain(gpus: Callable[..., None]) -> None:
    gpus((9, 0))
    made = doctor.examine().to_dict()
    assert is_plain(made)
    assert json.loads(json.dumps(made)) == made


def test_what_can_not_be_found_out_is_a_finding(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    monkeypatch.setattr(choose, "survey", broken)
    found = doctor.examine()
    assert findings(found, "the version of cuDNN: RuntimeError: cuDNN version incompatibility")
    assert findings(found, "which kernels serve: RuntimeError")
    assert found.exit_code == 0


# ------------------------------------------------------------------------------------------------- the environment


def test_bad_variables_are_findings(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_STRIKT", "1")
    monkeypatch.setenv("FUSEPATCH_LOG", "loud")
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "reference")
    found = doctor.examine()
    the_finding(found, "unknown environment variable FUSEPATCH_STRIKT. Did you mean FUSEPATCH_STRICT?", "problem")
    the_finding(found, "FUSEPATCH_LOG='loud' is not valid: it takes off, warning, info, debug", "problem")
    rows = {row.name: (row.value, row.is_set) for row in found.settings}
    assert rows["FUSEPATCH_GATED_MLP_BACKEND"] == ("reference", True)
    assert rows["FUSEPATCH_LOG"] == ("info", False)
    assert ".. Fix" not in str(found)


def test_the_settings_in_force_stay(no_child: None) -> None:
    before = settings.read({"FUSEPATCH_STRICT": "1"})
    settings.install(before)
    doctor.examine()
    assert settings.installed() is before


# ------------------------------------------------------------------------------------------------------- the cache


def test_a_cache_folder_is_not_made(no_child: None, tmp_path: Path) -> None:
    found = doctor.examine()
    assert found.cache == doctor.Cache(str(tmp_path / "cache"), True, "")
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_is_there_is_left_as_it_is(no_child: None, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    assert doctor.examine().cache.writable
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("below", ["", "some/folder"])
def test_a_file_in_place_of_the_cache_folder(
    no_child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "file" / below))
    found = doctor.examine()
    assert not found.cache.writable
    assert "is not a folder" in the_finding(found, "the cache folder", "warning").what


def test_a_cache_folder_that_leads_nowhere(no_child: None, tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "gone")
    assert doctor.examine().cache.why_not.endswith("is not a folder")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no folder that refuses even root")
def test_a_cache_folder_in_which_no_file_can_be_made(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", "/proc/self")
    assert doctor.examine().cache.why_not


# ----------------------------------------------------------------------------------------- packages and their imports


def test_each_import_is_judged_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "doc_good": "print('noise'); __version__ = '1.2'",
        "doc_raises": "raise RuntimeError('half\\ninstalled')",
        "doc_exits": "import sys; sys.exit(3)",
        "doc_aborts": "import os, sys; print('assertion', file=sys.stderr, flush=True); os.abort()",
        "doc_hangs": "import time; time.sleep(600)",
        "doc_last": "",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = packages.import_in_child(list(modules), limit_s=10)
    assert list(found) == list(modules)
    assert found["doc_good"] == Imported("1.2", "", ())
    assert found["doc_last"] == Imported("", "", ())
    assert found["doc_raises"].error == "RuntimeError: half"
    assert found["doc_exits"].error == "SystemExit: 3"
    assert found["doc_aborts"].error.endswith("killed by signal 6: assertion")
    assert found["doc_hangs"].error == "the import did not end within 10 s"


def test_a_library_that_does_not_import(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importhook, "is_installed", lambda name: True)
    monkeypatch.setattr(
        examination,
        "import_in_child",
        lambda modules: {m: Imported("", "ImportError: libtriton.so" if m == "triton" else "", ()) for m in modules},
    )
    found = doctor.examine()
    assert "--force-reinstall triton" in the_finding(found, "triton does not import: ImportError", "problem").fix


def test_metadata_without_a_module(no_child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_distribution(tmp_path, "nvidia-cudnn-frontend", "1.32.0")
    monkeypatch.syspath_prepend(tmp_path)
    there = importhook.is_installed
    monkeypatch.setattr(importhook, "is_installed", lambda module: module != "cudnn" and there(module))
    found = doctor.examine()
    the_finding(found, "nvidia-cudnn-frontend 1.32.0 is half-installed", "problem")


@pytest.mark.parametrize("damage", ["", "Name: torch\n"])
def test_damaged_metadata(no_child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    info = make_distribution(tmp_path, "torch", "9.9")
    (info / "METADATA").write_text(damage)
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.examine()
    assert findings(found, "the metadata of torch can't be read")
    assert ("torch", torch.__version__) in [(row.name, row.version) for row in found.versions]


def test_a_version_that_is_too_old(no_child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_distribution(tmp_path, "fusepatch", "0.1", Requires_Dist="torch>=2.11")
    make_distribution(tmp_path, "torch", "2.4.0")
    monkeypatch.syspath_prepend(tmp_path)
    the_finding(doctor.examine(), "torch is 2.4.0, and fusepatch is made for >=2.11", "warning")


@pytest.mark.parametrize(("installed", "is_fine"), [("12", False), ("13", True)])
def test_the_dsl_without_the_libraries_of_torchs_cuda(
    no_child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, is_fine: bool
) -> None:
    for name in ("nvidia-cutlass-dsl", f"nvidia-cutlass-dsl-libs-cu{installed}"):
        make_distribution(tmp_path, name, "4.8.1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = findings(doctor.examine(), "installed without nvidia-cutlass-dsl-libs-cu13")
    assert [finding.fix for finding in found] == ([] if is_fine else ['pip install "fusepatch[cuda13]"'])


# ------------------------------------------------------------------------------------------------ the CUDA libraries

MAPS = """\
7f00-7f01 r--p 00000000 08:01 11 /site/nvidia/cuda_runtime/lib/libcudart.so.12
7f01-7f02 r-xp 00000000 08:01 11                         /site/nvidia/cuda_runtime/lib/libcudart.so.12
7f02-7f03 r-xp 00000000 08:01 12                         /my site/torch/lib/libcudnn-0a1b2c3d.so.9
7f03-7f04 r-xp 00000000 08:01 13                         /opt/cuda/libcublasLt.so.12.9.1.4 (deleted)
7f04-7f05 r-xp 00000000 08:01 14                         /site/nvidia/cudnn/lib/libcudnn_graph.so.9
7f05-7f06 r-xp 00000000 08:01 15                         /site/nvidia/lib/libnvrtc-builtins.so.12.9
7f06-7f07 rw-p 00000000 00:00 0                          [heap]
7f07-7f08 rw-p 00000000 00:00 0
7f08-7f09 r-xp 00000000 08:01 16                         /usr/lib/libc.so.6
"""


def test_maps() -> None:
    assert cuda_libraries.parse_maps(MAPS) == (
        "/site/nvidia/cuda_runtime/lib/libcudart.so.12",
        "/my site/torch/lib/libcudnn-0a1b2c3d.so.9",
        "/opt/cuda/libcublasLt.so.12.9.1.4",
    )
    assert cuda_libraries.parse_maps("") == ()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_an_import_loads_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _ctypes

    shutil.copy(_ctypes.__file__, tmp_path / LIBRARY_FILE)
    (tmp_path / "doc_loads.py").write_text(f"import ctypes; ctypes.CDLL({str(tmp_path / LIBRARY_FILE)!r})")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = packages.import_in_child(["json", "doc_loads"])
    assert found["json"].loaded == ()
    assert found["doc_loads"].loaded == (str(tmp_path / LIBRARY_FILE),)


def test_what_pip_installed(tmp_path: Path) -> None:
    make_distribution(tmp_path, "nvidia-cuda-runtime", "13.0.96", "nvidia/cu13/lib/libcudart.so.13")
    make_distribution(tmp_path, "nvidia-cudnn-cu12", "9.10.2.21", "nvidia/cudnn/lib/libcudnn.so.9")
    make_distribution(tmp_path, "nvidia-cudnn-cu13", "9.15.1.9", "nvidia/cudnn/lib/libcudnn.so.9")
    make_distribution(tmp_path, "somebody-else", "1", "somewhere/libcudart.so.11")
    unreadable = make_distribution(tmp_path, "nvidia-cublas", "13.1.0.3", "nvidia/cu13/lib/libcublas.so.13")
    (unreadable / "RECORD").write_bytes(b"\xff\xfe,,\n")
    gone = make_distribution(tmp_path, "nvidia-cuda-nvrtc", "13.0.88", "nvidia/cu13/lib/libnvrtc.so.13")
    (tmp_path / "nvidia/cu13/lib/libnvrtc.so.13").unlink()
    assert gone.exists()
    owners, damaged = cuda_libraries.installed_by_pip(importlib.metadata.distributions(path=[str(tmp_path)]))
    root = os.path.realpath(tmp_path)
    (both,) = [labels for path, labels in owners.items() if path == f"{root}/nvidia/cudnn/lib/libcudnn.so.9"]
    assert sorted(both) == ["nvidia-cudnn-cu12 9.10.2.21", "nvidia-cudnn-cu13 9.15.1.9"]
    assert owners[f"{root}/nvidia/cu13/lib/libcudart.so.13"] == ("nvidia-cuda-runtime 13.0.96",)
    assert len(owners) == 2
    (finding,) = damaged
    assert "nvidia-cublas can't be read: UnicodeDecodeError" in finding.what


def test_what_the_library_path_offers(tmp_path: Path) -> None:
    (tmp_path / "libcudnn.so.9.15.1").write_bytes(b"")
    (tmp_path / "libcudnn.so.9").symlink_to("libcudnn.so.9.15.1")
    (tmp_path / "libother.so.1").write_bytes(b"")
    value = f"{tmp_path / 'gone'}::{tmp_path}"
    assert cuda_libraries.in_library_path(value) == (os.path.realpath(tmp_path / "libcudnn.so.9.15.1"),)


def copy(
    path: str, *owners: str, loaded: str = "", offered: bool = False, reported: str = "", name: str = "libcudart"
) -> Library:
    return Library(name, path, owners, offered, loaded, reported)


PIP_12 = copy("/s/cuda_runtime/libcudart.so.12", "nvidia-cuda-runtime-cu12 12.9.79")
PIP_13 = copy("/s/cu13/libcudart.so.13", "nvidia-cuda-runtime 13.0.96")
TORCH_13 = copy("/s/cu13/libcudart.so.13", "nvidia-cuda-runtime 13.0.96", loaded="torch", reported="13.0")
CUDNN = "/s/cudnn/lib/libcudnn.so.9"
MIXTURES: dict[str, tuple[list[Library], str | None, str | None, str]] = {
    "torch's own alone": ([TORCH_13], "13.0", None, ""),
    "nothing loaded, one installed": ([PIP_13], None, None, ""),
    "two majors installed": ([PIP_12, PIP_13], None, "2 majors of libcudart are installed", "cuda-runtime-cu12"),
    "two majors loaded": (
        [TORCH_13, copy(PIP_12.path, *PIP_12.owners, loaded="cudnn")],
        "13.0",
        "2 majors of libcudart are loaded in one process",
        "pip uninstall nvidia-cuda-runtime-cu12",
    ),
    "two copies loaded": (
        [TORCH_13, copy("/opt/libcudart.so.13.0.96", loaded="cudnn", offered=True)],
        "13.0",
        "2 copies of libcudart are loaded in one process",
        "take /opt out of LD_LIBRARY_PATH",
    ),
    "another major installed": ([TORCH_13, PIP_12], "13.0", "two majors of libcudart are mixed", "cuda-runtime-cu12"),
    "another version installed": (
        [copy("/opt/libcudart.so.13.1.80", loaded="torch", offered=True), PIP_13],
        "13.1",
        "the loaded libcudart is not the installed one",
        "take /opt out of LD_LIBRARY_PATH",
    ),
    "the same version installed twice": (
        [TORCH_13, copy("/opt/libcudart.so.13.0.96", offered=True)],
        "13.0",
        None,
        "",
    ),
    "torch's own in its wheel, another installed": (
        [copy("/s/torch/lib/libcudart-ab12.so.12", "torch 2.11.0+cu129", loaded="torch", reported="12.9"), PIP_13],
        "12.9",
        "two majors of libcudart are mixed",
        "pip uninstall nvidia-cuda-runtime,",
    ),
    "not the one that torch was built for": (
        [copy("/opt/libcudart.so.12.9.79", loaded="torch", offered=True)],
        "13.0",
        "torch was built for CUDA 13.0",
        "take /opt out of LD_LIBRARY_PATH",
    ),
    "one file of two packages": (
        [copy(CUDNN, "nvidia-cudnn-cu12 9.10.2.21", "nvidia-cudnn-cu13 9.15.1.9", name="libcudnn")],
        None,
        "installed the same file",
        "pip uninstall nvidia-cudnn-cu12 nvidia-cudnn-cu13",
    ),
    "a file that was overwritten": (
        [copy(CUDNN, "nvidia-cudnn-cu13 9.15.1.9", loaded="torch", reported="9.10.2", name="libcudnn")],
        None,
        "says that it is version 9.10.2",
        "pip uninstall nvidia-cudnn-cu13",
    ),
    # Its frontend looks there first, and torch does not.
    "another cuDNN in LD_LIBRARY_PATH": (
        [
            copy(CUDNN, "nvidia-cudnn-cu13 9.19.0.56", loaded="torch", reported="9.19.0", name="libcudnn"),
            copy("/opt/libcudnn.so.9.26.0", offered=True, name="libcudnn"),
        ],
        None,
        "the loaded libcudnn is not the installed one",
        "take /opt out of LD_LIBRARY_PATH",
    ),
    "another cuDNN loaded by its frontend": (
        [
            copy(CUDNN, "nvidia-cudnn-cu13 9.19.0.56", loaded="torch", reported="9.19.0", name="libcudnn"),
            copy("/opt/libcudnn.so.9.26.0", loaded="cudnn", offered=True, name="libcudnn"),
        ],
        None,
        "2 copies of libcudnn are loaded in one process",
        "take /opt out of LD_LIBRARY_PATH",
    ),
    "a file that pip installed": (
        [copy(CUDNN, "nvidia-cudnn-cu13 9.15.1.9", loaded="torch", reported="9.15.1", name="libcudnn")],
        None,
        None,
        "",
    ),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures(mixture: str) -> None:
    libraries, cuda, says, fix = MIXTURES[mixture]
    found = cuda_libraries.judge(libraries, cuda)
    assert len(found) == (says is not None), found
    for finding in found:
        assert finding.level == "warning"
        assert says in finding.what
        assert fix in finding.fix


def test_another_copy_is_found_end_to_end(no_child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_distribution(tmp_path / "site", "nvidia-cuda-runtime-cu12", "12.9.79", f"nvidia/lib/{LIBRARY_FILE}")
    (tmp_path / "ld").mkdir()
    (tmp_path / "ld" / "libcudart.so.11.8.89").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "ld"))
    found = doctor.examine()
    text = str(found)
    assert "nvidia-cuda-runtime-cu12 12.9.79" in text
    assert "libcudart.so.11.8.89" in text
    (finding,) = findings(found, "majors of libcudart")[:1]
    assert finding.level == "warning"
    versions = {row["version"] for row in found.to_dict()["libraries"] if row["name"] == "libcudart"}
    assert {"12.9.79", "11.8.89"} <= versions


STAND_INS = {
    "libcudart.so.13": "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }",
    "libcudnn.so.9": "#include <stddef.h>\nsize_t cudnnGetVersion(void) { return 91501; }",
    "libcublasLt.so.12": "#include <stddef.h>\nsize_t cublasLtGetVersion(void) { return 120901; }",
    "libcublas.so.12": "int nothing;",
    "libcuda.so.1": "int cuDriverGetVersion(int *v) { *v = 12080; return 0; }",
}


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="no C compiler")
def test_libraries_say_their_version_and_only_where_loaded(tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name)]
        subprocess.run(command, input=text, text=True, check=True)
    script = textwrap.dedent(f"""
        import ctypes
        from pathlib import Path
        from fusepatch.doctor import cuda_libraries
        paths = [Path({str(tmp_path)!r}, name) for name in {list(STAND_INS)[:4]!r}]
        print([cuda_libraries.ask_version(str(path)) for path in paths])
        for path in paths: ctypes.CDLL(str(path))
        print([cuda_libraries.ask_version(str(path)) for path in paths], cuda_libraries.driver_supports())
    """)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['', '', '', '']", "['13.0', '9.15.1', '12.9.1', ''] 12.8"]


@pytest.mark.parametrize(("number", "version"), [(8902, "8.9.2"), (91501, "9.15.1"), (92600, "9.26.0")])
def test_cudnn_numbers(number: int, version: str) -> None:
    assert cuda_libraries.dotted(number) == version


# -------------------------------------------------------------------------------------------------- GPUs and kernels


def test_what_torch_warns_of(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        import warnings

        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    the_finding(doctor.examine(), "driver on your system is too old", "warning")


def test_a_cpu_build_beside_a_driver(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_libraries, "driver_supports", lambda: "13.0")
    the_finding(doctor.examine(), "is not built for CUDA", "warning")


def test_a_gpu_that_is_known(gpus: Callable[..., None]) -> None:
    gpus((9, 0), (8, 0), (9, 0))
    found = doctor.examine()
    assert [(gpu.device, gpu.family, gpu.fused) for gpu in found.gpus] == [
        ("cuda:0", "Hopper", True),
        ("cuda:1", "Ampere", False),
        ("cuda:2", "Hopper", True),
    ]
    assert {row.devices for row in found.kernels} == {("cuda:0", "cuda:2"), ("cuda:1",)}
    native = [row for row in found.kernels if row.backend == "triton"]
    assert {(row.serves, row.reason) for row in native} == {("unchecked", None)}
    assert all("--selfcheck" in (row.fix or "") for row in native)
    assert found.exit_code == 0
    assert found.selfcheck == ""


def test_a_gpu_that_is_not_known(gpus: Callable[..., None]) -> None:
    gpus((9, 1))
    found = doctor.examine(selfcheck=True)
    the_finding(found, "cuda:0, GPU (9, 1)", "warning")
    row = kernel(found, "triton")
    assert (row.serves, row.reason, row.fix) == ("no", "architecture", Reason.ARCHITECTURE.fix)
    assert found.selfcheck == "none of the native kernels asked for can run on the GPUs here: there is nothing to check"
    assert "not in the table" in str(found)


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13"), (None, "cuda13")])
def test_a_package_that_is_missing(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, cuda: str | None, extra: str
) -> None:
    gpus((9, 0))
    monkeypatch.setattr(backends, "missing", lambda backend: backend.packages)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    row = kernel(doctor.examine(), "triton")
    assert (row.serves, row.reason) == ("no", "missing-package")
    assert row.fix == f'pip install "fusepatch[{extra}]" (missing: triton)'


def test_which_packages_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    absent = dataclasses.replace(choose.BACKENDS[0], packages=("json", "no_such_package"))
    monkeypatch.setattr(choose, "BACKENDS", (absent,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    (standing,) = choose.survey(torch.device("cuda", 0))
    assert standing.missing == ("no_such_package",)
    assert standing.reason is Reason.MISSING_PACKAGE


@pytest.mark.parametrize(
    ("variable", "value", "native", "reference"),
    [
        ("FUSEPATCH", "1", ("unchecked", None), ("if named", None)),
        ("FUSEPATCH", "0", ("no", "env-disabled"), ("no", "env-disabled")),
        ("FUSEPATCH_GATED_MLP", "0", ("no", "env-disabled"), ("no", "env-disabled")),
        ("FUSEPATCH_GATED_MLP_ROUTE", "original", ("no", "route-bound"), ("no", "route-bound")),
        ("FUSEPATCH_GATED_MLP_ROUTE", "pointwise", ("unchecked", None), ("if named", None)),
        ("FUSEPATCH_GATED_MLP_BACKEND", "reference", ("if named", None), ("yes", None)),
        ("FUSEPATCH_GATED_MLP_BACKEND", "triton", ("unchecked", None), ("if named", None)),
    ],
)
def test_what_the_settings_leave(
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    native: tuple[str, str | None],
    reference: tuple[str, str | None],
) -> None:
    gpus((9, 0))
    monkeypatch.setenv(variable, value)
    found = doctor.examine()
    rows = [kernel(found, name) for name in ("triton", "reference")]
    assert [(row.serves, row.reason) for row in rows] == [native, reference]
    assert all(row.fix == f"set FUSEPATCH_GATED_MLP_BACKEND={row.backend}" for row in rows if row.serves == "if named")
    if variable == "FUSEPATCH_GATED_MLP_ROUTE":
        assert kernel(found, "reference", "fused").reason == "route-bound"


# ------------------------------------------------------------------------------------------------------- self-checks


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What the checks find, by a word of their case or by device; `passed` where nothing is said."""
    found: dict[str, Outcome] = {}

    def run(check: selfcheck.Check, device: torch.device, stop: threading.Event | None = None) -> Verdict:
        said = [outcome for word, outcome in found.items() if word in (*check.case.split(), str(device))]
        return Verdict(said[0] if said else Outcome.PASSED, f"seen on {device}" if said else "")

    monkeypatch.setattr(selfcheck, "run", run)
    return found


def counts(found: Diagnosis) -> dict[str | None, int]:
    outcomes = [check.outcome for check in kernel(found, "triton").checks]
    return {outcome: outcomes.count(outcome) for outcome in outcomes}


def ran(found: Diagnosis) -> list[str]:
    """The cases that were checked just now."""
    return [check.case for each in found.kernels for check in each.checks if check.seconds is not None]


def test_checks_are_run_anew_and_remembered(gpus: Callable[..., None], outcomes: dict[str, Outcome]) -> None:
    gpus((9, 0))
    before = doctor.examine()
    assert (counts(before), ran(before)) == ({None: 9}, [])
    found = doctor.examine(selfcheck=True)
    assert counts(found) == {"passed": 9}
    cases = ran(found)
    assert found.selfcheck == f"{len(cases)} self-checks ran: {len(cases)} passed, 0 failed, 0 inconclusive"
    assert len(cases) == len(set(cases)) >= 15
    assert kernel(found, "triton").serves == "yes"
    assert "9 passed (0 to 0 s each)" in str(found)
    assert {type(check["seconds"]) for check in found.to_dict()["kernels"][0]["checks"]} == {float}

    outcomes["gelu"] = Outcome.FAILED
    again = doctor.examine()
    assert (counts(again), ran(again)) == ({"passed": 9}, [])
    assert "9 passed  " in str(again)
    assert counts(doctor.examine(selfcheck=True)) == {"passed": 6, "failed": 3}
    found = doctor.examine()
    assert counts(found) == {"passed": 6, "failed": 3}
    row = kernel(found, "triton")
    assert (row.serves, row.reason, row.fix) == ("in part", "selfcheck-failed", Reason.SELFCHECK_FAILED.fix)
    failed = findings(found, "on cuda:0 failed: seen on cuda:0")
    assert len(failed) == sum("gelu" in case.split() for case in cases) >= 5
    assert found.exit_code == 1

    outcomes.clear()
    assert doctor.examine(selfcheck=True).exit_code == 0
    assert counts(doctor.examine()) == {"passed": 9}


def backends_of(cases: list[str]) -> set[str]:
    return {case.split()[0] for case in cases}


@pytest.mark.parametrize(
    ("only", "checked"),
    [
        ((), {"triton", "hopper", "triton_gemm"}),
        (("hopper",), {"hopper"}),
        (("triton_gemm",), {"triton_gemm"}),
        (("hopper", "triton_gemm"), {"hopper", "triton_gemm"}),
        (("gated_mlp",), {"triton", "hopper", "triton_gemm"}),
        (("blackwell",), set()),  # which is for another GPU
    ],
)
def test_what_is_checked(
    gpus: Callable[..., None],
    outcomes: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
    only: tuple[str, ...],
    checked: set[str],
) -> None:
    """By itself everything; else what is named. cuDNN's is taken for another version."""
    monkeypatch.setattr(importlib.import_module("fusepatch.kernels.gated_mlp.cudnn"), "drift", lambda: ("another",))
    gpus((9, 0))
    found = doctor.examine(selfcheck=True, only=only)
    assert backends_of(ran(found)) == checked
    assert {row.op for row in found.kernels} == {"gated_mlp"}
    assert ("there is nothing to check" in found.selfcheck) is (not checked)


def test_a_backend_that_serves_by_name_alone(
    gpus: Callable[..., None], outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus((9, 0))
    assert kernel(doctor.examine(selfcheck=True), "triton_gemm", "fused").serves == "if named"
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "triton_gemm")
    assert kernel(doctor.examine(), "triton_gemm", "fused").serves == "yes"


def test_an_op_that_is_off_by_default_is_looked_at_where_it_is_named(
    gpus: Callable[..., None], outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus((9, 0))
    assert {row.op for row in doctor.examine().kernels} == {"gated_mlp"}
    found = doctor.examine(selfcheck=True, only=("engram_gate",))
    assert ran(found) == ["triton bfloat16", "triton float16", "triton float32"]
    serves = {(row.op, row.serves) for row in found.kernels if row.backend == "triton"}
    assert serves == {("gated_mlp", "unchecked"), ("engram_gate", "yes")}
    monkeypatch.setenv("FUSEPATCH_ENGRAM_GATE", "0")
    found = doctor.examine(selfcheck=True, only=("engram_gate",))
    assert ("engram_gate", "no") in {(row.op, row.serves) for row in found.kernels}


def test_it_says_when_a_check_begins_and_how_it_ended(
    gpus: Callable[..., None], outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus((9, 0), (9, 0))
    outcomes["float16"] = Outcome.FAILED
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)
    told: list[str] = []
    cases = ran(doctor.examine(selfcheck=True, only=("hopper",), tell=told.append))[::2]
    told = told[1:]  # the imports
    assert told.pop(0) == f"{len(cases)} self-checks, 8 at a time; each is given up after 120 s"
    assert len(told) == 2 * len(cases) == 24
    for case in cases:
        what = f"gated_mlp.check {case} on cuda:0, cuda:1"
        outcome = "failed" if "float16" in case.split() else "passed"
        (ended,) = (line for line in told if line.endswith(f": {outcome} in 0.0 s, {outcome} in 0.0 s: {what}"))
        assert told.index(f"checking {what}") < told.index(ended)
    ends = [line.split(":")[0] for line in told if not line.startswith("checking")]
    assert ends == [f"{number} of {len(cases)}" for number in range(1, len(cases) + 1)]


@pytest.mark.parametrize(("processors", "expected"), [(1, 2), (8, 4), (16, 8), (128, 8)])
def test_how_many_checks_run_side_by_side(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, processors: int, expected: int
) -> None:
    gpus((9, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(processors), raising=False)
    together = threading.Barrier(expected)
    running: list[int] = []
    most: list[int] = []

    def run(check: selfcheck.Check, device: torch.device, stop: threading.Event | None = None) -> Verdict:
        running.append(1)
        with contextlib.suppress(threading.BrokenBarrierError):  # the last checks, which are fewer
            together.wait(timeout=1.0)
        most.append(len(running))
        running.pop()
        return Verdict(Outcome.PASSED)

    monkeypatch.setattr(selfcheck, "run", run)
    doctor.examine(selfcheck=True, only=("gated_mlp",))
    assert max(most) == expected


def test_an_interrupt_does_not_wait_for_the_checks(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run are killed, and those that wait, also for the second GPU, are not begun; nothing is remembered."""
    gpus((9, 0), (9, 0))
    begun: list[selfcheck.Check] = []
    popen = subprocess.Popen

    def hangs(command: list[str], **options: object) -> subprocess.Popen[str]:
        begun.append(selfcheck.Check(command[3], command[4]))
        return popen([sys.executable, "-c", "import time; time.sleep(100)"], **options)  # type: ignore[call-overload]

    def interrupted(futures: object) -> None:
        while len(begun) < 2 or len(selfcheck._running) < len(begun):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", hangs)
    monkeypatch.setattr(kernels, "as_completed", interrupted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4), raising=False)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        doctor.examine(selfcheck=True)
    assert time.monotonic() - start < 50, "it waited for a check"
    assert len(begun) == 2
    assert not selfcheck._running
    assert counts(doctor.examine()) == {None: 9}


def test_a_failure_is_the_commands_exit_code(
    gpus: Callable[..., None], outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    gpus((9, 0))
    assert cli.main(["doctor", "--selfcheck"]) == 0
    outcomes["triton"] = Outcome.FAILED
    assert cli.main(["doctor", "--selfcheck", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "checking gated_mlp.check triton pointwise" in err
    found = json.loads(out.rpartition("\n{\n")[2].join(["{\n", ""]))  # after the text of the first
    rows = {row["backend"]: row for row in found["kernels"] if row["route"] == "pointwise"}
    assert rows["triton"]["serves"] == "no"
    assert {check["outcome"] for check in rows["triton"]["checks"]} == {"failed"}


def test_the_command_takes_names(
    gpus: Callable[..., None], outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    gpus((9, 0))
    assert cli.main(["doctor", "--selfcheck", "hopper", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cases = [check["case"] for row in found["kernels"] for check in row["checks"] if check["seconds"] is not None]
    assert backends_of(cases) == {"hopper"}
    assert cli.main(["doctor", "--selfcheck", "hopper", "--report", "report.md"]) == cli.USAGE_ERROR
    assert "--report checks everything" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--selfcheck", "hoper"])
    assert ended.value.code == cli.USAGE_ERROR
    err = capsys.readouterr().err
    assert "'hoper'" in err
    assert all(name in err for name in ("gated_mlp", "hopper", "triton_gemm", "cudnn_engram"))
    assert "reference" not in err.partition("choose from")[2]


@pytest.mark.parametrize("bad", ["cuda:0", "cuda:1"])
def test_of_two_gpus_of_one_kind_the_worse_is_remembered(
    gpus: Callable[..., None], outcomes: dict[str, Outcome], bad: str
) -> None:
    gpus((9, 0), (9, 0))
    outcomes[bad] = Outcome.FAILED
    found = doctor.examine(selfcheck=True)
    assert {(check.device, check.outcome) for check in kernel(found, "triton").checks} == {
        (device, "failed" if device == bad else "passed") for device in ("cuda:0", "cuda:1")
    }
    assert counts(doctor.examine()) == {"failed": 9}


def test_what_could_not_be_checked_leaves_the_memory(gpus: Callable[..., None], outcomes: dict[str, Outcome]) -> None:
    gpus((9, 0), (9, 0))
    doctor.examine(selfcheck=True)
    outcomes["cuda:1"] = Outcome.INCONCLUSIVE
    found = doctor.examine(selfcheck=True)
    assert counts(found) == {"passed": 9, "inconclusive": 9}
    assert kernel(found, "triton").reason == "selfcheck-inconclusive"
    assert found.exit_code == 0
    assert findings(found, "on cuda:1 inconclusive")[0].level == "warning"
    assert counts(doctor.examine()) == {"passed": 9}


def test_a_failure_outweighs_a_busy_gpu(gpus: Callable[..., None], outcomes: dict[str, Outcome]) -> None:
    gpus((9, 0), (9, 0))
    outcomes.update({"cuda:0": Outcome.INCONCLUSIVE, "cuda:1": Outcome.FAILED})
    doctor.examine(selfcheck=True)
    assert counts(doctor.examine()) == {"failed": 9}


def test_all_checks_failed(gpus: Callable[..., None], outcomes: dict[str, Outcome]) -> None:
    gpus((9, 0))
    outcomes["triton"] = Outcome.FAILED
    row = kernel(doctor.examine(selfcheck=True), "triton")
    assert (row.serves, row.reason) == ("no", "selfcheck-failed")


def test_checks_run_whatever_the_settings_say(
    gpus: Callable[..., None], outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus((9, 0))
    monkeypatch.setenv("FUSEPATCH", "0")
    assert counts(doctor.examine(selfcheck=True)) == {"passed": 9}


def test_this_process_keeps_the_verdict_it_has(outcomes: dict[str, Outcome]) -> None:
    check, device = selfcheck.Check("module", "case"), torch.device("cpu")
    selfcheck.forget()
    assert selfcheck.verdict(check, device).outcome is Outcome.PASSED
    outcomes["case"] = Outcome.FAILED
    assert selfcheck.renew(check, [device])[0].outcome is Outcome.FAILED
    assert selfcheck.verdict(check, device).outcome is Outcome.PASSED
    selfcheck.forget()
    assert selfcheck.verdict(check, device).outcome is Outcome.FAILED
    selfcheck.forget()


def test_a_real_check_replaces_a_verdict_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check, device = selfcheck.Check("fusepatch.kernels.gated_mlp.check", "triton pointwise float32 silu"), "cpu"
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "run", lambda check, device, **options: Verdict(Outcome.FAILED, "long ago"))
        selfcheck.renew(check, [torch.device(device)])
    assert selfcheck.on_disk(check, torch.device(device)) == Verdict(Outcome.FAILED, "long ago")
    assert selfcheck.renew(check, [torch.device(device)]) == (Verdict(Outcome.PASSED),)
    assert selfcheck.on_disk(check, torch.device(device)) == Verdict(Outcome.PASSED)
