"""A hash of a part of the program: the source of modules, and of all that they import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import msgspec

from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import cache_folder, read_file

_PACKAGES = ("quant", "devices", "edgekv", "exporters")
_NAMES = tuple(package.encode() for package in _PACKAGES)
_STARTS = tuple(f"{package}.".encode() for package in _PACKAGES)
_FOLDER = "program"
_LARGEST_BYTES = 1 << 20
_LISTS_ITSELF = b"iter_modules(__path__)"
_LONGEST_NAME = 200


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A hash, and what it was made of: files and folders, with the time of their last change and their size."""

    digest: str
    found: dict[str, tuple[int, int]]


@cache
def program_sha256(*modules: str) -> str:
    """A hash of the source of modules, and of what they import: directly or not, within a function, or by a name.

    It is kept in the user's cache folder until a file or a folder of them changes, as Python keeps compiled modules.
    """
    said = " ".join((__file__, *modules))  # other installations have hashes of their own
    kept = cache_folder() / _FOLDER / f"{sha256(said.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, msgspec.MsgspecError):
        held = msgspec.json.decode(read_file(kept, _LARGEST_BYTES), type=_Kept)
        if held.found and all(_state(Path(path)) == state for path, state in held.found.items()):
            return held.digest
    _folder.cache_clear()
    digest, found = sha256(), dict[str, tuple[int, int]]()
    for module, (path, source) in sorted(program_sources(*modules).items()):
        digest.update(f"{module}\0{len(source)}\0".encode() + source)
        for each in (path, path.parent):
            found[str(each)] = _state(each)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(kept) as partial:
            partial.write_bytes(msgspec.json.encode(_Kept(digest.hexdigest(), found)))
    return digest.hexdigest()


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def program_sources(*modules: str) -> dict[str, tuple[Path, bytes]]:
    """The path and the source of these modules and of all that they import of the program, by module.

    Found in the text: parsing it would take several times as long. `edgekv` itself is left out, which only says where
    its names are; a package that lists its own folder has all modules there.
    """
    found: dict[str, tuple[Path, bytes]] = {}
    left, known = [*modules], {*modules, "edgekv"}
    while left:
        module = left.pop()
        path = _path(module)
        if path is None:
            continue
        source = path.read_bytes()
        found[module] = path, source
        for name in set(_named(module, source)):
            # The packages that a module is in run too.
            for end in (at for at in range(1, len(name) + 1) if at == len(name) or name[at] == "."):
                if (each := name[:end]) not in known:
                    known.add(each)
                    left.append(each)
    return found


def _named(module: str, source: bytes) -> Iterator[str]:
    """Names in a source that may be those of modules of the program."""
    for part in source.split(b"from ")[1:]:
        if part.startswith(_NAMES):
            home, is_import, rest = part.partition(b" import ")
            if is_import and home.replace(b".", b"").replace(b"_", b"").isalnum():
                package = home.decode()
                yield package
                end = rest.find(b")") if rest.startswith(b"(") else rest.find(b"\n")
                for line in rest[: end if end >= 0 else None].lstrip(b"(").split(b"\n"):
                    for name in line.partition(b"#")[0].split(b","):
                        if words := name.split():
                            yield f"{package}.{words[0].decode()}"
    for before in (b"import ", b'"'):  # `import edgekv.x`, and a module that a child process runs
        for part in source.split(before)[1:]:
            if part.startswith(_STARTS):
                name = part[:_LONGEST_NAME].replace(b'"', b" ").replace(b",", b" ").split()[0]
                yield name.decode(errors="replace")
    if _LISTS_ITSELF in source:
        path = _path(module)
        assert path is not None, "its source was read"
        yield from (f"{module}.{name.removesuffix('.py')}" for name in _folder(path.parent) if name.endswith(".py"))


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
        return frozenset(each.name for each in path.iterdir())
    except OSError:
        return frozenset()
