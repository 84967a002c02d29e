"""What of the framework only a GPU shows: devices, autograd's own threads, CUDA graphs, no early initialisation."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusepatch
from fusepatch.decline import Reason, Route
from fusepatch.kernels.gated_mlp import choose
from fusepatch.parity_check import models
from support import is_within_parity, relative_error, tiny_llama, tiny_llama_mlp

pytestmark = pytest.mark.gpu


def _calls() -> dict[str, int]:
    return fusepatch.status().targets[0].total("calls")


def _declines() -> dict[str, int]:
    return fusepatch.status().targets[0].total("declines")


def test_accelerate_does_not_initialise_cuda() -> None:
    code = (
        "import torch, fusepatch\n"
        "from transformers import LlamaForCausalLM\n"
        "fusepatch.accelerate(); fusepatch.status(); fusepatch.restore()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_x_on_another_device_declines_and_raises_as_stock_does() -> None:
    mlp = tiny_llama_mlp()
    x = torch.randn(4, 64, device="cuda")
    with pytest.raises(RuntimeError) as stock:
        mlp(x)
    fusepatch.accelerate()
    with pytest.raises(RuntimeError) as patched:
        mlp(x)
    assert str(patched.value) == str(stock.value)


def _step(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return {"logits": out.logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("config", ["fla-transformer", "fla-gdn"])
def test_models_of_fla_break_no_more_graphs_than_unpatched(reference_backend: None, config: str) -> None:
    """FLA's own wrappers break graphs. The kernels stay in those that hold its MLPs.

    One graph may serve several layers: where FLA breaks graphs in every layer, the compiler traces a layer's code once.
    """
    pytest.importorskip("fla")
    with models.surroundings(config):
        model = models.built_in(config, 2, torch.bfloat16, torch.device("cuda")).build()
        ids = torch.randint(0, 128, (1, 64), device="cuda")

        graphs: list[torch.fx.GraphModule] = []

        def graphs_and_breaks() -> tuple[int, int]:
            graphs.clear()

            def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
                graphs.append(graph)
                return graph.forward

            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            torch.compile(model, backend=backend)(ids, use_cache=False)
            return len(graphs), sum(torch._dynamo.utils.counters["graph_break"].values())

        stock = graphs_and_breaks()
        fusepatch.accelerate("gated_mlp")
        patched = graphs_and_breaks()
    assert patched[0] <= stock[0] and patched[1] <= stock[1], (stock, patched)
    (target,) = [each for each in fusepatch.status().targets if each.name == "gated_mlp/fla"]
    traces = target.total("traces")
    assert traces.keys() == {"fused"}, "an MLP was traced as the library has it"
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    operators = sum(target.startswith("fusepatch.gated_mlp") for target in targets)
    assert 1 <= operators <= traces["fused"] <= 2, (traces, targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_backend_is_within_parity(reference_backend: None, dtype: torch.dtype) -> None:
    ids = torch.randint(0, 128, (2, 48), device="cuda")
    model = tiny_llama(dtype).cuda()
    stock = _step(model, ids)
    expected = _step(tiny_llama(dtype).float().cuda(), ids)
    with fusepatch.accelerated("gated_mlp"):
        patched = _step(model, ids)
        assert _calls() == {"fused": 2}
    for name in expected:
        ratio = relative_error(patched[name], expected[name]), relative_error(stock[name], expected[name])
        assert is_within_parity(*ratio), (name, ratio)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("off", [False, True])
def test_recomputation_in_an_autograd_thread_takes_the_same_route(
    reference_backend: None, use_reentrant: bool, off: bool
) -> None:
    mlp = tiny_llama_mlp(torch.bfloat16).cuda()
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fusepatch.accelerate()
    with fusepatch.disabled() if off else torch.enable_grad():
        checkpoint(mlp, x, use_reentrant=use_reentrant).sum().backward()
    assert _calls() == {("original" if off else "fused"): 2}


def test_few_tokens_decline_before_anything_is_looked_at() -> None:
    """Whatever else there is to say of the module; and `explain()` says the same."""
    mlp = tiny_llama_mlp(torch.bfloat16).cuda()
    mlp.gate_proj.register_forward_hook(lambda *_: None)
    fusepatch.accelerate()
    mlp(torch.randn(8, 64, device="cuda", dtype=torch.bfloat16))
    assert _declines() == {Reason.SIZE_NOT_ADMITTED.value: 1}
    (found,) = fusepatch.explain(mlp, tokens=8).modules
    assert found.reason == Reason.SIZE_NOT_ADMITTED.value


def test_capture_and_replay_with_changed_inputs(reference_backend: None) -> None:
    mlp = tiny_llama_mlp(torch.bfloat16).cuda()
    fusepatch.accelerate()
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        mlp(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mlp(x)
        assert fusepatch.status().targets[0].total("captured") == {"fused": 1}
        assert "captured, 1 site" in fusepatch.status().summary()
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, mlp(x))


def test_cold_kernel_declines_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = dataclasses.replace(choose.REFERENCE, name="cold", native=True, compiled=lambda problem, tokens: False)
    monkeypatch.setattr(choose, "BACKENDS", (cold,))
    choose.TABLE.forget()
    mlp = tiny_llama_mlp(torch.bfloat16).cuda()
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    fusepatch.accelerate()
    with torch.no_grad():
        mlp(x)
        assert _calls() == {"fused": 1}
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mlp(x)
    assert _declines() == {Reason.CAPTURE_COLD.value: 1}
    assert _calls() == {"fused": 1}
    assert fusepatch.status().targets[0].total("captured") == {Route.ORIGINAL.value: 1}
    choose.TABLE.forget()


def test_a_device_that_is_not_the_current_one(reference_backend: None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    mlp = tiny_llama_mlp(torch.bfloat16).to("cuda:1")
    x = torch.randn(8, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    fusepatch.accelerate()
    mlp(x).sum().backward()
    assert x.grad is not None
    assert x.grad.device == x.device
    assert torch.cuda.current_device() == 0
