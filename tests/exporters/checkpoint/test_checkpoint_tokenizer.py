"""Tokenizer files of checkpoints: transformers, in `tests/golden/texts.py`, says what each file and field means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models

import edgekv
from edgekv.errors import CheckpointError
from edgekv.spec.chat import ChatTemplates, read_bundle_templates, write_templates
from edgekv.spec.text import encode
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.generation import generation_record
from exporters.checkpoint.tokenizer import CheckpointTokenizer, short_json
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.exports import export_options, exported

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "texts.json").read_text())
USER = [{"role": "user", "content": "x"}]
REFUSED = {"split_special_tokens"}
"""Fields that change tokens and are not supported."""


def folder_of(folder: Path, files: dict[str, Any]) -> Path:
    write_tokenizer(folder / "tokenizer.json")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def read(folder: Path) -> dict[str, Any]:
    """What the product makes of a folder, as `tests/golden/texts.py` keeps it."""
    found = CheckpointTokenizer.open(folder)
    templates = found.templates()
    rendered = templates and [templates.render(USER, tools=tools) for tools in (None, GOLDEN["tools"])]
    added = found.tokenizer.get_added_tokens_decoder()
    return {
        "ids": [encode(found.tokenizer, text) for text in GOLDEN["texts"]],
        "named": dict(found.named),
        "special": sorted(number for number, token in added.items() if token.special),
        "rendered": rendered,
    }


@pytest.mark.parametrize("name", GOLDEN["layouts"])
def test_files_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    case = GOLDEN["layouts"][name]
    folder = folder_of(tmp_path, case["files"])
    assert read(folder) == {field: case[field] for field in ("ids", "named", "special", "rendered")}


@pytest.mark.parametrize("field", GOLDEN["fields"])
def test_each_field_is_read_refused_by_name_or_changes_nothing(tmp_path: Path, field: str) -> None:
    case = GOLDEN["fields"][field]
    folder = folder_of(tmp_path, case["files"])
    if field in REFUSED:
        with pytest.raises(CheckpointError, match=rf"tokenizer_config.json: {field}: got"):
            read(folder)
        return
    assert read(folder) == {name: case[name] for name in ("ids", "named", "special", "rendered")}


@pytest.mark.parametrize("name", GOLDEN["processors"])
def test_a_processor_has_the_templates_that_transformers_gives_it(tmp_path: Path, name: str) -> None:
    case = GOLDEN["processors"][name]
    found = CheckpointTokenizer.open(folder_of(tmp_path, case["files"]))
    if case["templates"] is None:
        with pytest.raises(CheckpointError, match=r"chat_template.json: got beside additional_chat_templates"):
            found.templates(reads_pictures=True)
        return
    templates = found.templates(reads_pictures=True)
    assert templates is not None and templates.templates == case["templates"] and templates.reads_parts


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json", "preprocessor_config.json"])
def test_a_template_that_only_the_processor_has_is_the_models(tmp_path: Path, name: str) -> None:
    found = CheckpointTokenizer.open(folder_of(tmp_path, {name: {"chat_template": "only"}})).templates()
    assert found == ChatTemplates(templates={"default": "only"})


@pytest.mark.parametrize("field", GOLDEN["generation"])
def test_each_field_of_generation_config_is_read_or_named(field: str) -> None:
    """Fields that generation does not read are told to the user; those of the tokenizer and of lengths are not its."""
    assert generation_record({field: None}) is None
    elsewhere = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
    harmless = {"max_length", "use_cache", "transformers_version"}
    if field in elsewhere | harmless or field.startswith("output_"):
        return
    try:
        record = generation_record({"do_sample": True, field: 0.5})
    except CheckpointError as error:
        assert field in error.field
        return
    assert record is not None
    assert field in record.ignored or getattr(record, field) == 0.5


def test_a_bundle_has_the_tokens_the_template_and_the_ends_of_all_files(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    folder_of(
        checkpoint,
        {
            "tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "<|9|>", **flags}},
            "chat_template.json": {"chat_template": "{{ messages[0].content }}{{ eos_token }}"},
            "generation_config.json": {"eos_token_id": [257]},
        },
    )
    bundle = exported(checkpoint, export_options(context=64, ar=(1, 16)))
    with edgekv.load(bundle) as model:
        assert model.encode("a<|9|>b") == [64, 260, 65]
        assert model.bundle.manifest.tokens.eos == [257, 260]
        answer = model.generate(messages=[{"role": "user", "content": "a"}], logit_bias={260: 1e6})
        assert [token.id for token in answer] == [260] and answer.stats.stop_reason == "eos"


_PIECES = st.text('ab# \u0120\n\u00a0"\\', min_size=1, max_size=3) | st.just("#version")


@settings(deadline=None)
@given(st.lists(st.tuples(_PIECES, _PIECES), max_size=4))
def test_a_tokenizer_in_fewer_bytes_is_the_same(merges: list[tuple[str, str]]) -> None:
    pieces = dict.fromkeys(piece for left, right in merges for piece in (left, right, left + right))
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    short = short_json(tokenizer.to_str(pretty=True)).decode()
    assert Tokenizer.from_str(short).to_str() == tokenizer.to_str()
    assert len(short) <= len(tokenizer.to_str())


def test_merges_are_texts_unless_a_piece_has_a_space() -> None:
    def merges(pairs: list[tuple[str, str]]) -> object:
        pieces = dict.fromkeys(piece for left, right in pairs for piece in (left, right, left + right))
        model = models.BPE({piece: number for number, piece in enumerate(pieces)}, pairs)
        return json.loads(short_json(Tokenizer(model).to_str()))["model"]["merges"]

    assert merges([("a", "b"), ("ab", "c")]) == ["a b", "ab c"]
    assert merges([("a", "b"), (" ", "c")]) == [["a", "b"], [" ", "c"]]


@pytest.mark.parametrize(
    "model", [models.Unigram([("<unk>", 0.0), ("a", -1.2345678901234567)], 0), models.WordLevel({"a": 0}, "a")]
)
def test_a_tokenizer_without_merges_is_the_same_in_fewer_bytes(model: models.Model) -> None:
    tokenizer = Tokenizer(model)
    assert short_json(tokenizer.to_str(pretty=True)).decode() == tokenizer.to_str()


def test_a_tokenizer_file_that_says_all_is_written_as_it_is(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|0|>", "eos_token": "<|1|>"}))
    (copy := tmp_path / "copy").mkdir()
    Checkpoint.open(str(folder)).write_tokenizer(copy)
    written, read = ((place / "tokenizer.json").read_text("utf-8") for place in (copy, folder))
    assert json.loads(written) == json.loads(read) and len(written) < len(read)
    assert json.loads((copy / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|0|>",
        "eos_token": "<|1|>",
        "pad_token": "<|2|>",
    }


TOKEN = {"content": "<|9|>"}


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": {"300": TOKEN}}}, r"<\|9\|>: got id 300; expected 260"),
        ({"added_tokens.json": {"<|2|>": 260}}, r"added_tokens.json: <\|2\|>: got id 260; expected 258"),
        ({"added_tokens.json": {"<|9|>": "260"}}, r"added_tokens.json: <\|9\|>: got '260'"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [TOKEN]}}, "added_tokens_decoder: got list"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": TOKEN}}}, "added_tokens_decoder: got 'x'"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"260": "a"}}}, "added_tokens_decoder: 260: got text"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"260": {}}}}, "added_tokens_decoder: 260: got .*content"),
        ({"tokenizer_config.json": {"eos_token": ["<|1|>", "<|2|>"]}}, "eos_token: got .*; expected a token"),
        ({"tokenizer_config.json": {"extra_special_tokens": 3}}, "extra_special_tokens: got int"),
        ({"special_tokens_map.json": {"eos_token": {"content": 3}}}, "special_tokens_map.json: eos_token"),
        ({"special_tokens_map.json": "[1]"}, "special_tokens_map.json: got .*; expected a JSON object"),
        ({"tokenizer_config.json": {"fast_tokenizer_files": ["tokenizer.4.json"]}}, "fast_tokenizer_files: got"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, files: dict[str, Any], refusal: str) -> None:
    with pytest.raises(CheckpointError, match=refusal):
        CheckpointTokenizer.open(folder_of(tmp_path, files))


@pytest.mark.parametrize("files", [{"vocab.json": {}, "merges.txt": ""}, {"tokenizer.model": ""}])
def test_a_folder_without_tokenizer_json_says_how_to_write_it(tmp_path: Path, files: dict[str, Any]) -> None:
    folder_of(tmp_path, files)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: got no such file.*AutoTokenizer"):
        CheckpointTokenizer.open(tmp_path)


def test_the_bundle_keeps_the_templates(tmp_path: Path) -> None:
    files = {"chat_template.jinja": "new", "additional_chat_templates/rag.jinja": "rag"}
    found = CheckpointTokenizer.open(folder_of(tmp_path, files)).templates()
    assert found is not None and found.templates == {"default": "new", "rag": "rag"}
    write_templates(found, tmp_path)
    assert read_bundle_templates(tmp_path) == found


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert CheckpointTokenizer.open(folder_of(tmp_path, {})).templates() is None
    assert read_bundle_templates(tmp_path) is None


def _nested(loops: int) -> str:
    return "{% for i in messages %}" * loops + "{% endfor %}" * loops


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ('{"chat_template": "{% for %}"}', "template default: got TemplateSyntaxError"),
        (json.dumps({"chat_template": _nested(60)}), "template default: got "),
        (json.dumps({"chat_template": "{{ " + "9" * 5000 + " }}"}), "template default: got .*4300 digits"),
        (json.dumps({"chat_template": "{% break %}"}), "template default: got .*outside"),
        ('{"chat_template": 3}', "chat_template: got int"),
        ('{"chat_template": [{"name": "x"}]}', "chat_template: got list"),
        ("[1]", "expected a JSON object"),
        ("[" * 100000, "expected a JSON object"),
        ('{"chat_template": "' + "x" * (1 << 21) + '"}', "2,097,152 characters"),
    ],
)
def test_broken_templates_are_refused_at_export(tmp_path: Path, content: str, refusal: str) -> None:
    with pytest.raises(CheckpointError, match=refusal):
        CheckpointTokenizer.open(folder_of(tmp_path, {"tokenizer_config.json": content})).templates()
