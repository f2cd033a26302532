"""From a bundle's folder to a model that runs."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from edgekv.bundle import Bundle, open_bundle
from edgekv.engine import CacheSetup, Mode
from edgekv.kv import GrowthName, Policy
from edgekv.model import Model
from edgekv.prefix import PrefixCache
from edgekv.runtime import HtpOptions, make_engine


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
    kv_growth: GrowthName | str | None = None,
    reproducible: bool = False,
    verify: bool = True,
) -> Model:
    """Open a bundle and get it ready to run.

    Args:
        bundle: its folder, or what `open_bundle` returned.
        engine: `cpu` or `htp` for a bundle of ONNX graphs, `litert` or `tflite` for one of TFLite graphs.
        kv_update: one of `edgekv.kv.STRATEGIES`; None for `slot` (`pointer-shift` if a reserve is given).
        reserve: memory of `pointer-shift`, in units of S-1 rows per tensor, above 1, at most 2; None for 2.
        policy: what happens when the context is full, as text or as a policy of `edgekv.kv`. `fail` ends the
            generation; `sliding-window` drops the oldest tokens; `sinks(N, WINDOW)` keeps the first N and the newest
            WINDOW tokens, at positions within the context; `keydiff(BUDGET)` or `keydiff(BUDGET, RECENT)` keeps the
            BUDGET tokens whose keys are least similar to the mean key, among them the RECENT newest (an eighth). The
            kept tokens must leave room for the graph with the most tokens per inference.
        threads: of one operation, on a CPU; None leaves it to the runtime.
        cpu_mode: how the engine `cpu` computes: `emulate`, the HTP's rounding of every result; `exact16`, the bundle's
            integers as weights and activations of 16 bits in their products; or `fast`, with 8 bits there. None for
            `emulate`.
        htp: options of the engine `htp`: performance mode, priority, VTCM and more; as text `performance=burst,vtcm=8`.
        cache_mode: which sequences are kept from one step to the next, as text or as a mode of `edgekv.engine`:
            `always`, `long-sequence-only(TOKENS)`, `adaptive`, `adaptive(64MiB)`, `adaptive(25%)` or `disabled`.
        prefix_cache: where computed prefixes are stored: a folder, which later processes use too; a `StoreConfig`; or
            a `PrefixStore` that several models of this bundle and engine share. None uses the prefixes baked into the
            bundle and stores nothing. Needs the mode `always` or `adaptive`.
        kv_growth: for a bundle with several contexts, with `slot` or `pointer-shift`: cache memory starts at the
            smallest context and grows to the next when it is outgrown, `staggered` (one layer after the other) or
            `together`; None allocates the largest at once.
        reproducible: give a prompt the same answer whatever the caches have of it. A row that a CPU computes depends
            in its last bit on the rows beside it, so a repeated greedy request can change its text. With this, only
            whole windows of a prompt are reused, and the rest is run as without a cache; answers are run again when
            they are part of the next prompt. Engines whose rows are alike, such as `htp`, need nothing of it.
        verify: False skips the hashes of the bundle's files.

    Raises:
        BundleError: the bundle is incomplete, changed or of another format version.
        PrefixError: an invalid configuration of the prefix cache, or a folder that cannot be written.
        UsageError: an unknown name, a number out of range, or options that exclude each other.
        EngineError: the engine is missing or refused a graph.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify)
    made = make_engine(engine, bundle=opened, threads=threads, cpu_mode=cpu_mode, htp=htp)
    caches = CacheSetup.read(
        opened,
        made,
        kv_update=kv_update,
        reserve=reserve,
        policy=policy,
        cache_mode=cache_mode,
        kv_growth=kv_growth,
        reproducible=reproducible,
    )
    return Model(opened, made, caches, prefix_cache)
