"""A model that llama.cpp wrote as several files (`gguf-split`, or the converter's `--split-max-size`).

The first part has all metadata, and each part tensors of its own. Names end in `-00001-of-00002.gguf`.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgekv.errors import CheckpointError
from exporters.checkpoint.gguf.part import Block, Part, open_part

_NUMBER, _COUNT, _TENSORS = KEYS = ("split.no", "split.count", "split.tensors.count")
_NAME = re.compile(r"(.+-)(\d{5})(-of-(\d{5})\.gguf)", re.DOTALL)
_SHOWN = 3  # names of missing parts in an error


def open_parts(path: Path) -> tuple[Part, ...]:
    """A whole file, or all parts of a split one, whichever of them is given; the first one has the metadata.

    Raises:
        CheckpointError: a file is damaged, or parts are missing or of different models.
    """
    part = open_part(path)
    count, name = _number(part, _COUNT, 1), _NAME.fullmatch(path.name)
    if count <= 1 and (name is None or int(name[4]) <= 1):
        return (part,)
    if name is None or int(name[4]) != count:
        expected = f"a name that ends in -00001-of-{count:05}.gguf, by which the others are found"
        raise _refusal(f"{path.name}: {_COUNT}", f"one of {count}" if count > 1 else "a whole model", expected)
    files = [path.with_name(f"{name[1]}{number:05}{name[3]}") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        got = f"{count - len(missing)} of {count} parts, without {', '.join(missing[:_SHOWN])}{more}"
        raise _refusal(f"{path.name}: {_COUNT}", got, f"all {count} parts beside each other")
    parts = tuple(part if file == path else open_part(file) for file in files)
    _check(parts)
    return parts


def joined(parts: tuple[Part, ...]) -> dict[str, Block]:
    """The tensors of all parts by name."""
    return {name: block for part in parts for name, block in part.blocks.items()}


def _check(parts: tuple[Part, ...]) -> None:
    """Refuse parts of different models, and a set with other tensors than the first part says."""
    first, paths = parts[0], dict[str, Path]()
    for number, part in enumerate(parts):
        for key, from_name in ((_COUNT, len(parts)), (_NUMBER, number)):
            if (value := _number(part, key)) != from_name:
                raise _refusal(f"{part.path.name}: {key}", value, f"{from_name}, as its name says")
        for key, value in part.fields.items():
            if key not in KEYS and first.fields.get(key) != value:
                expected = f"what {first.path.name} says"
                raise _refusal(f"{part.path.name}: {key}", repr(value)[:80], expected)
        for name in part.blocks:
            if (other := paths.setdefault(name, part.path)) != part.path:
                raise _refusal(f"{part.path.name}: {name}", f"a tensor of {other.name} too", "each tensor once")
    for part in parts:
        if (count := _number(part, _TENSORS)) != len(paths):
            raise _refusal(f"{part.path.name}: {_TENSORS}", f"{count}, and {len(paths)} in all parts", "as many")


def _number(part: Part, key: str, default: int | None = None) -> int:
    value = part.fields.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    got = "nothing" if value is None else repr(value)[:80]
    raise _refusal(f"{part.path.name}: {key}", got, "a whole number")


def _refusal(field: str, got: object, expected: str) -> CheckpointError:
    fix = "Put all parts of one download into one folder, under their own names."
    return CheckpointError(field, got=got, expected=expected, fix=fix)
