"""Bundles: self-describing folders, verified when they are opened and written atomically."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.bundle.adapters import AdapterError as AdapterError
    from edgekv.bundle.adapters import ClippedMatrix as ClippedMatrix
    from edgekv.bundle.adapters import LoraAdapter as LoraAdapter
    from edgekv.bundle.adapters import LoraRecord as LoraRecord
    from edgekv.bundle.adapters import check_lora_name as check_lora_name
    from edgekv.bundle.adapters import lora_adapters as lora_adapters
    from edgekv.bundle.adapters import lora_names as lora_names
    from edgekv.bundle.adapters import lora_tensor as lora_tensor
    from edgekv.bundle.adapters import new_lora_record as new_lora_record
    from edgekv.bundle.adapters import open_lora as open_lora
    from edgekv.bundle.adapters import remove_lora as remove_lora
    from edgekv.bundle.adapters import write_lora as write_lora
    from edgekv.bundle.atomic import atomic_directory as atomic_directory
    from edgekv.bundle.atomic import check_output as check_output
    from edgekv.bundle.atomic import remove_directory as remove_directory
    from edgekv.bundle.bundle import Bundle as Bundle
    from edgekv.bundle.bundle import open_bundle as open_bundle
    from edgekv.bundle.compiled import COMPILED as COMPILED
    from edgekv.bundle.compiled import Compiled as Compiled
    from edgekv.bundle.compiled import CompiledBinary as CompiledBinary
    from edgekv.bundle.compiled import CompiledManifest as CompiledManifest
    from edgekv.bundle.compiled import all_compiled as all_compiled
    from edgekv.bundle.compiled import open_compiled as open_compiled
    from edgekv.bundle.files import is_plain_path as is_plain_path
    from edgekv.bundle.files import record_files as record_files
    from edgekv.bundle.formats import FORMAT as FORMAT
    from edgekv.bundle.formats import HEADS_FILE as HEADS_FILE
    from edgekv.bundle.formats import GraphFormat as GraphFormat
    from edgekv.bundle.manifest import MANIFEST as MANIFEST
    from edgekv.bundle.manifest import HtpCheck as HtpCheck
    from edgekv.bundle.manifest import Manifest as Manifest
    from edgekv.bundle.manifest_file import read_manifest as read_manifest
    from edgekv.bundle.manifest_file import write_manifest as write_manifest
    from edgekv.bundle.records import AdapterRecord as AdapterRecord
    from edgekv.bundle.records import FileRecord as FileRecord
    from edgekv.bundle.records import GenerationRecord as GenerationRecord
    from edgekv.bundle.records import HeadsName as HeadsName
    from edgekv.bundle.records import KeyScalingName as KeyScalingName
    from edgekv.bundle.records import MatrixMethod as MatrixMethod
    from edgekv.bundle.records import NeuronScalingName as NeuronScalingName
    from edgekv.bundle.records import OutlierChannels as OutlierChannels
    from edgekv.bundle.records import QualityRecord as QualityRecord
    from edgekv.bundle.records import RecipeRecord as RecipeRecord
    from edgekv.bundle.records import RotationName as RotationName
    from edgekv.bundle.records import SinkRecord as SinkRecord
    from edgekv.bundle.records import SourceRecord as SourceRecord
    from edgekv.bundle.records import StoredRecord as StoredRecord
    from edgekv.bundle.records import TargetRecord as TargetRecord
    from edgekv.bundle.records import TokenRecord as TokenRecord
    from edgekv.bundle.records import ValueRotationName as ValueRotationName
    from edgekv.bundle.records import WeightRecord as WeightRecord
    from edgekv.bundle.verified import FileHashes as FileHashes
    from edgekv.bundle.verified import file_hashes as file_hashes
    from edgekv.bundle.verified import force_rehash as force_rehash
    from edgekv.bundle.verified import rehashing as rehashing
    from edgekv.bundle.vision import ENCODER as ENCODER
    from edgekv.bundle.vision import ENCODER_FILES as ENCODER_FILES
    from edgekv.bundle.vision import VisionRecord as VisionRecord
    from edgekv.bundle.weights import BundleWeights as BundleWeights
    from edgekv.bundle.weights import EmbeddingTable as EmbeddingTable
    from edgekv.bundle.weights import Extent as Extent
    from edgekv.bundle.weights import MatrixPlace as MatrixPlace
    from edgekv.bundle.weights import TensorPlace as TensorPlace
    from edgekv.bundle.weights import WeightPlaces as WeightPlaces
    from edgekv.spec import GraphRecord as GraphRecord
    from edgekv.spec import PartRecord as PartRecord
    from edgekv.spec import Role as Role

__getattr__, __all__ = lazy(__name__, __file__)
