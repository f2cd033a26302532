"""Steps of the CPU's graphs with inputs of any integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgekv.bundle import Bundle, GraphRecord, PartRecord, open_bundle
from edgekv.graphs.source import PartSource
from edgekv.runtime.binding import Binding

Arrays = dict[str, np.ndarray[Any, Any]]


def source_of(folder: Path, file: str = "ar1_cl64.onnx") -> PartSource:
    return PartSource.of(folder, open_bundle(folder).manifest, file)


def any_step(bundle: Bundle, graph: GraphRecord, part: PartRecord | None = None) -> Arrays:
    """Inputs of every integer that their types have, of a graph or a part of it."""
    random, feeds = np.random.default_rng(0), {}
    for port in bundle.manifest.interface.graph(graph, part).inputs:
        low, high = np.iinfo(port.dtype).min, np.iinfo(port.dtype).max
        if port.dtype == "int32":  # ids and rows
            low, high = 0, graph.ar - 1
        values = random.choice([low, high], port.shape) if "mask" in port.name else None
        values = random.integers(low, high, port.shape, endpoint=True) if values is None else values
        feeds[port.name] = values.astype(port.dtype)
    return feeds


def as_built(bundle: Bundle, arrays: Arrays) -> Arrays:
    """Inputs or outputs of an exported graph as those of the built one: its keys are rows."""
    keys = ("past_key", "new_key") if bundle.manifest.key_layout == "columns" else ()
    return {name: each.swapaxes(2, 3).copy() if name.startswith(keys) else each for name, each in arrays.items()}


def outputs(binding: Binding, feeds: Arrays) -> Arrays:
    made = {port.name: np.zeros(port.shape, port.dtype) for port in binding.interface.outputs}
    for bind, arrays in ((binding.inputs, feeds), (binding.outputs, made)):
        for name, array in arrays.items():
            bind([name], array.dtype, array.shape, [array.ctypes.data])
    binding.run()
    return made
