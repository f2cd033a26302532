"""The subject of a plan, from a bundle's manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgekv.bundle import MANIFEST, Manifest, read_manifest
from edgekv.errors import BundleError, UsageError
from edgekv.plan.options import Overrides
from edgekv.plan.subject import Subject, check_agreement, checked_ar, contradiction, host_sentence, weights_sentence
from edgekv.spec import LAYER_INPUTS, Decoder, Weights
from quant import WEIGHT_TYPES

_COLUMNS = "keys as columns: rewriting them when another AR takes over is not counted"


def bundle_subject(folder: Path, given: Overrides) -> Subject:
    """The cache, the graphs and the weights of a bundle.

    Raises:
        UsageError: an option contradicts the bundle.
        BundleError: the bundle cannot be read, or its sizes are out of range.
    """
    manifest = read_manifest(folder)
    if manifest.target is not None:
        fix = "Give its target."
        raise UsageError(str(folder), got="a drafter", expected="a model of its own", fix=fix)
    plain, model = manifest.geometry, manifest.model
    found = {name: getattr(plain, name) for name in ("layers", "kv_heads", "head_dim", "context")}
    _check_sizes(Overrides(**found), folder)
    check_agreement(given, {**found, "kv_bits": 8 * plain.element_bytes}, folder)
    ar = tuple(sorted({graph.ar for graph in manifest.graphs if graph.role in ("decode", "prefill")}))
    if given.ar is not None and checked_ar(given.ar, plain.context) != ar:
        raise contradiction("--ar", ",".join(map(str, given.ar)), ",".join(map(str, ar)), folder)
    shards = [manifest.files[name].bytes for name in manifest.weights.files]
    host_bytes = manifest.weights.bytes(LAYER_INPUTS) if model.layer_inputs and shards else 0
    size_bytes = sum(shards) - host_bytes if shards else None
    assumptions = [weights_sentence(size_bytes, "the bundle's safetensors")]
    if host_bytes:
        assumptions.append(host_sentence(host_bytes))
    if len(contexts := manifest.contexts) > 1:
        listed = ", ".join(map(str, contexts))
        assumptions.append(f"graphs for contexts of {listed} share one cache; costs are those of the largest context")
    if not manifest.is_whole:
        assumptions.append("inputs and outputs of graphs that are divided into parts are counted as if they were whole")
    if manifest.key_layout == "columns":
        assumptions.append(_COLUMNS)
    decoder = replace(model.sizes, tied_head=False)
    return Subject(
        str(folder),
        manifest.cache_geometry,
        ar,
        size_bytes,
        model.max_positions,
        tuple(assumptions),
        decoder,
        None if size_bytes is None else _bundle_weights(decoder, size_bytes),
        _splits(manifest),
        manifest.interface.rotary,
        host_bytes,
        None if manifest.vision is None else manifest.vision.encoder,
        tuple(sorted({graph.ar for graph in manifest.graphs if graph.role == "verify"})),
    )


def _check_sizes(sizes: Overrides, folder: Path) -> None:
    try:
        sizes.check()
    except UsageError as error:
        field, fix = f"{folder / MANIFEST}: {error.field.removeprefix('--')}", "Export the bundle again."
        raise BundleError(field, got=error.got, expected=error.expected, fix=fix) from None


def _bundle_weights(decoder: Decoder, size_bytes: int) -> Weights:
    """The total in pieces: the embedding table and the head as export writes them, the rest in equal layers."""
    table_bytes = WEIGHT_TYPES["int8"].matrix_bytes(decoder.hidden, decoder.vocab)
    embedding_bytes = min(table_bytes, size_bytes)
    stored_bytes = size_bytes - (0 if decoder.tied_head else embedding_bytes)
    layer_bytes = -(-(stored_bytes - min(table_bytes, stored_bytes)) // decoder.layers)
    return Weights(
        embedding_bytes=embedding_bytes,
        layer_bytes=(layer_bytes,) * decoder.layers,
        packed_bytes=(0,) * decoder.layers,
        head_bytes=stored_bytes - decoder.layers * layer_bytes,
        shares_table=decoder.tied_head,
    )


def _splits(manifest: Manifest) -> int:
    """Parts with layers of one graph; 1 for two that end where layers own no cache, the least, without a head apart."""
    found = max((sum(bool(part.layers) for part in graph.parts) for graph in manifest.graphs), default=1)
    has_head_apart = any(not part.layers for graph in manifest.graphs for part in graph.parts)
    is_least = found == 2 and manifest.model.first_without_cache is not None and not has_head_apart
    return 1 if is_least else found
