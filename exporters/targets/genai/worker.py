"""Generation by onnxruntime-genai in a child process, which has no other ONNX Runtime; see `run`."""

from __future__ import annotations

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


def generate(job: GenaiJob) -> list[int]:
    """Generate in this process."""
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
