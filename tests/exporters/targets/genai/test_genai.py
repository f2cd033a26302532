"""Folders for onnxruntime-genai, run with the package itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from tokenizers import Tokenizer

import edgekv
from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.cli.app import run
from edgekv.errors import BundleError, EngineError, UsageError
from exporters.targets.genai.folder import open_genai_folder, run_folder
from exporters.targets.genai.options import GenaiOptions
from exporters.targets.genai.write import choose_graphs, choose_pad_token, write_genai
from tests.support.checkpoints import NEWER, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported, kept

pytestmark = pytest.mark.htp

DEVICE = find("SM8650")
PAD = 2
PADDING = 2047


@pytest.fixture(scope="module")
def folders(wide_on_htp: Path) -> dict[str, Path]:
    """For onnxruntime-genai, by engine."""

    def write(parent: Path) -> None:
        for engine, device in (("cpu", None), ("htp", DEVICE)):
            write_genai(open_bundle(wide_on_htp), parent / engine, GenaiOptions(device, PADDING))

    parent = kept("genai", ("exporters.targets.genai.write",), write, wide_on_htp)
    return {"cpu": parent / "cpu", "htp": parent / "htp"}


PROMPT = [256, *((37 * i * i + 5 * i) % 256 for i in range(39))]
"""40 tokens: with AR-32 a window that is padded and one that is full."""


@pytest.mark.parametrize(("engine", "tokens"), [pytest.param("cpu", 64, marks=pytest.mark.thorough), ("htp", 16)])
def test_it_generates_the_tokens_that_our_loop_does(
    engine: str, tokens: int, wide_on_htp: Path, folders: dict[str, Path]
) -> None:
    model = edgekv.load(wide_on_htp, engine, verify=False)
    expected = [token.id for token in model.generate(PROMPT, tokens)]
    assert len(expected) == tokens
    assert run_folder(open_genai_folder(folders[engine]), PROMPT, tokens) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "tokens"), [("cpu", 1000), ("htp", 4)])
def test_its_graphs_begin_with_the_sink(
    engine: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt takes seven windows of 16 tokens, and 1 + 112 + 15 tokens fill the context of 128."""
    checkpoint = write_sinking(tmp_path / "checkpoint", NEWER)
    bundle = exported(checkpoint, export_options(context=(64, 128), ar=(1, 16), calibration_tokens=512))
    target, prompt = tmp_path / "genai", [256, *range(40, 139)]
    command = ["bundle", "genai", str(bundle), "-o", str(target), "--engine", engine, "--pad-token-id", "319"]
    assert run(command) == 0
    assert "the graphs begin every text with '<|0|>', which prompts leave out" in capsys.readouterr().out
    expected = [token.id for token in edgekv.load(bundle, engine).generate(prompt, min(tokens, 15))]
    assert len(expected) >= 4
    assert run_folder(open_genai_folder(target), prompt, tokens) == expected
    assert run_folder(open_genai_folder(target), prompt[1:], 4) == expected[:4]


def test_it_ends_where_the_context_does(folders: dict[str, Path]) -> None:
    """Padding counts: 40 tokens in windows of 32 leave 128 - 64."""
    assert len(run_folder(open_genai_folder(folders["cpu"]), PROMPT, 1000)) == 64


def test_its_tokenizer_is_ours_but_for_the_first_token(bundle: Path, embedded: Path, tmp_path: Path) -> None:
    write_genai(open_bundle(bundle), tmp_path / "genai", GenaiOptions(None, check=False))
    text = (embedded / "heldout.txt").read_text("utf-8")[:20000] + "\n'héllo' 123 <|end_of_text|>"
    program = (
        "import json, sys, onnxruntime_genai as og\n"
        "tokenizer = og.Tokenizer(og.Model(sys.argv[1]))\n"
        "tokens = [int(token) for token in tokenizer.encode(sys.stdin.read())]\n"
        "print(json.dumps([tokens, tokenizer.decode(tokens[:500])]))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "genai")]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", check=True)
    tokens, decoded = json.loads(done.stdout)
    ours = Tokenizer.from_file(str(embedded / "tokenizer.json"))
    assert [0, *tokens] == ours.encode(text).ids
    assert decoded == ours.decode(tokens[:500])


def test_its_tokenizer_renders_the_chat_template(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", NEWER)
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|1|>", "bos_token": "<|0|>"}))
    (checkpoint / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<|2|>{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|2|>assistant:{% endif %}"
    )
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    bundle = exported(checkpoint, export_options(context=64, ar=(1, 16)))
    write_genai(open_bundle(bundle), tmp_path / "genai", GenaiOptions(None, check=False))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    program = (
        "import sys, onnxruntime_genai as og\n"
        "tokenizer = og.Tokenizer(og.Model(sys.argv[1]))\n"
        "print(tokenizer.apply_chat_template(sys.argv[2], add_generation_prompt=True), end='')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "genai"), json.dumps(messages)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    with edgekv.load(bundle) as model:
        assert done.stdout == model.chat_templates.render(messages)


def test_a_shared_binary_ends_its_process_on_the_emulator_and_no_other(
    wide_on_htp: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """It has both graphs; only a Snapdragon can load it."""
    written = write_genai(
        open_bundle(wide_on_htp), tmp_path / "shared", GenaiOptions(DEVICE, PADDING, share_weights=True, check=False)
    )
    (size,) = (record.bytes for name, record in written.files.items() if name.endswith(".bin"))
    assert size < 0.6 * sum(path.stat().st_size for path in folders["htp"].glob("*.bin"))
    with pytest.raises(EngineError, match=r"got SIG.*runs only on a Snapdragon"):
        run_folder(open_genai_folder(tmp_path / "shared"), PROMPT, 4)


def test_prompts_that_it_would_misread_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=f"prompt: got the id {PADDING}, the padding token"):
        run_folder(open_genai_folder(folders["cpu"]), [0, 5, PADDING, 6], 4)
    with pytest.raises(UsageError, match="prompt: got 1 tokens; expected at least 2"):
        run_folder(open_genai_folder(folders["cpu"]), [5], 4)
    with pytest.raises(
        UsageError, match="prompt: got 97 tokens, 128 with padding; expected less than the context of 128"
    ):
        run_folder(open_genai_folder(folders["cpu"]), [5] * 97, 4)


def test_a_folder_that_is_none_or_lacks_a_file_is_explained(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"genai_bundle.json: got .*No such file.*edgekv bundle genai BUNDLE"):
        open_genai_folder(tmp_path)
    shutil.copy(folders["cpu"] / "genai_bundle.json", tmp_path)
    with pytest.raises(BundleError, match=r"got no such file; expected sha256 .*edgekv bundle genai BUNDLE"):
        open_genai_folder(tmp_path)


def test_another_folder_is_called_what_it_is(bundle: Path, embedded: Path, tmp_path: Path) -> None:
    (tmp_path / "genie_config.json").write_text("{}")
    for other, words in (
        (bundle, "got a bundle .* edgekv bundle genai .* -o DIR"),
        (embedded, "got a checkpoint; .* edgekv export"),
        (tmp_path, "got a folder for Genie; .* edgekv genie run"),
    ):
        with pytest.raises(BundleError, match=words):
            open_genai_folder(other)


def changed(bundle: Path, **changes: object) -> Bundle:
    opened = open_bundle(bundle, verify=False)
    return Bundle(opened.path, structs.replace(opened.manifest, **changes))


def test_what_it_cannot_express_is_refused_before_anything_is_written(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"cache: got s16; expected u8, all .*genai has. Export it with --kv u8"):
        choose_graphs(changed(bundle, kv_dtype="s16"))
    graphs = open_bundle(bundle, verify=False).manifest.graphs
    wide = [structs.replace(g, ar=96) if g.role == "prefill" else g for g in graphs]
    with pytest.raises(
        BundleError, match=r"context 128, 96 tokens per inference; expected a context of at least .* 192"
    ):
        write_genai(changed(bundle, graphs=wide), tmp_path / "folder", GenaiOptions(None))
    assert not list(tmp_path.iterdir())


def test_padding_is_an_id_that_no_prompt_contains(bundle: Path) -> None:
    tokens = open_bundle(bundle, verify=False).manifest.tokens
    assert choose_pad_token(changed(bundle), None) == PAD
    assert choose_pad_token(changed(bundle), 7) == 7
    model = structs.replace(open_bundle(bundle, verify=False).manifest.model, vocab=4100)
    ends = structs.replace(tokens, pad=1)
    assert choose_pad_token(changed(bundle, tokens=ends, model=model), None) == 4099
    with pytest.raises(
        UsageError, match=r"padding: got a bundle without a padding token.*--pad-token-id; .*2 \(<\|pad\|>\)"
    ):
        choose_pad_token(changed(bundle, tokens=ends), None)
    for wrong in (-1, 4096, tokens.eos[0], tokens.bos):
        with pytest.raises(UsageError, match=f"--pad-token-id: got {wrong}; expected an id below 4096"):
            choose_pad_token(changed(bundle), wrong)


def test_another_version_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    info = tmp_path / "onnxruntime_genai-0.18.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-genai\nVersion: 0.18.0\n")
    program = "from edgekv.cli.app import run; raise SystemExit(run(['genai', 'run', *__import__('sys').argv[1:]]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folders["cpu"]), "--prompt", "x y"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "onnxruntime-genai: got 0.18.0; expected 0.15.2 or 0.16.0. Install it: pip install" in done.stderr


def test_the_commands_write_a_folder_and_run_it(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "folder")
    arguments = ["bundle", "genai", str(bundle), "-o", folder, "--engine", "cpu"]
    assert run([*arguments, "--skip-check", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["window"], written["soc"], written["checked"]) == (32, None, False)
    assert run(["genai", "run", folder, "--prompt", "def main(", "--max-new-tokens", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["tokens"]) == 3 and printed["text"] == "main=None):\n"
    assert run(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert run([*arguments, "--force", "--device", "SM8650"]) == 2
    assert run([*arguments, "--force", "--share-weights"]) == 2
    assert "--share-weights: got the option with the engine cpu" in capsys.readouterr().err
    assert run([*arguments[:-1], "gpu", "--force"]) == 2
