"""Computes a prefix and stores it in a bundle."""

from __future__ import annotations

from pathlib import Path

from edgekv.loading import load
from edgekv.prefix import StoreConfig
from edgekv.prefix.baked import BAKED_TOKENS_PER_BLOCK, BakedPrefix, add_baked, check_name


def bake_prefix(
    bundle: str | Path, text: str, name: str, engine: str = "cpu", cpu_mode: str | None = None
) -> BakedPrefix:
    """Run a text and store its keys and values in the bundle, for all later runs on the same engine.

    Args:
        bundle: its folder.
        text: the start of prompts; last tokens that may merge with the following text are computed again.
        name: name of the prefix; an existing one of the same name and engine is replaced.
        engine: `cpu` or `htp`.
        cpu_mode: of the engine `cpu`, as for `edgekv.load`; each has its own prefixes.

    Raises:
        BundleError: the bundle is broken, or its folder cannot be written.
        ContextFullError: the text is longer than the context.
        UsageError: an empty text, a name that is not a plain file name, or an unknown engine.
        EngineError: the engine is missing or refused a graph.
    """
    model = load(bundle, engine, cpu_mode=cpu_mode, prefix_cache=StoreConfig(tokens_per_block=BAKED_TOKENS_PER_BLOCK))
    check_name(name)
    generation = model.generate(text, 1)
    list(generation)
    assert model.prefix_store is not None
    return add_baked(model.bundle.path, name, model.engine, generation.prompt, model.prefix_store)
