"""One interface for graphs: what is written, what a manifest promises, and what a runtime finds are the same."""

from dataclasses import replace
from pathlib import Path

import msgspec
import onnx
import pytest

import edgekv
from devices import find
from edgekv.bundle import Bundle, open_bundle, read_manifest
from edgekv.errors import BundleError
from edgekv.spec import DecoderInterface, Port
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.graphs.parts import stored_graph
from exporters.quantize.recipe import find_recipe
from tests.support.checkpoints import ARCHITECTURES, EVERY_OPERATION, write_checkpoint
from tests.support.exports import exported_architecture
from tests.support.thorough import variants

CONTEXT = 64
LAYOUTS = {
    "whole": {},
    "columns": {"key_layout": "columns"},
    "parts": {"splits": 2, "context": (32, CONTEXT)},
    "host": {"embedding": "host", "head": "own", "kv_dtype": "s16"},
}


def export(folder: Path, name: str, **changes: object) -> Bundle:
    checkpoint = Checkpoint.open(str(write_checkpoint(folder / "checkpoint", ARCHITECTURES[name])))
    options = {"device": find("SM8650"), "recipe": find_recipe("w8a16"), "context": CONTEXT, "ar": (1, 8)}
    options |= {"check_on_htp": False, "check_quality": False, "calibration_tokens": 64}
    export_bundle(checkpoint, folder / "bundle", ExportOptions(**(options | changes)))
    return open_bundle(folder / "bundle")


def in_file(value: onnx.ValueInfoProto) -> Port:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return Port(value.name, dtype.name, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim))


@pytest.mark.parametrize(
    ("name", "layout"), [("gemma3", "parts"), ("phi4-mini", "parts"), *(("llama-2", layout) for layout in LAYOUTS)]
)
def test_the_manifest_gives_the_ports_of_every_file_in_order(tmp_path: Path, name: str, layout: str) -> None:
    """AI Hub numbers outputs by their order in the file."""
    bundle = export(tmp_path, name, **LAYOUTS[layout])
    for graph in bundle.manifest.graphs:
        for part in graph.parts:
            found = stored_graph(bundle.part_path(part)).graph
            interface = bundle.manifest.interface.graph(graph, part)
            assert interface.inputs == tuple(map(in_file, found.input))
            assert interface.outputs == tuple(map(in_file, found.output))


@pytest.mark.parametrize("name", variants(sorted(ARCHITECTURES), {*EVERY_OPERATION, "lfm3", "qwen3_5"}))
def test_a_checkpoint_and_its_manifest_have_one_interface(name: str) -> None:
    bundle = exported_architecture(name)
    manifest, spec = read_manifest(bundle), Checkpoint.open(str(bundle.parent / "checkpoint")).spec
    made = DecoderInterface.of(spec, CONTEXT, manifest.kv_dtype, manifest.key_layout, "u16")
    for graph in manifest.graphs:
        assert made.parts(graph) == manifest.interface.parts(graph)


def test_every_port_names_its_encoding(small: Path) -> None:
    manifest = read_manifest(small)
    for graph in manifest.graphs:
        interface = manifest.interface.graph(graph)
        for port in (*interface.inputs, *interface.outputs):
            assert (port.encoding is None) == (port.dtype == "int32")
            assert port.encoding is None or port.encoding in manifest.encodings


def test_an_encoding_of_another_type_is_refused(small: Path) -> None:
    manifest = read_manifest(small)
    encodings = manifest.encodings | {"logits": replace(manifest.encodings["logits"], dtype="s16", zero_point=0)}
    changed = msgspec.structs.replace(manifest, encodings=encodings)
    (small / "manifest.json").write_bytes(msgspec.json.encode(changed))
    with pytest.raises(BundleError, match="encodings: logits: got int16; expected uint16"):
        read_manifest(small)


@pytest.mark.parametrize("graph_format", ["onnx", "tflite"])
def test_a_rotary_embedding_that_no_layer_reads_is_no_input(tmp_path: Path, graph_format: str) -> None:
    """Gemma 3 with windows in all layers: the embedding of the others is in the configuration all the same."""
    config = ARCHITECTURES["gemma3-newer"] | {"layer_types": ["sliding_attention"] * 2}
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", config)))
    options = ExportOptions(
        device=find("SM8650"),
        recipe=find_recipe("w8a16"),
        context=CONTEXT,
        ar=(1, 8),
        check_on_htp=False,
        graph_format=graph_format,
        kv_dtype="s16",
        calibration_tokens=64,
    )
    export_bundle(checkpoint, tmp_path / "bundle", options)
    bundle = open_bundle(tmp_path / "bundle")
    assert "position_ids_cos" not in bundle.manifest.interface.graph(bundle.manifest.graphs[0])
    model = edgekv.load(tmp_path / "bundle", engine="cpu" if graph_format == "onnx" else "litert")
    assert model.score([1, 2, 3]).std() > 0
