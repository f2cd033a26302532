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
    found: Counter[tuple[str, str, str]] = Counter()
    for path in sorted(each for each in bundle.path.rglob("*") if each.is_file()):
        name = path.relative_to(bundle.path).as_posix()
        if path.match("weights-*.safetensors") and path.parent == bundle.path:
            for key, size in _tensors(path):
                found[_weight(key)] += size
        else:
            found[(*_file(name), "")] += path.stat().st_size
    shares = [Share(*what, size) for what, size in found.items()]
    return sorted(shares, key=lambda share: -share.bytes)


def matrix_types(manifest: Manifest) -> dict[str, int]:
    """Number of matrices of each integer type and method."""
    counts = Counter(f"{each.dtype} ({each.method})" for each in manifest.recipe.weights)
    return dict(counts.most_common())


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Name and size of each tensor of a safetensors file, and of its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = _HEADER.decode(file.read(length))
    rest = path.stat().st_size
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


def _file(name: str) -> tuple[str, str]:
    """What a file is, by its path in the bundle, and its kind."""
    folder, _, inner = name.partition("/")
    if name.endswith(".onnx"):
        return "graphs (.onnx)", "graphs"
    if folder == "compiled" and inner:
        return f"binaries for {inner.partition('/')[0]}", "binaries"
    return (f"{folder}/" if inner else name), "other"
