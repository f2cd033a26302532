"""A bundle: a folder that says everything about itself, verified when it is opened, written atomically."""

from edgekv.bundle.atomic import atomic_directory
from edgekv.bundle.bundle import Bundle, open_bundle, read_manifest, write_manifest
from edgekv.bundle.compiled import COMPILED, Compiled, CompiledBinary, CompiledManifest, open_compiled
from edgekv.bundle.files import record_files, sha256_of
from edgekv.bundle.manifest import (
    FORMAT,
    MANIFEST,
    ROPE_SUFFIXES,
    FileRecord,
    GraphRecord,
    HtpCheck,
    Manifest,
    ModelRecord,
    RecipeRecord,
    Role,
    RopeRecord,
    RotationName,
    SourceRecord,
    TensorEncoding,
    TokenRecord,
    WeightRecord,
    mask_name,
    rope_inputs,
)

__all__ = [
    "COMPILED",
    "FORMAT",
    "MANIFEST",
    "Bundle",
    "Compiled",
    "CompiledBinary",
    "CompiledManifest",
    "FileRecord",
    "GraphRecord",
    "HtpCheck",
    "Manifest",
    "ModelRecord",
    "RecipeRecord",
    "Role",
    "ROPE_SUFFIXES",
    "RopeRecord",
    "RotationName",
    "SourceRecord",
    "TensorEncoding",
    "TokenRecord",
    "WeightRecord",
    "atomic_directory",
    "mask_name",
    "open_bundle",
    "open_compiled",
    "read_manifest",
    "record_files",
    "rope_inputs",
    "sha256_of",
    "write_manifest",
]
