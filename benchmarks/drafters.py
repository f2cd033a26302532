"""What a drafter that reads its target's cache brings: tokens a pass, and time, against plain decoding by turns.

    python -m benchmarks.drafters TARGET DRAFTER --text FILE [--prompts 16] [--prompt-tokens 48] [--new-tokens 64]

Prompts are cut from the text. Every answer is compared with the plain one. A pass of decoding is timed as a whole, with
the drafter and the choice of tokens.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.console import Console

import edgekv
from benchmarks.turns import by_turns, turns_table
from edgekv import SamplingParams
from edgekv.draft import Speculation, SpeculationMode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-mode", default="fast")
    args = parser.parse_args()
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    options = {"cpu_mode": args.cpu_mode}
    with edgekv.load(args.target, **options) as model, edgekv.load_drafter(args.drafter, **options) as drafter:
        ids = model.encode(args.text.read_text("utf-8"))
        prompts = [ids[at : at + args.prompt_tokens] for at in range(0, len(ids) - args.prompt_tokens, 997)]
        prompts = prompts[: args.prompts]
        plain = [[token.id for token in model.generate(prompt, params)] for prompt in prompts]

        def turn(mode: SpeculationMode | None, tokens: int | None = None) -> float:
            """Seconds for all answers; says once what drafts brought."""
            speculation = None if mode is None else Speculation(mode, draft=drafter, tokens=tokens)
            passes = decoded = proposed = accepted = 0
            began = perf_counter()
            for prompt, wanted in zip(prompts, plain, strict=True):
                generation = model.generate(prompt, params, speculate=speculation)
                if [token.id for token in generation] != wanted:
                    raise SystemExit(f"{mode}: another answer than that of plain decoding")
                if (stats := generation.stats.speculation) is not None:
                    passes, decoded = passes + stats.passes, decoded + stats.tokens
                    proposed, accepted = proposed + stats.proposed, accepted + stats.accepted
            spent = perf_counter() - began
            if passes:
                said[f"{mode} {tokens or ''}".strip()] = (
                    f"{decoded / passes:.2f} tokens a pass, {accepted} of {proposed} drafts accepted"
                )
            return spent

        said: dict[str, str] = {}
        turns = {"plain": partial(turn, None), "auto": partial(turn, "auto")}
        turns |= {f"draft {n}": partial(turn, "draft", n) for n in (1, 2, 3, 7) if n < model.verify_rows[-1]}
        console = Console()
        console.print(turns_table("seconds for all answers", by_turns(turns, args.rounds), "plain"))
        for name, line in said.items():
            console.print(f"{name}: {line}")


if __name__ == "__main__":
    main()
