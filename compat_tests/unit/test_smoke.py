"""One line patches, and one line undoes."""

import torch

import fusepatch
from support import relative_error, tiny_llama_mlp


def test_round_trip(reference_backend: None) -> None:
    mlp = tiny_llama_mlp()
    before = dict(vars(type(mlp)))
    x = torch.randn(3, 5, 64)
    stock = mlp(x)
    fusepatch.accelerate()
    patched = mlp(x)
    assert fusepatch.status().native_calls() == 1
    assert relative_error(patched, stock) < 1e-6
    fusepatch.restore()
    assert dict(vars(type(mlp))) == before
    assert list(vars(type(mlp))) == list(before)
