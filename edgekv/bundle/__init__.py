"""Bundles: self-describing folders, verified when they are opened and written atomically."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.json_file import readable_json
from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.bundle.adapters import (
        AdapterError,
        ClippedMatrix,
        LoraAdapter,
        LoraRecord,
        check_lora_name,
        lora_adapters,
        lora_names,
        lora_tensor,
        new_lora_record,
        open_lora,
        remove_lora,
        write_lora,
    )
    from edgekv.bundle.atomic import atomic_directory, check_output, remove_directory
    from edgekv.bundle.bundle import Bundle, open_bundle
    from edgekv.bundle.compiled import COMPILED, Compiled, CompiledBinary, CompiledManifest, all_compiled, open_compiled
    from edgekv.bundle.files import is_plain_path, record_files
    from edgekv.bundle.formats import FORMAT, HEADS_FILE, GraphFormat
    from edgekv.bundle.manifest import MANIFEST, HtpCheck, Manifest
    from edgekv.bundle.manifest_file import read_manifest, write_manifest
    from edgekv.bundle.records import (
        AdapterRecord,
        FileRecord,
        GenerationRecord,
        HeadsName,
        KeyScalingName,
        MatrixMethod,
        NeuronScalingName,
        OutlierChannels,
        QualityRecord,
        RecipeRecord,
        RotationName,
        SinkRecord,
        SourceRecord,
        StoredRecord,
        TargetRecord,
        TokenRecord,
        ValueRotationName,
        WeightRecord,
    )
    from edgekv.bundle.verified import FileHashes, file_hashes, force_rehash, rehashing
    from edgekv.bundle.vision import ENCODER, ENCODER_FILES, VisionRecord
    from edgekv.bundle.weights import BundleWeights, EmbeddingTable, Extent, MatrixPlace, TensorPlace, WeightPlaces
    from edgekv.spec import GraphRecord, PartRecord, Role

__all__ = [
    "COMPILED",
    "FORMAT",
    "HEADS_FILE",
    "MANIFEST",
    "AdapterError",
    "AdapterRecord",
    "Bundle",
    "BundleWeights",
    "EmbeddingTable",
    "Extent",
    "MatrixPlace",
    "TensorPlace",
    "WeightPlaces",
    "ClippedMatrix",
    "Compiled",
    "CompiledBinary",
    "CompiledManifest",
    "FileHashes",
    "FileRecord",
    "GenerationRecord",
    "GraphFormat",
    "GraphRecord",
    "HeadsName",
    "HtpCheck",
    "KeyScalingName",
    "LoraAdapter",
    "LoraRecord",
    "Manifest",
    "MatrixMethod",
    "NeuronScalingName",
    "OutlierChannels",
    "PartRecord",
    "QualityRecord",
    "RecipeRecord",
    "Role",
    "RotationName",
    "SinkRecord",
    "SourceRecord",
    "TargetRecord",
    "StoredRecord",
    "TokenRecord",
    "ValueRotationName",
    "WeightRecord",
    "all_compiled",
    "atomic_directory",
    "check_lora_name",
    "check_output",
    "file_hashes",
    "force_rehash",
    "is_plain_path",
    "lora_adapters",
    "lora_names",
    "lora_tensor",
    "new_lora_record",
    "open_bundle",
    "open_compiled",
    "open_lora",
    "ENCODER",
    "ENCODER_FILES",
    "VisionRecord",
    "read_manifest",
    "readable_json",
    "record_files",
    "rehashing",
    "remove_directory",
    "remove_lora",
    "write_lora",
    "write_manifest",
]

__getattr__ = lazy(
    __name__,
    {
        "adapters": "AdapterError ClippedMatrix LoraAdapter LoraRecord check_lora_name lora_adapters lora_names "
        "lora_tensor new_lora_record open_lora remove_lora write_lora",
        "atomic": "atomic_directory check_output remove_directory",
        "bundle": "Bundle open_bundle",
        "compiled": "COMPILED Compiled CompiledBinary CompiledManifest all_compiled open_compiled",
        "files": "is_plain_path record_files",
        "formats": "FORMAT HEADS_FILE GraphFormat",
        "manifest": "MANIFEST HtpCheck Manifest GraphRecord PartRecord Role",
        "vision": "ENCODER ENCODER_FILES VisionRecord",
        "manifest_file": "read_manifest write_manifest",
        "records": "AdapterRecord FileRecord GenerationRecord HeadsName KeyScalingName MatrixMethod "
        "NeuronScalingName OutlierChannels QualityRecord RecipeRecord RotationName SinkRecord "
        "SourceRecord StoredRecord TargetRecord TokenRecord ValueRotationName WeightRecord",
        "verified": "FileHashes file_hashes force_rehash rehashing",
        "weights": "BundleWeights EmbeddingTable Extent MatrixPlace TensorPlace WeightPlaces",
    },
)
