"""The choices of the fp32 reference (which experts a token goes to), for the other arms to take too.

Where routing decides, one rounding sends a token to another expert, and the errors of what follows say which tokens
went where, and nothing of the kernels. The routers of transformers choose by `topk`, which is replaced while an arm
runs: the values stay the arm's own, at the places that the reference chose.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Choices:
    """What each `topk` of the reference chose, in the order of the calls."""

    indices: list[Tensor] = field(default_factory=list)
    taken: int = 0
    """Of the arm that ran last."""
    turned: int = 0
    """Rows in which that arm would have chosen otherwise."""
    difference: str = ""
    """Where that arm calls `topk` otherwise than the reference: from there on its choices are its own."""

    def note(self, arm: str) -> str | None:
        """What the report says of an arm, where there is something to choose."""
        if self.difference:
            return f"the routing of the {arm} arm is its own in part: {self.difference}"
        if self.indices:
            return f"the {arm} arm took the reference's routing; {self.turned} of its own choices would have differed"
        return None


@contextlib.contextmanager
def recorded(choices: Choices) -> Iterator[None]:
    """Keeps what every `topk` inside chooses."""

    def choose(found: Any, values: Tensor, dim: int) -> Any:
        choices.indices.append(found[1].detach().cpu())
        return found

    with _replaced(choose):
        yield


@contextlib.contextmanager
def replayed(choices: Choices) -> Iterator[None]:
    """Every `topk` inside gives its own values, at the places that the reference chose."""
    choices.taken = choices.turned = 0
    choices.difference = ""

    def choose(found: Any, values: Tensor, dim: int) -> Any:
        if choices.difference:
            return found
        place, choices.taken = choices.taken, choices.taken + 1
        expected = choices.indices[place].shape if place < len(choices.indices) else None
        if expected != found[1].shape:
            said = "no such call" if expected is None else f"one of {list(expected)}"
            choices.difference = f"call {place} of topk chooses {list(found[1].shape)}, where the reference has {said}"
            return found
        chosen = choices.indices[place].to(values.device)
        choices.turned += int((chosen.sort(dim).values != found[1].sort(dim).values).any(dim).sum())
        return torch.return_types.topk((values.gather(dim, chosen), chosen))

    with _replaced(choose):
        yield
    if not choices.difference and choices.taken < len(choices.indices):
        choices.difference = f"{choices.taken} calls of topk, where the reference has {len(choices.indices)}"


@contextlib.contextmanager
def _replaced(choose: Callable[[Any, Tensor, int], Any]) -> Iterator[None]:
    """`topk` as a function and as a method gives `choose(what it gave, values, dim)`."""
    with contextlib.ExitStack() as stack:
        for owner in (torch, torch.Tensor):
            stack.callback(_put_back, owner, owner.topk, "topk" in vars(owner))
            setattr(owner, "topk", _choosing(owner.topk, choose))
        yield


def _choosing(before: Callable[..., Any], choose: Callable[[Any, Tensor, int], Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def topk(
        input: Tensor,  # noqa: A002
        k: int,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = True,  # noqa: A002
        *,
        out: Any = None,
    ) -> Any:
        if out is not None:  # where the caller reads it, and not what is returned
            return before(input, k, dim, largest, sorted, out=out)
        return choose(before(input, k, dim, largest, sorted), input, dim)

    return topk


def _put_back(owner: Any, before: Any, was_its_own: bool) -> None:
    if was_its_own:
        owner.topk = before
    else:
        del owner.topk
