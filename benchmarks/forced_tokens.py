"""Tokens per pass of tool calls: what the grammar forces is run together with the next token.

    python -m benchmarks.forced_tokens BUNDLE

Prints a line for each set of tools: tokens of the calls, passes after prefill, tokens per pass, and the time of a token
beside that of free text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import edgekv
from edgekv.text import Tools
from edgekv.text.tools import special_tokens, tools_grammar
from edgekv.text.tools.format import HERMES

PROMPT = "def main("
SEEDS = range(8)
TEXT = {"type": "string", "maxLength": 20}
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "weather": {
        "get_current_weather": {
            "location": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        }
    },
    "files": {
        "read_file": {"path": TEXT},
        "write_file": {"path": TEXT, "contents": {"type": "string", "maxLength": 40}, "append": {"type": "boolean"}},
        "list_directory": {"path": TEXT, "recursive": {"type": "boolean"}},
    },
    "phone": {
        "set_alarm": {
            "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            "minute": {"type": "integer", "minimum": 0, "maximum": 59},
            "label": TEXT,
        },
        "send_message": {"recipient": TEXT, "message_text": {"type": "string", "maxLength": 40}},
        "play_music": {"artist": TEXT, "shuffle": {"type": "boolean"}},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    with edgekv.load(given.bundle, threads=given.threads) as model:
        free = model.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
        list(free)
        print(f"free text: {free.stats.times.decode_ms_per_token:.2f} ms a token")
        totals = [0, 0]
        for name, functions in SETS.items():
            tokens, passes, spent_ms = measure(model, functions)
            totals[0] += tokens
            totals[1] += passes
            print(
                f"{name:8} {tokens:5} tokens, {passes:5} passes, {tokens / passes:.2f} tokens per pass, "
                f"{spent_ms / tokens:.2f} ms a token"
            )
        print(f"all      {totals[0]:5} tokens, {totals[1]:5} passes, {totals[0] / totals[1]:.2f} tokens per pass")


def measure(model: edgekv.Model, functions: dict[str, dict[str, Any]]) -> tuple[int, int, float]:
    """Tokens, passes and milliseconds after the first token, of required calls with several seeds."""
    tools = Tools.read(
        [_declared(name, properties) for name, properties in functions.items()], "required", parallel=False
    )
    grammars = model._grammars
    grammar = tools_grammar(tools, HERMES, special_tokens(model.tokenizer, HERMES, grammars.is_special))
    tokens, passes, spent_ms = 0, 0, 0.0
    for seed in SEEDS:
        generation = model.generate(PROMPT, grammar=grammar, temperature=1, seed=seed, max_new_tokens=200)
        list(generation)
        stats = generation.stats
        assert stats.stop_reason == "grammar", stats.stop_reason
        tokens += stats.generated_tokens
        passes += stats.times.decode_steps + 1  # prefill gives the first token
        spent_ms += stats.times.decode_ms_per_token * (stats.generated_tokens - 1)
    return tokens, passes, spent_ms


def _declared(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


if __name__ == "__main__":
    main()
