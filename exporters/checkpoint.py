"""A Hugging Face checkpoint on disk: configuration, tokenizer, and weights that are read when asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from edgekv.errors import CheckpointError
from exporters.spec import DecoderSpec

_FLOATS = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids; `eos` may hold several."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor's bytes lie."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint whose configuration, tokenizer and tensor shapes agree with each other."""

    name: str
    folder: Path
    spec: DecoderSpec
    special: SpecialTokens
    tokenizer: Tokenizer
    _tensors: dict[str, _Stored] = field(repr=False)

    @classmethod
    def open(cls, name: str) -> Checkpoint:
        """Opens a folder, or downloads a hub id such as `org/model` through huggingface_hub.

        Raises:
            CheckpointError: naming the file or field that is missing, broken, contradictory or unsupported.
        """
        folder = _locate(name)
        spec = DecoderSpec.from_config(config := _read_json(folder / "config.json"))
        generation = _read_json(folder / "generation_config.json", optional=True)
        tokenizer = _open_tokenizer(folder / "tokenizer.json", spec.vocab)
        special = _special_tokens(config, generation, tokenizer)
        tensors = dict(_index(folder))
        checkpoint = cls(name, folder, spec, special, tokenizer, tensors)
        checkpoint._check_shapes()
        return checkpoint

    def tensor(self, key: str) -> NDArray[np.float32]:
        """The tensor as float32, read now; matrices are `[out, in]`, as stored."""
        stored = self._tensors[key]
        raw = np.memmap(stored.file, stored.dtype, mode="r", offset=stored.offset, shape=stored.shape)
        return np.asarray(raw).astype(np.float32)

    @property
    def head_key(self) -> str:
        """The tensor that makes logits: the embedding where the head is tied."""
        return "model.embed_tokens.weight" if self.spec.tied_head else "lm_head.weight"

    @property
    def parameters(self) -> int:
        """How many numbers the model's tensors hold, a tied head counted once."""
        return sum(int(np.prod(self._tensors[key].shape)) for key, _ in self._wanted())

    def weights_sha256(self) -> str:
        """One hash over all weight files, in name order."""
        digest = hashlib.sha256()
        for path in sorted({stored.file for stored in self._tensors.values()}):
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any that the tokenizer would add."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        spec = self.spec
        query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        yield "model.embed_tokens.weight", (spec.vocab, spec.hidden)
        for layer in range(spec.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (spec.hidden,)
            yield prefix + "self_attn.q_proj.weight", (query, spec.hidden)
            yield prefix + "self_attn.k_proj.weight", (key_value, spec.hidden)
            yield prefix + "self_attn.v_proj.weight", (key_value, spec.hidden)
            yield prefix + "self_attn.o_proj.weight", (spec.hidden, query)
            yield prefix + "post_attention_layernorm.weight", (spec.hidden,)
            yield prefix + "mlp.gate_proj.weight", (spec.intermediate, spec.hidden)
            yield prefix + "mlp.up_proj.weight", (spec.intermediate, spec.hidden)
            yield prefix + "mlp.down_proj.weight", (spec.hidden, spec.intermediate)
        yield "model.norm.weight", (spec.hidden,)
        if not spec.tied_head:
            yield "lm_head.weight", (spec.vocab, spec.hidden)

    def _check_shapes(self) -> None:
        for key, shape in self._wanted():
            stored = self._tensors.get(key)
            if stored is None or stored.shape != shape:
                raise CheckpointError(
                    f"weights: {key}",
                    found="no such tensor" if stored is None else f"shape {list(stored.shape)}",
                    wanted=f"shape {list(shape)}, as config.json says",
                    way_out="The weights and config.json do not belong together; fetch both anew.",
                )


def _locate(name: str) -> Path:
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            "checkpoint",
            found=f"{name!r}, which is no folder",
            wanted="a folder with config.json, tokenizer.json and safetensors, or a hub id such as org/model",
            way_out="Check the path.",
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.safetensors.index.json", "tokenizer.json"]
    patterns += ["config.json", "generation_config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors share no base class
        raise CheckpointError(
            "checkpoint",
            found=f"{name!r}: no such folder, and the hub said {type(error).__name__}",
            wanted="a folder, or a hub id that can be downloaded",
            way_out="Check the path or the id, log in with `hf auth login` for gated models, or download it first.",
        ) from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        found = "no such file"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        found = f"no valid JSON ({error})"
    else:
        if isinstance(content, dict):
            return content
        found = f"a JSON {type(content).__name__}"
    raise CheckpointError(
        str(path),
        found=found,
        wanted="a JSON object",
        way_out="Point to a whole Hugging Face checkpoint folder.",
    )


def _special_tokens(config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer) -> SpecialTokens:
    def pick(name: str) -> tuple[int, ...]:
        value = generation.get(name)
        value = config.get(name) if value is None else value
        ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
        for token in ids:
            if not isinstance(token, int) or token < 0 or tokenizer.id_to_token(token) is None:
                raise CheckpointError(
                    name,
                    found=repr(token),
                    wanted="the id of a token of tokenizer.json",
                    way_out="The tokenizer and the configuration do not belong together; fetch both anew.",
                )
        return ids

    bos = pick("bos_token_id")
    pad = () if config.get("pad_token_id") == -1 else pick("pad_token_id")  # -1 is how some say none
    return SpecialTokens(bos=bos[0] if bos else None, eos=pick("eos_token_id"), pad=pad[0] if pad else None)


def _open_tokenizer(path: Path, vocab: int) -> Tokenizer:
    if not path.exists():
        raise CheckpointError(
            str(path), found="no such file", wanted="tokenizer.json", way_out="Fetch it with the checkpoint."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(
            str(path), found=f"an unreadable tokenizer ({error})", wanted="tokenizer.json", way_out="Fetch it anew."
        ) from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest >= vocab:
        raise CheckpointError(
            str(path),
            found=f"a token with id {highest}",
            wanted=f"ids below vocab_size = {vocab} of config.json",
            way_out="This tokenizer belongs to another model; fetch both together.",
        )
    return tokenizer


def _index(folder: Path) -> Iterator[tuple[str, _Stored]]:
    """Every tensor of every `*.safetensors`; the library checks headers and lengths, so truncation shows here."""
    paths = sorted(folder.glob("*.safetensors"))
    for part in _parts_of_index(folder):
        if part not in {path.name for path in paths}:
            raise CheckpointError(
                str(folder / part),
                found="no such file",
                wanted="every part that model.safetensors.index.json names",
                way_out="Download the missing part.",
            )
    if not paths:
        raise CheckpointError(
            str(folder), found="no *.safetensors", wanted="model.safetensors", way_out="Download the weights."
        )
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as opened:
                keys = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                str(path),
                found=f"a broken file ({error})",
                wanted="a whole safetensors file",
                way_out="It is truncated or damaged: download it again.",
            ) from error
        header, begin = _header(path)
        for key in keys:
            entry = header[key]
            dtype = _FLOATS.get(entry["dtype"])
            if dtype is None:
                raise CheckpointError(
                    f"{path.name}: {key}",
                    found=entry["dtype"],
                    wanted=" or ".join(_FLOATS),
                    way_out="Start from the checkpoint before quantization.",
                )
            yield key, _Stored(path, dtype, tuple(entry["shape"]), begin + entry["data_offsets"][0])


def _parts_of_index(folder: Path) -> set[str]:
    table = _read_json(folder / "model.safetensors.index.json", optional=True)
    return set(table.get("weight_map", {}).values())


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file that the library has accepted, and where its data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
