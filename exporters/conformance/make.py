"""Makes a conformance kit: graphs, inputs and expected integers, compiled for one chip."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import onnx
from msgspec.structs import replace

from devices import Device, NoProxyError, proxies_for
from devices.report import Prediction
from edgekv.bundle import (
    Bundle,
    GraphRecord,
    PartRecord,
    atomic_directory,
    check_new,
    open_bundle,
    open_compiled,
    record_files,
)
from edgekv.conformance.kit import (
    FORMAT,
    KIT,
    LIMIT_BYTES,
    Kit,
    KitGraph,
    KitManifest,
    KitModel,
    KitPart,
    graph_files,
    is_named,
    open_kit,
    pack,
    pack_binaries,
    seal_kit,
)
from edgekv.conformance.models import GOLDEN_TOKENS, measured_graphs
from edgekv.errors import EngineError, UsageError
from edgekv.machine.child import CallFailedError, ChildEndedError, call
from edgekv.machine.scratch import scratch_folder
from edgekv.machine.system import format_bytes, link_or_copy
from edgekv.plan import Overrides, find_subject, make_plan
from edgekv.qnn.provider import compiler
from edgekv.qnn.vendor_libraries import stated_version
from edgekv.qnn.worker import HtpStep, context_config
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import BinaryChoice, compile_bundle
from exporters.conformance.encoders import KINDS, write_kind
from exporters.conformance.families import FAMILIES, write_family
from exporters.conformance.operations import OPERATIONS, SCORES, cut, order_of, quantized, with_outputs
from exporters.conformance.record import (
    CASES,
    CutJob,
    EncoderJob,
    FamilyJob,
    GoldenJob,
    record_encoder,
    record_family,
    record_golden,
)
from exporters.estimate import estimate_bundle
from exporters.export import export_bundle
from exporters.graphs.parts import build_part, save_part, stored_graph
from exporters.htp.check import run_steps
from exporters.htp.compile import COMPILER_DEFAULTS, with_level
from exporters.inspect.probe import layer_graphs
from exporters.options import ExportOptions, RunOptions, read_recipe
from exporters.preconditions import ENCODER_PRODUCTS, check_encoder_fits
from exporters.progress import Progress, silent

MODELS = Path(__file__).parents[2] / "models"
EMBEDDED, PICTURES = "stdlib-4m", "shapes-360k"
_CONTEXT, _AR = 64, (1, 8)
_CALIBRATION_TOKENS = 1024
_MODEL_CONTEXTS, _MODEL_AR = (256, 1024), (1, 8, 32, 128)
_RECIPES = {"llama": "w4a16-lpbq32"}
_WIDE_CACHES = ("qwen3",)
_PROMPT = "def read(self, path):\n    "
_GRAPHS, _FAMILIES, _VISION = "operation", "family", "vision"

Job = TypeVar("Job")
Reply = TypeVar("Reply")


def make_kit(
    output: Path,
    device: Device,
    *,
    parts: Sequence[str] = (),
    bundle: Path | None = None,
    model: Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Kit:
    """Make a kit. It appears as a whole, or not at all.

    Args:
        output: its folder.
        device: the chip.
        parts: beginnings of the names of parts, such as `family/llama`, `operation` or `decode`; empty for all.
        bundle: one of the user's, to decode and measure too.
        model: the checkpoint to decode with; None for the embedded one.
        force: replace an existing kit.
        progress: called for each part.

    Raises:
        UsageError: the folder exists, no part has such a name, the embedded model is not here, or the chip cannot
            run a part that `parts` names. Others that it cannot run are left out.
        EngineError: the compiler is missing, or refused a graph.
        BundleError: the bundle is damaged, or the kit is larger than 60 MB.
    """
    check_new(output, force=force, marker=KIT)
    chosen = _wanted(parts)
    checkpoint = _checkpoint(model, EMBEDDED) if "decode" in chosen else None
    pictures = MODELS / PICTURES
    if _VISION in chosen and not pictures.is_dir():
        raise _missing(PICTURES)
    left_out = dict[str, str]()
    encoders = [name for name in KINDS if f"{_VISION}/{name}" in chosen]
    if (seen := chosen & {_VISION, *(f"{_VISION}/{name}" for name in encoders)}) and not device.supports_kv("s16"):
        if any(is_named(part, _VISION) for part in parts):
            check_encoder_fits(device)
        chosen -= seen
        encoders.clear()
        left_out |= dict.fromkeys(sorted(seen), f"it needs {ENCODER_PRODUCTS}")
    families = [name for name in FAMILIES if f"{_FAMILIES}/{name}" in chosen or _operations(name, chosen)]
    user = None if bundle is None else _users_bundle(bundle, device, checkpoint)
    with atomic_directory(output, force=force, marker=KIT) as folder, scratch_folder("kit") as scratch:
        made, models, predictions = list[KitPart](), list[KitModel](), list[Prediction]()
        steps = len(families) + len(encoders) + (_VISION in chosen) + (checkpoint is not None) + (user is not None)
        for done, name in enumerate(families):
            progress(f"{_FAMILIES}/{name}", done, steps)
            try:
                made += Family(name, device, folder, scratch / name).parts(chosen)
            except UsageError as error:
                own = {f"{_FAMILIES}/{name}", *(f"{_GRAPHS}/{operation}" for operation in _operations(name, chosen))}
                if error.field != "--device" or own & {*parts}:
                    raise
                left_out |= dict.fromkeys(sorted(own & chosen), f"it needs {error.expected}")
        for done, name in enumerate(encoders, len(families)):
            progress(f"{_VISION}/{name}", done, steps)
            made.append(_random_encoder(name, device, folder, scratch / f"{_VISION}-{name}"))
        if _VISION in chosen:
            progress(_VISION, len(families) + len(encoders), steps)
            made.append(_encoder(device, folder, scratch / _VISION, pictures))
        if checkpoint is not None:
            progress("decode", steps - 1 - (user is not None), steps)
            place = _export_model(checkpoint, device, folder / "model", scratch)
            models.append(_model(checkpoint.name, place, folder))
            predictions += _predictions(checkpoint.name, open_bundle(place), device)
        qairt, made = _qairt(folder), [_packed(part, folder) for part in made]
        for number, entry in enumerate(models):
            file = f"{entry.folder}.binaries.safetensors.xz"
            pack_binaries(folder / entry.folder, folder / file)
            models[number] = replace(entry, binaries=file)
        limit_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if limit_bytes > LIMIT_BYTES:
            fix = "Choose parts with --parts, or another --checkpoint."
            expected = f"at most {format_bytes(LIMIT_BYTES)}"
            raise UsageError("kit", got=format_bytes(limit_bytes), expected=expected, fix=fix)
        if user is not None:
            progress("bundle", steps - 1, steps)
            place = _copy_bundle(user, device, folder / "bundle")
            models.append(_model(user.path.name, place, folder))
            predictions += _predictions(user.path.name, open_bundle(place), device)
        manifest = KitManifest(
            format=FORMAT,
            producer=f"edgekv {metadata.version('edgekv')}",
            soc=device.soc,
            arch=device.arch,
            compiler=compiler(),
            qairt=qairt,
            parts=sorted(made, key=lambda part: (part.kind != "operation", part.kind, part.name)),
            models=models,
            predictions=predictions,
            left_out=left_out,
            files=record_files(folder),
        )
        (folder / KIT).write_bytes(seal_kit(manifest))
        progress("kit", steps, steps)
    return open_kit(output)


def _wanted(parts: Sequence[str]) -> set[str]:
    """The names of the chosen parts."""
    names = [f"{_GRAPHS}/{name}" for name in OPERATIONS] + [f"{_FAMILIES}/{name}" for name in FAMILIES]
    names += [_VISION, *(f"{_VISION}/{name}" for name in KINDS), "decode"]
    chosen = {name for name in names if not parts or any(is_named(name, part) for part in parts)}
    if unknown := [part for part in parts if not any(is_named(name, part) for name in names)]:
        expected = f"a part or a group of {', '.join(names)}"
        raise UsageError("--parts", got=", ".join(unknown), expected=expected, fix="Leave it out for all parts.")
    return chosen


def _operations(family: str, chosen: Collection[str]) -> list[str]:
    return [
        name for name, operation in OPERATIONS.items() if operation.family == family and f"{_GRAPHS}/{name}" in chosen
    ]


def _checkpoint(folder: Path | None, name: str) -> Path:
    checkpoint = folder or MODELS / name
    if not checkpoint.exists():
        raise (
            _missing(name)
            if folder is None
            else UsageError(
                "--checkpoint", got=f"no {folder}", expected="a checkpoint", fix="Leave it out for the embedded model."
            )
        )
    return checkpoint


def _missing(name: str) -> UsageError:
    fix = "Run this command in a clone of edgekv's repository, which has its models, or choose others with --parts."
    return UsageError("conformance make", got=f"no models/{name}", expected="the models of the repository", fix=fix)


def _qairt(folder: Path) -> str:
    """The version of Qualcomm's libraries that wrote the binaries."""
    versions = {stated_version(path) for path in folder.rglob("*.bin")} - {None}
    return ", ".join(sorted(filter(None, versions)))


def _packed(part: KitPart, folder: Path) -> KitPart:
    """The part with compressed files."""

    def packed(graph: KitGraph) -> KitGraph:
        binary, cases = (pack(folder / file).relative_to(folder).as_posix() for file in (graph.binary, graph.cases))
        return replace(graph, binary=binary, cases=cases)

    return replace(part, graph=packed(part.graph), layers=[packed(layer) for layer in part.layers])


@dataclass(frozen=True, slots=True)
class FamilyGraphs:
    """The ONNX graphs of a family's tiny model.

    Attributes:
        bundle: the model.
        models: files by name: `whole`, each layer, and each operation.
        layers: names of the layers, in order.
        cuts: the layer of each operation, by its name.
    """

    bundle: Bundle
    models: Mapping[str, Path]
    layers: Sequence[str]
    cuts: Mapping[str, str]


class Family:
    """The part of a kit for a family, made of a tiny model."""

    def __init__(self, name: str, device: Device, folder: Path, scratch: Path) -> None:
        """Args: folder: of the kit. scratch: for the model."""
        self._name = name
        self._device = device
        self._folder = folder
        self._scratch = scratch
        scratch.mkdir(parents=True)

    def parts(self, chosen: Collection[str]) -> list[KitPart]:
        """Its graph and its operations, as far as they are wanted."""
        graphs = self.graphs(chosen)
        wrappers = self.compiled(graphs)
        orders = {name: order_of(stored_graph(graphs.models[name])) for name in ("whole", *graphs.layers)}
        job = FamilyJob(
            bundle=str(graphs.bundle.path),
            soc=self._device.soc,
            layers={name: str(wrappers[name]) for name in graphs.layers},
            cases={name: str(self._cases(name)) for name in graphs.layers},
            whole=str(wrappers["whole"]),
            whole_cases=str(self._cases("whole")),
            cuts=[
                CutJob(
                    layer=layer,
                    wider=str(_wider(graphs.models[name])),
                    wrapper=str(wrappers[name]),
                    cases=str(self._cases(name)),
                )
                for name, layer in graphs.cuts.items()
            ],
        )
        written = _called(record_family, job)
        entries = {
            name: kit_graph(
                f"{self._name}-{name}",
                wrappers[name],
                self._cases(name),
                orders.get(name, written[str(self._cases(name))]),
                self._folder,
            )
            for name in graphs.models
        }
        parts = [KitPart(name=f"{_GRAPHS}/{name}", kind="operation", graph=entries[name]) for name in graphs.cuts]
        if f"{_FAMILIES}/{self._name}" in chosen:
            layers = [entries[name] for name in graphs.layers]
            whole = KitPart(name=f"{_FAMILIES}/{self._name}", kind="family", graph=entries["whole"], layers=layers)
            return [*parts, whole]
        for name in ("whole", *graphs.layers):
            for file in graph_files(entries[name]):
                (self._folder / file).unlink()
        return parts

    def graphs(self, chosen: Collection[str]) -> FamilyGraphs:
        """Export the model, and write the graphs of its layers and of the wanted operations."""
        bundle = self._export()
        record, prefill = bundle.manifest.graph("score"), bundle.manifest.graph("prefill")
        assert record is not None and prefill is not None, "every export has both"
        folder, layers = self._scratch / "graphs", dict[str, onnx.ModelProto]()
        folder.mkdir()
        for built in layer_graphs(bundle, record, embeds=not bundle.manifest.host_embeds):
            path = folder / f"{built.part.name}.onnx"
            save_part(built.built, path, bundle.path)
            model = onnx.load(path, load_external_data=False)
            model = with_outputs(model, [name for name, _ in quantized(model) if SCORES.fullmatch(name)])
            onnx.save(model, path)
            layers[built.part.name] = model
        cuts = dict[str, str]()
        for name in _operations(self._name, chosen):
            layer = [*layers][OPERATIONS[name].layer]
            small = cut(layers[layer], OPERATIONS[name])
            onnx.save(small, folder / f"{name}.onnx")
            wider = with_outputs(layers[layer], [port.name for port in small.graph.input])
            onnx.save(wider, _wider(folder / f"{name}.onnx"))
            cuts[name] = layer
        models = {"whole": _whole(bundle, prefill, folder)}
        models |= {name: folder / f"{name}.onnx" for name in (*layers, *cuts)}
        return FamilyGraphs(bundle, models, [*layers], cuts)

    def compiled(self, graphs: FamilyGraphs) -> dict[str, Path]:
        """Compile all graphs in one process, each to a binary of its own; the wrappers by name."""
        options = dict(with_level(COMPILER_DEFAULTS).provider_options)
        (self._folder / "graphs").mkdir(parents=True, exist_ok=True)
        wrappers = {name: self._folder / "graphs" / f"{self._name}-{name}.onnx" for name in graphs.models}
        steps = [
            HtpStep(model=str(model), session_config=context_config(wrappers[name]), provider_options=options)
            for name, model in graphs.models.items()
        ]
        run_steps(self._device, steps)
        return wrappers

    def _export(self) -> Bundle:
        checkpoint = Checkpoint.open(str(write_family(self._name, self._scratch / "checkpoint")))
        wide = self._name in _WIDE_CACHES and self._device.supports_kv("s16")
        options = ExportOptions(
            self._device,
            read_recipe(_RECIPES.get(self._name, "w8a16")),
            context=_CONTEXT,
            ar=_AR,
            kv_dtype="s16" if wide else "u8",
            key_layout="rows",
            calibration_tokens=_CALIBRATION_TOKENS,
            check_on_htp=False,
            check_quality=False,
        )
        folder = self._scratch / "bundle"
        export_bundle(checkpoint, folder, options, RunOptions(cache_dir=self._scratch / "cache"))
        return open_bundle(folder, verify=False)

    def _cases(self, name: str) -> Path:
        return self._folder / "graphs" / f"{self._name}-{name}.safetensors"


def _whole(bundle: Bundle, record: GraphRecord, folder: Path) -> Path:
    """A graph as it ships; the parts of one that is divided, as one."""
    if len(record.parts) == 1:
        return bundle.graph_path(record)
    layers, embeds = bundle.manifest.model.layers, not bundle.manifest.host_embeds
    part = PartRecord(name="whole", file="", first_layer=0, stop_layer=layers, embeds=embeds, head=True)
    save_part(build_part(bundle.manifest, record, part), folder / "whole.onnx", bundle.path)
    return folder / "whole.onnx"


def _wider(file: Path) -> Path:
    """The layer that gives an operation's inputs too, beside the operation."""
    return file.with_name(f"{file.stem}.wider.onnx")


def kit_graph(name: str, wrapper: Path, cases: Path, results: list[str], folder: Path) -> KitGraph:
    """The entry of a compiled graph in the kit."""
    binary = wrapper.with_name(f"{wrapper.stem}_qnn.bin")
    names = [path.relative_to(folder).as_posix() for path in (wrapper, binary, cases)]
    return KitGraph(name=name, wrapper=names[0], binary=names[1], cases=names[2], count=CASES, results=results)


def _encoder(device: Device, folder: Path, scratch: Path, checkpoint: Path) -> KitPart:
    """The vision encoder of the repository's model that reads pictures."""
    scratch.mkdir()
    options = ExportOptions(
        device,
        read_recipe("w8a16"),
        context=_CONTEXT * 2,
        ar=_AR,
        calibration_tokens=_CALIBRATION_TOKENS,
        check_on_htp=False,
        check_quality=False,
    )
    bundle = scratch / "bundle"
    export_bundle(Checkpoint.open(str(checkpoint)), bundle, options, RunOptions(cache_dir=scratch / "cache"))
    vision = open_bundle(bundle, verify=False).manifest.vision
    assert vision is not None, "the model reads pictures"
    return _compiled_encoder(_VISION, device, folder, bundle / vision.file)


def _random_encoder(name: str, device: Device, folder: Path, scratch: Path) -> KitPart:
    """The tiny vision encoder of a family."""
    model, inputs = write_kind(name, scratch, CASES)
    return _compiled_encoder(f"{_VISION}/{name}", device, folder, model, inputs)


def _compiled_encoder(part: str, device: Device, folder: Path, model: Path, inputs: Path | None = None) -> KitPart:
    """A part of an encoder, on inputs or noise."""
    graph = part.replace("/", "-")
    (folder / "graphs").mkdir(exist_ok=True)
    wrapper, cases = (folder / "graphs" / f"{graph}.{suffix}" for suffix in ("onnx", "safetensors"))
    level = dict(with_level(COMPILER_DEFAULTS).provider_options)
    run_steps(device, [HtpStep(model=str(model), session_config=context_config(wrapper), provider_options=level)])
    fed = "" if inputs is None else str(inputs)
    job = EncoderJob(soc=device.soc, wrapper=str(wrapper), cases=str(cases), inputs=fed)
    results = _called(record_encoder, job)
    return KitPart(name=part, kind="vision", graph=kit_graph(graph, wrapper, cases, results, folder))


def _export_model(checkpoint: Path, device: Device, target: Path, scratch: Path) -> Path:
    """Export and compile the model that a kit decodes with."""
    opened = Checkpoint.open(str(checkpoint))
    longest = opened.spec.max_positions or _MODEL_CONTEXTS[-1]
    contexts = tuple(context for context in _MODEL_CONTEXTS if context <= longest) or (longest,)
    options = ExportOptions(
        device,
        read_recipe("w4a16-lpbq32" if opened.spec.hidden % 32 == 0 else "w8a16"),
        context=contexts,
        ar=tuple(ar for ar in _MODEL_AR if ar < contexts[0]),
        key_layout="rows",
        check_on_htp=False,
        check_quality=False,
        calibration_tokens=4 * _CALIBRATION_TOKENS,
    )
    run = RunOptions(cache_dir=scratch / "cache")
    export_bundle(opened, target, options, run)
    bundle = open_bundle(target, verify=False)
    compile_bundle(bundle, device, run, choice=BinaryChoice(per_graph=True))
    return target


def _users_bundle(path: Path, device: Device, embedded: Path | None) -> Bundle:
    """Open a bundle of the user's.

    Raises:
        UsageError: it is not compiled for the chip, has other graphs, no decoder, or the name of the kit's own model.
        BundleError: it is damaged.
    """
    bundle = open_bundle(path)
    name = bundle.path.name
    if embedded is not None and name == embedded.name:
        fix = "Rename its folder: reports tell models apart by their names."
        raise UsageError("--bundle", got=f"a folder {name}", expected="another name than the kit's own model", fix=fix)
    if not measured_graphs(bundle.manifest):
        got, fix = "a model that writes no text", "Leave it out, or give a bundle of a decoder."
        raise UsageError("--bundle", got=got, expected="graphs with a cache", fix=fix)
    if bundle.manifest.graph_format != "onnx" or open_compiled(bundle, device.soc, compiler()) is None:
        expected = f"compiled/{device.soc} by {compiler()}"
        fix = f"Compile it: edgekv compile {path} --device {device.soc} --force"
        raise UsageError("--bundle", got="no such binaries", expected=expected, fix=fix)
    return bundle


def _copy_bundle(bundle: Bundle, device: Device, target: Path) -> Path:
    """A bundle of the user's and its binaries for the chip."""
    compiled = bundle.path / "compiled" / device.soc
    for path in sorted(bundle.path.rglob("*")):
        inside = path.relative_to(bundle.path)
        if path.is_file() and (inside.parts[0] != "compiled" or compiled in path.parents):
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, target / inside)
    return target


def _model(name: str, place: Path, folder: Path) -> KitModel:
    """Decode golden tokens with a bundle in the kit."""
    bundle, file = open_bundle(place, verify=False), folder / f"{place.name}.golden.safetensors"
    prompt = bundle.tokenizer().encode(_PROMPT).ids
    room = min(bundle.manifest.contexts) - len(prompt) - 1
    job = GoldenJob(bundle=str(place), prompt=prompt, tokens=min(GOLDEN_TOKENS, room), file=str(file))
    _called(record_golden, job)
    subject = find_subject(place, Overrides())
    weights = subject.weights
    read_bytes = 0 if weights is None else sum(weights.layer_bytes) + weights.head_bytes
    return KitModel(
        name=name,
        folder=place.relative_to(folder).as_posix(),
        golden=file.relative_to(folder).as_posix(),
        weights_bytes=read_bytes,
    )


def _predictions(name: str, bundle: Bundle, device: Device) -> list[Prediction]:
    """What `edgekv plan` and the compiler's simulation expect of a bundle."""
    low, high = make_plan(bundle.path, device).speed.tokens_per_s
    context = bundle.manifest.context
    predictions = [Prediction(source="plan", model=name, ar=1, context=context, low=low, high=high)]
    try:
        proxies_for(device)
    except NoProxyError:
        return predictions
    speeds = dict[tuple[int, int], list[float]]()
    for graph in estimate_bundle(bundle, device).graphs:
        if graph.tokens_per_s is not None and graph.role != "encoder":
            speeds.setdefault((graph.ar, graph.context), []).append(graph.tokens_per_s)
    return predictions + [
        Prediction(source="estimate", model=name, ar=ar, context=context, low=min(tokens_per_s), high=max(tokens_per_s))
        for (ar, context), tokens_per_s in speeds.items()
    ]


def _called(function: Callable[[Job], Reply], job: Job) -> Reply:
    """Run a function in a child process: the emulator may crash."""
    try:
        return call(function, job)
    except (ChildEndedError, CallFailedError) as error:
        got = error.ending if isinstance(error, ChildEndedError) else str(error)
        fix = "Install the tested compiler with `pip install edgekv[htp]`; if it is, please report this."
        raise EngineError("the HTP emulator", got=got, expected="the results of a graph", fix=fix) from None
