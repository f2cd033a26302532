"""Exports, compiles and evaluates every combination, each shared piece once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from edgekv.bundle import atomic_file, readable_json
from edgekv.errors import EdgeKVError, UsageError
from edgekv.system import format_bytes
from exporters.resources import bundle_bytes
from exporters.sweep.bundles import assemble, measure
from exporters.sweep.carry import Where, carry_out, fitness_for
from exporters.sweep.combination import Combination, Common, Refusal, sort_out
from exporters.sweep.piece import hashed
from exporters.sweep.planning import Member, Planner
from exporters.sweep.prune import check_prunable, mark_used, prune
from exporters.sweep.quality import TEXT, Sample
from exporters.sweep.result import Result, SweepReport, recommend, with_front
from exporters.sweep.run import Failure, unfinished
from exporters.sweep.source import prepared_for
from exporters.sweep.store import PieceStore

RESULTS = "results.json"
_ERROR_TOKENS = 256


def run_sweep(
    checkpoint: str,
    wanted: Sequence[Combination],
    text_name: str,
    text: str,
    tokens: int,
    where: Where,
    common: Common,
    *,
    budget_bytes: int | None = None,
) -> SweepReport:
    """Do a sweep, and write its results and bundles.

    Args:
        checkpoint: a path that all workers see, or a hub id.
        wanted: the combinations.
        text_name: of the evaluation's text.
        text: on which quality is measured.
        tokens: the most to predict.
        where: where it runs.
        common: options of all exports.
        budget_bytes: the most that a recommended bundle may have.

    Raises:
        UsageError: combinations cannot be, or workers do not fit, and `keep_going` is not given.
        ServiceError: the scheduler cannot be reached, or vanished.
        EdgeKVError: a piece failed.
    """
    start = time.monotonic()
    possible, refused = sort_out(wanted, checkpoint, common)
    for refusal in refused:
        where.say(f"refused: {refusal.name}: {refusal.reason}")
    if refused and not (where.keep_going and possible):
        raise UsageError(
            "combinations",
            got=f"{len(refused)} of {len(possible) + len(refused)} that cannot be: "
            + ", ".join(each.name for each in refused),
            expected="combinations that can be exported",
            fix="Leave them out, or go on with the others with --keep-going.",
        )
    store = PieceStore(where.store or str((where.folder / "pieces").absolute()))
    store.check()
    if where.prune_days is not None:
        check_prunable(store)
    sample = store_sample(store, text_name, text, tokens)
    errors = Sample(sample.key, sample.name, min(tokens, _ERROR_TOKENS))
    planner = Planner(checkpoint, divide=where.divide)
    members = [planner.add(each, common, sample, errors) for each in possible]
    plan = planner.plan
    pieces = unfinished(plan, store, [key for member in members for key in member.all])
    failed: dict[str, Failure] = {}
    if pieces:
        disk_bytes = _disk_bytes(checkpoint, members, common)
        fitness = fitness_for(planner.checkpoint, common.calibration, store, sample.key, disk_bytes)
        failed = carry_out(pieces, len(plan.pieces), store, fitness, where)
    results, lost = list[Result](), list[Refusal]()
    for member in members:
        under = plan.under(member.all)
        wrong = [failed[key] for key in plan.pieces if key in under and key in failed]  # the cause first
        if wrong:
            lost.append(Refusal(name=member.combination.name, reason=f"{wrong[0].kind}: {wrong[0].error}"))
            continue
        try:
            results.append(_finished(member, planner, store, where, checkpoint, common))
        except EdgeKVError as error:
            if not where.keep_going:
                raise
            lost.append(Refusal(name=member.combination.name, reason=str(error)))
    report = SweepReport(
        checkpoint=checkpoint,
        text=text_name,
        budget_bytes=budget_bytes,
        pieces=len(plan.pieces),
        separate_pieces=sum(len(plan.under(member.all)) for member in members),
        done=len(pieces) - len(failed),
        seconds=round(time.monotonic() - start, 1),
        results=with_front(results),
        refused=refused,
        failed=lost,
        recommended=recommend(results, budget_bytes),
    )
    with atomic_file(where.folder / RESULTS) as partial:
        partial.write_bytes(readable_json(report, indent=2))
    mark_used(store, {sample.key, *plan.pieces})
    if where.prune_days is not None:
        pruned = prune(store, where.prune_days)
        where.say(f"removed {pruned.pieces} pieces, {format_bytes(pruned.bytes)}")
    return report


def _finished(
    member: Member, planner: Planner, store: PieceStore, where: Where, checkpoint: str, common: Common
) -> Result:
    combination = member.combination
    bundle = where.folder / "bundles" / combination.name
    assemble(member.exported, combination.device, store, bundle, force=True)
    if combination.rotation is not None:
        recipes = where.folder / "recipes"
        recipes.mkdir(parents=True, exist_ok=True)
        combination.recipe.write(recipes / f"{combination.recipe.name}.json")
    return measure(member, planner.plan, store, bundle, checkpoint, common)


def store_sample(store: PieceStore, name: str, text: str, tokens: int) -> Sample:
    """The text as a piece, which every worker fetches."""
    key = hashed("text", name, text)

    def write(folder: Path) -> None:
        (folder / TEXT).write_bytes(text.encode())

    store.make(key, "text", write)
    return Sample(key, name, tokens)


def _disk_bytes(checkpoint: str, members: Sequence[Member], common: Common) -> int:
    """Space of the largest bundle with its layers; checked for the folder of pieces on each worker."""
    needs = []
    for member in members:
        prepared = prepared_for(checkpoint, member.combination.options(common))
        needs.append(bundle_bytes(prepared.checkpoint.spec, prepared.options.recipe, len(prepared.graphs)))
    return 2 * max(needs)
