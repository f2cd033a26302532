"""GGUF files: configuration, tensors and tokenizer of llama.cpp's format, read without torch."""

from exporters.checkpoint.gguf.config import hugging_face_config as hugging_face_config
from exporters.checkpoint.gguf.file import GgufFile as GgufFile
from exporters.checkpoint.gguf.metadata import check_metadata as check_metadata
from exporters.checkpoint.gguf.part import is_gguf as is_gguf
from exporters.checkpoint.gguf.sampling import sampling_fields as sampling_fields
from exporters.checkpoint.gguf.tensors import GgufTensor as GgufTensor, gguf_tensors as gguf_tensors
from exporters.checkpoint.gguf.tokenizer import chat_templates as chat_templates, rebuild_tokenizer as rebuild_tokenizer
