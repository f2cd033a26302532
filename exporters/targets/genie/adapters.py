"""The LoRA adapters of a bundle as files that Genie reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgekv.bundle import Bundle, lora_adapters
from edgekv.engine import LoraChoice
from edgekv.engine.adapters import Adapters
from exporters.targets.genie.folder import GenieAdapter
from exporters.targets.genie.state import STATE, write_state

_FOLDER = "lora"
_ABOVE = 0.25  # of a step


def reads_adapters(bundle: Bundle) -> bool:
    """Whether Genie writes the inputs for adapters. It fills those that it does not know with zeros."""
    return bundle.manifest.lora is not None and bool(lora_adapters(bundle))


def write_adapters(bundle: Bundle, folder: Path) -> list[GenieAdapter]:
    """Write the adapters of a bundle, each into folders of its own; none are written for a bundle without slots.

    `lora/NAME/TENSOR.raw` has the float32 values of an input. Genie divides them by the scale, adds the zero point and
    truncates, so each is a quarter of a step above its integer, which rounding would find too. `sink-NAME` has the
    state that conversations with the adapter begin with.
    """
    if not reads_adapters(bundle):
        return []
    opener, written = Adapters(bundle), []
    for adapter in lora_adapters(bundle):
        name = adapter.record.name
        bound, path = opener.open([LoraChoice(name)]), Path(_FOLDER, name)
        (folder / path).mkdir(parents=True)
        for tensor, values, scale in bound.memory.floats():
            (values + np.float32(_ABOVE * scale)).tofile(folder / path / f"{tensor}.raw")
        state = None
        if bound.sink is not None:
            state = f"{STATE}-{name}"
            write_state(folder / state, bundle.manifest, bound.sink)
        written.append(GenieAdapter(name=name, path=path.as_posix(), state=state))
    return written
