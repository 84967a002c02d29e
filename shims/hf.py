"""Where transformers keeps its models."""

from __future__ import annotations


def wants_module(name: str) -> bool:
    """Modelling files: `transformers.models.<model>.modeling_<model>`."""
    return name.startswith("transformers.models.") and ".modeling_" in name
