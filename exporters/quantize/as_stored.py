"""The recipe `as-stored`: the types and integers of a quantized checkpoint, where a bundle has them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from edgekv.bundle import StoredRecord
from edgekv.errors import UsageError
from edgekv.spec.tensors import matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.recipe import Recipe, WeightRule


def resolve(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """The recipe with one rule for each matrix that keeps its type or its integers, if it asks for that.

    Raises:
        UsageError: it asks for integers that the checkpoint does not have.
    """
    storage = {name: checkpoint.storage(name) for name in matrices(checkpoint.spec)}
    if recipe.keep_stored:
        rules = [
            WeightRule(tensors=name, dtype=stored.dtype, method="gptq" if stored.obstacle else "stored")
            for name, stored in storage.items()
            if stored is not None
        ]
        if not rules:
            raise _refused(recipe, "a checkpoint of floats")
        return msgspec.structs.replace(recipe, weights=(*recipe.weights, *rules), keep_stored=False)
    for name, stored in storage.items():
        rule = recipe.rule(name)
        if rule.method == "stored" and (stored is None or stored.obstacle or stored.dtype != rule.dtype):
            kind = "floats" if stored is None else stored.obstacle or stored.dtype
            raise _refused(recipe, f"{rule.dtype} for {name}, which is stored as {kind}")
    return recipe


def stored_record(
    checkpoint: Checkpoint, recipe: Recipe, progress: Callable[[int, int], None] = lambda done, of: None
) -> StoredRecord | None:
    """What becomes of the matrices of a quantized checkpoint; None if it has floats.

    Args:
        checkpoint: the checkpoint.
        recipe: resolved for it.
        progress: called with the number of compared matrices and the total, if there are quantized ones.
    """
    if checkpoint.quantization is None:
        return None
    shapes = matrices(checkpoint.spec)
    kept = integers = changed = 0
    error = energy = 0.0
    anew: Counter[str] = Counter()
    for done, (name, shape) in enumerate(shapes.items()):
        progress(done, len(shapes))
        storage, rule = checkpoint.storage(name), recipe.rule(name)
        if storage is None:
            continue
        if rule.method != "stored":
            anew[storage.obstacle or f"recipe {recipe.name}"] += 1
            continue
        kept, integers = kept + 1, integers + shape[0] * shape[1]
        cost = checkpoint.carry_cost(name)
        changed, error, energy = changed + cost.changed, error + cost.error, energy + cost.energy
    progress(len(shapes), len(shapes))
    decibels = 10 * math.log10(error / energy) if error else None
    return StoredRecord(
        format=checkpoint.quantization.name,
        kept=kept,
        integers=integers,
        changed_integers=changed,
        error_db=decibels,
        quantized_anew=dict(anew),
    )


def describe_stored(record: StoredRecord) -> Iterator[str]:
    """What became of quantized matrices, in lines."""
    if record.kept:
        yield f"{record.format}: the integers of {record.kept} matrices are kept, {record.changed_integers} changed"
    if record.error_db is not None:
        share = record.changed_integers / record.integers
        yield (
            f"scales of groups rounded to LPBQ: {share:.2%} of the integers changed, "
            f"the weights differ by {record.error_db:.1f} dB"
        )
    for reason, count in record.quantized_anew.items():
        yield f"{record.format}: {count} matrices dequantized and requantized ({reason})"


def _refused(recipe: Recipe, got: str) -> UsageError:
    return UsageError(
        f"--recipe {recipe.name}",
        got=got,
        expected="integers of the checkpoint that the bundle can hold",
        fix="Use another recipe, such as w8a16.",
    )
