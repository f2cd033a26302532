"""From a checkpoint to a bundle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from itertools import product
from pathlib import Path

from devices import Device
from edgekv.bundle import (
    FORMAT,
    GraphFormat,
    GraphRecord,
    HtpCheck,
    Manifest,
    ModelRecord,
    RecipeRecord,
    RopeRecord,
    SourceRecord,
    TensorEncoding,
    TokenRecord,
    WeightRecord,
    atomic_directory,
    record_files,
    write_manifest,
)
from edgekv.errors import EngineError, UsageError
from edgekv.kv import Geometry, KeyLayout, KvDtype
from edgekv.plan import CALIBRATION_WINDOW, default_calibration_tokens
from exporters.calibrate import calibration_windows, choose_encodings, rotation_encodings
from exporters.checkpoint import Checkpoint
from exporters.graphs import embedding_record, plan_graphs, write_graphs
from exporters.heads import transformed
from exporters.htp import floating_nodes
from exporters.progress import Progress, silent
from exporters.quantize import QuantizedMatrices, quantize_decoder
from exporters.recipe import Recipe
from exporters.reference import Tensors
from exporters.rope import Rope
from exporters.rotate import applied_rotation
from exporters.spec import DecoderSpec
from exporters.split import EmbeddingPlace, HeadPlace, Split, choose_split
from exporters.tensors import matrices as matrices_of
from exporters.tflite.encodings import symmetric_encodings
from exporters.tflite.limits import check_tflite
from quant import Encoding, Range, block_rows

KV_DTYPES: dict[GraphFormat, tuple[KvDtype, ...]] = {"onnx": ("u8", "s16"), "tflite": ("s8", "s16")}
"""Integer types of the cache for each format; the first is the default."""

_TFLITE_SPLITS = [*product((None, 1), (None, "graph"), (None, "last"))]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What a bundle is made for.

    Attributes:
        device: the target.
        recipe: integer types of weights and activations.
        context: S, tokens; a multiple of the largest AR. Several numbers make graphs for each of them, over one set of
            weights and one cache.
        ar: tokens per inference of each graph; 1 is among them.
        max_attention_window: tokens that each layer attends to at most, itself included; repeated when it is shorter
            than the layers. Empty for the model's own windows.
        kv_dtype: integer type of the cache.
        key_layout: `rows`, as values lie, or `columns`, as Genie wants keys; see `edgekv.kv.Geometry`.
        calibration: a text file, or None for the text that ships with edgekv.
        calibration_tokens: how many of its tokens to use, if it has as many; None for
            `edgekv.plan.default_calibration_tokens`.
        allow_float: accept nodes that compute in float, and record them.
        check_on_htp: compile every graph and look for float nodes; ONNX graphs only.
        graph_format: what to write: ONNX graphs, or one `.tflite` file.
        splits: parts that the layers are divided over; None for one as long as it stays inside all limits.
        embedding: who looks embeddings up, the graph or the host; None for the graph, unless layers are divided.
        head: `own` for a head that is a part by itself, `last` for one in the last part of layers; None for `last`,
            unless layers are divided.
    """

    device: Device
    recipe: Recipe
    context: int | Sequence[int] = 512
    ar: Sequence[int] = (1, 32)
    max_attention_window: Sequence[int] = ()
    kv_dtype: KvDtype = "u8"
    key_layout: KeyLayout = "rows"
    calibration: Path | None = None
    calibration_tokens: int | None = None
    allow_float: bool = False
    check_on_htp: bool = True
    graph_format: GraphFormat = "onnx"
    splits: int | None = None
    embedding: EmbeddingPlace | None = None
    head: HeadPlace | None = None

    def __post_init__(self) -> None:
        if 1 not in self.ar or min(self.ar) < 1:
            raise UsageError(
                "--ar",
                found=_listed(self.ar),
                wanted="1 and larger numbers, such as 1,32",
                way_out="Add 1: it decodes.",
            )
        if not self.contexts:
            raise UsageError("--context", found="no number", wanted="one at least", way_out="Use --context 512.")
        largest = max(self.ar)
        for context in self.contexts:
            if context % largest or context <= largest:
                raise UsageError(
                    "--context",
                    found=context,
                    wanted=f"a multiple of the largest AR, {largest}, above it",
                    way_out=f"Use {max(2, round(context / largest)) * largest}, or another --ar.",
                )
        if self.calibration_tokens is not None and self.calibration_tokens < 2:
            raise UsageError(
                "--calibration-tokens",
                found=self.calibration_tokens,
                wanted="at least 2",
                way_out="Use --calibration-tokens 4096.",
            )
        if self.kv_dtype not in KV_DTYPES[self.graph_format]:
            kinds = " or ".join(KV_DTYPES[self.graph_format])
            raise UsageError(
                "--kv",
                found=f"{self.kv_dtype} with --format {self.graph_format}",
                wanted=f"{kinds}, which its kernels multiply by",
                way_out=f"Use --kv {KV_DTYPES[self.graph_format][0]}.",
            )
        if self.graph_format == "tflite" and any(block_rows(rule.dtype) for rule in self.recipe.weights):
            raise UsageError(
                "--recipe",
                found=f"{self.recipe.name}, with a scale for each block, with --format tflite",
                wanted="a scale for each output channel, which its kernels multiply int16 by",
                way_out="Use --recipe w8a16 or w4a16, or --format onnx.",
            )
        if self.graph_format == "tflite" and self.key_layout != "rows":
            raise UsageError(
                "--key-layout",
                found=f"{self.key_layout} with --format tflite",
                wanted="rows",
                way_out="Leave it out, or use --format onnx.",
            )
        if self.graph_format == "tflite" and (self.splits, self.embedding, self.head) not in _TFLITE_SPLITS:
            raise UsageError(
                "--splits, --embedding, --head",
                found=", ".join(str(each) for each in (self.splits, self.embedding, self.head) if each is not None),
                wanted="graphs that are whole with --format tflite",
                way_out="Leave them out, or use --format onnx.",
            )
        if not self.device.supports_kv(self.kv_dtype):
            raise UsageError(
                "--kv",
                found=f"{self.kv_dtype} for {self.device.soc} (V{self.device.arch})",
                wanted="V73 or later for a 16-bit cache",
                way_out=f"Use --kv {KV_DTYPES[self.graph_format][0]}, or a later device.",
            )

    @property
    def contexts(self) -> tuple[int, ...]:
        """S of the graphs, each once, ascending."""
        return tuple(sorted({self.context} if isinstance(self.context, int) else set(self.context)))


def export_bundle(
    checkpoint: Checkpoint, target: Path, options: ExportOptions, *, force: bool = False, progress: Progress = silent
) -> Manifest:
    """Calibrate, write graphs and weights, check them on the HTP compiler, and put the bundle in place.

    Args:
        checkpoint: what to export.
        target: the bundle's folder; it appears whole or not at all.
        options: what for.
        force: replace an existing bundle.
        progress: told of each stage.

    Raises:
        UsageError: the options do not fit the checkpoint, or the target exists.
        EngineError: the HTP compiler refused a graph or computes part of it in float.
    """
    checkpoint = checkpoint.limited(options.max_attention_window)
    spec = checkpoint.spec
    context = options.contexts[-1]
    windows = spec.windows_in(context)
    if too_narrow := [window for window in windows if window is not None and window <= max(options.ar)]:
        raise UsageError(
            "attention window" if not options.max_attention_window else "--max-attention-window",
            found=too_narrow[0],
            wanted=f"more than the largest AR, {max(options.ar)}",
            way_out="Use a wider window, or a smaller --ar.",
        )
    if context > spec.max_positions:
        raise UsageError(
            "--context",
            found=context,
            wanted=f"at most max_position_embeddings = {spec.max_positions} of the checkpoint",
            way_out=f"Use --context {spec.max_positions // max(options.ar) * max(options.ar)}.",
        )
    options.recipe.check(spec)
    recipe = _recipe_record(spec, options.recipe)
    if options.graph_format == "tflite":
        check_tflite(checkpoint)
    split = _split(checkpoint, options)
    calibration = _read_calibration(options.calibration)
    checkpoint.check_values(lambda done, of: progress("read", done, of))
    with atomic_directory(target, force=force) as folder:
        tokens = options.calibration_tokens or default_calibration_tokens(spec.sizes)
        texts = calibration_windows(checkpoint, calibration.text, min(CALIBRATION_WINDOW, context, tokens), tokens)
        tensors = transformed(checkpoint, recipe)
        (scratch := folder / "quantized").mkdir()
        matrices = QuantizedMatrices(scratch, options.recipe)
        ranges = quantize_decoder(
            tensors,
            texts,
            context,
            options.recipe,
            matrices,
            lambda done: progress("quantize", done, spec.layers),
        )
        ropes = [_rope_record(rope, context) for rope in spec.ropes]
        graphs = plan_graphs(options.ar, options.contexts, split, options.graph_format)
        encodings = _write(tensors, matrices, ranges, ropes, graphs, folder, options, progress)
        del ranges
        shutil.rmtree(scratch)
        check, floating = _check(graphs, folder, options, progress)
        shutil.copyfile(checkpoint.folder / "tokenizer.json", folder / "tokenizer.json")
        progress("seal", 0, 1)
        manifest = Manifest(
            format=FORMAT,
            producer=f"edgekv {metadata.version('edgekv')}",
            device=options.device.soc,
            recipe=recipe,
            kv_dtype=options.kv_dtype,
            key_layout=options.key_layout,
            context=context,
            htp_check=check,
            floating_nodes=floating,
            model=_model_record(checkpoint),
            rope=ropes[0],
            local_rope=ropes[1] if len(ropes) > 1 else None,
            local_layers=[layer for layer in range(spec.layers) if spec.rope_index(layer)],
            embedding=embedding_record(split),
            tokens=TokenRecord(
                bos=checkpoint.special.bos, eos=list(checkpoint.special.eos), pad=checkpoint.special.pad
            ),
            graphs=graphs,
            encodings={name: TensorEncoding.of(encoding) for name, encoding in encodings.items()},
            source=SourceRecord(
                checkpoint=str(checkpoint.folder.resolve()) if Path(checkpoint.name).is_dir() else checkpoint.name,
                weights_sha256=checkpoint.weights_sha256(),
                calibration=calibration.name,
                calibration_tokens=int(sum(len(text) for text in texts)),
            ),
            files=record_files(folder),
            windows=list(windows),
            graph_format=options.graph_format,
        )
        write_manifest(folder, manifest)
        progress("seal", 1, 1)
    return manifest


def _write(
    tensors: Tensors,
    matrices: QuantizedMatrices,
    ranges: Mapping[str, Range],
    ropes: Sequence[RopeRecord],
    graphs: Sequence[GraphRecord],
    folder: Path,
    options: ExportOptions,
    progress: Progress,
) -> dict[str, Encoding]:
    """Write the graphs in the format asked for; return the encodings, which are the format's own."""

    def done(layers: int) -> None:
        progress("write", layers, tensors.spec.layers)

    factors = [rope.attention_factor for rope in ropes]
    if options.graph_format == "tflite":
        from exporters.tflite.graphs import write_tflite  # its package is optional

        encodings = symmetric_encodings(ranges, options.kv_dtype) | rotation_encodings(factors, "s16")
        write_tflite(tensors, matrices, encodings, graphs, folder, done)
    else:
        encodings = choose_encodings(ranges, options.recipe, options.kv_dtype) | rotation_encodings(factors)
        encodings = write_graphs(tensors, matrices, encodings, graphs, folder, options.key_layout, done)
    return encodings


def _split(checkpoint: Checkpoint, options: ExportOptions) -> Split:
    spec = checkpoint.spec
    if options.graph_format == "tflite":
        return Split.whole(spec.layers)
    context = options.contexts[-1]
    return choose_split(
        spec,
        options.recipe,
        splits=options.splits,
        embedding=options.embedding,
        head=options.head,
        geometry=Geometry(spec.layers, spec.kv_heads, spec.head_dim, context, options.kv_dtype, options.key_layout),
        ar=max(options.ar),
        graphs=len(set(options.ar)) * len(options.contexts),
    )


def _check(
    graphs: Sequence[GraphRecord], folder: Path, options: ExportOptions, progress: Progress
) -> tuple[HtpCheck, list[str]]:
    if options.graph_format != "onnx" or not options.check_on_htp:
        return "not-run", []
    found = []
    files = [*dict.fromkeys(part.file for graph in graphs for part in graph.parts)]
    for done, file in enumerate(files):
        progress("check on HTP", done, len(files))
        found += floating_nodes([folder / file], options.device)
    progress("check on HTP", len(files), len(files))
    if not found:
        return "integers-only", []
    if not options.allow_float:
        raise EngineError(
            "float check",
            found=f"{len(found)} nodes that compute in float, the first: {', '.join(found[:3])}",
            wanted="integers only",
            way_out="Report this model, or accept the slow nodes with --allow-float.",
        )
    return "float-allowed", found


@dataclass(frozen=True, slots=True)
class _Calibration:
    name: str
    text: str


def _read_calibration(path: Path | None) -> _Calibration:
    if path is None:
        default = resources.files("exporters").joinpath("calibration.txt")
        return _Calibration("edgekv's own", default.read_text("utf-8"))
    try:
        return _Calibration(path.name, path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "--calibration", found=f"{path}: {error}", wanted="a UTF-8 text file", way_out="Check the path."
        ) from error


def _recipe_record(spec: DecoderSpec, recipe: Recipe) -> RecipeRecord:
    """The recipe as it will be carried out.

    Raises:
        UsageError: no rule speaks of a matrix.
    """
    rules = ((name, recipe.rule(name)) for name in matrices_of(spec))
    weights = [WeightRecord(tensor=name, dtype=rule.dtype, method=rule.method) for name, rule in rules]
    return RecipeRecord(
        name=recipe.name,
        rotation=applied_rotation(spec, recipe.rotation),
        weights=weights,
        value_rotation=recipe.value_rotation,
        key_scaling=recipe.key_scaling,
    )


def _model_record(checkpoint: Checkpoint) -> ModelRecord:
    spec = checkpoint.spec
    return ModelRecord(
        model_type=spec.model_type,
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate,
        vocab=spec.vocab,
        max_positions=spec.max_positions,
    )


def _rope_record(rope: Rope, context: int) -> RopeRecord:
    rotation = rope.rotation(context)
    return RopeRecord(
        rope_type=rope.rope_type,
        theta=rope.theta,
        parameters={name: list(v) if isinstance(v, tuple) else v for name, v in rope.parameters.items()},
        inverse_frequencies=rotation.inverse_frequencies.tolist(),
        attention_factor=rotation.attention_factor,
    )


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(n) for n in numbers)
