"""The Hopper kernels on the GPU: what must hold of every fused backend, what is their own, and through a real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusepatch
from fusepatch import ops
from fusepatch.kernels.gated_mlp import check, choose, hopper, hopper_configuration, hopper_products, launching
from fusepatch.parity_check.bound import STRAY, kind_of
from gpu.fused_cases import DEVICE, NAMES, FusedCases, Steps, assert_nothing_outside, data, run, why_not
from gpu.graphs import assert_a_step_is_captured_and_replayed_after_warmup
from support import is_within_parity, relative_error, tiny_llama, tiny_llama_mlp

HOPPER = next((backend for backend in choose.BACKENDS if backend.name == "hopper"), None)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not("hopper")), reason=why_not("hopper"))]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """One memory of self-checks for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusepatch.settings._default_cache_dir", lambda: tmp_path_factory.getbasetemp() / "cache")
        yield


def _calls() -> dict[str, int]:
    return fusepatch.status().targets[0].total("calls")


class TestHopper(FusedCases):
    BACKEND = HOPPER
    KERNELS = hopper


# ------------------------------------------------------------------------------------------------- launched directly


def test_the_shared_cases_have_one_for_each_way_of_cutting_the_work_up() -> None:
    """And among the small tiles an odd number of stores for each: buffers must alternate from tile to tile too."""
    assert hopper.size_of(72, 136, 20488) is hopper.Size.SMALL
    assert hopper.size_of(4099, 136, 1352) is hopper.Size.SHALLOW
    assert hopper.size_of(2055, 2056, 3080) is hopper.Size.DEEP


@pytest.mark.parametrize("tokens", [1, 257, 4099])
def test_nothing_is_written_outside_of_the_results(tokens: int) -> None:
    size = hopper.size_of(tokens, 72, 1352)
    clusters = hopper._clusters(DEVICE, size)

    def forward(given: dict[str, Tensor], h: Tensor, gate_up: Tensor) -> None:
        launch = launching.forward(hopper._family(""), hopper.ARCH, torch.bfloat16, "silu", True, size)
        launch(given["x"], given["gate_weight"], given["up_weight"], None, None, h, gate_up, clusters)

    def backward(given: dict[str, Tensor], gate_up: Tensor, d_gate_up: Tensor, h: Tensor) -> None:
        launch = launching.backward(hopper._family(""), hopper.ARCH, torch.bfloat16, "silu", True, size)
        launch(given["dout"], given["down_weight"], gate_up, d_gate_up, h, clusters)

    assert_nothing_outside(forward, backward, tokens)


PRODUCTS = [(name, columns) for name, variants in hopper_products.VARIANTS.items() for columns in variants]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "columns"), PRODUCTS)
@pytest.mark.parametrize(
    "shape", [(1, 264, 520), (7, 64, 96), (257, 1032, 2056), (4099, 520, 1352), (4300, 2056, 4360)]
)
def test_products_against_fp64(
    monkeypatch: pytest.MonkeyPatch, name: str, columns: int, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """As close as cuBLAS's, of separate weights and of packed ones, a tile being one of many or a part of one."""
    monkeypatch.setattr(check, "_PRODUCT_SHAPE", shape)
    monkeypatch.setattr(hopper_products, "VARIANTS", {name: (columns,)})
    assert check._products(HOPPER, DEVICE, dtype, Steps()) == []


@pytest.mark.parametrize(("name", "columns"), PRODUCTS)
def test_products_write_nothing_outside(name: str, columns: int) -> None:
    tokens, hidden, inner = 257, 264, 1352
    (kind,) = (kind for kind in hopper_configuration.Kind if kind.value == name)
    launch = hopper_products._kernel(kind, torch.bfloat16, DEVICE, tokens, hidden, inner, columns)
    rows, width = {"dx": (tokens, hidden), "d_weights": (inner, hidden), "d_down": (hidden, inner)}[name]
    buffers = [torch.full((rows + 2, width + 16), 7.0, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    results = [buffer[1:-1, 8:-8].fill_(float("nan")) for buffer in buffers]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)

    d_gate, d_up = normal(tokens, 2 * inner).chunk(2, dim=1)
    clusters = hopper_configuration.clusters_of(DEVICE)
    if name == "dx":
        launch(normal(inner, hidden), normal(inner, hidden), d_gate, d_up, results[0], None, clusters)
    elif name == "d_weights":
        launch(normal(tokens, hidden), None, d_gate, d_up, *results, clusters)
    else:
        launch(normal(tokens, hidden), None, normal(tokens, inner), None, results[0], None, clusters)
    for buffer in buffers if name == "d_weights" else buffers[:1]:
        assert torch.isfinite(buffer).all()
        buffer[1:-1, 8:-8] = 7.0
        assert (buffer == 7).all()


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("shape", [(16384, 1024, 3072), (8192, 5120, 17408)])
def test_where_products_serve(shape: tuple[int, int, int], packed: bool) -> None:
    """The whole op, with some of its products ours, against fp32."""
    tokens, hidden, inner = shape
    served = hopper_configuration.products_for(
        torch.bfloat16, tokens, hidden, inner, hopper_configuration.clusters_of(DEVICE)
    )
    assert served, "nothing would be tested"
    given = data(tokens, hidden, inner, apart=0)
    exact = run(choose.REFERENCE, given, dtype=torch.float32, packed=packed)
    plain, ours = (run(each, given, packed=packed) for each in (choose.REFERENCE, HOPPER))
    for name, expected in exact.items():
        errors = relative_error(ours[name], expected), relative_error(plain[name], expected)
        assert is_within_parity(*errors), (name, errors)


@pytest.mark.parametrize("choice", choose.CHOICES, ids=lambda choice: choice.choice)
@pytest.mark.parametrize("shape", [(16384, 1024, 3072), (2055, 2056, 3080)])
def test_every_choice_is_right(choice: choose.Backend, shape: tuple[int, int, int]) -> None:
    """The whole op against fp32, with a short sum and a long one, wherever the choice launches anything else."""
    tokens, hidden, inner = shape
    problem = choose.Problem(choose.Route.FUSED, DEVICE, torch.bfloat16, hidden, inner, "silu", bias=False)
    if not choice.admits(problem, tokens):
        assert (choice.choice, tokens) == ("cublas-products", 2055)
        return
    given = data(tokens, hidden, inner, apart=0)
    exact = run(choose.REFERENCE, given, dtype=torch.float32)
    plain, ours = (run(each, given) for each in (choose.REFERENCE, choice))
    for name, expected in exact.items():
        errors = relative_error(ours[name], expected), relative_error(plain[name], expected)
        assert is_within_parity(*errors), (name, errors)
    assert choice.compiled(problem, tokens)


@pytest.mark.parametrize("choice", [each for each in choose.CHOICES if each.check], ids=lambda choice: choice.choice)
def test_the_self_check_of_every_choice_passes(choice: choose.Backend) -> None:
    assert check.run(f"{choice.label} fused bfloat16 silu", DEVICE, Steps()) == []


# ------------------------------------------------------------------------------------------------- through the library


def _admitted_mlp() -> torch.nn.Module:
    return tiny_llama_mlp(torch.bfloat16, hidden_size=1024, intermediate_size=3072).cuda()


def test_an_admitted_size_runs_fused_and_within_parity() -> None:
    mlp = _admitted_mlp()
    x = torch.randn(4, 4096, 1024, device="cuda", dtype=torch.bfloat16)

    def step(module: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
        module.zero_grad()
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        out.backward(x.flip(0))
        return {"out": out.detach(), "x": leaf.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}

    stock = step(mlp, x)
    with fusepatch.accelerated("gated_mlp", strict=True):
        patched = step(mlp, x)
        assert _calls() == {"fused": 1}
    exact = step(mlp.float(), x.float())
    for name, expected in exact.items():
        errors = relative_error(patched[name], expected), relative_error(stock[name], expected)
        assert is_within_parity(*errors), (name, errors)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compiled_models_keep_the_kernels(mode: str) -> None:
    """A model's training steps at an admitted size, with nothing named; fewer tokens get the library's code."""
    model = tiny_llama(
        torch.bfloat16, hidden_size=1024, intermediate_size=3072, num_attention_heads=8, initializer_range=0.03
    ).cuda()

    def steps(run: Any, model: torch.nn.Module, tokens: int) -> dict[str, Tensor]:
        """The third of three steps on different data: CUDA graphs are recorded in the second, and replayed."""
        for seed in range(3):
            generator = torch.Generator("cuda").manual_seed(seed)
            ids = torch.randint(0, 128, (4, tokens // 4), device="cuda", generator=generator)
            model.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            loss = run(ids, labels=ids).loss
            loss.backward()
        return {"loss": loss.detach().clone(), **{name: p.grad.clone() for name, p in model.named_parameters()}}

    def compiled() -> Any:
        torch.compiler.reset()
        return torch.compile(model, fullgraph=True, mode=mode)

    stock = steps(compiled(), model, 16384)
    with fusepatch.accelerated("gated_mlp"):
        run = compiled()
        patched = steps(run, model, 16384)
        assert fusepatch.status().targets[0].total("traces") == {"fused": 2}
        steps(run, model, 1024)
        assert fusepatch.status().targets[0].total("traces") == {"fused": 2, "compiling": 2}
    exact = steps(model.float(), model, 16384)
    worst: dict[str, float] = {}
    for name, expected in exact.items():
        worst[kind_of(name)] = max(worst.get(kind_of(name), 0.0), relative_error(stock[name], expected))
    for name, expected in exact.items():
        error = relative_error(patched[name], expected)
        assert error <= STRAY.allows(worst[kind_of(name)]), (name, error, worst[kind_of(name)])


def test_training_step_is_captured_and_replayed_after_warmup() -> None:
    fusepatch.accelerate()
    assert_a_step_is_captured_and_replayed_after_warmup(_admitted_mlp(), 16384, "fused")


def test_a_whole_training_step_in_a_graph() -> None:
    """Model, loss, backward pass and optimiser, replayed on other tokens: bit for bit what eager steps give."""
    made = tiny_llama(
        torch.bfloat16,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=8,
        initializer_range=0.03,
        attn_implementation="eager",
    ).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randint(0, 128, (32, 512), device="cuda", generator=generator) for _ in range(4)]
    # One ready-made: transformers makes it from a number on the host, which a capture refuses.
    mask = torch.full((1, 1, 512, 512), torch.finfo(torch.bfloat16).min, device="cuda", dtype=torch.bfloat16).triu(1)
    start = {name: tensor.clone() for name, tensor in made.state_dict().items()}

    def step(model: torch.nn.Module, optimiser: torch.optim.Optimizer, ids: Tensor) -> Tensor:
        optimiser.zero_grad(set_to_none=False)
        loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        return loss.detach()

    def trained(in_a_graph: bool) -> list[Tensor]:
        made.load_state_dict(start)
        made.zero_grad(set_to_none=True)
        optimiser = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
        ids = batches[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = [step(made, optimiser, ids)]  # makes the gradients and the state of the optimiser
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if in_a_graph:
            with torch.cuda.graph(graph):
                loss = step(made, optimiser, ids)
        for batch in batches[1:]:
            ids.copy_(batch)
            if in_a_graph:
                graph.replay()
                losses.append(loss.clone())
            else:
                losses.append(step(made, optimiser, ids))
        return [*losses, *(parameter.detach().clone() for parameter in made.parameters())]

    with fusepatch.accelerated("gated_mlp", strict=True):
        assert fusepatch.warmup(made, 16384).native == 1  # both layers are of one kind
        eager = trained(in_a_graph=False)
        replayed = trained(in_a_graph=True)
        (target,) = (each for each in fusepatch.status().targets if each.total("captured"))
        assert target.total("captured") == {"fused": 2}
    assert all(torch.equal(one, other) for one, other in zip(eager, replayed, strict=True))


def test_a_direct_call_of_the_op_gets_it_at_any_size() -> None:
    given = data(8, 72, 136)
    plain = run(HOPPER, given)["out"]
    assert torch.equal(ops.gated_mlp(*(given[name] for name in NAMES)), plain)
