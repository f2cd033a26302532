"""What the bytes of a bundle hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from edgekv.bundle import Bundle, Manifest
from edgekv.machine.graph_file import GRAPH_SUFFIX
from edgekv.spec import EMBEDDING, EMBEDDING_STEPS, HEAD, HEAD_TURN
from quant import WEIGHT_TYPES

_SMALL = "norms, biases and headers", "other", ""


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one kind of content.

    Attributes:
        name: what it is, such as `down_proj`.
        kind: `attention`, `mlp`, `embedding`, `head`, `scales`, `graphs`, `binaries` or `other`.
        dtype: the integer type of weights; empty for anything else.
        bytes: size.
    """

    name: str
    kind: str
    dtype: str
    bytes: int


def byte_shares(bundle: Bundle) -> list[Share]:
    """The content of a bundle's folder, largest first; all of its bytes, binaries of every chip among them."""
    bytes_of: Counter[tuple[str, str, str]] = Counter()
    places, shards = bundle.manifest.weights, Counter[str]()
    for key, matrix in places.matrices.items():
        integers, *scales = (extent.bytes for extent in matrix.extents)
        bytes_of[*_matrix(key), WEIGHT_TYPES[matrix.dtype].stored] += integers
        bytes_of["scales", "scales", ""] += sum(scales)
    for key, tensor in places.tensors.items():
        bytes_of[("scales", "scales", "") if key == EMBEDDING_STEPS else _SMALL] += tensor.extent.bytes
    for _, file, extent in places.extents():
        shards[file] += extent.bytes
    for path in sorted(entry for entry in bundle.path.rglob("*") if entry.is_file()):
        name = path.relative_to(bundle.path).as_posix()
        what = _SMALL if name in shards else (*_file(name), "")
        bytes_of[what] += path.stat().st_size - shards[name]
    shares = [Share(*what, size) for what, size in bytes_of.items()]
    return sorted(shares, key=lambda share: -share.bytes)


def matrix_types(manifest: Manifest) -> dict[str, int]:
    """Number of matrices of each integer type and method."""
    counts = Counter(f"{weight.dtype} ({weight.method})" for weight in manifest.recipe.weights)
    return dict(counts.most_common())


def _matrix(key: str) -> tuple[str, str]:
    """What a matrix is, by its name in the checkpoint, and its kind."""
    if key in (HEAD, HEAD_TURN):
        return key.removesuffix(".weight"), "head"
    if key == EMBEDDING:
        return "embedding", "embedding"
    *_, part, matrix, _ = key.split(".")
    return matrix, "attention" if part == "self_attn" else "mlp"


def _file(name: str) -> tuple[str, str]:
    """What a file is, by its path in the bundle, and its kind."""
    folder, _, inner = name.partition("/")
    if name.endswith((".onnx", GRAPH_SUFFIX)):
        return "graphs (.onnx)", "graphs"
    if folder == "compiled" and inner:
        return f"binaries for {inner.partition('/')[0]}", "binaries"
    return (f"{folder}/" if inner else name), "other"
