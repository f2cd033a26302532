"""What each target can run of a bundle: one record, one refusal, and the table of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from devices import find
from edgekv.bundle import Bundle, CompiledManifest, Manifest, SinkRecord, open_bundle
from edgekv.errors import BundleError, EngineError
from edgekv.spec.decoder import Convolution
from exporters.capabilities import AI_HUB, GENAI, GENIE, GENIEX, ONNX, Capabilities
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import BinaryChoice, compile_bundle
from exporters.export import export_bundle
from exporters.graphs.qdq import QdqOps, Tensor
from exporters.lora.options import LoraOptions
from exporters.targets.genai.options import GenaiOptions
from exporters.targets.genai.write import write_genai
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.write import write_genie
from exporters.targets.geniex import write_geniex
from exporters.targets.record import TargetRecord
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported, small_options
from tests.support.pages import ROOT
from tests.support.picture_models import write_gemma3_vl, write_lfm2_vl, write_qwen3_vl, write_smolvlm

TARGETS = {"Genie": GENIE, "GenieX": GENIEX, "onnxruntime-genai": GENAI, "AI Hub": AI_HUB, "reports": ONNX}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """A bundle for each thing that not every target runs, and a plain one."""
    folder = tmp_path_factory.mktemp("capabilities")
    checkpoint = write_checkpoint(folder / "checkpoint")

    def opened(**options: Any) -> Bundle:
        return open_bundle(exported(checkpoint, export_options(context=32, **{"ar": (1, 8), **options})))

    plain, pictured = opened(), export_options(context=96, ar=(1, 16))
    sink = SinkRecord(tokens=[256], file="sink.safetensors", result="residual", ratio=9.0)

    def changed(**changes: Any) -> Bundle:
        return Bundle(plain.path, structs.replace(plain.manifest, **changes))

    limited: Manifest = structs.replace(plain.manifest, model=structs.replace(plain.manifest.model, limits=(16, None)))
    return {
        "plain": plain,
        "split into parts": opened(splits=2),
        "`--kv s16` (columns)": changed(kv_dtype="s16"),
        "attention windows": Bundle(plain.path, limited),
        "first token outside of the graphs": changed(sink=sink),
        "layers with states": changed(
            model=structs.replace(plain.manifest.model, convolution=Convolution(layers=frozenset({0}), kernel=3))
        ),
        "decode alone": opened(ar=(1,)),
        "tflite": changed(graph_format="tflite"),
        "slots": opened(lora=LoraOptions(rank=4)),
        "pictures": open_bundle(exported(write_smolvlm(folder / "smolvlm"), pictured)),
        "pictures with shapes of their own": open_bundle(exported(write_lfm2_vl(folder / "lfm2_vl"), pictured)),
        "rows of pictures behind layers": open_bundle(exported(write_qwen3_vl(folder / "qwen3_vl"), pictured)),
        "rows of pictures that attend to each other": open_bundle(
            exported(write_gemma3_vl(folder / "gemma3"), pictured)
        ),
    }


REFUSED = {
    "plain": (),
    "split into parts": ("GenieX", "onnxruntime-genai", "AI Hub"),
    "`--kv s16` (columns)": ("onnxruntime-genai",),
    "attention windows": ("Genie", "GenieX", "onnxruntime-genai"),
    "first token outside of the graphs": ("GenieX",),
    "layers with states": ("GenieX", "onnxruntime-genai"),
    "decode alone": ("GenieX", "onnxruntime-genai"),
    "tflite": tuple(TARGETS),
    "slots": ("GenieX", "onnxruntime-genai", "AI Hub"),
    "pictures": ("GenieX", "onnxruntime-genai", "AI Hub"),
    "pictures with shapes of their own": ("Genie", "GenieX", "onnxruntime-genai", "AI Hub"),
    "rows of pictures behind layers": ("Genie", "GenieX", "onnxruntime-genai", "AI Hub"),
    "rows of pictures that attend to each other": ("Genie", "GenieX", "onnxruntime-genai", "AI Hub"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_target_refuses_what_it_cannot_run_and_says_how_to_export_it(
    bundles: dict[str, Bundle], what: str
) -> None:
    for name, target in TARGETS.items():
        if name not in REFUSED[what]:
            target.check(bundles[what])
            continue
        with pytest.raises(BundleError, match=rf"^bundle .*: got .*; expected .*{target.reader}.*\. (Export|Run) it "):
            target.check(bundles[what])


def test_a_capability_is_all_that_decides(bundles: dict[str, Bundle]) -> None:
    everything = Capabilities(
        "a new one", windows=True, slots=True, states=True, pictures=True, picture_shapes=True, picture_layers=True
    )
    without = replace(everything, picture_layers=False)
    with pytest.raises(BundleError, match="layers that add rows of pictures"):
        without.check(bundles["rows of pictures behind layers"])
    for what, bundle in bundles.items():
        if what != "tflite":
            everything.check(bundle)


def test_the_documentation_says_refused_where_a_target_refuses() -> None:
    lines = (ROOT / "docs" / "reference" / "compatibility.md").read_text().splitlines()
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    columns = {"Genie on the HTP": "Genie", "onnxruntime-genai on CPU and HTP": "onnxruntime-genai"}
    columns |= {"AI Hub's client": "AI Hub"}
    compared = 0
    for what, *cells in rows:
        for title, cell in zip(header[1:], cells, strict=False):
            if what in REFUSED and title in columns:
                assert (cell == "refused") == (columns[title] in REFUSED[what]), (what, title)
                compared += 1
    assert compared == 24


def bare_sigmoid(self: QdqOps, x: Tensor, name: str) -> Tensor:
    """SiLU without its inner quantization: the compiler computes it in float."""
    self._nodes.node("Sigmoid", [x.name], [self._nodes.unique(name)])
    return Tensor(name, self._encodings[name])


@pytest.mark.htp
def test_every_target_refuses_float_nodes_that_the_export_did_not_allow_and_records_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle was not checked, or for another chip."""
    monkeypatch.setattr(QdqOps, "sigmoid", bare_sigmoid)
    device, checkpoint = find("SM8650"), Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint")))
    given = small_options("w8a16", context=64, ar=(1, 16), key_layout="columns")
    export_bundle(checkpoint, tmp_path / "unchecked", replace(given, check_on_htp=False))
    allowed = export_bundle(checkpoint, tmp_path / "allowed", replace(given, check_on_htp=True, allow_float=True))
    assert allowed.htp_check == "float-allowed" and allowed.floating_nodes
    genie = GenieOptions(check=False, per_graph_binaries=False)

    def written(bundle: Bundle) -> Iterator[Callable[[], CompiledManifest | TargetRecord]]:
        yield lambda: compile_bundle(bundle, device, choice=BinaryChoice(per_graph=False))
        yield lambda: write_genie(bundle, tmp_path / "genie", genie)
        yield lambda: write_geniex(bundle, tmp_path / "geniex", genie)
        yield lambda: write_genai(bundle, tmp_path / "genai", GenaiOptions(device, pad_token=5, check=False))

    for write in written(open_bundle(tmp_path / "unchecked")):
        with pytest.raises(
            EngineError, match=r"float check .* nodes that compute in float, the first: .*--allow-float"
        ):
            write()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "unchecked", "allowed"}
    assert not [*(tmp_path / "unchecked").glob("compiled/*")]
    for write in written(open_bundle(tmp_path / "allowed")):
        nodes = write().floating_nodes
        assert nodes and all("igmoid" in node or "ar1" in node or "ar16" in node for node in nodes)
