"""Memory for the intermediate results of a graph."""

from __future__ import annotations

from edgekv.spec.geometry import Geometry
from edgekv.spec.layers import LayeredGeometry
from edgekv.spec.sizes import Decoder

_ELEMENT_BYTES = 2  # every activation is uint16


def activation_bytes(decoder: Decoder, geometry: Geometry | LayeredGeometry, ar: int) -> int:
    """Bytes that the largest layer of the AR-`ar` graph needs at once: an upper estimate.

    It assumes that nothing is freed within either half of a layer, and that all heads run at once:

    * in both: residual and normalized residual `2 [AR, hidden]`, masks `[AR, P+AR]`, logits of one row `[vocab]`;
    * attention: scores and probabilities of every query head `2 heads [AR, P+AR]`, and concatenated past and new rows
    for each kv head: keys, transposed keys, values `3 kv_heads [P+AR, D]`, in the cache's own type; * feed-forward, if
    it needs more: gate, up and their product `3 [AR, intermediate]`.

    P is S-AR past rows, or fewer in layers with an attention window. The HTP compiler works in tiles in its own memory
    and spills the rest; its schedule is not modelled.
    """
    context = geometry.context
    attending = [group for group in geometry.groups() if not group.is_state]
    columns = [group.past_rows(ar, context) + ar for group in attending]
    both_halves = 2 * ar * decoder.hidden + ar * sum(columns) + decoder.vocab
    joined_bytes = max(
        3 * group.kv_heads * most * group.row_bytes for group, most in zip(attending, columns, strict=True)
    )
    attention_bytes = _ELEMENT_BYTES * 2 * decoder.heads * ar * max(columns) + joined_bytes
    feed_forward_bytes = _ELEMENT_BYTES * 3 * ar * decoder.intermediate
    return _ELEMENT_BYTES * both_halves + max(attention_bytes, feed_forward_bytes)
