"""What a plan is made for: a checkpoint, a configuration or a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from edgekv.bundle import MANIFEST, Manifest, read_manifest
from edgekv.errors import BundleError, CheckpointError, UsageError
from edgekv.plan.options import DEFAULT_AR, DEFAULT_KEY_LAYOUT, MAX_CONTEXT, Overrides, option, shortened
from edgekv.spec import (
    CONFIG,
    LAYER_INPUTS,
    CacheSpec,
    Config,
    Decoder,
    DecoderInterface,
    DecoderSpec,
    EncoderSpec,
    Geometry,
    KeyLayout,
    KvDtype,
    LayeredGeometry,
    Role,
    RotaryInputs,
    RowSpec,
    Weights,
    describe_cache,
    encoder_family,
    head_type,
    identify,
    is_hub_id,
    read_config,
    recipe_weights,
)
from edgekv.spec.encoders.processor import read_processor
from quant import WEIGHT_TYPES

_KV_DTYPES: dict[int, KvDtype] = {8: "u8", 16: "s16"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A cache, its graphs and its model.

    Attributes:
        source: source of the sizes, as text.
        geometry: the sizes of the cache.
        ar: tokens per inference of the graphs that decode and prefill, ascending, with 1; all are below the context.
        weights_bytes: bytes of the weights, or None if they are unknown.
        max_positions: the model's maximum context, or None if it is unknown.
        assumptions: assumed values that were not given, one sentence each.
        decoder: all sizes of the model, or None if they are unknown.
        weights: the weights in pieces, or None if they are unknown.
        splits: number of parts of a bundle's layers; None if it is still to be chosen.
        rotary: the rotary embeddings that the graphs have inputs for.
        host_bytes: a table that the host alone reads, mapped; not among the weights.
        encoder: of pictures; not among the weights either. None if there is none.
        verify: tokens per inference of the graphs that verify drafts, ascending.
    """

    source: str
    geometry: Geometry
    ar: tuple[int, ...]
    weights_bytes: int | None
    max_positions: int | None
    assumptions: tuple[str, ...]
    decoder: Decoder | None = None
    weights: Weights | None = None
    splits: int | None = None
    rotary: tuple[RotaryInputs, ...] = (RotaryInputs("", 1),)
    host_bytes: int = 0
    encoder: EncoderSpec | None = None
    verify: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ar != tuple(sorted(set(self.ar))) or not self.ar or self.ar[0] != 1:
            raise ValueError(f"ar: got {self.ar}; expected 1 and larger numbers, ascending")
        for group in self.geometry.groups():
            group.past_rows(self.ar[-1], self.geometry.context)

    @property
    def graphs(self) -> list[tuple[Role, int]]:
        """Role and tokens per inference of each graph that devices run."""
        plain: list[tuple[Role, int]] = [("decode" if ar == 1 else "prefill", ar) for ar in self.ar]
        return [*plain, *(("verify", ar) for ar in self.verify)]

    @property
    def steps(self) -> tuple[int, ...]:
        """Tokens per inference of all of these graphs, ascending."""
        return tuple(sorted({*self.ar, *self.verify}))


def cache_geometry(
    layers: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    kv_dtype: KvDtype,
    key_layout: KeyLayout = DEFAULT_KEY_LAYOUT,
    windows: tuple[int | None, ...] = (),
) -> Geometry:
    """The geometry of layers that attend to the whole context, or to `windows` if there are any."""
    if not windows:
        return RowSpec(layers, kv_heads, head_dim, context, kv_dtype, key_layout)
    return LayeredGeometry(layers, context, (kv_heads,), (head_dim,), windows, kv_dtype, key_layout)


def kv_dtype_of(bits: int) -> KvDtype:
    """The integer type of a cache of 8 or 16 bits.

    Raises:
        UsageError: neither 8 nor 16.
    """
    dtype = _KV_DTYPES.get(bits)
    if dtype is None:
        raise UsageError("--kv-bits", got=shortened(bits), expected="8 (u8) or 16 (s16)", fix="Use --kv-bits 8.")
    return dtype


def checked_ar(ar: Sequence[int], context: int, windows: tuple[int | None, ...] = ()) -> tuple[int, ...]:
    """The AR numbers, ascending, without duplicates.

    Raises:
        UsageError: 1 is not among them, or one is not below the context and every attention window.
    """
    listed = shortened(",".join(map(str, ar)))
    if 1 not in ar or min(ar) < 1:
        expected = "1 and larger numbers, such as 1,32"
        raise UsageError("--ar", got=listed, expected=expected, fix="Add 1: it decodes.")
    if max(ar) >= context:
        raise UsageError(
            "--ar",
            got=f"{shortened(max(ar))} with a context of {context}",
            expected="numbers below the context",
            fix="Use a smaller --ar or a larger --context.",
        )
    narrowest = min((window for window in windows if window is not None), default=context)
    if max(ar) >= narrowest:
        raise UsageError(
            "--ar",
            got=f"{max(ar)} with an attention window of {narrowest}",
            expected="numbers below every attention window of the model",
            fix="Use a smaller --ar.",
        )
    return tuple(sorted(set(ar)))


def check_kernel(spec: DecoderSpec, context: int) -> None:
    """Check that a context exceeds the kernel of the model's convolutions, if it has any.

    Raises:
        UsageError: it does not.
    """
    states = spec.convolution_states
    if states is not None and states.kernel >= context:
        raise UsageError(
            "--context",
            got=context,
            expected=f"more than {states.kernel}, the kernel of the checkpoint's convolutions",
            fix="Use a longer --context.",
        )


def check_agreement(overrides: Overrides, from_file: Mapping[str, int], path: Path) -> None:
    """Reject options that contradict a file.

    Raises:
        UsageError: naming the first such option.
    """
    for name, value in from_file.items():
        chosen = getattr(overrides, name)
        if chosen is not None and chosen != value:
            raise contradiction(option(name), chosen, value, path)


def contradiction(name: str, got: object, expected: object, path: Path) -> UsageError:
    """The error for an option that contradicts a file."""
    return UsageError(name, got=got, expected=f"{expected}, as {path} says", fix="Leave it out.")


def host_sentence(size_bytes: int) -> str:
    """The assumption about a table of inputs of layers, in words."""
    return f"a table of {size_bytes:,} bytes apart: the host maps it, and reads the rows of the tokens that it runs"


def weights_sentence(size_bytes: int | None, basis: str) -> str:
    """The assumption about the weights, in words."""
    return "weights unknown, counted as 0 bytes" if size_bytes is None else f"weights of {size_bytes:,} bytes: {basis}"


_COLUMNS = "keys as columns: rewriting them when another AR takes over is not counted"
_DEFAULT_COLUMNS = _COLUMNS.replace(":", ", the default of export:")


def bundle_subject(folder: Path, overrides: Overrides) -> Subject:
    """The cache, the graphs and the weights of a bundle.

    Raises:
        UsageError: an option contradicts the bundle.
        BundleError: the bundle cannot be read, or its sizes are out of range.
    """
    manifest = read_manifest(folder)
    if manifest.target is not None:
        fix = "Give its target."
        raise UsageError(str(folder), got="a drafter", expected="a model of its own", fix=fix)
    _check_cached(manifest.model, folder)
    plain, model = manifest.geometry, manifest.model
    sizes = {name: getattr(plain, name) for name in ("layers", "kv_heads", "head_dim", "context")}
    _check_sizes(Overrides(**sizes), folder)
    check_agreement(overrides, {**sizes, "kv_bits": 8 * plain.element_bytes}, folder)
    ar = tuple(sorted({graph.ar for graph in manifest.graphs if graph.role in ("decode", "prefill")}))
    if overrides.ar is not None and checked_ar(overrides.ar, plain.context) != ar:
        raise contradiction("--ar", ",".join(map(str, overrides.ar)), ",".join(map(str, ar)), folder)
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


def _check_cached(spec: DecoderSpec | None, source: Path) -> None:
    """Refuse a model without a cache.

    Raises:
        UsageError: tokens attend to both sides.
    """
    if spec is not None and spec.bidirectional:
        got, expected = "attention to both sides, which keeps no cache", "a model whose tokens attend to earlier ones"
        raise UsageError(str(source), got=got, expected=expected, fix="Export it, and see edgekv info.")


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
    splits = max((sum(bool(part.layers) for part in graph.parts) for graph in manifest.graphs), default=1)
    has_head_apart = any(not part.layers for graph in manifest.graphs for part in graph.parts)
    is_min = splits == 2 and manifest.model.first_without_cache is not None and not has_head_apart
    return 1 if is_min else splits


_NEEDED = ("layers", "kv_heads", "head_dim", "context", "kv_bits")
_WINDOWS_UNKNOWN = (
    "the attention windows of this architecture are unknown: every layer is counted with the whole context"
)
_SUBJECTS = f"a {CONFIG}, a folder that has one, a GGUF file, a hub id, or a bundle"
CONFIGS = "edgekv.configs"
"""Entry points: a function that reads the configuration of a GGUF file or a hub id."""


def find_subject(path: Path | None, overrides: Overrides) -> Subject:
    """What to size or plan.

    Args:
        path: a `config.json`, a folder that has one, a GGUF file, a hub id, a bundle's folder, or None to size from
            options alone.
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
        if kind.kind == "gguf" and path.is_file():
            return _from_config(_config_elsewhere(path), path, overrides)
        raise CheckpointError(str(path), got=kind.what, expected=_SUBJECTS, fix=kind.as_checkpoint)
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        if is_hub_id(str(path)):
            return _from_config(_config_elsewhere(path), path, overrides)
        got = f"a folder without {CONFIG} and {MANIFEST}" if path.is_dir() else "nothing there"
        raise CheckpointError(str(path), got=got, expected=_SUBJECTS, fix="Check the path.")
    return _from_config(read_config(file), file, overrides)


def _config_elsewhere(name: Path) -> Config:
    """The configuration of a GGUF file or a hub id, which an installed package reads.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        (point,) = metadata.entry_points(group=CONFIGS)
        read = point.load()
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            str(name),
            got="a GGUF file, or an id of the hub",
            expected=f"a {CONFIG}, which alone is read without the packages of export ({error})",
            fix='Install them: pip install "edgekv[export]"',
        ) from None
    return Config(read(str(name)))


def is_bundle(path: Path) -> bool:
    """Whether this is a bundle's folder, or the manifest in it."""
    return (path.name == MANIFEST and path.is_file()) or (path / MANIFEST).is_file()


def _from_options(overrides: Overrides) -> Subject:
    layers, kv_heads, head_dim = overrides.layers, overrides.kv_heads, overrides.head_dim
    context, kv_bits = overrides.context, overrides.kv_bits
    if layers is None or kv_heads is None or head_dim is None or context is None or kv_bits is None:
        raise _missing([option(name) for name in _NEEDED if getattr(overrides, name) is None])
    assumptions: list[str] = []
    geometry = cache_geometry(layers, kv_heads, head_dim, context, kv_dtype_of(kv_bits))
    ar = _ar(overrides, context, (), assumptions)
    assumptions += [weights_sentence(None, "no model is named"), _DEFAULT_COLUMNS]
    return Subject("options", geometry, ar, None, None, tuple(assumptions))


def _from_config(config: Config, file: Path, overrides: Overrides) -> Subject:
    cache = describe_cache(config)
    assumptions = _defaults(config, cache)
    sizes = {"layers": cache.layers, "kv_heads": cache.kv_heads, "head_dim": cache.head_dim}
    check_agreement(overrides, sizes, file)
    context = _context(overrides, cache.max_positions, assumptions)
    bits = overrides.kv_bits
    if bits is None:
        bits = 8
        assumptions.append("a cache of 8 bits, the default of export")
    spec = cache.decoder
    if spec is None and cache.sliding_window is not None and cache.sliding_window < context:
        assumptions.append(_WINDOWS_UNKNOWN)
    _check_cached(spec, file)
    if spec is not None:
        check_kernel(spec, context)
    windows = () if spec is None else spec.windows_in(context)
    kv_dtype = kv_dtype_of(bits)
    geometry = (
        cache_geometry(cache.layers, cache.kv_heads, cache.head_dim, context, kv_dtype)
        if spec is None
        else spec.cache(context, kv_dtype, DEFAULT_KEY_LAYOUT)
    )
    family = None if spec is None else encoder_family(config)
    encoder = None if family is None else family.describe(config, read_processor(file.parent, is_needed=False))
    rows = 1
    if spec is not None and family is not None and family.decoder is not None and encoder is not None:
        rows = encoder.rows if family.decoder(config, spec).whole_pictures else 1
    ar = _ar(overrides, context, windows, assumptions, rows)
    decoder = None if spec is None else spec.sizes
    weights = None if decoder is None else recipe_weights(decoder, overrides.recipe)
    size_bytes = None if weights is None else weights.total_bytes
    _, head = head_type(overrides.recipe)
    head_said = "head" if head == "int8" else f"a head in {head}"
    basis = f"the recipe {overrides.recipe}, with an 8-bit embedding table and {head_said}"
    assumptions += [weights_sentence(size_bytes, basis), _DEFAULT_COLUMNS]
    host_bytes = 0 if weights is None else weights.host_bytes
    if host_bytes:
        assumptions.append(host_sentence(host_bytes))
    subject = Subject(str(file), geometry, ar, size_bytes, cache.max_positions, tuple(assumptions), decoder, weights)
    if spec is None:
        return subject
    interface = DecoderInterface.of(spec, context, geometry.kv_dtype, geometry.key_layout, "u16")
    return replace(subject, rotary=interface.rotary, host_bytes=host_bytes, encoder=encoder)


def _context(overrides: Overrides, longest: int | None, assumptions: list[str]) -> int:
    context = overrides.context
    if context is None:
        if longest is None:
            raise _missing([option("context")])
        if longest > MAX_CONTEXT:
            expected = f"at most {MAX_CONTEXT}"
            raise UsageError(
                "--context",
                got=f"none, and max_position_embeddings = {longest}",
                expected=expected,
                fix="Give --context.",
            )
        assumptions.append(f"context {longest}, its max_position_embeddings")
        return longest
    if longest is not None and context > longest:
        assumptions.append(f"context {context} is above its max_position_embeddings {longest}")
    return context


def _defaults(config: Config, cache: CacheSpec) -> list[str]:
    """Assumptions about missing fields of the configuration, one sentence each."""
    config = config.text_decoder()
    sentences = []
    if "num_key_value_heads" not in config:
        as_many = cache.kv_heads == cache.heads
        reason = "as many as num_attention_heads" if as_many else "the default of its architecture"
        sentences.append(f"kv heads {cache.kv_heads}, {reason}")
    if "head_dim" not in config:
        by_width = "hidden_size" in config and cache.head_dim * cache.heads == config.size("hidden_size")
        reason = "hidden_size / num_attention_heads" if by_width else "the default of its architecture"
        sentences.append(f"head_dim {cache.head_dim}, {reason}")
    return sentences


def _ar(
    overrides: Overrides, context: int, windows: tuple[int | None, ...], assumptions: list[str], rows: int = 1
) -> tuple[int, ...]:
    """Args: rows: that a prefill step has at least: those of a picture that attend to each other."""
    chosen = overrides.ar
    if chosen is None:
        chosen = (*DEFAULT_AR, rows) if rows > max(DEFAULT_AR) else DEFAULT_AR
        assumptions.append(f"graphs of AR {','.join(map(str, chosen))}, the default")
    ar = checked_ar(chosen, context, windows)
    if max(ar) < rows:
        assumptions.append(f"a step of fewer than {rows} tokens, the rows of a picture: export would refuse it")
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
