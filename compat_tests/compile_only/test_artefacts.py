"""Compiled CuTe DSL kernels on disk: what is loaded again, what is not, and that nothing but speed depends on it."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch

from fusepatch import disk, selfcheck, settings
from fusepatch.kernels.cute import artefacts
from fusepatch.kernels.gated_mlp import launching
from fusepatch.kernels.gated_mlp.hopper_configuration import Size, configurations, forward_configuration

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cutlass", "tvm_ffi")),
        reason="needs nvidia-cutlass-dsl and apache-tvm-ffi",
    ),
    pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler"),
]
CONFIGURATION = forward_configuration(torch.bfloat16, "silu", False, Size.SMALL)
ARCH = "sm_90a"

# Gets one kernel in a process of its own, and says whether it was compiled, and whether it is one that can be called.
GET = """
import sys
import torch
from fusepatch.kernels.cute import compiling
from fusepatch.kernels.gated_mlp import hopper_configuration, launching

made = []
def build(configuration, options):
    made.append(options)
    return launching.build(configuration, options)

small = hopper_configuration.Size.SMALL
configuration = hopper_configuration.forward_configuration(torch.bfloat16, "silu", False, small)
launch = compiling.compiled(configuration, build, "sm_90a")
try:
    t = torch.zeros(8, 8, dtype=torch.bfloat16)
    launch(t, t, t, None, None, t, None, 1)
except ValueError as error:
    assert "expected device_type=cuda" in str(error), error
else:
    raise AssertionError("a kernel for a GPU took tensors of a CPU")
print("compiled" if made else "loaded", "with" if "cutlass" in sys.modules else "without", "the DSL")
"""
COMPILED, LOADED = "compiled with the DSL", "loaded without the DSL"


def start(cache: Path, prelude: str = "") -> subprocess.Popen[str]:
    environ = {**os.environ, "FUSEPATCH_CACHE_DIR": str(cache), "CUTE_DSL_ARCH": ARCH, "FUSEPATCH_LOG": "info"}
    command = [sys.executable, "-c", prelude + GET]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    said, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    return said.strip(), complaints


def get(cache: Path, prelude: str = "") -> str:
    return finish(start(cache, prelude))[0]


def test_processes_that_start_at_once(tmp_path: Path) -> None:
    """One compiles, the others load what it wrote; a later one needs no DSL."""
    cache = tmp_path / "fusepatch"
    assert sorted(finish(process)[0] for process in [start(cache), start(cache)]) == [COMPILED, LOADED]
    assert (cache / "kernels").stat().st_mode & 0o777 == 0o700
    assert get(cache) == LOADED
    (cache / "kernels").chmod(0o777)
    said, complaints = finish(start(cache))
    assert said == COMPILED  # a folder that others may write is not loaded from
    assert "has mode 0777" in complaints


@pytest.fixture(scope="module")
def compiled() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_DSL_ARCH", ARCH)
        return launching.build(CONFIGURATION, "--enable-tvm-ffi --gpu-arch sm_90a")


@pytest.fixture
def entry(tmp_path: Path, compiled: Any) -> Path:
    """Written for the key `ours`."""
    artefacts.store(tmp_path / "entry.so", "ours", compiled)
    return tmp_path / "entry.so"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="cut short"),
        pytest.param(lambda data: data[:-1], id="one byte short"),
        pytest.param(lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], id="one bit"),
        pytest.param(lambda data: data[:-32], id="no seal"),
        pytest.param(lambda data: data + b"more", id="longer"),
    ],
)
def test_what_is_damaged_is_not_loaded(entry: Path, compiled: Any, damage: Callable[[bytes], bytes]) -> None:
    entry.write_bytes(damage(entry.read_bytes()))  # in place: it is not loaded yet
    assert artefacts.load(entry, "ours") is None
    artefacts.store(entry, "ours", compiled)
    assert artefacts.load(entry, "ours") is not None


def test_another_kernels_entry_is_not_loaded(entry: Path) -> None:
    """Whole in itself, and not what the name says."""
    assert artefacts.load(entry, "theirs") is None


def test_an_entry_whose_runtime_is_gone(entry: Path, tmp_path: Path) -> None:
    """Sealed, and the loader refuses it."""
    broken = b"\x7fELF" + bytes(100)
    entry.write_bytes(broken + artefacts._seal("ours", broken))
    assert artefacts.load(entry, "ours") is None


def test_an_entry_that_is_not_there(tmp_path: Path) -> None:
    assert artefacts.load(tmp_path / "none.so", "ours") is None


@pytest.mark.parametrize(
    ("module", "name"),
    [(selfcheck, "sources_hash"), (selfcheck, "version"), (selfcheck, "driver"), (artefacts, "_processor")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_an_entry_holds_for(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    before = artefacts.key_of(CONFIGURATION, "options")
    assert artefacts.key_of(CONFIGURATION, "options") == before
    monkeypatch.setattr(module, name, lambda *_: "another")
    assert artefacts.key_of(CONFIGURATION, "options") != before


def test_an_entry_is_one_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [
        artefacts.key_of(configuration, options)
        for dtype in (torch.bfloat16, torch.float16)
        for activation in ("silu", "gelu", "gelu_tanh")
        for size in Size
        for configuration in configurations(dtype, activation, size)
        for options in ("sm_90a", "sm_100a")
    ]
    different = {  # the forward kernels of shallow and deep sizes are the same
        (configuration, options)
        for dtype in (torch.bfloat16, torch.float16)
        for activation in ("silu", "gelu", "gelu_tanh")
        for size in Size
        for configuration in configurations(dtype, activation, size)
        for options in ("sm_90a", "sm_100a")
    }
    assert len(set(every)) == len(different) < len(every)


@pytest.mark.parametrize(
    ("prelude", "says"),
    [
        pytest.param("import os; os.environ['PATH'] = ''\n", "no C compiler", id="no C compiler"),
        pytest.param(
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000,) * 2)\n", "not kept", id="a full disk"
        ),
    ],
)
def test_what_can_not_be_kept_costs_speed_alone(tmp_path: Path, prelude: str, says: str) -> None:
    log = "import logging; logging.basicConfig(level='INFO')\n"
    said, complaints = finish(start(tmp_path / "fusepatch", prelude + log))
    assert said == COMPILED
    assert says in complaints
    assert not list(tmp_path.glob("fusepatch/kernels/*.so*"))
    assert not list(tmp_path.glob("fusepatch/kernels/*.half"))


# -------------------------------------------------------------------------------------------------- whose folder it is


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "fusepatch"))
    settings.install(None)
    return tmp_path / "fusepatch"


def refused(caplog: pytest.LogCaptureFixture) -> str:
    disk._warned.clear()
    caplog.clear()
    assert disk.private_folder("kernels") is None
    assert disk.private_folder("kernels") is None
    (record,) = caplog.records  # once
    return record.getMessage()


def test_a_folder_that_others_may_enter(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = disk.private_folder("kernels")
    assert path == folder / "kernels"
    for mode in (0o750, 0o705, 0o777, 0o720):
        path.chmod(mode)
        assert f"has mode {mode:04o}" in refused(caplog)
    path.chmod(0o700)
    assert disk.private_folder("kernels") == path


def test_a_cache_folder_that_others_may_write(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk.private_folder("kernels")
    folder.chmod(0o777)
    assert "has mode 0777" in refused(caplog)
    folder.chmod(0o755)
    assert disk.private_folder("kernels") is not None


def test_whatever_the_umask_what_is_made_is_usable(folder: Path) -> None:
    before = os.umask(0o002)
    try:
        assert disk.private_folder("kernels") is not None
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_cache_folder_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o755)
    folder.symlink_to(tmp_path / "scratch")
    assert disk.private_folder("kernels") == folder / "kernels"


def test_a_lock_is_given_back_though_a_child_was_forked(tmp_path: Path) -> None:
    with disk.one_process(tmp_path / "lock", 1.0) as had:
        assert had
        child = os.fork()
        if not child:
            time.sleep(5)
            os._exit(0)
    try:
        with disk.one_process(tmp_path / "lock", 1.0) as had:
            assert had
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    start = time.monotonic()
    with disk.one_process(tmp_path / "lock", 60.0) as had:
        assert had and time.monotonic() - start < 30


def test_an_exporter_that_fails_costs_speed_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def export_to_c(self, *_: object, **__: object) -> None:
            raise RuntimeError("no")

    caplog.set_level("INFO", "fusepatch")
    artefacts.store(tmp_path / "entry.so", "ours", Broken())
    assert "is not kept: no" in caplog.text


def test_a_link(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (folder / "kernels").symlink_to(tmp_path / "elsewhere")
    assert "is not a folder" in refused(caplog)


def test_somebody_elses(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    disk.private_folder("kernels")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert "belongs to user" in refused(caplog)


def test_a_file_in_the_way(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("")
    assert "FUSEPATCH_CACHE_DIR" in refused(caplog)


# ------------------------------------------------------------------------------------------- what an export launches


@pytest.mark.parametrize("size", [Size.SMALL, Size.DEEP], ids=lambda size: size.value)
@pytest.mark.parametrize(("keep", "biased"), [(False, False), (True, False), (True, True)])
def test_an_export_launches_the_forward_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: Size, keep: bool, biased: bool
) -> None:
    """Grid, cluster and shared memory; and each operand is read through a descriptor of its own."""
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    configuration = forward_configuration(torch.bfloat16, "silu", keep, size, biased=biased)
    compiled = launching.build(configuration, f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir={tmp_path}")
    launch, launched = fake_cuda.load(compiled, tmp_path)
    hidden, inner, clusters = 64, 960, 3
    at = [0x7F1000000000 + index * 0x10000000 for index in range(5 if keep else 4)]
    at_biases = [0x7F2000000002, 0x7F3000000006]  # aligned as their elements are

    def run(addresses: list[int], rows: int = 300) -> fake_cuda.Launched:
        shapes = [(rows, hidden), (inner, hidden), (inner, hidden), (rows, inner), (rows, 2 * inner)]
        tensors = [fake_cuda.tensor(address, shape) for address, shape in zip(addresses, shapes, strict=False)]
        biases = [fake_cuda.tensor(address, (inner,)) if biased else None for address in at_biases]
        launch(*tensors[:3], *biases, *tensors[3:], *([] if keep else [None]), clusters)
        return launched()

    first = run(at)
    cluster = configuration.tile.cluster
    assert (first.count, first.block) == (1, (384, 1, 1))
    assert first.cluster == (cluster, 1, 1)
    assert math.prod(first.grid) == clusters * cluster
    assert 0 < first.shared_bytes <= 232448

    # Moving one pointer changes its descriptors, and those of no other.
    descriptors = [index for index, each in enumerate(first.arguments) if len(each) == 128]

    def changes(addresses: list[int], rows: int = 300) -> tuple[int, ...]:
        now = run(addresses, rows).arguments
        # The second half of a descriptor is whatever was there before.
        return tuple(index for index in descriptors if now[index][:64] != first.arguments[index][:64])

    moved = [changes([each + 0x1000 * (each == address) for each in at]) for address in at]
    assert [len(each) for each in moved] == [1, 1, 1, 1, 2][: len(at)]  # gate_up is stored as two halves
    assert sorted(sum(moved, ())) == descriptors
    assert changes(at) == ()
    given = b"".join(first.arguments)
    assert all((address.to_bytes(8, "little") in given) is biased for address in at_biases)
    # Another number of rows is in the descriptors of x, h and gate_up, and not in the weights'.
    assert changes(at, 301) == tuple(sorted(sum((moved[index] for index in (0, 3, 4)[: len(at) - 2]), ())))
