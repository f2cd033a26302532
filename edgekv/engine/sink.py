"""Reads the sink of a bundle."""

from __future__ import annotations

import numpy as np

from edgekv.bundle import Bundle, Manifest
from edgekv.errors import BundleError
from edgekv.kv import Sink
from edgekv.machine.system import read_file
from edgekv.machine.tensor_file import decode_tensors
from edgekv.spec import LOGITS
from quant import DTYPES


def read_sink(bundle: Bundle, as_run: Manifest | None = None) -> Sink | None:
    """The sink of a bundle; None if its graphs compute every token.

    Args:
        bundle: to read from.
        as_run: its manifest as an engine runs it, whose cache may have another zero point; None for the bundle's.

    Raises:
        BundleError: its file is broken, or does not fit the manifest.
    """
    manifest, record = bundle.manifest, bundle.manifest.sink
    if record is None:
        return None
    path, count = bundle.path / record.file, len(record.tokens)
    groups = manifest.cache_geometry.groups()
    shapes = {tensor.past: (count, group.width) for group in groups for tensor in group.names()}
    shapes[LOGITS] = (count, manifest.model.result_width)
    try:
        held = dict(decode_tensors(read_file(path, manifest.files[record.file].bytes)).arrays)
        for name, shape in shapes.items():
            form, expected = (held[name].dtype, held[name].shape), (DTYPES[manifest.encodings[name].dtype], shape)
            if form != expected:
                raise ValueError(f"{name}: {form[0]} {list(form[1])}, not {expected[0]} {list(shape)}")
    except (OSError, KeyError, ValueError) as error:
        raise BundleError(
            str(path), got=error, expected="keys, values and logits of the sink", fix="Export the bundle again."
        ) from None
    logits = held.pop(LOGITS)
    if as_run is not None and as_run.kv_dtype != manifest.kv_dtype:
        for name, rows in held.items():
            old, new = manifest.encodings[name], as_run.encodings[name]
            held[name] = (rows.astype(np.int32) - old.zero_point + new.zero_point).astype(DTYPES[new.dtype])
    return Sink(tuple(record.tokens), held, np.ascontiguousarray(logits))
