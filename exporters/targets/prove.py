"""The proof that a folder computes what its bundle computes: the same tokens, or the same integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.engine import Graphs, LoraChoice, Session
from edgekv.engine.adapters import Adapters
from edgekv.engine.sink import read_sink
from edgekv.errors import EngineError
from edgekv.kv import KVCache
from edgekv.pictures import TiledPicture, TileGrid
from edgekv.runtime import HtpEngine


def prove(runtime: str, computed: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compare what a runtime gives with what the bundle gives.

    Args:
        runtime: its name, for the error.
        computed: tokens, or arrays of integers, by what they are.
        own: the same of the bundle, on edgekv's own engine.

    Raises:
        EngineError: naming the first that differs.
    """
    different = [name for name in own if name not in computed or not np.array_equal(computed[name], own[name])]
    if not different:
        return
    name = different[0]
    got, expected = "other integers", "those of the bundle's graphs"
    if isinstance(own[name], list):
        got, expected = f"{computed.get(name)}", f"{own[name]}, as edgekv's own loop on the same engine"
    raise EngineError(
        f"{name} of {runtime}",
        got=got if len(different) == 1 else f"{got} ({len(different)} of {len(own)} differ)",
        expected=expected,
        fix="Please report this model; --skip-check writes the folder without this check.",
    )


def own_tokens(
    bundle: Bundle,
    engine: HtpEngine,
    prompt: Sequence[int],
    max_new_tokens: int,
    lora: str | None = None,
    tiles: Sequence[NDArray[np.uint8]] = (),
) -> list[int]:
    """Greedy continuation by the graphs that have logits for every row; tokens that end a text do not end it.

    Args:
        bundle: the bundle.
        engine: runs its graphs.
        prompt: token ids, and those of rows of pictures.
        max_new_tokens: number of tokens.
        lora: an adapter.
        tiles: of the pictures in the prompt, `[edge, edge, 3]` each.
    """
    manifest = bundle.manifest
    cache = KVCache(manifest.cache_geometry, ar={graph.ar for graph in manifest.graphs}, sink=read_sink(bundle))
    graphs = Graphs(bundle, engine, cache)
    session = Session(cache, graphs)
    opened = [
        graphs.pictures.open(TiledPicture((tile,), TileGrid((len(tile), len(tile)))))
        for tile in tiles
        if graphs.pictures is not None
    ]
    if lora is not None:
        session.adapt(Adapters(bundle).open([LoraChoice(lora)]))
    tokens = [int(session.score(prompt)[-1].argmax())]
    del opened  # the rows of a tile are there while somebody holds it
    while len(tokens) < max_new_tokens:
        tokens.append(int(session.feed(tokens[-1:]).argmax()))
    return tokens
