"""What other runtimes can run of a bundle, and the one refusal of what they cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgekv.bundle import Bundle, Manifest
from edgekv.errors import BundleError, EngineError
from edgekv.spec.geometry import KvDtype


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a reader of bundles can run.

    Attributes:
        reader: its name, for errors.
        parts: `any`; `layers`: parts that all have layers, from token ids to logits; `one`: a graph is one file.
        cache_types: integer types of the cache.
        windows: layers that attend to fewer tokens than the context, or with rotary tables of their own.
        ropes: kinds of rotary embedding, over all elements of a head; empty for all.
        slots: graphs with inputs for adapters.
        sink: first tokens whose keys and values no graph computes.
        states: layers with a state in place of keys and values, such as short convolutions.
        delta_rules: layers with a gated delta rule or Mamba-2, whose checkpoints the host computes.
        layered: layers that differ in size or share a cache, as Gemma 4's.
        layer_inputs: layers with inputs that the host gathers, as Gemma 4's.
        pictures: a vision encoder, whose rows stand among the embeddings.
        picture_layers: layers that add rows of pictures, or rotary embeddings that turn with their rows and columns, or
            attention of a picture's rows to each other.
        picture_shapes: one whose pictures have shapes of their own, and further inputs for them, as LFM2-VL's.
        hidden: graphs that also give their last hidden state.
        tasks: models that give embeddings or scores, and no logits.
        decode_alone: bundles without a prefill graph.
    """

    reader: str
    parts: Literal["any", "layers", "one"] = "any"
    cache_types: tuple[KvDtype, ...] = ("u8", "s8", "s16")
    windows: bool = False
    ropes: tuple[str, ...] = ()
    slots: bool = False
    sink: bool = True
    states: bool = False
    delta_rules: bool = False
    layered: bool = False
    layer_inputs: bool = False
    pictures: bool = False
    picture_layers: bool = False
    picture_shapes: bool = False
    hidden: bool = False
    tasks: bool = False
    decode_alone: bool = True

    def check(self, bundle: Bundle) -> None:
        """Refuse a bundle that the reader cannot run.

        Raises:
            BundleError: naming what the bundle has, and how to export one without it.
        """
        for field, got, expected, fix in self._obstacles(bundle.manifest):
            raise BundleError(f"bundle {bundle.path}: {field}", got=got, expected=expected, fix=fix)

    def check_nodes(self, bundle: Bundle, floating: Sequence[str]) -> None:
        """Refuse compiled graphs that compute in float, unless the bundle was exported with `--allow-float`.

        Args:
            bundle: their source.
            floating: the nodes of the compiled graphs that compute in float.

        Raises:
            EngineError: naming the nodes.
        """
        if floating and bundle.manifest.htp_check != "float-allowed":
            raise EngineError(
                f"float check of the graphs for {self.reader}",
                got=f"{len(floating)} nodes that compute in float, the first: {', '.join(floating[:3])}",
                expected="integers only, as in the bundle",
                fix="Report this model, or export it for this chip with --allow-float to accept the slow nodes.",
            )

    def _obstacles(self, manifest: Manifest) -> Iterator[tuple[str, str, str, str]]:
        """Field, what was found, what is expected, and the fix."""
        if manifest.target is not None:
            fix = "Give it as --draft to edgekv generate, chat or serve, with its target."
            yield "drafter", "graphs that read the state of another model", "a model of its own", fix
        if manifest.task is not None and not self.tasks:
            expected = f"a model that writes text, all that {self.reader} reads"
            yield "task", manifest.task.noun, expected, manifest.task.use
        if manifest.model.gives_hidden and not self.hidden:
            expected = f"logits alone, all that {self.reader} reads"
            yield "graphs", "graphs that give a hidden state too", expected, "Export it without --give-hidden."
        if manifest.graph_format != "onnx":
            expected = f"onnx graphs, which {self.reader} reads"
            yield "graphs", f"{manifest.graph_format} graphs", expected, "Export it with --format onnx."
        if not self.pictures and manifest.vision is not None:
            kind = manifest.vision.encoder.model_type
            expected = f"text alone: edgekv writes no encoder of {kind} for {self.reader}"
            yield "vision encoder", manifest.vision.file, expected, "Run it with edgekv generate or serve."
        elif not self.picture_shapes and manifest.vision is not None and manifest.vision.encoder.has_shapes:
            got = f"one of {manifest.vision.encoder.model_type}, whose pictures have shapes of their own"
            expected = f"pixels as its only input: edgekv writes no others for {self.reader}"
            yield "vision encoder", got, expected, "Run it with edgekv generate or serve."
        if self.parts == "one" and not manifest.is_whole:
            parts = max(len(graph.parts) for graph in manifest.graphs)
            got = f"graphs of {parts} parts" if parts > 1 else "graphs that read embeddings"
            expected = f"graphs that are one file from token ids to logits, which {self.reader} runs"
            yield "graphs", got, expected, "Export it with --splits 1 --head last --embedding graph."
        if self.parts == "layers" and (manifest.host_embeds or any(not part.layers for part in manifest.parts)):
            got, expected = "embeddings or a head without layers", f"parts with layers, which {self.reader} runs"
            yield "parts", got, expected, "Export it with --embedding graph --head last."
        if manifest.lora is not None and not self.slots:
            expected, fix = f"graphs without, which {self.reader} runs", "Export it without --lora-slots; --lora FOLDER"
            yield "graphs", "graphs with slots for adapters", expected, f"{fix} merges an adapter for good."
        if manifest.kv_dtype not in self.cache_types:
            expected = f"{' or '.join(self.cache_types)}, all that {self.reader} has"
            yield "cache", manifest.kv_dtype, expected, f"Export it with --kv {self.cache_types[0]}."
        if not self.windows and (manifest.windows or manifest.model.local_rope is not None):
            windows = ", ".join("all" if window is None else str(window) for window in manifest.windows)
            expected = f"layers that all attend to the whole context, as {self.reader} lets them"
            yield "attention windows", windows or "two rotary embeddings", expected, "Run it with edgekv generate."
        rope, width = manifest.model.rope, manifest.model.head_dim
        if self.ropes and (rope.rope_type not in self.ropes or rope.width != width):
            expected = (
                f"{' or '.join(self.ropes)} of all {width} elements, whose tables in {self.reader} equal edgekv's"
            )
            yield (
                "rotary embedding",
                f"{rope.rope_type} of {rope.width} elements",
                expected,
                "Run it with edgekv generate.",
            )
        if not self.states and manifest.model.has_states:
            expected = f"keys and values in every layer, all that {self.reader} keeps"
            yield "layers", "layers with states", expected, "Run it with edgekv generate."
        elif not self.delta_rules and (rule := manifest.model.delta_rule) is not None:
            expected = f"states that {self.reader} moves by itself"
            yield "layers", f"layers with {rule.noun}", expected, "Run it with edgekv generate."
        model = manifest.model
        if not self.layered and (len({*model.layer_sizes}) > 1 or model.cache_owners):
            expected = f"layers of one size with a cache each, all that {self.reader} feeds"
            yield "layers", "two sizes of layers or shared caches", expected, "Run it with edgekv generate."
        if not self.layer_inputs and model.layer_inputs:
            expected = f"token ids or embeddings alone, all that {self.reader} feeds"
            yield "layers", "inputs that the host gathers for each layer", expected, "Run it with edgekv generate."
        if not self.picture_layers and (model.picture_layers or model.picture_axes):
            expected = f"rows of pictures among the embeddings alone: edgekv writes no others for {self.reader}"
            got = "layers that add rows of pictures, and positions of rows and columns"
            yield "layers", got, expected, "Run it with edgekv generate."
        if not self.picture_layers and model.whole_pictures:
            expected = f"tokens that attend to those before them alone, all that {self.reader} masks"
            yield "attention", "rows of pictures that attend to each other", expected, "Run it with edgekv generate."
        if not self.sink and manifest.sink is not None:
            expected = f"graphs that compute it: {self.reader} starts every conversation empty"
            yield "sink", "a first token that is restored", expected, "Export it with --sink none."
        if not self.decode_alone and not any(graph.role == "prefill" for graph in manifest.graphs):
            got = f"only {', '.join(graph.name for graph in manifest.graphs if graph.role != 'score')}"
            yield "graphs", got, f"a prefill graph as well, which {self.reader} needs", "Export it with --ar 1,32."


ONNX = Capabilities(
    "edgekv's own reports",
    windows=True,
    slots=True,
    states=True,
    delta_rules=True,
    layered=True,
    layer_inputs=True,
    pictures=True,
    picture_layers=True,
    picture_shapes=True,
    hidden=True,
    tasks=True,
)
ENGINE = replace(ONNX, reader="edgekv's engine htp")
GENIE = Capabilities("Genie", slots=True, ropes=("default", "llama3"), states=True, layer_inputs=True, pictures=True)
GENIEX = replace(
    GENIE,
    reader="GenieX",
    parts="layers",
    slots=False,
    sink=False,
    states=False,
    layer_inputs=False,
    pictures=False,
    decode_alone=False,
)
GENAI = Capabilities("onnxruntime-genai", parts="one", cache_types=("u8",), decode_alone=False)
AI_HUB = Capabilities("AI Hub", parts="one", windows=True, states=True)
