"""The kind of a path (checkpoint, bundle, ...), for errors that say what was given and what to run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["checkpoint", "bundle", "compiled", "genie", "genai", "lora", "gguf", "pytorch", "safetensors"]


@dataclass(frozen=True, slots=True)
class FolderKind:
    """A kind of model file or folder.

    Attributes:
        kind: the kind; `gguf` is a file.
        what: a description, for an error's "got".
        as_checkpoint: the fix if a checkpoint was expected.
        as_bundle: the fix if a bundle was expected.
    """

    kind: Kind
    what: str
    as_checkpoint: str
    as_bundle: str


_PICKLED = (".bin", ".pt", ".pth")
_SOURCE = "Give the checkpoint that it was made from; manifest.json of the bundle names it under `source`."
_SAFETENSORS = (
    "Convert it where you trust its source: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True) of transformers "
    "writes safetensors; copy the tokenizer beside them."
)


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".gguf", ".json", ".safetensors", *_PICKLED)


def is_hub_id(name: str) -> bool:
    """Whether a name is an id of the Hugging Face hub such as `org/model`, and not a path that is missing."""
    path = Path(name)
    return bool(_HUB_ID.fullmatch(name)) and not (path.exists() or path.parent.is_dir() or path.suffix in _FILES)


def identify(path: Path) -> FolderKind | None:
    """The kind of a path, by the names of its files; None if unknown.

    Args:
        path: a file or a folder.
    """
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        return None
    names = {file.name for file in path.iterdir()}
    endings = {Path(name).suffix for name in names}
    if names & {"genie_bundle.json", "genie_config.json"}:
        return FolderKind("genie", "a folder for Genie", _SOURCE, f"Run it with: edgekv genie run {path} --prompt TEXT")
    if "genai_config.json" in names:
        run = f"Run it with: edgekv genai run {path} --prompt TEXT"
        return FolderKind("genai", "a folder for onnxruntime-genai", _SOURCE, run)
    if "compiled.json" in names:
        bundle = path.absolute().parent.parent
        return FolderKind("compiled", "the compiled binaries of a bundle", _SOURCE, f"Give the bundle: {bundle}")
    if "manifest.json" in names and "config.json" not in names:
        return FolderKind(
            "bundle", "a bundle that is exported already", f"Run it: edgekv generate {path}. {_SOURCE}", ""
        )
    if "adapter_config.json" in names and "config.json" not in names:
        fix = f"Give its base model, and the adapter with --lora: edgekv export BASE --lora {path} -o BUNDLE"
        return FolderKind("lora", "a LoRA adapter without its base model", fix, fix)
    if ".safetensors" in endings:
        return FolderKind("checkpoint", "a checkpoint", "", _export(path))
    if ".gguf" in endings:
        file = next(path / name for name in sorted(names) if name.endswith(".gguf"))
        return FolderKind("gguf", "a folder of GGUF files", f"Give the file: {file}", _export(file))
    if pickled := sorted(name for name in names if _is_pickled(name)):
        return _pytorch(pickled[0])
    return FolderKind("checkpoint", "a checkpoint", "", _export(path)) if "config.json" in names else None


def _file(path: Path) -> FolderKind | None:
    if path.suffix == ".gguf":
        return FolderKind(
            "gguf", "a file of weights (.gguf)", "Download it again: it has no GGUF header.", _export(path)
        )
    if path.suffix == ".safetensors":
        fix = f"Give its folder, with config.json: {path.parent}"
        return FolderKind("safetensors", "a file of weights (.safetensors)", fix, _export(path.parent))
    if path.suffix in _PICKLED:
        return _pytorch(path.name)
    if path.name == "manifest.json":
        return FolderKind("bundle", "the manifest of a bundle", _SOURCE, f"Give its folder: {path.parent}")
    return None


def _export(checkpoint: Path) -> str:
    return f"Export it first: edgekv export {checkpoint} -o BUNDLE --device DEVICE"


def _is_pickled(name: str) -> bool:
    """Whether torch writes weights to such files; an optimizer's state is none."""
    is_model = name.startswith(("pytorch_model", "model", "consolidated"))
    return is_model and Path(name.removesuffix(".index.json")).suffix in _PICKLED


def _pytorch(name: str) -> FolderKind:
    what = f"pickled weights ({name}), which are never opened"
    return FolderKind("pytorch", what, _SAFETENSORS, f"{_SAFETENSORS} Then export that folder.")
