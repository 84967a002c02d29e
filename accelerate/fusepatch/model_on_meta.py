"""A model from its configuration alone, for commands that look at a model or measure its modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import importhook
from .errors import CommandError, first_line


def model_on_meta(model: str, gguf: str | None, instead: str) -> Any:
    """The model that the configuration of `model` describes, with no memory behind its weights.

    `instead` is what to call on a model that can't be built here. Raises CommandError for one that can't.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        if gguf is not None:
            raise CommandError(f"{model} is a GGUF file itself: leave --gguf out, or name its folder")
        path, gguf = path.parent, path.name
    elif path.is_dir():
        if not (path / (gguf or "config.json")).is_file():
            hint = "" if gguf else " (name a GGUF file in it with --gguf)"
            raise CommandError(f"{model} has no file {gguf or 'config.json'}{hint}")
    elif path.exists():
        raise CommandError(f"{model} is neither a folder nor a .gguf file")
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:  # a name on the hub is `name` or `owner/name`
        raise CommandError(f"{model} does not exist")
    if not importhook.is_installed("transformers"):
        raise CommandError('needs transformers: pip install "fusepatch[hf]"')
    if gguf is not None and path.is_dir():
        from .demo.weights import check_gguf

        check_gguf(path / gguf)

    import torch
    import transformers

    source = str(path) if path.is_dir() else model
    try:
        config = transformers.AutoConfig.from_pretrained(source, gguf_file=gguf, trust_remote_code=False)
        with torch.device("meta"):
            return _from_config(config)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CommandError(
                f"{model} brings its own code, which this command does not run: build the model, and call {instead}"
            ) from None
        where = "" if path.is_dir() else " (no folder here, so the Hugging Face hub was asked)"
        raise CommandError(f"can't build {model} from its configuration{where}: {first_line(error)}") from None


def _from_config(config: Any) -> Any:
    import transformers

    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:  # no language model, or not only one
        return transformers.AutoModel.from_config(config)
