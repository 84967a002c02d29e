"""`accelerate()` and its context managers: what they patch, when, for which model, and what is left when they fail."""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path

import fla.modules.mlp
import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3 import modeling_phi3

import fusepatch
from fusepatch import entry, importhook, patch, settings
from fusepatch.decline import DeclinedError, Reason
from support import tiny_llama, tiny_llama_mlp

OTHER_ARGUMENTS = [
    ("gatd_mlp", ValueError),
    ("", ValueError),
    ("GATED_MLP", ValueError),
    ("gated_mlp,gated_mlp", ValueError),
    (["gated_mlp", "nope"], ValueError),
    ([], ValueError),
    ((), ValueError),
    (["gated_mlp", None], TypeError),
    (b"gated_mlp", TypeError),
    ({"gated_mlp": True}, TypeError),
    (iter(["gated_mlp"]), TypeError),
    (3, TypeError),
    (True, TypeError),
    (LlamaMLP, TypeError),
]
X = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)


def everything() -> dict[object, object]:
    """All that `accelerate()` may change: the classes of every model file, the import system, the settings in force."""
    classes = {
        kind: list(vars(kind).items())
        for name, module in list(sys.modules.items())
        if ".modeling_" in name or name.startswith("fla.")
        for kind in list(vars(module).values())
        if isinstance(kind, type) and issubclass(kind, nn.Module)
    }
    return {**classes, "finders": list(sys.meta_path), "settings in force": settings._current}


def changes_since(before: dict[object, object]) -> list[object]:
    """The keys of `everything()` whose values are no longer what they were."""
    now = everything()
    return [key for key in {**before, **now} if before.get(key) != now.get(key)]


def is_patched(kind: type[nn.Module]) -> bool:
    found = patch.ours(vars(kind)["forward"])
    return found is not None and found.switch.off is None


def declines() -> dict[str, int]:
    return {k: v for target in fusepatch.status().targets for k, v in target.total("declines").items()}


# ------------------------------------------------------------------------------------------------------- when

REMOTE_CODE = """
from torch import nn

class RemoteMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj
"""

FRESH_PROCESS = (
    REMOTE_CODE
    + """
import sys
import torch

def no_gpu(*args):
    raise AssertionError("CUDA was initialised")

torch._C._cuda_init = no_gpu
finders = list(sys.meta_path)
import fusepatch
assert "fusepatch.entry" not in sys.modules

status = fusepatch.accelerate()
unwanted = {"transformers", "fla", "triton", "torch._dynamo", "torch._inductor", "accelerate"}
assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
assert [target.state for target in status.targets] == ["pending", "pending"], status
remote = RemoteMLP()
fusepatch.accelerate(model=remote)
remote(torch.ones(1, 64)).sum().backward()
assert fusepatch.status().native_calls() == 1
fusepatch.restore()
assert sys.meta_path == finders
assert not unwanted & set(sys.modules)
fusepatch.accelerate()
fusepatch.accelerate()

from transformers.models.llama.modeling_llama import LlamaMLP, LlamaConfig
assert [target.state for target in fusepatch.status().targets] == ["patched", "pending"], fusepatch.status()
from fla.modules import GatedMLP
assert [target.state for target in fusepatch.status().targets] == ["patched", "patched"], fusepatch.status()
x = torch.ones(2, 8)
LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2))(x)
GatedMLP(8, intermediate_size=16)(x)
assert fusepatch.status().native_calls() == 2, fusepatch.status()
print(fusepatch.status())
fusepatch.restore()
assert not any("fusepatch" in type(finder).__module__ for finder in sys.meta_path)
from pathlib import Path
package = Path(fusepatch.__file__).parent
ours = [folder.resolve() for folder in (package, package / "shims", package / "kernels")]
for kind in (LlamaMLP, GatedMLP):
    assert not set(ours) & set(Path(kind.forward.__code__.co_filename).resolve().parents)
assert not torch.cuda.is_initialized()
"""
)


def test_before_the_libraries_are_imported() -> None:
    environ = {**os.environ, "FUSEPATCH_GATED_MLP_BACKEND": "reference"}
    done = subprocess.run([sys.executable, "-c", FRESH_PROCESS], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("built_first", [True, False])
def test_after_the_libraries_are_imported(reference_backend: None, built_first: bool) -> None:
    mlp = tiny_llama_mlp() if built_first else None
    status = fusepatch.accelerate()
    (mlp or tiny_llama_mlp())(X)
    assert [target.state for target in status.targets] == ["patched", "patched"]
    assert fusepatch.status().native_calls() == 1
    assert is_patched(fla.modules.mlp.GatedMLP)


def test_twice_is_once(reference_backend: None) -> None:
    before = everything()
    fusepatch.accelerate()
    once, finders = everything(), len(sys.meta_path)
    fusepatch.accelerate("gated_mlp")
    assert set(changes_since(once)) <= {"finders", "settings in force"}
    assert len(sys.meta_path) == finders
    tiny_llama_mlp()(X)
    assert fusepatch.status().native_calls() == 1
    fusepatch.restore()
    assert not changes_since(before)
    fusepatch.restore()
    assert not changes_since(before)


def test_counts_start_anew_after_restore(reference_backend: None) -> None:
    mlp = tiny_llama_mlp()
    fusepatch.accelerate()
    mlp(X)
    fusepatch.accelerate()
    mlp(X)
    fusepatch.restore()
    assert fusepatch.status().native_calls() == 2
    fusepatch.accelerate()
    mlp(X)
    assert fusepatch.status().native_calls() == 1


# -------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("ops", ["gated_mlp", ["gated_mlp"], ("gated_mlp",), {"gated_mlp"}, ["gated_mlp"] * 3])
def test_ops_by_name(ops: object) -> None:
    fusepatch.accelerate(ops)
    assert is_patched(LlamaMLP)
    fusepatch.restore(ops)
    assert not is_patched(LlamaMLP)


@pytest.mark.parametrize(("ops", "error"), OTHER_ARGUMENTS, ids=lambda value: repr(value)[:24])
@pytest.mark.parametrize(
    "call", [fusepatch.accelerate, fusepatch.restore, lambda ops: fusepatch.accelerated(ops).__enter__()]
)
def test_wrong_ops(call, ops: object, error: type[Exception]) -> None:
    before = everything()
    with pytest.raises(error, match="gated_mlp"):
        call(ops)
    assert not changes_since(before)


@pytest.mark.parametrize("strict", [1, 0, None, "yes"])
def test_wrong_strict(strict: object) -> None:
    before = everything()
    with pytest.raises(TypeError, match="strict"):
        fusepatch.accelerate(strict=strict)
    assert not changes_since(before)


class _Blocker:
    """An import hook that refuses the libraries, as a sandbox does."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in ("transformers", "fla"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return None


@pytest.fixture(params=["blocked", "not found", "a bare folder", "None in sys.modules"])
def nothing_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("transformers", "fla"):
        if request.param == "None in sys.modules":
            monkeypatch.setitem(sys.modules, library, None)
        else:
            monkeypatch.delitem(sys.modules, library)
    if request.param == "blocked":
        monkeypatch.setattr(sys, "meta_path", [_Blocker, *sys.meta_path])
    elif request.param != "None in sys.modules":
        folder = ModuleSpec("folder", None, is_package=True) if request.param == "a bare folder" else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: folder)


class TestNothingInstalled:
    def test_named(self, nothing_installed: None) -> None:
        before = everything()
        with pytest.raises(ImportError) as raised:
            fusepatch.accelerate("gated_mlp")
        for part in ("gated_mlp", "transformers: missing-package", "fla: missing-package", "flash-linear-attention"):
            assert part in str(raised.value)
        assert not changes_since(before)

    # Found: the warning names the caller's caller; stacklevel=4 in _check_plans() is one too many.
    def test_unnamed(self, nothing_installed: None) -> None:
        finders = list(sys.meta_path)
        with pytest.warns(UserWarning, match="missing-package") as caught:
            status = fusepatch.accelerate()
        assert {(target.state, target.reason) for target in status.targets} == {("off", "missing-package")}
        assert sys.meta_path == finders
        assert [warning.filename for warning in caught] == [__file__]


def test_one_library_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importhook, "is_installed", lambda library: library == "transformers")
    status = fusepatch.accelerate("gated_mlp")
    assert [(target.state, target.reason) for target in status.targets] == [
        ("patched", None),
        ("off", "missing-package"),
    ]


# ----------------------------------------------------------------------------------------------------- failure


@pytest.fixture(params=[(False, RuntimeError), (True, RuntimeError), (True, KeyboardInterrupt)], ids=str)
def fails_at_the_third_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """`patch.apply` fails once, for the third class it is given: before it has changed anything, or just after."""
    late, error = request.param
    apply, given = patch.apply, []

    def fail(found: patch.ForwardPatch) -> None:
        given.append(found)
        if len(given) != 3 or late:
            apply(found)
        if len(given) == 3:
            raise error("third")

    monkeypatch.setattr(patch, "apply", fail)
    yield error
    for found in given:
        patch.undo(found)


# Found: an exception between patch.apply() and its entry in _state.patches leaves that class patched for good.
class TestFailureHalfWay:
    def test_from_nothing(self, fails_at_the_third_class) -> None:
        before = everything()
        with pytest.raises(fails_at_the_third_class, match="third"):
            fusepatch.accelerate()
        assert not changes_since(before)
        fusepatch.restore()
        assert not changes_since(before)

    def test_of_a_model_that_was_on(self, reference_backend: None, fails_at_the_third_class) -> None:
        chosen, other = tiny_llama_mlp(), tiny_llama_mlp()
        fusepatch.accelerate(model=chosen)
        before = everything()
        with pytest.raises(fails_at_the_third_class, match="third"):
            fusepatch.accelerate(strict=True)
        assert not changes_since(before)
        chosen(X), other(X)
        assert fusepatch.status().native_calls() == 1
        assert declines() == {"other-model": 1}

    # Found: the outcomes become "restored", the classes stay listed, and earlier counts are dropped.
    @pytest.mark.parametrize("first", [True, False])
    def test_status_is_as_before(
        self, monkeypatch: pytest.MonkeyPatch, reference_backend: None, fails_at_the_third_class, first: bool
    ) -> None:
        monkeypatch.setattr(entry, "_state", entry._State())
        if not first:
            mlp = tiny_llama_mlp()
            with fusepatch.accelerated(model=mlp):
                mlp(X)
        before = fusepatch.status().to_dict()
        with pytest.raises(fails_at_the_third_class, match="third"):
            fusepatch.accelerate()
        assert fusepatch.status().to_dict() == before

    def test_works_afterwards(self, reference_backend: None, fails_at_the_third_class) -> None:
        before = everything()
        with pytest.raises(fails_at_the_third_class):
            fusepatch.accelerate()
        fusepatch.accelerate()
        tiny_llama_mlp()(X)
        assert fusepatch.status().native_calls() == 1
        fusepatch.restore()
        assert not changes_since(before)


# ------------------------------------------------------------------------------------------- context managers


class TestAccelerated:
    def test_undoes_what_it_did(self, reference_backend: None) -> None:
        before = everything()
        with fusepatch.accelerated() as status:
            assert status.targets[0].state == "patched"
            with fusepatch.accelerated("gated_mlp"):
                tiny_llama_mlp()(X)
            tiny_llama_mlp()(X)
        assert fusepatch.status().native_calls() == 2
        assert not changes_since(before)

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
    def test_error_in_the_body(self, error: type[BaseException]) -> None:
        before = everything()
        with pytest.raises(error, match="body"), fusepatch.accelerated(), fusepatch.disabled():
            raise error("body")
        assert not changes_since(before)
        assert not fusepatch.status().disabled

    def test_leaves_the_outer_on(self, reference_backend: None) -> None:
        mlp = tiny_llama_mlp()
        fusepatch.accelerate()
        before = everything()
        with fusepatch.accelerated(strict=True):
            assert fusepatch.status().strict
        assert not fusepatch.status().strict
        assert set(changes_since(before)) <= {"finders"}
        mlp(X)
        assert fusepatch.status().native_calls() == 1

    def test_leaves_the_outer_model_alone_on(self, reference_backend: None) -> None:
        chosen, other = tiny_llama_mlp(), tiny_llama_mlp()
        fusepatch.accelerate(model=chosen)
        finders = list(sys.meta_path)
        with fusepatch.accelerated():
            other(X)
            assert is_patched(modeling_phi3.Phi3MLP)
        other(X), chosen(X)
        assert fusepatch.status().native_calls() == 2
        assert declines() == {"other-model": 1}
        assert not is_patched(modeling_phi3.Phi3MLP)
        assert sys.meta_path == finders

    def test_inner_model_leaves_the_outer_library_on(self, reference_backend: None) -> None:
        chosen, other = tiny_llama_mlp(), tiny_llama_mlp()
        fusepatch.accelerate()
        with fusepatch.accelerated(model=chosen):
            other(X)
        other(X)
        assert fusepatch.status().native_calls() == 2

    # Found: _return_to() brings back the hook and the state "on", and not the patches.
    def test_restore_inside_leaves_a_consistent_state(self, reference_backend: None) -> None:
        fusepatch.accelerate()
        with fusepatch.accelerated():
            fusepatch.restore()
        on = fusepatch.status().targets[0].state == "patched"
        assert is_patched(LlamaMLP) is on
        assert any(isinstance(finder, importhook._Finder) for finder in sys.meta_path) is on

    def test_as_a_decorator(self, reference_backend: None) -> None:
        before = everything()

        @fusepatch.accelerated()
        def run() -> bool:
            return is_patched(LlamaMLP)

        assert run() and run()
        assert not changes_since(before)


class TestDisabled:
    def test_nests(self, reference_backend: None) -> None:
        mlp = tiny_llama_mlp()
        stock = mlp(X)
        fusepatch.accelerate()
        with fusepatch.disabled():
            with fusepatch.disabled():
                assert torch.equal(mlp(X), stock)
            assert torch.equal(mlp(X), stock)
            assert fusepatch.status().disabled
        mlp(X)
        assert declines() == {"disabled": 2}
        assert fusepatch.status().native_calls() == 1

    def test_every_thread_sees_it(self, reference_backend: None) -> None:
        replicas = [tiny_llama_mlp() for _ in range(4)]
        fusepatch.accelerate()
        with ThreadPoolExecutor(4) as pool, fusepatch.disabled():
            list(pool.map(lambda mlp: mlp(X), replicas))
        assert declines() == {"disabled": 4}

    def test_entered_in_another_thread(self, reference_backend: None) -> None:
        mlp, entered, leave = tiny_llama_mlp(), threading.Event(), threading.Event()
        fusepatch.accelerate()

        def hold() -> None:
            with fusepatch.disabled():
                entered.set()
                leave.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait(10)
        mlp(X)
        leave.set()
        thread.join()
        mlp(X)
        assert declines() == {"disabled": 1}
        assert fusepatch.status().native_calls() == 1

    def test_entered_inside_a_forward(self, reference_backend: None) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = tiny_llama_mlp(), tiny_llama_mlp()

            def forward(self, x):
                with fusepatch.disabled():
                    x = self.first(x)
                return self.second(x)

        fusepatch.accelerate()
        Outer()(X)
        assert declines() == {"disabled": 1}
        assert fusepatch.status().native_calls() == 1

    def test_accelerate_and_restore_inside(self, reference_backend: None) -> None:
        mlp, before = tiny_llama_mlp(), everything()
        with fusepatch.disabled():
            fusepatch.accelerate()
            mlp(X)
            assert declines() == {"disabled": 1}
            fusepatch.restore()
            assert not changes_since(before)
            fusepatch.accelerate()
        mlp(X)
        assert fusepatch.status().native_calls() == 1


def test_eight_threads_leave_a_consistent_state(reference_backend: None) -> None:
    mlp, before = tiny_llama_mlp(), everything()
    stock = mlp(X)
    errors: list[BaseException] = []

    def forward() -> None:
        assert torch.allclose(mlp(X), stock, atol=1e-5)

    def block() -> None:
        with fusepatch.accelerated(), fusepatch.disabled():
            forward()

    def work(seed: int) -> None:
        choose = random.Random(seed).choice
        try:
            for _ in range(25):
                choose([fusepatch.accelerate, fusepatch.restore, fusepatch.status, forward, forward, block])()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    fusepatch.restore()
    assert not changes_since(before)
    assert torch.equal(mlp(X), stock)


# ------------------------------------------------------------------------------------------------------ model=


class TestModel:
    def test_only_its_classes_and_modules(self, reference_backend: None) -> None:
        chosen, other = tiny_llama(), tiny_llama()
        finders = list(sys.meta_path)
        fusepatch.accelerate(model=chosen)
        tokens = torch.arange(5)[None]
        other(tokens), copy.deepcopy(chosen)(tokens), chosen(tokens)
        assert fusepatch.status().native_calls() == 2
        assert declines() == {"other-model": 4}
        assert not is_patched(modeling_phi3.Phi3MLP)
        assert not is_patched(fla.modules.mlp.GatedMLP)
        assert sys.meta_path == finders

    def test_a_part_of_a_model(self, reference_backend: None) -> None:
        model = tiny_llama()
        fusepatch.accelerate(model=model.model.layers[1])
        model(torch.arange(5)[None])
        assert fusepatch.status().native_calls() == 1
        assert declines() == {"other-model": 1}

    def test_two_calls_add_up_and_one_without_widens(self, reference_backend: None) -> None:
        first, second, third = (tiny_llama_mlp() for _ in range(3))
        for model in (first, second, first):
            fusepatch.accelerate(model=model)
        first(X), second(X), third(X)
        assert fusepatch.status().native_calls() == 2
        assert declines() == {"other-model": 1}
        fusepatch.accelerate()
        third(X)
        assert fusepatch.status().native_calls() == 3
        fusepatch.accelerate(model=first)
        third(X)
        assert fusepatch.status().native_calls() == 4
        fusepatch.restore()
        fusepatch.accelerate(model=third)
        first(X), third(X)
        assert fusepatch.status().native_calls() == 1

    def test_remote_code(self, reference_backend: None, tmp_path: Path) -> None:
        file = tmp_path / "modeling_remote.py"
        file.write_text(REMOTE_CODE)
        spec = importlib.util.spec_from_file_location("transformers_modules.remote.modeling_remote", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        mlp, before = module.RemoteMLP(), list(vars(module.RemoteMLP).items())
        fusepatch.accelerate()
        assert not is_patched(module.RemoteMLP)
        with fusepatch.accelerated(model=nn.Sequential(mlp)):
            mlp(X)
        assert fusepatch.status().native_calls() == 1
        assert list(vars(module.RemoteMLP).items()) == before

    @pytest.mark.parametrize("kind", ["inherits", "calls super().forward", "inherits twice"])
    def test_subclass(self, reference_backend: None, kind: str) -> None:
        class Inherits(LlamaMLP):
            pass

        class Calls(LlamaMLP):
            def forward(self, x):
                return super().forward(x)

        class Twice(Inherits):
            pass

        subclass = {"inherits": Inherits, "calls super().forward": Calls, "inherits twice": Twice}[kind]
        mlp, other = subclass(tiny_llama_mlp().config), tiny_llama_mlp()
        if subclass is Calls:
            with pytest.raises(ValueError, match="no module"):
                fusepatch.accelerate(model=mlp)
            fusepatch.accelerate()
        else:
            fusepatch.accelerate(model=mlp)
            other(X)
            assert declines() == {"other-model": 1}
        mlp(X)
        assert fusepatch.status().native_calls() == 1
        assert not vars(subclass).get("forward") or subclass is Calls

    @pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(), modeling_llama.LlamaRMSNorm(4)])
    def test_without_an_eligible_module(self, model: nn.Module) -> None:
        before = everything()
        with pytest.raises(ValueError, match="explain"):
            fusepatch.accelerate(model=model)
        assert not changes_since(before)

    @pytest.mark.parametrize("model", ["llama", LlamaMLP, 3, [tiny_llama_mlp], X])
    def test_of_another_type(self, model: object) -> None:
        before = everything()
        with pytest.raises(TypeError, match="model"):
            fusepatch.accelerate(model=model)
        assert not changes_since(before)

    def test_is_not_kept_alive(self, reference_backend: None) -> None:
        import weakref

        mlp = tiny_llama_mlp()
        gone = weakref.ref(mlp)
        fusepatch.accelerate(model=mlp)
        del mlp
        assert gone() is None

    # Found: the other libraries' targets say "forward-differs" of classes that nobody looked at.
    def test_status_does_not_blame_the_libraries_not_meant(self) -> None:
        status = fusepatch.accelerate(model=tiny_llama_mlp())
        assert [target.state for target in status.targets] == ["patched", "off"]
        assert status.targets[1].reason != "forward-differs"


# ------------------------------------------------------------------------------------------------------- strict


class TestStrict:
    @pytest.mark.parametrize("by_environment", [False, True])
    def test_raises_on_a_decline(self, monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
        if by_environment:
            monkeypatch.setenv("FUSEPATCH_STRICT", "1")
        fusepatch.accelerate(strict=not by_environment)
        with pytest.raises(DeclinedError, match="cpu") as raised:
            tiny_llama_mlp()(X)
        assert raised.value.reason is Reason.CPU
        fusepatch.restore()
        tiny_llama_mlp()(X)

    def test_not_on_what_was_chosen(self, reference_backend: None) -> None:
        mlp, other = tiny_llama_mlp(), tiny_llama_mlp()
        fusepatch.accelerate(model=mlp, strict=True)
        captured = mlp.forward
        mlp(X[:0]), other(X)
        with fusepatch.disabled():
            mlp(X)
        fusepatch.restore()
        captured(X)
        assert declines() == {"zero-tokens": 1, "other-model": 1, "disabled": 1, "restored": 1}

    @pytest.mark.parametrize(
        ("route", "bias", "reason"),
        [
            (None, False, None),
            (None, True, None),
            ("fused", False, None),
            ("fused", True, Reason.BIAS),
            ("pointwise", False, None),
            ("pointwise", True, None),
            ("original", False, None),
        ],
    )
    def test_route(
        self,
        monkeypatch: pytest.MonkeyPatch,
        reference_backend: None,
        route: str | None,
        bias: bool,
        reason: Reason | None,
    ) -> None:
        if route is not None:
            monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", route)
        mlp = tiny_llama_mlp(mlp_bias=bias)
        fusepatch.accelerate(strict=True)
        if reason is None:
            mlp(X)
            return
        with pytest.raises(DeclinedError) as raised:
            mlp(X)
        assert raised.value.reason is reason

    def test_route_bound_without_a_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", "pointwise")
        fusepatch.accelerate(strict=True)
        with pytest.raises(DeclinedError) as raised:
            tiny_llama_mlp()(X)
        assert raised.value.reason is Reason.CPU

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("ran", [True, False])
    @pytest.mark.parametrize("in_a_block", [True, False])
    def test_named_and_never_ran(self, reference_backend: None, named: bool, ran: bool, in_a_block: bool) -> None:
        mlp, before = tiny_llama_mlp(), everything()

        def run() -> None:
            if in_a_block:
                with fusepatch.accelerated("gated_mlp" if named else None, strict=True):
                    mlp(X if ran else X[:0])
                return
            fusepatch.accelerate("gated_mlp" if named else None, strict=True)
            mlp(X if ran else X[:0])
            fusepatch.restore()

        if named and not ran:
            with pytest.raises(DeclinedError, match="gated_mlp was asked for by name and never ran natively"):
                run()
        else:
            run()
        assert not changes_since(before)

    def test_block_does_not_mask_an_error(self) -> None:
        before = everything()
        with pytest.raises(ZeroDivisionError), fusepatch.accelerated("gated_mlp", strict=True):
            raise ZeroDivisionError
        assert not changes_since(before)

    def test_last_accelerate_decides(self) -> None:
        fusepatch.accelerate(strict=True)
        fusepatch.accelerate()
        tiny_llama_mlp()(X)
        assert declines() == {"cpu": 1}


def test_state_lock_survives_a_fork(reference_backend: None) -> None:
    """Found: only the ledger's lock is renewed; a child forked while another thread holds the state's lock hangs."""
    holding, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with entry.settings_in_force():
            holding.set()
            leave.wait(10)

    fusepatch.accelerate()
    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2)
        try:
            fusepatch.status()
        finally:
            os._exit(0)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
