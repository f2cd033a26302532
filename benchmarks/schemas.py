"""Random JSON schemas for constrained decoding."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "size", "kind", "tags", "é", 'a"b', "x y", "next")
PATTERNS = ("^[a-z]{2,5}$", "[0-9]+", r"^\d{4}-\d{2}$", "^(ab|cd)*$", "^[^x]{0,4}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
DEPTH = 3


def random_schema(seed: int) -> Schema:
    """A schema that llguidance supports and that has finite instances."""
    random = Random(seed)
    schema = _structure(random, DEPTH) if random.random() < 0.8 else _any(random, DEPTH)
    if random.random() < 0.3:
        schema["$defs"] = {"item": _integer(random), "list": _list(random)}
    return _without_missing_references(schema, "$defs" in schema)


def _list(random: Random) -> Schema:
    """A list that may go on."""
    return {
        "type": "object",
        "properties": {"value": _string(random), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }


def _any(random: Random, depth: int) -> Schema:
    if depth == 0 or random.random() < 0.5:
        return _scalar(random)
    return _structure(random, depth)


def _structure(random: Random, depth: int) -> Schema:
    return random.choice((_object, _object, _array, _alternatives))(random, depth - 1)


def _scalar(random: Random) -> Schema:
    kind = random.choice((_string, _string, _integer, _number, _constant, _reference, _union))
    return kind(random)


def _string(random: Random) -> Schema:
    schema: Schema = {"type": "string"}
    choice = random.randrange(4)
    if choice == 0:
        schema["pattern"] = random.choice(PATTERNS)
    elif choice == 1:
        schema["format"] = random.choice(FORMATS)
    elif choice == 2:
        schema["minLength"] = random.randrange(4)
        schema["maxLength"] = schema["minLength"] + random.randrange(6)
    return schema


def _integer(random: Random) -> Schema:
    schema: Schema = {"type": "integer"}
    least = random.randrange(-50, 50)
    if random.random() < 0.6:
        schema[random.choice(("minimum", "exclusiveMinimum"))] = least
    if random.random() < 0.6:
        schema[random.choice(("maximum", "exclusiveMaximum"))] = least + random.randrange(12, 90)
    if random.random() < 0.2:
        schema["multipleOf"] = random.randrange(2, 12)
    return schema


def _number(random: Random) -> Schema:
    schema: Schema = {"type": "number"}
    if random.random() < 0.5:
        schema["minimum"] = random.choice((-1.5, 0, 0.25))
        schema["maximum"] = random.choice((0.5, 3, 99.75))
    return schema


def _constant(random: Random) -> Schema:
    values: list[Any] = ["red", "gr\u00fcn", 'quote " and \\', "", 1, -2.5, True, None, [1, 2], {"a": [None]}]
    if random.random() < 0.3:
        return {"const": random.choice(values)}
    return {"enum": random.sample(values, random.randrange(1, 5))}


def _reference(random: Random) -> Schema:
    return {"$ref": random.choice(("#/$defs/item", "#/$defs/list"))}


def _union(random: Random) -> Schema:
    return {"type": random.sample(["null", "boolean", "integer", "string"], random.randrange(1, 4))}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, random.randrange(1, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(random, depth) for name in names},
        "required": random.sample(names, random.randrange(len(names) + 1)),
    }
    extra = random.choice((False, False, "missing", "schema"))
    if extra != "missing":
        schema["additionalProperties"] = _any(random, depth) if extra == "schema" else False
    return schema


def _array(random: Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(random, depth), "maxItems": random.randrange(1, 5)}
    if random.random() < 0.5:
        schema["minItems"] = random.randrange(schema["maxItems"] + 1)
    if random.random() < 0.3:
        schema["prefixItems"] = [_any(random, depth) for _ in range(random.randrange(1, 3))]
    return schema


def _alternatives(random: Random, depth: int) -> Schema:
    return {"anyOf": [_any(random, depth) for _ in range(random.randrange(1, 4))]}


def _without_missing_references(schema: Any, has_definitions: bool) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema and not has_definitions:
            return {"type": "boolean"}
        return {name: _without_missing_references(each, has_definitions) for name, each in schema.items()}
    if isinstance(schema, list):
        return [_without_missing_references(each, has_definitions) for each in schema]
    return schema
