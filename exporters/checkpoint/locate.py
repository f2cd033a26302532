"""Where a checkpoint lies: a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgekv.errors import CheckpointError
from edgekv.spec import CONFIG, identify, is_hub_id, read_json
from edgekv.spec.text import TOKENIZER
from exporters.checkpoint.generation import GENERATION_CONFIG
from exporters.checkpoint.sentence import FILES as SENTENCE_FILES
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
    _check_id(name)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.safetensors.index.json", "config.json", GENERATION_CONFIG, TOKENIZER, *FILES]
    patterns += SENTENCE_FILES
    copies = ["consolidated*", "original/*"]  # the same weights in the original publisher's format
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=copies))
    except Exception as error:  # the hub's own errors share no base class
        raise _not_there(name, error) from error


def find_config(name: str) -> Mapping[str, Any]:
    """The fields of the `config.json` of a checkpoint, a GGUF file or an id of the hub; no weights are read.

    Raises:
        CheckpointError: it is something else, cannot be downloaded, or is of an unsupported architecture.
    """
    from exporters.checkpoint.gguf import GgufFile, hugging_face_config, is_gguf

    if is_gguf(path := Path(name)):
        return hugging_face_config(GgufFile(path))
    if path.exists():
        return read_json(locate(name) / CONFIG)
    _check_id(name)
    from huggingface_hub import hf_hub_download

    try:
        file = Path(hf_hub_download(name, CONFIG))
    except Exception as error:  # as above
        raise _not_there(name, error) from error
    return read_json(file)


def _check_id(name: str) -> None:
    if not is_hub_id(name):
        raise CheckpointError(
            f"checkpoint {name}",
            got="a file of another kind" if Path(name).exists() else "no such file or folder",
            expected="a folder with config.json, tokenizer.json and safetensors, a GGUF file, or a hub id",
            fix="Check the path.",
        )


def _not_there(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {name}",
        got=f"no such file or folder, and the hub said {type(error).__name__}",
        expected="a folder, a GGUF file, or a hub id that can be downloaded",
        fix="Check the path or the id, log in with `hf auth login` for gated models, or download it first.",
    )
