"""The store that the generations of a model share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.bundle import Bundle
from edgekv.errors import UsageError
from edgekv.kv import KVCache
from edgekv.prefix.baked import baked_prefixes, load_baked
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.fingerprint import prefix_fingerprint
from edgekv.prefix.groups import split_layers
from edgekv.prefix.storage import layout_digest
from edgekv.prefix.store import PrefixStore

if TYPE_CHECKING:
    from edgekv.session import Mode

PrefixCache = str | Path | StoreConfig | PrefixStore


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A store and how it is used.

    Attributes:
        store: the store.
        writes: whether generations leave their tokens there; False serves what is in it already.
    """

    store: PrefixStore
    writes: bool


def open_store(
    bundle: Bundle, engine: str, cache: KVCache, mode: Mode, wanted: PrefixCache | None
) -> SharedStore | None:
    """The store that a model was given or asked for, with the bundle's own prefixes in it.

    Each bundle and engine has a folder of its own in the one that is given.

    Args:
        bundle: the bundle.
        engine: where it runs.
        cache: what the store will restore to.
        mode: the caching mode.
        wanted: a folder, a configuration or a store; None for a store of the bundle's own prefixes, if it has any.

    Raises:
        UsageError: a mode that keeps nothing, or a store of another bundle or engine.
        PrefixError: a configuration that cannot be.
        BundleError: the bundle's prefixes are broken.
    """
    baked = [entry for entry in baked_prefixes(bundle.path) if entry.engine == engine]
    if wanted is None and not (baked and mode.recomputed_tokens == 0):
        return None
    if mode.recomputed_tokens != 0:
        fix = "Choose the mode always, or leave the prefix cache out."
        raise UsageError("cache mode", got=f"{mode} with a prefix cache", expected="always or adaptive", fix=fix)
    fingerprint = prefix_fingerprint(bundle.manifest, engine)
    if isinstance(wanted, PrefixStore):
        store = wanted
        if (store.geometry, store.fingerprint) != (cache.geometry, fingerprint):
            fix = "Open it with the bundle's geometry and prefix_fingerprint(manifest, engine)."
            raise UsageError("prefix_cache", got="a store of another bundle", expected="one of this bundle", fix=fix)
    else:
        store = PrefixStore(cache.geometry, _configured(cache, fingerprint, wanted), fingerprint=fingerprint)
    if store.config.max_attention_window:
        found, fix = list(store.config.max_attention_window), "Leave it out."
        raise PrefixError("max_attention_window", got=found, expected="the windows of the graphs", fix=fix)
    load_baked(bundle, store, engine)
    return SharedStore(store, writes=wanted is not None)


def _configured(cache: KVCache, fingerprint: str, wanted: str | Path | StoreConfig | None) -> StoreConfig:
    config = StoreConfig(disk_folder=Path(wanted)) if isinstance(wanted, (str, Path)) else wanted or StoreConfig()
    if config.disk_folder is None:
        return config
    layout = layout_digest(fingerprint, cache.geometry.kv_dtype, split_layers(cache.geometry), config.tokens_per_block)
    return replace(config, disk_folder=config.disk_folder / layout.hex()[:16], disk_limit_folder=config.disk_folder)
