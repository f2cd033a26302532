"""The checkpoint and options of a piece, opened once in each process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock

import fsspec

from edgekv.bundle import atomic_directory, is_plain_path
from edgekv.errors import CheckpointError, UsageError
from edgekv.spec.text import TOKENIZER
from edgekv.system import cache_folder, sha256_of
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.checkpoint.locate import locate
from exporters.options import ExportOptions
from exporters.prepared import Prepared, Surveyed, prepare
from exporters.quantize.reference import Tensors
from exporters.sweep.piece import hashed
from exporters.sweep.store import PieceStore
from exporters.sweep.survey_file import read_survey

WEIGHTS, SETTINGS, TOKENS, CHAT = "weights", "settings of config.json", "tokens", "chat templates or sampling defaults"

_fetching = Lock()


@dataclass(frozen=True, slots=True)
class Pinned:
    """A checkpoint that every process must find alike.

    Attributes:
        name: a path that all workers see, an fsspec URL, or a hub id.
        revision: commit of a hub id; None for others.
        hashes: of all that pieces read from it, by what it is.
    """

    name: str
    revision: str | None
    hashes: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str) -> Pinned:
        """The checkpoint of a path, hub id or fsspec URL as it is now.

        Raises:
            CheckpointError: it cannot be read.
        """
        opened = open_checkpoint(name)
        is_hub_id = "://" not in name and not Path(name).exists()
        return cls(name, opened.folder.name if is_hub_id else None, _hashes(opened))

    def __getitem__(self, part: str) -> str:
        return dict(self.hashes)[part]

    def open(self) -> Checkpoint:
        """The checkpoint, opened and compared once in a process.

        Raises:
            CheckpointError: it cannot be read, or is another one here.
        """
        return _open_pinned(self)


@dataclass(frozen=True, slots=True)
class Source:
    """What to export; the weights stay where they are.

    Attributes:
        checkpoint: to export.
        options: of the export, without the target.
        survey: key of the survey's piece.
    """

    checkpoint: Pinned
    options: ExportOptions
    survey: str

    @property
    def prepared(self) -> Prepared:
        """The checkpoint and the options, brought together."""
        return _prepared(self.checkpoint, self.options)

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
    return _open(name, None)


def _open(name: str, revision: str | None) -> Checkpoint:
    if "://" not in name and revision is None:
        return Checkpoint.open(name)
    return replace(Checkpoint.open(str(_fetched(name) if revision is None else locate(name, revision))), name=name)


@lru_cache(maxsize=4)
def _open_pinned(pinned: Pinned) -> Checkpoint:
    opened = _open(pinned.name, pinned.revision)
    found = dict(_hashes(opened))
    if other := [part for part, wanted in pinned.hashes if found[part] != wanted]:
        raise CheckpointError(
            f"checkpoint {pinned.name}",
            got=f"another one, whose {other[0]} differ",
            expected=f"{other[0]} with sha256 {pinned[other[0]]}, as the command has",
            fix="Give all workers the same files.",
        )
    return opened


def _hashes(opened: Checkpoint) -> tuple[tuple[str, str], ...]:
    file = opened.folder / TOKENIZER
    tokenizer = sha256_of(file) if file.is_file() else hashed(opened.tokenizer.to_str())
    return (
        (WEIGHTS, opened.weights_sha256()),
        (SETTINGS, opened.config_sha256),
        (TOKENS, hashed(tokenizer, opened.special)),
        (CHAT, hashed(opened.chat, opened.generation)),
    )


def _fetched(url: str) -> Path:
    """A local copy of the files of a URL; it is copied again if they have changed there.

    Raises:
        CheckpointError: the URL cannot be read, or lists a name that leads out of its folder.
    """
    try:
        system, root = fsspec.core.url_to_fs(url)
        found = {place.removeprefix(root).strip("/"): info for place, info in system.find(root, detail=True).items()}
        known = sorted((file, info["size"], str(info.get("ETag", info.get("mtime")))) for file, info in found.items())
        folder = cache_folder() / "checkpoints" / hashlib.sha256(repr((url, known)).encode()).hexdigest()[:32]
        if strange := [file for file in found if file and not is_plain_path(file)]:
            raise ValueError(f"it lists {strange[0]!r}, which leads out of the folder")
        with _fetching:
            if found and not folder.exists():
                _fetch(system, root, list(found), folder)
    except Exception as error:  # each file system has errors of its own
        found = {}
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "no file there"
    if not found:
        fix = "Check the URL and the credentials, and that its package is installed, such as s3fs."
        raise CheckpointError(f"checkpoint {url}", got=reason, expected="a folder or a GGUF file", fix=fix)
    return folder / Path(root).name if "" in found else folder


def _fetch(system: fsspec.AbstractFileSystem, root: str, files: Sequence[str], folder: Path) -> None:
    """Copy files to a new folder, unless another process does meanwhile."""
    try:
        with atomic_directory(folder) as partial:
            for file in files:
                place = partial / (file or Path(root).name)
                place.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(f"{root}/{file}".rstrip("/"), str(place))
    except UsageError:
        if not folder.is_dir():
            raise


@lru_cache(maxsize=64)
def prepared_for(checkpoint: str, options: ExportOptions) -> Prepared:
    """The checkpoint and options, brought together once in a process; raises what `prepare` does."""
    return prepare(open_checkpoint(checkpoint), options)


@lru_cache(maxsize=64)
def _prepared(checkpoint: Pinned, options: ExportOptions) -> Prepared:
    return prepare(checkpoint.open(), options)


@lru_cache(maxsize=8)
def _surveyed(source: Source, store: PieceStore) -> Surveyed:
    prepared = source.prepared
    return prepared.decide(read_survey(store.path(source.survey), prepared.checkpoint.spec))


@lru_cache(maxsize=2)
def _tensors(source: Source, store: PieceStore) -> Tensors:
    prepared = source.prepared
    return transformed(prepared.checkpoint, prepared.recipe, source.surveyed(store).heads)
