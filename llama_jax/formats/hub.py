"""Model paths that mean a download from the Hugging Face hub: the only place that ever uses the network."""

from __future__ import annotations

import os
from pathlib import Path

from llama_jax.errors import ArgumentError, plain

PREFIX = "hf:"
_FOLDER_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_OTHER_FILES = ["*/*", "consolidated*"]  # sub-folders, and Mistral's second copy of the weights


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """The local file or folder that `path` means.

    "hf:owner/name" downloads the files of a Hugging Face model that `open_model` reads, "hf:owner/name:file.gguf" one
    file; both are kept in the hub's own cache. Anything else is a path on this machine.

    Raises:
      ArgumentError: the path is empty, does not exist or has a wrong form, huggingface-hub is missing, or the download
        failed.
    """
    text = os.fspath(path)
    if not text:
        raise ArgumentError("The model path is empty; give a .gguf file, a folder, or hf:owner/name.")
    if not text.startswith(PREFIX):
        local = Path(os.path.expanduser(text))
        if not os.path.exists(local):
            raise ArgumentError(
                f"The model path {text!r} does not exist; give a .gguf file, a folder, or hf:owner/name."
            )
        return local
    name, _, file = text.removeprefix(PREFIX).partition(":")
    if name.count("/") != 1 or not all(name.split("/")):
        raise ArgumentError(f"The model path {text!r} is not of the form hf:owner/name or hf:owner/name:file.gguf.")
    try:
        import huggingface_hub
    except ImportError:
        raise ArgumentError(
            f"The model path {text!r} needs huggingface-hub; install it with: pip install 'llama-jax[hub]'."
        ) from None
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(name, file))
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FOLDER_FILES, ignore_patterns=_OTHER_FILES))
    except Exception as error:  # the hub raises many kinds: network, authorisation, names
        reason = plain(str(error).partition("\n")[0], 300) or type(error).__name__
        raise ArgumentError(f"The download of {text!r} failed: {reason}") from error
