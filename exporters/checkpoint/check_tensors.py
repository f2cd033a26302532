"""Which tensors a checkpoint must have, and which it may have besides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from edgekv.errors import CheckpointError
from edgekv.spec import EMBEDDING, HEAD, XIELU_BETA, DecoderSpec, View, stored_name
from exporters.checkpoint.stored import CheckpointTensor, same_numbers

_RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # present in older checkpoints
_OF_XIELU = re.compile(r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)")
_CONSTANTS = {"beta": (XIELU_BETA, XIELU_BETA), "eps": (-1e-5, 1e-5)}
"""Bounds of what files store beside the two numbers of xIELU: x below `eps` is bent, which no logit shows."""
_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight")


def renamed(tensors: Mapping[str, CheckpointTensor], name: Callable[[str], str | None]) -> dict[str, CheckpointTensor]:
    """The tensors under other names.

    Args:
        tensors: by the names in the files.
        name: gives the new name, or None for a tensor to leave out.

    Raises:
        CheckpointError: two have the same name then.
    """
    renamed: dict[str, CheckpointTensor] = {}
    written: dict[str, str] = {}
    for key, stored in tensors.items():
        if (new := name(key)) is None:
            continue
        if new in renamed:
            raise CheckpointError(
                f"weights: {key}",
                got=f"it beside {written[new]}",
                expected="one of both, which mean the same tensor",
                fix="Fetch the checkpoint again, into an empty folder.",
            )
        renamed[new], written[new] = stored, key
    return renamed


def without_zero_biases(
    tensors: Mapping[str, CheckpointTensor], read_views: Mapping[str, View]
) -> dict[str, CheckpointTensor]:
    """Without the biases of zeros that some programs add to projections that have none."""
    extra = {key for key in tensors if key.endswith(".bias")} - {view.key for view in read_views.values()}
    extra = {key for key in extra if len(shape := tensors[key].shape) == 1 and shape[0] and not tensors[key].largest()}
    return {key: stored for key, stored in tensors.items() if key not in extra}


_OTHER_HEADS = {
    "score.": "a model that classifies texts, such as a reranker or a reward model",
    "classifier.": "a model that classifies texts or tokens",
    "qa_outputs.": "a model that marks answers in texts",
    "v_head.": "a model that values texts",
}


def check_purpose(names: Iterable[str]) -> None:
    """Check that tensors are not those of a model that gives something else than text.

    Raises:
        CheckpointError: they are, by their names.
    """
    for key in names:
        for head, kind in _OTHER_HEADS.items():
            if key.startswith(head):
                raise CheckpointError(
                    f"weights: {key}",
                    got=f"the head of {kind}",
                    expected=f"a model that writes text, whose head is {HEAD}",
                    fix="It cannot be exported: take the checkpoint of the language model.",
                )
        if key == EMBEDDING.removeprefix("model."):
            raise CheckpointError(
                f"weights: {key}",
                got="a base model without a head: its names have no `model.`, as those of models of embeddings",
                expected=f"a model that writes text, with {EMBEDDING}, or a modules.json of sentence-transformers",
                fix="Fetch all files of an embedder. Without modules.json, take the checkpoint of the language model.",
            )


def _check_constants(stored_tensors: Mapping[str, CheckpointTensor], spec: DecoderSpec) -> None:
    """Check that what files store beside the two numbers of xIELU is what graphs have in their place."""
    for key, stored in stored_tensors.items():
        match = _OF_XIELU.fullmatch(key) if spec.activation == "xielu" else None
        if match is None:
            continue
        value = float(stored.read(slice(None)).ravel()[0])
        least, most = _CONSTANTS[match[1]]
        if stored.shape != (1,) or not least <= value <= most:
            raise CheckpointError(
                f"weights: {key}",
                got=f"{value:g}",
                expected=f"{XIELU_BETA:g}" if match[1] == "beta" else f"0, within {most:g}",
                fix="Graphs have this constant of every published model; another cannot be exported.",
            )


def check_tensors(tensors: Mapping[str, CheckpointTensor], expected_views: Iterable[View], spec: DecoderSpec) -> None:
    """Check that all tensors of the decoder are present, and no others.

    Raises:
        CheckpointError: naming the tensor.
    """
    check_purpose(tensors)
    _check_constants(tensors, spec)
    shapes = {view.key: view.stored_shape for view in expected_views if view.is_stored}
    head, table = stored_name(spec, HEAD), stored_name(spec, EMBEDDING)
    if head in shapes and head not in tensors and table in tensors:
        raise CheckpointError(
            f"weights: {head}",
            got="no such tensor",
            expected="a head, as tie_word_embeddings of config.json says",
            fix="Fetch all files of the checkpoint. A base model without a head writes no text.",
        )
    for key, shape in shapes.items():
        stored = tensors.get(key)
        if stored is None or stored.shape != shape:
            raise CheckpointError(
                f"weights: {key}",
                got="no such tensor" if stored is None else f"shape {list(stored.shape)}",
                expected=f"shape {list(shape)}, as config.json says",
                fix="The weights and config.json do not belong together; fetch both again.",
            )
    for key in sorted(tensors.keys() - shapes.keys()):
        if key == head and not same_numbers(tensors[head], tensors[table]):
            raise CheckpointError(
                f"weights: {head}",
                got="another matrix than the embedding",
                expected="the same or none, as tie_word_embeddings of config.json says",
                fix="Set tie_word_embeddings to false if the head is a matrix of its own.",
            )
        if key != head and not _is_unused(key, spec):
            raise CheckpointError(
                f"weights: {key}",
                got="a tensor that config.json does not account for",
                expected=f"the tensors of the architecture {spec.model_type} alone",
                fix="Merge adapters into the weights first. Another architecture cannot be exported.",
            )


def _is_unused(key: str, spec: DecoderSpec) -> bool:
    """Whether files have a tensor that the decoder does without: layers may read the keys and values of another."""
    match = _KEYS_AND_VALUES.fullmatch(key)
    if spec.activation == "xielu" and _OF_XIELU.fullmatch(key):
        return True
    if match is None:
        return _RECOMPUTED.fullmatch(key) is not None
    return int(match[1]) < spec.layers and not spec.owns_cache(int(match[1]))
