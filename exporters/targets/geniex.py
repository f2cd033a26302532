"""A bundle as the folder that GenieX loads: its metadata, its loader's graphs, and its record."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from edgekv.bundle import Bundle, atomic_directory
from edgekv.errors import BundleError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.json_file import readable_json
from edgekv.machine.scratch import scratch_folder
from edgekv.spec.text import TOKENIZER
from exporters.capabilities import GENIEX
from exporters.progress import Progress, silent
from exporters.targets.genie.config import CONFIG, EXTENSIONS, SHARED_CONFIG
from exporters.targets.genie.folder import GenieManifest
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.ports import GeniePort, GeniePorts
from exporters.targets.genie.write import write_genie
from exporters.targets.graph_names import GraphName
from exporters.targets.record import TargetRecord, copy_tokenizer, write_record

METADATA = "metadata.json"
FAMILY = "llama_v3_"
"""GenieX chooses its code by the beginning of `model_id`; this one's reads all it needs from the folder."""

_DTYPES = {"u8": "uint8", "s8": "int8", "u16": "uint16", "s16": "int16"}


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    scale: float
    zero_point: int


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Shape and type of an input or output."""

    shape: list[int]
    dtype: str
    quantization_parameters: Quantization | None = None


class GraphSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs of one part of a graph, by name."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]


class GenieNotes(msgspec.Struct, frozen=True, kw_only=True):
    supports_vision: bool = False


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file.

    Attributes:
        model_id: begins with the family whose code GenieX runs.
        runtime: what the folder is for.
        precision: the recipe.
        tool_versions: what compiled.
        model_files: graphs by their names in the binaries.
        genie: no vision.
    """

    model_id: str
    runtime: str = "genie"
    precision: str
    tool_versions: dict[str, str]
    model_files: dict[str, GraphSpec]
    genie: GenieNotes = GenieNotes()


def graph_specs(graphs: Mapping[str, GeniePorts]) -> dict[str, GraphSpec]:
    """What `model_files` says of graphs."""
    return {
        name: GraphSpec(inputs=_specs(ports.inputs), outputs=_specs(ports.outputs)) for name, ports in graphs.items()
    }


def _specs(ports: Iterable[GeniePort]) -> dict[str, TensorSpec]:
    specs = {}
    for port in ports:
        if (encoding := port.encoding) is None:
            specs[port.name] = TensorSpec(shape=list(port.shape), dtype="int32")
        else:
            quantization = Quantization(scale=encoding.scale, zero_point=encoding.zero_point)
            shape, dtype = list(port.shape), _DTYPES[encoding.dtype]
            specs[port.name] = TensorSpec(shape=shape, dtype=dtype, quantization_parameters=quantization)
    return specs


FAMILIES = ("qwen3_", "qwen2_5_", "falcon_v3_", "llama_v3_", "phi_3_5_")
_PAST = re.compile(r"past_(?:key|value)_(\d+)_(?:in|out)")
_OTHERS = ("attention_mask", "position_ids", "position_ids_cos", "position_ids_sin")
_FIX = "Write the folder again: edgekv bundle geniex BUNDLE -o DIR --force"


class LoadedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What GenieX takes a folder for.

    Attributes:
        model_id: chooses the code that runs it.
        binaries: context binaries, in order.
        prefill: AR of prefill.
        decode: AR of decode.
        contexts: context lengths, ascending.
        layers: number of layers.
        layers_of: numbers of the layers of each part.
        kv_heads: heads of a cache tensor.
        head_dim: width of a head.
        vocab: number of logits.
        bos: put in front of a conversation; -1 for none.
        eos: ids that end an answer.
    """

    model_id: str
    binaries: tuple[str, ...]
    prefill: int
    decode: int
    contexts: tuple[int, ...]
    layers: int
    layers_of: tuple[tuple[int, ...], ...]
    kv_heads: int
    head_dim: int
    vocab: int
    bos: int
    eos: tuple[int, ...]


def read_as_geniex(folder: Path) -> LoadedSpec:
    """Read a folder by the loader's rules.

    Raises:
        BundleError: GenieX would refuse it, or read it as something else.
    """
    metadata, config = (_object(folder / name) for name in (METADATA, CONFIG))
    model_id = str(metadata.get("model_id", ""))
    if not model_id.startswith(FAMILIES) or model_id.startswith("qwen3_vl_") or model_id.endswith("_ssd"):
        raise _wrong("model_id", model_id, f"one that begins with {', '.join(FAMILIES)}")
    graphs: dict[tuple[int, int, int], dict[str, Any]] = {}
    parts = 0
    for name, graph in metadata["model_files"].items():
        read = GraphName.parse(name)
        if read is None or not name.endswith(read.end):
            raise _wrong("model_files", name, "names such as prompt_ar128_cl4096_1_of_2")
        graphs[read.part, read.ar, read.context] = graph
        parts = read.parts
    rows, contexts = sorted({ar for _, ar, _ in graphs}), sorted({context for _, _, context in graphs})
    if len(rows) != 2:
        raise _wrong("graphs", f"AR {', '.join(map(str, rows))}", "one AR for prefill and one for decode")
    for place in ((part, ar, context) for part in range(1, parts + 1) for ar in rows for context in contexts):
        if place not in graphs:
            raise _wrong("graphs", "none of part {}, AR {}, context {}".format(*place), "one for each")
    firsts = [graphs[part, rows[0], contexts[0]] for part in range(1, parts + 1)]
    layers_of = tuple(_layers(graph) for graph in firsts)
    if [*(layer for part in layers_of for layer in part)] != list(range(sum(map(len, layers_of)))):
        raise _wrong("layers", layers_of, "all of them, in order")
    if (entry := _entry(firsts[0])) != "input_ids":
        raise _wrong("the first input", entry, "input_ids")
    dialog = config["dialog"]
    binaries = tuple(dialog["engine"]["model"]["binary"]["ctx-bins"])
    for name in (*binaries, TOKENIZER, EXTENSIONS):
        if not (folder / name).is_file():
            raise _wrong(name, "no such file", "a file")
    key = next(graph["inputs"]["past_key_0_in"]["shape"] for graph in firsts)
    return LoadedSpec(
        model_id=model_id,
        binaries=binaries,
        prefill=rows[1],
        decode=rows[0],
        contexts=tuple(contexts),
        layers=sum(map(len, layers_of)),
        layers_of=layers_of,
        kv_heads=key[0],
        head_dim=key[2],
        vocab=firsts[-1]["outputs"]["logits"]["shape"][-1],
        bos=dialog["context"]["bos-token"],
        eos=tuple(dialog["context"]["eos-token"]),
    )


def _layers(graph: dict[str, Any]) -> tuple[int, ...]:
    layers = sorted({int(match[1]) for name in graph["inputs"] if (match := _PAST.fullmatch(name)) is not None})
    per_head = [name for name in graph["inputs"] if name.startswith("past_") and not _PAST.fullmatch(name)]
    if per_head or not layers or layers != list(range(layers[0], layers[-1] + 1)):
        raise _wrong("cache tensors", per_head[:1] or layers, "one for each layer of a part, such as past_key_0_in")
    return tuple(layers)


def _entry(graph: dict[str, Any]) -> str:
    """The first input that is none of the known ones; names are read in order of the alphabet."""
    names: list[str] = sorted(graph["inputs"])
    return next(name for name in names if name not in _OTHERS and not name.startswith("past_"))


def _object(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = DECODERS[dict[str, Any]].decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise _wrong(path.name, str(error), "a JSON object") from None
    return record


def _wrong(field: str, got: object, expected: str) -> BundleError:
    return BundleError(f"GenieX: {field}", got=got, expected=expected, fix=_FIX)


GENIEX_MANIFEST = "geniex_bundle.json"


class GeniexManifest(TargetRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`geniex_bundle.json`. `checked` says whether Genie ran the same graphs and chose edgekv's tokens.

    Attributes:
        arch: HTP version of the chip.
        compiler: the package that compiled the binaries, with its version.
        read: what GenieX takes the folder for.
    """

    arch: int
    compiler: str
    read: LoadedSpec


def write_geniex(
    bundle: Bundle, target: Path, options: GenieOptions, *, force: bool = False, progress: Progress = silent
) -> GeniexManifest:
    """Write the folder, and read it by the rules of GenieX's loader.

    Args:
        bundle: with its first token in the graphs.
        target: the folder; it appears complete or not at all.
        options: as for Genie's folder; `check` runs the same graphs in Genie.
        force: replace a folder that was written before.
        progress: called for each stage.

    Raises:
        UsageError: the target exists, or an option does not fit the bundle.
        BundleError: GenieX cannot express something of the bundle.
        EngineError: the compiler or Genie is missing, failed, or chose other tokens.
    """
    GENIEX.check(bundle)
    chosen = _two_graphs(bundle)
    with (
        atomic_directory(target, force=force, marker=GENIEX_MANIFEST) as folder,
        scratch_folder("geniex") as scratch,
    ):
        written = write_genie(chosen, scratch / "genie", replace(options, stacked=True), progress=progress)
        source = scratch / "genie"
        config = SHARED_CONFIG if written.shared else CONFIG
        shutil.copyfile(source / config, folder / CONFIG)
        for name in (*(written.shared or dict.fromkeys(g.file for g in written.graphs)), EXTENSIONS):
            shutil.move(source / name, folder / name)
        copy_tokenizer(bundle, folder)
        (folder / METADATA).write_bytes(readable_json(_metadata(chosen, target.name, written)))
        loaded = read_as_geniex(folder)
        _check(chosen, loaded)
        return write_record(
            GeniexManifest,
            folder,
            GENIEX_MANIFEST,
            bundle,
            soc=written.soc,
            checked=written.checked,
            floating=written.floating_nodes,
            arch=written.arch,
            compiler=written.compiler,
            read=loaded,
        )


def _two_graphs(bundle: Bundle) -> Bundle:
    """The bundle with its decode graphs and its largest prefill graphs alone: GenieX runs two AR."""
    manifest = bundle.manifest
    largest = max(graph.ar for graph in manifest.graphs if graph.role == "prefill")
    kept = [
        graph for graph in manifest.graphs if graph.role == "decode" or (graph.role, graph.ar) == ("prefill", largest)
    ]
    scored = [graph for graph in manifest.graphs if graph.role == "score"]
    return replace(bundle, manifest=structs.replace(manifest, graphs=[*kept, *scored]))


def _metadata(bundle: Bundle, name: str, written: GenieManifest) -> Metadata:
    manifest = bundle.manifest
    records = {
        (graph_record.ar, graph_record.context): graph_record
        for graph_record in manifest.graphs
        if graph_record.role != "score"
    }
    ports = {}
    for graph in written.graphs:
        record = records[graph.ar, graph.context]
        ports[graph.name] = GeniePorts.of(manifest, record, record.parts[graph.part - 1]).stacked()
    return Metadata(
        model_id=FAMILY + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").removesuffix("_ssd"),
        precision=manifest.recipe.name,
        tool_versions={"edgekv": written.producer.split()[-1], "compiler": written.compiler},
        model_files=graph_specs(ports),
    )


def _check(bundle: Bundle, loaded: LoadedSpec) -> None:
    """Compare what GenieX reads with the bundle."""
    model, parts = bundle.manifest.model, bundle.manifest.graphs[0].parts
    expected = (model.layers, model.kv_heads, model.head_dim, model.vocab, tuple(tuple(part.layers) for part in parts))
    got = (loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.vocab, loaded.layers_of)
    if got != expected:
        raise BundleError("what GenieX reads", got=got, expected=expected, fix="Please report this model.")
