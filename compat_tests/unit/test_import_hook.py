"""The post-import hook: it patches what is imported later, and no importer can tell that it was there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers.models
from torch import nn

import fusepatch
from fusepatch import catalogue, importhook, patch

SOURCE = """
from torch import nn


class FakeMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(8, 16, bias=False)
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj
"""
FAKE = "transformers.models.fakemodel.modeling_fakemodel"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Adds files to the model `fakemodel` of the installed transformers, for the length of a test."""
    folder = tmp_path / "fakemodel"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.setattr(transformers.models, "__path__", [*transformers.models.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def add(source: str, name: str = "modeling_fakemodel") -> Path:
        file = folder / f"{name}.py"
        file.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return file

    yield add
    for name in [name for name in sys.modules if "fakemodel" in name]:
        del sys.modules[name]
    vars(transformers.models).pop("fakemodel", None)


def is_patched(kind: type[nn.Module]) -> bool:
    found = patch.ours(vars(kind)["forward"])
    return found is not None and found.switch.off is None


def names_of_patched() -> list[str]:
    return [each.name for target in fusepatch.status().targets for each in target.classes if each.state == "patched"]


def test_model_imported_later_is_patched(write, reference_backend: None) -> None:
    write(SOURCE)
    fusepatch.accelerate()
    kind = importlib.import_module(FAKE).FakeMLP
    assert is_patched(kind)
    kind()(torch.ones(1, 8))
    assert fusepatch.status().native_calls() == 1
    fusepatch.restore()
    assert "fusepatch" not in kind.forward.__code__.co_filename


@pytest.mark.parametrize("style", ["import", "from", "importlib", "__import__"])
def test_every_way_to_import(write, style: str) -> None:
    write(SOURCE)
    fusepatch.accelerate()
    namespace: dict[str, object] = {}
    exec(
        {
            "import": f"import {FAKE} as fake; FakeMLP = fake.FakeMLP",
            "from": f"from {FAKE} import FakeMLP",
            "importlib": f"import importlib; FakeMLP = importlib.import_module({FAKE!r}).FakeMLP",
            "__import__": f"FakeMLP = __import__({FAKE!r}, fromlist=['FakeMLP']).FakeMLP",
        }[style],
        namespace,
    )
    assert is_patched(namespace["FakeMLP"])


def test_only_wanted_modules_are_watched(write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("modeling_fakemodel", "configuration_fakemodel", "modular_fakemodel"):
        write(SOURCE, name)
    seen: list[str] = []
    after = fusepatch.entry._after_import
    monkeypatch.setattr(fusepatch.entry, "_after_import", lambda module: (seen.append(module.__name__), after(module)))
    fusepatch.accelerate()
    for name in ("configuration_fakemodel", "modeling_fakemodel", "modular_fakemodel"):
        importlib.import_module(f"transformers.models.fakemodel.{name}")
    importlib.reload(importlib.import_module("colorsys"))
    assert seen == [FAKE]


def test_nothing_is_watched_with_a_model_or_after_restore(write) -> None:
    write(SOURCE)
    spec = importlib.util.spec_from_loader("remote", loader=None)
    remote = importlib.util.module_from_spec(spec)
    exec(SOURCE, vars(remote))
    finders = list(sys.meta_path)
    fusepatch.accelerate(model=remote.FakeMLP())
    assert sys.meta_path == finders
    fusepatch.accelerate()
    assert len(sys.meta_path) == len(finders) + 1
    fusepatch.restore()
    assert sys.meta_path == finders
    assert not is_patched(importlib.import_module(FAKE).FakeMLP)


def test_module_looks_untouched(write) -> None:
    file = write(SOURCE)
    stock = importlib.import_module(FAKE)
    plain = {name: type(value) for name, value in vars(stock).items()}
    state = {**vars(stock.__spec__.loader)}
    del sys.modules[FAKE]

    fusepatch.accelerate()
    module = importlib.import_module(FAKE)
    assert {name: type(value) for name, value in vars(module).items()} == plain
    assert vars(module.__spec__.loader) == state
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__) is type(stock.__loader__)
    assert module.__spec__.origin == str(file) == module.__file__
    assert inspect.getsource(module.FakeMLP) == inspect.getsource(stock.FakeMLP)
    assert inspect.getsource(module) == SOURCE
    assert importlib.util.find_spec(FAKE) is module.__spec__


def test_reload_patches_the_new_class(write, reference_backend: None) -> None:
    write(SOURCE)
    fusepatch.accelerate()
    module = importlib.import_module(FAKE)
    old = module.FakeMLP
    assert importlib.reload(module) is module
    assert module.FakeMLP is not old
    assert is_patched(old) and is_patched(module.FakeMLP)
    fusepatch.restore()
    assert not is_patched(old) and not is_patched(module.FakeMLP)
    assert importlib.reload(module) and not is_patched(module.FakeMLP)


def test_import_error_propagates_and_the_next_import_works(write) -> None:
    write("raise ZeroDivisionError('broken file')")
    fusepatch.accelerate()
    with pytest.raises(ZeroDivisionError, match="broken file"):
        importlib.import_module(FAKE)
    assert FAKE not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="modeling_nowhere"):
        importlib.import_module("transformers.models.fakemodel.modeling_nowhere")
    write(SOURCE)
    assert is_patched(importlib.import_module(FAKE).FakeMLP)


def test_error_of_ours_never_breaks_an_import(
    write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(SOURCE)
    fusepatch.accelerate()

    def fail(target: catalogue.Target, module: ModuleType) -> list[type[nn.Module]]:
        raise ZeroDivisionError("ours")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "fusepatch"):
        patched.setattr(catalogue, "find_in_module", fail)
        kind = importlib.import_module(FAKE).FakeMLP
    assert not is_patched(kind)
    assert FAKE in caplog.text
    fusepatch.accelerate()
    assert is_patched(kind)


def test_only_classes_that_the_module_defines(write) -> None:
    write(SOURCE + "\nAlias = FakeMLP\nnot_a_class = FakeMLP.forward\nbase = nn.Module\n")
    write(SOURCE.replace("FakeMLP", "ForeignMLP"), "layers")
    write(
        f"from {FAKE} import FakeMLP\nfrom .layers import ForeignMLP\nclass Heir(FakeMLP): pass",
        "modeling_fakemodel_heir",
    )
    fusepatch.accelerate()
    heir = importlib.import_module("transformers.models.fakemodel.modeling_fakemodel_heir").Heir
    assert "forward" not in vars(heir)
    assert [name for name in names_of_patched() if "fakemodel" in name] == [f"{FAKE}.FakeMLP"]


# ------------------------------------------------------------------------------------------- with other importers


class PoliteFinder(MetaPathFinder):
    """Another library's hook, built as ours is: it asks every finder but itself."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if "fakemodel" not in name:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        return next((spec for spec in found if spec is not None), None)


# Found: two finders that ask all others ask each other without end: RecursionError out of every import.
@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_another_hook_of_the_same_build(write, monkeypatch: pytest.MonkeyPatch, ours_first: bool) -> None:
    write(SOURCE)
    if ours_first:
        fusepatch.accelerate()
    monkeypatch.setattr(sys, "meta_path", sys.meta_path)
    sys.meta_path.insert(0, PoliteFinder)
    fusepatch.accelerate()
    try:
        assert is_patched(importlib.import_module(FAKE).FakeMLP)
    finally:
        sys.meta_path.remove(PoliteFinder)


@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_beside_old_finders(write) -> None:
    write(SOURCE)
    fusepatch.accelerate()
    old = type("Old", (), {"find_module": lambda self, name, path=None: None})()
    sys.meta_path.insert(0, old)
    try:
        assert is_patched(importlib.import_module(FAKE).FakeMLP)
    finally:
        sys.meta_path.remove(old)


# Found: while one module is looked for, no other is watched.
def test_beside_a_finder_that_imports(write) -> None:
    for name in ("modeling_fakemodel", "modeling_fakemodel_base"):
        write(SOURCE, name)

    class Importing(MetaPathFinder):
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == FAKE:
                importlib.import_module(FAKE + "_base")

    sys.meta_path.insert(0, Importing)
    try:
        fusepatch.accelerate()
        assert is_patched(importlib.import_module(FAKE).FakeMLP)
        assert is_patched(sys.modules[FAKE + "_base"].FakeMLP)
    finally:
        sys.meta_path.remove(Importing)


def test_found_but_not_imported(write) -> None:
    write(SOURCE)
    fusepatch.accelerate()
    spec = importlib.util.find_spec(FAKE)
    assert not names_of_patched() or all("fakemodel" not in name for name in names_of_patched())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert is_patched(module.FakeMLP)
    assert "exec_module" not in vars(spec.loader)


def test_lazy_loader(write) -> None:
    write(SOURCE)
    fusepatch.accelerate()
    spec = importlib.util.find_spec(FAKE)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[FAKE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert is_patched(module.FakeMLP)


def test_loader_that_modules_share(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("")  # makes the package; its files come from an archive, which has one loader for a folder
    names = [f"modeling_zipped{number}" for number in range(3)]
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for name, after in zip(names, [*names[1:], None], strict=True):
            source = SOURCE if after is None else f"from .{after} import FakeMLP as Other\n{SOURCE}"
            archive.writestr(f"zipped/{name}.py", source)
    package = importlib.import_module("transformers.models.fakemodel")
    monkeypatch.setattr(package, "__path__", [str(tmp_path / "archive.zip" / "zipped")])
    fusepatch.accelerate()
    modules = [importlib.import_module(f"transformers.models.fakemodel.{name}") for name in names]
    assert all(is_patched(module.FakeMLP) for module in modules)
    assert len({id(module.__loader__) for module in modules}) == 1
    assert "exec_module" not in vars(modules[0].__loader__)


# ------------------------------------------------------------------------------------------------------- threads

SLOW = SOURCE.replace(
    "from torch import nn\n", "import sys\nfrom torch import nn\nsys.entered.set()\nassert sys.go_on.wait(10)\n"
)


def importing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], type[nn.Module]]:
    """Leaves another thread in the middle of importing the fake model; returns a function that lets it end."""
    entered, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "entered", entered, raising=False)
    monkeypatch.setattr(sys, "go_on", go_on, raising=False)
    thread = threading.Thread(target=importlib.import_module, args=(FAKE,))
    thread.start()
    assert entered.wait(10)

    def finish() -> type[nn.Module]:
        go_on.set()
        thread.join(10)
        assert not thread.is_alive()
        return getattr(sys.modules.get(FAKE), "FakeMLP", None)

    return finish


# Found: a module that another thread is in the middle of importing is neither watched nor complete, and is missed.
def test_accelerate_while_another_thread_imports(write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(SLOW)
    finish = importing(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        accelerating = pool.submit(fusepatch.accelerate)
        wait([accelerating], 0.2)
        kind = finish()
        accelerating.result(10)
    assert is_patched(kind)


# Found: what the broken file raises leaves accelerate(), after everything was applied.
def test_accelerate_while_another_thread_fails_to_import(write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(SLOW + "\nraise ZeroDivisionError('broken file')\n")
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    finish = importing(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        accelerating = pool.submit(fusepatch.accelerate)
        wait([accelerating], 0.2)
        finish()
        accelerating.result(10)
    assert FAKE not in sys.modules


def test_restore_while_another_thread_imports(write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(SLOW)
    fusepatch.accelerate()
    finish = importing(monkeypatch)
    fusepatch.restore()
    kind = finish()
    assert not is_patched(kind)
    assert "exec_module" not in vars(sys.modules[FAKE].__loader__)


def test_status_while_another_thread_imports(write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(SLOW)
    fusepatch.accelerate()
    finish = importing(monkeypatch)
    fusepatch.status()
    assert is_patched(finish())


def test_imports_and_accelerate_in_many_threads(write) -> None:
    """No deadlock between the import system's lock of a module and ours."""
    write(SOURCE)
    fusepatch.accelerate()
    threads = [threading.Thread(target=importlib.import_module, args=(FAKE,)) for _ in range(4)]
    threads += [threading.Thread(target=fusepatch.accelerate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert is_patched(sys.modules[FAKE].FakeMLP)


# ------------------------------------------------------------------------------------------------- is_installed


def test_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_a_folder").mkdir()
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert importhook.is_installed("a_package")
    assert not importhook.is_installed("only_a_folder")
    assert not importhook.is_installed("no_such_library")
    assert "a_package" not in sys.modules
    monkeypatch.setitem(sys.modules, "a_package", None)
    assert not importhook.is_installed("a_package")
