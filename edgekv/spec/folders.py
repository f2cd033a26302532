"""What a path is, for errors that say more than "not a checkpoint": other model formats, bundles, folders for Genie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FolderKind:
    """A kind of model folder or file.

    Attributes:
        kind: `checkpoint`, `bundle`, `genie`, `genai`, `lora`, `gguf`, `pytorch` or `safetensors`.
        what: for the error: "got ...".
        as_checkpoint: the fix, where a checkpoint was expected.
        as_bundle: the fix, where a bundle was expected.
    """

    kind: str
    what: str
    as_checkpoint: str
    as_bundle: str


_EXPORT = "Make a bundle of it: edgekv export {path} -o BUNDLE --device DEVICE"
_EXPORT_ORIGINAL = "Export the checkpoint with safetensors instead: edgekv export CHECKPOINT -o BUNDLE --device DEVICE"
_SOURCE = "Give the checkpoint that it was made from; manifest.json of the bundle names it under `source`."
_SAFETENSORS = "save_pretrained(FOLDER, safe_serialization=True) of transformers writes safetensors."

_CHECKPOINT = FolderKind("checkpoint", "a checkpoint", "It is one.", _EXPORT)
_BUNDLE = FolderKind(
    "bundle", "a bundle that is exported already", f"To run it: edgekv generate {{path}}. {_SOURCE}", ""
)
_GENIE = FolderKind("genie", "a folder for Genie", _SOURCE, "Give the bundle that it was made from.")
_GENAI = FolderKind("genai", "a folder for onnxruntime-genai", _SOURCE, "Give the bundle that it was made from.")
_LORA = FolderKind(
    "lora",
    "a LoRA adapter without its base model",
    "Adapters cannot be read yet: merge it into the base model first (merge_and_unload of peft, then save_pretrained).",
    _EXPORT_ORIGINAL,
)
_GGUF = FolderKind(
    "gguf", "GGUF, which cannot be read yet", "Give the original checkpoint with safetensors.", _EXPORT_ORIGINAL
)
_PYTORCH = FolderKind(
    "pytorch", "pickled weights (pytorch_model.bin), which are never opened", _SAFETENSORS, _EXPORT_ORIGINAL
)
_WEIGHTS = FolderKind("safetensors", "a file of weights", "Give its folder, with config.json.", _EXPORT_ORIGINAL)


def identify(path: Path) -> FolderKind | None:
    """What a path is by the files it has; None if there is nothing or nothing known.

    Args:
        path: a file or a folder.
    """
    if path.is_file():
        suffixes = {".gguf": _GGUF, ".safetensors": _WEIGHTS, ".bin": _PYTORCH}
        return suffixes.get(path.suffix)
    if not path.is_dir():
        return None
    names = {each.name for each in path.iterdir()}
    endings = {Path(name).suffix for name in names}
    if "manifest.json" in names and "config.json" not in names:
        return _BUNDLE
    if "genie_config.json" in names:
        return _GENIE
    if "genai_config.json" in names:
        return _GENAI
    if "adapter_config.json" in names and "config.json" not in names:
        return _LORA
    if ".safetensors" in endings:
        return _CHECKPOINT
    if ".gguf" in endings:
        return _GGUF
    if names & {"pytorch_model.bin", "pytorch_model.bin.index.json"}:
        return _PYTORCH
    return _CHECKPOINT if "config.json" in names else None
