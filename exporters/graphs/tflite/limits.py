"""Limits of `.tflite` files, checked before anything is computed."""

from __future__ import annotations

import math
from importlib import util

from edgekv.errors import EngineError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint

MAX_BYTES = (1 << 31) - (1 << 24)  # offsets are signed 32-bit numbers; 16 MiB are kept for the rest


def check_tflite(checkpoint: Checkpoint) -> None:
    """Reject a checkpoint that cannot be written.

    Raises:
        EngineError: the package with the format's schema is missing.
        UsageError: the weights are too large for one file.
    """
    if util.find_spec("ai_edge_litert") is None:
        raise EngineError(
            "--format tflite",
            got="no package ai_edge_litert",
            expected="LiteRT, which brings the schema of the format",
            fix='Install it: pip install "edgekv[litert]"',
        )
    spec = checkpoint.spec
    if spec.bidirectional:
        raise UsageError(
            "--format tflite",
            got="attention to both sides, whose graphs have no cache",
            expected="a model whose tokens attend to earlier ones",
            fix="Use --format onnx.",
        )
    if spec.layer_inputs:
        raise UsageError(
            "--format tflite",
            got="inputs that the host gathers for each layer",
            expected="a model without them: a .tflite file has no table for the host",
            fix="Use --format onnx.",
        )
    vision = checkpoint.vision
    if vision is not None and vision.spec.clipped:
        raise UsageError(
            "--format tflite",
            got="a vision encoder with use_clipped_linears",
            expected="one without: encodings of a .tflite file end at the same distance on both sides of 0",
            fix="Use --format onnx.",
        )
    encoder_bytes = 0 if vision is None else sum(map(math.prod, vision.spec.matrices.values()))
    table = spec.vocab * spec.hidden
    # Matrices in int8; the embedding table in int16 and, if it is also the head, again in int8.
    held_bytes = checkpoint.parameters + table * (2 if spec.tied_head else 1)
    if (held_bytes := max(held_bytes, encoder_bytes)) > MAX_BYTES:  # each is a file
        raise UsageError(
            "--format tflite",
            got=f"{held_bytes / 1e9:.1f} GB of weights",
            expected=f"at most {MAX_BYTES / 1e9:.1f} GB, what a flatbuffer can address",
            fix="Use --format onnx, or a smaller model.",
        )
