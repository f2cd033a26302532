"""What an installation needs: the base loads and generates, extras are imported by what they are for."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import edgekv
from edgekv.cli import commands, refused_interpreter, run
from edgekv.cli.model import interactive
from edgekv.errors import EngineError
from edgekv.qnn import provider as qnn
from edgekv.qnn.vendor_libraries import Platform
from edgekv.runtime.load_options import EngineOptions
from tests.support.thorough import variants

ROOT = Path(__file__).parent.parent
OURS = {"edgekv", "exporters", "quant", "devices"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = {*("click", "jinja2", "msgspec", "numpy", "onnxruntime", "packaging", "prompt_toolkit", "rich", "tokenizers")}

# What loads graphs that are kept, and what exports use.
WITHOUT_ONNX = ("__init__", "cpu_mode", "decoder", "graph_cache", "onnx_session", "processor", "source", "weight_file")

# What may be imported when a module is: the extras of the first package that the module is in. The base always.
EXTRAS_OF = {
    **dict.fromkeys((f"edgekv.graphs.{name}" for name in WITHOUT_ONNX), ()),
    "edgekv.graphs": ("cpu",),
    "edgekv.pictures.decode": ("pictures",),
    "edgekv.pictures.tiles": ("pictures",),
    "edgekv.serve": ("serve",),
    "edgekv": (),
    "quant": (),
    "devices": (),
    "exporters.compare.runtimes.genai": ("genai",),
    "exporters.compare.runtimes.llama": ("llama",),
    "exporters.compare.runtimes.openvino": ("openvino",),
    "exporters.graphs.tflite": ("litert",),
    "exporters.htp.compile_tflite": (),
    "exporters.targets.genai.worker": ("genai",),
    "exporters.pipeline.dask": ("cpu", "export", "sweep"),
    "exporters.sweep": ("cpu", "export", "sweep"),
    "exporters": ("cpu", "export"),
}
# What requirements bring with them: onnxruntime, and Qualcomm's client qai-hub.
INDIRECT = {"flatbuffers"}, {"botocore", "requests"}

# Refuses what a base installation does not have, then continues a prompt as a program would.
PROGRAM = """
import json, sys
allowed = set(json.loads(sys.argv[1])) | set(sys.stdlib_module_names)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"not installed here: {name}", name=name)
sys.meta_path.insert(0, Refuse())
import edgekv
from edgekv.conversation import Conversation
with edgekv.load(sys.argv[2], engine=sys.argv[3], prefix_cache=sys.argv[4]) as model:
    tokens = [token.id for token in model.generate("import os", max_new_tokens=6)]
print(json.dumps(tokens))
"""
# Dependencies of the base, and Qualcomm's provider.
BROUGHT = {"flatbuffers", "google", "markupsafe", "packaging", "onnxruntime_qnn", "sitecustomize"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", variants(["cpu", "htp"], ["cpu"]))
def test_the_base_loads_and_generates(bundle: Path, tmp_path: Path, engine: str) -> None:
    arguments = [json.dumps(sorted(OURS | BASE | BROUGHT)), str(bundle), engine, str(tmp_path / "prefixes")]
    environment = {"EDGEKV_CACHE_DIR": str(tmp_path / "cache"), "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    with edgekv.load(bundle, engine=engine) as model:
        assert json.loads(done.stdout) == [token.id for token in model.generate("import os", max_new_tokens=6)]
    assert [*(tmp_path / "prefixes").rglob("*.safetensors")]


def test_the_requirements_are_these() -> None:
    assert {_package(each) for each in PROJECT["dependencies"]} == BASE


def test_modules_import_what_their_extras_install() -> None:
    wrong, seen = [], set[str]()
    for module, file in _modules():
        place = next(each for each in EXTRAS_OF if f"{module}.".startswith(f"{each}."))
        seen.add(place)
        allowed = BASE.union(INDIRECT[0], *map(_extra, EXTRAS_OF[place]))
        wrong += [f"{module}: {each}" for each in _imported(file, at_once=True) - allowed]
    assert not wrong and seen == {*EXTRAS_OF}


def test_every_import_is_in_an_extra() -> None:
    known = BASE.union(*INDIRECT, *map(_extra, PROJECT["optional-dependencies"]))
    assert {f"{module}: {each}" for module, file in _modules() for each in _imported(file) - known} == set()


def test_all_is_what_installs_everywhere() -> None:
    platforms = {"onnxruntime_qnn", "onnxruntime_genai", "ai_edge_litert", "tflite_runtime"}
    assert _extra("all") >= {"dask", "gguf", "llguidance", "matplotlib", "onnx_ir", "starlette"}
    assert not _extra("all") & platforms


def test_the_list_of_commands_imports_none(tmp_path: Path) -> None:
    program = "import sys; from edgekv.cli import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = {*done.stderr.split()}
    assert "generate" in done.stdout and "edgekv.cli.app" in modules
    assert not modules & {"numpy", "rich", "exporters.cli.export", "edgekv.cli.generate", "edgekv.cli.size"}


def test_importing_edgekv_imports_nothing_else() -> None:
    program = "import sys; import edgekv; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = {each for each in done.stdout.split() if each.partition(".")[0] in OURS | BASE}
    assert modules == {"edgekv", "edgekv.machine", "edgekv.machine.lazy"}


@pytest.mark.parametrize(("version", "bits"), [((3, 10), 64), ((3, 11), 32)])
def test_an_interpreter_that_is_too_old_or_narrow_is_refused_in_a_sentence(version: tuple[int, int], bits: int) -> None:
    refusal = refused_interpreter(version, bits)
    assert refusal and f"got 3.{version[1]} of {bits} bits" in refusal and "expected 3.11 to 3.13 of 64 bits" in refusal
    assert refused_interpreter((3, 11), 64) is None


@pytest.mark.parametrize(("missing", "name"), [("onnx-ir", "export"), ("huggingface-hub", "eval")])
def test_a_command_names_its_extra_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str, name: str
) -> None:
    found = metadata.distribution

    def distribution(package: str) -> metadata.Distribution:
        if package == missing:
            raise metadata.PackageNotFoundError(package)
        return found(package)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(commands, "resolve_name", lambda _: pytest.fail("the command was imported"))
    assert run([name, "no such checkpoint"]) == 1
    expected = f"command {name}: got no {missing}; expected the packages of edgekv[export]"
    assert f'{expected}. Run pip install "edgekv[export]"' in capsys.readouterr().err
    assert run(["--help"]) == 0
    listed = [line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert name in listed


def test_talking_without_the_package_for_speed_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interactive(EngineOptions()) == EngineOptions(cpu_mode="fast")
    assert interactive(EngineOptions("htp")) == EngineOptions("htp")
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert interactive(EngineOptions()) == EngineOptions(cpu_mode="emulate")
    assert interactive(EngineOptions(cpu_mode="exact16")) == EngineOptions(cpu_mode="exact16")
    assert capsys.readouterr().err.count('pip install "edgekv[cpu]"') == 1


def _modules() -> Iterator[tuple[str, Path]]:
    for package in sorted(OURS):
        for file in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(file.relative_to(ROOT).with_suffix("").parts), file


def _imported(file: Path, *, at_once: bool = False) -> set[str]:
    """The packages that a module imports; `at_once`, those that it imports when it is imported."""
    found = set[str]()
    waiting: list[ast.AST] = [_parsed(file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not (at_once and (is_typing or isinstance(node, ast.FunctionDef))):
            waiting += ast.iter_child_nodes(node)
    return found - OURS - {*sys.stdlib_module_names}


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _extra(name: str) -> set[str]:
    """The packages of an extra, by the names that are imported, with those of the extras that it includes."""
    found = set[str]()
    for text in PROJECT["optional-dependencies"][name]:
        if text.startswith("edgekv["):
            found = found.union(*map(_extra, text[len("edgekv[") : -1].split(",")))
        else:
            found.add(_package(text))
    return found


def _package(requirement: str) -> str:
    """The name that is imported: llama-cpp-python is llama_cpp, and pillow is PIL."""
    name = re.split(r"[^\w.-]", requirement)[0].replace("-", "_").lower().removesuffix("_python")
    return {"pillow": "PIL"}.get(name, name)


def _dedented(text: str | None) -> str | None:
    return text if text is None else re.sub(r"\n {4}", "\n", text).rstrip()


def test_the_htp_is_refused_on_macos_with_what_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(qnn.metadata, "version", version)
    monkeypatch.setattr(qnn.Platform, "here", lambda: Platform("macos", "arm64"))
    with pytest.raises(EngineError, match=r"^engine htp: got macos, .*; expected Linux or Windows.* Use --engine cpu"):
        qnn.compiler()
