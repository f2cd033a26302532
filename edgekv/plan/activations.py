"""Memory for what a graph computes on its way."""

from __future__ import annotations

from edgekv.kv import Geometry
from edgekv.plan.cache import Decoder

_ELEMENT_BYTES = 2  # every activation is uint16


def activation_bytes(decoder: Decoder, geometry: Geometry, ar: int) -> int:
    """Bytes that one layer of the AR-`ar` graph keeps at once: an estimate from above.

    Counted as if nothing were freed within a half of the layer, and as if all heads ran at once:

    * throughout: residual and normed residual `2 [AR, hidden]`, mask `[AR, S]`, logits of one row `[vocab]`;
    * attention: scores and probabilities of every query head `2 heads [AR, S]`, and past and new rows joined for
      each kv head: keys, keys turned, values `3 kv_heads [S, D]`, in the cache's own type;
    * or, if it is more, feed-forward: gate, up and their product `3 [AR, intermediate]`.

    The HTP compiler works in tiles within its own memory and spills what it must; its schedule is not modelled.
    """
    context = geometry.context
    always = 2 * ar * decoder.hidden + ar * context + decoder.vocab
    joined_bytes = 3 * decoder.kv_heads * context * geometry.row_bytes
    attention_bytes = _ELEMENT_BYTES * 2 * decoder.heads * ar * context + joined_bytes
    feed_forward_bytes = _ELEMENT_BYTES * 3 * ar * decoder.intermediate
    return _ELEMENT_BYTES * always + max(attention_bytes, feed_forward_bytes)
