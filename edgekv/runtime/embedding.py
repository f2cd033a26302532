"""The embedding table of bundles whose embeddings the host looks up."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.errors import BundleError
from edgekv.system import MIB, open_regular

_HEADER_BYTES = 100 * MIB  # the limit of the format


def open_table(bundle: Bundle) -> NDArray[Any] | None:
    """The table `[V, hidden]`, uint16, memory-mapped: a step reads only the pages of its own rows.

    None if the graphs look up embeddings.

    Raises:
        BundleError: the file does not contain the table that the manifest describes.
    """
    record, model = bundle.manifest.embedding, bundle.manifest.model
    if record is None:
        return None
    path, shape = bundle.path / record.file, (model.vocab, model.hidden)
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            entry = json.loads(file.read(length))[record.tensor]
        found, begin = (entry["dtype"], *entry["shape"]), int(entry["data_offsets"][0])
        if found != ("U16", *shape):
            raise ValueError(f"{found[0]} {list(found[1:])}")
        return np.memmap(path, np.uint16, "r", 8 + length + begin, shape)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(
            f"{path}: {record.tensor}",
            got=error,
            expected=f"U16 {list(shape)}",
            fix="Export the bundle again with this edgekv.",
        ) from None
