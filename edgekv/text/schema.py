"""Whether a JSON schema has an instance that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

_Known = Callable[[Any], bool]


def has_finite_answer(schema: dict[str, Any] | bool) -> bool:
    """Whether some instance of a schema is finite; one such as a list that has to contain itself has none.

    The schemas that have one are the least fixed point of: a schema has a finite instance if its required parts have.
    A schema that is wrong otherwise counts as finite: it is refused when it is compiled.
    """
    if isinstance(schema, bool):
        return schema
    finite: set[int] = set()
    waiting: dict[int, list[dict[str, Any]]] = {}
    pending = list(_nodes(schema))
    while pending:
        node = pending.pop()
        if id(node) in finite:
            continue

        def known(part: Any, node: dict[str, Any] = node) -> bool:
            if part is False:
                return False
            if not isinstance(part, dict) or id(part) in finite:
                return True
            waiting.setdefault(id(part), []).append(node)
            return False

        if _is_finite(node, schema, known):
            finite.add(id(node))
            pending += waiting.pop(id(node), [])
    return id(schema) in finite


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(member)


def _is_finite(node: dict[str, Any], root: dict[str, Any], known: _Known) -> bool:
    """Whether a schema has a finite instance, given those known to have one."""
    if "const" in node or "enum" in node:
        return True
    if isinstance(reference := node.get("$ref"), str) and not known(_resolved(reference, root)):
        return False
    if not all(known(part) for part in _listed(node.get("allOf"))):
        return False
    for name in ("anyOf", "oneOf"):
        if (alternatives := _listed(node.get(name))) and not any(known(alternative) for alternative in alternatives):
            return False
    kinds = _kinds(node.get("type"))
    if not kinds or kinds - {"object", "array"}:
        return True
    return ("object" in kinds and _object_ends(node, known)) or ("array" in kinds and _array_ends(node, known))


def _object_ends(node: dict[str, Any], known: _Known) -> bool:
    named, extra = node.get("properties"), node.get("additionalProperties", True)
    properties = named if isinstance(named, dict) else {}
    required = [name for name in _listed(node.get("required")) if isinstance(name, str)]
    return all(known(properties.get(name, extra)) for name in required)


def _array_ends(node: dict[str, Any], known: _Known) -> bool:
    min_items = node.get("minItems", 0)
    min_items = min_items if isinstance(min_items, int) else 0
    first = _listed(node.get("prefixItems"))[:min_items]
    return all(known(item) for item in first) and (min_items == len(first) or known(node.get("items", True)))


def _kinds(value: Any) -> set[str]:
    return {value} if isinstance(value, str) else {kind for kind in _listed(value) if isinstance(kind, str)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(reference: str, root: dict[str, Any]) -> Any:
    """The schema that a local reference names; True if it is another kind of reference."""
    if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
        return True
    node: Any = root
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return True
    return node
