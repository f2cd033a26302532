"""Files of ONNX graphs. That of a graph which no device compiles is compressed: its name ends with .gz."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from edgekv.errors import BundleError

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""The setting of a session that names the folder of the weights of a graph that is given as content."""

_LONGEST = 2**31  # bytes: the limit of a protobuf


def graph_content(path: Path) -> bytes:
    """The ONNX model in a file, without the weights that lie beside it.

    Raises:
        BundleError: the file is damaged.
    """
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read(_LONGEST)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        fix = "Export the bundle again."
        raise BundleError(f"graph: {path.name}", got=str(error), expected="a compressed ONNX file", fix=fix) from None


def loadable(path: Path) -> str | bytes:
    """What the runtime makes a session of: the path, or the content of a compressed file; its weights are beside it."""
    return graph_content(path) if path.suffix == ".gz" else str(path)


def write_graph(content: bytes, path: Path) -> None:
    """Write a serialized ONNX model, compressed if the name says so; the same bytes each time."""
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
