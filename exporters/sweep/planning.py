"""From combinations to pieces: what each needs, and the key that says when two need the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgekv import qnn
from edgekv.plan import compile_bytes, layer_graph_bytes, quantization_bytes, writing_bytes
from edgekv.spec import DecoderSpec
from edgekv.spec.tensors import HEAD
from exporters.graphs.split import layer_bytes
from exporters.htp.compile import binary_sets, device_parts
from exporters.options import ExportOptions
from exporters.prepared import Prepared
from exporters.quantize.matrices import GROUPS, follows, names
from exporters.quantize.stages import program_sha256, stage_keys
from exporters.resources import bundle_bytes
from exporters.sweep.combination import Combination, Common
from exporters.sweep.division import JoinWork, MatrixWork, RunWork
from exporters.sweep.piece import Piece, Plan, Work, hashed
from exporters.sweep.quality import ENGINE, ErrorWork, EvaluateWork, ReferenceWork, Sample
from exporters.sweep.source import CHAT, SETTINGS, TOKENS, WEIGHTS, Pinned, Source, prepared_for
from exporters.sweep.work import CheckWork, CompileWork, LayerWork, SurveyWork, WriteWork
from quant import WEIGHT_TYPES, WeightType

_PROCESS_BYTES = 300_000_000
_ENGINE_COPIES = 4  # of a bundle's bytes, at the peak of loading it on the CPU


@dataclass(frozen=True, slots=True)
class Exported:
    """The keys of a bundle's pieces.

    Attributes:
        survey: of the survey.
        write: of the written bundle.
        checks: of the float checks, by file.
        binaries: of the compiled binaries, in order.
    """

    survey: str
    write: str
    checks: Mapping[str, str]
    binaries: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        """The last pieces of the bundle."""
        return [self.write, *self.checks.values(), *self.binaries]


@dataclass(frozen=True, slots=True)
class Member:
    """A combination and the keys of its pieces.

    Attributes:
        combination: what it is.
        exported: those of its bundle.
        evaluate: of the evaluation.
        error: of the error by layer.
    """

    combination: Combination
    exported: Exported
    evaluate: str
    error: str

    @property
    def all(self) -> list[str]:
        """All last pieces."""
        return [*self.exported.keys, self.evaluate, self.error]


class Planner:
    """Collects pieces, each once.

    Args:
        checkpoint: a path that all workers see, or a hub id.
        divide: make the matrices of a layer pieces of their own.

    Attributes:
        checkpoint: what all workers must find.
    """

    def __init__(self, checkpoint: str, *, divide: bool = False) -> None:
        self._divide = divide
        self.checkpoint = pinned = Pinned.of(checkpoint)
        place = str(Path(checkpoint).resolve()) if Path(checkpoint).exists() else checkpoint  # as the manifest has it
        self._base = (program_sha256(), pinned[WEIGHTS], pinned[SETTINGS], pinned[TOKENS], place)
        self._pieces: dict[str, Piece] = {}

    @property
    def plan(self) -> Plan:
        """What was collected."""
        return Plan(self._pieces)

    def export(self, options: ExportOptions) -> Exported:
        """The pieces of an export."""
        prepared, source = self._source(options)
        decided = hashed(
            source.survey,
            repr(options.sink),
            options.recipe.heads,
            options.recipe.heads != "none" and options.kv_dtype,
        )
        write = self._write(source, prepared, self._layers(source, prepared, decided))
        checks, binaries = self._compiled(prepared, write, options)
        return Exported(source.survey, write, checks, binaries)

    def add(self, combination: Combination, common: Common, sample: Sample, error_sample: Sample) -> Member:
        """The pieces of one more combination, whose quality is measured on two samples."""
        options = combination.options(common)
        exported = self.export(options)
        prepared, source = self._source(options)
        return Member(combination, exported, *self._quality(source, prepared, exported.write, sample, error_sample))

    def _source(self, options: ExportOptions) -> tuple[Prepared, Source]:
        """What devices share: neither check nor compiler."""
        shared = replace(options, check_on_htp=False, compile=False)
        prepared = prepared_for(self.checkpoint.name, shared)
        return prepared, Source(self.checkpoint, shared, self._survey(prepared))

    def _survey(self, prepared: Prepared) -> str:
        spec, context = prepared.checkpoint.spec, prepared.options.contexts[-1]
        windows = prepared.survey_windows
        content = (
            "survey",
            self._base,
            prepared.surveyed_first,
            None if windows is None else (windows.shape, hashed(windows.tobytes().hex())),
            [rope.rotation(context).inverse_frequencies.tolist() for rope in spec.ropes],
            [spec.window(layer) for layer in range(spec.layers)],
            [(each.channel, each.parts) for each in spec.split],
        )
        work = SurveyWork(Source(self.checkpoint, prepared.options, hashed(content)))
        return self._put("survey", content, (), _quantizing_bytes(prepared), work)

    def _layers(self, source: Source, prepared: Prepared, decided: str) -> tuple[str, ...]:
        context, found, ram_bytes = prepared.options.contexts[-1], list[str](), _quantizing_bytes(prepared)
        tokens = prepared.survey_tokens
        keys = stage_keys(prepared.checkpoint, self.checkpoint[WEIGHTS], tokens, context, prepared.recipe)
        residual = None
        for layer, key in enumerate(keys):
            if self._divide and layer < prepared.checkpoint.spec.layers:
                made, residual = self._divided(
                    source, prepared.checkpoint.spec, (key, decided), layer, residual, ram_bytes
                )
                found.append(made)
                continue
            before = found[-1] if found else None
            needs = (source.survey,) if before is None else (source.survey, before)
            work = LayerWork(source, layer, before)
            found.append(self._put("layer", ("layer", key, decided), needs, ram_bytes, work))
        return tuple(found)

    def _divided(
        self,
        source: Source,
        spec: DecoderSpec,
        keys: tuple[str, str],
        layer: int,
        residual: str | None,
        ram_bytes: int,
    ) -> tuple[str, str]:
        """The pieces of a layer whose matrices are pieces; returns its key, and that of the residual after it."""
        waits = follows(source.options.recipe)
        runs, matrices, used = list[str](), list[tuple[str, str]](), tuple[tuple[str, str | None], ...]()
        for group in range(GROUPS + 1):
            before = runs[-1] if runs else None
            kept = {0: residual, 2: residual, 4: runs[2] if group == 4 else None}.get(group)
            work = RunWork(source, layer, group, kept, before, used)
            needs = [source.survey, *filter(None, (kept, before)), *(key for _, key in used if key)]
            runs.append(self._put("run", ("run", keys, group), needs, ram_bytes, work))
            if group == GROUPS:
                break
            made = []
            for name in names(spec, layer, group):
                matrix = MatrixWork(source, name, runs[-1])
                made.append((name, self._put("matrix", ("matrix", keys, name), (runs[-1],), ram_bytes, matrix)))
            matrices += made
            used = tuple((name, key if waits else None) for name, key in made)
        needs = [*runs, *(key for _, key in matrices)]
        join = JoinWork(tuple(runs), tuple(matrices))
        whole = self._put("layer", ("layer", *keys), needs, ram_bytes, join)
        return whole, whole if waits else runs[-1]

    def _write(self, source: Source, prepared: Prepared, layers: tuple[str, ...]) -> str:
        options = prepared.options
        content = (
            "write",
            self._base,
            self.checkpoint[CHAT],
            layers[-1],
            options.kv_dtype,
            options.key_layout,
            options.recipe,
            prepared.recipe,
            prepared.calibration.name,
            [(graph.name, graph.role, [part.name for part in graph.parts]) for graph in prepared.graphs],
            repr(prepared.split),
            repr(options.lora),
        )
        ram_bytes = writing_bytes(prepared.checkpoint.spec.sizes)
        return self._put("write", content, (source.survey, *layers), ram_bytes, WriteWork(source, layers))

    def _quality(
        self, source: Source, prepared: Prepared, write: str, sample: Sample, errors: Sample
    ) -> tuple[str, str]:
        spec, context = prepared.checkpoint.spec, prepared.options.contexts[-1]
        heads = prepared.options.recipe.heads != "none"  # it changes the windows of the survey, so perhaps the sink
        logits_bytes = 4 * min(context, sample.tokens) * spec.vocab
        reference = self._put(
            "reference",
            ("reference", source.survey, context, sample.key, sample.tokens, heads),
            (source.survey, sample.key),
            _quantizing_bytes(prepared) + 2 * logits_bytes,
            ReferenceWork(source, sample),
        )
        engine_bytes = _PROCESS_BYTES + _ENGINE_COPIES * _bundle_bytes(prepared)
        evaluate = self._put(
            "evaluate",
            ("evaluate", write, reference, ENGINE),
            (source.survey, sample.key, write, reference),
            engine_bytes + 4 * logits_bytes,
            EvaluateWork(source, sample, write, reference),
        )
        error = self._put(
            "error",
            ("error", write, errors.key, errors.tokens, ENGINE),
            (source.survey, errors.key, write),
            engine_bytes + _quantizing_bytes(prepared),
            ErrorWork(source, errors, write),
        )
        return evaluate, error

    def _compiled(
        self, prepared: Prepared, write: str, options: ExportOptions
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        if not options.check_on_htp:
            return {}, ()
        soc, compiler = options.device.soc, qnn.compiler()
        checked = dict.fromkeys(part.file for graph in prepared.graphs for part in graph.parts)
        binaries = list[str]()
        if options.compile:
            whole = all(graph.is_whole for graph in prepared.graphs)
            for models in binary_sets(device_parts(prepared.graphs, Path()), each=whole):
                files = tuple((name, path.name) for name, path in models.items())
                for _, file in files:
                    checked.pop(file, None)
                ram_bytes = _compiler_bytes(prepared, len(files))
                work = CompileWork(write, files, soc)
                content = ("compile", write, files, soc, compiler)
                binaries.append(self._put("compile", content, (write,), ram_bytes, work))
        checks = {}
        for file in checked:
            check = CheckWork(write, file, soc)
            ram_bytes = _compiler_bytes(prepared, 1)
            checks[file] = self._put("check", ("check", write, file, soc, compiler), (write,), ram_bytes, check)
        return checks, tuple(binaries)

    def _put(self, kind: str, content: object, needs: Sequence[str], ram_bytes: int, work: Work) -> str:
        key = hashed(content)
        if key not in self._pieces:
            known = tuple(need for need in needs if need in self._pieces)  # the text is there before all work
            self._pieces[key] = Piece(kind, key, known, ram_bytes, work)
        return key


def _quantizing_bytes(prepared: Prepared) -> int:
    spec = prepared.checkpoint.spec
    tokens = prepared.survey_tokens
    return quantization_bytes(spec.sizes, 2 * spec.layers * spec.kv_heads, tokens.size, tokens.shape[1])


def _bundle_bytes(prepared: Prepared) -> int:
    return bundle_bytes(prepared.checkpoint.spec, prepared.options.recipe, len(prepared.graphs))


def _compiler_bytes(prepared: Prepared, graphs: int) -> int:
    """Of the compiler, for the largest part."""
    spec, recipe, split = prepared.checkpoint.spec, prepared.options.recipe, prepared.split
    layers = layer_bytes(spec, recipe, WeightType.matrix_bytes)
    packed = layer_bytes(spec, recipe, WeightType.packed_bytes)
    head = WEIGHT_TYPES[recipe.rule(HEAD).dtype].matrix_bytes(spec.hidden, spec.vocab)
    needs = [compile_bytes(head, 0, 1)]
    for part in split.layers:
        weights = sum(layers[layer] for layer in part)
        if part.start == 0 and split.embeds:
            weights += WEIGHT_TYPES["int8"].matrix_bytes(spec.hidden, spec.vocab)
        if part.stop == spec.layers and not split.own_head:
            weights += head
        each_bytes, packed_bytes = len(part) * layer_graph_bytes(spec.sizes), sum(packed[layer] for layer in part)
        needs.append(compile_bytes(weights, each_bytes, graphs, packed_bytes=packed_bytes))
    return max(needs)
