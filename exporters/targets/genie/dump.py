"""What Genie computed in its first step, from its dump, as a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import EngineError
from edgekv.spec import MASK
from exporters.inspect.trace import Trace
from exporters.quantize.reference import Floats
from exporters.targets.genie.ports import GeniePort
from exporters.targets.genie.proof import read_specs
from quant import DTYPES

_STEP = "000"


def read_dump(folder: Path) -> Trace:
    """Keys, values and logits of the prompt's first tokens: those of Genie's first step, `[T, width]`.

    Names are those of `edgekv trace`.

    Args:
        folder: what Genie wrote with `dump-tensors` and `dump-specs`.

    Raises:
        EngineError: there is no first step, or a file has another size than its specification.
    """
    trace: dict[str, Floats] = {}
    steps = {path.parent.name: path.parent for path in sorted(folder.rglob(f"{_STEP}_out_*"))}
    specs = {name: ports for name, ports in sorted(read_specs(folder).items()) if name in steps}
    used = 0
    for name, ports in specs.items():
        if name.split("_")[0] != next(iter(specs)).split("_")[0]:
            break  # later steps, of single tokens
        for port in ports.inputs:
            if port.name == MASK:  # a part without layers has the rows of the part before
                used = int(np.count_nonzero(_integers(steps[name], "in", port)[0, 0].any(axis=1)))
        for port in ports.outputs:
            if port.encoding is None:
                continue
            values = port.encoding.dequantize(_integers(steps[name], "out", port))
            rows = values.reshape(-1, values.shape[-1])
            if port.name.startswith("past_key"):
                rows = values.reshape(values.shape[-2:]).T
            trace[port.name.removesuffix("_out") + ("_in" if port.name.startswith("past_") else "")] = rows[:used]
    if not trace:
        raise EngineError(str(folder), got="no dump of a first step", expected="Genie's dump", fix="Run again.")
    return trace


def _integers(folder: Path, side: str, port: GeniePort) -> NDArray[np.generic]:
    assert port.encoding is not None, "of integers with an encoding"
    path = folder / f"{_STEP}_{side}_{port.name}"
    content = path.read_bytes()
    dtype = np.dtype(DTYPES[port.encoding.dtype])
    if len(content) != np.prod(port.shape) * dtype.itemsize:
        found, wanted = f"{len(content)} bytes", f"{list(port.shape)} of {port.encoding.dtype}"
        raise EngineError(str(path), got=found, expected=wanted, fix="Run again.")
    return np.frombuffer(content, dtype).reshape(port.shape)
