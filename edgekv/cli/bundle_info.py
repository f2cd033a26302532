"""What a bundle is: its model, recipe, graphs, chips, checks and bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekv.bundle import (
    MANIFEST,
    AdapterError,
    Bundle,
    EmbeddingQuality,
    GenerationRecord,
    HtpCheck,
    Manifest,
    QualityRecord,
    RankingQuality,
    VisionRecord,
    all_compiled,
    lora_names,
    open_lora,
)
from edgekv.spec import DecoderSpec
from edgekv.spec.chat import read_bundle_templates
from edgekv.spec.text import TOKENIZER

_PARTS = (
    (r".*\.onnx(\.gz)?|.*\.tflite", "graphs"),
    (r"weights-(embedding|vocabulary)\..*", "vocabulary"),
    (r"weights-layer-.*", "layers"),
    (r"weights-(head|norm)\..*", "head"),
    (r"tokenizer\.json|chat_template\.json", "tokenizer"),
    (r"manifest\.json", "manifest"),
    (r"compiled/.*", "compiled"),
    (r"adapters/.*", "adapters"),
    (r"prefixes/.*", "prefixes"),
)
"""Files of a bundle, by their path there, and what part they belong to."""


class GraphInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A graph: its role, tokens per inference, context length in tokens, and number of parts."""

    name: str
    role: str
    ar: int
    context: int
    parts: int


class CompiledInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The binaries for a chip.

    Attributes:
        soc: part number.
        htp: HTP version.
        vtcm_bytes: that the binaries use.
        compiler: the package that compiled, with its version.
        binaries: how many.
        bytes: of all their files.
    """

    soc: str
    htp: int
    vtcm_bytes: int
    compiler: str
    binaries: int
    bytes: int


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter; if it cannot be used, `damage` says why, and its rank and targets are unknown."""

    name: str
    rank: int | None = None
    targets: list[str] = []
    damage: str | None = None


class BundleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `edgekv info` says of a bundle.

    Attributes:
        bundle: its folder.
        producer: the program and version that wrote it.
        format: version of the manifest.
        source: the checkpoint, as it was given.
        merged: folders of adapters that were merged into the weights.
        model_type: the architecture.
        parameters: elements of all matrices; a tied head counts once.
        sizes: of the decoder, by their names in `DecoderSpec`.
        windows: how many layers attend to how many tokens, if any attends to less than the context.
        states: the layers with a state in place of keys and values, in words.
        pictures: the vision encoder, in words; null if the bundle reads text alone.
        task: what an embedder or a reranker gives, in words; null for a model that writes text.
        reads: what a drafter reads of its target, in words; null for a model of its own.
        recipe: its name.
        matrices: number of matrices by integer type and rounding method, such as `int8 (gptq)`.
        calibration: name of the calibration text.
        calibration_tokens: that were run.
        kv_dtype: integer type of the cache.
        key_layout: `rows` or `columns`.
        is_cached: whether there is a KV cache; not where tokens attend to both sides.
        graph_format: `onnx` or `tflite`.
        contexts: S of the graphs, ascending.
        ar: tokens per inference of decode and prefill graphs, ascending.
        verify: tokens per inference of verify graphs, ascending.
        graphs: every graph.
        chat_templates: their names; empty if there are none.
        sampling: defaults of the checkpoint.
        sink: the first tokens, which no graph computes.
        lora_rank: the most columns of A that the slots take; null without slots.
        lora_targets: projections with slots.
        adapters: those that were added.
        device: the chip that the graphs were checked for.
        htp_check: result of the HTP compiler's check at export.
        floating_nodes: number of nodes that compute in float.
        quality: what the export lost, on each text; empty if it was not measured.
        task_quality: the same of an embedder or a reranker.
        files_verified: number of files whose size and SHA-256 are those of the sealed manifest.
        compiled: for which chips there are binaries.
        bytes: of all files, by part.
    """

    bundle: str
    producer: str
    format: int
    source: str
    merged: list[str]
    model_type: str
    parameters: int
    sizes: dict[str, int]
    windows: dict[int, int]
    states: list[str]
    pictures: str | None
    task: str | None
    reads: str | None
    recipe: str
    matrices: dict[str, int]
    calibration: str
    calibration_tokens: int
    kv_dtype: str
    key_layout: str
    is_cached: bool
    graph_format: str
    contexts: list[int]
    ar: list[int]
    verify: list[int]
    graphs: list[GraphInfo]
    chat_templates: list[str]
    sampling: GenerationRecord | None
    sink: list[str]
    lora_rank: int | None
    lora_targets: list[str]
    adapters: list[AdapterInfo]
    device: str
    htp_check: HtpCheck
    floating_nodes: int
    quality: tuple[QualityRecord, ...]
    task_quality: EmbeddingQuality | RankingQuality | None
    files_verified: int
    compiled: list[CompiledInfo]
    bytes: dict[str, int]


def describe_bundle(bundle: Bundle) -> BundleInfo:
    """What a verified bundle is.

    Raises:
        BundleError: the chat templates or the record of compiled binaries are damaged.
    """
    manifest = bundle.manifest
    spec, templates = manifest.model, read_bundle_templates(bundle.path)
    matrices = Counter(f"{weight.dtype} ({weight.method})" for weight in manifest.recipe.weights)
    steps = {
        role: sorted({g.ar for g in manifest.graphs if g.role == role}) for role in ("decode", "prefill", "verify")
    }
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions")
    return BundleInfo(
        bundle=str(bundle.path),
        producer=manifest.producer,
        format=manifest.format,
        source=manifest.source.checkpoint,
        merged=[adapter.folder for adapter in manifest.source.adapters],
        model_type=spec.model_type,
        parameters=spec.sizes.parameters,
        sizes={name: getattr(spec, name) for name in sizes} | {"layers": len(spec.own_layers)},
        windows=dict(Counter(window or manifest.context for window in manifest.windows)),
        states=list(_states(manifest.model)),
        pictures=None if manifest.vision is None else _pictures(manifest.vision),
        task=None if manifest.task is None else manifest.task.described(spec.result_width),
        reads=_reads(manifest),
        recipe=manifest.recipe.name,
        matrices=dict(matrices),
        calibration=manifest.source.calibration,
        calibration_tokens=manifest.source.calibration_tokens,
        kv_dtype=manifest.kv_dtype,
        key_layout=manifest.key_layout,
        is_cached=manifest.interface.is_cached,
        graph_format=manifest.graph_format,
        contexts=manifest.contexts,
        ar=sorted({*steps["decode"], *steps["prefill"]}),
        verify=steps["verify"],
        graphs=[
            GraphInfo(name=graph.name, role=graph.role, ar=graph.ar, context=graph.context, parts=len(graph.parts))
            for graph in manifest.graphs
        ],
        chat_templates=[] if templates is None else [*templates.templates],
        sampling=manifest.generation,
        sink=_sink(bundle),
        lora_rank=None if manifest.lora is None else manifest.lora.rank,
        lora_targets=[] if manifest.lora is None else [slot.target for slot in manifest.lora.slots],
        adapters=[_adapter(bundle, name) for name in lora_names(bundle)],
        device=manifest.device,
        htp_check=manifest.htp_check,
        floating_nodes=len(manifest.floating_nodes),
        quality=manifest.quality,
        task_quality=manifest.task_quality,
        files_verified=len(manifest.files),
        compiled=[
            CompiledInfo(
                soc=compiled.manifest.soc,
                htp=compiled.manifest.arch,
                vtcm_bytes=compiled.manifest.vtcm_bytes,
                compiler=compiled.manifest.compiler,
                binaries=len(compiled.manifest.binaries),
                bytes=sum(file.bytes for file in compiled.manifest.files.values()),
            )
            for compiled in all_compiled(bundle)
        ],
        bytes=bytes_by_part(bundle.path, manifest),
    )


def _sink(bundle: Bundle) -> list[str]:
    """The tokens of the sink as text; as ids if there is no tokenizer."""
    if bundle.manifest.sink is None:
        return []
    tokens = bundle.manifest.sink.tokens
    if TOKENIZER not in bundle.manifest.files:
        return [str(token) for token in tokens]
    tokenizer = bundle.tokenizer()
    return [tokenizer.id_to_token(token) or str(token) for token in tokens]


def _adapter(bundle: Bundle, name: str) -> AdapterInfo:
    try:
        record = open_lora(bundle, name).record
    except AdapterError as error:
        return AdapterInfo(name=name, damage=str(error))
    return AdapterInfo(name=name, rank=record.rank, targets=[*record.targets])


def bytes_by_part(folder: Path, manifest: Manifest) -> dict[str, int]:
    """Bytes of the files that belong to the bundle; notes beside them are left out."""
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    added = (path for name in ("compiled", "adapters", "prefixes") for path in sorted((folder / name).rglob("*")))
    for path in (folder / MANIFEST, *added):
        if path.is_file():
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    parts: Counter[str] = Counter()
    for name, size in sizes.items():
        parts[next((part for pattern, part in _PARTS if re.fullmatch(pattern, name)), "other")] += size
    return dict(parts.most_common())


def _pictures(vision: VisionRecord) -> str:
    spec, wide = vision.encoder, len(vision.encoder.wide)
    parameters = sum(rows * columns for rows, columns in msgspec.structs.replace(spec, wide=()).matrices.values())
    most = "at most " if vision.encoder.has_shapes else ""
    bits = f"w8a16 with {wide} matrices at 16 bits" if wide else "w8a16"
    return (
        f"{vision.shown} become {most}{spec.rows} tokens; {spec.layers} layers of width "
        f"{spec.hidden}, {parameters / 1e6:.1f} M parameters, {bits}, calibrated on {vision.calibration_tiles} "
        f"{vision.calibration} pictures"
    )


def _reads(manifest: Manifest) -> str | None:
    if manifest.target is None:
        return None
    source = f"{manifest.target.weights_sha256[:12]}..."
    if manifest.model.target is not None and manifest.model.target.is_cached_apart:
        return f"the last hidden states of all tokens of {source}; it has a cache of its own"
    layers = sorted({manifest.model.cache_layer(layer) for layer in manifest.model.own_layers})
    listed = " and ".join(map(str, layers))
    return f"keys and values of layers {listed}, and the last hidden state, of {source}"


def _states(model: DecoderSpec) -> Iterator[str]:
    if (convolution := model.convolution) is not None:
        layers, dtype = len(convolution.layers), convolution.state_dtype
        yield f"{layers} layers with convolutions of {convolution.kernel} tokens, rows of {model.hidden} in {dtype}"
    if (rule := model.delta_rule) is not None:
        yield f"{len(rule.layers)} layers with {rule.noun}"
