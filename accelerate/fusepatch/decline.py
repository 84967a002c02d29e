"""The closed lists: which route a call took, and why it did not take a faster one.

A leaf: imports nothing of ours. Every reason a user can ever read is a member of `Reason`, with what it means and
what to do about it; the table in docs/declines.md is made from here, and each member has a test that provokes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Route(Enum):
    """What runs for a call, fastest first. The order of the members is the order of the routes."""

    FUSED = "fused"
    """The whole op on the raw weights."""
    POINTWISE = "pointwise"
    """The module's own sub-modules, and only what lies between them fused."""
    ORIGINAL = "original"
    """The library's function, untouched."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs Python code on every look-up

    @property
    def rank(self) -> int:
        """0 for the fastest route."""
        return tuple(Route).index(self)


class Reason(Enum):
    """Why a target, a module or a call was not served by a faster route. `value` is the stable slug."""

    __hash__ = object.__hash__  # as above

    # The user said so: never an error, not even in strict mode.
    DISABLED = ("disabled", "the call ran inside `fusepatch.disabled()`", "leave the context manager", True)
    ENV_DISABLED = (
        "env-disabled",
        "an environment variable (`FUSEPATCH=0` or `FUSEPATCH_<OP>=0`) turned the op off, or it is off by default",
        "unset the variable, or name the op, and call `accelerate()` again",
        True,
    )
    RESTORED = (
        "restored",
        "somebody kept our forward past `restore()` (a hook or a wrapper that captured it); it now only passes through",
        "remove the hook or wrapper, or call `accelerate()` again",
        True,
    )
    OTHER_MODEL = (
        "other-model",
        "`accelerate(model=...)` chose other models, and this module is in none of them",
        "call `accelerate()` without a model, or with this one",
        True,
    )
    ZERO_TOKENS = ("zero-tokens", "the input has no tokens (an idle expert)", "nothing to do", True)

    # What kind of call it is.
    COMPILING = (
        "compiling",
        "`torch.compile` is tracing; the compiler gets the library's own code",
        "run the module in eager mode",
    )
    EXPORTING = (
        "exporting",
        "`torch.export`, `torch.jit.trace` or `torch.fx` is tracing",
        "nothing to do: exported programs keep the library's own code",
    )
    FUNCTORCH = (
        "functorch",
        "a `torch.func` transform (grad, vmap, jvp) is active",
        "use ordinary autograd: `loss.backward()`",
    )
    FORWARD_AD = ("forward-ad", "forward-mode AD is active", "use reverse-mode autograd")
    DISPATCH_MODE = (
        "dispatch-mode",
        "a mode is active that records a graph, or makes tensors without data",
        "nothing to do: selective checkpointing and most other modes are served",
    )
    AUTOCAST = (
        "autocast",
        "autocast would cast what the fused kernel reads",
        "load the model in the autocast dtype, or leave it: the pointwise route serves autocast",
    )
    GLOBAL_HOOKS = (
        "global-hooks",
        "a module hook is registered for every module (a profiler or a tracker), and would miss calls",
        "remove the global hook when you do not need it",
    )

    UNKNOWN_ARGUMENT = (
        "unknown-argument",
        "the call passes an argument that this version does not know, or not as the library's function takes it",
        "nothing to do: the library's own code knows best what it means",
    )
    OPTION = (
        "option",
        "the call asks for what the kernel does not do (a chunk size, another scale, negative eigenvalues, "
        "intermediate states, padded graphs, context parallelism; a token mask, no residual)",
        "leave the option out where nothing depends on it",
    )
    HEAD_SIZE = (
        "head-size",
        "no kernel for heads of this width",
        "nothing to do: the kernels of linear attention are made for heads of 128",
    )
    UNBOUNDED = (
        "unbounded",
        "the kernel is right only for keys of unit length, write strengths below 1 and log gates between -5 and 0, and "
        "the call does not promise all three",
        "where the model may have them: the L2 norm and the sigmoid of beta in the kernel, and `safe_gate` with a "
        "`lower_bound` of -5 or above",
    )
    NO_GRADIENT = (
        "no-gradient",
        "no input requires a gradient, and what the backend makes faster is the backward pass",
        "nothing to do: the forward pass is the library's own either way",
    )

    # How the module is built or held.
    FORWARD_DIFFERS = (
        "forward-differs",
        "the class looks like a gated MLP but its forward computes something else (a clamp, multiplier, norm, ...)",
        "nothing to do: the library's own code is the right one",
    )
    FOREIGN_FORWARD = (
        "foreign-forward",
        "another library replaced the forward of this class (or of `torch.nn.Linear`)",
        "undo that patch before `accelerate()`, or keep it: the two never stack",
    )
    INSTANCE_FORWARD = (
        "instance-forward",
        "the module, or one inside it, carries a `forward` of its own (Liger on an instance, `use_kernels=True`, "
        "tensor parallelism), which hides the class's",
        "drop that option, or call `del module.forward` where nothing needs it",
    )
    ACTIVATION = (
        "activation",
        "the activation is not SiLU, GELU or tanh-GELU, or its object was changed",
        "nothing to do: there is no kernel for it",
    )
    STRUCTURE = (
        "structure",
        "a sub-module is missing, hidden, or not what the class's forward expects",
        "nothing to do",
    )
    NOT_LINEAR = (
        "not-linear",
        "a projection is not exactly `torch.nn.Linear`",
        "nothing to do: the pointwise route calls it as it is",
    )
    PEFT = (
        "peft",
        "a projection is wrapped by PEFT (LoRA, DoRA, IA3, ...)",
        "merge the adapter (`merge_and_unload()`) for inference; the pointwise route serves training",
    )
    QUANTISED = ("quantised", "a projection holds quantised weights", "nothing to do: the pointwise route calls it")
    DTENSOR = (
        "dtensor",
        "a weight or the input is a DTensor (tensor parallelism)",
        "nothing to do: the pointwise route calls the sharded projections",
    )
    TENSOR_SUBCLASS = (
        "tensor-subclass",
        "the input, or what a projection returned, is a subclass of Tensor",
        "pass a plain tensor",
    )
    FSDP = (
        "fsdp",
        "a projection is itself wrapped by FSDP, or its weight is sharded",
        "wrap whole layers or MLPs, not single projections",
    )
    ZERO3 = (
        "zero3",
        "a weight is partitioned by DeepSpeed ZeRO-3",
        "nothing to do: the pointwise route lets ZeRO gather each projection",
    )
    ACCELERATE_HOOKS = (
        "accelerate-hooks",
        "Hugging Face accelerate hooked the module (offload or device dispatch)",
        "fit the model on one device; an offloaded one is bound by transfers anyway",
    )
    META = ("meta", "a weight or the input is on the meta device", "load the weights first")
    HOOKS = (
        "hooks",
        "a sub-module carries forward or backward hooks, which the fused kernel would not fire",
        "remove the hooks, or leave it: the pointwise route fires those of the projections",
    )
    PARAMETRISED = (
        "parametrised",
        "a projection is parametrised (`torch.nn.utils.parametrize`, weight or spectral norm)",
        "remove the parametrisation for inference",
    )
    WEIGHT_NOT_PARAMETER = (
        "weight-not-parameter",
        "a projection's weight or bias is not a plain `nn.Parameter` (functional_call, a DataParallel replica, a view)",
        "use DistributedDataParallel instead of DataParallel; otherwise nothing to do",
    )
    BIAS = (
        "bias",
        "a projection has a bias, which no admitted fused kernel takes",
        "nothing to do: the pointwise route serves it",
    )

    PACKED_WEIGHT = (
        "packed-weight",
        "gate and up lie in one weight, and the kernel takes two",
        "nothing to do: the pointwise route serves it",
    )

    # How the library's registry of backends is.
    DISPATCH_DISABLED = (
        "dispatch-disabled",
        "`FLA_DISABLE_BACKEND_DISPATCH=1` was set when the library was imported, so that it asks no backend",
        "unset the variable and start again",
    )
    HUB_KERNEL = (
        "hub-kernel",
        "in some model a kernel from the hub (`use_kernels=True`) stands in for the library's function",
        "load that model without `use_kernels`, or keep it: the two never stack",
    )
    LIBRARY_TOO_OLD = (
        "library-too-old",
        "the installed release of the library has no registry of backends for the op",
        "install a newer one: `pip install -U 'flash-linear-attention>=0.5.2'`",
    )

    # What the tensors are.
    DTYPE = ("dtype", "no kernel for this dtype, or the dtypes differ", "use bfloat16 or float16 throughout")
    DEVICE = ("device", "the input and the weights are on different devices", "move them to one device")
    SHAPE = ("shape", "the shapes do not fit the op", "nothing to do: the library raises the proper error")
    STRIDES = (
        "strides",
        "the memory layout is not rows of unit stride (or is sparse, or nested)",
        "pass a contiguous tensor",
    )
    ALIGNMENT = (
        "alignment",
        "an address or a width is not aligned as the kernel needs it",
        "use widths that are multiples of 8 and tensors that start on 16 bytes",
    )
    INDEX_RANGE = (
        "index-range",
        "the tensors have more elements than the kernel can index",
        "use a smaller batch",
    )

    # Which kernels there are.
    CPU = (
        "cpu",
        "the tensors are on a CPU, where the library's own code runs",
        "set `FUSEPATCH_<OP>_BACKEND=reference` to rehearse on a CPU",
    )
    NO_KERNEL = ("no-kernel", "no native kernel of this version serves the route on this device", "nothing to do")
    ARCHITECTURE = (
        "architecture",
        "the kernel is not made for this GPU's compute capability",
        "nothing to do: `fusepatch` never guesses that a kernel runs on hardware it was not made for",
    )
    MISSING_PACKAGE = (
        "missing-package",
        "a package is not installed: the patched library, or what the kernel is written in",
        "install it: the extras are `fusepatch[hf]`, `fusepatch[fla]`, `fusepatch[cuda13]`, `fusepatch[cuda12]`",
    )
    PACKAGE_DIFFERS = (
        "package-differs",
        "an installed package is not what the kernel works with: another version, or its interface changed",
        "`fusepatch doctor` says what differs",
    )
    ROUTE_BOUND = (
        "route-bound",
        "`FUSEPATCH_<OP>_ROUTE` allows no faster route than this",
        "unset the variable and call `accelerate()` again",
    )
    SIZE_NOT_ADMITTED = (
        "size-not-admitted",
        "the kernel is not made for this size, has not been measured to win at it, or was not warmed up for it",
        "nothing to do: the route that ran is the faster one as far as is known; the backend `cudnn` wants "
        "`warmup(model, token_counts)`",
    )
    CAPTURE_COLD = (
        "capture-cold",
        "a CUDA graph is being captured and the kernel is not compiled yet",
        "run the same sizes once before capturing",
    )
    SELFCHECK_FAILED = (
        "selfcheck-failed",
        "the kernel gave wrong results on this kind of GPU and is off",
        "please report it; the library's own code runs instead",
    )
    SELFCHECK_INCONCLUSIVE = (
        "selfcheck-inconclusive",
        "the kernel could not be checked on this GPU (out of memory, a busy or exclusive GPU)",
        "start again when the GPU is free; `warmup()` before loading other models leaves room",
    )

    meaning: str
    fix: str
    chosen: bool
    """The user asked for it, or there is nothing to run: strict mode does not raise for it."""

    def __new__(cls, slug: str, meaning: str, fix: str, chosen: bool = False) -> Reason:  # noqa: D102
        member = object.__new__(cls)
        member._value_ = slug
        member.meaning, member.fix, member.chosen = meaning, fix, chosen
        return member

    @property
    def in_words(self) -> str:
        """The reason, what it means, and what to do about it."""
        return f"{self.value}: {self.meaning}. Fix: {self.fix}."


@dataclass(frozen=True, eq=False)
class Decision:
    """What `decide` returned for one call: the route, and why no faster one. Interned: compare with `is`."""

    route: Route
    reason: Reason | None
    note: str = ""
    """What else `explain()` says of the kernels that would serve; empty for calls."""


_INTERNED: dict[tuple[Route, Reason | None, str], Decision] = {}


def decision(route: Route, reason: Reason | None = None, note: str = "") -> Decision:
    """The one `Decision` of this route, reason and note."""
    key = (route, reason, note)
    return _INTERNED.get(key) or _INTERNED.setdefault(key, Decision(*key))


FUSED = decision(Route.FUSED)


def original(reason: Reason) -> Decision:
    """The library's own function, because of `reason`."""
    return decision(Route.ORIGINAL, reason)


def native_of(counts: Mapping[str, int]) -> int:
    """Of counts by the name of a route, or of a reason: how many are of routes of ours."""
    return sum(counts.get(route.value, 0) for route in Route if route is not Route.ORIGINAL)


class DeclinedError(RuntimeError):
    """Strict mode only: a call was not served as asked. `.reason` says why."""

    def __init__(self, message: str, reason: Reason | None) -> None:
        super().__init__(message)
        self.reason = reason
