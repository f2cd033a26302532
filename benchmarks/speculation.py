"""What drafts bring: tokens a pass, acceptance by drafter, and time beside plain decoding.

    python -m benchmarks.speculation BUNDLE [--speculate lookup,auto] [--draft-corpus FILE] [--draft BUNDLE]
    python -m benchmarks.speculation BUNDLE --draft BUNDLE --speculate draft,auto --draft-tokens 1,3,7 --text FILE
    python -m benchmarks.speculation --host

The 50 prompts of `speculation.txt` were written for this: edits, rewrites, code, calls of tools, and open chat. With a
chat template they are messages, otherwise plain text. Each prompt is answered greedily, plainly and with every mode, in
turns; the order changes from prompt to prompt, and the answers must have the same tokens. A ratio is the time of plain
decoding divided by that with drafts, after the first token: `processor` is the processor time of all threads, which
other work on the machine disturbs less, `wall` that of the clock. The mode `off` is a second plain answer and shows the
disturbance. `us a pass` is the time in drafters, and that to choose tokens. The bundle needs graphs of
`edgekv export --draft-rows`. `--draft` is a smaller model or a drafter, which is asked for so many tokens a pass.

With `--text` the prompts are 48 tokens each, cut from a text: for models that follow no instructions.

`--host` measures drafters alone, at 8,192 tokens of history, in processor time.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.turns import by_turns
from edgekv.draft import (
    AdaptiveDrafter,
    CorpusDrafter,
    CorpusIndex,
    Drafter,
    DraftRecord,
    PromptLookup,
    Speculation,
    build_index,
)
from edgekv.engine import SpeculationStats
from edgekv.errors import EdgeKVError
from edgekv.loading import open_draft
from edgekv.runtime.load_options import EngineOptions

PROMPTS = Path(__file__).with_suffix(".txt")
FOUR = ("edit", "rewrite", "code", "tools")
HISTORY = 8192
_CUT_TOKENS, _CUT_EVERY = 48, 997
MODES = ("lookup", "corpus", "draft", "auto", "off")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and what it asks for: `edit`, `rewrite`, `code`, `tools` or `chat`."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer, the times after the first one, and what speculation brought."""

    tokens: list[int]
    processor_ns: int
    wall_ns: int
    stats: SpeculationStats


@dataclass(slots=True)
class Total:
    """Sums over the prompts of one kind in one mode."""

    prompts: int = 0
    tokens: int = 0
    passes: int = 0
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    rates: list[float] = field(default_factory=list)
    draft_ns: int = 0
    accept_ns: int = 0
    plain_ns: Counter[str] = field(default_factory=Counter)
    own_ns: Counter[str] = field(default_factory=Counter)
    ratios: list[float] = field(default_factory=list)
    different: int = 0

    def add(self, plain: Answer, own: Answer) -> None:
        stats = own.stats
        self.prompts += 1
        self.tokens += stats.tokens
        self.passes += stats.passes
        for name, each in stats.drafters.items():
            self.proposed[name] += each.proposed
            self.accepted[name] += each.accepted
        self.draft_ns += stats.draft_ns
        self.accept_ns += stats.accept_ns
        self.plain_ns.update(processor=plain.processor_ns, wall=plain.wall_ns)
        self.own_ns.update(processor=own.processor_ns, wall=own.wall_ns)
        self.rates.append(stats.tokens / stats.passes)
        self.ratios.append(plain.processor_ns / own.processor_ns)
        self.different += plain.tokens != own.tokens

    def __add__(self, other: Total) -> Total:
        both = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return Total(**both)


def read_prompts(kinds: Sequence[str]) -> list[Prompt]:
    """The prompts of these kinds; of all if there are none."""
    pieces = PROMPTS.read_text("utf-8").split("=== ")[1:]
    prompts = [Prompt(kind, text.strip()) for kind, _, text in (piece.partition("\n") for piece in pieces)]
    return [prompt for prompt in prompts if not kinds or prompt.kind in kinds]


def answer(model: edgekv.Model, prompt: Sequence[int], new_tokens: int, speculate: Speculation) -> Answer:
    """Answer greedily, in a sequence that keeps the prompt from run to run."""
    generation = model.generate(prompt, new_tokens, temperature=0, sequence=1, speculate=speculate)
    tokens = [next(generation).id]
    processor_ns, wall_ns = process_time_ns(), perf_counter_ns()
    tokens += [token.id for token in generation]
    processor_ns, wall_ns = process_time_ns() - processor_ns, perf_counter_ns() - wall_ns
    steps = len(tokens) - 1
    return Answer(
        tokens, processor_ns, wall_ns, generation.stats.speculation or SpeculationStats(steps, steps, {}, 0, 0)
    )


def compare(
    model: edgekv.Model,
    prompts: Sequence[tuple[str, Sequence[int]]],
    new_tokens: int,
    modes: Sequence[Speculation],
) -> dict[tuple[str, str], Total]:
    """Totals by mode and kind; each prompt, a kind and tokens, is answered plainly and in every mode."""
    totals: dict[tuple[str, str], Total] = {}
    for number, (kind, tokens) in enumerate(prompts):
        turns = {
            f"{at} {mode.mode}": partial(answer, model, tokens, new_tokens, mode)
            for at, mode in enumerate([Speculation("off"), *modes])
        }
        list(model.generate(tokens, 1, sequence=1))  # so that all turns find the prompt in the cache
        (plain,), *answers = by_turns(turns, 1, warm_up=0, first=number).values()
        for mode, (own,) in zip(modes, answers, strict=True):
            name = mode.mode if mode.tokens is None else f"{mode.mode} {mode.tokens}"
            total = totals.setdefault((name, kind), Total())
            if own.stats.passes and len(plain.tokens) > 1:
                total.add(plain, own)
        print(f"{number + 1} of {len(prompts)}: {kind}", file=sys.stderr, flush=True)
    return totals


def totals_table(totals: dict[tuple[str, str], Total]) -> Table:
    """A row for each mode and kind, and for the four kinds that repeat their prompts.

    `least` is that of a single prompt.
    """
    table = Table(box=SIMPLE, padding=(0, 1))
    left = ("mode", "kind")
    right = ("prompts", "tokens", "tokens a pass", "least", "accepted", "processor", "least", "wall", "us a pass")
    for name in left:
        table.add_column(name)
    for name in (*right, "different"):
        table.add_column(name, justify="right")
    for mode in dict.fromkeys(mode for mode, _ in totals):
        rows = {kind: total for (own, kind), total in totals.items() if own == mode}
        four = {"first four": sum((rows[kind] for kind in FOUR), start=Total())} if rows.keys() >= {*FOUR} else {}
        for kind, total in (rows | four).items():
            if total.passes:
                table.add_row(mode, kind, *_figures(total))
    return table


def _figures(total: Total) -> Iterator[str]:
    yield str(total.prompts)
    yield str(total.tokens)
    yield f"{total.tokens / total.passes:.2f}"
    yield f"{min(total.rates):.2f}"
    yield ", ".join(f"{name} {total.accepted[name] / total.proposed[name]:.0%}" for name in sorted(total.proposed))
    yield f"{total.plain_ns['processor'] / total.own_ns['processor']:.2f}"
    yield f"{min(total.ratios):.2f}"
    yield f"{total.plain_ns['wall'] / total.own_ns['wall']:.2f}"
    yield f"{total.draft_ns / 1e3 / total.passes:.0f} + {total.accept_ns / 1e3 / total.passes:.0f}"
    yield str(total.different)


def cut(model: edgekv.Model, text: Path, count: int) -> list[tuple[str, list[int]]]:
    """Prompts from a text."""
    tokens = model.encode(text.read_text("utf-8"))
    starts = range(0, len(tokens) - _CUT_TOKENS, _CUT_EVERY)
    return [("text", tokens[start : start + _CUT_TOKENS]) for start in starts][:count]


def pass_times(model: edgekv.Model) -> str:
    """Wall times of passes by their rows, in the last texts."""
    record = model.engine.drafting.record
    times = (f"{rows} rows {record.pass_ns(rows) / 1e6:.1f} ms" for rows in (1, *model.verify_rows))
    return f"A pass of {', '.join(times)}."


def prompt_tokens(model: edgekv.Model, text: str) -> list[int]:
    """The tokens of a prompt, as a message of a conversation if the model has a chat template."""
    try:
        templates = model.chat_templates
    except EdgeKVError:
        return model.read(text + "\n")
    return model.read(model.encode_chat(templates.render([{"role": "user", "content": text}])))


def host_table(seed: int = 0) -> Table:
    """Processor time of drafters at 8,192 tokens: of the first proposal, which reads them all, and of later ones."""
    random = np.random.default_rng(seed)
    words = random.zipf(1.3, 4 * HISTORY) % 49_152
    phrases = [words[at : at + 24] for at in random.integers(0, HISTORY, 4 * HISTORY // 24)]
    text = np.concatenate(phrases).tolist()
    corpus = random.permutation(words.repeat(32)).astype(np.uint32)
    index = CorpusIndex(build_index(corpus), len(corpus))
    drafters: dict[str, Drafter] = {
        "lookup": PromptLookup(),
        f"corpus of {len(corpus):,} tokens": CorpusDrafter(index),
        "auto, both": AdaptiveDrafter([PromptLookup(), CorpusDrafter(index)], (8, 16), DraftRecord(), 15),
    }
    table = Table(box=SIMPLE, padding=(0, 1))
    for name in ("drafter", "first, ms", "median, us", "longest of 500, us"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for name, drafter in drafters.items():
        times_ns: list[int] = []
        for at in range(HISTORY, HISTORY + 501):
            known = text[:at]
            started = process_time_ns()
            drafter.propose(known, 15)
            times_ns.append(process_time_ns() - started)
        later = times_ns[1:]
        table.add_row(name, f"{times_ns[0] / 1e6:.1f}", f"{median(later) / 1e3:.0f}", f"{max(later) / 1e3:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="exported with --draft-rows")
    parser.add_argument("--host", action="store_true", help="measure drafters alone")
    parser.add_argument("--speculate", default="lookup,auto", help=f"modes, comma-separated: {', '.join(MODES)}")
    parser.add_argument("--draft-corpus", type=Path)
    parser.add_argument("--draft", type=Path, help="a bundle of a smaller model or of a drafter")
    parser.add_argument("--draft-tokens", default="", help="of the mode draft a pass, comma-separated")
    parser.add_argument("--text", type=Path, help="to cut prompts from")
    parser.add_argument("--prompts", type=int, default=16, help="number of these")
    parser.add_argument("--kinds", default="", help="of prompts, comma-separated; all if left out")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--engine", default="cpu")
    parser.add_argument("--cpu-mode", default="fast")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if args.host:
        console.print(host_table())
    if args.bundle is None:
        return
    on_cpu = args.engine == "cpu"
    engine = EngineOptions(
        engine=args.engine, threads=args.threads if on_cpu else None, cpu_mode=args.cpu_mode if on_cpu else None
    )
    counts = [int(count) for count in args.draft_tokens.split(",") if count] or [None]
    try:
        with ExitStack() as stack:
            model = stack.enter_context(
                edgekv.load(args.bundle, engine=engine.engine, threads=engine.threads, cpu_mode=engine.cpu_mode)
            )
            corpus = None if args.draft_corpus is None else model.open_corpus(args.draft_corpus)
            draft = None if args.draft is None else open_draft(args.draft, engine)
            if draft is not None:
                stack.callback(draft.close)
            modes = []
            for name in args.speculate.split(","):
                given = (corpus if name in ("corpus", "auto") else None, draft if name in ("draft", "auto") else None)
                modes += [Speculation(name, *given, tokens=count) for count in (counts if name == "draft" else [None])]
            if args.text is None:
                written = read_prompts(args.kinds.split(",") if args.kinds else ())
                prompts = [(prompt.kind, prompt_tokens(model, prompt.text)) for prompt in written]
            else:
                prompts = cut(model, args.text, args.prompts)
            console.print(totals_table(compare(model, prompts, args.new_tokens, modes)))
            console.print(pass_times(model))
    except EdgeKVError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
