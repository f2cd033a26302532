"""The child process behind `exporters.targets.genai.run`: generates as a job says and replies into a file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import onnxruntime_genai as genai

from exporters.targets.genai.messages import GenaiJob, GenaiReply
from exporters.targets.genai.providers import register_providers


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=GenaiJob)
    try:
        reply = GenaiReply(tokens=_generate(job))
    except Exception as error:  # the package raises RuntimeError and more
        reply = GenaiReply(error=" ".join(str(error).split()))
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(reply))


def _generate(job: GenaiJob) -> list[int]:
    register_providers()
    model = genai.Model(job.folder)
    generator = genai.Generator(model, genai.GeneratorParams(model))
    generator.append_tokens(job.tokens)
    tokens: list[int] = []
    while len(tokens) < job.max_new_tokens and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


if __name__ == "__main__":
    main()
