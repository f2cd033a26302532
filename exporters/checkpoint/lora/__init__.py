"""LoRA adapters, as peft saves them, merged into the tensors of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from exporters.checkpoint.lora.adapter import Adapter, merge
    from exporters.checkpoint.lora.choice import AdapterChoice
    from exporters.checkpoint.lora.merged import MergedTensor

__all__ = ["Adapter", "AdapterChoice", "MergedTensor", "merge"]

__getattr__ = lazy(
    __name__,
    {
        "adapter": "Adapter merge",
        "choice": "AdapterChoice",
        "merged": "MergedTensor",
    },
)
