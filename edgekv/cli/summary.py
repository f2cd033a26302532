"""The statistics of a generation in one line, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.system import format_bytes

if TYPE_CHECKING:
    from edgekv.engine import BeamStats, CacheUse, GenerationStats
    from edgekv.runtime import ExpertStats


def engine_and_mode(engine: str) -> str:
    """The name of an engine, with the mode of the engine `cpu` in all cases: `emulate` is not part of its name."""
    return "cpu-emulate" if engine == "cpu" else engine


def summary(stats: GenerationStats) -> str:
    """The statistics of a generation."""
    times, cache, setup = stats.times, stats.cache, stats.setup
    first = "" if times.first_token_ms is None else f", first token {times.first_token_ms:.0f} ms"
    decode = ""
    if times.decode_ms_per_token is not None and times.tokens_per_second is not None:
        decode = f", {times.decode_ms_per_token:.1f} ms/token ({times.tokens_per_second:.1f} tokens/s)"
    reserve = "" if setup.reserve is None else f" {setup.reserve:g}"
    restored = f" ({cache.restored_tokens} restored)" if cache.restored_tokens else ""
    mode = "" if setup.cache_mode == "always" else f", {setup.cache_mode}, {cache.computed_tokens} tokens computed"
    growth = "" if setup.kv_growth is None else f" ({cache.bytes_peak:,} at most)"
    seed = "" if stats.seed is None else f", seed {stats.seed}"
    return (
        f"[{engine_and_mode(setup.engine)}: {stats.prompt_tokens}{restored} + {stats.generated_tokens} tokens, "
        f"ended by {stats.stop_reason or 'an interruption'}; "
        f"prefill {times.prefill_ms:.0f} ms{first}{decode}, host {times.host_us_per_step:.0f} us/step; "
        f"KV {setup.kv_update}{reserve}{mode}: {cache.bytes_held:,} bytes held{growth}, "
        f"{cache.bytes_copied:,} copied{_eviction(cache)}{seed}{speculation_summary(stats)}]"
    )


def expert_line(stats: ExpertStats) -> str:
    """What became of the experts that passes have read."""
    held, budget, most, read = map(
        format_bytes, (stats.held_bytes, stats.budget_bytes, stats.max_held_bytes, stats.read_bytes)
    )
    return (
        f"[experts: {stats.hits:,} of {stats.hits + stats.misses:,} were in memory, {read} read from files; "
        f"{held} of {budget} in memory now, {most} at most]"
    )


def speculation_summary(stats: GenerationStats) -> str:
    """What speculation brought, behind a semicolon; empty without it."""
    speculation = stats.speculation
    if speculation is None or speculation.tokens_per_pass is None:
        return ""
    drafters = (
        f"{name} {drafts.accepted} of {drafts.proposed} drafts"
        + (f", {drafts.branched} on branches" if drafts.branched else "")
        for name, drafts in speculation.drafters.items()
    )
    host_us = (speculation.draft_ns + speculation.accept_ns) / 1e3 / speculation.passes
    listed = "".join(f", {line}" for line in drafters)
    return f"; {speculation.tokens_per_pass:.2f} tokens a pass{listed}, drafting {host_us:.0f} us/pass"


def defaults_line(stats: GenerationStats, ignored: list[str]) -> str | None:
    """The parameters that the bundle set; None if it set none.

    Args:
        stats: statistics of the generation.
        ignored: fields of generation_config.json that are not supported.
    """
    if not stats.bundle_defaults:
        return None
    listed = ", ".join(f"{name} {getattr(stats.sampling, name)}" for name in stats.bundle_defaults)
    unsupported = f"; not supported: {', '.join(ignored)}" if ignored else ""
    return f"[defaults of the checkpoint's generation_config.json: {listed}{unsupported}]"


def _eviction(cache: CacheUse) -> str:
    evicted = f", {cache.evicted_tokens} tokens evicted" if cache.evicted_tokens else ""
    cost = cache.requantization
    if cost is None or not cost.keys:
        return evicted
    real = "" if cost.rms is None else f", {cost.rms:.2g} in real numbers"
    clipped = f", {cost.clipped} elements clipped" if cost.clipped else ""
    return f"{evicted}, moved keys off by {cost.rms_steps:.3f} steps rms{real}, {cost.max_steps:.2f} at most{clipped}"


def beam_summary(stats: BeamStats) -> str:
    """The statistics of a beam search."""
    decode = "" if stats.decode_ms_per_token is None else f", {stats.decode_ms_per_token:.1f} ms/token of all beams"
    setup = stats.setup
    reserve = "" if setup.reserve is None else f" {setup.reserve:g}"
    prompt = f"{engine_and_mode(setup.engine)}: {stats.prompt_tokens} tokens"
    return (
        f"[{prompt}, then {stats.num_beams} beams of {stats.decoded_tokens}; "
        f"prefill {stats.prefill_ms:.0f} ms{decode}, host {stats.host_us_per_step:.0f} us/step; "
        f"KV {setup.kv_update}{reserve}: {stats.kv_bytes_held:,} bytes held, {stats.kv_bytes_beside:,} of them beside "
        f"the cache, {stats.kv_bytes_copied:,} copied, {stats.kv_bytes_gathered:,} of them gathered]"
    )
