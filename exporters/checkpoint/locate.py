"""Where a checkpoint lies: a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from edgekv.errors import CheckpointError
from edgekv.spec import identify
from edgekv.spec.text import TOKENIZER
from exporters.checkpoint.generation import GENERATION_CONFIG
from exporters.checkpoint.tokenizer import FILES


def locate(name: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint, downloaded if the name is an id of the hub.

    Args:
        name: of the folder, or the id.
        revision: commit of an id; None for the newest.

    Raises:
        CheckpointError: it is something else, or cannot be downloaded.
    """
    path = Path(name)
    kind = identify(path)
    if kind is not None and kind.kind != "checkpoint":
        raise CheckpointError(
            f"checkpoint {name}",
            got=kind.what,
            expected="a folder with config.json, tokenizer.json and safetensors",
            fix=kind.as_checkpoint,
        )
    if path.is_dir():
        return path
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            "checkpoint",
            got=f"{name!r}, which is no folder",
            expected="a folder with config.json, tokenizer.json and safetensors, or a hub id such as org/model",
            fix="Check the path.",
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.safetensors.index.json", "config.json", GENERATION_CONFIG, TOKENIZER, *FILES]
    copies = ["consolidated*", "original/*"]  # the same weights in the original publisher's format
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=copies))
    except Exception as error:  # the hub's own errors share no base class
        raise CheckpointError(
            "checkpoint",
            got=f"{name!r}: no such folder, and the hub said {type(error).__name__}",
            expected="a folder, or a hub id that can be downloaded",
            fix="Check the path or the id, log in with `hf auth login` for gated models, or download it first.",
        ) from error
