"""Where the sizes come from: options, a `config.json`, or a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgekv.bundle import MANIFEST, read_manifest
from edgekv.errors import CheckpointError, UsageError
from edgekv.kv import Geometry
from edgekv.plan.cache.subject import DEFAULT_AR, MOST_CONTEXT, Overrides, Subject, checked_ar, kv_dtype_of
from edgekv.spec import CONFIG, CacheSpec, Config, describe_cache, identify, read_config, recipe_weights

_FLAGS = ("layers", "kv_heads", "head_dim", "context", "kv_bits")
_WINDOWS_UNCOUNTED = "layers with an attention window are counted as if they held the whole context"
_DEFAULT_AR = ",".join(map(str, DEFAULT_AR))


def find_subject(path: Path | None, overrides: Overrides) -> Subject:
    """What to size.

    Args:
        path: a `config.json`, a folder that has one, a bundle's folder, or None to size from options alone.
        overrides: the options. Beside a `config.json` the context and the bits of the cache override it; any other
            option that contradicts the file is refused, as is every one that contradicts a bundle.

    Raises:
        UsageError: options are missing, impossible, or contradict the file, or the context is above 2^20 tokens.
        CheckpointError: the path or its `config.json` cannot be read.
        BundleError: the bundle cannot be read.
    """
    _check_options(overrides)
    found = _find(path, overrides)
    if found.geometry.context > MOST_CONTEXT:
        raise UsageError(
            "--context", got=found.geometry.context, expected=f"at most {MOST_CONTEXT}", fix="Give a smaller one."
        )
    return found


def is_bundle(path: Path) -> bool:
    """Whether this is a bundle's folder, or the manifest in it."""
    return (path.name == MANIFEST and path.is_file()) or (path / MANIFEST).is_file()


def _find(path: Path | None, overrides: Overrides) -> Subject:
    if path is None:
        return _from_options(overrides)
    if is_bundle(path):
        return _from_bundle(path.parent if path.is_file() else path, overrides)
    file = path / CONFIG if path.is_dir() else path
    kind = identify(path)
    if kind is not None and kind.kind != "checkpoint":
        wanted = f"a {CONFIG}, a folder that has one, or a bundle"
        raise CheckpointError(str(path), got=kind.what, expected=wanted, fix=kind.as_checkpoint)
    if not file.is_file():
        found = f"a folder without {CONFIG} and {MANIFEST}" if path.is_dir() else "nothing there"
        wanted = f"a {CONFIG}, a folder that has one, or a bundle"
        raise CheckpointError(str(path), got=found, expected=wanted, fix="Check the path.")
    return _from_config(file, overrides)


def _from_options(given: Overrides) -> Subject:
    layers, kv_heads, head_dim = given.layers, given.kv_heads, given.head_dim
    context, kv_bits = given.context, given.kv_bits
    if layers is None or kv_heads is None or head_dim is None or context is None or kv_bits is None:
        raise _missing([_option(name) for name in _FLAGS if getattr(given, name) is None])
    assumptions: list[str] = []
    geometry = Geometry(layers, kv_heads, head_dim, context, kv_dtype_of(kv_bits))
    ar = _ar(given, geometry.context, assumptions)
    assumptions.append(_weights(None, "no model is named"))
    return Subject("options", geometry, ar, None, None, tuple(assumptions))


def _from_config(file: Path, given: Overrides) -> Subject:
    config = read_config(file)
    found = describe_cache(config)
    assumptions = _defaults(config, found)
    sizes = {"layers": found.layers, "kv_heads": found.kv_heads, "head_dim": found.head_dim}
    _check_agreement(given, sizes, file)
    context, bits, longest = given.context, given.kv_bits, found.max_positions
    if context is None:
        if longest is None:
            raise _missing([_option("context")])
        context = longest
        assumptions.append(f"context {context}, its max_position_embeddings")
    if bits is None:
        bits = 8
        assumptions.append("a cache of 8 bits, the default of export")
    if longest is not None and context > longest:
        assumptions.append(f"context {context} is above its max_position_embeddings {longest}")
    if found.sliding_window is not None and found.sliding_window < context:
        assumptions.append(_WINDOWS_UNCOUNTED)
    try:
        geometry = Geometry(found.layers, found.kv_heads, found.head_dim, context, kv_dtype_of(bits))
    except ValueError as error:
        fix = "Check the file, or give --context."
        raise CheckpointError(str(file), got=error, expected="sizes that can exist", fix=fix) from None
    ar = _ar(given, context, assumptions)
    decoder = None if found.decoder is None else found.decoder.sizes
    size_bytes = None if decoder is None else recipe_weights(decoder, given.recipe).total_bytes
    basis = f"the recipe {given.recipe}, with a 16-bit embedding table and an 8-bit head"
    assumptions.append(_weights(size_bytes, basis))
    return Subject(str(file), geometry, ar, size_bytes, longest, tuple(assumptions), decoder)


def _defaults(config: Config, found: CacheSpec) -> list[str]:
    """What the configuration does not say, one sentence each."""
    config = config.text_decoder()
    sentences = []
    if "num_key_value_heads" not in config:
        reason = (
            "as many as num_attention_heads" if found.kv_heads == found.heads else "the default of its architecture"
        )
        sentences.append(f"kv heads {found.kv_heads}, {reason}")
    if "head_dim" not in config:
        by_width = "hidden_size" in config and found.head_dim * found.heads == config.size("hidden_size")
        reason = "hidden_size / num_attention_heads" if by_width else "the default of its architecture"
        sentences.append(f"head_dim {found.head_dim}, {reason}")
    return sentences


def _from_bundle(folder: Path, given: Overrides) -> Subject:
    manifest = read_manifest(folder)
    geometry = manifest.geometry
    found = {name: getattr(geometry, name) for name in ("layers", "kv_heads", "head_dim", "context")}
    _check_agreement(given, {**found, "kv_bits": 8 * geometry.element_bytes}, folder)
    ar = tuple(sorted({graph.ar for graph in manifest.graphs}))
    if given.ar is not None and checked_ar(given.ar, geometry.context) != ar:
        raise _contradiction("--ar", ",".join(map(str, given.ar)), ",".join(map(str, ar)), folder)
    shards = [record.bytes for name, record in manifest.files.items() if name.endswith(".safetensors")]
    size_bytes = sum(shards) if shards else None
    assumptions = [_weights(size_bytes, "the bundle's safetensors")]
    if len(contexts := manifest.contexts) > 1:
        listed = ", ".join(map(str, contexts))
        assumptions.append(f"graphs for contexts of {listed} share one cache; costs are those of the largest's graphs")
    if not manifest.is_whole:
        assumptions.append("inputs and outputs of graphs that are divided into parts are counted as if they were whole")
    if manifest.windows:
        assumptions.append(_WINDOWS_UNCOUNTED)
    return Subject(str(folder), geometry, ar, size_bytes, manifest.model.max_positions, tuple(assumptions))


def _weights(size_bytes: int | None, basis: str) -> str:
    return "weights unknown, counted as 0 bytes" if size_bytes is None else f"weights of {size_bytes:,} bytes: {basis}"


def _ar(given: Overrides, context: int, assumptions: list[str]) -> tuple[int, ...]:
    if given.ar is None:
        assumptions.append(f"graphs of AR {_DEFAULT_AR}, the default")
    ar = checked_ar(given.ar or DEFAULT_AR, context)
    if context % ar[-1]:
        assumptions.append(f"context {context} is no multiple of the largest AR, {ar[-1]}: export would refuse it")
    return ar


def _check_options(given: Overrides) -> None:
    for name in _FLAGS:
        least = 2 if name == "context" else 1
        value = getattr(given, name)
        if value is not None and value < least:
            raise UsageError(_option(name), got=value, expected=f"at least {least}", fix="Give a larger number.")


def _check_agreement(given: Overrides, found: Mapping[str, int], path: Path) -> None:
    for name, value in found.items():
        option = getattr(given, name)
        if option is not None and option != value:
            raise _contradiction(_option(name), option, value, path)


def _contradiction(option: str, found: object, wanted: object, path: Path) -> UsageError:
    return UsageError(option, got=found, expected=f"{wanted}, as {path} says", fix="Leave it out.")


def _missing(options: list[str]) -> UsageError:
    return UsageError(
        "size",
        got=f"no {', '.join(options)}",
        expected="all sizes of the cache",
        fix=f"Add {' '.join(f'{option} N' for option in options)}, or name a config.json or a bundle.",
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
