"""Ten short questions to a bundle on two engines: the same greedy answers, token for token?

    python -m benchmarks.ten_questions BUNDLE [--engine htp] [--limit 12]

The first engine is the CPU in the mode `emulate`. Where an answer differs, the table shows the two candidates at the
first different token and how far apart the CPU's logits hold them, in steps of their integers and in nats: a gap of a
few steps is a tie that rounding decides. The last line says whether nodes of the bundle's graphs compute in float on
the HTP; a bundle that was exported without that check is checked now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import edgekv
from devices import find
from edgekv.bundle import Bundle
from edgekv.errors import EdgeKVError
from exporters.htp.check import floating_nodes

QUESTIONS = (
    "What is the capital of Italy?",
    "What color is the sky on a clear day?",
    "How many days are in a week?",
    "What is 2 + 2?",
    "What is the opposite of hot?",
    "Which planet do we live on?",
    "What do bees make?",
    "What is frozen water called?",
    "Name one primary color.",
    "Who wrote Romeo and Juliet?",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers part.

    Attributes:
        at: number of equal tokens before.
        one: the first engine's next token, as text.
        other: the second's.
        steps: distance of their logits on the first engine, in steps of the logits' encoding.
        nats: the same in the logits' unit.
    """

    at: int
    one: str
    other: str
    steps: float
    nats: float


@dataclass(frozen=True, slots=True)
class Answered:
    """A question and its answer on two engines; `difference` is None if the tokens are equal."""

    question: str
    answer: str
    tokens: int
    difference: Difference | None


def ask(one: edgekv.Model, other: edgekv.Model, question: str, limit: int) -> Answered:
    """Answer greedily, with `limit` tokens at most, on a bundle that is loaded on two engines."""
    params = edgekv.SamplingParams(max_new_tokens=limit)
    messages = [{"role": "user", "content": question}]
    generation = one.generate(messages=messages, params=params)
    tokens = list(generation)
    ids = [token.id for token in tokens]
    others = [token.id for token in other.generate(messages=messages, params=params)]
    answer = "".join(token.text for token in tokens)
    found = _difference(one, generation.prompt, ids, others)
    return Answered(question, answer, len(ids), found)


def _difference(
    model: edgekv.Model, prompt: Sequence[int], ids: Sequence[int], others: Sequence[int]
) -> Difference | None:
    at = next((at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)
    if at is None:
        return None
    pair = (ids[at], others[at])
    logits = model.score([*prompt, *ids[:at]])[-1]
    nats = float(abs(logits[pair[0]] - logits[pair[1]]))
    one, other = (model.tokenizer.decode([each], skip_special_tokens=False) for each in pair)
    return Difference(at, one, other, nats / model.bundle.manifest.encodings["logits"].scale, nats)


def answers_table(found: Sequence[Answered]) -> Table:
    """A row for each question."""
    equal = sum(each.difference is None for each in found)
    table = Table(title=f"{equal} of {len(found)} answers have the same tokens", box=SIMPLE, padding=(0, 1))
    for column in ("question", "answer", "tokens", "the same"):
        table.add_column(column, justify="right" if column == "tokens" else "left")
    for each in found:
        table.add_row(each.question, each.answer.strip(), str(each.tokens), _verdict(each.difference))
    return table


def _verdict(found: Difference | None) -> str:
    if found is None:
        return "yes"
    return f"{found.at}, then {found.one!r} or {found.other!r}, {found.steps:.0f} steps ({found.nats:.3f} nats) apart"


def float_nodes(bundle: Bundle) -> list[str]:
    """The nodes that compute in float on the bundle's device."""
    manifest = bundle.manifest
    if manifest.htp_check != "not-run":
        return manifest.floating_nodes
    files = {bundle.part_path(part) for graph in manifest.graphs if graph.role != "score" for part in graph.parts}
    return floating_nodes(sorted(files), find(manifest.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="a bundle of ONNX graphs with a chat template")
    parser.add_argument("--engine", default="htp", help="to compare with the CPU")
    parser.add_argument("--limit", type=int, default=12, help="tokens of an answer at most")
    args = parser.parse_args()
    try:
        found = []
        with edgekv.load(args.bundle) as cpu, edgekv.load(args.bundle, engine=args.engine) as other:
            for number, question in enumerate(QUESTIONS, start=1):
                found.append(ask(cpu, other, question, args.limit))
                print(f"{number} of {len(QUESTIONS)}: {found[-1]}", file=sys.stderr, flush=True)
            console = Console()
            console.print(answers_table(found))
            console.print(f"{len(float_nodes(cpu.bundle))} nodes compute in float on {cpu.bundle.manifest.device}")
    except EdgeKVError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
