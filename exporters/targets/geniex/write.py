"""Writing the folder that GenieX loads: what Genie has proven, with heads stacked and described in `metadata.json`."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from edgekv.bundle import Bundle, atomic_directory
from edgekv.errors import BundleError
from edgekv.machine.json_file import readable_json
from edgekv.machine.scratch import scratch_folder
from edgekv.spec.chat import read_bundle_templates
from exporters.progress import Progress, silent
from exporters.targets.capabilities import GENIEX
from exporters.targets.genie.config import CONFIG, EXTENSIONS, SHARED_CONFIG
from exporters.targets.genie.folder import GenieManifest
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.ports import GeniePorts
from exporters.targets.genie.write import write_genie
from exporters.targets.geniex.loader import LoadedSpec, read_as_geniex
from exporters.targets.geniex.metadata import FAMILY, METADATA, Metadata, graph_specs
from exporters.targets.record import TargetRecord, write_record

GENIEX_MANIFEST = "geniex_bundle.json"
_TOKENIZER, _TEMPLATE = "tokenizer.json", "tokenizer_config.json"


class GeniexManifest(TargetRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`geniex_bundle.json`. `checked` says whether Genie ran the same graphs and chose edgekv's tokens.

    Attributes:
        arch: HTP version of the chip.
        compiler: the package that compiled the binaries, with its version.
        read: what GenieX takes the folder for.
    """

    arch: int
    compiler: str
    read: LoadedSpec


def write_geniex(
    bundle: Bundle, target: Path, options: GenieOptions, *, force: bool = False, progress: Progress = silent
) -> GeniexManifest:
    """Write the folder, and read it by the rules of GenieX's loader.

    Args:
        bundle: with its first token in the graphs.
        target: the folder; it appears complete or not at all.
        options: as for Genie's folder; `check` runs the same graphs in Genie.
        force: replace a folder that was written before.
        progress: called for each stage.

    Raises:
        UsageError: the target exists, or an option does not fit the bundle.
        BundleError: GenieX cannot express something of the bundle.
        EngineError: the compiler or Genie is missing, failed, or chose other tokens.
    """
    GENIEX.check(bundle)
    chosen = _two_graphs(bundle)
    with (
        atomic_directory(target, force=force, marker=GENIEX_MANIFEST) as folder,
        scratch_folder("geniex") as scratch,
    ):
        written = write_genie(chosen, scratch / "genie", replace(options, stacked=True), progress=progress)
        source = scratch / "genie"
        config = SHARED_CONFIG if written.shared else CONFIG
        shutil.copyfile(source / config, folder / CONFIG)
        for name in (*(written.shared or dict.fromkeys(g.file for g in written.graphs)), EXTENSIONS, _TOKENIZER):
            shutil.move(source / name, folder / name)
        if (templates := read_bundle_templates(bundle.path)) is not None and "default" in templates.templates:
            content = templates.tokens | {"chat_template": templates.templates["default"]}
            (folder / _TEMPLATE).write_bytes(readable_json(content))
        (folder / METADATA).write_bytes(readable_json(_metadata(chosen, target.name, written)))
        loaded = read_as_geniex(folder)
        _check(chosen, loaded)
        return write_record(
            GeniexManifest,
            folder,
            GENIEX_MANIFEST,
            bundle,
            soc=written.soc,
            checked=written.checked,
            floating=written.floating_nodes,
            arch=written.arch,
            compiler=written.compiler,
            read=loaded,
        )


def _two_graphs(bundle: Bundle) -> Bundle:
    """The bundle with its decode graphs and its largest prefill graphs alone: GenieX runs two AR."""
    manifest = bundle.manifest
    largest = max(graph.ar for graph in manifest.graphs if graph.role == "prefill")
    kept = [each for each in manifest.graphs if each.role == "decode" or (each.role, each.ar) == ("prefill", largest)]
    scored = [each for each in manifest.graphs if each.role == "score"]
    return replace(bundle, manifest=structs.replace(manifest, graphs=[*kept, *scored]))


def _metadata(bundle: Bundle, name: str, written: GenieManifest) -> Metadata:
    manifest = bundle.manifest
    records = {(each.ar, each.context): each for each in manifest.graphs if each.role != "score"}
    ports = {}
    for graph in written.graphs:
        record = records[graph.ar, graph.context]
        ports[graph.name] = GeniePorts.of(manifest, record, record.parts[graph.part - 1]).stacked()
    return Metadata(
        model_id=FAMILY + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").removesuffix("_ssd"),
        precision=manifest.recipe.name,
        tool_versions={"edgekv": written.producer.split()[-1], "compiler": written.compiler},
        model_files=graph_specs(ports),
    )


def _check(bundle: Bundle, loaded: LoadedSpec) -> None:
    """Compare what GenieX reads with the bundle."""
    model, parts = bundle.manifest.model, bundle.manifest.graphs[0].parts
    wanted = (model.layers, model.kv_heads, model.head_dim, model.vocab, tuple(tuple(part.layers) for part in parts))
    found = (loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.vocab, loaded.layers_of)
    if found != wanted:
        raise BundleError("what GenieX reads", got=found, expected=wanted, fix="Please report this model.")
