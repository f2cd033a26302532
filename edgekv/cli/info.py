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

    found = describe_bundle(open_bundle(bundle))
    if output.as_json:
        print_json(found)
        return
    click.echo(bundle)
    for name, text in _lines(found):
        click.echo(f"  {name:<14} {text}")


def _lines(found: BundleInfo) -> Iterator[tuple[str, str]]:
    sizes = found.sizes
    yield "model", f"{found.model_type}, {found.parameters / 1e6:.1f} M parameters, from {found.source}"
    for folder in found.merged:
        yield "", f"merged with the adapter {folder}"
    yield (
        "sizes",
        f"{sizes['layers']} layers of width {sizes['hidden']}, {sizes['heads']} heads and {sizes['kv_heads']} kv heads "
        f"of {sizes['head_dim']}, {sizes['vocab']:,} tokens, trained on contexts up to {sizes['max_positions']:,}",
    )
    if found.windows:
        yield "windows", ", ".join(f"{layers} layers {window:,} tokens" for window, layers in found.windows.items())
    if found.states:
        yield "states", ", ".join(found.states)
    if found.pictures is not None:
        yield "pictures", found.pictures
    if found.reads is not None:
        yield "drafter", found.reads
    yield "recipe", f"{found.recipe}: {', '.join(f'{count} matrices {kind}' for kind, count in found.matrices.items())}"
    yield "calibration", f"{found.calibration_tokens:,} tokens of {found.calibration} text"
    yield "KV cache", f"{found.kv_dtype}, keys in {found.key_layout}"
    yield "context", ", ".join(f"{each:,}" for each in found.contexts)
    yield "AR", ", ".join(map(str, found.ar))
    yield "verify", ", ".join(map(str, found.verify)) or "none"
    parts = max(each.parts for each in found.graphs)
    split = f", in up to {parts} parts" if parts > 1 else ""
    yield "graphs", f"{found.graph_format}: {', '.join(each.name for each in found.graphs)}{split}"
    yield "chat template", ", ".join(found.chat_templates) or "none"
    yield "sampling", _sampling(found.sampling)
    sink = " ".join(map(repr, found.sink))
    yield "sink", f"{sink}, restored, not computed" if found.sink else "none"
    yield (
        "adapter slots",
        "none" if found.lora_rank is None else f"rank {found.lora_rank}, {', '.join(found.lora_targets)}",
    )
    yield "adapters", ", ".join(_adapter_text(each) for each in found.adapters) or "none"
    chips = (
        f"{each.soc} (V{each.htp}, {each.binaries} binaries, {each.bytes / 1e6:.1f} MB, {each.compiler})"
        for each in found.compiled
    )
    yield "compiled for", ", ".join(chips) or "none"
    verdict = {
        "integers-only": f"every graph compiles for {found.device}, integers only",
        "float-allowed": f"compiles for {found.device}; {found.floating_nodes} nodes compute in float",
        "not-run": f"not checked on the HTP compiler for {found.device}",
    }
    yield "checks", f"seal and {found.files_verified} files as written; {verdict[found.htp_check]}"
    yield from zip(("quality", ""), map(str, found.quality or ["not measured at export"]), strict=False)
    parted = ", ".join(f"{part} {size / 1e6:.2f}" for part, size in found.bytes.items())
    yield "MB", f"{sum(found.bytes.values()) / 1e6:.2f}: {parted}"
    yield "written by", f"{found.producer}, format {found.format}"


def _sampling(record: GenerationRecord | None) -> str:
    """What differs from the defaults."""
    if record is None:
        return "no defaults of the checkpoint"
    given, unset = (msgspec.structs.asdict(each) for each in (record, type(record)()))
    listed = ", ".join(f"{name} {value}" for name, value in given.items() if name != "ignored" and value != unset[name])
    return listed or "greedy"


def _adapter_text(adapter: AdapterInfo) -> str:
    if adapter.damage is not None:
        return f"{adapter.name} (cannot be used: {adapter.damage})"
    return f"{adapter.name} (rank {adapter.rank}, {', '.join(adapter.targets)})"
