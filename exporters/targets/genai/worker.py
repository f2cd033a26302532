"""Generation by onnxruntime-genai in a child process, which has no other ONNX Runtime; see `run_folder`."""

from __future__ import annotations

import msgspec


def register_providers() -> None:
    """Tell onnxruntime-genai of Qualcomm's execution provider, where it is installed."""
    import onnxruntime_genai as genai

    try:
        import onnxruntime_qnn as qnn
    except ImportError:
        return  # a folder for the CPU needs none
    genai.register_execution_provider_library(qnn.get_ep_name(), qnn.get_library_path())


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
    import onnxruntime_genai as genai

    register_providers()
    model = genai.Model(job.folder)
    generator = genai.Generator(model, genai.GeneratorParams(model))
    generator.append_tokens(job.tokens)
    tokens: list[int] = []
    while len(tokens) < job.max_new_tokens and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens
