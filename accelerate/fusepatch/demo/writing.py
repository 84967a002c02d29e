"""Greedy continuations, and where two of them part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .weights import Loaded


@dataclass(frozen=True)
class Difference:
    """The first place where two continuations of one prompt differ."""

    position: int
    unpatched: str
    patched: str
    margin: float
    """Logit of the unpatched token minus that of the patched one, by the reference."""
    spread: float
    """Standard deviation of all logits there, for scale."""


def ask(loaded: Loaded, prompt: str) -> Tensor:
    """The prompt as the model's chat template has it: token ids [1, n]."""
    if loaded.tokenizer.chat_template is None:
        encoded = loaded.tokenizer(prompt, return_tensors="pt")
    else:
        message = [{"role": "user", "content": prompt}]
        encoded = loaded.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids: Tensor = encoded["input_ids"]
    return ids.to(loaded.device)


def continue_greedily(model: Any, prompt: Tensor, tokens: int) -> list[int]:
    """The new tokens, at most so many."""
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=model.generation_config.eos_token_id,
    )
    new: list[int] = out[0, prompt.shape[1] :].tolist()
    return new


def parting(unpatched: list[int], patched: list[int]) -> int | None:
    """The index of the first token that differs; None where none does."""
    if unpatched == patched:
        return None
    pairs = zip(unpatched, patched, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(unpatched), len(patched)))


@torch.no_grad()
def judge_parting(
    loaded: Loaded, reference: Any, prompt: Tensor, unpatched: list[int], patched: list[int], at: int
) -> Difference:
    """What the reference thinks of the two tokens at index `at`."""
    prefix = torch.tensor([unpatched[:at]], dtype=prompt.dtype, device=prompt.device)
    logits_V = reference(input_ids=torch.cat((prompt, prefix), dim=1), use_cache=False).logits[0, -1].double()
    one, other = unpatched[at], patched[at]
    return Difference(
        at,
        loaded.tokenizer.decode([one]),
        loaded.tokenizer.decode([other]),
        float(logits_V[one] - logits_V[other]),
        float(logits_V.std()),
    )
