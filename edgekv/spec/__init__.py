"""What a decoder and its KV cache are: read from `config.json` once, and used by all other packages."""

from edgekv.spec.config import CONFIG, Config, read_config, read_json
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.describe import ARCHITECTURES, CacheSpec, describe, describe_cache
from edgekv.spec.geometry import KINDS, Geometry, KeyLayout, Kind, KvDtype, KvTensor
from edgekv.spec.layers import LayeredGeometry
from edgekv.spec.rope import Rope, Rotation
from edgekv.spec.sizes import WEIGHT_DTYPES, Decoder, Weights, matrix_bytes, packed_matrix_bytes, recipe_weights
from edgekv.spec.tensors import EMBEDDING, HEAD, View, matrices, views

__all__ = [
    "ARCHITECTURES",
    "CONFIG",
    "EMBEDDING",
    "HEAD",
    "KINDS",
    "WEIGHT_DTYPES",
    "CacheSpec",
    "Config",
    "Decoder",
    "DecoderSpec",
    "Geometry",
    "KeyLayout",
    "Kind",
    "KvDtype",
    "KvTensor",
    "LayeredGeometry",
    "Rope",
    "Rotation",
    "View",
    "Weights",
    "describe",
    "describe_cache",
    "matrices",
    "matrix_bytes",
    "packed_matrix_bytes",
    "read_config",
    "read_json",
    "recipe_weights",
    "views",
]
