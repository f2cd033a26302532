"""Where a checkpoint lies, what it holds by hash, and the proof that both belong together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from edgekv.bundle import MANIFEST, Bundle, atomic_directory, is_plain_path, open_bundle
from edgekv.errors import CheckpointError, UsageError
from edgekv.machine.system import cache_folder, sha256_of
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.locate import locate
from exporters.checkpoint.lora import AdapterChoice
from exporters.drafter import Drafter
from exporters.pipeline.hashed import hashed

_fetching = Lock()


@dataclass(frozen=True, slots=True)
class Identity:
    """All that pieces read of a checkpoint, by hash.

    Attributes:
        weights: the files of weights, and merged adapters with their scales.
        config: the configuration.
        tokenizer: the tokenizer and the special tokens.
        templates: the chat templates.
        generation: the sampling defaults.
        target: the bundle that a drafter is made for; empty for a model of its own.
    """

    weights: str
    config: str
    tokenizer: str
    templates: str
    generation: str
    target: str = ""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        progress: Callable[[int, int], None] = lambda done, of: None,
        *,
        target: Bundle | None = None,
    ) -> Identity:
        """Hash a checkpoint.

        Args:
            checkpoint: an open checkpoint.
            progress: as for `Checkpoint.weights_sha256`.
            target: that it drafts for; None for a model of its own.
        """
        return cls(
            weights=checkpoint.weights_sha256(progress),
            config=checkpoint.config_sha256,
            tokenizer=tokenizer_sha256(checkpoint),
            templates=hashed(checkpoint.chat),
            generation=hashed(checkpoint.generation),
            target="" if target is None else sha256_of(target.path / MANIFEST),  # which has the hashes of its files
        )


def tokenizer_sha256(checkpoint: Checkpoint) -> str:
    """The hash of a checkpoint's tokenizer and special tokens."""
    file = checkpoint.tokenizer_file
    return hashed(hashed(checkpoint.tokenizer.to_str()) if file is None else sha256_of(file), checkpoint.special)


@dataclass(frozen=True, slots=True)
class Place:
    """Where every process finds a checkpoint. Pieces are named after what is there, not after the place.

    Attributes:
        name: a path that all workers see, an fsspec URL, or a hub id.
        revision: commit of a hub id; None for others.
        adapters: merged into the weights, in order.
        target: folder of the bundle that a drafter is made for, which all workers see; None for a model of its own.
        ranks: see `Checkpoint`.
    """

    name: str
    revision: str | None = None
    adapters: tuple[AdapterChoice, ...] = ()
    target: Path | None = None
    ranks: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: Bundle | None = None) -> Place:
        """The place of an open checkpoint, and of the bundle that it drafts for."""
        is_hub_id = "://" not in checkpoint.name and not Path(checkpoint.name).exists()
        name = checkpoint.name if is_hub_id or "://" in checkpoint.name else str(Path(checkpoint.name).absolute())
        adapters = tuple(AdapterChoice(adapter.folder.absolute(), adapter.scale) for adapter in checkpoint.adapters)
        bundle = None if target is None else target.path.absolute()
        return cls(name, checkpoint.folder.name if is_hub_id else None, adapters, bundle, checkpoint.ranks)

    def open(self) -> Checkpoint:
        """The checkpoint that lies there, of a model of its own.

        Raises:
            CheckpointError: it cannot be read.
        """
        folder = self._folder()
        return replace(Checkpoint.open(folder, self.adapters, ranks=self.ranks), name=self.name)

    def _folder(self) -> str:
        if "://" not in self.name and self.revision is None:
            return self.name
        return str(_fetched(self.name) if self.revision is None else locate(self.name, self.revision))

    def proven(self, **hashes: str) -> Checkpoint:
        """The checkpoint that lies there, opened and hashed once in a process, and compared with what a piece reads.

        Args:
            hashes: by the fields of `Identity`.

        Raises:
            CheckpointError: it cannot be read, or is another one here.
        """
        return self._proven(hashes).checkpoint

    def drafter(self, **hashes: str) -> Drafter:
        """The same, with its target.

        Raises:
            CheckpointError: it or its target cannot be read, or is another one here.
        """
        known = self._proven(hashes).drafter
        assert known is not None, "the place names a target"
        return known

    def _proven(self, hashes: Mapping[str, str]) -> _Known:
        known = _known.get(self)
        if known is None or known.stamps != known.now or known.misses(hashes):
            if self.target is None:
                known = _Known.of(self.open())
            else:
                drafter = Drafter.open(self._folder(), open_bundle(self.target))
                opened = replace(drafter.checkpoint, name=self.name)
                known = _Known.of(opened, replace(drafter, checkpoint=opened))
            _known[self] = known
        if other := known.misses(hashes):
            raise CheckpointError(
                f"checkpoint {self.name}",
                got=f"another one, whose {other[0]} differ",
                expected=f"{other[0]} with the hash {hashes[other[0]]}, as the command has",
                fix="Give all workers the same files.",
            )
        return known


def open_checkpoint(name: str, adapters: Sequence[AdapterChoice] = (), *, ranks: bool = False) -> Checkpoint:
    """The checkpoint of a path, hub id or fsspec URL; `ranks` as for `Checkpoint.open`.

    Raises:
        CheckpointError: it cannot be read.
    """
    return Place(name, adapters=tuple(adapters), ranks=ranks).open()


def remember(checkpoint: Checkpoint, identity: Identity, drafter: Drafter | None = None) -> None:
    """Take an open checkpoint for the one at its place, so that this process neither opens nor hashes it again."""
    place = Place.of(checkpoint, None if drafter is None else drafter.target)
    _known[place] = _Known(checkpoint, identity, _stamps(checkpoint, drafter), drafter)


@dataclass(frozen=True, slots=True)
class _Known:
    checkpoint: Checkpoint
    identity: Identity
    stamps: list[tuple[str, int, int]]
    drafter: Drafter | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, drafter: Drafter | None = None) -> _Known:
        target = None if drafter is None else drafter.target
        return cls(checkpoint, Identity.of(checkpoint, target=target), _stamps(checkpoint, drafter), drafter)

    @property
    def now(self) -> list[tuple[str, int, int]]:
        """What `stamps` would be now."""
        return _stamps(self.checkpoint, self.drafter)

    def misses(self, hashes: Mapping[str, str]) -> list[str]:
        return [part for part, sha256 in hashes.items() if getattr(self.identity, part) != sha256]


_known: dict[Place, _Known] = {}


def _stamps(checkpoint: Checkpoint, drafter: Drafter | None) -> list[tuple[str, int, int]]:
    """Size and time of change of each file, so that a file that changes while a worker lives is hashed again."""
    folders = [checkpoint.folder, *(adapter.folder for adapter in checkpoint.adapters)]
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())]
    files += [file for file in checkpoint.files if file not in files]
    files += [] if drafter is None else [drafter.target.path / MANIFEST]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _fetched(url: str) -> Path:
    """A local copy of the files of a URL; it is copied again if they have changed there.

    Raises:
        CheckpointError: the URL cannot be read, or lists a name that leads out of its folder.
    """
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url)
        files = {place.removeprefix(root).strip("/"): info for place, info in system.find(root, detail=True).items()}
        known = sorted((file, info["size"], str(info.get("ETag", info.get("mtime")))) for file, info in files.items())
        folder = cache_folder() / "checkpoints" / hashlib.sha256(repr((url, known)).encode()).hexdigest()[:32]
        if strange := [file for file in files if file and not is_plain_path(file)]:
            raise ValueError(f"it lists {strange[0]!r}, which leads out of the folder")
        with _fetching:
            if files and not folder.exists():
                _fetch(system, root, list(files), folder)
    except Exception as error:  # each file system has errors of its own
        files = {}
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "no file there"
    if not files:
        fix = "Check the URL and the credentials, and that its package is installed, such as s3fs."
        raise CheckpointError(f"checkpoint {url}", got=reason, expected="a folder or a GGUF file", fix=fix)
    return folder / Path(root).name if "" in files else folder


def _fetch(system: Any, root: str, files: Sequence[str], folder: Path) -> None:
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
