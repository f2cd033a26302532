"""A sequence on disk: its tokens and its KV cache, so that a later process can continue without prefill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgekv.engine.engine import Engine
from edgekv.errors import UsageError
from edgekv.kv import StateError, read_state, write_state
from edgekv.kv.policies.text import policy_text
from edgekv.prefix import prefix_fingerprint


def load_sequence(engine: Engine, sequence: int, file: Path) -> int:
    """Restore a file written by `save_sequence`; if it does not exist, the sequence stays empty.

    Call it before the first generation of the sequence. The next prompt is still the whole text; tokens that it shares
    with the saved ones are not run again.

    Args:
        engine: of the same bundle, runtime and context policy.
        sequence: the id for `Model.generate`.
        file: the file.

    Returns:
        Tokens restored.

    Raises:
        StateError: the file is damaged, or of another bundle, engine or context policy; the sequence is unchanged.
        UsageError: a cache mode that does not keep every sequence.
        MemoryBudgetError: there is no memory for the sequence.
    """
    if not engine.caches.mode.keeps_all:
        fix = "Use the cache mode always or adaptive."
        raise UsageError(
            "session", got=f"the cache mode {engine.caches.mode}", expected="one that keeps sequences", fix=fix
        )
    if not file.exists():
        return 0
    state = read_state(file, fingerprint=_fingerprint(engine), rows_bytes=engine.pool.default.cache.max_state_bytes)
    if len(state.tokens) != state.tokens_seen:
        got = f"{len(state.tokens)} tokens of {state.tokens_seen}"
        raise StateError(f"state {file}: tokens", got=got, expected="all", fix="Remove the file.")
    engine.pool.default.cache.check_state(state)
    session = engine.pool.get_or_create(sequence)
    session.cache.restore(state)
    session.adopt(state.tokens)
    return len(state.tokens)


def save_sequence(engine: Engine, sequence: int, file: Path) -> int:
    """Write a sequence atomically; an existing file is replaced.

    Returns:
        Tokens saved; 0, without a file, if the sequence holds none.

    Raises:
        StateError: the file cannot be written.
        UsageError: the sequence was computed with an adapter.
    """
    session = engine.pool.get(sequence)
    if session is not None:
        session.settle()
        if session.adapter is not None:
            fix = "Generate without an adapter."
            raise UsageError("session", got=f"one with the adapter {session.adapter}", expected="none", fix=fix)
    if session is None or session.is_empty or session.cache.dirty or session.cache.tokens_seen != len(session.tokens):
        return 0
    write_state(replace(session.cache.state, tokens=tuple(session.tokens)), file, fingerprint=_fingerprint(engine))
    return len(session.tokens)


def _fingerprint(engine: Engine) -> str:
    """What the rows depend on, as readable text, so that an error shows which part differs."""
    manifest = engine.caches.manifest
    digest, policy = prefix_fingerprint(manifest, engine.name)[:16], policy_text(engine.caches.policy)
    return f"{manifest.model.model_type} bundle {digest} on {engine.name}, context policy {policy}"
