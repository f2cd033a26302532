"""Compare quantized checkpoints with the packages that write and read them, in the parity environment.

python tests/golden/quantized_parity.py

compressed-tensors packs and unpacks matrices, and transformers computes logits of its folders and of float8 ones.
auto-gptq's and autoawq's own modules pack matrices. Exits with 1 if a weight differs at all, or a logit by more than
1e-4 of the largest.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.checkpoints import OLDER, write_checkpoint
from tests.support.foreign_files import rounded, write_awq, write_float8, write_gptq

PACKERS = Path(sys.prefix) / "packers"
TOLERANCE = 1e-4
TOKENS = 48
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 per channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4 in groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 in groups, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8, asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "float8 per channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8 per tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}


def write_compressed(folder: Path, form: str, weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """Compress the matrices of the layers with the package; returns what it decompresses."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, np.ndarray] = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if value.ndim == 1 or not key.startswith("model.layers."):
            stored[key] = value
            continue
        matrix, module = value.float(), key.removesuffix(".weight")
        groups = matrix.reshape(len(matrix), -1, weights.get("group_size") or matrix.shape[1])
        whole = weights["strategy"] == "tensor"
        low, high = (matrix.min(), matrix.max()) if whole else (groups.amin(dim=2), groups.amax(dim=2))
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        meant[key] = compressor.decompress(packed, scheme)["weight"].float().numpy()
        stored |= {f"{module}.{name}": part.contiguous() for name, part in packed.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    entry = scheme.model_dump(mode="json")
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": entry}}
    fields = json.loads((folder / "config.json").read_text())
    config |= {"ignore": ["lm_head"], "quantization_status": "compressed"}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return meant


def from_file(path: str) -> ModuleType:
    """A module of a package that is not imported as a whole: it wants older versions of transformers."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, PACKERS / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed_by_auto_gptq(matrix: np.ndarray, bits: int, group: int, symmetric: bool) -> dict[str, np.ndarray]:
    made = rounded(matrix, bits, group, symmetric=symmetric)
    module = from_file("auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py")
    packed = module.QuantLinear(bits, group, matrix.shape[1], matrix.shape[0], bias=False)
    linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    linear.weight.data = torch.from_numpy(made.values)
    scales, zeros = torch.from_numpy(made.scales.astype(np.float32)), torch.from_numpy(made.zeros.astype(np.float32))
    packed.pack(linear, scales, zeros, None)
    return {"qweight": packed.qweight.numpy(), "qzeros": packed.qzeros.numpy()}


def logits_differ(folder: Path, **how: Any) -> float:
    """The largest difference of two logits, as a share of the largest logit."""
    checkpoint = Checkpoint.open(str(folder))
    tokens = np.random.default_rng(1).integers(3, 250, TOKENS)
    (ours,) = Reference(checkpoint, 128).logits([tokens])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
    for parameter in model.parameters() if how else ():
        parameter.data = parameter.data.float()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)[None]).logits[0].float().numpy()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def weights_differ(folder: Path, meant: dict[str, np.ndarray]) -> int:
    checkpoint = Checkpoint.open(str(folder))
    return sum(int((checkpoint.tensor(key) != values).sum()) for key, values in meant.items())


def checks(scratch: Path) -> Iterator[tuple[str, float]]:
    for name, (form, weights) in SCHEMES.items():
        folder = write_checkpoint(scratch / name, OLDER, SIZES)
        meant = write_compressed(folder, form, weights)
        yield f"compressed-tensors, {name}: weights", weights_differ(folder, meant)
        if weights.get("symmetric", True):  # transformers 5.23 does not load packed zero points
            yield f"compressed-tensors, {name}: logits", logits_differ(folder)
    folder = write_checkpoint(scratch / "float8", OLDER, SIZES)
    write_float8(folder, 128, powers=True)  # which bfloat16 holds exactly: transformers dequantizes to it
    how = FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    yield "float8 in blocks: logits", logits_differ(folder, quantization_config=how)
    plain = load_file(write_checkpoint(scratch / "plain", OLDER, SIZES) / "model.safetensors")
    key = "model.layers.0.mlp.down_proj"
    matrix = plain[f"{key}.weight"].float().numpy()
    for bits, symmetric in ((4, True), (8, True), (8, False)):
        folder = write_checkpoint(scratch / f"gptq{bits}{symmetric}", OLDER, SIZES)
        write_gptq(folder, bits, 64, symmetric=symmetric)
        stored = load_file(folder / "model.safetensors")
        packed = packed_by_auto_gptq(matrix, bits, 64, symmetric)
        differ = sum(int((stored[f"{key}.{part}"].numpy() != values).sum()) for part, values in packed.items())
        yield f"auto-gptq, int{bits}{'' if symmetric else ', asymmetric'}: integers", differ
    folder = write_checkpoint(scratch / "awq", OLDER, SIZES)
    meant = write_awq(folder, 64, symmetric=False)
    stored = load_file(folder / "model.safetensors")
    parts = (stored[f"{key}.{part}"] for part in ("qweight", "qzeros", "scales"))
    qweight, qzeros, scales = parts
    awq = from_file("awq/utils/packing_utils.py")
    theirs = awq.dequantize_gemm(qweight, qzeros, scales.float(), 4, 64).T.numpy()
    yield "autoawq: weights", int((theirs != meant[f"{key}.weight"]).sum()) + weights_differ(folder, meant)


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for name, found in checks(Path(scratch)):
            worst = max(worst, found)
            print(f"{name}: {f'{found:.1e} of the largest' if name.endswith('logits') else f'{found} differ'}")
    print("the same" if worst < TOLERANCE else "not the same")
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
