"""Exports, compiles and evaluates every combination, each shared piece once."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from devices import NoProxyError, proxies_for
from edgekv.bundle import open_bundle
from edgekv.cli.command import option_words
from edgekv.errors import EdgeKVError, UsageError
from edgekv.machine.json_file import readable_json
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import format_bytes
from edgekv.plan import Estimate, MemoryLimit, Overrides, estimate_speed, find_subject
from edgekv.plan.cache import CHOICES
from edgekv.plan.fit import demand
from exporters.inspect.tally import Evaluation
from exporters.options import Cluster, ExportOptions
from exporters.pipeline.dask.run import run_on
from exporters.pipeline.piece import Plan
from exporters.pipeline.place import Identity, Place, open_checkpoint
from exporters.pipeline.planning import Planner, quantizing_bytes
from exporters.pipeline.prune import check_prunable, mark_used, prune
from exporters.pipeline.quality import Quality, ReferencePiece, Text
from exporters.pipeline.store import PieceStore
from exporters.pipeline.write import ExportResult, assemble
from exporters.plan import ExportPlan
from exporters.progress import Progress, silent
from exporters.resources import bundle_bytes, engine_bytes
from exporters.sweep.combination import Combination, Refusal, sort_out
from exporters.sweep.options import SweepOptions
from exporters.sweep.quality import EvaluatePiece
from exporters.sweep.result import Result, SweepReport, recommend, with_front

RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Member:
    """A combination and the names of its pieces.

    Attributes:
        combination: what it is.
        exported: those of its bundle.
        evaluate: the evaluation.
    """

    combination: Combination
    exported: ExportResult
    evaluate: str

    @property
    def names(self) -> list[str]:
        """All last pieces."""
        return [*self.exported.names, self.evaluate]


def run_sweep(
    checkpoint: str,
    combinations: Sequence[Combination],
    text: Text,
    folder: Path,
    template: ExportOptions,
    options: SweepOptions,
    cluster: Cluster,
    progress: Progress = silent,
) -> SweepReport:
    """Do a sweep, and write its results and bundles.

    Args:
        checkpoint: a path or fsspec URL that all workers see, or a hub id.
        combinations: in any order.
        text: on which quality is measured.
        folder: of results and bundles.
        template: options of all exports, for what is not combined.
        options: where pieces are kept, and what is recommended.
        cluster: where pieces are done.
        progress: called for each kind of piece.

    Raises:
        UsageError: combinations cannot be, or workers do not fit, and `keep_going` is not given.
        ServiceError: the scheduler cannot be reached, or vanished.
        EdgeKVError: a piece failed.
    """
    start = time.monotonic()
    opened = open_checkpoint(checkpoint)
    possible, refused = sort_out(combinations, opened, template)
    for refusal in refused:
        cluster.say(f"refused: {refusal.name}: {refusal.reason}")
    if refused and not (cluster.keep_going and possible):
        raise UsageError(
            "combinations",
            got=f"{len(refused)} of {len(possible) + len(refused)} that cannot be: "
            + ", ".join(left_out.name for left_out in refused),
            expected="combinations that can be exported",
            fix="Leave them out, or go on with the others with --keep-going.",
        )
    store = PieceStore(options.store or str((folder / "pieces").absolute()))
    store.check()
    if options.prune_days is not None:
        check_prunable(store)
    identity, place = Identity.of(opened), Place.of(opened)
    planner = Planner(identity, swept=text)
    plan = planner.plan
    members = [_add(planner, combination, export, text) for combination, export in possible]
    targets = [name for member in members for name in member.names]
    before = len(plan.unfinished(store, targets))
    disk_bytes = 2 * max(_bundle_bytes(export) for _, export in possible)
    failed = run_on(cluster, plan, targets, store, place, identity, progress, disk_bytes=disk_bytes)
    results, lost = list[Result](), list[Refusal]()
    for member in members:
        ancestors = plan.ancestors(member.names)
        wrong = [failed[name] for name in plan.pieces if name in ancestors and name in failed]  # the cause first
        if wrong:
            lost.append(Refusal(name=member.combination.name, reason=f"{wrong[0].kind}: {wrong[0].error}"))
            continue
        try:
            result = _finished(member, plan, store, folder, checkpoint, template)
            if options.estimate:
                result = msgspec.structs.replace(result, simulated=_simulated(result, member, progress))
            results.append(result)
        except EdgeKVError as error:
            if not cluster.keep_going:
                raise
            lost.append(Refusal(name=member.combination.name, reason=str(error)))
    report = SweepReport(
        checkpoint=checkpoint,
        text=text.title,
        budget_bytes=options.budget_bytes,
        pieces=len(plan.pieces),
        separate_pieces=sum(len(plan.ancestors(member.names)) for member in members),
        done=before - len(failed),
        seconds=round(time.monotonic() - start, 1),
        results=with_front(results),
        refused=refused,
        failed=lost,
        recommended=recommend(results, options.budget_bytes),
    )
    with atomic_file(folder / RESULTS) as partial:
        partial.write_bytes(readable_json(report, indent=2))
    mark_used(store, {*plan.pieces, *plan.sources})
    if options.prune_days is not None:
        pruned = prune(store, options.prune_days)
        cluster.say(f"removed {pruned.pieces} pieces, {format_bytes(pruned.bytes)}")
    return report


def _add(planner: Planner, combination: Combination, export: ExportPlan, text: Text) -> Member:
    """The pieces of one more combination."""
    exported, plan = planner.export(export), planner.plan
    spec, context = export.checkpoint.spec, export.options.contexts[-1]
    measured = planner.measured(export, exported.decoder, text)
    logits_bytes = 4 * min(context, text.tokens) * spec.vocab
    reference = plan.put(ReferencePiece((measured,)), quantizing_bytes(export) + 2 * logits_bytes)
    ram_bytes = engine_bytes(_bundle_bytes(export)) + 4 * logits_bytes
    return Member(combination, exported, plan.put(EvaluatePiece(measured, exported.write, reference), ram_bytes))


def _finished(
    member: Member, plan: Plan, store: PieceStore, folder: Path, checkpoint: str, template: ExportOptions
) -> Result:
    """Put the bundle of a combination in place, and say what is known of it."""
    combination, quality = member.combination, member.exported.quality
    assert quality is not None, "a sweep measures layers"
    bundle = folder / "bundles" / combination.name
    allow_float = template.allow_float
    manifest = assemble(member.exported, combination.device, store, bundle, force=True, allow_float=allow_float)
    if combination.rotation is not None:
        recipes = folder / "recipes"
        recipes.mkdir(parents=True, exist_ok=True)
        combination.recipe.write(recipes / f"{combination.recipe.name}.json")
    subject = find_subject(bundle, Overrides())
    assert subject.decoder is not None and subject.weights is not None, "a bundle says both"
    speed = estimate_speed(subject, subject.decoder, subject.weights, combination.device)
    seconds = sum(store.seconds(name) for name in plan.ancestors(member.exported.names))
    measured = store.answer(quality, Quality)
    return Result(
        name=combination.name,
        recipe=combination.recipe_name,
        rotation=combination.rotation,
        kv=combination.kv,
        device=combination.device.soc,
        contexts=list(combination.contexts),
        splits=combination.splits,
        bundle=str(bundle),
        bytes=sum(file.bytes for file in manifest.files.values()),
        ram_bytes=demand(subject, CHOICES[0], MemoryLimit.of_htp()).used_bytes,
        tokens_per_s=speed.tokens_per_s,
        roofline_tokens_per_s=speed.static_roofline_tokens_per_s,
        export_seconds=round(seconds, 3),
        evaluation=store.answer(member.evaluate, Evaluation),
        layers=list(measured.layers),
        quality=measured.records,
        command=_command(member, checkpoint, bundle, template),
    )


def _simulated(result: Result, member: Member, progress: Progress) -> Estimate | None:
    """The simulated speed of a finished bundle; None if no simulated chip stands for its own."""
    from exporters.estimate import estimate_bundle  # takes a while to import

    device = member.combination.device
    try:
        proxies_for(device)
    except NoProxyError:
        return None
    return estimate_bundle(open_bundle(Path(result.bundle), verify=False), device, progress=progress)


def _command(member: Member, checkpoint: str, bundle: Path, template: ExportOptions) -> str:
    """Reproduces a bundle; a recipe with another rotation is a file beside the bundles."""
    combination = member.combination
    recipe = combination.recipe_name
    if combination.rotation is not None:
        recipe = str(bundle.parent.parent / "recipes" / f"{combination.recipe.name}.json")
    options = option_words(combination.options(template), device=combination.device.soc, recipe=recipe)
    return shlex.join(["edgekv", "export", checkpoint, "-o", combination.name, *options])


def _bundle_bytes(export: ExportPlan) -> int:
    return bundle_bytes(export.checkpoint.spec, export.options.recipe, len(export.graphs))
