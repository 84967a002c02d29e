"""Patched models under torch.compile: the fused route is one operator in the graph, the results are the library's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_products import PlainProducts, with_products
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._pytree import tree_leaves

import fusepatch
from fusepatch import pytest_plugin, settings
from fusepatch.kernels.gated_mlp import choose, library, reference
from fusepatch.parity_check import arms
from support import relative_error, tiny_llama, tiny_llama_mlp

IDS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def compiler(reference_backend: None):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs the graphs as they are, and keeps what is in them."""

    def __init__(self) -> None:
        self.forward: list[list[str]] = []
        self.backward: list[list[str]] = []
        self.backend = aot_autograd(fw_compiler=self._keeper(self.forward), bw_compiler=self._keeper(self.backward))

    @staticmethod
    def _keeper(into: list[list[str]]) -> Callable[..., Any]:
        def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
            into.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
            return make_boxed_func(graph.forward)

        return keep

    def count(self, name: str) -> int:
        return sum(target == f"fusepatch.{name}.default" for graph in self.forward + self.backward for target in graph)


def compiled(module: nn.Module, graphs: Graphs, **options: Any) -> Any:
    return torch.compile(module, backend=graphs.backend, fullgraph=True, **options)


def step(model: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients of the weights."""
    model.zero_grad()
    out = model(x)
    if not isinstance(out, Tensor):
        out = out.logits
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def traced() -> dict[str, int]:
    (target,) = [each for each in fusepatch.status().targets if each.name == "gated_mlp/transformers"]
    return target.total("traces")


def same(one: list[Tensor], other: list[Tensor], tolerance: float = 2e-6) -> None:
    assert len(one) == len(other) > 1
    assert max(relative_error(a, b) for a, b in zip(one, other, strict=True)) < tolerance


def small(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "pad_token_id": 0,
    }
    more = {"head_dim": 16} if name in ("Qwen3", "Gemma") else {}
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3", "Gemma"])
def test_a_training_step_keeps_the_kernels(name: str) -> None:
    model = small(name)
    stock = step(model, IDS)
    fusepatch.accelerate()
    graphs = Graphs()
    same(step(compiled(model, graphs), IDS), stock)
    assert (graphs.count("gated_mlp"), graphs.count("gemm_dact")) == (2, 2)
    assert traced()["fused"] > 0
    assert "fused" in str(fusepatch.status())


def test_traces_are_native_calls() -> None:
    """To `status()`, to `--fusepatch-require-native` and to `parity()` alike."""
    fusepatch.accelerate()
    before = arms._counts(("gated_mlp",))
    model = compiled(tiny_llama_mlp(), Graphs())
    model(torch.randn(3, 64))
    assert fusepatch.status().native_calls() == 1
    head, _, row, *_ = str(fusepatch.status()).splitlines()[1:]
    assert (head.split()[-1], row.split()[-1]) == ("compiled", "1")
    assert pytest_plugin._read_counts().native() == 1
    assert arms._since(before, ("gated_mlp",)).native == 1


def test_dynamic_shapes() -> None:
    model = tiny_llama_mlp()
    xs = [torch.randn(2, length, 64) for length in (5, 9, 13, 1, 40)]
    stock = [step(model, x) for x in xs]
    fusepatch.accelerate()
    graphs = Graphs()
    patched = compiled(model, graphs, dynamic=True)
    for x, expected in zip(xs, stock, strict=True):
        same(step(patched, x), expected)
    assert len(graphs.forward) <= 2  # one of them for a length of 1
    assert graphs.count("gated_mlp") == len(graphs.forward)


def test_inference_saves_nothing() -> None:
    model = tiny_llama_mlp()
    fusepatch.accelerate()
    graphs, wanted = Graphs(), []
    real = reference.dual_gemm_act
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reference,
            "dual_gemm_act",
            lambda *args, want_gate_up: (wanted.append(want_gate_up), real(*args, want_gate_up=want_gate_up))[1],
        )
        with torch.no_grad():
            compiled(model, graphs)(torch.randn(3, 64))
    assert wanted == [False]
    assert graphs.count("gated_mlp") == 1


@pytest.mark.parametrize("frozen", [("gate_proj", "up_proj"), ("down_proj",), ("gate_proj", "up_proj", "down_proj")])
def test_frozen_weights(frozen: tuple[str, ...]) -> None:
    model = tiny_llama_mlp()
    for name in frozen:
        getattr(model, name).requires_grad_(False)

    def run(module: Any) -> list[Tensor]:
        x = torch.ones(3, 64, requires_grad=True)
        return [*step(module, x), x.grad]

    stock = run(model)
    fusepatch.accelerate()
    graphs = Graphs()
    same(run(compiled(model, graphs)), stock)
    assert graphs.count("gated_mlp") == 1


def lora(mlp: nn.Module) -> None:
    import peft

    config = peft.LoraConfig(target_modules=["up_proj"], r=2)
    peft.inject_adapter_in_model(config, mlp)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "hook on a projection": lambda mlp: mlp.up_proj.register_forward_hook(lambda module, args, out: out * 2),
    "hook on the activation": lambda mlp: mlp.act_fn.register_forward_hook(lambda module, args, out: out * 2),
    "another activation": lambda mlp: setattr(mlp, "act_fn", nn.Tanh()),
    "adapter": lora,
    "bias": lambda mlp: mlp.gate_proj.register_parameter("bias", nn.Parameter(torch.ones(96))),
    "parametrisation": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.up_proj),
}


def compiled_and_run(model: nn.Module, x: Tensor, when: str) -> tuple[Any, Graphs]:
    """The patched model, compiled; unless what comes next is to come `before`, it has run, with the kernel."""
    fusepatch.accelerate()
    graphs = Graphs()
    patched = compiled(model, graphs)
    if when != "before":
        patched(x)
        assert graphs.count("gated_mlp") == 1
    return patched, graphs


@pytest.mark.parametrize(
    ("when", "change"),
    [
        *(("before", change) for change in CHANGES),
        # The compiler does not look at hooks again, in the library's own code neither.
        *(("after the first call", change) for change in CHANGES if "hook" not in change),
    ],
)
def test_what_does_not_fit_gets_the_librarys_code(when: str, change: str) -> None:
    model, x = tiny_llama_mlp(), torch.randn(3, 64)
    patched, graphs = compiled_and_run(model, x, when)
    CHANGES[change](model)
    found = patched(x)
    assert "fusepatch.gated_mlp.default" not in graphs.forward[-1]
    with fusepatch.disabled():
        assert relative_error(found, model(x)) < 1e-6


@pytest.mark.parametrize("when", ["before", "after the first call"])
def test_where_linear_layers_compute_something_else(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    model, x = tiny_llama_mlp(), torch.randn(3, 64)
    patched, graphs = compiled_and_run(model, x, when)
    genuine = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * genuine(self, x))
    found = patched(x)
    assert "fusepatch.gated_mlp.default" not in graphs.forward[-1]
    with fusepatch.disabled():
        assert relative_error(found, model(x)) < 1e-6


def test_hooks_on_all_modules_run() -> None:
    """Those that come after the first call the compiler does not see, in the library's own code neither."""
    model, x = tiny_llama_mlp(), torch.randn(3, 64)
    double = lambda module, _, out: 2 * out if type(module) is nn.Linear else None
    with nn.modules.module.register_module_forward_hook(double):
        expected = model(x)
        fusepatch.accelerate()
        model.compile(backend="eager", fullgraph=True)
        assert relative_error(model(x), expected) < 1e-6


def test_a_subclass_of_tensor_gets_the_librarys_code() -> None:
    class Marked(Tensor):
        pass

    fusepatch.accelerate()
    found = torch.compile(tiny_llama_mlp(), backend="eager")(torch.randn(3, 64).as_subclass(Marked))
    assert type(found) is Marked
    assert traced() == {"compiling": 1}


def test_an_activation_that_the_library_refuses_is_refused() -> None:
    model = tiny_llama_mlp()
    model.act_fn = nn.GELU(approximate="bogus")
    fusepatch.accelerate()
    with pytest.raises(Exception, match="either none or tanh"):
        compiled(model, Graphs())(torch.randn(3, 64))


@pytest.mark.parametrize(
    ("act", "expected"),
    [(nn.SiLU(), 1), (nn.GELU(), 1), (nn.GELU(approximate="tanh"), 1), (torch.nn.functional.silu, 1), (nn.Mish(), 0)],
    ids=["silu", "gelu", "gelu-tanh", "function", "mish"],
)
def test_activations(act: Any, expected: int) -> None:
    model, x = tiny_llama_mlp(), torch.randn(3, 64)
    del model.act_fn
    model.act_fn = act
    stock = model(x)
    fusepatch.accelerate()
    graphs = Graphs()
    assert relative_error(compiled(model, graphs)(x), stock) < 1e-6
    assert graphs.count("gated_mlp") == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """It would cast what the operator reads; where all is in its dtype already, it does not."""
    model, x = tiny_llama_mlp(dtype), torch.randn(3, 64, dtype=dtype)
    fusepatch.accelerate()
    graphs = Graphs()
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(model, graphs)(x)
        with fusepatch.disabled():
            stock = model(x)
    assert found.dtype == stock.dtype == torch.bfloat16
    assert relative_error(found, stock) < 0.02
    assert graphs.count("gated_mlp") == (dtype is torch.bfloat16)


def test_disabled_restored_and_on_again() -> None:
    model, x = tiny_llama_mlp(), torch.randn(3, 64)
    fusepatch.accelerate()
    graphs = Graphs()
    patched = compiled(model, graphs)
    patched(x)
    with fusepatch.disabled():
        patched(x)
    assert [graph.count("fusepatch.gated_mlp.default") for graph in graphs.forward] == [1, 0]
    patched(x)
    fusepatch.restore()
    patched(x)
    assert graphs.forward[-1].count("fusepatch.gated_mlp.default") == 0
    fusepatch.accelerate()
    patched(x)
    assert graphs.forward[-1].count("fusepatch.gated_mlp.default") == 1


def test_of_chosen_models_the_compiler_gets_the_librarys_code() -> None:
    model = tiny_llama()
    fusepatch.accelerate(model=model)
    graphs = Graphs()
    compiled(model, graphs)(IDS)
    assert graphs.count("gated_mlp") == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """A native backend that nobody named, measured to win in compiled code from so many tokens on."""

    def install(fewest: int | None) -> None:
        native = dataclasses.replace(
            choose.REFERENCE, native=True, name="quick", fewest_compiled=lambda problem: fewest
        )
        monkeypatch.setattr(library, "choose", lambda problem, tokens: native)
        monkeypatch.setattr(library, "_named", lambda name: native)
        monkeypatch.delenv("FUSEPATCH_GATED_MLP_BACKEND", raising=False)

    return install


def test_a_native_backend_that_is_not_named_serves_where_it_won(
    quick: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = choose.Problem(choose.Route.FUSED, torch.device("cpu"), torch.float32, 64, 96, "silu", bias=False)
    for fewest, expected in ((None, None), (100, ("quick", 100))):
        quick(fewest)
        settings.install(settings.read())
        assert library.serving(problem) == expected
    quick(None)
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_BACKEND", "triton")
    settings.install(settings.read())
    assert library.serving(problem) == ("quick", 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fewer_tokens_than_it_won_with_get_the_librarys_code(
    dynamic: bool, quick: Callable[[int | None], None]
) -> None:
    model = tiny_llama_mlp()
    quick(16)
    fusepatch.accelerate()
    graphs = Graphs()
    patched = compiled(model, graphs, dynamic=dynamic)
    served = []
    for tokens in (24, 15, 16, 3, 40):
        before = len(graphs.forward)
        x = torch.randn(tokens, 64)
        assert relative_error(patched(x), expected_of(model, x)) < 1e-6
        served += ["fusepatch.gated_mlp.default" in graph for graph in graphs.forward[before:]]
    # With dynamic shapes one graph of each kind serves all.
    assert served == ([True, False] if dynamic else [True, False, True, False, True])


@pytest.mark.parametrize("left_out", [(), ("dx",), ("d_weights", "d_down")], ids=str)
@pytest.mark.parametrize("kind", ["separate", "packed"])
def test_products_of_the_backends_own_are_operators_too(
    monkeypatch: pytest.MonkeyPatch, kind: str, left_out: tuple[str, ...]
) -> None:
    """Of the number of tokens it is known in a graph which serve; where it is a symbol, none does."""
    mlp = tiny_llama_mlp() if kind == "separate" else small("Phi3").model.layers[0].mlp
    x = torch.randn(24, 64)
    expected = step(mlp, x)
    products = PlainProducts(*left_out)
    backend = with_products(monkeypatch, products)
    monkeypatch.setattr(library, "_named", lambda name: backend)
    fusepatch.accelerate()
    for dynamic in (False, True):
        torch._dynamo.reset()
        graphs = Graphs()
        same(step(compiled(mlp, graphs, dynamic=dynamic), x.clone().requires_grad_()), expected)
        for name in ("dx", "d_weights", "d_down"):
            assert graphs.count(f"product_{name}") == (not dynamic and name not in left_out), name
    assert products.sizes == dict.fromkeys(("dx", "d_weights", "d_down"), (24, 64, 96))


def test_an_operator_of_a_product_that_no_longer_serves_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps compiled backward passes on disk, with the operators that served when they were made."""
    backend = with_products(monkeypatch, PlainProducts("dx", "d_weights", "d_down"))
    weights, h, d_gate_up = torch.randn(24, 8), torch.randn(5, 12), torch.randn(5, 24)
    x, dout = torch.randn(5, 10)[:, :8], torch.randn(1, 8).expand(5, 8)
    for each in (backend, choose.REFERENCE):
        monkeypatch.setattr(library, "_named", lambda name, each=each: each)
        ops = torch.ops.fusepatch
        assert relative_error(ops.product_dx(d_gate_up, weights, None, "any"), d_gate_up @ weights) < 1e-6
        halves = ops.product_dx(d_gate_up, weights[:12].clone(), weights[12:].clone(), "any")
        assert relative_error(halves, d_gate_up @ weights) < 1e-6
        both, nothing = ops.product_d_weights(d_gate_up, x, True, "any")
        assert relative_error(both, d_gate_up.t() @ x) < 1e-6
        assert nothing.numel() == 0
        gate, up = ops.product_d_weights(d_gate_up, x, False, "any")
        assert relative_error(torch.cat([gate, up]), d_gate_up.t() @ x) < 1e-6
        assert relative_error(ops.product_d_down(dout, h, "any"), dout.t() @ h) < 1e-6


def expected_of(model: nn.Module, x: Tensor) -> Tensor:
    with fusepatch.disabled():
        found: Tensor = model(x)
    return found


def test_an_operator_given_what_its_kernel_can_not_read_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = dataclasses.replace(choose.REFERENCE, name="picky", module="no.such.module", byte_alignment=64)
    monkeypatch.setattr(library, "_named", lambda name: picky)
    storage = torch.randn(4 * 64 + 1)
    x = storage[1:].view(4, 64)
    assert x.data_ptr() % 64
    mlp = tiny_llama_mlp()
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    out, _ = torch.ops.fusepatch.gated_mlp(x, *weights, None, "silu", True, "picky")
    assert relative_error(out, mlp(x)) < 1e-6


TRANSFORMS: dict[str, Callable[[nn.Module], Callable[[Tensor], Any]]] = {
    "grad": lambda mlp: grad(lambda x: mlp(x).sum()),
    "vmap": lambda mlp: vmap(mlp),
    "jvp": lambda mlp: lambda x: jvp(mlp, (x,), (torch.ones_like(x),)),
    "vmap of grad": lambda mlp: vmap(grad(lambda x: mlp(x).sum())),
    "weights given": lambda mlp: lambda x: functional_call(mlp, {"up_proj.weight": torch.ones(96, 64)}, (x,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_compiled_code_get_the_librarys(name: str) -> None:
    model, x = tiny_llama_mlp(), torch.randn(4, 3, 64)
    run = TRANSFORMS[name](model)
    stock = tree_leaves(run(x))
    fusepatch.accelerate()
    graphs = Graphs()
    found = tree_leaves(torch.compile(run, backend=graphs.backend, fullgraph=True)(x))
    assert all(relative_error(one, other) < 1e-6 for one, other in zip(found, stock, strict=True))
    assert graphs.count("gated_mlp") == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_models(use_reentrant: bool) -> None:
    model: Any = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    stock = step(model, IDS)
    fusepatch.accelerate()
    graphs = Graphs()
    same(step(torch.compile(model, backend=graphs.backend), IDS), stock)
    assert graphs.count("gated_mlp") >= 2


def test_requires_grad_may_change_and_the_output_be_written_to() -> None:
    model = tiny_llama_mlp()

    def run(module: Any) -> list[Tensor]:
        found = []
        for trained in (False, True):
            model.requires_grad_(trained)
            x = torch.ones(3, 64, requires_grad=True)
            out = module(x)
            out += 1
            out[..., 0] *= 2
            found += [out.detach(), *torch.autograd.grad(out.sum(), [x])]
        return found

    plain = Graphs()
    stock = run(compiled(model, plain))
    torch._dynamo.reset()
    fusepatch.accelerate()
    graphs = Graphs()
    same(run(compiled(model, graphs)), stock)
    # Torch 2.11 does not trace anew, whoever's code it is.
    assert graphs.count("gated_mlp") == len(plain.forward) == len(graphs.forward)


def test_flas_mlp_keeps_the_kernel() -> None:
    mlp = pytest.importorskip("fla.modules.mlp")
    torch.manual_seed(0)
    model = mlp.GatedMLP(hidden_size=64, intermediate_size=96)
    fusepatch.accelerate()
    graphs = Graphs()
    patched = compiled(model, graphs)
    x = torch.randn(2, 5, 64)
    expected = torch.nn.functional.silu(model.gate_proj(x)) * model.up_proj(x)
    assert relative_error(patched(x), model.down_proj(expected)) < 1e-5
    assert graphs.count("gated_mlp") == 1


class _Broken(nn.Module):
    """A layer that breaks the graph before its MLP, as FLA's do."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.mlp(x)


def test_layers_that_break_the_graph_share_one_with_the_kernel() -> None:
    """What the compiler traced of the first serves the second, patched or not: one trace for two layers."""
    mlp = pytest.importorskip("fla.modules.mlp")
    torch.manual_seed(0)
    model = nn.Sequential(*(_Broken(mlp.GatedMLP(hidden_size=64, intermediate_size=96)) for _ in range(2)))
    fusepatch.accelerate("gated_mlp")
    graphs = Graphs()
    x = torch.randn(2, 5, 64, requires_grad=True)  # as what the second layer gets
    torch.compile(model, backend=graphs.backend)(x)
    (target,) = [each for each in fusepatch.status().targets if each.name == "gated_mlp/fla"]
    assert target.total("traces") == {"fused": 1}
    assert graphs.count("gated_mlp") == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_inductor(mode: str) -> None:
    model = tiny_llama()
    stock = step(model, IDS)
    fusepatch.accelerate()
    same(step(torch.compile(model, fullgraph=True, mode=mode), IDS), stock, tolerance=1e-5)
    assert traced()["fused"] > 0
