"""Bundles: self-describing folders, verified when they are opened and written atomically."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.bundle.adapters import (
        AdapterError as AdapterError,
        ClippedMatrix as ClippedMatrix,
        LoraAdapter as LoraAdapter,
        LoraRecord as LoraRecord,
        check_lora_name as check_lora_name,
        lora_adapters as lora_adapters,
        lora_names as lora_names,
        lora_tensor as lora_tensor,
        new_lora_record as new_lora_record,
        open_lora as open_lora,
        remove_lora as remove_lora,
        write_lora as write_lora,
    )
    from edgekv.bundle.atomic import (
        atomic_directory as atomic_directory,
        check_new as check_new,
        remove_directory as remove_directory,
    )
    from edgekv.bundle.bundle import Bundle as Bundle, open_bundle as open_bundle
    from edgekv.bundle.compiled import (
        COMPILED as COMPILED,
        CompiledBinaries as CompiledBinaries,
        CompiledBinary as CompiledBinary,
        CompiledManifest as CompiledManifest,
        all_compiled as all_compiled,
        open_compiled as open_compiled,
    )
    from edgekv.bundle.files import is_plain_path as is_plain_path, record_files as record_files
    from edgekv.bundle.formats import FORMAT as FORMAT, HEADS_FILE as HEADS_FILE, GraphFormat as GraphFormat
    from edgekv.bundle.manifest import MANIFEST as MANIFEST, HtpCheck as HtpCheck, Manifest as Manifest
    from edgekv.bundle.manifest_file import read_manifest as read_manifest, write_manifest as write_manifest
    from edgekv.bundle.records import (
        AdapterRecord as AdapterRecord,
        EmbeddingQuality as EmbeddingQuality,
        FileRecord as FileRecord,
        GenerationRecord as GenerationRecord,
        HeadsName as HeadsName,
        KeyScalingName as KeyScalingName,
        MatrixMethod as MatrixMethod,
        NeuronScalingName as NeuronScalingName,
        OutlierChannels as OutlierChannels,
        QualityRecord as QualityRecord,
        RankingQuality as RankingQuality,
        RecipeRecord as RecipeRecord,
        RotationName as RotationName,
        SinkRecord as SinkRecord,
        SourceRecord as SourceRecord,
        StoredRecord as StoredRecord,
        TargetRecord as TargetRecord,
        TokenRecord as TokenRecord,
        ValueRotationName as ValueRotationName,
        WeightRecord as WeightRecord,
    )
    from edgekv.bundle.verified import (
        FileHashes as FileHashes,
        file_hashes as file_hashes,
        force_rehash as force_rehash,
        rehashing as rehashing,
    )
    from edgekv.bundle.vision import ENCODER as ENCODER, ENCODER_FILES as ENCODER_FILES, VisionRecord as VisionRecord
    from edgekv.bundle.weights import (
        BundleWeights as BundleWeights,
        EmbeddingTable as EmbeddingTable,
        Extent as Extent,
        MatrixPlace as MatrixPlace,
        TensorPlace as TensorPlace,
        WeightPlaces as WeightPlaces,
    )
    from edgekv.spec import GraphRecord as GraphRecord, PartRecord as PartRecord, Role as Role

__getattr__, __all__ = lazy(__name__, __file__)
