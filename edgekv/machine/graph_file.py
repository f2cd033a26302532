"""Files of ONNX graphs. A bundle's are compressed: a fifth to a tenth is left of names that repeat in each layer."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from edgekv.errors import BundleError

GRAPH_SUFFIX = ".onnx.gz"
"""Of the graphs of a bundle."""

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""The setting of a session that names the folder of a graph's weights, where that is not the graph's own."""

_COMPRESSED = ".gz"
_PLAIN_SUFFIX = ".onnx"
_LONGEST = 2**31  # bytes: the limit of a protobuf


def graph_content(path: Path) -> bytes:
    """The ONNX model in a file, without the weights that lie beside it.

    Raises:
        BundleError: the file is damaged.
    """
    if not is_compressed(path):
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read(_LONGEST)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        fix = "Export the bundle again."
        raise BundleError(f"graph: {path.name}", got=str(error), expected="a compressed ONNX file", fix=fix) from None


def loadable(path: Path) -> str | bytes:
    """What the runtime makes a session of: the path, or the content of a compressed file; its weights are beside it."""
    return graph_content(path) if is_compressed(path) else str(path)


def plain_name(name: str) -> str:
    """The name of a graph's file that is not compressed."""
    return name.removesuffix(_COMPRESSED)


def graph_name(path: Path) -> str:
    """A graph's name, by its file."""
    return plain_name(path.name).removesuffix(_PLAIN_SUFFIX)


def is_compressed(path: Path) -> bool:
    """Whether a graph's file is."""
    return path.suffix == _COMPRESSED


def write_graph(content: bytes, path: Path) -> None:
    """Write a serialized ONNX model, compressed if the name says so; the same bytes each time."""
    if is_compressed(path):
        compressed = io.BytesIO()
        # gzip.compress writes the operating system into the header.
        with gzip.GzipFile("", "wb", fileobj=compressed, mtime=0) as file:
            file.write(content)
        content = compressed.getvalue()
    path.write_bytes(content)
