"""A vision encoder of a published shape with random weights, and the answers of a small trained model.

python -m benchmarks.pictures encoder                 SmolVLM2's encoder: export, SQNR per row, compiler
python -m benchmarks.pictures encoder internvl3.5     InternVL's; also lfm2-vl, qwen2.5-vl, qwen3-vl, gemma3 and gemma4
python -m benchmarks.pictures encoder --format tflite                          as a TFLite graph
python -m benchmarks.pictures encoder --encoder-16bit 'vision.layers.*.fc2.weight'    matrices at 16 bits
python -m benchmarks.pictures speed [SHAPE]           a tile on the CPU, beside onnxruntime's float32 graph
python -m benchmarks.pictures answers BUNDLE          a bundle of models/shapes-360k: answers against the float model
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from PIL import Image

import edgekv
from devices import find
from edgekv.bundle import ENCODER, ENCODER_FILES, BundleWeights, GraphFormat, VisionRecord, open_bundle
from edgekv.graphs.encoder import encoded
from edgekv.graphs.float_encoder import FloatEncoderOps
from edgekv.graphs.products import Products, Rows
from edgekv.graphs.weight_file import WeightFile
from edgekv.kv.memory import aligned_zeros
from edgekv.machine.graph_file import write_graph
from edgekv.pictures import EncoderInputs, encoder_inputs, graph_inputs, row_places
from edgekv.runtime.cpu import CpuEngine
from edgekv.runtime.litert import LitertEngine
from edgekv.spec import ROWS_PORT, Config, PictureSpec
from exporters.checkpoint.checkpoint import Checkpoint, PicturedRows
from exporters.checkpoint.vision import VisionEncoder, WideEncoder
from exporters.conformance.encoders import random_encoder
from exporters.graphs.encoder import QdqEncoder
from exporters.graphs.tflite.encoder import write_tflite_encoder
from exporters.graphs.weights import ShardWriter
from exporters.htp.compile import compile_graphs
from exporters.htp.compile_tflite import compile_tflite
from exporters.quantize.encoder import EncoderTensors, NumpyEncoder, encode, quantize_encoder
from exporters.quantize.pictures import CALIBRATION_TILES, drawn_picture
from exporters.quantize.recipe import find_recipe
from exporters.quantize.reference import Reference
from models.shapes import QUESTION, drawn
from quant import DTYPES, Encoding, QuantizedWeight

_SMOLVLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "scale_factor": 4,
    "text_config": {"hidden_size": 960, "num_hidden_layers": 32},
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
_INTERNVL: dict[str, Any] = {
    "model_type": "internvl",
    "text_config": {"hidden_size": 1024, "num_hidden_layers": 28},
    "vision_config": {"attention_bias": True, "image_size": [448, 448], "patch_size": [14, 14]},
}
_LFM2_VL: dict[str, Any] = {
    "model_type": "lfm2_vl",
    "text_config": {"hidden_size": 1024, "num_hidden_layers": 16},
    "vision_config": {},
}
_QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 2048, "num_hidden_layers": 28},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "depth": 24,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
_QWEN2_5_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {"hidden_size": 2048, "num_hidden_layers": 36},
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "num_hidden_layers": 34},
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {"hidden_size": 1536, "num_hidden_layers": 35, "hidden_size_per_layer_input": 256},
    "vision_config": {"use_clipped_linears": True},
}
SHAPES = {
    "smolvlm2": (_SMOLVLM, {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}, "resample": 1}),
    "internvl3.5": (_INTERNVL, {"size": {"height": 448, "width": 448}, "resample": 3}),
    "lfm2-vl": (_LFM2_VL, {}),
    "qwen2.5-vl": (_QWEN2_5_VL, {"min_pixels": 3136, "max_pixels": 12845056}),
    "qwen3-vl": (_QWEN3_VL, {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}),
    "gemma3": (_GEMMA3, {"size": {"height": 896, "width": 896}, "resample": 2}),
    "gemma4": (_GEMMA4, {"do_normalize": False}),
}


def published_encoder(shape: str, layers: int | None = None) -> VisionEncoder:
    """An encoder of random weights, of so many layers; None for those of the published one."""
    fields, prepared = SHAPES[shape]
    if layers is not None:
        fewer: dict[str, Any] = {"num_hidden_layers": layers}
        if shape == "qwen3-vl":
            fewer = {"depth": layers, "deepstack_visual_indexes": [*range(min(layers, 3))]}
        if shape == "qwen2.5-vl":
            fewer = {"depth": layers, "fullatt_block_indexes": [*range(7, layers, 8)] or [layers - 1]}
        fields = fields | {"vision_config": fields["vision_config"] | fewer}
    return random_encoder(Config(fields), Config(prepared))


def measure_encoder(shape: str, graph_format: GraphFormat, wide: Sequence[str]) -> None:
    """Quantize, write, compare with float on a picture that was not calibrated on, and compile.

    Args:
        shape: of `SHAPES`.
        graph_format: of the graph.
        wide: patterns over the names of matrices that are kept at 16 bits.
    """
    vision = published_encoder(shape)
    began, spec = time.perf_counter(), vision.spec
    recipe = msgspec.structs.replace(find_recipe("w8a16"), encoder_16bit=tuple(wide))
    names = recipe.wide_matrices(spec)
    tensors: EncoderTensors = WideEncoder(vision, names) if names else vision
    seen, (new,) = (
        [encoder_inputs(drawn_picture(number, spec.image), spec, vision.pictures) for number in numbers]
        for numbers in (range(CALIBRATION_TILES), [99])
    )
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / ENCODER_FILES[graph_format]
        encodings = _write(tensors, vision.pictures, seen, file)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        parameters = sum(rows * columns for rows, columns in spec.matrices.values())
        size = sum(each.stat().st_size for each in file.parent.iterdir()) / 1e6
        print(f"{shape}: {parameters / 1e6:.1f} M parameters, {spec.inputs} rows in, {spec.rows} out")
        print(f"export {time.perf_counter() - began:.0f} s, {peak:.2f} GB; {file.name} with weights {size:.1f} MB")
        _compare(vision, new, encodings, file)
        _compile(file)


class _FloatProducts(Products):
    """Products with the same matrices in float32, as a graph has them that nobody quantized."""

    def multiply(self, x: Rows, weight: QuantizedWeight, key: str) -> str:
        return self._nodes.add("MatMul", [x.name, self._stored(f"{key}.float", weight.dequantize())], f"{key}.product")


class _Float32Ops(FloatEncoderOps):
    """The graph of `fast` with float32 matrices: heads are one operation, and norms are the runtime's own."""

    def __init__(self, vision: VisionRecord, weights: BundleWeights, file: WeightFile) -> None:
        super().__init__(vision, weights, "fast", file)
        self._products = _FloatProducts(
            self._nodes, file, "fast", is_scoring=False, batch_invariant=False, in_groups=False
        )


def measure_speed(shape: str, tiles: int, layers: int | None = None) -> None:
    """Print what a tile takes in `exact16`, `fast` and float32: processor time of one thread, the least by turns."""
    vision = published_encoder(shape, layers)
    spec = vision.spec
    names = find_recipe("w8a16").wide_matrices(spec)
    tensors: EncoderTensors = WideEncoder(vision, names) if names else vision
    shown = encoder_inputs(drawn_picture(0, spec.image), spec, vision.pictures)
    found = quantize_encoder(tensors, vision.pictures, [shown])
    store = ShardWriter(tensors.tensor, lambda _: spec.head_dim, found.matrices)
    QdqEncoder(tensors.spec, found.encodings, store).build()
    given, sessions = graph_inputs(shown, spec, found.encodings), dict[str, ort.InferenceSession]()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store.write(folder / "weights-vision.safetensors")
        record = VisionRecord(
            file=ENCODER_FILES["onnx"],
            encoder=tensors.spec,
            pictures=vision.pictures,
            encodings=found.encodings,
            weights=store.places,
            calibration="drawn",
            calibration_tiles=1,
        )
        weights = BundleWeights(folder, store.places)
        for mode in ("exact16", "fast", "float32"):
            with (folder / mode).open("wb") as file:
                written = WeightFile(file, mode)
                ops = _Float32Ops(record, weights, written) if mode == "float32" else None
                if ops is None:
                    ops = FloatEncoderOps(record, weights, "fast" if mode == "fast" else "exact16", written)
                model = ops.finish(encoded(ops, tensors.spec, ops.entry))
            onnx.save(model, folder / f"{mode}.onnx")
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            sessions[mode] = ort.InferenceSession(folder / f"{mode}.onnx", options, providers=["CPUExecutionProvider"])
        min_s = dict.fromkeys(sessions, float("inf"))
        for _ in range(tiles):
            for mode, session in sessions.items():
                began = time.process_time()
                session.run([ROWS_PORT], given)
                min_s[mode] = min(min_s[mode], time.process_time() - began)
    for mode, seconds in min_s.items():
        print(f"{shape}: {mode} {seconds:.2f} s a tile, {seconds / min_s['float32']:.2f} x float32")


def _write(
    tensors: EncoderTensors, prepared: PictureSpec, pictures: Sequence[EncoderInputs], file: Path
) -> Mapping[str, Encoding]:
    spec, is_onnx = tensors.spec, file.name == ENCODER_FILES["onnx"]
    found = quantize_encoder(tensors, prepared, pictures, "u16" if is_onnx else "s16")
    if is_onnx:
        store = ShardWriter(tensors.tensor, lambda _: spec.head_dim, found.matrices)
        graph = QdqEncoder(spec, found.encodings, store)
        outputs = graph.build()
        store.write(file.parent / "weights-vision.safetensors")
        write_graph(graph.finish(outputs).SerializeToString(), file)
    else:
        write_tflite_encoder(tensors, found.matrices, found.encodings, file)
    return found.encodings


def _compare(vision: VisionEncoder, picture: EncoderInputs, encodings: Mapping[str, Encoding], file: Path) -> None:
    """Print the SQNR of the rows of a picture, and what a tile takes."""
    spec, given = vision.spec, graph_inputs(picture, vision.spec, encodings)
    if file.name == ENCODER_FILES["onnx"]:
        engine, session = "emulate", CpuEngine(1).session(file)

        def run() -> NDArray[Any]:
            return session.run([ROWS_PORT], given)[0]
    else:
        engine, binding = "litert", LitertEngine(1).encoder(file)
        rows = aligned_zeros((1, 1, spec.output_rows, spec.output), "int16")
        placed = {name: aligned_zeros(values.shape, "int16") for name, values in given.items()}
        for name, values in placed.items():
            values[:] = given[name]
            binding.inputs([name], DTYPES["s16"], values.shape, [values.ctypes.data])
        binding.outputs([ROWS_PORT], DTYPES["s16"], rows.shape, [rows.ctypes.data])

        def run() -> NDArray[Any]:
            binding.run()
            return rows

    run()
    began = time.process_time()
    found = run()
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (wanted,) = encode(NumpyEncoder(vision), spec, [picture])
    wanted = wanted[:, : spec.output]  # what layers read is not compared
    rows_found = found[0, 0, picture.output_rows(spec)]
    noise = np.square(encodings[ROWS_PORT].dequantize(rows_found) - wanted).sum(-1)
    ratios = 10 * np.log10(np.square(wanted).sum(-1) / noise)
    print(f"SQNR of rows {ratios.min():.1f} dB at least, median {np.median(ratios):.1f}")
    print(f"{engine}: {seconds:.2f} s of processor time a tile, one thread; {peak:.2f} GB at most so far")


def _compile(file: Path) -> None:
    """Print what compiling for SM8650 takes."""
    began, device, found = time.perf_counter(), find("SM8650"), ""
    if file.name == ENCODER_FILES["onnx"]:
        floating, peaks = dict[str, list[str]](), dict[str, int]()
        (target := file.parent / "compiled").mkdir()
        models = {ENCODER: file}
        binary = (
            target / compile_graphs(device, models, target, watch=peaks.__setitem__, lint=floating.__setitem__).file
        )
        peak = max(peaks.values()) / 2**30
        found = f", {sum(map(len, floating.values()))} float nodes"
    else:
        compile_tflite(file, binary := file.with_name("compiled.tflite"), [ENCODER], device)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    seconds, size = time.perf_counter() - began, binary.stat().st_size / 1e6
    print(f"SM8650: {seconds:.0f} s, {peak:.2f} GB, binary {size:.0f} MB{found}")


def compare_answers(path: Path, count: int) -> tuple[int, int]:
    """How many answers to drawn pictures are the float model's, token for token, and how many are right.

    Those of the float model are read from its logits along the bundle's answers.
    """
    bundle = open_bundle(path)
    checkpoint = Checkpoint.open(bundle.manifest.source.checkpoint)
    vision, same, right = checkpoint.vision, 0, 0
    assert vision is not None, "a checkpoint with a vision encoder"
    with edgekv.load(path) as model:
        for number in range(count):
            pixels, words = drawn(number)
            parts = [{"type": "image", "picture": 0}, {"type": "text", "text": QUESTION}]
            answer = model.generate(
                messages=[{"role": "user", "content": parts}],
                max_new_tokens=24,
                temperature=0.0,
                pictures=[_file(pixels)],
            )
            tokens = list(answer)
            right += "".join(token.text for token in tokens) == words
            (rows,) = encode(NumpyEncoder(vision), vision.spec, [encoder_inputs(pixels, vision.spec, vision.pictures)])
            shown = PicturedRows(rows, row_places(*vision.spec.grid_of(*pixels.shape[1::-1])))
            vocab, prompt = checkpoint.spec.vocab, answer.prompt
            placed = np.cumsum([token >= vocab for token in prompt]) - 1
            ids = [vocab + at if token >= vocab else token for token, at in zip(prompt, placed, strict=True)]
            said = [token.id for token in tokens]
            window = np.array([*ids, *said[:-1]])
            (logits,) = Reference(checkpoint.with_pictures(shown)).logits([window])
            same += logits[len(ids) - 1 :].argmax(-1).tolist() == said
    return same, right


def measure_answers(path: Path, count: int) -> None:
    """Print what `compare_answers` says."""
    same, right = compare_answers(path, count)
    print(f"{count} pictures: {same / count:.1%} of the answers are the float model's, {right / count:.1%} are right")


def _file(pixels: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    encoder = kinds.add_parser("encoder")
    encoder.add_argument("shape", nargs="?", choices=SHAPES, default="smolvlm2")
    encoder.add_argument("--format", choices=ENCODER_FILES, default="onnx")
    encoder.add_argument("--encoder-16bit", metavar="PATTERN", nargs="+", default=[])
    speed = kinds.add_parser("speed")
    speed.add_argument("shape", nargs="?", choices=SHAPES, default="smolvlm2")
    speed.add_argument("--tiles", type=int, default=5)
    speed.add_argument("--layers", type=int, help="those of the published encoder by default")
    answers = kinds.add_parser("answers")
    answers.add_argument("bundle", type=Path)
    answers.add_argument("--pictures", type=int, default=500)
    given = parser.parse_args()
    if given.kind == "encoder":
        measure_encoder(given.shape, given.format, given.encoder_16bit)
    elif given.kind == "speed":
        measure_speed(given.shape, given.tiles, given.layers)
    else:
        measure_answers(given.bundle, given.pictures)


if __name__ == "__main__":
    main()
