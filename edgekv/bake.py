"""Computes a prefix and stores it in a bundle."""

from __future__ import annotations

from pathlib import Path

from edgekv.load_options import EngineOptions
from edgekv.loading import open_model
from edgekv.prefix import StoreConfig
from edgekv.prefix.baked import BAKED_TOKENS_PER_BLOCK, BakedPrefix, add_baked, check_name

_CPU = EngineOptions()


def bake_prefix(bundle: str | Path, text: str, name: str, engine: EngineOptions = _CPU) -> BakedPrefix:
    """Run a text and store its keys and values in the bundle, for all later runs on the same engine.

    Args:
        bundle: its folder.
        text: the start of prompts; last tokens that may merge with the following text are computed again.
        name: name of the prefix; an existing one of the same name and engine is replaced.
        engine: `cpu` or `htp`; each, and each mode of the CPU, has its own prefixes.

    Raises:
        BundleError: the bundle is broken, or its folder cannot be written.
        ContextFullError: the text is longer than the context.
        UsageError: an empty text, a name that is not a plain file name, or an unknown engine.
        EngineError: the engine is missing or refused a graph.
    """
    store = StoreConfig(tokens_per_block=BAKED_TOKENS_PER_BLOCK)
    model = open_model(bundle, engine, prefix_cache=store)
    check_name(name)
    generation = model.generate(text, 1)
    list(generation)
    assert model.prefix_store is not None
    return add_baked(model.bundle.path, name, model.engine.name, generation.prompt, model.prefix_store)
