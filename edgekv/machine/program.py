"""A hash of a part of the program: the source of modules, and of all that they import."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import msgspec

from edgekv.machine.decoding import DECODERS
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import cache_folder, read_file

_PACKAGES = ("quant", "devices", "edgekv", "exporters")
_NAMES = tuple(package.encode() for package in _PACKAGES)
_STARTS = tuple(f"{package}.".encode() for package in _PACKAGES)
_FOLDER = "program"
_LARGEST_BYTES = 1 << 20
_LISTS_ITSELF = b"iter_modules(__path__)"
_IS_LAZY = b"= lazy("
_CHECKED = re.compile(rb"^if TYPE_CHECKING:\n(?:(?:[ \t].*)?\n)+", re.MULTILINE)
_LONGEST_NAME = 200
_ROOT = "edgekv"
_IMPORTS_ROOT = b"import edgekv\n"
_OF_ROOT = re.compile(rb"\bedgekv\.(\w+)")
_ALL, _RUN = "*", ""
"""Instead of a name that is imported from a module: all of its names, and none, where it only runs."""


class _HashRecord(msgspec.Struct, frozen=True, array_like=True):
    """A hash, and what it was made of: files and folders, with the time of their last change and their size."""

    digest: str
    places: dict[str, tuple[int, int]]


@cache
def program_sha256(*modules: str) -> str:
    """A hash of the source of modules, and of what they import: directly or not, within a function, or by a name.

    It is kept in the user's cache folder until a file or a folder of them changes, as Python keeps compiled modules.
    """
    said = " ".join((__file__, *modules))  # other installations have hashes of their own
    kept = cache_folder() / _FOLDER / f"{sha256(said.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, msgspec.MsgspecError):
        held = DECODERS[_HashRecord].decode(read_file(kept, _LARGEST_BYTES))
        if held.places and all(_state(Path(path)) == state for path, state in held.places.items()):
            return held.digest
    _folder.cache_clear()
    digest, places = sha256(), dict[str, tuple[int, int]]()
    for module, (path, source) in sorted(program_sources(*modules).items()):
        digest.update(f"{module}\0{len(source)}\0".encode() + source)
        for place in (path, path.parent):
            places[str(place)] = _state(place)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(kept) as partial:
            partial.write_bytes(msgspec.json.encode(_HashRecord(digest.hexdigest(), places)))
    return digest.hexdigest()


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def program_sources(*modules: str) -> dict[str, tuple[Path, bytes]]:
    """The path and the source of these modules and of all that they import of the program, by module.

    Found in the text: parsing it would take several times as long. Of a lazy package only the names that are asked for
    are followed to their modules, and imports for type checkers not at all. `edgekv` itself is left out, which only
    says where its names are; a package that lists its own folder has all modules there.
    """
    sources: dict[str, tuple[Path, bytes]] = {}
    read: dict[str, _Module] = {}
    left, known = [(module, _ALL) for module in modules], set[tuple[str, str]]()
    while left:
        asked = left.pop()
        module, name = asked
        if asked in known or (path := _path(module)) is None:
            continue
        known.add(asked)
        if name not in (_ALL, _RUN) and _path(f"{module}.{name}") is not None:
            left.append((f"{module}.{name}", _ALL))
            continue
        if module not in read:
            source = path.read_bytes()
            read[module] = _Module.read(module, path, source)
            left += read[module].uses
            left += ((module[:at], _RUN) for at, letter in enumerate(module) if letter == ".")  # Python runs these too
            if module != _ROOT:
                sources[module] = path, source
        homes = read[module].homes
        left += ((home, module) for module, home in homes.items() if name in (_ALL, module))
    return sources


@dataclass(frozen=True, slots=True)
class _Module:
    """What a module uses of the program.

    Attributes:
        uses: modules, each with the name that is imported from it.
        homes: the modules of the names that a lazy package imports when they are asked for; see `lazy`.
    """

    uses: list[tuple[str, str]]
    homes: dict[str, str]

    @classmethod
    def read(cls, module: str, path: Path, source: bytes) -> _Module:
        runs, checked = _CHECKED.sub(b"", source), b"".join(_CHECKED.findall(source))
        homes = {name: home for home, name in _imported(checked)} if _IS_LAZY in source else {}
        uses = [*_imported(runs), *_named(runs)]
        if _LISTS_ITSELF in source:
            files = (name for name in _folder(path.parent) if name.endswith(".py"))
            uses += ((f"{module}.{name.removesuffix('.py')}", _ALL) for name in files)
        return cls(uses, homes)


def _imported(source: bytes) -> Iterator[tuple[str, str]]:
    """Modules, and the names that are imported from them."""
    for part in source.split(b"from ")[1:]:
        if part.startswith(_NAMES):
            home, is_import, rest = part.partition(b" import ")
            if is_import and home.replace(b".", b"").replace(b"_", b"").isalnum():
                end = rest.find(b")") if rest.startswith(b"(") else rest.find(b"\n")
                for line in rest[: end if end >= 0 else None].lstrip(b"(").split(b"\n"):
                    for name in line.partition(b"#")[0].split(b","):
                        if words := name.split():
                            yield home.decode(), words[0].decode()


def _named(source: bytes) -> Iterator[tuple[str, str]]:
    """Modules that are imported whole, or named in a string: a child process runs them. Of `edgekv`, what is used."""
    if _IMPORTS_ROOT in source:
        yield from ((_ROOT, name.decode()) for name in _OF_ROOT.findall(source))
    for before in (b"import ", b'"'):
        for part in source.split(before)[1:]:
            if part.startswith(_STARTS):
                name = part[:_LONGEST_NAME].replace(b'"', b" ").replace(b",", b" ").replace(b":", b" ").split()[0]
                yield name.decode(errors="replace"), _ALL


def _path(module: str) -> Path | None:
    """Of a module's file; None if the program has no module of this name."""
    package, *rest = module.split(".")
    root = _root(package) if package in _PACKAGES else None
    if root is None:
        return None
    path = root.joinpath(*rest)
    if rest and f"{rest[-1]}.py" in _folder(path.parent):
        return path.with_name(f"{rest[-1]}.py")
    return path / "__init__.py" if "__init__.py" in _folder(path) else None


@cache
def _root(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


@cache
def _folder(path: Path) -> frozenset[str]:
    """The names in a folder; none if it is not there."""
    try:
        return frozenset(entry.name for entry in path.iterdir())
    except OSError:
        return frozenset()
