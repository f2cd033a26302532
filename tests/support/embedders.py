"""Small embedders and rerankers in the form of sentence-transformers: what its `save` writes around a checkpoint.

`tests/golden/embedders.py` makes the files, and the embeddings of `TEXTS`, with sentence-transformers itself.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors

from tests.support.checkpoints import ARCHITECTURES, NEWER, write_checkpoint

TEMPLATE = """\
{%- set told = namespace(task="Given a query, find passages", query="", document="") -%}
{%- for m in messages -%}
{%- if m.role == "system" -%}{%- set told.task = m.content -%}
{%- elif m.role == "query" -%}{%- set told.query = m.content -%}
{%- elif m.role == "document" -%}{%- set told.document = m.content -%}{%- endif -%}
{%- endfor -%}
<|0|>Judge.
<Instruct>: {{ told.task }}
<Query>: {{ told.query }}
<Document>: {{ told.document }}<|1|>
"""
PUBLISHED = "qwen3-reranker-published"
"""Name of `write_published_reranker` in the golden file."""
PAIRS = (("hello", "world"), ("hello", "The mean of all tokens"), ("a", "b"))
INSTRUCTION = "Be brief"
TEXTS = ("hello world", "a", "The mean of all tokens, or the last one of them.")
WITHOUT_TEXT = {"embedding_gemma2", "embedding_gemma2_text"}
"""Architectures of embedders alone: transformers has no model of text with them."""
GOLDEN = Path(__file__).parent.parent / "golden" / "embedders.json"


@dataclass(frozen=True)
class EmbedderForm:
    """A checkpoint, and what runs behind it.

    Attributes:
        fields: of config.json that differ from Llama's.
        pooling: as sentence-transformers calls it.
        ends: whether the tokenizer puts a token behind each text.
        dense: outputs of dense layers without an activation function.
        normalizes: whether embeddings have the length 1.
        prompts: by task.
    """

    fields: dict[str, Any]
    pooling: str
    ends: bool = True
    dense: tuple[int, ...] = ()
    normalizes: bool = True
    prompts: dict[str, str] = field(default_factory=dict)

    def weights(self) -> list[np.ndarray[Any, Any]]:
        """Of the dense layers, `[out, in]`."""
        random, width = np.random.default_rng(7), self.fields.get("hidden_size", 64)
        found = list[np.ndarray[Any, Any]]()
        for outputs in self.dense:
            found.append((random.standard_normal((outputs, width)) / width**0.5).astype(np.float32))
            width = outputs
        return found


EMBEDDERS = {
    "qwen3-embedding": EmbedderForm(ARCHITECTURES["qwen3"], "lasttoken", prompts={"query": "Find: ", "document": ""}),
    "llama-mean": EmbedderForm(NEWER, "mean", ends=False, dense=(96, 48)),
    "embeddinggemma": EmbedderForm(
        {**ARCHITECTURES["gemma3"], "use_bidirectional_attention": True, "sliding_window": 10},
        "mean",
        dense=(96, 64),
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
    ),
    "embeddinggemma2": EmbedderForm(
        {
            "model_type": "embedding_gemma2_text",
            "hidden_act": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "per_layer_config": {"2": {"head_dim": 32, "num_key_value_heads": 1}},
            "sliding_window": 5,
            "hidden_size_per_layer_input": 8,
            "embedding_dim": 48,
            "rope_theta": None,
            "tie_word_embeddings": False,
        },
        "mean",
        ends=False,
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
    ),
    "qwen2-plain": EmbedderForm(ARCHITECTURES["qwen2"], "mean", normalizes=False),
}


@dataclass(frozen=True)
class RerankerForm:
    """A checkpoint that judges documents.

    Attributes:
        fields: of config.json that differ from Llama's.
        tokens: ids whose logits are the score; none if there is a head of one label.
        template: of the pair; None if the tokenizer joins both.
    """

    fields: dict[str, Any]
    tokens: tuple[int, ...] = ()
    template: str | None = TEMPLATE


RERANKERS = {
    "qwen3-reranker": RerankerForm(ARCHITECTURES["qwen3"], (121, 110)),
    "one-token": RerankerForm(ARCHITECTURES["qwen2"], (121,)),
    "classifier": RerankerForm(ARCHITECTURES["qwen3"]),
    "pairs": RerankerForm(NEWER, template=None),
}


def write_reranker(folder: Path, name: str, **changes: Any) -> Path:
    """A random reranker, as sentence-transformers writes it; arguments as of `write_embedder`."""
    write_reranker_base(folder, name)
    with_files(folder, json.loads(GOLDEN.read_text())[name]["files"], **changes)
    return folder


def write_reranker_base(folder: Path, name: str) -> Path:
    """The checkpoint that sentence-transformers reads."""
    form = RERANKERS[name]
    write_checkpoint(folder, form.fields, gain=1.0, dtype=np.float32)
    if form.template is not None:
        (folder / "chat_template.jinja").write_text(form.template)
    if not form.tokens:
        tensors = {key: each for key, each in load_file(folder / "model.safetensors").items() if "lm_head" not in key}
        tensors["score.weight"] = np.random.default_rng(3).standard_normal((1, 64)).astype(np.float32) / 8
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        file = folder / "config.json"
        named = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        if form.template is None:
            named["architectures"] = ["LlamaForSequenceClassification"]
        file.write_text(json.dumps(json.loads(file.read_text()) | named))
    return folder


def write_published_reranker(folder: Path) -> Path:
    """A model of text with the tokens of Qwen3-Reranker's prompt and answer, as transformers writes it."""
    write_checkpoint(folder, ARCHITECTURES["qwen3"], {"max_position_embeddings": 1024}, gain=1.0, dtype=np.float32)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    tokenizer.save(str(file))
    return folder


def write_base(folder: Path, name: str) -> Path:
    """The checkpoint that sentence-transformers reads."""
    form = EMBEDDERS[name]
    write_checkpoint(folder, form.fields, gain=1.0, dtype=np.float32)
    if "embedding_dim" in form.fields:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {key.replace("lm_head", "embedding_projection"): each for key, each in tensors.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    # Else transformers builds Gemma's own tokenizer, which wants other tokens.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if form.ends:
        end_texts(folder)
    return folder


def end_texts(folder: Path) -> None:
    """Let the tokenizer put the token 257 behind each text."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    token = tokenizer.id_to_token(257)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {token}", special_tokens=[(token, 257)])
    tokenizer.save(str(file))


def write_embedder(folder: Path, name: str, **changes: Any) -> Path:
    """A random embedder, as sentence-transformers writes it.

    Args:
        folder: to be made.
        name: of `EMBEDDERS`.
        changes: fields that differ, by the file that has them, such as `1_Pooling`; None removes one.
    """
    write_base(folder, name)
    with_modules(folder, json.loads(GOLDEN.read_text())[name]["files"], **changes)
    for number, weight in enumerate(EMBEDDERS[name].weights()):
        save_file({"linear.weight": weight}, folder / f"{number + 2}_Dense" / "model.safetensors")
    return folder


def with_modules(folder: Path, files: dict[str, Any], **changes: Any) -> Path:
    """Make an embedder of a checkpoint: a base model's names, and the files of sentence-transformers."""
    tensors = load_file(folder / "model.safetensors")
    base = {key.removeprefix("model."): each for key, each in tensors.items() if key != "lm_head.weight"}
    save_file(base, folder / "model.safetensors", {"format": "pt"})
    return with_files(folder, files, **changes)


def with_files(folder: Path, files: dict[str, Any], **changes: Any) -> Path:
    """Write JSON files, with some fields changed."""
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(exist_ok=True)
        for changed, fields in changes.items():
            if changed in path:
                content = {key: each for key, each in (content | fields).items() if each is not None}
        place.write_text(json.dumps(content))
    return folder


def embedder_of(model: Path, folder: Path, name: str = "qwen3-embedding") -> Path:
    """A trained model of text as an embedder, whose hidden states are those of a real one."""
    shutil.copytree(model, folder)
    files = json.loads(GOLDEN.read_text())[name]["files"]
    return with_modules(folder, {path: each for path, each in files.items() if path != "config.json"})
