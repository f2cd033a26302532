import ast
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

import edgekv
from edgekv.bundle import RecipeRecord, WeightRecord, open_bundle
from edgekv.errors import UsageError
from edgekv.spec import Config, Decoder, describe
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import FoldedCheckpoint
from exporters.checkpoint.rotate import applied_rotation, hadamard, principal_directions
from exporters.export import export_bundle
from exporters.graphs.parts import stored_graph
from exporters.quantize.allocation import Allocation
from exporters.quantize.effort import EFFORTS, Effort
from exporters.quantize.matrices import needs_quantized_pass
from exporters.quantize.recipe import Recipe, WeightRule, describe_recipe, find_recipe, recipe_names
from exporters.quantize.reference import Reference
from quant import WeightDtype
from tests.support.checkpoints import ARCHITECTURES, NEWER, config_of, write_checkpoint
from tests.support.exports import export_options, exported, small_options
from tests.support.thorough import variants

SMOLLM2 = Decoder(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), NEWER, SIZES)))


def export(checkpoint, folder, recipe):
    return export_bundle(checkpoint, folder, small_options(recipe, context=64, ar=(1, 16)))


def write_recipe(folder, *rules, **fields):
    path = folder / "mine.json"
    path.write_text(json.dumps({"weights": list(rules), **fields}))
    return str(path)


@pytest.mark.parametrize("size", [1, 7, 64, 96, 576])
def test_the_rotation_is_orthogonal(size):
    rotation = hadamard(size)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(size), atol=1e-5)


@pytest.mark.parametrize("rotation", ["hadamard", "principal"])
def test_a_rotated_checkpoint_has_the_same_logits(checkpoint, rotation):
    window = [np.arange(40)]
    folded = FoldedCheckpoint(checkpoint, RecipeRecord(name="rotated", rotation=rotation, weights=[]))
    exact, turned = (next(Reference(each).logits(window)) for each in (checkpoint, folded))
    assert np.abs(exact - turned).max() < 1e-4 * np.ptp(exact)


def test_principal_directions_come_in_the_order_of_the_weights_that_read_them(embedded):
    """So blocks of a matrix differ in magnitude. Behind a Hadamard matrix they hardly do."""
    checkpoint = Checkpoint.open(str(embedded))
    spec = checkpoint.spec
    found = principal_directions(spec, checkpoint.tensor)
    np.testing.assert_allclose(found @ found.T, np.eye(spec.hidden), atol=1e-5)
    sizes = {}
    for rotation in ("hadamard", "principal"):
        folded = FoldedCheckpoint(checkpoint, RecipeRecord(name="rotated", rotation=rotation, weights=[]))
        every = [folded.tensor(f"model.layers.{layer}.mlp.gate_proj.weight") for layer in range(spec.layers)]
        sizes[rotation] = np.square(every).mean(axis=(0, 1)).reshape(-1, 64).mean(axis=1)
    assert (np.diff(sizes["principal"]) < 0).all() and sizes["principal"][0] > 1.5 * sizes["principal"][-1]
    assert sizes["hadamard"].max() < 1.3 * sizes["hadamard"].min()


def test_a_residual_behind_norms_is_not_rotated(checkpoint):
    assert applied_rotation(checkpoint.spec, "hadamard") == "hadamard"
    assert applied_rotation(msgspec.structs.replace(checkpoint.spec, post_norms=True), "hadamard") == "none"


@pytest.mark.htp
@pytest.mark.parametrize(
    "name", variants(["w4a16", "w4a16-lpbq32", "w4a16-head-int4", "w4a16-uplpbq64-down8"], ["w4a16-uplpbq64-down8"])
)
def test_4_bits_are_integers_on_the_htp_and_half_the_bytes(checkpoint, name):
    bundle = exported(checkpoint.folder, export_options(name, context=64, ar=(1, 16), check_on_htp=True))
    manifest = open_bundle(bundle).manifest
    assert manifest.htp_check == "integers-only"
    graph = stored_graph(bundle / "ar1_cl64.onnx.gz").graph
    stored = {each.name: each for each in graph.initializer}["model.layers.0.mlp.up_proj.weight.int4"]
    assert stored.data_type == onnx.TensorProto.INT4 and list(stored.dims) == [64, 128]
    assert {each.key: each.value for each in stored.external_data}["length"] == str(64 * 128 // 2)
    window = np.arange(40)
    logits, on_htp = (edgekv.load(bundle, engine=e).score(window.tolist()) for e in ("cpu", "htp"))
    assert np.square(on_htp - logits).mean() < 1e-3 * np.square(logits).mean()
    exact = next(Reference(checkpoint, 64).logits([window]))
    assert np.square(logits - exact).mean() < 0.5 * np.square(exact).mean()


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_bytes(checkpoint, tmp_path):
    first, second = (export(checkpoint, tmp_path / name, find_recipe("w4a16-lpbq64")) for name in ("a", "b"))
    assert first == second


@pytest.mark.slow
def test_the_last_rule_that_matches_holds_and_the_manifest_says_so(checkpoint, tmp_path):
    rules = [{"tensors": "*", "dtype": "int4"}, {"tensors": "*.1.mlp.down_proj.*", "dtype": "int8", "method": "search"}]
    export(checkpoint, tmp_path / "bundle", find_recipe(write_recipe(tmp_path, *rules)))
    record = open_bundle(tmp_path / "bundle").manifest.recipe
    assert (record.name, record.rotation, len(record.weights)) == ("mine", "none", 15)
    changed = [each.tensor for each in record.weights if (each.dtype, each.method) == ("int8", "search")]
    assert changed == ["model.layers.1.mlp.down_proj.weight"]
    assert "int8, search: down_proj of layer 1" in list(describe_recipe(record))


def test_layers_that_were_treated_alike_share_a_line():
    spec = describe(Config(config_of(ARCHITECTURES["gemma4"])))
    (int8, *_) = describe_recipe(find_recipe("w8a16").record(spec))
    assert "per_layer_input_gate of 5 layers" in int8 and "q_proj of 5 layers" in int8 and "model.layers" not in int8


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_that_ships_keeps_the_head_at_8_bits(name):
    assert find_recipe(name).rule("lm_head.weight").dtype == "int8"


@pytest.mark.parametrize("name", ["w4a16-head-int4", "w4a16-lpbq64-head-lpbq64", "front-5-head-int4"])
def test_a_name_may_end_with_the_type_of_the_head(name):
    base, _, dtype = name.rpartition("-head-")
    found, plain = find_recipe(name), find_recipe(base)
    assert (found.rule("lm_head.weight").dtype, found.rule("lm_head.weight").method) == (dtype, "gptq")
    assert found.rule("model.layers.0.mlp.up_proj.weight") == plain.rule("model.layers.0.mlp.up_proj.weight")
    assert msgspec.structs.replace(found, name=base, weights=plain.weights) == plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w4a16-head-int3", "got 'w4a16-head-int3'; expected .*, also with -head-int4 behind it"),
        ("w5a16-head-int4", "got 'w5a16'; expected .*, also with -head-int4 behind it"),
        ("w4a16-head-int4-head-int4", "got w4a16-head-int4-head-int4; expected one type of the head"),
        ("as-stored-head-int4", "got as-stored-head-int4; expected a recipe that chooses the types"),
    ],
)
def test_a_type_that_no_head_can_have_is_refused(name, message):
    with pytest.raises(UsageError, match=f"--recipe: {message}"):
        find_recipe(name)


def test_a_tied_head_of_4_bits_leaves_the_embeddings_at_8(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "bundle", find_recipe("w4a16-head-int4"))
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert (manifest.recipe.name, manifest.model.vocabulary) == ("w4a16-head-int4", "apart")
    kinds = {name: manifest.weights.matrices[name].dtype for name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert kinds == {"lm_head.weight": "int4", "model.embed_tokens.weight": "int8"}
    assert Recipe.of(manifest.recipe).rule("lm_head.weight").method in ("gptq", "descent")


@pytest.mark.parametrize(
    ("layers", "ends"), [(6, []), (12, [0, 11]), (24, [0, 22, 23]), (30, [0, 28, 29]), (32, [0, 30, 31])]
)
def test_the_layers_at_the_ends_of_small_models_keep_8_bits(layers, ends):
    sizes = replace(SMOLLM2, layers=layers)
    recipe = find_recipe("w4a16-lpbq64").for_decoder(sizes)
    names = {layer: f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(layers)}
    assert [layer for layer, name in names.items() if recipe.rule(name).dtype == "int8"] == ends
    assert recipe.for_decoder(sizes) == recipe
    large = replace(sizes, vocab=-(-500_000_000 // sizes.hidden))
    assert find_recipe("w4a16-lpbq64").for_decoder(large).rule(names[0]).dtype == "lpbq64"


def test_types_that_are_chosen_for_each_matrix_hold_at_the_ends_too():
    types: dict[str, WeightDtype] = {"model.layers.0.mlp.up_proj.weight": "lpbq64"}
    chosen = Allocation(types, bytes=1, nats=0.0).recipe(find_recipe("w4a16-lpbq64"), "chosen")
    assert chosen.for_decoder(SMOLLM2).rule("model.layers.0.mlp.up_proj.weight").dtype == "lpbq64"


def test_what_its_name_says_has_8_bits():
    recipe, layer = find_recipe("w4a16-lpbq32-updown8"), "model.layers.3."
    attention = {f"{name}_proj": recipe.rule(f"{layer}self_attn.{name}_proj.weight").dtype for name in "qkvo"}
    assert attention == {"q_proj": "lpbq32", "k_proj": "int8", "v_proj": "int8", "o_proj": "lpbq32"}
    mlp = [recipe.rule(f"{layer}mlp.{name}_proj.weight").dtype for name in ("gate", "up", "down")]
    assert mlp == ["lpbq32", "int8", "int8"]
    mixed = find_recipe("w4a16-uplpbq64-down8")
    found = [
        mixed.rule(f"{layer}{name}_proj.weight").dtype for name in ("self_attn.q", "mlp.gate", "mlp.up", "mlp.down")
    ]
    assert found == ["int4", "int4", "lpbq64", "int8"]


def test_learning_needs_a_recipe_that_rounds_on_calibration_text(checkpoint, tmp_path):
    recipe = find_recipe(write_recipe(tmp_path, {"tensors": "*", "dtype": "int4", "method": "nearest"}))
    with pytest.raises(UsageError, match="--effort 3: got the recipe mine, in which no rule has the method gptq"):
        export_bundle(checkpoint, tmp_path / "bundle", export_options(recipe, effort=EFFORTS[3]))
    with pytest.raises(UsageError, match="--effort: got '6'; expected 0 to 5"):
        Effort.parse("--effort", "6")


def test_learning_changes_how_matrices_are_rounded_and_nothing_else(checkpoint, tmp_path):
    rules = [{"tensors": "*", "dtype": "int4"}, {"tensors": "*.k_proj.weight", "dtype": "int8"}]
    rules += [{"tensors": "lm_head.weight", "dtype": "int8", "method": "search"}]
    recipe, spec = find_recipe(write_recipe(tmp_path, *rules)), checkpoint.spec
    learned = recipe.with_effort(EFFORTS[2], spec)
    assert [rule.method for rule in learned.weights] == ["descent", "gptq", "search"]
    assert recipe.with_effort(EFFORTS[1], spec) == recipe
    assert msgspec.structs.replace(learned, weights=recipe.weights) == recipe
    weighed = recipe.with_effort(EFFORTS[3], spec).weights[len(rules) :]
    kinds = {"q_proj": "int4", "k_proj": "int8"}
    assert [(rule.tensors, rule.dtype, rule.method) for rule in weighed] == [
        (f"model.layers.{layer}.self_attn.{name}.weight", dtype, "attention")
        for layer in range(spec.layers)
        for name, dtype in kinds.items()
    ]


def test_effort_0_rounds_to_nearest_and_states_what_that_loses(checkpoint, tmp_path):
    options = export_options("w4a16", context=64, ar=(1, 8), effort=Effort.parse("--effort", "0"), check_quality=True)
    manifest = export_bundle(checkpoint, tmp_path / "bundle", options)
    assert {weight.method for weight in manifest.recipe.weights} == {"nearest"}
    assert not needs_quantized_pass(Recipe.of(manifest.recipe))
    assert [record.text for record in manifest.quality] == ["prose"]
    kept = find_recipe(write_recipe(tmp_path, {"tensors": "*", "dtype": "int8", "method": "stored"}))
    assert kept.with_effort(EFFORTS[0], checkpoint.spec) == kept


def test_only_queries_without_norms_are_weighed_by_attention(checkpoint, tmp_path):
    recipe = find_recipe(write_recipe(tmp_path, {"tensors": "*", "dtype": "int4", "method": "attention"}))
    with pytest.raises(UsageError, match=r"got the method attention for .*v_proj.weight; expected q_proj or k_proj"):
        recipe.check(checkpoint.spec)
    normed = msgspec.structs.replace(checkpoint.spec, qk_norm="per-head")
    plain = find_recipe(write_recipe(tmp_path, {"tensors": "*", "dtype": "int4"}))
    assert plain.with_effort(EFFORTS[3], normed).weights == plain.with_effort(EFFORTS[2], normed).weights


def test_blocks_that_do_not_divide_a_matrix_are_refused_by_name(embedded, tmp_path):
    with pytest.raises(UsageError, match=r"lpbq128 for model.layers.0.mlp.down_proj.weight, which has 704 inputs"):
        export(Checkpoint.open(str(embedded)), tmp_path / "bundle", find_recipe("w4a16-lpbq128"))
    assert not (tmp_path / "bundle").exists()


def test_a_matrix_without_a_rule_is_refused_by_name(checkpoint, tmp_path):
    recipe = find_recipe(write_recipe(tmp_path, {"tensors": "*_proj.weight", "dtype": "int4"}))
    with pytest.raises(UsageError, match=r"no rule for lm_head\.weight"):
        export(checkpoint, tmp_path / "bundle", recipe)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "recipe file"),
        ('{"weights": [{"tensors": "*", "dtype": "int3"}]}', "int3"),
        ('{"weights": [{"tensors": "*", "dtype": "int4", "bits": 4}]}', "bits"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, said):
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        find_recipe(str(tmp_path / "mine.json"))


CHANGED: dict[str, Any] = {
    "rotation": "hadamard",
    "value_rotation": "hadamard",
    "key_scaling": "pairs",
    "neuron_scaling": "norm",
    "outlier_channels": "keep",
    "keep_stored": True,
    "heads": "aligned",
    "ends": "int8",
    "mean_bits": 4.5,
    "encoder_16bit": ("vision.layers.*.fc2.weight",),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_field_is_stated_once_and_reaches_file_and_manifest(tmp_path: Path, name: str) -> None:
    """Nothing copies it by its name: a field of the struct is one of the file, and of the record if that has it."""
    recipe = Recipe(name="mine", weights=(WeightRule(tensors="*", dtype="int8"),), **{name: CHANGED[name]})
    recipe.write(tmp_path / "mine.json")
    assert find_recipe(str(tmp_path / "mine.json")) == recipe
    assert recipe != Recipe(name="mine", weights=recipe.weights)
    if name in RecipeRecord.__struct_fields__:
        record = RecipeRecord(name="mine", rotation="none", weights=[WeightRecord("lm_head.weight", "int8", "gptq")])
        assert getattr(Recipe.of(msgspec.structs.replace(record, **{name: CHANGED[name]})), name) == CHANGED[name]
    source = ast.parse(Path(inspect.getfile(Recipe)).read_text())
    stated = [ast.unparse(node.target) for node in ast.walk(source) if isinstance(node, ast.AnnAssign)]
    assert stated.count(name) == 1


def test_every_field_of_a_recipe_is_shown_above() -> None:
    assert {*Recipe.__struct_fields__} - {"name", "weights", "activations"} == CHANGED.keys()


def test_a_recipe_has_the_name_of_its_file(tmp_path: Path) -> None:
    Recipe(name="mine", weights=(WeightRule(tensors="*", dtype="int8"),)).write(tmp_path / "mine.json")
    (tmp_path / "mine.json").rename(tmp_path / "yours.json")
    with pytest.raises(UsageError, match=r"the name 'mine'; expected 'yours'"):
        find_recipe(str(tmp_path / "yours.json"))
