"""LoRA adapters, as peft saves them, merged into the tensors of a checkpoint."""

from exporters.checkpoint.lora.adapter import Adapter, merge
from exporters.checkpoint.lora.choice import AdapterChoice
from exporters.checkpoint.lora.merged import MergedTensor

__all__ = ["Adapter", "AdapterChoice", "MergedTensor", "merge"]
