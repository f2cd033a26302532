"""Quantized checkpoints: GPTQ, AWQ, compressed-tensors and float8, read as their layouts say and carried over."""

import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

import edgekv
from devices import find
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import CheckpointError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.export import ExportOptions, export_bundle
from exporters.plan import plan_export
from exporters.quantize.as_stored import resolve, stored_record
from exporters.quantize.recipe import Recipe, WeightRule, find_recipe
from tests.support.checkpoints import ARCHITECTURES, OLDER, write_checkpoint
from tests.support.exports import CALIBRATION_TOKENS, export_options, small_options
from tests.support.foreign_files import read_tensors, rounded, write_awq, write_compressed, write_float8, write_gptq

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
WRITERS: dict[str, Any] = {
    "gptq": write_gptq,
    "gptq v2, 8 bits per channel": partial(write_gptq, bits=8, group=None, version=2),
    "gptq, asymmetric": partial(write_gptq, group=64, symmetric=False),
    "gptq v2, asymmetric": partial(write_gptq, group=64, version=2, symmetric=False),
    "gptq, act-order": partial(write_gptq, group=32, act_order=True),
    "gptq, a last group that is shorter": partial(write_gptq, group=96),
    "awq": partial(write_awq, group=128, symmetric=False),
    "awq, symmetric": write_awq,
    "pack-quantized, 4 bits per channel": write_compressed,
    "pack-quantized, groups": partial(write_compressed, group=64),
    "pack-quantized, 8 bits": partial(write_compressed, bits=8),
    "pack-quantized, asymmetric": partial(write_compressed, group=32, symmetric=False),
    "int-quantized": partial(write_compressed, bits=8, packs=False),
    "int-quantized, asymmetric": partial(write_compressed, bits=8, packs=False, symmetric=False),
    "float8 in blocks": partial(write_float8, block=48),
    "float8 per channel": write_float8,
    "float8 per tensor": partial(write_float8, scale="tensor"),
    "float-quantized": partial(write_float8, form="compressed"),
    "float-quantized in blocks": partial(write_float8, block=48, form="compressed"),
}


SHORT = ["--ar", "1,16", "--skip-htp-check", "--calibration-tokens", str(CALIBRATION_TOKENS["random"])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", OLDER, SIZES)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_read_as_its_layout_says(folder: Path, name: str) -> None:
    meant = WRITERS[name](folder)
    checkpoint = Checkpoint.open(str(folder))
    assert len(meant) == 2 * 7
    rows = np.array([5, 0, 63, 8])
    for key, values in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(key), values)
        np.testing.assert_array_equal(checkpoint.tensor(key, rows), values[rows])
        np.testing.assert_array_equal(checkpoint.tensor(key, slice(13, 30)), values[13:30])
    checkpoint.check_values()


@pytest.mark.parametrize("name", ["phi3", "qwen2", "granite", "gemma3-multimodal"])
def test_other_architectures_are_read_too(tmp_path: Path, name: str) -> None:
    """Fused matrices, biases, multipliers, and names of a text model beside a vision model."""
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name])
    plain = write_checkpoint(tmp_path / "plain", ARCHITECTURES[name])
    if name == "gemma3-multimodal":
        strip(folder)
    meant = write_gptq(folder)
    if name == "gemma3-multimodal":
        strip(folder, back=True)
        strip(plain)
    replace_weights(plain, meant)
    if name == "gemma3-multimodal":
        strip(plain, back=True)
    one, other = Checkpoint.open(str(folder)), Checkpoint.open(str(plain))
    for key in one._views:
        np.testing.assert_array_equal(one.tensor(key), other.tensor(key))


def strip(folder: Path, *, back: bool = False) -> None:
    """Take the prefix of a text model away from the names, or put it back."""
    tensors = read_tensors(folder)
    prefix = "language_model."
    renamed = {
        (prefix + key if back and key.startswith("model.") else key if back else key.removeprefix(prefix)): value
        for key, value in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")


def replace_weights(folder: Path, values: dict[str, np.ndarray]) -> None:
    """Store these matrices in a folder, in float32."""
    tensors = read_tensors(folder)
    save_file(tensors | values, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("pack-quantized, 4 bits per channel", "int4"),
        ("pack-quantized, 8 bits", "int8"),
        ("int-quantized", "int8"),
        ("gptq v2, 8 bits per channel", "int8"),
    ],
)
def test_symmetric_integers_per_channel_are_carried_over_unchanged(folder: Path, name: str, dtype: str) -> None:
    meant = WRITERS[name](folder)
    checkpoint = Checkpoint.open(str(folder))
    recipe = resolve(find_recipe("as-stored"), checkpoint)
    for key, values in meant.items():
        assert (recipe.rule(key).dtype, recipe.rule(key).method) == (dtype, "stored")
        weight = checkpoint.integers(key)
        np.testing.assert_array_equal(weight.dequantize().T, values)
        assert np.abs(weight.integers).max() >= (8 if dtype == "int4" else 127)
    record = stored_record(checkpoint, recipe)
    assert record is not None
    assert (record.kept, record.changed_integers, record.error_db, record.quantized_anew) == (14, 0, None, {})


@pytest.mark.parametrize("name", ["llama-2", "qwen3"])
def test_scaled_keys_leave_the_integers_as_they_are(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name])
    write_compressed(folder)
    checkpoint = Checkpoint.open(str(folder))
    recipe = resolve(find_recipe("as-stored"), checkpoint)
    assert recipe.key_scaling == "pairs"
    scaled = transformed(checkpoint, recipe.record(checkpoint.spec))
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        key = f"model.layers.1.{part}.weight"
        weight = scaled.integers(key, slice(5, 40))
        np.testing.assert_array_equal(weight.integers, checkpoint.integers(key).integers[:, 5:40])
        np.testing.assert_allclose(weight.dequantize().T, scaled.tensor(key)[5:40], rtol=1e-6)
    keys = "model.layers.1.self_attn.k_proj.weight"
    assert np.array_equal(scaled.tensor(keys), checkpoint.tensor(keys)) == (name == "qwen3")  # there norms are scaled


@pytest.mark.parametrize("block", [32, 64, 128])
def test_groups_become_blocks_of_lpbq(folder: Path, block: int) -> None:
    floats = read_tensors(folder)
    meant = write_gptq(folder, group=block)
    checkpoint = Checkpoint.open(str(folder))
    recipe = resolve(find_recipe("as-stored"), checkpoint)
    error = energy = changed = 0.0
    for key, values in meant.items():
        dtype = "int4" if values.shape[1] == block else f"lpbq{block}"
        assert (recipe.rule(key).dtype, recipe.rule(key).method) == (dtype, "stored")
        weight = checkpoint.integers(key)
        stored = rounded(floats[key].astype(np.float32), 4, block).integers - 8
        if dtype == "int4":
            np.testing.assert_array_equal(weight.integers.T, stored)
            continue
        assert weight.grid.block_scales is not None and weight.grid.block_scales.max() <= 15
        error += np.square(weight.dequantize().T - values, dtype=np.float64).sum()
        energy += np.square(values, dtype=np.float64).sum()
        changed += np.count_nonzero(stored != weight.integers.T)
    record = stored_record(checkpoint, recipe)
    assert record is not None and record.kept == 14 and record.error_db is not None
    assert record.error_db == pytest.approx(10 * np.log10(error / energy))
    assert record.error_db < -30
    assert record.changed_integers == changed < record.integers / 100


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("gptq, asymmetric", "lpbq64", "asymmetric"),
        ("awq", "lpbq128", "asymmetric"),
        ("gptq, act-order", "lpbq32", "inputs of a group are not neighbours"),
        ("float8 in blocks", "int8", "float8"),
        ("int-quantized, asymmetric", "int8", "asymmetric"),
    ],
)
def test_what_a_bundle_cannot_hold_is_quantized_anew(folder: Path, name: str, dtype: str, reason: str) -> None:
    WRITERS[name](folder)
    checkpoint = Checkpoint.open(str(folder))
    recipe = resolve(find_recipe("as-stored"), checkpoint)
    assert recipe.rule("model.layers.1.mlp.down_proj.weight") == WeightRule(
        tensors="model.layers.1.mlp.down_proj.weight", dtype=dtype, method="gptq"
    )
    record = stored_record(checkpoint, recipe)
    assert record is not None
    assert (record.kept, record.quantized_anew) == (0, {reason: 14})


@pytest.mark.slow
def test_an_export_keeps_the_integers_and_says_so(folder: Path, tmp_path: Path, capsys) -> None:
    """Up to the file of weights and the answer of `edgekv eval`."""
    write_compressed(folder)
    bundle = tmp_path / "bundle"
    options = ["--device", "SM8650", "--context", "64", *SHORT]
    assert run(["export", str(folder), "-o", str(bundle), *options]) == 0
    printed = capsys.readouterr().out
    assert "compressed-tensors, int4 per channel: the integers of 14 matrices are kept, 0 changed" in printed
    assert "int4, stored: " in printed
    manifest = open_bundle(bundle).manifest
    assert manifest.recipe.name == "as-stored"
    assert {each.method for each in manifest.recipe.weights} == {"stored", "nearest"}
    assert manifest.source.stored is not None and manifest.source.stored.kept == 14
    checkpoint = Checkpoint.open(str(folder))
    (shard,) = bundle.glob("weights-*1.safetensors")
    with safe_open(shard, "numpy") as file:
        packed = file.get_tensor("model.layers.1.mlp.down_proj.weight.int4")
    pairs = checkpoint.integers("model.layers.1.mlp.down_proj.weight").integers.reshape(-1, 2) & 15
    np.testing.assert_array_equal(packed.reshape(-1), (pairs[:, 0] | pairs[:, 1] << 4).view(np.uint8))
    text = tmp_path / "text.txt"
    text.write_text("def main(): return 1\n" * 20)
    assert run(["eval", str(bundle), "--text", str(text), "--tokens", "256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1_agreement"] > 0.9


@pytest.mark.slow
def test_another_recipe_quantizes_anew_and_says_so(folder: Path, tmp_path: Path, capsys) -> None:
    write_gptq(folder)
    options = ["--device", "SM8650", "--context", "64", *SHORT, "--recipe", "w8a16"]
    assert run(["export", str(folder), "-o", str(tmp_path / "bundle"), *options]) == 0
    words = "gptq, int4 in groups of 32: 14 matrices dequantized and requantized (recipe w8a16)"
    assert words in capsys.readouterr().out
    assert all(each.method != "stored" for each in open_bundle(tmp_path / "bundle").manifest.recipe.weights)


@pytest.mark.parametrize(
    ("goals", "names"), [({}, ("w8a16", "as-stored")), ({"target_mb": 1.0}, ("w4a16", "w4a16"))], ids=["none", "a size"]
)
def test_the_default_recipe_follows_the_checkpoint_and_the_goal(folder: Path, goals, names) -> None:
    options, found = ExportOptions(find("SM8650"), context=64, ar=(1, 16), **goals), []
    for write in (None, write_gptq):
        if write is not None:
            write(folder)
        found.append(plan_export(Checkpoint.open(str(folder)), options).recipe.name)
    assert tuple(found) == names


def test_a_stored_recipe_needs_stored_integers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as-stored: got a checkpoint of floats"):
        resolve(find_recipe("as-stored"), Checkpoint.open(str(folder)))
    write_gptq(folder)
    checkpoint = Checkpoint.open(str(folder))
    every = Recipe(
        name="mine",
        weights=(WeightRule(tensors="*", dtype="lpbq64", method="stored"),),
        activations="u16",
        rotation="none",
    )
    with pytest.raises(UsageError, match=r"mine: got lpbq64 for model.layers.0.self_attn.q_proj.weight.*as lpbq32"):
        resolve(every, checkpoint)
    rotated = tmp_path / "rotated.json"
    rotated.write_text(
        json.dumps({"rotation": "hadamard", "keep_stored": True, "weights": [{"tensors": "*", "dtype": "int8"}]})
    )
    with pytest.raises(UsageError, match="stored integers, and a rotation that changes them"):
        export_bundle(checkpoint, tmp_path / "bundle", export_options(find_recipe(str(rotated)), context=64))


def test_blocks_are_refused_where_a_format_has_none(folder: Path, tmp_path: Path) -> None:
    write_gptq(folder)
    with pytest.raises(UsageError, match=r"as-stored, with a scale for each block, with --format tflite"):
        options = export_options("as-stored", context=64, graph_format="tflite", kv_dtype="s8")
        export_bundle(Checkpoint.open(str(folder)), tmp_path / "bundle", options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method: got 'bitsandbytes'; expected gptq or awq .* dequantize\(\)"),
        ({"quant_method": "mxfp4"}, "quant_method: got 'mxfp4'"),
        ({"bits": 4}, "quant_method: got nothing"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: got 3; expected 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format: got True"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: got 'gemv'; expected gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits: got 8; expected 4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: got 'e5m2'; expected e4m3"),
        (COMPRESSED | {"format": "marlin-24"}, "format: got 'marlin-24'; expected pack-quantized or"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format: got 'nvfp4-pack-quantized'"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: got"),
        (
            {**COMPRESSED, "config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}}},
            "num_bits: got 3 with int",
        ),
        (
            {**COMPRESSED, "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}},
            "num_bits: got 4 with float",
        ),
        ({**COMPRESSED, "config_groups": {}}, "config_groups: got"),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config: got"),
        ("gptq", "quantization_config: got"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(folder: Path, config: Any, refusal: str) -> None:
    write_gptq(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=refusal):
        Checkpoint.open(str(folder))


@pytest.mark.parametrize(
    ("write", "part", "refusal"),
    [
        (write_gptq, "mlp.up_proj.qzeros", "mlp.up_proj.qzeros: got no such tensor; expected shape"),
        (write_gptq, "mlp.up_proj.scales", "mlp.up_proj.scales: got no such tensor"),
        (write_gptq, "mlp.up_proj.qweight", "mlp.up_proj.qweight: got no such tensor"),
        (write_awq, "mlp.up_proj.qzeros", "mlp.up_proj.qzeros: got no such tensor"),
        (write_compressed, "mlp.up_proj.weight_shape", "mlp.up_proj.weight_shape: got no such tensor"),
        (write_compressed, "mlp.up_proj.weight_packed", "mlp.up_proj.weight: got no such tensor"),
        (write_float8, "mlp.up_proj.weight_scale", "mlp.up_proj.weight: got F8_E4M3"),
    ],
)
def test_a_missing_part_is_named(folder: Path, write: Any, part: str, refusal: str) -> None:
    write(folder)
    tensors = {key: value for key, value in read_tensors(folder).items() if not key.endswith(part)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(refusal)):
        Checkpoint.open(str(folder))


@pytest.mark.parametrize("write", [write_gptq, write_awq, partial(write_compressed, group=32), write_float8])
def test_a_part_of_another_shape_is_named(folder: Path, write: Any) -> None:
    write(folder)
    tensors = read_tensors(folder)
    key = next(key for key in sorted(tensors) if key.endswith(("scales", "weight_scale")))
    save_file(tensors | {key: np.ascontiguousarray(tensors[key][:-1])}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{key}: got .* expected shape"):
        Checkpoint.open(str(folder))


@pytest.mark.parametrize(
    ("write", "part", "dtype", "refusal"),
    [
        (write_gptq, "scales", np.int8, "got int8 of shape .* expected float16 or bfloat16 or float32"),
        (write_gptq, "qzeros", np.int8, "got int8 of shape .* expected int32"),
        (write_awq, "scales", np.int32, "got int32 of shape .* expected float16"),
        (write_awq, "qzeros", np.int64, "got int64 of shape .* expected int32"),
        (write_compressed, "weight_packed", np.int8, "got int8 of shape .* expected a matrix of int32"),
        (write_compressed, "weight_scale", np.int8, "got int8 of shape .* expected float16"),
        (write_float8, "weight_scale", np.int8, "got int8 of shape .* expected float16"),
    ],
)
def test_a_part_of_another_type_is_named(folder: Path, write: Any, part: str, dtype: type, refusal: str) -> None:
    write(folder)
    tensors = read_tensors(folder)
    key = next(key for key in sorted(tensors) if key.endswith(part))
    save_file(tensors | {key: tensors[key].astype(dtype)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{key}: {refusal}"):
        Checkpoint.open(str(folder))


@pytest.mark.parametrize("group", [-1, 2])
def test_groups_that_a_matrix_does_not_have_are_refused(folder: Path, group: int) -> None:
    """A negative one would count from the end and give other weights."""
    write_gptq(folder)
    tensors = read_tensors(folder)
    key = next(key for key in sorted(tensors) if key.endswith("g_idx"))
    groups = int(tensors[key].max()) + 1
    tensors[key][3] = -1 if group < 0 else groups
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{key}: got groups from .*; expected groups from 0 to {groups - 1}"):
        Checkpoint.open(str(folder))


def test_zero_points_that_are_missing_are_named(folder: Path) -> None:
    write_compressed(folder, group=32, symmetric=False)
    tensors = {key: value for key, value in read_tensors(folder).items() if "zero_point" not in key}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weight_zero_point: got no such tensor; expected shape .* as quant"):
        Checkpoint.open(str(folder))


def test_groups_of_modules_may_differ(folder: Path, tmp_path: Path) -> None:
    """Such as groups of 32 in some layers and of 64 in others: the scales tell which."""
    other = write_checkpoint(tmp_path / "other", OLDER, SIZES)
    meant, wider = write_compressed(folder, group=32), write_compressed(other, group=64)
    mixed = {key: each for key, each in read_tensors(folder).items() if "layers.1." not in key}
    mixed |= {key: each for key, each in read_tensors(other).items() if "layers.1." in key}
    save_file(mixed, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    groups = fields["quantization_config"]["config_groups"]
    groups["group_1"] = {**groups["group_0"], "weights": {**groups["group_0"]["weights"], "group_size": 64}}
    (folder / "config.json").write_text(json.dumps(fields))
    checkpoint = Checkpoint.open(str(folder))
    for key in meant:
        expected = (wider if "layers.1." in key else meant)[key]
        np.testing.assert_array_equal(checkpoint.tensor(key), expected)


def test_integers_without_a_configuration_are_refused(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    write_gptq(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"got I32; expected BF16 or F16 or F32. No quantization_config"):
        Checkpoint.open(str(folder))


def test_biases_of_a_quantizer_that_are_not_zero_are_refused(folder: Path) -> None:
    write_gptq(folder)
    tensors = read_tensors(folder)
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias: got a tensor that config\.json does not account for"):
        Checkpoint.open(str(folder))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text("ab48(-", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "format", "a"]), inner),
    max_leaves=4,
)
FIELDS = [
    "quant_method",
    "bits",
    "group_size",
    "checkpoint_format",
    "is_marlin_format",
    "version",
    "fmt",
    "weight_block_size",
    "config_groups",
    "format",
    "sparsity_config",
    "type",
    "num_bits",
    "strategy",
    "block_structure",
]


@pytest.mark.slow
@given(st.sampled_from([*WRITERS]), st.sampled_from(FIELDS), JSON, st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_strange_configuration_never_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, name: str, field: str, value: Any, inner: bool
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), OLDER)
    WRITERS[name](folder)
    fields = json.loads((folder / "config.json").read_text())
    changed = fields["quantization_config"]
    if inner and "config_groups" in changed:
        changed = changed["config_groups"]["group_0"]["weights"]
    changed[field] = value
    (folder / "config.json").write_text(json.dumps(fields))
    with suppress(CheckpointError):
        Checkpoint.open(str(folder)).check_values()


@pytest.mark.slow
@given(st.sampled_from([*WRITERS]), st.integers(0, 1 << 30), st.sampled_from(["empty", "scalar", "cut", "type"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_strange_part_never_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, name: str, place: int, change: str
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), OLDER)
    WRITERS[name](folder)
    tensors = read_tensors(folder)
    key = sorted(tensors)[place % len(tensors)]
    value = tensors[key]
    changed = {
        "empty": value.reshape(-1)[:0],
        "scalar": value.reshape(-1)[:1].reshape(()),
        "cut": value[..., :1] if value.ndim else value,
        "type": value.astype(np.int64 if value.dtype == np.int32 else np.int8),
    }[change]
    save_file(tensors | {key: np.ascontiguousarray(changed).reshape(changed.shape)}, folder / "model.safetensors")
    with suppress(CheckpointError):
        Checkpoint.open(str(folder)).check_values()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.htp
def test_the_min_integers_mean_the_same_on_the_htp(folder: Path, tmp_path: Path) -> None:
    """-128, which edgekv's own rounding never uses."""
    write_compressed(folder, bits=8, dtype=np.float16)
    options = small_options("as-stored", context=64, ar=(1, 16))
    assert (Checkpoint.open(str(folder)).integers("model.layers.0.mlp.up_proj.weight").integers == -128).any()
    export_bundle(Checkpoint.open(str(folder)), tmp_path / "bundle", options)
    tokens = list(range(5, 45))
    with edgekv.load(tmp_path / "bundle", engine="cpu") as model:
        expected = model.score(tokens)
    with edgekv.load(tmp_path / "bundle", engine="htp") as model:
        found = model.score(tokens)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dynamic": {r"+:.*\.0\..*": {"bits": 8}}}, ["dynamic", "bits: got 8; expected 4", "before quantization"]),
        ({"dynamic": {r".*\.mlp\..*": {"group_size": 64}}}, ["dynamic", "group_size: got 64; expected 32"]),
        ({"rotation": "hadamard"}, ["quantization_config: rotation: got 'hadamard'"]),
    ],
    ids=["bits", "groups", "rotated"],
)
def test_gptq_of_modules_that_differ_is_refused_by_field(tmp_path, fields, words):
    write_gptq(write_checkpoint(tmp_path))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | fields}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(str(tmp_path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_gptq_with_modules_that_are_left_out_is_read(tmp_path):
    write_gptq(write_checkpoint(tmp_path))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["dynamic"] = {"-:lm_head": {}, r"+:.*": {"bits": 4, "desc_act": True}}
    path.write_text(json.dumps(config))
    assert Checkpoint.open(str(tmp_path)).quantization is not None
