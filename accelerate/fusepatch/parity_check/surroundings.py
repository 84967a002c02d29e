"""What an arm runs in: the same random numbers, poisoned memory, and for the reference exact arithmetic."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextlib.contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Every generator (torch's, Python's, numpy's) starts from `seed`, and is put back afterwards."""
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its like give NaN.

    Without it a kernel that leaves a part of its output unwritten would pass: the memory that it is given still holds
    the very values that the unpatched arm computed.
    """
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*deterministic")
        if not was_on:  # torch fills memory in this mode only
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(was_on, warn_only=only_warned)


# ------------------------------------------------------------------------------------------------- the reference arm


@contextlib.contextmanager
def exact_arithmetic(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """fp32 is fp32 in here; yields notes on what was replaced to that end, and on what could not be.

    TF32 (and bf16 on CPUs) is off in every backend of torch, and autocast too. Attention kernels that take no fp32
    give way to PyTorch's. On a GPU, the Triton kernels of FLA are compiled anew with IEEE dots, and dropped again.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_tf32())
        stack.enter_context(_no_autocast())
        notes += stack.enter_context(_attention_that_takes_fp32(model))
        if _on_gpu(model) and "fla" in sys.modules:
            notes += stack.enter_context(ieee_dots_in_fla())
            notes += stack.enter_context(attention_in_fla(only_replace=True))
        yield tuple(notes)


def _on_gpu(model: nn.Module) -> bool:
    return any(parameter.device.type == "cuda" for parameter in model.parameters())


_PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_LEAVES = tuple((backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn"))

# What torch.backends.*.fp32_precision calls; in 2.13, torch.backends.mkldnn.fp32_precision sets that of all backends.
_get_precision = torch._C._get_fp32_precision_getter
_set_precision = torch._C._set_fp32_precision_setter


@contextlib.contextmanager
def _no_tf32() -> Iterator[None]:
    try:
        matmul: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through both of torch's interfaces; it can't be read, so it is left alone
        matmul = None
    # A leaf that is not set reads as its parent; without parents, it reads as what it was given itself.
    before = {}
    for key in (*_PARENTS, *_LEAVES):
        before[key] = _get_precision(*key)
        if key in _PARENTS:
            _set_precision(*key, "none")
    try:
        if matmul is not None:
            torch.set_float32_matmul_precision("highest")
        for key in _LEAVES:
            _set_precision(*key, "ieee")
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        for key, precision in before.items():
            _set_precision(*key, precision)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Nor where the model enters it in its own forward, as one does that accelerate has prepared."""
    enter: Any = torch.autocast.__enter__

    def enter_disabled(self: Any) -> Any:
        enabled, self._enabled = self._enabled, False
        try:
            return enter(self)
        finally:
            self._enabled = enabled

    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def _attention_that_takes_fp32(model: Any) -> Iterator[list[str]]:
    """A transformers model that is set to flash attention is set to `sdpa` instead: the former has no fp32."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(before, str) or "flash" not in before or not hasattr(model, "set_attn_implementation"):
        yield []
        return
    model.set_attn_implementation("sdpa")
    try:
        yield [f"the fp32 reference runs attention through sdpa, since {before} takes no fp32"]
    finally:
        model.set_attn_implementation(before)  # the configuration may be shared with the arms to come


# --------------------------------------------------------------------------------------------------------------- FLA


@contextlib.contextmanager
def ieee_dots_in_fla() -> Iterator[list[str]]:
    """Triton multiplies fp32 in TF32 unless told otherwise. In here it is told, and nothing compiled before is used.

    The kernels of FLA get empty caches for the while, and their own back afterwards: none of the user's compiled
    kernels is dropped (a CUDA graph may hold it), and none of ours is left.
    """
    triton: Any = sys.modules.get("triton")
    kernels = [] if triton is None else _fla_kernels()
    caches = [(kernel, name) for kernel in kernels for name in ("device_caches", "cache") if name in vars(kernel)]
    language = getattr(getattr(triton, "knobs", None), "language", None)
    if language is None or any(name == "device_caches" and not hasattr(k, "create_binder") for k, name in caches):
        yield ["FLA's kernels run fp32 dots in TF32 in the reference too: this version of Triton can't be told"]
        return
    before = [getattr(kernel, name) for kernel, name in caches]
    with language.scope():
        language.fp32_default = "ieee"
        for kernel, name in caches:
            empty: Any = {} if name == "cache" else type(getattr(kernel, name))(kernel.create_binder)
            setattr(kernel, name, empty)
        try:
            yield ["FLA's kernels were compiled with IEEE fp32 dots for the reference", *_still_in_tf32()]
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # before kernels that may still run are dropped
            for (kernel, name), cache in zip(caches, before, strict=True):
                setattr(kernel, name, cache)


@contextlib.contextmanager
def untuned_fla() -> Iterator[None]:
    """FLA's kernels run in one of the configurations that they would choose from by timing them all.

    That takes minutes for a small model, twice where they are compiled anew for the reference, and no figure here is
    one of speed. For kernels of the modules that are imported by then. FLA's own switch, FLA_CACHE_MODE, spares the
    timing only of kernels for which FLA_CONFIG_DIR has a file, and FLA brings none.
    """
    tuned = [kernel for kernel in _fla_kernels() if len(vars(kernel).get("configs", ())) > 1]
    before = [kernel.configs for kernel in tuned]
    for kernel in tuned:
        kernel.configs = [min(kernel.configs, key=_length_of_code)]
    try:
        yield
    finally:
        for kernel, configs in zip(tuned, before, strict=True):
            kernel.configs = configs


def _length_of_code(config: Any) -> tuple[float, int]:
    """Small blocks, many warps, few stages first.

    Without tensor cores, as the reference multiplies, a thread's part of a product is unrolled: with two warps, one
    kernel of Gated DeltaNet's backward pass takes minutes to compile.
    """
    blocks = math.prod(size for size in config.kwargs.values() if type(size) is int and size > 0)
    return blocks / config.num_warps, config.num_stages


def _fla_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("fla.") and module is not None]


def _fla_kernels() -> list[Any]:
    """Triton's objects for every kernel in the modules of FLA that are imported: the function, and its autotuner."""
    jit: Any = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return []
    found: dict[int, Any] = {}
    for module in _fla_modules():
        for value in list(vars(module).values()):
            layers = []
            while isinstance(value, jit.KernelInterface) and hasattr(value, "fn"):
                layers.append(value)
                if isinstance(value, jit.JITFunction):
                    found.update((id(layer), layer) for layer in layers)
                    break
                value = value.fn
    return list(found.values())


def _still_in_tf32() -> list[str]:
    """FLA asks for TF32 by name in its triangular solves, by a constant that a compiled kernel must not see change."""
    names = sorted(
        module.__name__
        for module in _fla_modules()
        for constant in ("SOLVE_TRIL_DOT_PRECISION", "FLA_TRIL_PRECISION")
        if "tf32" in str(getattr(vars(module).get(constant), "value", vars(module).get(constant)))
    )
    return [f"in TF32 in every arm, the reference too: the triangular solve of {', '.join(names)}"] if names else []


@contextlib.contextmanager
def attention_in_fla(*, only_replace: bool) -> Iterator[list[str]]:
    """FLA's layers call PyTorch's attention where they would call flash-attn, which has no fp32.

    With `only_replace`, where flash-attn is there; else also where it is not installed.
    """
    modules = [module for module in _fla_modules() if "flash_attn_func" in vars(module)]
    if only_replace:
        modules = [module for module in modules if module.flash_attn_func is not None]
    before = [module.flash_attn_func for module in modules]
    for module in modules:
        module.flash_attn_func = attention_like_flash
    try:
        yield ["the fp32 reference runs FLA's attention through PyTorch, since flash-attn takes no fp32"] * bool(
            modules
        )
    finally:
        for module, function in zip(modules, before, strict=True):
            module.flash_attn_func = function


def attention_like_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
) -> Tensor:
    """`flash_attn.flash_attn_func` by PyTorch: q [B, Tq, H, D], k and v [B, Tk, Hkv, D]; returns [B, Tq, H, D]."""
    queries, keys = q.shape[1], k.shape[1]
    distance = torch.arange(queries, device=q.device)[:, None] + keys - queries - torch.arange(keys, device=q.device)
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)
