"""From a bundle's folder to a model that runs."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from edgekv.bundle import Bundle, open_bundle
from edgekv.engine import CacheSetup
from edgekv.engine.target_drafters import CacheDraftModel, HeadDraftModel, TargetDraftModel
from edgekv.errors import UsageError
from edgekv.model import Model
from edgekv.prefix import PrefixCache, StoreConfig
from edgekv.prefix.baked import BAKED_TOKENS_PER_BLOCK, BakedPrefix, add_baked, check_name
from edgekv.qnn.options import HtpOptions
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import CacheOptions, EngineOptions

_PLAIN = CacheOptions()
_CPU = EngineOptions()


def load(
    bundle: str | Path | Bundle,
    engine: str | EngineOptions = "cpu",
    cache: CacheOptions = _PLAIN,
    *,
    prefix_cache: PrefixCache | None = None,
    verify: bool = True,
    **options: Any,
) -> Model:
    """Open a bundle and get it ready to run.

    Args:
        bundle: its folder, or what `open_bundle` returned.
        engine: its name, or all its options.
        cache: options of its caches.
        prefix_cache: where computed prefixes are stored: a folder, which later processes use too; a `StoreConfig`; or
            a `PrefixStore` that several models of this bundle and engine share. None uses the prefixes baked into the
            bundle and stores nothing. Needs the mode `always` or `adaptive`.
        verify: False skips the hashes of the bundle's files.
        options: fields of `EngineOptions` and `CacheOptions` that replace those of `engine` and `cache`, such as
            `threads=1` or `policy="sliding-window"`; those of the engine `htp` may be text, as in
            `htp="performance=burst,vtcm=8"`.

    Raises:
        BundleError: the bundle is incomplete, changed or of another format version.
        PrefixError: an invalid configuration of the prefix cache, or a folder that cannot be written.
        UsageError: an unknown name, a number out of range, or options that exclude each other.
        EngineError: the engine is missing or refused a graph.
        TypeError: an unknown option.
    """
    if isinstance(htp := options.get("htp"), str):
        options["htp"] = HtpOptions.parse(htp)
    chosen = EngineOptions(engine) if isinstance(engine, str) else engine
    of_engine = {field.name: options.pop(field.name) for field in fields(chosen) if field.name in options}
    if unknown := options.keys() - {field.name for field in fields(cache)}:
        known = ", ".join(field.name for record in (chosen, cache) for field in fields(record))
        raise TypeError(f"load: got the option {min(unknown)!r}; expected one of {known}")
    return open_model(bundle, replace(chosen, **of_engine), replace(cache, **options), prefix_cache, verify=verify)


def load_drafter(bundle: str | Path | Bundle, engine: str | EngineOptions = "cpu", **options: Any) -> TargetDraftModel:
    """Open the bundle of a drafter that reads its target's cache or hidden states, for `Speculation.draft`.

    Args:
        bundle: its folder, or what `open_bundle` returned.
        engine: its name, or all its options: that of the target.
        options: fields of `EngineOptions` that replace those of `engine`.

    Raises:
        BundleError: the bundle is incomplete, changed or of another format version.
        UsageError: it is a model of its own, an unknown name, or a number out of range.
        EngineError: the engine is missing.
        TypeError: an unknown option.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    if opened.manifest.target is None:
        fix = "Load it with edgekv.load."
        raise UsageError(str(opened.path), got="a model of its own", expected="a drafter's bundle", fix=fix)
    chosen = replace(EngineOptions(engine) if isinstance(engine, str) else engine, **options)
    made, state = make_engine(opened, chosen), opened.manifest.model.target
    if state is not None and state.is_cached_apart:
        return HeadDraftModel(opened, made, CacheSetup.read(opened, made, _PLAIN).make)
    return CacheDraftModel(opened, made)


def open_draft(path: Path, engine: EngineOptions) -> Model | TargetDraftModel:
    """A bundle that drafts for another model: a smaller one, or one that reads its state.

    Raises:
        EdgeKVError: as `load` and `load_drafter`.
    """
    opened = open_bundle(path)
    return open_model(opened, engine) if opened.manifest.target is None else load_drafter(opened, engine)


def open_model(
    bundle: str | Path | Bundle,
    engine: EngineOptions,
    cache: CacheOptions = _PLAIN,
    prefix_cache: PrefixCache | None = None,
    *,
    verify: bool = True,
) -> Model:
    """`load` without keywords."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify)
    if opened.manifest.target is not None:
        fix = "Load its target, and give this as --draft, or with edgekv.load_drafter."
        raise UsageError(str(opened.path), got="a drafter", expected="a model that needs no target", fix=fix)
    made = make_engine(opened, engine)
    return Model(opened, made, CacheSetup.read(opened, made, cache), prefix_cache)


def bake_prefix(bundle: str | Path, text: str, name: str, engine: EngineOptions = _CPU) -> BakedPrefix:
    """Run a text and store its keys and values in the bundle, for all later runs on the same engine.

    Args:
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
