"""The checkpoint and options of a piece, opened once in each process."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import fsspec

from edgekv.errors import CheckpointError
from edgekv.system import cache_folder
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.options import ExportOptions
from exporters.prepared import Prepared, Surveyed, prepare
from exporters.quantize.reference import Tensors
from exporters.sweep.store import PieceStore
from exporters.sweep.survey_file import read_survey


@dataclass(frozen=True, slots=True)
class Source:
    """What to export; the weights stay where they are.

    Attributes:
        checkpoint: a path that all workers see, an fsspec URL, or a hub id.
        options: of the export, without the target.
        weights_sha256: of the checkpoint.
        survey: key of the survey's piece.
    """

    checkpoint: str
    options: ExportOptions
    weights_sha256: str
    survey: str

    @property
    def prepared(self) -> Prepared:
        """The checkpoint and the options, brought together."""
        return prepared_for(self.checkpoint, self.options)

    def surveyed(self, store: PieceStore) -> Surveyed:
        """What the finished survey decides."""
        return _surveyed(self, store)

    def tensors(self, store: PieceStore) -> Tensors:
        """The checkpoint with the transforms that the recipe folds into its weights."""
        return _tensors(self, store)


@lru_cache(maxsize=4)
def open_checkpoint(name: str) -> Checkpoint:
    """The checkpoint of a path, hub id or fsspec URL, opened once in a process.

    Raises:
        CheckpointError: it cannot be read.
    """
    if "://" not in name:
        return Checkpoint.open(name)
    return replace(Checkpoint.open(str(_fetched(name))), name=name)


def _fetched(url: str) -> Path:
    """A local copy of the files of a URL; it is copied again if they have changed there.

    Raises:
        CheckpointError: the URL cannot be read.
    """
    try:
        system, root = fsspec.core.url_to_fs(url)
        found = {place.removeprefix(root).strip("/"): info for place, info in system.find(root, detail=True).items()}
        known = sorted((file, info["size"], str(info.get("ETag", info.get("mtime")))) for file, info in found.items())
        folder = cache_folder() / "checkpoints" / hashlib.sha256(repr((url, known)).encode()).hexdigest()[:32]
        if found and not folder.exists():
            partial = folder.with_name(f".partial-{uuid.uuid4().hex}")
            for file in found:
                place = partial / (file or Path(root).name)
                place.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(f"{root}/{file}".rstrip("/"), str(place))
            if not folder.exists():
                partial.rename(folder)
    except Exception as error:  # each file system has errors of its own
        found = {}
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "no file there"
    if not found:
        fix = "Check the URL and the credentials, and that its package is installed, such as s3fs."
        raise CheckpointError(f"checkpoint {url}", got=reason, expected="a folder or a GGUF file", fix=fix)
    return folder / Path(root).name if "" in found else folder


@lru_cache(maxsize=64)
def prepared_for(checkpoint: str, options: ExportOptions) -> Prepared:
    """The checkpoint and options, brought together once in a process; raises what `prepare` does."""
    return prepare(open_checkpoint(checkpoint), options)


@lru_cache(maxsize=8)
def _surveyed(source: Source, store: PieceStore) -> Surveyed:
    prepared = source.prepared
    return prepared.decide(read_survey(store.path(source.survey), prepared.checkpoint.spec))


@lru_cache(maxsize=2)
def _tensors(source: Source, store: PieceStore) -> Tensors:
    prepared = source.prepared
    return transformed(prepared.checkpoint, prepared.recipe, source.surveyed(store).heads)
