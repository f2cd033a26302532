"""The sink as a saved conversation of Genie, for `GenieDialog_restore`.

Genie has no start values of its own for the cache, but restores what `GenieDialog_save` wrote. The layout below is what
the tested version saves and restores; it ignores the other files that it saves.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import numpy as np

from edgekv.bundle import Manifest
from edgekv.kv import Sink

STATE = "sink"
"""The folder, within the one that Genie loads."""

_DIALOG, _CACHE, _HISTORY = "dialog.json", "kv-slot-0.primary.qnn-htp", "token-history-slot-0"
_MAGIC = 0xC0DE
_HEADER = struct.Struct("<IIHHHH")  # tensors, magic, 0, heads of a tensor, D, tokens


class _Conversation(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """`dialog.json`, of a conversation that begins with tokens that nobody asked.

    After a query `last_tok` is the last token of the answer, which Genie runs before the next query; here it is none.
    """

    last_tok: int = -1
    n_generated: int = 0
    n_past: int
    n_prompt: int
    n_queries: int = 0
    prefill_only: bool = False
    process_state: int = 0
    unprocessed_embedding_size: int = 0
    unprocessed_tokens_size: int = 0


def write_state(folder: Path, manifest: Manifest, sink: Sink) -> None:
    """Write a folder from which Genie restores the sink.

    The cache file has a header, the keys of all heads `[D, tokens]`, their values `[tokens, D]`, and the scales of both
    as float64; heads are ordered by their layers.
    """
    folder.mkdir()
    count = len(sink.tokens)
    tensors = list(manifest.geometry.names())
    keys, values = ([each.past for each in tensors if each.kind == kind] for kind in ("key", "value"))
    with (folder / _CACHE).open("wb") as file:
        file.write(_HEADER.pack(len(tensors), _MAGIC, 0, 1, manifest.model.head_dim, count))
        for name in keys:
            file.write(sink.rows[name].T.tobytes())
        for name in values:
            file.write(sink.rows[name].tobytes())
        scales = [np.float32(manifest.encodings[name].scale) for name in (*keys, *values)]
        file.write(np.array(scales, np.float64).tobytes())
    # With these, queries that rewind to a common prefix may begin with the sink.
    (folder / _HISTORY).write_bytes(np.array(sink.tokens, np.uint32).tobytes())
    (folder / _DIALOG).write_bytes(msgspec.json.encode(_Conversation(n_past=count, n_prompt=count)))
