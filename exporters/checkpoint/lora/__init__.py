"""LoRA adapters, as peft saves them, merged into the tensors of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from exporters.checkpoint.lora.adapter import Adapter as Adapter, merge as merge
    from exporters.checkpoint.lora.choice import AdapterChoice as AdapterChoice
    from exporters.checkpoint.lora.merged import MergedTensor as MergedTensor

__getattr__, __all__ = lazy(__name__, __file__)
