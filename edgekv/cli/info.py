"""`edgekv info`: what a bundle is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json

if TYPE_CHECKING:
    from edgekv.bundle import GenerationRecord
    from edgekv.cli.bundle_info import AdapterInfo, BundleInfo


@command
def info(bundle: BundleArgument, output: Output) -> None:
    """Its files are verified first; a damaged bundle, or one of another format version, is refused."""
    from edgekv.bundle import open_bundle  # slow to import, and --help does not need it
    from edgekv.cli.bundle_info import describe_bundle

    description = describe_bundle(open_bundle(bundle))
    if output.as_json:
        print_json(description)
        return
    click.echo(bundle)
    for name, text in _lines(description):
        click.echo(f"  {name:<14} {text}")


def _lines(bundle: BundleInfo) -> Iterator[tuple[str, str]]:
    sizes = bundle.sizes
    yield "model", f"{bundle.model_type}, {bundle.parameters / 1e6:.1f} M parameters, from {bundle.source}"
    for folder in bundle.merged:
        yield "", f"merged with the adapter {folder}"
    yield (
        "sizes",
        f"{sizes['layers']} layers of width {sizes['hidden']}, {sizes['heads']} heads and {sizes['kv_heads']} kv heads "
        f"of {sizes['head_dim']}, {sizes['vocab']:,} tokens, trained on contexts up to {sizes['max_positions']:,}",
    )
    if bundle.windows:
        yield "windows", ", ".join(f"{layers} layers {window:,} tokens" for window, layers in bundle.windows.items())
    if bundle.states:
        yield "states", ", ".join(bundle.states)
    if bundle.pictures is not None:
        yield "pictures", bundle.pictures
    if bundle.task is not None:
        yield "gives", bundle.task
    if bundle.reads is not None:
        yield "drafter", bundle.reads
    yield (
        "recipe",
        f"{bundle.recipe}: {', '.join(f'{count} matrices {kind}' for kind, count in bundle.matrices.items())}",
    )
    yield "calibration", f"{bundle.calibration_tokens:,} tokens of {bundle.calibration} text"
    contexts = ", ".join(f"{context:,}" for context in bundle.contexts)
    if bundle.is_cached:
        yield "KV cache", f"{bundle.kv_dtype}, keys in {bundle.key_layout}"
        yield "context", contexts
        yield "AR", ", ".join(map(str, bundle.ar))
        yield "verify", ", ".join(map(str, bundle.verify)) or "none"
    else:
        yield "KV cache", f"none: tokens attend to both sides, to keys and values in {bundle.kv_dtype}"
        yield "whole texts", f"of up to {contexts} tokens together"
    parts = max(graph.parts for graph in bundle.graphs)
    split = f", in up to {parts} parts" if parts > 1 else ""
    yield "graphs", f"{bundle.graph_format}: {', '.join(graph.name for graph in bundle.graphs)}{split}"
    yield "chat template", ", ".join(bundle.chat_templates) or "none"
    yield "sampling", _sampling(bundle.sampling)
    sink = " ".join(map(repr, bundle.sink))
    yield "sink", f"{sink}, restored, not computed" if bundle.sink else "none"
    yield (
        "adapter slots",
        "none" if bundle.lora_rank is None else f"rank {bundle.lora_rank}, {', '.join(bundle.lora_targets)}",
    )
    yield "adapters", ", ".join(_adapter_text(adapter) for adapter in bundle.adapters) or "none"
    chips = (
        f"{chip.soc} (V{chip.htp}, {chip.binaries} binaries, {chip.bytes / 1e6:.1f} MB, {chip.compiler})"
        for chip in bundle.compiled
    )
    yield "compiled for", ", ".join(chips) or "none"
    verdict = {
        "integers-only": f"every graph compiles for {bundle.device}, integers only",
        "float-allowed": f"compiles for {bundle.device}; {bundle.floating_nodes} nodes compute in float",
        "not-run": f"not checked on the HTP compiler for {bundle.device}",
    }
    yield "checks", f"seal and {bundle.files_verified} files as written; {verdict[bundle.htp_check]}"
    measured = [str(record) for record in (*bundle.quality, bundle.task_quality) if record is not None]
    yield from zip(("quality", ""), measured or ["not measured at export"], strict=False)
    parted = ", ".join(f"{part} {size / 1e6:.2f}" for part, size in bundle.bytes.items())
    yield "MB", f"{sum(bundle.bytes.values()) / 1e6:.2f}: {parted}"
    yield "written by", f"{bundle.producer}, format {bundle.format}"


def _sampling(record: GenerationRecord | None) -> str:
    """What differs from the defaults."""
    if record is None:
        return "no defaults of the checkpoint"
    chosen, unset = (msgspec.structs.asdict(values) for values in (record, type(record)()))
    listed = ", ".join(
        f"{name} {value}" for name, value in chosen.items() if name != "ignored" and value != unset[name]
    )
    return listed or "greedy"


def _adapter_text(adapter: AdapterInfo) -> str:
    if adapter.damage is not None:
        return f"{adapter.name} (cannot be used: {adapter.damage})"
    return f"{adapter.name} (rank {adapter.rank}, {', '.join(adapter.targets)})"
