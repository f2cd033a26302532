"""Where the sizes come from: options, a `config.json`, or a bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgekv.bundle import MANIFEST
from edgekv.errors import CheckpointError, UsageError
from edgekv.plan.bundle_subject import bundle_subject
from edgekv.plan.limits import MOST_CONTEXT
from edgekv.plan.options import DEFAULT_AR, Overrides, option
from edgekv.plan.subject import (
    Subject,
    cache_geometry,
    check_agreement,
    check_kernel,
    checked_ar,
    host_sentence,
    kv_dtype_of,
    weights_sentence,
)
from edgekv.spec import (
    CONFIG,
    ENCODERS,
    CacheSpec,
    Config,
    DecoderInterface,
    describe_cache,
    identify,
    read_config,
    recipe_weights,
)

_NEEDED = ("layers", "kv_heads", "head_dim", "context", "kv_bits")
_WINDOWS_UNKNOWN = (
    "the attention windows of this architecture are unknown: every layer is counted with the whole context"
)
_DEFAULT_AR = ",".join(map(str, DEFAULT_AR))


def find_subject(path: Path | None, overrides: Overrides) -> Subject:
    """What to size or plan.

    Args:
        path: a `config.json`, a folder that has one, a bundle's folder, or None to size from options alone.
        overrides: the options. With a `config.json` the context and the bits of the cache may be chosen; other options
            must not contradict the file; no option may contradict a bundle.

    Raises:
        UsageError: options are missing, out of range, or contradict the file, or the context is above 2^20 tokens.
        CheckpointError: the path or its `config.json` cannot be read.
        BundleError: the bundle cannot be read.
    """
    overrides.check()
    if path is None:
        return _from_options(overrides)
    if is_bundle(path):
        return bundle_subject(path.parent if path.is_file() else path, overrides)
    kind = identify(path)
    if kind is not None and kind.kind != "checkpoint":
        wanted = f"a {CONFIG}, a folder that has one, or a bundle"
        fix = kind.as_checkpoint
        if kind.kind == "gguf":
            fix = f"Give the {CONFIG} of the model that it was made from, or export it and give the bundle."
        raise CheckpointError(str(path), got=kind.what, expected=wanted, fix=fix)
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        found = f"a folder without {CONFIG} and {MANIFEST}" if path.is_dir() else "nothing there"
        wanted = f"a {CONFIG}, a folder that has one, or a bundle"
        raise CheckpointError(str(path), got=found, expected=wanted, fix="Check the path.")
    return _from_config(file, overrides)


def is_bundle(path: Path) -> bool:
    """Whether this is a bundle's folder, or the manifest in it."""
    return (path.name == MANIFEST and path.is_file()) or (path / MANIFEST).is_file()


def _from_options(given: Overrides) -> Subject:
    layers, kv_heads, head_dim = given.layers, given.kv_heads, given.head_dim
    context, kv_bits = given.context, given.kv_bits
    if layers is None or kv_heads is None or head_dim is None or context is None or kv_bits is None:
        raise _missing([option(name) for name in _NEEDED if getattr(given, name) is None])
    assumptions: list[str] = []
    geometry = cache_geometry(layers, kv_heads, head_dim, context, kv_dtype_of(kv_bits))
    ar = _ar(given, context, (), assumptions)
    assumptions.append(weights_sentence(None, "no model is named"))
    return Subject("options", geometry, ar, None, None, tuple(assumptions))


def _from_config(file: Path, given: Overrides) -> Subject:
    config = read_config(file)
    found = describe_cache(config)
    assumptions = _defaults(config, found)
    sizes = {"layers": found.layers, "kv_heads": found.kv_heads, "head_dim": found.head_dim}
    check_agreement(given, sizes, file)
    context = _context(given, found.max_positions, assumptions)
    bits = given.kv_bits
    if bits is None:
        bits = 8
        assumptions.append("a cache of 8 bits, the default of export")
    spec = found.decoder
    if spec is None and found.sliding_window is not None and found.sliding_window < context:
        assumptions.append(_WINDOWS_UNKNOWN)
    if spec is not None:
        check_kernel(spec, context)
    windows = () if spec is None else spec.windows_in(context)
    kv_dtype = kv_dtype_of(bits)
    geometry = (
        cache_geometry(found.layers, found.kv_heads, found.head_dim, context, kv_dtype)
        if spec is None
        else spec.cache(context, kv_dtype, "rows")
    )
    ar = _ar(given, context, windows, assumptions)
    decoder = None if spec is None else spec.sizes
    weights = None if decoder is None else recipe_weights(decoder, given.recipe)
    size_bytes = None if weights is None else weights.total_bytes
    basis = f"the recipe {given.recipe}, with an 8-bit embedding table and head"
    assumptions.append(weights_sentence(size_bytes, basis))
    host_bytes = 0 if weights is None else weights.host_bytes
    if host_bytes:
        assumptions.append(host_sentence(host_bytes))
    subject = Subject(str(file), geometry, ar, size_bytes, found.max_positions, tuple(assumptions), decoder, weights)
    if spec is None:
        return subject
    interface = DecoderInterface.of(spec, context, geometry.kv_dtype, geometry.key_layout, "u16")
    family = ENCODERS.get(config.text("model_type"))
    encoder = None if family is None else family.describe(config)
    return replace(subject, rotary=interface.rotary, host_bytes=host_bytes, encoder=encoder)


def _context(given: Overrides, longest: int | None, assumptions: list[str]) -> int:
    context = given.context
    if context is None:
        if longest is None:
            raise _missing([option("context")])
        if longest > MOST_CONTEXT:
            wanted = f"at most {MOST_CONTEXT}"
            raise UsageError(
                "--context",
                got=f"none, and max_position_embeddings = {longest}",
                expected=wanted,
                fix="Give --context.",
            )
        assumptions.append(f"context {longest}, its max_position_embeddings")
        return longest
    if longest is not None and context > longest:
        assumptions.append(f"context {context} is above its max_position_embeddings {longest}")
    return context


def _defaults(config: Config, found: CacheSpec) -> list[str]:
    """Assumptions about missing fields of the configuration, one sentence each."""
    config = config.text_decoder()
    sentences = []
    if "num_key_value_heads" not in config:
        as_many = found.kv_heads == found.heads
        reason = "as many as num_attention_heads" if as_many else "the default of its architecture"
        sentences.append(f"kv heads {found.kv_heads}, {reason}")
    if "head_dim" not in config:
        by_width = "hidden_size" in config and found.head_dim * found.heads == config.size("hidden_size")
        reason = "hidden_size / num_attention_heads" if by_width else "the default of its architecture"
        sentences.append(f"head_dim {found.head_dim}, {reason}")
    return sentences


def _ar(given: Overrides, context: int, windows: tuple[int | None, ...], assumptions: list[str]) -> tuple[int, ...]:
    if given.ar is None:
        assumptions.append(f"graphs of AR {_DEFAULT_AR}, the default")
    ar = checked_ar(given.ar or DEFAULT_AR, context, windows)
    if context % ar[-1]:
        assumptions.append(f"context {context} is no multiple of the largest AR, {ar[-1]}: export would refuse it")
    return ar


def _missing(options: list[str]) -> UsageError:
    return UsageError(
        "size",
        got=f"no {', '.join(options)}",
        expected="all sizes of the cache",
        fix=f"Add {' '.join(f'{name} N' for name in options)}, or name a config.json or a bundle.",
    )
