"""From a bundle's folder to a model that runs."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from edgekv.bundle import Bundle, open_bundle
from edgekv.engine import CacheSetup, Mode
from edgekv.kv import Policy
from edgekv.load_options import CacheOptions, EngineOptions
from edgekv.model import Model
from edgekv.prefix import PrefixCache
from edgekv.runtime import HtpOptions, make_engine

_PLAIN = CacheOptions()


def load(
    bundle: str | Path | Bundle,
    engine: str = "cpu",
    *,
    kv_update: str | None = None,
    reserve: Fraction | float | str | None = None,
    policy: str | Policy = "fail",
    threads: int | None = None,
    cpu_mode: str | None = None,
    htp: HtpOptions | str | None = None,
    cache_mode: str | Mode = "always",
    prefix_cache: PrefixCache | None = None,
    kv_growth: str | None = None,
    reproducible: bool = False,
    verify: bool = True,
) -> Model:
    """Open a bundle and get it ready to run.

    Args:
        bundle: its folder, or what `open_bundle` returned.
        engine: this and `threads`, `cpu_mode` and `htp` are the fields of `EngineOptions`.
        kv_update: this and the next ones are the fields of `CacheOptions`, which has their meaning.
        reserve: see above.
        policy: see above.
        threads: see `engine`; None leaves it to the runtime.
        cpu_mode: see `engine`; None for `emulate`.
        htp: see `engine`; as text `performance=burst,vtcm=8`.
        cache_mode: see `kv_update`.
        prefix_cache: where computed prefixes are stored: a folder, which later processes use too; a `StoreConfig`; or
            a `PrefixStore` that several models of this bundle and engine share. None uses the prefixes baked into the
            bundle and stores nothing. Needs the mode `always` or `adaptive`.
        kv_growth: see `kv_update`.
        reproducible: see `kv_update`.
        verify: False skips the hashes of the bundle's files.

    Raises:
        BundleError: the bundle is incomplete, changed or of another format version.
        PrefixError: an invalid configuration of the prefix cache, or a folder that cannot be written.
        UsageError: an unknown name, a number out of range, or options that exclude each other.
        EngineError: the engine is missing or refused a graph.
    """
    given = HtpOptions.parse(htp) if isinstance(htp, str) else htp
    options = EngineOptions(engine, threads, cpu_mode, given)
    caches = CacheOptions(kv_update, reserve, policy, cache_mode, kv_growth, reproducible)
    return open_model(bundle, options, caches, prefix_cache, verify=verify)


def open_model(
    bundle: str | Path | Bundle,
    engine: EngineOptions,
    cache: CacheOptions = _PLAIN,
    prefix_cache: PrefixCache | None = None,
    *,
    verify: bool = True,
) -> Model:
    """`load` with its options as records."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify)
    made = make_engine(opened, engine)
    return Model(opened, made, CacheSetup.read(opened, made, cache), prefix_cache)
