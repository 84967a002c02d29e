"""KDA: FLA's own kernels and fusepatch's, through the op as FLA's layer calls it, through that layer, and in a model.

Checked on the first 256 tokens of the same data against the definition in fp64, which at the full length would keep a
state for every token; at the full length the arms are held to each other. FLA's autotuner measures its candidates in
this process, before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusepatch
from fusepatch import table
from fusepatch.kernels.linear_attention import arguments, reference

from . import results, timing, tuning
from .check import first_line
from .results import Figure

BENCHMARK = "linear_attention"
WIDTH = 128
MODES = ("train", "train_graph", "forward", "host", "memory")
"""Forward and backward with all gradients; the same replayed as a CUDA graph; forward alone, where nothing requires a
gradient; the host's time for both passes; and what one call keeps and needs."""
SCOPES = ("op", "layer")
OPTIONS: Mapping[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
    "state_v_first": True,
}
"""As FLA's layer calls the op, with a gate that the kernels can be right for."""
_CHECKED_TOKENS = 256
_FACTOR, _FLOOR = 1.25, 1e-3
_GATE_FACTOR = 2.0
_GATE = ("g", "A_log", "dt_bias")


@dataclass(frozen=True)
class Shape:
    """Batch, tokens, heads of 128."""

    batch: int
    tokens: int
    heads: int

    def __str__(self) -> str:
        return f"B{self.batch}_T{self.tokens}_H{self.heads}_D{WIDTH}"


def parse_shape(word: str) -> Shape:
    """`B,T,H`. Raises ValueError for anything else."""
    try:
        batch, tokens, heads = (int(part) for part in word.split(","))
    except ValueError:
        raise ValueError(f"{word!r} is not B,T,H such as 4,2048,16") from None
    if min(batch, tokens, heads) < 1:
        raise ValueError(f"{word!r} has a size below 1")
    return Shape(batch, tokens, heads)


SHAPES = (Shape(1, 8192, 32), Shape(4, 2048, 16))
TINY = (Shape(1, 5, 1),)


@dataclass(frozen=True)
class Case:
    """One shape, in one surrounding."""

    shape: Shape
    scope: str
    device: str = "cuda"

    def __str__(self) -> str:
        return str(self.shape) if self.scope == "op" else f"{self.shape}_{self.scope}"


@dataclass(frozen=True)
class Arm:
    """Who computes."""

    name: str
    what: str
    context: Callable[[str], AbstractContextManager[Any]]
    packages: tuple[str, ...]
    devices: tuple[str, ...]


@contextlib.contextmanager
def _accelerated(device: str) -> Iterator[None]:
    """`accelerated("kda")` with the backend by name, as long as it serves only where it is named."""
    before = dict(os.environ)
    os.environ.update(
        {
            "FUSEPATCH_LOG": "warning",
            "FUSEPATCH_KDA_BACKEND": "reference" if device == "cpu" else "cudnn_hopper",
            **before,
        }
    )
    try:
        with fusepatch.accelerated("kda"):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


ARMS = (
    Arm("fla", "FLA's own kernels", lambda device: contextlib.nullcontext(), ("fla", "triton"), ("cuda",)),
    Arm("fusepatch", "under fusepatch.accelerate('kda')", _accelerated, ("fla", "triton"), ("cuda", "cpu")),
)


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    shapes: tuple[Shape, ...]
    scopes: tuple[str, ...] = SCOPES
    modes: tuple[str, ...] = MODES
    device: str = "cuda"
    limits: timing.Limits = field(default_factory=lambda: timing.Limits(repeats=50, seconds=4.0))
    save_to: Path | None = None


# ---------------------------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True, eq=False)
class Built:
    """A case made ready: `run()` is a forward pass on the leaves."""

    run: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    dout: Tensor

    def step(self) -> dict[str, Tensor]:
        """Output and every gradient."""
        out = self.run()
        grads = torch.autograd.grad(out, list(self.leaves.values()), self.dout)
        return {"out": out.detach(), **dict(zip(self.leaves, grads, strict=True))}


def _inputs(shape: Shape, device: str, tokens: int | None = None) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    batch, heads = (shape.batch, shape.heads) if tokens is None else (1, shape.heads)
    length = shape.tokens if tokens is None else tokens
    dtype = torch.bfloat16

    def normal(*sizes: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(to)

    return {
        **{name: normal(batch, length, heads, WIDTH) for name in ("q", "k", "v", "g")},
        "beta": normal(batch, length, heads),
        "A_log": 0.3 * normal(heads, to=torch.float32),
        "dt_bias": 0.3 * normal(heads * WIDTH, to=torch.float32),
    }


def _chunk_kda() -> Callable[..., tuple[Tensor, Tensor | None]]:
    found: Callable[..., tuple[Tensor, Tensor | None]] = importlib.import_module("fla.ops.kda").chunk_kda
    return found


def build(case: Case, *, trains: bool = True) -> Built:
    """The case's op or layer with random numbers; without gradients, nothing of it requires one."""
    shape = case.shape
    if case.scope == "op":
        leaves = {name: t.requires_grad_(trains) for name, t in _inputs(shape, case.device).items()}
        function = _chunk_kda()
        return Built(lambda: function(**leaves, **OPTIONS)[0], leaves, torch.randn_like(leaves["v"].detach()))
    layers = importlib.import_module("fla.layers")
    torch.manual_seed(0)
    hidden = shape.heads * WIDTH
    layer: nn.Module = layers.KimiDeltaAttention(
        hidden_size=hidden, head_dim=WIDTH, num_heads=shape.heads, safe_gate=True, lower_bound=-5.0
    )
    layer = layer.to(case.device, torch.bfloat16).requires_grad_(trains)
    x = torch.randn(shape.batch, shape.tokens, hidden, device=case.device, dtype=torch.bfloat16).requires_grad_(trains)
    return Built(lambda: layer(x)[0], {"x": x, **dict(layer.named_parameters())}, torch.randn_like(x.detach()))


def _definition(output_final_state: bool, **given: Any) -> tuple[Tensor, Tensor | None]:
    request = arguments.read(True, **given)
    assert isinstance(request, arguments.Request), request
    return reference.run(request.call, request.inputs, output_final_state)


def errors(shape: Shape, device: str) -> dict[str, float]:
    """Relative L2 of output and gradients against fp64, over the first tokens of one row, by whoever computes now."""
    given = _inputs(shape, device, tokens=min(_CHECKED_TOKENS, shape.tokens))
    dout = torch.randn(given["v"].shape, generator=torch.Generator(device).manual_seed(1), device=device).bfloat16()
    found = []
    for run, dtype in ((_definition, torch.float64), (_chunk_kda(), None)):
        leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in given.items()}
        out, _ = run(**leaves, **OPTIONS, output_final_state=False)
        grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
        found.append({"out": out.detach(), **dict(zip(leaves, grads, strict=True))})
    return {name: _error(found[1][name], expected) for name, expected in found[0].items()}


def _error(actual: Tensor, expected: Tensor) -> float:
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")


# ------------------------------------------------------------------------------------------------------------ one run


@dataclass(eq=False)
class _Entry:
    arm: Arm
    why_not: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    saved: int | None = None
    peak: int | None = None


def run(options: Options) -> list[Figure]:
    """Every arm on every case: checked, timed in turns, and compared at the full length. Saves case by case."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    dry_run = options.device != "cuda"
    origin = results.provenance(dry_run)
    say(f"{origin.gpu}; {origin.versions}; commit {origin.commit}")
    if dry_run:
        say("DRY RUN on a CPU: this shows that the harness works. Its times are not results.")
    else:
        tuning.measure_briefly()
    figures: list[Figure] = []
    for scope in options.scopes:
        for shape in options.shapes:
            case = Case(shape, scope, options.device)
            entries = _run_case(case, options, say)
            of_case = _figures(case, entries)
            figures += of_case
            print(_render(case, entries, of_case), flush=True)
            if options.save_to is not None:
                for path in results.append(of_case, options.save_to, dry_run=dry_run):
                    say(f"appended to {path}")
    say(f"done; run {results.RUN}")
    return figures


def _run_case(case: Case, options: Options, say: Callable[[str], None]) -> list[_Entry]:
    on_gpu = case.device == "cuda"
    entries = [_Entry(arm) for arm in ARMS]
    outputs: dict[str, dict[str, Tensor]] = {}
    built = build(case)
    for entry in entries:
        began = time.monotonic()
        entry.why_not = _why_unavailable(entry.arm, case)
        if entry.why_not is None:
            try:
                with entry.arm.context(case.device):
                    entry.errors = errors(case.shape, case.device)
                    outputs[entry.arm.name] = built.step()
                    if entry.arm.name == "fusepatch" and not fusepatch.status().native_calls():
                        entry.why_not = f"unavailable: {fusepatch.status().summary()}"
            except Exception as error:
                entry.why_not = f"unavailable: {first_line(error)}"
        say(f"{case}, {entry.arm.name}: {entry.why_not or 'ran'} ({time.monotonic() - began:.1f} s)")
    _judge(entries, outputs)
    outputs.clear()
    for mode in (mode for mode in options.modes if mode != "memory"):
        if mode == "train_graph" and not on_gpu:
            continue
        _time(case, mode, entries, built, options, on_gpu, say)
    if "memory" in options.modes and on_gpu:
        for entry in entries:
            if entry.why_not is None:
                _weigh(entry, case, built)
    del built
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return entries


def _why_unavailable(arm: Arm, case: Case) -> str | None:
    if case.device not in arm.devices or (case.device == "cpu" and case.scope == "layer"):
        return f"unavailable: needs a {' or '.join(arm.devices)} device"
    missing = [package for package in arm.packages if importlib.util.find_spec(package) is None]
    return f"unavailable: no package {', '.join(missing)}" if missing else None


def _judge(entries: Sequence[_Entry], outputs: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Holds fusepatch to FLA: its errors over the first tokens, and both results at the full length."""
    stock, ours = entries
    if ours.why_not is not None or stock.why_not is not None:
        return
    for name, error in ours.errors.items():
        allowed = (_GATE_FACTOR if name in _GATE else _FACTOR) * stock.errors[name] + _FLOOR
        if not error <= allowed:
            ours.why_not = f"wrong: {name} has a relative error of {error:.2e} (FLA {stock.errors[name]:.2e})"
            return
    for name, expected in outputs["fla"].items():
        apart = _error(outputs["fusepatch"][name], expected)
        if not apart <= (0.1 if name in _GATE or "f_proj" in name else 0.03):
            ours.why_not = f"wrong: {name} is {apart:.2e} apart from FLA's at the full length"
            return


def _time(
    case: Case, mode: str, entries: Sequence[_Entry], built: Built, options: Options, on_gpu: bool,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    by_name = {entry.arm.name: entry for entry in entries}
    # Forward alone is that of a model that is not trained: where a parameter requires a gradient, the route is that
    # of training.
    frozen = build(case, trains=False) if mode == "forward" else built
    steps = {}
    for entry in entries:
        if entry.why_not is None:
            with contextlib.suppress(Exception):
                steps[entry.arm.name] = _step(entry.arm, case, mode, frozen)
    for entry in entries:
        if entry.why_not is None and entry.arm.name not in steps:
            say(f"  {entry.arm.name}: can't be captured")

    def failed(name: str, what: str) -> None:
        by_name[name].why_not = f"unavailable: in {mode}: {what}"
        say(f"  {name}: {by_name[name].why_not}")

    measure = timing.measure_host if mode == "host" else timing.measure
    began = time.monotonic()
    for name, samples in measure(steps, options.limits, on_gpu, failed).items():
        by_name[name].samples[mode] = samples
    say(f"  {mode} ({time.monotonic() - began:.1f} s)")


def _step(arm: Arm, case: Case, mode: str, built: Built) -> timing.Step:
    def train(state: None) -> None:
        built.run().backward(built.dout)

    def forward(state: None) -> None:
        with torch.no_grad():
            built.run()

    def forget() -> None:
        for leaf in built.leaves.values():
            leaf.grad = None

    def nothing() -> None:
        pass

    if mode == "train_graph":
        with arm.context(case.device):
            graph = _captured(built)
        return timing.Step(lambda number: None, lambda state: graph.replay(), nothing, contextlib.nullcontext)
    timed, after = (forward, nothing) if mode == "forward" else (train, forget)
    return timing.Step(lambda number: None, timed, after, lambda: arm.context(case.device))


def _captured(built: Built) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            built.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.step()
    return graph


def _weigh(entry: _Entry, case: Case, built: Built) -> None:
    """What autograd keeps between the passes, each storage once and without the leaves, and the most allocated."""
    own = {leaf.untyped_storage().data_ptr() for leaf in built.leaves.values()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with entry.arm.context(case.device):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = built.run()
        entry.saved = sum(storage.nbytes() for storage in kept.values())
        del out
        kept.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        built.step()
        torch.cuda.synchronize()
        entry.peak = torch.cuda.max_memory_allocated() - before


# ------------------------------------------------------------------------------------------------- what is made of it


def _figures(case: Case, entries: Sequence[_Entry]) -> list[Figure]:
    found = []
    for entry in entries:
        if entry.why_not is not None:
            continue

        def add(mode: str, metric: str, unit: str, samples: Sequence[float], arm: str = entry.arm.name) -> None:
            rounded = results.summary(samples)
            found.append(Figure(BENCHMARK, str(case), mode, arm, metric, unit, *rounded, len(samples)))

        for mode, samples in entry.samples.items():
            scale, unit = (1e3, "us") if mode == "host" else (1.0, "ms")
            add(mode, "time", unit, [scale * sample for sample in samples])
        for name, error in entry.errors.items():
            add("train", f"error_{name}", "1", [error])
        for metric, number in (("saved", entry.saved), ("peak", entry.peak)):
            if number is not None:
                add("train", metric, "bytes", [float(number)])
    return found


_HEADERS = ("arm", "mode", "metric", "p20", "p50", "p80", "unit", "fla /", "n")


def _render(case: Case, entries: Sequence[_Entry], figures: Sequence[Figure]) -> str:
    stock = {(figure.mode, figure.metric): figure.p50 for figure in figures if figure.arm == ARMS[0].name}
    rows = [
        (
            figure.arm,
            figure.mode,
            figure.metric,
            *(f"{number:.4g}" for number in (figure.p20, figure.p50, figure.p80)),
            figure.unit,
            f"{stock[figure.mode, figure.metric] / figure.p50:.3f}"
            if figure.p50 and (figure.mode, figure.metric) in stock
            else "",
            figure.n,
        )
        for figure in figures
    ]
    out = [f"{entry.arm.name}: {entry.why_not}" for entry in entries if entry.why_not is not None]
    return "\n".join(["", str(case), table.render(_HEADERS, rows), *out])


# ------------------------------------------------------------------------------------------------------------ a model


@dataclass(frozen=True)
class Model:
    """A KDA language model, and one step of it."""

    layers: int = 12
    hidden: int = 2048
    batch: int = 4
    tokens: int = 2048
    vocabulary: int = 32000
    steps: int = 10


def run_model(model: Model, save_to: Path | None, seconds: float = 540.0) -> list[Figure]:
    """A training step of a KDA language model under each arm, in a process of its own: the first step, with all that
    is compiled and tuned in it, and the steps after."""
    found = []
    for arm in ARMS:
        command = [sys.executable, "-m", "benchmarks.linear_attention", arm.name, json.dumps(vars(model))]
        print(f"{arm.name}: a model in a process of its own", flush=True)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, cwd=Path(__file__).parent.parent
            )
        except subprocess.TimeoutExpired:
            print(f"  not done within {seconds:.0f} s", flush=True)
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            print("  failed: " + "\n".join(done.stderr.strip().splitlines()[-5:]), flush=True)
            continue
        told = json.loads(lines[-1])
        print(f"  {told}", flush=True)
        case = f"kda_lm_{model.layers}_layers_H{model.hidden}_B{model.batch}_T{model.tokens}"
        for metric, unit, samples in (("first_step", "s", [told["first_s"]]), ("time", "ms", told["step_ms"])):
            found.append(
                Figure(BENCHMARK, case, "train", arm.name, metric, unit, *results.quantiles(samples), len(samples))
            )
    if save_to is not None and found:
        results.append(found, save_to)
    return found


def _model_child(arm_name: str, model: Model) -> dict[str, Any]:
    (arm,) = (arm for arm in ARMS if arm.name == arm_name)
    kda = importlib.import_module("fla.models.kda")
    torch.manual_seed(0)
    config = kda.KDAConfig(
        hidden_size=model.hidden, num_hidden_layers=model.layers, num_heads=model.hidden // WIDTH, head_dim=WIDTH,
        vocab_size=model.vocabulary, safe_gate=True, lower_bound=-5.0,
    )  # fmt: skip
    net = kda.KDAForCausalLM(config).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, model.vocabulary, (model.batch, model.tokens), device="cuda")
    took, losses = [], []
    with arm.context("cuda"):
        for _ in range(1 + model.steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = net(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
            losses.append(float(loss))
        routes = fusepatch.status().summary()
    step_ms = [1e3 * each for each in took[1:]]
    return {
        "first_s": took[0], "step_ms": step_ms, "median_ms": statistics.median(step_ms), "losses": losses[:3],
        "routes": routes,
    }  # fmt: skip


def main() -> None:
    """One arm's model, in a process of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("arm")
    parser.add_argument("model", type=json.loads)
    given = parser.parse_args()
    print(json.dumps(_model_child(given.arm, Model(**given.model))), flush=True)


if __name__ == "__main__":
    main()
