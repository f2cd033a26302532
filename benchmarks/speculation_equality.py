"""Whether drafts change anything: random calls, each plainly and with drafts, on two models that see the same calls.

    python -m benchmarks.speculation_equality BUNDLE... [--engine cpu] [--runs 1000] [--tokens 60] [--seed 0]

Compared are tokens, text, why it ended, and every bit of the KV cache afterwards. Bundles, modes of the CPU, update
strategies, context policies, growth and prefix caches are drawn for each pair of models; drafters, prompts, turns of a
conversation, sampling, penalties, stop texts, grammars and calls that are left early for each run. All of it follows
from the seed. The bundles need graphs of `edgekv export --draft-rows`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import edgekv
from edgekv import SamplingParams
from edgekv.bundle import open_bundle
from edgekv.draft import DraftTree, Speculation
from edgekv.engine import SpeculationStats
from edgekv.kv import STRATEGIES, CacheState
from edgekv.text import Grammar

TEXT = Path(__file__).parent.parent / "models" / "stdlib-4m" / "heldout.txt"
POLICIES = ("fail", "sliding-window", "sinks(2, 40)", "keydiff(48)")
RUNS_OF_A_PAIR = 10
STOPS = ("\n\n", "return", ":", "self.")


class Oracle:
    """Proposes the true continuation of a text, of random length and with random errors, often as one of branches."""

    name = "oracle"

    def __init__(self, text: Sequence[int], vocab: int, chance: random.Random) -> None:
        """Args: text: prompt and output. vocab: of the errors. chance: of lengths and errors."""
        self._text = list(text)
        self._vocab = vocab
        self._chance = chance
        self._right = chance.choice((1.0, 0.9, 0.6))

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        chance, at = self._chance, len(tokens)
        true = self._text[at : at + chance.randint(0, k)]
        chains = [self._spoilt(true)]
        while chance.random() < 0.5:
            chains.append(self._spoilt(true))
        return chains[0] if len(chains) == 1 else DraftTree.of(chains, k)

    def _spoilt(self, true: Sequence[int]) -> list[int]:
        chance = self._chance
        return [token if chance.random() < self._right else chance.randrange(self._vocab) for token in true]

    def accepted(self, n: int) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class Outcome:
    """What a call brought, and the cache afterwards."""

    tokens: list[int]
    text: str
    reason: str | None
    cache: CacheState
    speculation: SpeculationStats | None

    def differs(self, other: Outcome) -> str:
        """The first difference, in words; empty if there is none."""
        for name in ("tokens", "text", "reason"):
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name}: {mine!r} plainly, {theirs!r} with drafts"
        rows = other.cache.rows
        if self.cache.positions != other.cache.positions:
            return f"cache: {len(self.cache.positions)} tokens plainly, {len(other.cache.positions)} with drafts"
        wrong = [name for name, held in self.cache.rows.items() if not np.array_equal(held, rows[name])]
        return f"cache: other bits in {len(wrong)} tensors" if wrong else ""


def call(model: edgekv.Model, prompt: list[int], params: SamplingParams, most: int, options: dict[str, Any]) -> Outcome:
    """Generate at most `most` tokens."""
    with model.generate(prompt, params, **options) as generation:
        tokens = [token for token, _ in zip(generation, range(most), strict=False)]
    session = model.session if options.get("sequence") is None else model.sequences.get(options["sequence"])
    assert session is not None, "held"
    text = "".join(token.text for token in tokens)
    ids, stats = [token.id for token in tokens], generation.stats
    return Outcome(ids, text, generation.stop_reason, session.cache.state, stats.speculation)


def params_of(chance: random.Random, most: int, *, grammar: bool) -> SamplingParams:
    """Random sampling parameters, for `most` tokens at most."""
    options: dict[str, Any] = {"max_new_tokens": chance.randint(1, most), "ignore_eos": chance.random() < 0.5}
    if chance.random() < 0.5:
        options |= {"temperature": chance.choice((0.5, 0.8, 1.2)), "seed": chance.randrange(1 << 30)}
        options |= chance.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}))
    options |= chance.choice(({}, {}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5, "presence_penalty": 0.3}))
    if chance.random() < 0.3:
        options["stop"] = [chance.choice(STOPS)]
    if grammar:
        options["grammar"] = Grammar.regex(r'\{"name": "[a-z ]{1,12}", "size": [0-9]{1,4}, "color": "(red|green)"\}')
    return SamplingParams(**options)


def options_of(bundle: str, chance: random.Random) -> dict[str, Any]:
    """A random cache that the bundle can have."""
    manifest = open_bundle(bundle, verify=False).manifest
    in_columns = manifest.cache_geometry.key_layout == "columns"
    strategies = [name for name in STRATEGIES if name != "mirror" or not in_columns]
    options: dict[str, Any] = {"kv_update": chance.choice(strategies), "policy": chance.choice(POLICIES)}
    can_grow = len(manifest.contexts) > 1 and options["kv_update"] in ("slot", "pointer-shift") and not in_columns
    if can_grow and chance.random() < 0.4:
        options["kv_growth"] = "together"
    return options


def pair(
    bundle: str,
    engine: str,
    text: list[int],
    chance: random.Random,
    runs: int,
    tokens: int,
    stack: ExitStack,
    counts: Counter[str],
) -> list[str]:
    """Run calls on a pair of models; return the differences in words."""
    mode = chance.choice(("emulate", "exact16", "fast")) if engine == "cpu" else None
    is_shared = chance.random() < 0.4
    options = options_of(bundle, chance)
    plain, drafting = [
        stack.enter_context(edgekv.load(bundle, engine=engine, cpu_mode=mode, **options, **caches))
        for caches in [
            {"prefix_cache": stack.enter_context(TemporaryDirectory())} if is_shared else {} for _ in range(2)
        ]
    ]
    vocab, context = plain.bundle.manifest.model.vocab, plain.bundle.manifest.context
    setup = f"{Path(bundle).name} {mode or engine} {options}{' prefix cache' if is_shared else ''}"
    found: list[str] = []
    turns: dict[int | None, list[int]] = {}
    for run in range(runs):
        sequence = chance.choice((None, 1, 2))
        earlier = turns.get(sequence, [])
        at, length = chance.randrange(len(text) - context), chance.randint(1, context // 2)
        prompt = earlier + text[at : at + chance.randint(1, 8)] if earlier else text[at : at + length]
        if len(prompt) > context - 16:
            prompt, earlier = text[at : at + length], []
        params = params_of(chance, tokens, grammar=chance.random() < 0.1)
        most = chance.randint(1, 20) if chance.random() < 0.2 else 1000
        wanted = call(plain, prompt, params, most, {"sequence": sequence})
        kind = chance.choice(("oracle", "oracle", "lookup", "corpus", "auto"))
        speculate: Any = Speculation(drafter=Oracle(prompt + wanted.tokens, vocab, chance))
        if kind != "oracle":
            corpus = drafting.open_corpus(TEXT) if kind == "corpus" else None
            speculate = Speculation(
                kind, corpus, tree=not drafting.engine.drafting.only_chains and chance.random() < 0.5
            )
        got = call(drafting, prompt, params, most, {"sequence": sequence, "speculate": speculate})
        stats = got.speculation
        assert stats is not None, "speculates"
        counts.update(runs=1, passes=stats.passes, tokens=stats.tokens, accepted=stats.accepted)
        counts["on branches"] += sum(each.branched for each in stats.drafters.values())
        counts["runs with accepted drafts"] += stats.accepted > 0
        turns[sequence] = prompt + wanted.tokens
        if difference := wanted.differs(got):
            found.append(f"{setup}: run {run}, {kind}, {params.described()}: {difference}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE")
    parser.add_argument("--engine", default="cpu", choices=("cpu", "htp"))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=60, help="new tokens of a run at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    number = 0
    while counts["runs"] < args.runs:
        chance = random.Random(f"{args.seed} {number}")
        bundle = args.bundles[number % len(args.bundles)]
        number += 1
        with ExitStack() as stack:
            text = open_bundle(bundle).tokenizer().encode(TEXT.read_text()[:200_000]).ids
            runs = min(RUNS_OF_A_PAIR, args.runs - counts["runs"])
            new = pair(bundle, args.engine, text, chance, runs, args.tokens, stack, counts)
            wrong += new
        print("\n".join([*new, f"{dict(counts)}, {len(wrong)} differ"]), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
