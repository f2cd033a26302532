"""The child process behind `exporters.targets.genai.run`: generates as a job says and replies into a file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec


class GenaiJob(msgspec.Struct, frozen=True, kw_only=True):
    """A greedy generation.

    Attributes:
        folder: what `write_folder` wrote.
        tokens: the prompt.
        max_new_tokens: most tokens to generate.
    """

    folder: str
    tokens: list[int]
    max_new_tokens: int


class GenaiReply(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens generated, or the text of the error that stopped it."""

    tokens: list[int] = []
    error: str | None = None


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=GenaiJob)
    try:
        reply = GenaiReply(tokens=_generate(job))
    except Exception as error:  # the package raises RuntimeError and more
        reply = GenaiReply(error=" ".join(str(error).split()))
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(reply))


def _generate(job: GenaiJob) -> list[int]:
    import onnxruntime_genai as genai  # only in the child process

    from exporters.targets.genai.providers import register_providers

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
