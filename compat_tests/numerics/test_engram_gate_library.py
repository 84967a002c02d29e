"""The Engram gate as operators of torch: schema, fake implementation, autograd, torch.compile, and modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fusepatch import ops
from fusepatch.kernels.engram_gate import choose, library, op, reference
from support import grads_of

M, S, D = 5, 2, 16
OPERATORS = torch.ops.fusepatch
assert library is not None  # makes the operators


def inputs(*lead: int, packed: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """x, key, value and weight; value is None where packed in key."""
    torch.manual_seed(0)
    x, key, value = torch.randn(*lead, S, D), torch.randn(*lead, S * D), torch.randn(*lead, D)
    packing = [torch.cat((key, value), -1), None] if packed else [key, value]
    return [*(t if t is None else t.to(dtype) for t in (x, *packing)), torch.rand(S, D)]


def leaves(tensors: list[Tensor | None], frozen: tuple[int, ...] = ()) -> list[Tensor | None]:
    return [t if t is None or i in frozen else t.requires_grad_() for i, t in enumerate(tensors)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (3,)], ids=str)
@pytest.mark.parametrize("lead", [(M,), (1,), (0,), (2, 3)], ids=str)
def test_schema_fake_and_gradients(lead: tuple[int, ...], frozen: tuple[int, ...], packed: bool) -> None:
    mask = torch.rand(lead) < 0.7
    for each, norms in ((mask, (None, None)), (None, (torch.rand(S, D), torch.rand(S, D)))):
        args = (*leaves(inputs(*lead, packed=packed), frozen), each, *norms, 1e-6, each is not None, "sign")
        opcheck(OPERATORS.engram_gate.default, (*args, "reference"))


def test_half_precision_and_strides() -> None:
    x, kv, _, weight = leaves(inputs(M, dtype=torch.bfloat16))
    x = torch.stack((x, x), -1)[..., 0]
    args = (x, torch.cat((kv, kv), -1)[:, : kv.shape[1]], None, weight, None, None, None, 1e-6, True, "copysign")
    opcheck(OPERATORS.engram_gate.default, (*args, "reference"))


@pytest.mark.parametrize("wanted", [(True, True, True, True), (False, True, False, False), (True, False, True, False)])
@pytest.mark.parametrize("packed", [True, False])
def test_the_backward_operator(packed: bool, wanted: tuple[bool, ...]) -> None:
    x, key, value, weight = inputs(M, packed=packed, dtype=torch.bfloat16)
    wanted = (*wanted[:2], wanted[2] and not packed, wanted[3])
    _, saved = OPERATORS.engram_gate(x, key, value, weight, None, None, None, 1e-6, True, "sign", "reference")
    shapes = x.shape, key.shape, () if value is None else value.shape
    args = (torch.randn_like(x), x, key, value, weight, saved, wanted, packed, *shapes)
    opcheck(OPERATORS.engram_gate_backward.default, (*args, weight.dtype, True, False, "reference"))


def test_the_operator_gives_what_the_op_gives() -> None:
    x, kv, _, weight = leaves(inputs(M))
    dout = torch.randn(M, S, D)
    out, _ = OPERATORS.engram_gate(x, kv, None, weight, None, None, None, 1e-6, True, "copysign", "reference")
    found = (out, *torch.autograd.grad(out, (x, kv, weight), dout))
    plain = ops.engram_gate(x, kv, weight, eps=1e-6)
    expected = (plain, *torch.autograd.grad(plain, (x, kv, weight), dout))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_code_is_one_graph_and_gives_the_same(masked: bool) -> None:
    def run(x: Tensor, query: Tensor, key: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
        weight = ops.engram_gate_weight(query, key, S, zero_centred=True)
        return ops.engram_gate(x, kv, weight, mask, eps=1e-6).sin()

    names = ("x", "query", "key", "kv")
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (M, M + 3):
        x, kv, _, _ = inputs(2, tokens)
        mask = torch.rand(2, tokens) < 0.7 if masked else None
        made = [t.requires_grad_() for t in (x, torch.randn(S * D), torch.randn(S * D), kv)]
        p = dict(zip(names, made, strict=True))
        expected = {n: t.clone() for n, t in grads_of(lambda p=p, m=mask: run(*p.values(), m), p).items()}
        found = grads_of(lambda p=p, m=mask: compiled(*p.values(), m), p)
        assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)
    torch._dynamo.reset()


def test_bad_input_is_refused_while_compiling() -> None:
    x, kv, _, weight = inputs(M)
    compiled = torch.compile(lambda x: ops.engram_gate(x, kv, weight[:1], eps=1e-6), backend="eager")
    with pytest.raises(ValueError, match=r"weight is \[1, 16\], but must be \[2, 16\]"):
        compiled(x)
    torch._dynamo.reset()


def test_selective_checkpointing_saves_the_operator_and_not_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = reference.engram_forward
    monkeypatch.setattr(reference, "engram_forward", lambda *a, **k: calls.append(1) or right(*a, **k))

    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_ours = operator is OPERATORS.engram_gate.default
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    x, kv, _, weight = leaves(inputs(M))
    p = {"x": x, "kv": kv, "weight": weight}
    run = lambda x, kv, weight: ops.engram_gate(x, kv, weight, eps=1e-6).sin()
    expected = {name: t.clone() for name, t in grads_of(lambda: run(x, kv, weight), p).items()}
    calls.clear()
    contexts = lambda: create_selective_checkpoint_contexts(policy)
    found = grads_of(lambda: checkpoint(run, x, kv, weight, use_reentrant=False, context_fn=contexts), p)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    x, kv, _, weight = leaves(inputs(M))
    p = {"x": x, "kv": kv, "weight": weight}
    run = lambda x, kv, weight: ops.engram_gate(x, kv, weight, eps=1e-6)
    expected = {name: t.clone() for name, t in grads_of(lambda: run(x, kv, weight), p).items()}
    found = grads_of(lambda: checkpoint(run, x, kv, weight, use_reentrant=use_reentrant), p)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("inside", ["forward", "backward", "both"])
def test_autocast_changes_nothing(inside: str) -> None:
    """The op computes in the dtypes it is given, inside autocast and out."""

    def run(forward: bool, backward: bool) -> list[Tensor]:
        x, kv, _, weight = leaves(inputs(M, dtype=torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            out = ops.engram_gate(x, kv, weight, eps=1e-6)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            return [out, *torch.autograd.grad(out, (x, kv, weight), torch.ones_like(out))]

    found = run(inside != "backward", inside != "forward")
    assert all(torch.equal(one, other) for one, other in zip(found, run(False, False), strict=True))


def test_an_operator_calls_the_backend_that_it_names() -> None:
    x, kv, _, weight = inputs(M)
    with pytest.raises(StopIteration):
        OPERATORS.engram_gate(x, kv, None, weight, None, None, None, 1e-6, True, "sign", "nobody")


def test_misaligned_and_oddly_strided_tensors_are_copied_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels are promised: 16 bytes, rows at multiples of 8 elements, dense weights."""
    seen: list[Tensor] = []
    right = reference.engram_forward
    monkeypatch.setattr(reference, "engram_forward", lambda *a, **k: seen.extend(a[:4]) or right(*a, **k))

    def off(t: Tensor, by: int) -> Tensor:
        room = torch.empty(t.numel() + by, dtype=t.dtype)
        return room[by:].view(t.shape).copy_(t)

    x, kv, _, weight = inputs(M)
    call = op.Call(choose.REFERENCE, 1e-6, True, "sign")
    expected = op.run_engram_gate(call, x, kv, None, weight, None)
    assert seen[0].data_ptr() == x.data_ptr() and seen[1].data_ptr() == kv.data_ptr()
    wide = torch.zeros(M, kv.shape[1] + 3)
    wide[:, : kv.shape[1]] = kv
    for given in ((off(x, 1), kv, weight), (x, off(kv, 3), weight), (x, kv, off(weight, 2)), (x, wide[:, :-3], weight)):
        seen.clear()
        assert torch.equal(op.run_engram_gate(call, given[0], given[1], None, given[2], None), expected)
        assert all(t.data_ptr() % 16 == 0 and t.stride(-1) == 1 for t in seen)
        assert all(t.stride(0) % 8 == 0 for t in seen[:3])
