"""An adapter's folder: its tensors, checked against the model that they are merged into."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from edgekv.errors import CheckpointError
from edgekv.machine.system import sha256_of
from edgekv.spec import EMBEDDING, HEAD, DecoderSpec, text_tensor
from exporters.checkpoint.lora.choice import AdapterChoice
from exporters.checkpoint.lora.config import ADAPTER_CONFIG, LoraConfig, refuse
from exporters.checkpoint.lora.merged import LowRank, MergedTensor
from exporters.checkpoint.stored import CheckpointTensor, StoredTensor, check_floats, tensors_of

WEIGHTS = "adapter_model.safetensors"

_PREFIX = re.compile(r"^(base_model\.model\.)+")
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])(\.default)?(\.weight)?")
_REPLACED = re.compile(r"(?P<module>.+?)(\.base_layer|\.modules_to_save(\.default)?)?\.(?P<kind>weight|bias)")
_CONVERT = (
    'Convert it: peft.PeftModel.from_pretrained(BASE, FOLDER).save_pretrained(FOLDER), which writes "adapter_model'
    '.safetensors"; load pickled files only from sources that you trust.'
)


class HasShape(Protocol):
    """A tensor of the model, as far as adapters are checked against it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, `[out, in]` for a matrix."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An open LoRA adapter.

    Attributes:
        folder: where it lies.
        scale: multiplies what it adds.
        config: its configuration.
        products: what it adds, by module.
        replaced: tensors that take the place of the model's, by name.
        model_names: whether names could be brought to those of the decoder alone, so that patterns match them.
    """

    folder: Path
    scale: float
    config: LoraConfig
    products: Mapping[str, LowRank]
    replaced: Mapping[str, StoredTensor]
    model_names: bool

    @classmethod
    def open(cls, choice: AdapterChoice) -> Adapter:
        """Read the names of its tensors.

        Raises:
            CheckpointError: it is no LoRA adapter of a language model, of a variant that cannot be merged, or damaged.
        """
        config, file = LoraConfig.read(choice.folder), choice.folder / WEIGHTS
        if not file.is_file():
            pickled = (choice.folder / "adapter_model.bin").exists()
            raise CheckpointError(
                str(file),
                got="pickled weights (adapter_model.bin), which are never opened" if pickled else "no such file",
                expected=WEIGHTS,
                fix=_CONVERT if pickled else "Download the adapter again.",
            )
        halves: dict[str, dict[str, StoredTensor]] = {}
        replaced: dict[str, StoredTensor] = {}
        embeddings, same_names = set[str](), True
        for key, tensor in tensors_of(file):
            check_floats({key: tensor})
            whole = _PREFIX.sub("", key)
            name = text_tensor(whole)
            if name is None:  # of the vision model
                continue
            same_names &= name == whole
            if (match := _PART.fullmatch(name)) is not None:
                halves.setdefault(match["module"], {})[match["part"]] = tensor
                embeddings |= {match["module"]} if match["embedding"] else set()
            elif (match := _REPLACED.fullmatch(name)) is not None and "lora_" not in name:
                replaced[f"{match['module']}.{match['kind']}"] = tensor
            else:
                raise refuse(f"{file}: {key}", "a tensor that edgekv does not know", "lora_A and lora_B", config.base)
        products = {
            module: _product(file, module, parts, config, choice.scale, module in embeddings)
            for module, parts in halves.items()
        }
        if replaced and choice.scale != 1:
            raise CheckpointError(
                f"--lora {choice.folder}={choice.scale:g}",
                got=f"an adapter that replaces {next(iter(replaced))}",
                expected="the scale 1 with modules_to_save or biases, which replace tensors",
                fix=f"Use --lora {choice.folder}.",
            )
        return cls(choice.folder, choice.scale, config, products, replaced, same_names)

    @property
    def sha256(self) -> str:
        """A hash of its configuration and weights."""
        hashes = [sha256_of(self.folder / name) for name in (ADAPTER_CONFIG, WEIGHTS)]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    def check(self, tensors: Mapping[str, HasShape]) -> None:
        """Check that its tensors are those that its configuration names, and fit the model's.

        Raises:
            CheckpointError: naming the tensor.
        """
        modules = {key.removesuffix(".weight") for key, stored in tensors.items() if len(stored.shape) == 2}
        changed = {module for module in modules if self.config.changes(module)} if self.model_names else set()
        for module in sorted(changed - self.products.keys()):
            raise self._refused(f"{module}.lora_A.weight", "no such tensor", "one, as target_modules says")
        for module, product in self.products.items():
            self._check_product(module, product, tensors.get(f"{module}.weight"))
        for key, tensor in self.replaced.items():
            module, _, kind = key.rpartition(".")
            stored = tensors.get(key)
            allowed = self.config.biases if kind == "bias" else key in (EMBEDDING, HEAD) or self.config.replaces(module)
            if stored is None or not allowed:
                got = "a tensor that the model does not have" if stored is None else "a tensor of the base model"
                raise self._refused(key, got, "what modules_to_save and bias say")
            if stored.shape != tensor.shape:
                raise self._refused(key, f"shape {list(tensor.shape)}", f"shape {list(stored.shape)}")
        for name in self.config.saved:
            if not any(f".{key}".endswith((f".{name}.weight", f".{name}.bias")) for key in self.replaced):
                raise self._refused(name, "no such tensor", "one, as modules_to_save says")

    def _check_product(self, module: str, product: LowRank, stored: HasShape | None) -> None:
        if stored is None:
            raise self._refused(module, "a module that the model does not have", "the modules of the model")
        if self.model_names and not self.config.changes(module):
            raise self._refused(module, "an adapter", "none, as target_modules says")
        left, right = product.left.shape, product.right.shape
        if product.transposed:
            left, right = left[::-1], right[::-1]
        rank = self.config.rank_of(module)
        if (left, right) != ((stored.shape[0], rank), (rank, *stored.shape[1:])):
            got = f"shapes {list(left)} and {list(right)}"
            expected = (
                f"{[stored.shape[0], rank]} and {[rank, *stored.shape[1:]]}, of r = {rank} and the model's matrix"
            )
            raise self._refused(module, got, expected)

    def _refused(self, key: str, got: str, expected: str) -> CheckpointError:
        return refuse(f"{self.folder}: {key}", got, expected, self.config.base)


def merge(
    tensors: Mapping[str, CheckpointTensor], spec: DecoderSpec, choices: Sequence[AdapterChoice]
) -> tuple[dict[str, CheckpointTensor], DecoderSpec, tuple[Adapter, ...]]:
    """The tensors with adapters merged into them, and the decoder, whose head is untied where only one of both changes.

    Raises:
        CheckpointError: an adapter does not fit the model, or two replace one tensor.
    """
    adapters = tuple(Adapter.open(choice) for choice in choices)
    merged = dict(tensors)
    ends = {EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")}
    if spec.tied_head and any(ends & _changed(adapter) for adapter in adapters):
        merged.setdefault(HEAD, merged[EMBEDDING])
        spec = msgspec.structs.replace(spec, tied_head=False)
    for adapter in adapters:
        adapter.check(merged)
    for adapter in adapters:
        for key, tensor in adapter.replaced.items():
            if merged[key] is not tensors.get(key, tensors.get(EMBEDDING)):
                fix = "Merge only one of them."
                raise CheckpointError(f"{adapter.folder}: {key}", got="a second replacement", expected="one", fix=fix)
            merged[key] = tensor
    for module in dict.fromkeys(module for adapter in adapters for module in adapter.products):
        base = merged[f"{module}.weight"]
        added = tuple(adapter.products[module] for adapter in adapters if module in adapter.products)
        merged[f"{module}.weight"] = MergedTensor(base.file, base.shape, base, added)
    return merged, spec, adapters


def _changed(adapter: Adapter) -> set[str]:
    """Modules that an adapter changes."""
    return {*adapter.products, *(key.rpartition(".")[0] for key in adapter.replaced)}


def _product(
    file: Path, module: str, parts: Mapping[str, StoredTensor], config: LoraConfig, scale: float, embedding: bool
) -> LowRank:
    missing: Iterable[str] = {"A", "B"} - parts.keys()
    for part in missing:
        raise refuse(f"{file}: {module}.lora_{part}", "no such tensor", "lora_A and lora_B", config.base)
    left, right = (parts["A"], parts["B"]) if embedding else (parts["B"], parts["A"])
    return LowRank(left, right, config.scaling(module) * scale, transposed=embedding)
