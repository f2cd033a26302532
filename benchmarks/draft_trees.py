"""Tokens a pass that drafts of prompt lookup would bring, linear and as trees, counted from a model's own answers.

    python -m benchmarks.draft_trees BUNDLE [--rows 8,16] [--new-tokens 120] [--cpu-mode fast]

The prompts are those of `benchmarks.speculation`. Drafts change no text, so it is generated once and plainly; a pass
brings the tokens of a draft that are in the answer, and one more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import edgekv
from benchmarks.speculation import prompt_tokens, read_prompts
from edgekv.draft import PromptLookup, as_tree


def passes(prompt: Sequence[int], answer: Sequence[int], rows: int, *, tree: bool) -> int:
    """Passes behind the first token, of at most so many rows."""
    text, lookup = [*prompt, *answer], PromptLookup(tree=tree)
    at, count = len(prompt) + 1, 0
    while at < len(text):
        room = min(rows - 1, len(text) - at - 1)
        drafts = as_tree(lookup.propose(text[:at], room) if room else ())
        at += 1 + len(drafts.path(text[at : at + room]))
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--rows", default="8,16")
    parser.add_argument("--new-tokens", type=int, default=120)
    parser.add_argument("--cpu-mode", default="fast")
    args = parser.parse_args()
    answers: list[tuple[str, list[int], list[int]]] = []
    with edgekv.load(args.bundle, cpu_mode=args.cpu_mode) as model:
        for prompt in read_prompts(()):
            tokens = prompt_tokens(model, prompt.text)
            answer = [token.id for token in model.generate(tokens, args.new_tokens, temperature=0)]
            answers += [(kind, tokens, answer) for kind in (prompt.kind, "all")]
    kinds = list(dict.fromkeys(kind for kind, _, _ in answers))
    for rows in map(int, args.rows.split(",")):
        for tree in (False, True):
            shown = []
            for kind in kinds:
                mine = [(tokens, answer) for each, tokens, answer in answers if each == kind]
                decoded = sum(len(answer) - 1 for _, answer in mine)
                spent = sum(passes(tokens, answer, rows, tree=tree) for tokens, answer in mine)
                shown.append(f"{kind} {decoded / max(spent, 1):.2f}")
            print(f"{rows} rows, {'trees' if tree else 'linear'}: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
