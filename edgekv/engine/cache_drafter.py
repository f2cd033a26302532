"""Drafters that read the cache and the last hidden state of the model that they draft for, such as Gemma 4's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from edgekv.bundle import HEADS_FILE, Bundle, GraphRecord, Manifest
from edgekv.engine.draft_model import DraftModel
from edgekv.engine.session import choose_context
from edgekv.engine.speculation import ModelDrafter
from edgekv.errors import UsageError
from edgekv.kv import KVCache
from edgekv.runtime import Engine, RowView, StaticGraph
from edgekv.runtime.engine import run_by
from edgekv.runtime.graph import rope_tables
from edgekv.spec import TARGET_HIDDEN, TARGET_OUT_RESULT
from quant import Encoding

if TYPE_CHECKING:
    from typing import Self

REPEAT_FIX = "Export the drafter again with --draft-for and this target."


def check_states(drafter: Bundle, target: DraftModel) -> None:
    """Refuse a drafter that was made for other hidden states than those of a model.

    Raises:
        UsageError: it was made for other weights, another vocabulary, or hidden states of another form; or the model's
            graphs give none, or its cache drops tokens.
    """
    ours, theirs, at = drafter.manifest, target.bundle.manifest, f"drafter {drafter.path}"
    assert ours.target is not None, "a drafter"

    def refuse(got: str, expected: str, fix: str = REPEAT_FIX) -> None:
        raise UsageError(at, got=got, expected=expected, fix=fix)

    if not theirs.model.gives_hidden:
        wanted = "graphs of the target that give their last hidden state"
        refuse(f"{target.bundle.path}, whose graphs do not", wanted, "Export the target with --give-hidden.")
    if ours.model.vocab != theirs.model.vocab:
        refuse(f"a vocabulary of {ours.model.vocab:,} tokens", f"the target's {theirs.model.vocab:,}")
    if ours.target.weights_sha256 != theirs.source.weights_sha256:
        found = f"one made for weights with sha256 {ours.target.weights_sha256[:12]}..."
        refuse(found, f"{theirs.source.weights_sha256[:12]}..., those of {target.bundle.path}")
    form = theirs.recipe.rotation, theirs.model.vocabulary
    if (ours.target.rotation, ours.target.vocabulary) != form:
        found = f"one made for a rotation {ours.target.rotation} and embeddings {ours.target.vocabulary}"
        refuse(found, f"{form[0]} and {form[1]}, as in the target")
    if target.pool.own.cache.room_tokens is None:
        policy = target.pool.own.cache.policy
        refuse(f"the target's context policy {policy}", "fail, which drops no tokens", "Load it with the policy fail.")


@dataclass(slots=True, eq=False, weakref_slot=True)
class CacheDraftModel:
    """A drafter's bundle on an engine. It has no cache of its own. Not thread-safe.

    Attributes:
        bundle: the bundle.
    """

    bundle: Bundle
    _engine: Engine
    _loaded: dict[int, StaticGraph] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free its graphs. Closing twice is harmless."""
        self._loaded.clear()

    def forget(self) -> None:
        """Let the target's cache go, which its graphs are bound to: they are loaded again when they are needed."""
        self._loaded.clear()

    @property
    def draft_model(self) -> CacheDraftModel:
        """Itself; see `Speculation.draft`."""
        return self

    def check(self, target: DraftModel) -> None:
        """Refuse to draft for a model whose cache or hidden state is another one.

        Raises:
            UsageError: it was made for other weights or another vocabulary, or the target's cache has other sizes or
                encodings, drops tokens, or its graphs give no hidden state.
        """
        check_states(self.bundle, target)
        ours, theirs = self.bundle.manifest, target.bundle.manifest
        assert ours.target is not None, "a drafter"

        def refuse(got: str, expected: str) -> None:
            raise UsageError(f"drafter {self.bundle.path}", got=got, expected=expected, fix=REPEAT_FIX)

        if ours.cache_geometry.groups() != theirs.cache_geometry.groups() or ours.contexts != theirs.contexts:
            found = f"a cache of {_cache_of(ours)}"
            refuse(found, f"that of the target, {_cache_of(theirs)}")
        names = [tensor.past for tensor in theirs.cache_geometry.names()]
        if wrong := [name for name in names if ours.encodings[name] != theirs.encodings[name]]:
            found = f"{wrong[0]} with the scale {ours.encodings[wrong[0]].scale:.6g}"
            refuse(found, f"{theirs.encodings[wrong[0]].scale:.6g}, as in the target's cache")
        heads = theirs.files.get(HEADS_FILE)
        if ours.target.heads_sha256 != (None if heads is None else heads.sha256):
            refuse("keys and values with other transforms", "those of the target's cache")

    def drafter(self, vocab: int) -> CacheDrafter:
        """What drafts for one text; `vocab` as for `BundleDrafter`."""
        return CacheDrafter(self, vocab)

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
        return StaticGraph(bindings, run_by(self._engine, bundle.manifest), record, cache, rope_tables(bundle.manifest))


class CacheDrafter(ModelDrafter):
    """Proposes the tokens that a drafter finds most likely behind what its target has run."""

    def __init__(self, model: CacheDraftModel, vocab: int) -> None:
        """Args: model: open while this is used. vocab: as for `ModelDrafter`."""
        super().__init__(vocab)
        self._model = model

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most `k` tokens; none where the target's last pass gave no hidden state, such as after a shared one.

        Raises:
            EngineError: the runtime failed.
        """
        session = self.session
        if session is None or (hidden := session.last_hidden) is None or not session.cache.room(1):
            return ()
        started, unknown = perf_counter_ns(), [*tokens[len(session.tokens) :]]
        cache, found = session.cache, list[int]()
        given = self._model.bundle.manifest.encodings[TARGET_OUT_RESULT]
        graph = self._model.graph(cache)
        self._read(graph, hidden, session.hidden_encoding)
        windows = graph.window(1, reads_all=True)
        # The last token has no keys yet, and no step adds any: all have its position and see what the target has run.
        view = RowView(cache.position, None, ())
        while unknown and len(found) < k:
            graph.run([unknown.pop(0)], windows, cache.position, [view])
            assert graph.hidden is not None, "a drafter gives it"
            self._read(graph, graph.hidden, given)
            if unknown:
                continue
            token = int(graph.logits[-1].argmax())
            if token >= self._vocab:
                break
            found.append(token)
            unknown.append(token)
        return self._timed(started, found)

    def _read(self, graph: StaticGraph, hidden: NDArray[Any], encoding: Encoding) -> None:
        """Put a hidden state into the graph's input, in that one's encoding."""
        wanted = self._model.bundle.manifest.encodings[TARGET_HIDDEN]
        graph.target_hidden[:] = wanted.quantize(encoding.dequantize(hidden))


def _cache_of(manifest: Manifest) -> str:
    sizes = ", ".join(
        f"{len(group.numbers) or group.layers} x {group.head_dim}" for group in manifest.cache_geometry.groups()
    )
    return f"layers x elements {sizes}, {manifest.kv_dtype}, contexts {', '.join(map(str, manifest.contexts))}"
