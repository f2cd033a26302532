"""What a path is that was given as a bundle and is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FolderKind:
    """What a folder or file is.

    Attributes:
        name: for messages.
        fix: the command to run on it.
    """

    name: str
    fix: str


def folder_kind(path: Path) -> FolderKind | None:
    """What a path is, judged by the names of files alone; None if it is nothing that edgekv knows."""
    export = "Export it first: edgekv export {} -o BUNDLE --device DEVICE"
    if path.suffix in (".safetensors", ".gguf") and path.is_file():
        weights = path if path.suffix == ".gguf" else path.parent
        return FolderKind(f"a file of weights ({path.suffix})", export.format(weights))
    if path.name == "manifest.json" and path.is_file():
        return FolderKind("the manifest of a bundle", f"Give its folder: {path.parent}")
    if (path / "genie_bundle.json").is_file() or (path / "genie_config.json").is_file():
        return FolderKind("a folder for Genie", f"Run it with: edgekv genie run {path} --prompt TEXT")
    if (path / "genai_config.json").is_file():
        return FolderKind("a folder for onnxruntime-genai", f"Run it with: edgekv genai run {path} --prompt TEXT")
    if (path / "compiled.json").is_file():
        bundle = path.absolute().parent.parent
        return FolderKind("the compiled binaries of a bundle", f"Give the bundle: {bundle}")
    if (path / "adapter_config.json").is_file():
        return FolderKind("a LoRA adapter", "Merge it into its base model, and export the result with edgekv export.")
    if (path / "config.json").is_file():
        return FolderKind("a checkpoint", export.format(path))
    if path.is_dir() and any(path.glob("*.gguf")):
        return FolderKind("a folder of GGUF files", export.format(next(path.glob("*.gguf"))))
    return None
