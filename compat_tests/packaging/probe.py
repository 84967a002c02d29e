"""What is run in every context: transformers and fusepatch find the libraries that are there, and no folder of ours.

Copied into the root of a copy of the repository. Expectations come in the environment: PROBE_PRESENT, the Hugging Face
packages that are installed, of accelerate and kernels; PROBE_ROOT, the repository root, where it must be importable
from; PROBE_FUSEPATCH, the folder that fusepatch must come from; PROBE_PREFIX, the sys.prefix meant.
"""

import importlib
import importlib.metadata
import os
import sys


def check():
    assert os.path.realpath(sys.prefix) == os.path.realpath(os.environ["PROBE_PREFIX"]), sys.prefix
    check_path()
    check_libraries()
    check_patching()
    print("probe passed", flush=True)


def check_path():
    root = os.environ.get("PROBE_ROOT")
    if root is not None:
        assert root in [os.path.realpath(folder or ".") for folder in sys.path], sys.path
        import shims

        assert getattr(shims, "__file__", None) is None


def check_libraries():
    from transformers import LlamaForCausalLM
    from transformers.utils import is_accelerate_available, is_kernels_available

    assert LlamaForCausalLM.__module__ == "transformers.models.llama.modeling_llama"
    present = os.environ["PROBE_PRESENT"].split()
    for name, available in (("accelerate", is_accelerate_available()), ("kernels", is_kernels_available())):
        assert available is (name in present), f"transformers takes {name} for {available}"
        if name in present:
            module = importlib.import_module(name)
            assert module.__version__
            assert os.path.basename(os.path.dirname(os.path.dirname(module.__file__))).startswith("libraries"), module
        else:
            check_absent(name)


def check_absent(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise AssertionError(f"{name} was to be absent")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    assert getattr(module, "__file__", None) is None, f"{name} is taken from {module}"  # our bare folder


def check_patching():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaMLP

    import fusepatch

    assert os.path.realpath(os.path.dirname(os.path.dirname(fusepatch.__file__))) == os.environ["PROBE_FUSEPATCH"]
    os.environ["FUSEPATCH_GATED_MLP_BACKEND"] = "reference"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    tokens = torch.arange(8)[None]
    stock = model(tokens).logits
    before = dict(vars(LlamaMLP))
    fusepatch.accelerate()
    torch.testing.assert_close(model(tokens).logits, stock)
    assert fusepatch.status().native_calls() == 2, fusepatch.status()
    fusepatch.restore()
    assert dict(vars(LlamaMLP)) == before
    assert torch.equal(model(tokens).logits, stock)


if __name__ == "__main__":
    check()
