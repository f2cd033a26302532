"""Decoders, KV caches and graph interfaces, described once and used by all other packages."""

from edgekv.spec.config import CONFIG, Config, read_config, read_json
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.describe import ARCHITECTURES, CacheSpec, describe, describe_cache
from edgekv.spec.folders import FolderKind, identify
from edgekv.spec.geometry import KINDS, Geometry, KeyLayout, Kind, KvDtype, KvTensor
from edgekv.spec.graph import (
    LOGITS_INDEX,
    MASK,
    ROPE_SUFFIXES,
    STEP_KINDS,
    DecoderInterface,
    GraphInterface,
    Port,
    PortKind,
    RotaryInputs,
    mask_name,
    rope_inputs,
)
from edgekv.spec.layers import LayeredGeometry
from edgekv.spec.parts import EMBEDDINGS, IDS, LOGITS, GraphRecord, PartRecord, Role, hidden_name
from edgekv.spec.results import (
    RULES,
    UNOBSERVED,
    EncodingTypes,
    Result,
    ResultKind,
    mask_depth,
    mask_encoding,
    rotary_encoding,
)
from edgekv.spec.rope import Rope, Rotation
from edgekv.spec.sizes import WEIGHT_DTYPES, Decoder, Weights, recipe_weights
from edgekv.spec.tensors import EMBEDDING, HEAD, View, matrices, text_tensor, views

__all__ = [
    "ARCHITECTURES",
    "CONFIG",
    "EMBEDDING",
    "EMBEDDINGS",
    "HEAD",
    "IDS",
    "KINDS",
    "LOGITS",
    "LOGITS_INDEX",
    "MASK",
    "ROPE_SUFFIXES",
    "RULES",
    "STEP_KINDS",
    "UNOBSERVED",
    "WEIGHT_DTYPES",
    "CacheSpec",
    "Config",
    "Decoder",
    "DecoderInterface",
    "DecoderSpec",
    "EncodingTypes",
    "FolderKind",
    "Geometry",
    "GraphInterface",
    "GraphRecord",
    "KeyLayout",
    "Kind",
    "KvDtype",
    "KvTensor",
    "LayeredGeometry",
    "PartRecord",
    "Port",
    "PortKind",
    "Result",
    "ResultKind",
    "Role",
    "Rope",
    "RotaryInputs",
    "Rotation",
    "View",
    "Weights",
    "describe",
    "describe_cache",
    "hidden_name",
    "mask_depth",
    "mask_encoding",
    "mask_name",
    "identify",
    "matrices",
    "read_config",
    "read_json",
    "recipe_weights",
    "rope_inputs",
    "text_tensor",
    "rotary_encoding",
    "views",
]
