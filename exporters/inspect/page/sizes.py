"""What the bytes of a bundle hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgekv.bundle import Bundle, Manifest
from edgekv.spec import EMBEDDING, HEAD

_TENSOR = re.compile(r"^model\.layers\.\d+\.(?P<name>.+?)\.weight(?:\.h\d+)?\.(?P<stored>\w+)$")
_HEADER = msgspec.json.Decoder(dict[str, dict[str, object]])


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one kind of content.

    Attributes:
        name: what it is, such as `down_proj`.
        kind: `attention`, `mlp`, `embedding`, `head`, `scales`, `graphs` or `other`.
        dtype: the integer type of weights; empty for anything else.
        bytes: size.
    """

    name: str
    kind: str
    dtype: str
    bytes: int


def byte_shares(bundle: Bundle) -> list[Share]:
    """The content of a bundle's files, largest first; all of their bytes, and those of the manifest."""
    manifest = bundle.manifest
    found: Counter[tuple[str, str, str]] = Counter()
    for name, record in manifest.files.items():
        if name.endswith(".safetensors") and name.startswith("weights-"):
            for key, size in _tensors(bundle.path / name, record.bytes):
                found[_weight(key)] += size
        else:
            found[_file(name), "graphs" if name.endswith(".onnx") else "other", ""] += record.bytes
    found["manifest.json", "other", ""] = (bundle.path / "manifest.json").stat().st_size
    shares = [Share(*what, size) for what, size in found.items()]
    return sorted(shares, key=lambda share: -share.bytes)


def matrix_types(manifest: Manifest) -> dict[str, int]:
    """Number of matrices of each integer type and method."""
    counts = Counter(f"{each.dtype} ({each.method})" for each in manifest.recipe.weights)
    return dict(counts.most_common())


def _tensors(path: Path, size_bytes: int) -> Iterator[tuple[str, int]]:
    """Name and size of each tensor of a safetensors file, and of its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = _HEADER.decode(file.read(length))
    rest = size_bytes
    for name, record in header.items():
        if name == "__metadata__":
            continue
        start, stop = msgspec.convert(record["data_offsets"], tuple[int, int])
        rest -= stop - start
        yield name, stop - start
    yield "", rest


def _weight(key: str) -> tuple[str, str, str]:
    name, _, stored = key.rpartition(".")
    if stored in ("scale", "block_scale"):
        return "scales", "scales", ""
    if name == EMBEDDING:
        return "embedding", "embedding", stored
    if name == HEAD:
        return "lm_head", "head", stored
    match = _TENSOR.match(key)
    if match is None or not match["name"].endswith("_proj"):
        return "norms, biases and headers", "other", ""
    part, _, matrix = match["name"].rpartition(".")
    return matrix, "attention" if part == "self_attn" else "mlp", match["stored"]


def _file(name: str) -> str:
    folder = name.partition("/")[0]
    if name.endswith(".onnx"):
        return "graphs (.onnx)"
    return f"{folder}/" if folder != name else name
