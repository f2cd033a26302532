"""GGUF files: configuration, tensors and tokenizer of llama.cpp's format, read without torch."""

from exporters.checkpoint.gguf.config import hugging_face_config
from exporters.checkpoint.gguf.file import GgufFile
from exporters.checkpoint.gguf.metadata import check_metadata
from exporters.checkpoint.gguf.part import is_gguf
from exporters.checkpoint.gguf.sampling import sampling_fields
from exporters.checkpoint.gguf.tensors import GgufTensor, gguf_tensors
from exporters.checkpoint.gguf.tokenizer import chat_templates, rebuild_tokenizer

__all__ = [
    "GgufFile",
    "GgufTensor",
    "chat_templates",
    "check_metadata",
    "gguf_tensors",
    "hugging_face_config",
    "is_gguf",
    "rebuild_tokenizer",
    "sampling_fields",
]
