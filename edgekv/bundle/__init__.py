"""Bundles: self-describing folders, verified when they are opened and written atomically."""

from edgekv.bundle.atomic import atomic_directory, atomic_file, check_target
from edgekv.bundle.bundle import Bundle, open_bundle
from edgekv.bundle.compiled import COMPILED, Compiled, CompiledBinary, CompiledManifest, open_compiled
from edgekv.bundle.files import record_files
from edgekv.bundle.formats import FORMAT
from edgekv.bundle.manifest import MANIFEST, GraphFormat, HtpCheck, Manifest
from edgekv.bundle.manifest_file import read_manifest, write_manifest
from edgekv.bundle.records import (
    AdapterRecord,
    ChannelRecord,
    EmbeddingRecord,
    FileRecord,
    GenerationRecord,
    HeadsName,
    KeyScalingName,
    MatrixMethod,
    ModelRecord,
    NeuronScalingName,
    OutlierChannels,
    RecipeRecord,
    RopeRecord,
    RotationName,
    SinkRecord,
    SourceRecord,
    StoredRecord,
    TokenRecord,
    WeightRecord,
)
from edgekv.bundle.verified import FileHashes, file_hashes, force_rehash, rehashing
from edgekv.json_file import readable_json
from edgekv.spec import GraphRecord, PartRecord, Role

__all__ = [
    "COMPILED",
    "FORMAT",
    "MANIFEST",
    "AdapterRecord",
    "Bundle",
    "ChannelRecord",
    "Compiled",
    "CompiledBinary",
    "CompiledManifest",
    "EmbeddingRecord",
    "FileHashes",
    "FileRecord",
    "GenerationRecord",
    "GraphFormat",
    "GraphRecord",
    "HeadsName",
    "HtpCheck",
    "KeyScalingName",
    "Manifest",
    "MatrixMethod",
    "ModelRecord",
    "NeuronScalingName",
    "OutlierChannels",
    "PartRecord",
    "RecipeRecord",
    "Role",
    "RopeRecord",
    "RotationName",
    "SinkRecord",
    "SourceRecord",
    "StoredRecord",
    "TokenRecord",
    "WeightRecord",
    "atomic_directory",
    "atomic_file",
    "check_target",
    "file_hashes",
    "force_rehash",
    "open_bundle",
    "open_compiled",
    "read_manifest",
    "readable_json",
    "record_files",
    "rehashing",
    "write_manifest",
]
