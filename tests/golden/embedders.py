"""What sentence-transformers writes around random checkpoints, and the embeddings that it computes.

    python tests/golden/embedders.py            write them
    python tests/golden/embedders.py --check    write the folders again and compare

Each folder is read through the product's own door too, and its embeddings are compared. Needs the extra `parity`. Run
it from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import TOLERANCE
from safetensors.numpy import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from edgekv.embed import activated, pair_tokens, pooled
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.embedders import (
    EMBEDDERS,
    GOLDEN,
    INSTRUCTION,
    PAIRS,
    PUBLISHED,
    RERANKERS,
    TEXTS,
    write_base,
    write_embedder,
    write_published_reranker,
    write_reranker_base,
)

_CARD_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_CARD_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_CARD_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_LEFT_OUT = ("tokenizer.json", "tokenizer_config.json")
_VERSIONS = ("__version__", "transformers_version")


def made(name: str, scratch: Path) -> dict[str, Any]:
    """The JSON files of a folder and its embeddings; exits if the exporter reads it otherwise."""
    form, into = EMBEDDERS[name], scratch / "saved"
    transformer = Transformer(
        str(write_base(scratch / "base", name)), model_kwargs={"dtype": torch.float32, "attn_implementation": "eager"}
    )
    transformer.tokenizer.pad_token = transformer.tokenizer.convert_ids_to_tokens(258)
    width = transformer.get_embedding_dimension()
    modules: list[Any] = [transformer, Pooling(width, form.pooling)]
    for weight in form.weights():
        outputs, inputs = weight.shape
        dense = Dense(inputs, outputs, bias=False, activation_function=None, init_weight=torch.tensor(weight))
        modules.append(dense)
    if form.normalizes:
        modules.append(Normalize())
    model = SentenceTransformer(modules=modules, prompts=form.prompts, device="cpu")
    model.save(str(into))
    vectors = np.concatenate([model.encode([text], convert_to_numpy=True) for text in TEXTS])
    compare(name, into, vectors)
    compare_names(
        name, into, write_embedder(scratch / "ours", name) if name in json.loads(GOLDEN.read_text()) else into
    )
    return {"files": read_files(into), "embeddings": [[round(float(x), 7) for x in vector] for vector in vectors]}


def reranker(name: str, scratch: Path) -> dict[str, Any]:
    """As `made`, with the scores, that with the instruction last."""
    form, into, base = RERANKERS[name], scratch / "saved", str(write_reranker_base(scratch / "base", name))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if form.tokens:
        transformer = Transformer(base, transformer_task="text-generation", model_kwargs=options)
        model = CrossEncoder(modules=[transformer, LogitScore(*form.tokens)], device="cpu")
    else:
        model = CrossEncoder(base, model_kwargs=options, device="cpu")
    model.tokenizer.pad_token = model.tokenizer.convert_ids_to_tokens(258)
    model[0].model.config.pad_token_id = 258
    scores = [float(model.predict([pair])[0]) for pair in PAIRS]
    if form.template is not None:
        scores.append(float(model.predict([PAIRS[0]], prompt=INSTRUCTION)[0]))
    model.save_pretrained(str(into))
    opened = Checkpoint.open(str(into))
    asked = [(*pair, None) for pair in PAIRS] + [(*PAIRS[0], INSTRUCTION)] * (form.template is not None)
    for (query, document, told), expected in zip(asked, scores, strict=True):
        vocab = opened.spec.vocab
        tokens, _ = pair_tokens(opened.tokenizer, opened.task, query, document, told, vocab=vocab)
        (rows,) = Reference(opened).logits([np.array(tokens)])
        if (worst := abs(activated(opened.task, float(rows[-1, 0])) - expected)) > TOLERANCE:
            sys.exit(f"{name}: scores differ by {worst:.1e}")
    compare_names(name, into, scratch / "base")
    return {"files": read_files(into), "scores": [round(score, 7) for score in scores]}


def published(scratch: Path) -> dict[str, Any]:
    """The scores as the model card of Qwen3-Reranker computes them, that with the instruction last."""
    base = write_published_reranker(scratch / "base")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(str(base), **options).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(base / "tokenizer.json"))
    model.save_pretrained(scratch / "saved")
    tokenizer.save_pretrained(scratch / "saved")
    before, behind = (tokenizer.encode(each, add_special_tokens=False) for each in (_CARD_BEFORE, _CARD_BEHIND))
    ids = [tokenizer.convert_tokens_to_ids(each) for each in ("no", "yes")]
    opened, scores = Checkpoint.open(str(scratch / "saved"), ranks=True), list[float]()
    asked = [(*pair, None) for pair in PAIRS] + [(*PAIRS[0], INSTRUCTION)]
    for query, document, told in asked:
        text = f"<Instruct>: {told or _CARD_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        tokens = [*before, *tokenizer.encode(text, add_special_tokens=False), *behind]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1, ids]
        scores.append(float(torch.log_softmax(logits, -1)[1].exp()))
        found, _ = pair_tokens(opened.tokenizer, opened.task, query, document, told, vocab=opened.spec.vocab)
        (rows,) = Reference(opened).logits([np.array(found)])
        if found != tokens or abs(activated(opened.task, float(rows[-1, 0])) - scores[-1]) > TOLERANCE:
            sys.exit(f"{PUBLISHED}: {query!r}, {document!r}: tokens or scores differ")
    compare_names(PUBLISHED, scratch / "saved", base)
    config = json.loads((scratch / "saved" / "config.json").read_text())
    config = {key: each for key, each in config.items() if key not in _VERSIONS}
    return {"files": {"config.json": config}, "scores": [round(score, 7) for score in scores]}


def read_files(folder: Path) -> dict[str, Any]:
    """The JSON files by path, without the tokenizer's and the versions of packages."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        if path.name in _LEFT_OUT:
            continue
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            content = {key: each for key, each in content.items() if key not in _VERSIONS}
        found[str(path.relative_to(folder))] = content
    return found


def compare(name: str, folder: Path, vectors: np.ndarray[Any, Any]) -> None:
    """Exit if the exporter's embeddings differ."""
    opened = Checkpoint.open(str(folder))
    assert opened.task is not None
    for text, expected in zip(TEXTS, vectors, strict=True):
        (rows,) = Reference(opened).logits([np.array(opened.encode(text, around=True))])
        found = pooled(opened.task, rows)
        if (worst := np.abs(found - expected).max() / np.ptp(expected)) > TOLERANCE:
            sys.exit(f"{name}: embeddings differ by {worst:.1e} of their range")


def compare_names(name: str, saved: Path, ours: Path) -> None:
    """Exit if the tests write other files or tensors than sentence-transformers."""
    for path in saved.rglob("*.safetensors"):
        other = ours / path.relative_to(saved)
        if not other.exists() or load_file(path).keys() != load_file(other).keys():
            sys.exit(f"{name}: the tensors of {other} differ from those that sentence-transformers writes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check, found = parser.parse_args().check, dict[str, Any]()
    for name in EMBEDDERS:
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = made(name, Path(scratch))
    for name in RERANKERS:
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = reranker(name, Path(scratch))
    with tempfile.TemporaryDirectory() as scratch:
        found[PUBLISHED] = published(Path(scratch))
    if not is_check:
        lines = (f"{json.dumps(name)}: {json.dumps(record, sort_keys=True)}" for name, record in found.items())
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    kept = json.loads(GOLDEN.read_text())
    for name in {*found, *kept}:
        one, other = found.get(name), kept.get(name)
        if one is None or other is None or one["files"] != other["files"]:
            sys.exit(f"{GOLDEN}: the files of {name} differ")
        given = "scores" if "scores" in one else "embeddings"
        if not np.allclose(one[given], other[given], atol=TOLERANCE):
            sys.exit(f"{GOLDEN}: the {given} of {name} differ")


if __name__ == "__main__":
    main()
