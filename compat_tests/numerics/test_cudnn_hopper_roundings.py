"""Where cuDNN's backward pass of KDA on Hopper loses the precision of the gate's gradients: its chunked algorithm in
fp64, rounded to bf16 at the places where `kda_bwd_sm90.cu` of nvidia-cudnn-frontend 1.32.0 rounds.

Within a chunk the gradient of token t's gate is a sum over all later tokens, in which each pair of tokens (i, j) comes
twice with opposite signs: as q_i dq_i and as -k_j dk_j. For t before both it cancels. The kernel gets the first from
k_j exp(-sum g) and the second from q_i exp(sum g), each rounded to bf16 by itself, so that it does not cancel, and what
is left stands in the gradient of every earlier token of the chunk. dt_bias sums those tokens, and the errors with them.
FLA keeps the same operands in fp32, and multiplies them in TF32 or as three products in bf16.

Tensors: S chunks, H heads, C = 64 tokens of a chunk, K = V = 128. In here, those of tokens are [S, H, C, K or V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fusepatch.kernels.linear_attention import reference
from fusepatch.kernels.linear_attention.problem import Call, Inputs
from support import relative_error

CHUNK, BLOCK, WIDTH = 64, 16, 128
CALL = Call(WIDTH**-0.5, l2norm=True, gate="bounded", lower_bound=-5.0, beta_sigmoid=True, state_v_first=True)

PAIRS = ("row keys", "column queries", "column keys")
"""What the products over the pairs of tokens of a chunk are made of."""
FIRST_CHUNK = ("queries", "queries by grad_out")
"""What the gradient of a chunk's first state is made of."""

Round = Callable[[str, Tensor], Tensor]


def bf16_but(*exact: str) -> Round:
    return lambda name, t: t if name in exact else t.bfloat16().double()


def bf16_of(*rounded: str) -> Round:
    return lambda name, t: t.bfloat16().double() if name in rounded else t


# ------------------------------------------------------------------------------------------- cuDNN's kernels, in fp64


class Grads(NamedTuple):
    """Of what the kernels are given, [T, H, ...]; of the initial state [H, V, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor


def chunks(t_TH: Tensor) -> Tensor:
    """[T, H, ...] as [S, H, C, ...]; the last chunk is filled up with zeros, which do nothing."""
    missing = -len(t_TH) % CHUNK
    padded = torch.cat([t_TH, t_TH.new_zeros(missing, *t_TH.shape[1:])])
    return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)


def tokens(t: Tensor, count: int) -> Tensor:
    return t.transpose(1, 2).flatten(0, 1)[:count]


def scan(
    into: Tensor, outof: Tensor, local: Tensor, added: Tensor | None, decay: Tensor, state: Tensor, name: str, to: Round
) -> tuple[Tensor, Tensor, Tensor]:
    """The states before each chunk as rounded, `into state + local` as rounded, and the state after all of them."""
    states, news = [], []
    for index in range(len(local)):
        states.append(to(f"{name} states", state))
        news.append(to(f"{name} values", into[index] @ states[-1] + local[index]))
        state = decay[index] * state + outof[index].mT @ news[-1]
        state = state if added is None else state + added[index]
    return torch.stack(states), torch.stack(news), state


def over_pairs(weights: Tensor, operand: Tensor, anchors: Tensor, sign: int) -> Tensor:
    """weights @ (operand 2^(sign (anchors of the row - anchors of the column))), per block of 16 tokens."""
    out = torch.zeros_like(operand)
    for row in range(0, CHUNK, BLOCK):
        for column in range(0, CHUNK, BLOCK):
            if sign * row < sign * column:
                continue
            rows, columns = slice(row, row + BLOCK), slice(column, column + BLOCK)
            decay = torch.exp2(sign * (anchors[:, :, row : row + 1] - anchors[:, :, column : column + 1]))
            out[:, :, rows] += weights[..., rows, columns] @ operand[:, :, columns] * decay
    return out


def backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, grad_out: Tensor,
             grad_final: Tensor, to: Round) -> Grads:  # fmt: skip
    """All in fp64; `to(name, t)` rounds what the kernels round."""
    count = len(q)
    q, k, v, g, grad_out = (chunks(t) for t in (q, k, v, g, grad_out))
    beta = chunks(beta).unsqueeze(-1)
    gate = g.cumsum(2) / torch.log(torch.tensor(2.0, dtype=g.dtype))
    first = gate[:, :, ::BLOCK].repeat_interleave(BLOCK, 2)
    last = gate[:, :, BLOCK - 1 :: BLOCK].repeat_interleave(BLOCK, 2)
    end = gate[:, :, -1:]
    up, down, decay = torch.exp2(gate), torch.exp2(end - gate), torch.exp2(end).mT

    def lower(t: Tensor) -> Tensor:
        return t.tril(-1)

    # What depends on one chunk alone.
    rows_q, rows_k = (to("rows", t * torch.exp2(gate - first)) for t in (q, k))
    attention, mixing = (torch.zeros(*q.shape[:2], CHUNK, CHUNK, dtype=q.dtype) for _ in range(2))
    for row in range(0, CHUNK, BLOCK):
        rows, columns = slice(row, row + BLOCK), slice(0, row + BLOCK)
        keys = to("keys", k[:, :, columns] * torch.exp2(gate[:, :, row : row + 1] - gate[:, :, columns]))
        attention[..., rows, columns] = rows_q[:, :, rows] @ keys.mT
        mixing[..., rows, columns] = rows_k[:, :, rows] @ keys.mT
    attention = to("attention", CALL.scale * attention.tril())
    inverse = to("inverse", torch.linalg.inv(torch.eye(CHUNK, dtype=q.dtype) + beta * lower(mixing)))
    written = to("keys into the end", k * down)
    read = to("minus w", -inverse @ to("keys by beta", k * beta * up))
    local = to("u", inverse @ to("values by beta", v * beta))
    local_grad = to("local grad of values", attention.mT @ grad_out)
    added = to("queries by grad_out", to("queries", CALL.scale * q * up).mT @ grad_out)

    # The states, and their gradients, from chunk to chunk.
    states, values, _ = scan(read, written, local, None, decay, initial_state.mT, "forward", to)
    back = (t.flip(0) for t in (written, read, local_grad, added, decay))
    found = scan(*back, grad_final.mT, "backward", to)
    grad_states, grad_values, grad_initial = found[0].flip(0), found[1].flip(0), found[2]

    # The gradients: by way of the states ...
    grad_attention = CALL.scale * grad_out @ values.mT
    diagonal = grad_attention.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    grad_attention = to("grad of attention", lower(grad_attention))
    grad_q, grad_k = CALL.scale * grad_out @ states.mT * up, values @ grad_states.mT * down
    grad_read = to("grad of w", -grad_values @ states.mT)
    grad_gate = q * grad_q - k * grad_k
    grad_gate[:, :, -1] += (states * grad_states).sum(-1) * decay.squeeze(-1) + (k * grad_k).sum(2)
    # ... of the inverse ...
    grad_inverse = grad_values @ v.mT + grad_read @ to("keys at the start", k * up).mT
    half = to("half", inverse.mT @ to("grad of the inverse", lower(grad_inverse * beta.mT)))
    grad_mixing = to("grad of mixing", lower(-half @ inverse.mT))
    grad_v, grad_kb = inverse.mT @ grad_values, inverse.mT @ grad_read * up
    grad_beta = (grad_v * v).sum(-1) + (grad_kb * k).sum(-1)
    grad_k = grad_k + beta * grad_kb
    grad_gate += k * beta * grad_kb
    # ... and over pairs of tokens of the chunk.
    keys = to("row keys", k * torch.exp2(first - gate))
    pairs_q, pairs_k = (over_pairs(t, keys, first, 1) * torch.exp2(gate - first) for t in (grad_attention, grad_mixing))
    columns_q = to("column queries", q * torch.exp2(gate - last))
    columns_k = to("column keys", k * beta * torch.exp2(gate - last))
    columns = over_pairs(grad_attention.mT, columns_q, last, -1) + over_pairs(grad_mixing.mT, columns_k, last, -1)
    columns = columns * torch.exp2(last - gate)
    grad_gate += q * pairs_q + beta * k * pairs_k - k * columns
    grad_beta += (pairs_k * k).sum(-1)
    grad_q = grad_q + pairs_q + diagonal * k
    grad_k = grad_k + beta * pairs_k + columns + diagonal * q
    grad_g = grad_gate.flip(2).cumsum(2).flip(2)

    stored = (to("stored", grad_q), to("stored", grad_k), to("stored", beta * grad_v), grad_g, grad_beta)
    return Grads(*(tokens(t, count) for t in stored), grad_initial.mT)


# ------------------------------------------------------------------------------------------------------ a call of KDA


def inputs(length: int, raw_gate: float = 0.0) -> Inputs:
    """Those of the GPU test, of one row and two heads."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).double()

    q, k, v, g = (normal(1, length, 2, WIDTH) for _ in range(4))
    beta, A_log = normal(1, length, 2), 0.3 * normal(2, dtype=torch.float32)
    bias, state = 0.3 * normal(2 * WIDTH, dtype=torch.float32), normal(1, 2, WIDTH, WIDTH, dtype=torch.float32)
    return Inputs(q, k, v, (g + raw_gate).bfloat16().double(), beta, A_log, bias, state)


NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


class Gradients:
    """Of one call: by the definition, and by the kernels around which stand exact derivatives of what we do."""

    def __init__(self, length: int, raw_gate: float = 0.0) -> None:
        given = inputs(length, raw_gate)
        self.leaves = Inputs(*(t.requires_grad_() for t in given[:-1]))
        outs = reference.run(CALL, self.leaves, True)
        generator = torch.Generator().manual_seed(1)
        self.incoming = tuple(torch.randn(t.shape, generator=generator).bfloat16().double() for t in outs)
        self.exact = dict(zip(NAMES, torch.autograd.grad(outs, self.leaves[:-1], self.incoming), strict=True))

    def errors(self, to: Round) -> dict[str, float]:
        q, k, v, g, beta, A_log, bias, state = self.leaves[:-1]
        made = (
            reference.l2_normalise(q),
            reference.l2_normalise(k),
            reference.log_gate(CALL, g, A_log, bias),
            reference.write_strength(CALL, beta),
        )
        unit_q, unit_k = (to("unit length", t.detach().squeeze(0)) for t in made[:2])
        raw = (v.squeeze(0), made[2].squeeze(0), made[3].squeeze(0), state.squeeze(0))
        grad_out, grad_final = (t.squeeze(0) for t in self.incoming)
        found = backward(unit_q, unit_k, *(t.detach() for t in raw), grad_out, grad_final, to)
        back = [t.unsqueeze(0) for t in (found.q, found.k, found.g, found.beta)]
        grads = torch.autograd.grad(made, (q, k, g, beta, A_log, bias), back)
        named = dict(zip(("q", "k", "g", "beta", "A_log", "dt_bias"), grads, strict=True))
        named |= {"v": found.v.unsqueeze(0), "initial_state": found.initial_state.unsqueeze(0)}
        return {name: relative_error(named[name], self.exact[name]) for name in NAMES}


@pytest.fixture(scope="module")
def a_tail() -> Gradients:
    return Gradients(491)


@pytest.mark.parametrize("length", [1, 64, 130])
def test_unrounded_it_is_the_definition(length: int) -> None:
    errors = Gradients(length).errors(bf16_of())
    assert max(errors.values()) < 1e-10, errors


def test_the_operands_of_pairs_make_the_error_of_dt_bias(a_tail: Gradients) -> None:
    errors, without = a_tail.errors(bf16_but()), a_tail.errors(bf16_but(*PAIRS))
    alone = a_tail.errors(bf16_of("unit length", *PAIRS))
    assert without["dt_bias"] < 3e-3 < 5 * without["dt_bias"] < errors["dt_bias"], (without, errors)
    assert alone["dt_bias"] > 0.9 * errors["dt_bias"]
    assert errors["g"] > 1.3 * without["g"]
    # The sum is further off than what it sums: the errors of a chunk's tokens are not each their own.
    assert errors["dt_bias"] > 3 * errors["g"]
    assert without["dt_bias"] < 1.1 * without["g"]
    for name in ("q", "k", "v", "beta", "initial_state"):
        assert errors[name] < 1.05 * without[name], name


@pytest.mark.parametrize(("name", "factor"), [("row keys", 5), ("column queries", 5), ("column keys", 1.15)])
def test_each_of_the_operands_counts(name: str, factor: float, a_tail: Gradients) -> None:
    without = a_tail.errors(bf16_but(*PAIRS))["dt_bias"]
    others = (each for each in PAIRS if each != name)
    assert a_tail.errors(bf16_but(*others))["dt_bias"] > factor * without


def test_gates_that_hardly_decay_lose_nothing_by_it() -> None:
    """The factors are nearly 1, and the rounded operand is the bf16 number that was given."""
    found = Gradients(512, raw_gate=-12.0)
    errors, without = found.errors(bf16_but()), found.errors(bf16_but(*PAIRS))
    assert errors["dt_bias"] < 1.05 * without["dt_bias"]


def test_the_operands_of_the_first_chunk_make_the_error_of_the_initial_state(a_tail: Gradients) -> None:
    errors, without = a_tail.errors(bf16_but()), a_tail.errors(bf16_but(*FIRST_CHUNK))
    assert errors["initial_state"] > 1.4 * without["initial_state"]
    assert without["initial_state"] < 2e-3
