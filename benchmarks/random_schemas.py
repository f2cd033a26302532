"""Random JSON schemas with random weights: every finished answer has to be valid.

    python -m benchmarks.random_schemas [--schemas 1000] [--bundle BUNDLE]

Without a bundle it exports two decoders of random weights: one with the embedded model's vocabulary of 4,096 tokens,
one with a vocabulary of bytes. Answers are sampled at temperature 1 and judged by the package `jsonschema`, with the
formats that it checks. Exits with 1 if an answer is invalid.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jsonschema

import edgekv
from devices import find
from edgekv import Grammar
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe
from tests.checkpoints import NEWER, write_checkpoint
from tests.schemas import random_schema

EMBEDDED = Path("models/stdlib-4m")
CONTEXT, TOKENS = 512, 400


def export(folder: Path, vocabulary: str) -> Path:
    """A bundle of random weights."""
    shape = {"max_position_embeddings": CONTEXT}
    if vocabulary == "4,096 tokens":
        special = json.loads((EMBEDDED / "config.json").read_text())
        names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        shape |= {name: special[name] for name in names}
    checkpoint = write_checkpoint(folder / "checkpoint", NEWER, shape)
    if vocabulary == "4,096 tokens":
        for name in ("tokenizer.json", "generation_config.json"):
            shutil.copy(EMBEDDED / name, checkpoint / name)
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
    if given.bundle is not None:
        sys.exit(measure(given.bundle, given.schemas) > 0)
    invalid = 0
    for vocabulary in ("4,096 tokens", "bytes"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"random weights, a vocabulary of {vocabulary}")
            invalid += measure(export(Path(folder), vocabulary), given.schemas)
    sys.exit(invalid > 0)


if __name__ == "__main__":
    main()
