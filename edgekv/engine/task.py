"""Which bundles write text, and which give embeddings or scores."""

from __future__ import annotations

from typing import TypeVar

from edgekv.bundle import Bundle
from edgekv.errors import UsageError
from edgekv.spec import EmbeddingTask, RankingTask, Task

T = TypeVar("T", EmbeddingTask, RankingTask)

_WRITER = "a bundle that writes text"
_EXPORT = "Export a checkpoint in the form of sentence-transformers."


def require_task(bundle: Bundle, kind: type[T]) -> T:
    """What a bundle of this kind gives.

    Raises:
        UsageError: it writes text, or gives something else.
    """
    task = bundle.manifest.task
    if isinstance(task, kind):
        return task
    kind_of_bundle, fix = (_WRITER, f"Use edgekv generate. {_EXPORT}") if task is None else (task.noun, task.use)
    raise UsageError(str(bundle.path), got=kind_of_bundle, expected=kind.noun, fix=fix)


def check_ends(bundle: Bundle) -> None:
    """Refuse a bundle that writes text.

    Raises:
        UsageError: it does.
    """
    if bundle.manifest.task is None:
        wanted = f"{EmbeddingTask.noun} or {RankingTask.noun}"
        raise UsageError(str(bundle.path), got=_WRITER, expected=wanted, fix=f"Use edgekv generate. {_EXPORT}")


def check_writes(bundle: Bundle) -> None:
    """Refuse a bundle that gives embeddings or scores.

    Raises:
        UsageError: it does.
    """
    task: Task | None = bundle.manifest.task
    if task is not None:
        raise UsageError(str(bundle.path), got=f"{task.noun}, which writes no text", expected=_WRITER, fix=task.use)
