"""LoRA adapters are merged into the weights, checked by name before any work."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.numpy import save_file

from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import CheckpointError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import AdapterChoice
from exporters.inspect.evaluate import open_source
from exporters.quantize.as_stored import resolve, stored_record
from exporters.quantize.recipe import find_recipe
from tests.support.checkpoints import ARCHITECTURES, NEWER, OLDER, write_checkpoint
from tests.support.foreign_files import Arrays, write_adapter, write_gguf, write_gptq

QUERY = "model.layers.1.self_attn.q_proj"
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHORT = ["--device", "SM8650", "--context", "64", "--ar", "1,16", "--skip-htp-check"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", OLDER)


def opened(base: Path, *adapters: tuple[Path, float]) -> Checkpoint:
    return Checkpoint.open(str(base), [AdapterChoice(folder, scale) for folder, scale in adapters])


ENDLESS = r"((\w|\.|[a-z])+)+[0-9!]$"  # tries every division of a name


def added(tensors: Arrays, module: str) -> np.ndarray:
    """B A of a module."""
    at = f"base_model.model.{module}"
    product: np.ndarray = tensors[f"{at}.lora_B.weight"] @ tensors[f"{at}.lora_A.weight"]
    return product


def refusal(base: Path, adapter: Path, scale: float = 1.0) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(base, (adapter, scale))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, 8 / 4),
        ({"lora_alpha": 3}, 3 / 4),
        ({"use_rslora": True}, 8 / 2),
        ({"alpha_pattern": {"self_attn.q_proj": 16}}, 16 / 4),
        ({"alpha_pattern": {r"layers\.0\..*q_proj": 16}}, 8 / 4),
        ({"alpha_pattern": {"(?i)Q_PROJ": 16}}, 16 / 4),
        ({"fan_in_fan_out": True, "init_lora_weights": "gaussian", "lora_dropout": 0.1}, 8 / 4),
    ],
)
def test_the_product_is_added_with_its_scale(base: Path, tmp_path: Path, config: dict[str, Any], factor: float) -> None:
    tensors = write_adapter(tmp_path / "lora", base, **config)
    plain, merged = opened(base), opened(base, (tmp_path / "lora", 0.5))
    expected = plain.tensor(f"{QUERY}.weight") + np.float32(factor * 0.5) * added(tensors, QUERY)
    np.testing.assert_allclose(merged.tensor(f"{QUERY}.weight"), expected, rtol=1e-5, atol=1e-6)
    rows = np.array([3, 17, 5])
    np.testing.assert_allclose(merged.tensor(f"{QUERY}.weight", rows), expected[rows], rtol=1e-5, atol=1e-6)
    key = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(merged.tensor(key), plain.tensor(key))


def test_ranks_may_differ(base: Path, tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", base, EVERY, ranks={"q_proj": 2, "down_proj": 7})
    merged = opened(base, (tmp_path / "lora", 1.0))
    for name, rank in (("q_proj", 2), ("v_proj", 4)):
        module = f"model.layers.1.self_attn.{name}"
        expected = opened(base).tensor(f"{module}.weight") + 8 / rank * added(tensors, module)
        np.testing.assert_allclose(merged.tensor(f"{module}.weight"), expected, rtol=1e-5, atol=1e-6)


def test_several_adapters_add_up(base: Path, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", base)
    two = write_adapter(tmp_path / "two", base, ("q_proj", "up_proj"), seed=1)
    merged = opened(base, (tmp_path / "one", 1.0), (tmp_path / "two", -0.25))
    expected = opened(base).tensor(f"{QUERY}.weight") + 2 * added(one, QUERY) - 0.5 * added(two, QUERY)
    np.testing.assert_allclose(merged.tensor(f"{QUERY}.weight"), expected, rtol=1e-5, atol=1e-6)
    assert merged.weights_sha256() != opened(base, (tmp_path / "one", 1.0)).weights_sha256()
    assert (
        opened(base, (tmp_path / "one", 2.0)).weights_sha256() != opened(base, (tmp_path / "one", 1.0)).weights_sha256()
    )


@pytest.mark.parametrize(
    "targets",
    ["all-linear", r".*\.(q|k|v|o|gate|up|down)_proj", r"model\.layers\.\d+\.(self_attn|mlp)\..*"],
)
def test_targets_may_be_an_expression(base: Path, tmp_path: Path, targets: str) -> None:
    write_adapter(tmp_path / "lora", base, EVERY, target_modules=targets)
    assert opened(base, (tmp_path / "lora", 1.0)).adapters[0].config.changes(QUERY)


def test_some_layers_alone_may_be_changed(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", base, (f"{QUERY}",), target_modules=["q_proj"], layers_to_transform=[1])
    key = "model.layers.0.self_attn.q_proj.weight"
    merged = opened(base, (tmp_path / "lora", 1.0))
    np.testing.assert_array_equal(merged.tensor(key), opened(base).tensor(key))
    write_adapter(
        tmp_path / "excluding", base, ("q_proj",), target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"]
    )
    opened(base, (tmp_path / "excluding", 1.0))


def test_an_embedding_with_an_adapter_leaves_a_tied_head_as_it_was(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", NEWER)
    tensors = write_adapter(tmp_path / "lora", base, ("embed_tokens",))
    plain, merged = opened(base), opened(base, (tmp_path / "lora", 1.0))
    at = "base_model.model.model.embed_tokens.lora_embedding_"
    expected = plain.tensor("model.embed_tokens.weight") + 2 * (tensors[f"{at}A"].T @ tensors[f"{at}B"].T)
    np.testing.assert_allclose(merged.tensor("model.embed_tokens.weight"), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(merged.tensor("lm_head.weight"), plain.tensor("lm_head.weight"))
    assert plain.spec.tied_head and not merged.spec.tied_head


def test_saved_modules_and_biases_replace_the_model_s(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", ARCHITECTURES["qwen2"] | {"tie_word_embeddings": False})
    head, bias = np.ones((320, 64), np.float32), np.arange(64, dtype=np.float32)
    more = {"base_model.model.lm_head.weight": head, f"base_model.model.{QUERY}.base_layer.bias": bias}
    write_adapter(tmp_path / "lora", base, more=more, modules_to_save=["lm_head"], bias="lora_only")
    merged = opened(base, (tmp_path / "lora", 1.0))
    np.testing.assert_array_equal(merged.tensor("lm_head.weight"), head)
    np.testing.assert_array_equal(merged.tensor(f"{QUERY}.bias"), bias)
    assert re.search(r"--lora .*=0\.5: got an adapter that replaces lm_head", refusal(base, tmp_path / "lora", 0.5))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: got a second replacement"):
        opened(base, (tmp_path / "lora", 1.0), (tmp_path / "lora", 1.0))


def test_an_adapter_is_merged_into_a_gguf_file(tmp_path: Path) -> None:
    """Whose rows of q_proj are in another order, and whose architecture has fused matrices."""
    for name, module in (("llama-2", "self_attn.q_proj"), ("phi3", "self_attn.qkv_proj")):
        base = write_checkpoint(tmp_path / name, ARCHITECTURES[name])
        write_adapter(tmp_path / f"{name}-lora", base, (module,))
        file = write_gguf(base, tmp_path / f"{name}.gguf")
        expected = opened(base, (tmp_path / f"{name}-lora", 1.0)).tensor(f"{QUERY}.weight")
        merged = Checkpoint.open(str(file), [AdapterChoice(tmp_path / f"{name}-lora")])
        np.testing.assert_array_equal(merged.tensor(f"{QUERY}.weight"), expected)


def test_a_quantized_matrix_with_an_adapter_is_quantized_anew(base: Path, tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", base)
    meant = write_gptq(base)
    merged = opened(base, (tmp_path / "lora", 1.0))
    expected = meant[f"{QUERY}.weight"] + 2 * added(tensors, QUERY)
    np.testing.assert_allclose(merged.tensor(f"{QUERY}.weight"), expected, rtol=1e-5, atol=1e-6)
    recipe = resolve(find_recipe("as-stored"), merged)
    assert (recipe.rule(f"{QUERY}.weight").dtype, recipe.rule(f"{QUERY}.weight").method) == ("lpbq32", "gptq")
    record = stored_record(merged, recipe)
    assert record is not None
    assert (record.kept, record.quantized_anew) == (10, {"merged with an adapter": 4})


@pytest.mark.thorough
@pytest.mark.slow
def test_a_bundle_knows_its_adapters(base: Path, tmp_path: Path, capsys) -> None:
    write_adapter(tmp_path / "lora", base)
    bundle = tmp_path / "bundle"
    assert run(["export", str(base), "--lora", f"{tmp_path / 'lora'}=0.5", "-o", str(bundle), *SHORT]) == 0
    assert "merged with the adapter lora, scale 0.5" in capsys.readouterr().out
    manifest = open_bundle(bundle).manifest
    (adapter,) = manifest.source.adapters
    assert (adapter.folder, adapter.scale) == (str(tmp_path / "lora"), 0.5)
    expected = opened(base, (tmp_path / "lora", 0.5)).tensor(f"{QUERY}.weight")
    np.testing.assert_array_equal(open_source(manifest, None).tensor(f"{QUERY}.weight"), expected)
    text = tmp_path / "text"
    text.write_text("def main(): return 1\n" * 40)
    call = ["eval", str(bundle), "--text", str(text), "--tokens", "60", "--json"]
    assert run(call) == 0
    in_place = json.loads(capsys.readouterr().out)
    assert in_place["token_sqnr_db"] > 20, "the reference has the adapter too"
    moved = (tmp_path / "lora").rename(tmp_path / "moved")
    assert run([*call, "--lora", str(moved)]) == 0
    assert json.loads(capsys.readouterr().out) == in_place
    for options, message in (
        ([], f"adapter {tmp_path / 'lora'}: got no such folder; .* Give its new place with --lora."),
        (["--lora", str(moved)] * 2, "--lora: got 2; expected 1, as many as the export had: lora."),
    ):
        assert run([*call, *options]) in (1, 2)
        assert re.search(message, capsys.readouterr().err)
    write_adapter(moved, base, seed=1)
    with pytest.raises(CheckpointError, match=r"adapter .*moved: got sha256 .*, the adapter of the bundle. Give"):
        open_source(manifest, None, [moved])


def test_folders_of_adapters_for_a_bundle_without_any_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--lora: got 1; expected 0: no adapter was merged. Leave it out."):
        open_source(open_bundle(small).manifest, None, [tmp_path])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora: got True; expected nothing, or false. Merge it into its base model in peft"),
        ({"peft_type": "IA3"}, "peft_type: got 'IA3'; expected LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type: got 'SEQ_CLS'"),
        ({"lora_bias": True}, "lora_bias: got True"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices: got [1, 2]"),
        ({"layer_replication": [[0, 1]]}, "layer_replication: got"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow: got 1"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: got 'pissa_niter_4'"),
        ({"r": 0}, "r: got 0; expected a whole number above 0"),
        ({"lora_alpha": "much"}, "lora_alpha: got 'much'"),
        ({"target_modules": None}, "target_modules: got nothing"),
        ({"target_modules": "("}, "target_modules: got '('; expected a regular expression"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: got '('; expected a regular expression"),
        ({"target_modules": "a" * 1001}, "target_modules: got 1001 characters; expected a regular expression of at"),
        ({"target_modules": ENDLESS}, f"target_modules: got {ENDLESS!r}, which still looked for model."),
        ({"exclude_modules": ENDLESS}, f"exclude_modules: got {ENDLESS!r}, which still looked for model."),
        ({"alpha_pattern": {ENDLESS: 4}}, f"alpha_pattern: got {ENDLESS!r}, which still looked for model."),
        ({"bias": "evil"}, "bias: got 'evil'; expected none or all or lora_only"),
        ({"lora_alpha": 1e30}, "lora_alpha: got 1e+30; expected at most 1e+06"),
        ({"alpha_pattern": {"q_proj": 1e30}}, "q_proj: got 1e+30; expected at most 1e+06"),
        ({"target_modules": ["q_proj"]}, "v_proj: got an adapter; expected none, as target_modules says"),
        (
            {"target_modules": ["q_proj", "v_proj", "k_proj"]},
            "k_proj.lora_A.weight: got no such tensor; expected one, as target_modules says",
        ),
        ({"modules_to_save": ["lm_head"]}, "lm_head: got no such tensor; expected one, as modules_to_save says"),
        ({"r": 8}, "shapes [64, 4] and [4, 64]; expected [64, 8] and [8, 64], of r = 8"),
        ({"rank_pattern": {"q_proj": 3}}, "of r = 3"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(
    base: Path, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    write_adapter(tmp_path / "lora", base, **config)
    assert words in refusal(base, tmp_path / "lora")


JSON = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text("ab4(-", max_size=4)
JSON |= st.lists(JSON, max_size=2) | st.dictionaries(st.sampled_from(["q_proj", "("]), JSON, max_size=2)
FIELDS = ["peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"]
FIELDS += ["exclude_modules", "layers_to_transform", "modules_to_save", "bias", "init_lora_weights", "use_dora"]


@pytest.mark.slow
@given(st.sampled_from(FIELDS), JSON)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_strange_configuration_never_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    base = write_checkpoint(folder / "base", OLDER)
    write_adapter(folder / "lora", base, **{field: value})
    with suppress(CheckpointError):
        opened(base, (folder / "lora", 1.0)).check_values()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("layers.0.self_attn.q_proj.lora_magnitude_vector", "a tensor that edgekv does not know"),
        ("layers.9.self_attn.q_proj.lora_A.weight", "no such tensor; expected lora_A and lora_B"),
        ("layers.0.self_attn.k_proj.weight", "a tensor of the base model; expected what modules_to_save and bias say"),
        ("layers.0.self_attn.k_proj.bias", "a tensor that the model does not have"),
        ("score.weight", "a tensor that the model does not have"),
    ],
)
def test_an_unknown_tensor_is_refused(base: Path, tmp_path: Path, more: str, words: str) -> None:
    write_adapter(tmp_path / "lora", base, more={f"base_model.model.model.{more}": np.ones((2, 2), np.float32)})
    found = refusal(base, tmp_path / "lora")
    assert words in found and "It was trained on org/base" in found


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    wider = write_checkpoint(tmp_path / "wider", OLDER, {"hidden_size": 96})
    write_adapter(tmp_path / "lora", wider)
    assert "expected [64, 4] and [4, 64]" in refusal(base, tmp_path / "lora")
    deeper = write_checkpoint(tmp_path / "deeper", OLDER, {"num_hidden_layers": 3})
    write_adapter(tmp_path / "deep", deeper)
    assert "layers.2.self_attn.q_proj: got a module that the model does not have" in refusal(base, tmp_path / "deep")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncated", "a broken file"),
        ("pickled", "which are never opened"),
        ("missing", "no such file"),
        ("integers", "got I8"),
    ],
)
def test_damaged_files_are_refused(base: Path, tmp_path: Path, damage: str, words: str) -> None:
    tensors = write_adapter(tmp_path / "lora", base)
    file = tmp_path / "lora" / "adapter_model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "integers":
        save_file({key: value.astype(np.int8) for key, value in tensors.items()}, file)
    else:
        file.unlink()
    if damage == "pickled":
        (tmp_path / "lora" / "adapter_model.bin").write_bytes(b"")
    words = {
        "truncated": "a broken file",
        "pickled": "which are never opened",
        "missing": "no such file",
        "integers": "got I8",
    }
    assert words[damage] in refusal(base, tmp_path / "lora")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere", "--lora: got 'nowhere', which is no folder"),
        ("lora=", "the scale ''"),
        ("lora=0", "the scale '0'"),
        ("lora=nan", "the scale 'nan'"),
        ("lora=1e9", "the scale '1e9'"),
    ],
)
def test_a_bad_choice_is_refused(base: Path, tmp_path: Path, given: str, words: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "lora", base)
    with pytest.raises(UsageError, match=re.escape(words)):
        AdapterChoice.parse("--lora", given)
    assert AdapterChoice.parse("--lora", "lora=-2") == AdapterChoice(Path("lora"), -2.0)
    write_adapter(tmp_path / "v=1", base)
    assert AdapterChoice.parse("--lora", "v=1") == AdapterChoice(Path("v=1"), 1.0)


def test_an_adapter_alone_is_no_checkpoint(base: Path, tmp_path: Path, capsys) -> None:
    write_adapter(tmp_path / "lora", base)
    assert run(["export", str(tmp_path / "lora"), "-o", str(tmp_path / "bundle"), *SHORT]) == 1
    found = capsys.readouterr().err
    assert "a LoRA adapter without its base model" in found and f"--lora {tmp_path / 'lora'}" in found
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["peft_type"] == "LORA"
