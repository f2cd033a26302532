"""Drafters that read what their target has run: its cache, such as Gemma 4's, or the last hidden state of every token.

A head has a cache of its own, which follows the model's: row t is of the hidden state of token t and of token t+1.
Rows of drafts have read guesses of hidden states, so they are dropped before the next draft, and the rows of what the
model has run since then are filled in. Where the model ran no token because its keys and values were restored, hidden
states are unknown: the head's cache begins with the first one that is known, at its position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import HEADS_FILE, Bundle, GraphRecord, Manifest
from edgekv.engine.drafting import Drafting
from edgekv.engine.session import Graphs, Session, choose_context, common_tokens
from edgekv.errors import UsageError
from edgekv.kv import KVCache
from edgekv.runtime import Engine, Row, StaticGraph
from edgekv.runtime.engine import run_by
from edgekv.runtime.graph import HostTables, rope_tables
from edgekv.spec import TARGET_HIDDEN, TARGET_OUT_RESULT
from quant import Encoding

if TYPE_CHECKING:
    from typing import Self

_REPEAT_FIX = "Export the drafter again with --draft-for and this target."


def _check_states(drafter: Bundle, target: Drafting) -> None:
    """Refuse a drafter that was made for other hidden states than those of a model.

    Raises:
        UsageError: it was made for other weights, another vocabulary, or hidden states of another form; or the model's
            graphs give none, or its cache drops tokens.
    """
    ours, theirs, at = drafter.manifest, target.bundle.manifest, f"drafter {drafter.path}"
    assert ours.target is not None, "a drafter"

    def refuse(got: str, expected: str, fix: str = _REPEAT_FIX) -> None:
        raise UsageError(at, got=got, expected=expected, fix=fix)

    if not theirs.model.gives_hidden:
        needed = "graphs of the target that give their last hidden state"
        refuse(f"{target.bundle.path}, whose graphs do not", needed, "Export the target with --give-hidden.")
    if ours.model.vocab != theirs.model.vocab:
        refuse(f"a vocabulary of {ours.model.vocab:,} tokens", f"the target's {theirs.model.vocab:,}")
    if ours.target.weights_sha256 != theirs.source.weights_sha256:
        made_for = f"one made for weights with sha256 {ours.target.weights_sha256[:12]}..."
        refuse(made_for, f"{theirs.source.weights_sha256[:12]}..., those of {target.bundle.path}")
    form = theirs.recipe.rotation, theirs.model.vocabulary
    if (ours.target.rotation, ours.target.vocabulary) != form:
        made_for = f"one made for a rotation {ours.target.rotation} and embeddings {ours.target.vocabulary}"
        refuse(made_for, f"{form[0]} and {form[1]}, as in the target")
    if target.pool.default.cache.room_tokens is None:
        policy = target.pool.default.cache.policy
        refuse(f"the target's context policy {policy}", "fail, which drops no tokens", "Load it with the policy fail.")


class TargetDraftModel(ABC):
    """The bundle of a drafter that reads its target's state, on an engine. Not thread-safe.

    Attributes:
        bundle: the bundle.
    """

    bundle: Bundle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def draft_model(self) -> Self:
        """Itself; see `Speculation.draft`."""
        return self

    @abstractmethod
    def close(self) -> None:
        """Free what it holds; it is loaded again when it is needed. Closing twice is harmless."""

    def forget(self) -> None:
        """Let the target's cache go: as `close`."""
        self.close()

    @abstractmethod
    def check_target(self, target: Drafting) -> None:
        """Refuse to draft for another model than the one that it was made for.

        Raises:
            UsageError: it was made for other weights, another vocabulary, or hidden states of another form; or the
                target's graphs give none, its cache or contexts are others, or it drops tokens.
        """

    @abstractmethod
    def propose(self, tokens: Sequence[int], k: int, vocab: int, target: Session | None) -> list[int]:
        """See `Propose`: none where the target's last pass gave no hidden state, such as after a shared one.

        Raises:
            EngineError: the runtime failed.
        """


@dataclass(eq=False)
class CacheDraftModel(TargetDraftModel):
    """A drafter's bundle on an engine. It has no cache of its own. Not thread-safe.

    Attributes:
        bundle: the bundle.
    """

    bundle: Bundle
    _engine: Engine
    _loaded: dict[int, StaticGraph] = field(default_factory=dict)

    def close(self) -> None:
        self._loaded.clear()

    def check_target(self, target: Drafting) -> None:
        _check_states(self.bundle, target)
        ours, theirs = self.bundle.manifest, target.bundle.manifest
        assert ours.target is not None, "a drafter"

        def refuse(got: str, expected: str) -> None:
            raise UsageError(f"drafter {self.bundle.path}", got=got, expected=expected, fix=_REPEAT_FIX)

        if ours.cache_geometry.groups() != theirs.cache_geometry.groups() or ours.contexts != theirs.contexts:
            difference = f"a cache of {_cache_of(ours)}"
            refuse(difference, f"that of the target, {_cache_of(theirs)}")
        names = [tensor.past for tensor in theirs.cache_geometry.names()]
        if wrong := [name for name in names if ours.encodings[name] != theirs.encodings[name]]:
            difference = f"{wrong[0]} with the scale {ours.encodings[wrong[0]].scale:.6g}"
            refuse(difference, f"{theirs.encodings[wrong[0]].scale:.6g}, as in the target's cache")
        heads = theirs.files.get(HEADS_FILE)
        if ours.target.heads_sha256 != (None if heads is None else heads.sha256):
            refuse("keys and values with other transforms", "those of the target's cache")

    def propose(self, tokens: Sequence[int], k: int, vocab: int, target: Session | None) -> list[int]:
        if target is None or (hidden := target.last_hidden) is None or not target.cache.room(1):
            return []
        unknown, drafts, cache = [*tokens[len(target.tokens) :]], list[int](), target.cache
        encodings = self.bundle.manifest.encodings
        graph = self.graph(cache)

        def read(hidden: NDArray[Any], encoding: Encoding) -> None:
            """Put a hidden state into the graph's input, in that one's encoding."""
            graph.target_hidden[:] = encodings[TARGET_HIDDEN].quantize(encoding.dequantize(hidden))

        read(hidden, target.hidden_encoding)
        windows = graph.window(1, reads_all=True)
        # The last token has no keys yet, and no step adds any: all have its position and see what the target has run.
        while unknown and len(drafts) < k:
            graph.run_rows([Row(unknown.pop(0), cache.position, None, ())], windows)
            assert graph.hidden is not None, "a drafter gives it"
            read(graph.hidden, encodings[TARGET_OUT_RESULT])
            if unknown:
                continue
            token = int(graph.logits[-1].argmax())
            if token >= vocab:
                break
            drafts.append(token)
            unknown.append(token)
        return drafts

    def graph(self, cache: KVCache) -> StaticGraph:
        """The graph that reads this cache, as many tokens as it holds."""
        contexts = {record.context: record for record in self.bundle.manifest.graphs}
        context = choose_context(cache.length + 1, sorted(contexts))
        if context not in self._loaded:
            self._loaded[context] = self._load(contexts[context], cache)
        graph = self._loaded[context]
        graph.use(cache)
        return graph

    def _load(self, record: GraphRecord, cache: KVCache) -> StaticGraph:
        bundle = self.bundle
        bindings = [self._engine.load(bundle.part_path(part), part.name) for part in record.parts]
        tables = HostTables(rope_tables(bundle.manifest))
        return StaticGraph(bindings, run_by(self._engine, bundle.manifest), record, cache, tables)


def _cache_of(manifest: Manifest) -> str:
    sizes = ", ".join(
        f"{len(group.numbers) or group.layers} x {group.width}" for group in manifest.cache_geometry.groups()
    )
    return f"layers x elements {sizes}, {manifest.kv_dtype}, contexts {', '.join(map(str, manifest.contexts))}"


@dataclass(slots=True)
class HeadRows:
    """The head's cache for one text of the target.

    Attributes:
        cache: a row for each token but the first that its rows have read, and then those of drafts.
        start: position of the first row.
        text: the tokens that the rows have read, with those before them.
    """

    cache: KVCache
    start: int = 0
    text: list[int] = field(default_factory=list)

    def follow(self, text: Sequence[int], first: int, most: int) -> int:
        """Keep the rows that a text begins with; return the position of the next one.

        Args:
            text: known tokens.
            first: the first position whose hidden state is known.
            most: the last position to return.
        """
        stop = min(common_tokens(self.text, text) - 1, most)
        if self.cache.dirty or stop <= self.start or stop < first:
            self.cache.reset()
            self.start = stop = first
        else:
            self.cache.rewind_to(stop - self.start)
        self.text = [*text[: stop + 1]]
        return stop


@dataclass(eq=False)
class HeadDraftModel(TargetDraftModel):
    """The bundle of a head on an engine, with a cache for each text of its target. Not thread-safe.

    Attributes:
        bundle: the bundle.
    """

    bundle: Bundle
    _engine: Engine
    _make_cache: Callable[[], KVCache]
    _rows: WeakKeyDictionary[Session, HeadRows] = field(default_factory=WeakKeyDictionary)
    _loaded: Graphs | None = None

    def close(self) -> None:
        self._loaded = None
        self._rows.clear()

    def check_target(self, target: Drafting) -> None:
        _check_states(self.bundle, target)
        ours, theirs = self.bundle.manifest, target.bundle.manifest
        if ours.contexts != theirs.contexts:
            got, expected = (f"contexts {', '.join(map(str, manifest.contexts))}" for manifest in (ours, theirs))
            at = f"drafter {self.bundle.path}"
            raise UsageError(at, got=got, expected=f"{expected}, those of the target", fix=_REPEAT_FIX)

    def propose(self, tokens: Sequence[int], k: int, vocab: int, target: Session | None) -> list[int]:
        if target is None or target.last_hidden is None:
            return []
        states, known, drafts = target.hidden, len(target.tokens), list[int]()
        rows = self.rows(target)
        # The last row is run again if it is known: its logits are wanted.
        stop = rows.follow(tokens[: known + 1], states.first, known - 1)
        room = rows.cache.room_tokens
        if room is None or room < len(tokens) - stop + k:
            return []
        unread = [*tokens[stop + 1 :]]
        graph = self.run(rows, unread[: known - stop], states.rows(stop, known), target.hidden_encoding)
        rows.text = [*tokens[: known + 1]]
        unread = unread[known - stop :]
        while True:
            if not unread:
                token = int(graph.logits[-1].argmax())
                if token >= vocab:
                    break
                drafts.append(token)
                unread.append(token)
            if len(drafts) == k:
                break
            hidden = graph.hidden
            assert hidden is not None, "a drafter gives it"
            guessed = self.bundle.manifest.encodings[TARGET_OUT_RESULT]
            graph = self.run(rows, [unread.pop(0)], np.array(hidden[-1:]), guessed)
        return drafts

    def rows(self, session: Session) -> HeadRows:
        """The cache of the text in a session of the target."""
        rows = self._rows.get(session)
        if rows is None:
            rows = HeadRows(self._make_cache())
            self._rows[session] = rows
        return rows

    def run(self, rows: HeadRows, tokens: Sequence[int], hidden: NDArray[Any], encoding: Encoding) -> StaticGraph:
        """Append rows; return the graph that has run the last one.

        Args:
            rows: the cache.
            tokens: of the rows, at least one.
            hidden: the hidden states of the tokens before them, `[T, H]`.
            encoding: of these.

        Raises:
            EngineError: the runtime failed.
        """
        cache, done = rows.cache, 0
        if self._loaded is None:
            self._loaded = Graphs(self.bundle, self._engine, cache)
        self._loaded.use(cache)
        cache.expect(len(tokens))
        entry = self.bundle.manifest.encodings[TARGET_HIDDEN]
        while done < len(tokens):
            most = min(len(tokens) - done, cache.step_tokens)
            graph = self._loaded.choose("prefill", most)
            step = slice(done, done + min(graph.ar, most))
            part, done = tokens[step], step.stop
            graph.target_hidden[: len(part)] = entry.quantize(encoding.dequantize(hidden[step]))
            windows = graph.window(len(part))
            graph.run(part, windows, rows.start + cache.position)
            cache.commit(len(part))
        return graph
