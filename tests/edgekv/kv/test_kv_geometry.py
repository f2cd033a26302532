"""The sizes of a cache and the order and names of its tensors."""

from __future__ import annotations

import pytest

from edgekv.kv import KvTensor, RowSpec

GEOMETRY = RowSpec(layers=2, kv_heads=2, head_dim=64, window=512)


def test_tensors_stand_by_layer_then_kind_then_head():
    assert [tensor.past for tensor in GEOMETRY.names()] == [
        "past_key_0_h0_in",
        "past_key_0_h1_in",
        "past_value_0_h0_in",
        "past_value_0_h1_in",
        "past_key_1_h0_in",
        "past_key_1_h1_in",
        "past_value_1_h0_in",
        "past_value_1_h1_in",
    ]
    assert len(list(GEOMETRY.names())) == GEOMETRY.tensors
    assert KvTensor(3, "value", 1).new == "past_value_3_h1_out"


def test_bytes_of_a_row():
    assert (GEOMETRY.row_bytes, GEOMETRY.zero_point) == (64, 128)
    signed = RowSpec(layers=2, kv_heads=2, head_dim=64, window=512, kv_dtype="s16")
    assert (signed.row_bytes, signed.zero_point) == (128, 0)


def test_a_graph_sees_the_context_less_its_own_tokens():
    assert GEOMETRY.past_rows(1) == 511
    assert GEOMETRY.past_rows(32) == 480
    for ar in (0, 512):
        with pytest.raises(ValueError, match=f"ar: got {ar}; expected 1 to 511"):
            GEOMETRY.past_rows(ar)


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"kv_heads": -1}, {"head_dim": 0}, {"window": 1}, {"kv_dtype": "u16"}]
)
def test_sizes_that_make_no_cache_are_refused(wrong):
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 1, "window": 2, **wrong}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got"):
        RowSpec(**sizes)
