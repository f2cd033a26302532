"""Tokens a pass that drafts would bring if all are checked, linear and as trees, counted from a model's own answers.

    python -m benchmarks.tokens_per_pass BUNDLE [--draft-corpus FILE] [--rows 8,16] [--new-tokens 96] [--cpu-mode fast]

The prompts are those of `benchmarks.speculation`. Drafts change no text, so it is generated once; a pass brings the
tokens of a draft that are in the answer, and one more. Drafts are prompt lookup's, and with a corpus those that rest on
the longer context.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import edgekv
from benchmarks.speculation import FOUR, prompt_tokens, read_prompts
from edgekv.draft import CorpusDrafter, CorpusIndex, DraftTree, PromptLookup, Source, as_tree


class LongestContext:
    """The draft of the drafter that matched more tokens; of equal ones the text's own."""

    def __init__(self, corpus: CorpusIndex | None, *, tree: bool) -> None:
        """Draft for one text, from it and from a corpus; as a `tree` or linearly."""
        self._drafters: list[Source] = [PromptLookup(tree=tree)]
        if corpus is not None:
            self._drafters.append(CorpusDrafter(corpus, tree=tree))

    def propose(self, tokens: Sequence[int], k: int) -> DraftTree:
        """Drafts behind a text, at most `k`."""
        drafts = [(each.propose(tokens, k), each.support) for each in self._drafters]
        return as_tree(max(drafts, key=lambda draft: draft[1])[0])


def passes(prompt: Sequence[int], answer: Sequence[int], rows: int, drafter: LongestContext) -> int:
    """Passes after the first token, of `rows` rows at most."""
    text, at, count = [*prompt, *answer], len(prompt) + 1, 0
    while at < len(text):
        room = min(rows - 1, len(text) - at - 1)
        at += 1 + (len(drafter.propose(text[:at], room).path(text[at : at + room])) if room else 0)
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--draft-corpus", type=Path)
    parser.add_argument("--rows", default="8,16")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--cpu-mode", default="fast")
    args = parser.parse_args()
    answers: dict[str, list[tuple[list[int], list[int]]]] = {}
    with edgekv.load(args.bundle, cpu_mode=args.cpu_mode) as model:
        corpora = [None] if args.draft_corpus is None else [None, model.open_corpus(args.draft_corpus)]
        for prompt in read_prompts(()):
            tokens = prompt_tokens(model, prompt.text)
            answer = [token.id for token in model.generate(tokens, args.new_tokens, temperature=0, speculate="auto")]
            for kind in (prompt.kind, *(["first four"] if prompt.kind in FOUR else ())):
                answers.setdefault(kind, []).append((tokens, answer))
    for rows in map(int, args.rows.split(",")):
        for corpus in corpora:
            for tree in (False, True):
                shown = []
                for kind, mine in answers.items():
                    decoded = sum(len(answer) - 1 for _, answer in mine)
                    spent = sum(passes(*each, rows, LongestContext(corpus, tree=tree)) for each in mine)
                    shown.append(f"{kind} {decoded / max(spent, 1):.2f}")
                name = (
                    f"{rows} rows, {'lookup' if corpus is None else 'with a corpus'}, {'trees' if tree else 'linear'}"
                )
                print(f"{name}: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
