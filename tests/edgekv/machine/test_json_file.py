"""JSON that is written for readers."""

from __future__ import annotations

import json

from hypothesis import given, strategies as st

from edgekv.machine.json_file import json_of_lines

PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(PLAIN | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(VALUES)
def test_json_of_lines_is_the_content(content: object) -> None:
    assert json.loads(json_of_lines(content)) == content


def test_objects_and_arrays_of_plain_values_are_lines() -> None:
    content = {"name": "a", "ar": [1, 32], "weights": [{"dtype": "int8"}, {"dtype": "int4", "rows": 2}], "none": []}
    assert json_of_lines(content).decode().splitlines() == [
        "{",
        ' "name": "a",',
        ' "ar": [1,32],',
        ' "weights": [',
        '  {"dtype":"int8"},',
        '  {"dtype":"int4","rows":2}',
        " ],",
        ' "none": []',
        "}",
    ]
