"""From a path to a model that can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.machine.json_file import read_json
from edgekv.spec import identify
from edgekv.spec.text import TOKENIZER, open_tokenizer
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.gguf import is_gguf
from exporters.compare.bundle import BundleContender
from exporters.compare.contender import Contender, ContenderDescription, bytes_on_disk
from exporters.compare.foreign import ForeignContender
from exporters.compare.messages import RuntimeName
from exporters.compare.reference import ENGINE, ReferenceContender

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GENAI_CONFIG, _CONFIG, _OPENVINO = "genai_config.json", "config.json", "openvino_model.xml"
_PIPELINE = "decoder-pipeline"
_WANTED = "a bundle, a checkpoint, a GGUF file, or a folder of onnxruntime-genai or OpenVINO"


@dataclass(frozen=True, slots=True)
class ContenderOptions:
    """How models are run.

    Attributes:
        engine: of bundles.
        cpu_mode: of bundles on the engine `cpu`; None for `emulate`.
        threads: of one operation; None leaves it to each runtime.
        context: the most tokens of a sequence, for runtimes that allocate it.
    """

    engine: str = "cpu"
    cpu_mode: str | None = None
    threads: int | None = None
    context: int = 2048


class _GenaiModel(msgspec.Struct, frozen=True):
    context_length: int
    type: str = ""
    bos_token_id: int | None = None


class _GenaiConfig(msgspec.Struct, frozen=True):
    model: _GenaiModel


class _ModelConfig(msgspec.Struct, frozen=True):
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None


def open_contender(path: Path, options: ContenderOptions) -> Contender:
    """Open a model by what its files are.

    Raises:
        UsageError: it is none of these, or the GGUF file of a folder was not named.
        EngineError: its runtime is not installed.
        EdgeKVError: it is broken; see `edgekv.load` and `Checkpoint.open`.
    """
    if path.is_dir() and (path / _OPENVINO).is_file():
        return _openvino(path, options)
    record = identify(path)
    if record is not None and record.kind == "genai":
        return _genai(path, options)
    if record is not None and record.kind == "bundle" and path.is_dir():
        return BundleContender(path, options.engine, options.cpu_mode, options.threads)
    if is_gguf(path):
        return _gguf(path, options)
    if record is not None and record.kind == "checkpoint":
        opened = Checkpoint.open(str(path))
        return ReferenceContender(opened, "checkpoint", bytes_on_disk(opened.folder))
    what = "no such file or folder" if not path.exists() else "an unknown format" if record is None else record.what
    fix = "Check the path." if record is None else record.as_bundle.format(path=path) or record.as_checkpoint
    raise UsageError(str(path), got=what, expected=_WANTED, fix=fix)


def _gguf(path: Path, options: ContenderOptions) -> Contender:
    """Through llama-cpp-python where it is installed; else in float32, untimed."""
    opened = Checkpoint.open(str(path))
    reference = ReferenceContender(opened, "GGUF", sum(file.stat().st_size for file in opened.files))
    version = _version("llama-cpp-python")
    if version is None:
        engine = f"{ENGINE} (llama-cpp-python is not installed)"
        reference.described = msgspec.structs.replace(reference.described, engine=engine)
        return reference
    described = msgspec.structs.replace(
        reference.described,
        engine=f"llama-cpp-python {version}",
        context=min(options.context, opened.spec.max_positions),
    )
    return ForeignContender(
        "llama-cpp-python", described, opened.tokenizer, reference.first, options.threads, opened.chat
    )


def _genai(path: Path, options: ContenderOptions) -> Contender:
    model = read_json(
        path / _GENAI_CONFIG, _GenaiConfig, expected="a folder for onnxruntime-genai", fix="Write it again."
    ).model
    if model.type == _PIPELINE:
        raise UsageError(
            str(path),
            got="a pipeline, of which onnxruntime-genai gives the logits of a prompt's last token alone",
            expected=_WANTED,
            fix="Compare the bundle that it was made from: its graphs return the same integers.",
        )
    return _foreign("onnxruntime-genai", path, model.context_length, model.bos_token_id, options)


def _openvino(path: Path, options: ContenderOptions) -> Contender:
    model = _ModelConfig()
    if (path / _CONFIG).is_file():
        model = read_json(
            path / _CONFIG, _ModelConfig, expected="the configuration of a checkpoint", fix="Write it again."
        )
    context = model.max_position_embeddings or options.context
    return _foreign("openvino", path, min(context, options.context), model.bos_token_id, options)


def _foreign(
    runtime: RuntimeName, path: Path, context: int, bos: int | None, options: ContenderOptions
) -> ForeignContender:
    version = _version(runtime)
    if version is None:
        raise EngineError(
            str(path),
            got=f"a model for {runtime}, which is not installed",
            expected="its runtime",
            fix=f"Install it: pip install {runtime}",
        )
    described = ContenderDescription(
        path=str(path),
        kind=f"{runtime} folder",
        engine=f"{runtime} {version}",
        bytes=bytes_on_disk(path),
        context=context,
    )
    first = [] if bos is None else [bos]
    return ForeignContender(runtime, described, _tokenizer(path), first, options.threads)


def _tokenizer(path: Path) -> Tokenizer | None:
    file = path / TOKENIZER
    return open_tokenizer(file, BundleError, "Copy the checkpoint's tokenizer.json there.") if file.is_file() else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
