"""Whatever is wrong is named, with the way out; nothing is left behind; nobody sees a traceback."""

import json
import os
import shutil
from pathlib import Path

import pytest

from edgekv.cli import run
from tests.support.checkpoints import ARCHITECTURES, WINDOW, write_checkpoint, write_tokenizer


def refusal(arguments: list[str], code: int, capsys) -> str:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def replace(**fields):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model.safetensors", lambda path: path.unlink(), ["no *.safetensors", "Download"]),
        ("model.safetensors", truncate, ["model.safetensors", "broken", "again"]),
        ("config.json", replace(model_type="rwkv"), ["model_type", "'rwkv'", "without recurrent layers"]),
        ("config.json", truncate, ["config.json", "JSON"]),
        (
            "tokenizer.json",
            lambda path: write_tokenizer(path, extra=200, special=False),
            ["tokenizer.json", "455", "320"],
        ),
    ],
    ids=["no weights", "truncated weights", "unknown architecture", "truncated config", "foreign tokenizer"],
)
def test_a_bad_checkpoint(tmp_path, capsys, file, change, words):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    change(checkpoint / file)
    arguments = ["export", str(checkpoint), "-o", str(tmp_path / "bundle"), "--device", "SM8650", "--context", "64"]
    message = refusal(arguments, 1, capsys)
    assert all(word in message for word in words), message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "SM9999"], ["SM9999", "SM8650"]),
        (["--device", "SM8650", "--context", "100"], ["--context", "100", "multiple of the largest AR, 32"]),
        (["--device", "SM8650", "--context", "512"], ["--context", "512", "max_position_embeddings = 256"]),
        (["--device", "SM8650", "--ar", "32"], ["--ar", "32", "1,32"]),
        (["--device", "SM8650", "--ar", "1;32"], ["--ar", "1;32"]),
        (["--device", "SM8650", "--kv", "u16"], ["--kv", "u16", "u8"]),
        (["--device", "SM8650", "--key-layout", "diagonal"], ["--key-layout", "diagonal", "rows or columns"]),
        (["--device", "QCS6490", "--kv", "s16"], ["--kv", "QCS6490", "V73"]),
        (["--device", "SM8650", "--recipe", "w2a2"], ["--recipe", "w2a2", "w8a16"]),
        (["--device", "SM8650", "--context", "64", "--calibration", "nothing.txt"], ["--calibration", "nothing.txt"]),
        (["--compile", "--context", "64"], ["--device"]),
    ],
)
def test_bad_options_of_an_export(tmp_path, capsys, options, words):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    message = refusal(["export", str(checkpoint), "-o", str(tmp_path / "bundle"), *options], 2, capsys)
    assert all(word in message for word in words), message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("command", ["export", "plan"])
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mistral", ["--context", "128"], ["--ar: got 32", f"attention window of {WINDOW}"]),
        ("mistral", ["--context", "96", "--ar", f"1,{WINDOW // 3},{WINDOW}"], [f"--ar: got {WINDOW}", "smaller --ar"]),
        ("lfm3", ["--context", "6", "--ar", "1,2"], ["--context: got 6", "more than 7, the kernel"]),
    ],
)
def test_options_without_a_cache(tmp_path, capsys, command, name, options, words):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name])
    target = ["-o", str(tmp_path / "bundle")] if command == "export" else []
    message = refusal([command, str(checkpoint), *target, "--device", "SM8650", *options], 2, capsys)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("window", ["0", "16", "64,32"])
def test_a_limit_of_attention_that_is_not_above_the_largest_ar(tmp_path, capsys, window):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    arguments = ["export", str(checkpoint), "-o", str(tmp_path / "bundle"), "--device", "SM8650", "--context", "128"]
    message = refusal([*arguments, "--max-attention-window", window], 2, capsys)
    assert f"--max-attention-window: got {window.split(',')[-1]}; expected more than the largest AR, 32" in message


@pytest.mark.parametrize("command", ["generate", "eval", "compile"])
@pytest.mark.parametrize("name", ["weights-layer-02.safetensors", "ar1_cl128.onnx.gz", "tokenizer.json"])
def test_a_bundle_with_a_changed_byte(bundle, tmp_path, capsys, command, name):
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    raw = bytearray((copy / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (copy / name).write_bytes(raw)
    more = {
        "generate": ["--prompt", "x"],
        "eval": ["--text", str(copy / "manifest.json")],
        "compile": ["--device", "SM8650"],
    }
    message = refusal([command, str(copy), *more[command]], 1, capsys)
    assert name in message and "sha256" in message and "Export the bundle again" in message
    assert not (copy / "compiled").exists()


def test_a_prompt_longer_than_the_context(bundle, capsys):
    message = refusal(["generate", str(bundle), "--prompt", "x = 1\n" * 100], 1, capsys)
    assert "prompt" in message and "at most 128" in message and "--context" in message


def test_a_text_that_is_not_there(bundle, capsys):
    assert "--text" in refusal(["eval", str(bundle), "--text", "nothing.txt"], 2, capsys)


def test_an_unknown_device_of_a_compilation(bundle, capsys):
    assert "SM865O" in refusal(["compile", str(bundle), "--device", "SM865O"], 2, capsys)


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
@pytest.mark.parametrize("command", ["eval", "trace", "prefix", "export"])
def test_a_text_that_is_no_regular_file_is_refused_without_waiting(tmp_path, small, capsys, command, kind):
    path = tmp_path / "text"
    {"FIFO": os.mkfifo, "device": lambda it: it.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    arguments = {
        "eval": ["eval", str(small), "--text", str(path)],
        "trace": ["trace", str(small), "-o", str(tmp_path / "trace.npz"), "--text", str(path)],
        "prefix": ["prefix", "bake", str(small), str(path)],
        "export": f"export {tmp_path / 'checkpoint'} -o {tmp_path / 'new'} --device SM8650 --context 64 "
        f"--skip-htp-check --calibration {path}".split(),
    }
    write_checkpoint(tmp_path / "checkpoint")
    message = refusal(arguments[command], 2, capsys)
    assert f"a {kind}, not a regular file" in message and "UTF-8 text file" in message
