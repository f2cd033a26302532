"""Random JSON schemas with random weights: every finished answer has to be valid.

    python -m benchmarks.random_schemas [--schemas 1000] [--bundle BUNDLE]

Without a bundle it exports a decoder of random weights with the embedded model's vocabulary of 4,096 tokens. Answers
are sampled at temperature 1 and judged by the package `jsonschema`, with the formats that it checks. Exits with 1 if an
answer is invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import jsonschema

import edgekv
from benchmarks.large_checkpoint import write_large_checkpoint
from benchmarks.schemas import random_schema
from devices import find
from edgekv import Grammar
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe

CONTEXT, TOKENS = 512, 400
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": CONTEXT,
}


def export(folder: Path) -> Path:
    """A bundle of random weights with the embedded model's vocabulary."""
    checkpoint = write_large_checkpoint(folder / "checkpoint", "smollm2-135m", SMALL)
    options = ExportOptions(find("SM8650"), find_recipe("w8a16"), CONTEXT, (1, 8), check_on_htp=False)
    export_bundle(Checkpoint.open(str(checkpoint)), folder / "bundle", options)
    return folder / "bundle"


def measure(bundle: Path, schemas: int) -> int:
    """Print the figures of a bundle; the number of invalid answers."""
    finished = invalid = tokens = passes = 0
    started = time.perf_counter()
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    with edgekv.load(bundle, threads=1) as model:
        for seed in range(schemas):
            schema = random_schema(seed)
            generation = model.generate(
                "x", grammar=Grammar.json_schema(schema), temperature=1, seed=seed, max_new_tokens=TOKENS
            )
            text = "".join(token.text for token in generation)
            tokens += generation.stats.generated_tokens
            passes += generation.stats.times.decode_steps + 1
            if generation.stats.stop_reason not in ("grammar", "eos"):
                continue
            finished += 1
            try:
                jsonschema.Draft202012Validator(schema, format_checker=formats).validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                invalid += 1
                print(f"seed {seed}: {text}\n  {str(error).splitlines()[0]}")
    spent = time.perf_counter() - started
    print(
        f"{schemas} schemas: {finished} answers finished within {TOKENS} tokens, {finished - invalid} of them valid; "
        f"{tokens / passes:.2f} tokens per pass, {spent:.0f} s"
    )
    return invalid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--bundle", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(measure(given.bundle or export(Path(folder)), given.schemas) > 0)


if __name__ == "__main__":
    main()
