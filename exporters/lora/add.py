"""Adds a peft adapter to a bundle with slots."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgekv.bundle import Bundle, LoraAdapter, check_lora_name, new_lora_record, write_lora
from edgekv.errors import CheckpointError
from edgekv.spec import LoraSlots, views
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import Adapter, AdapterChoice
from exporters.lora.base import LoraBase
from exporters.lora.quantize import Base, adapter_views, folded_factors, quantize_adapter
from exporters.lora.sink import adapted_sink

_MERGE = "Merge it for good instead: edgekv export --lora FOLDER"


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of a tensor of the base model."""

    shape: tuple[int, ...]


def add_lora(bundle: Bundle, choice: AdapterChoice, name: str, *, force: bool = False) -> LoraAdapter:
    """Check an adapter against a bundle, quantize it once, and put it into the bundle.

    Args:
        bundle: with slots.
        choice: a folder as peft saves it, and its scale.
        name: under which requests ask for it.
        force: replace an adapter of this name.

    Raises:
        UsageError: a name that is taken or cannot be a folder.
        BundleError: the bundle has no slots, is damaged, or cannot be written.
        CheckpointError: no LoRA adapter of this base model, one that the slots have no room for, or one with NaN.
            Nothing has changed then.
    """
    check_lora_name(name)
    base = LoraBase.open(bundle)
    slots = bundle.manifest.lora
    assert slots is not None, "LoraBase.open checks it"
    adapter = Adapter.open(choice)
    check_fits(adapter, base, slots)
    _check_base(adapter, bundle)
    quantized = quantize_adapter(adapter, base, bundle.manifest)
    arrays = dict(quantized.arrays) | adapted_sink(bundle, base, folded_factors(adapter, base))
    record = new_lora_record(
        bundle,
        name,
        str(choice.folder.resolve()),
        adapter.sha256,
        choice.scale,
        quantized.rank,
        [*quantized.targets],
        [*quantized.clipped],
    )
    return write_lora(bundle, record, arrays, force=force)


def check_fits(adapter: Adapter, base: Base, slots: LoraSlots) -> None:
    """Check an adapter's modules, shapes and ranks against a model and its slots.

    Raises:
        CheckpointError: naming the tensor or module.
    """
    adapter.check({view.key: _Shape(view.stored_shape) for view in views(base.spec) if view.is_stored})
    _check_slots(adapter, base, slots)


def _check_base(adapter: Adapter, bundle: Bundle) -> None:
    """Compare the base model's weights with the bundle's, if the adapter names their hash or has them at hand."""
    base_sha256, named, field = bundle.manifest.source.weights_sha256, adapter.config.base_sha256, "base_weights_sha256"
    base = adapter.config.base
    if not named and base and Path(base).is_dir():
        named, field = Checkpoint.open(base).weights_sha256(), f"base_model_name_or_path: {base}"
    if named and named != base_sha256:
        raise CheckpointError(
            f"{adapter.folder}: {field}",
            got=f"weights with the hash {named}",
            expected=f"{base_sha256}, those of {bundle.manifest.source.checkpoint}",
            fix="Use it with the model that it was trained on.",
        )


def _check_slots(adapter: Adapter, base: Base, slots: LoraSlots) -> None:
    """Refuse what the slots have no room for."""
    if adapter.replaced:
        name = next(iter(adapter.replaced))
        raise CheckpointError(
            f"{adapter.folder}: {name}", got="a tensor that replaces the model's", expected="A and B alone", fix=_MERGE
        )
    modules: dict[str, list[str]] = {}
    for view, target in adapter_views(base):
        modules.setdefault(view.key.removesuffix(".weight"), []).append(target)
    for module in adapter.products:
        _check_module(adapter, module, modules, slots)
    if not adapter.products:
        raise CheckpointError(str(adapter.folder), got="no adapter of any module", expected="one at least", fix=_MERGE)


def _check_module(adapter: Adapter, module: str, modules: Mapping[str, Collection[str]], slots: LoraSlots) -> None:
    targets = modules.get(module, ())
    if missing := [target for target in targets if target not in slots] or ([module] if not targets else []):
        held = ", ".join(slot.target for slot in slots.slots)
        again = f"--lora-targets {','.join([*(slot.target for slot in slots.slots), missing[0]])}"
        fix = f"Export the bundle again with {again}." if targets else _MERGE
        raise CheckpointError(f"{adapter.folder}: {module}", got="no slot for it", expected=f"{held}", fix=fix)
    if (rank := adapter.config.rank_of(module)) > slots.rank:
        raise CheckpointError(
            f"{adapter.folder}: {module}",
            got=f"rank {rank}",
            expected=f"at most {slots.rank}, the rank of the slots",
            fix=f"Export the bundle again with --lora-slots {rank}.",
        )
