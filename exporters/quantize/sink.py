"""The sink: the token at position 0, which most queries attend to and whose activations are by far the largest.

One static range for a tensor would span that one token: in SmolLM2-135M its residual reaches 24,900, that of all other
tokens 150. (Massive activations: Sun et al. 2024, arXiv 2402.17762; attention sinks: Xiao et al. 2023, arXiv
2309.17453.) So the integer graphs never compute it. Its keys, values and logits are computed here in float, and a
runtime writes them into every cache before the first step (PrefixQuant, Chen et al. 2024, arXiv 2410.05265).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgekv.errors import UsageError
from edgekv.machine.tensor_file import encode_tensors
from edgekv.spec import LOGITS
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Floats
from exporters.quantize.sink_request import SinkRequest
from exporters.quantize.survey import Outlier
from quant import Encoding

SINK_FILE = "sink.safetensors"

SPANS = 4.0
"""A token whose magnitudes are above this multiple of the others' costs their 16-bit steps more than two bits."""


@dataclass(frozen=True, slots=True)
class FloatSink:
    """The sink's values in float.

    Attributes:
        tokens: ids, n of them.
        outlier: how far they exceed all other tokens.
        rows: keys and values `[n, D]`, by the name of the graph input that reads them.
        logits: after each token, `[n, V]`.
    """

    tokens: tuple[int, ...]
    outlier: Outlier
    rows: Mapping[str, Floats] = field(repr=False)
    logits: Floats = field(repr=False)

    def write(self, folder: Path, encodings: Mapping[str, Encoding]) -> None:
        """Write the integers of rows and logits, in the encodings of a bundle, to `SINK_FILE`."""
        values = {**self.rows, LOGITS: self.logits}
        integers = {name: encodings[name].quantize(array) for name, array in values.items()}
        (folder / SINK_FILE).write_bytes(encode_tensors(integers))


def sink_candidates(checkpoint: Checkpoint, option: SinkRequest) -> tuple[int, ...]:
    """The tokens at the start of every text: those asked for, or bos, or where texts have none, how chats begin.

    Raises:
        UsageError: ids outside of the vocabulary, or not the bos with which texts begin.
    """
    special, vocab = checkpoint.special, checkpoint.spec.vocab
    if option.mode == "none":
        return () if special.bos is None else (special.bos,)
    if option.mode == "tokens":
        if wrong := [token for token in option.tokens if token >= vocab]:
            got = f"token {wrong[0]}"
            raise UsageError("--sink", got=got, expected=f"ids below {vocab}", fix="Use the checkpoint's tokens.")
        if special.bos is not None and option.tokens[0] != special.bos:
            got, expected = f"token {option.tokens[0]} first", f"{special.bos}, bos, with which texts begin"
            raise UsageError("--sink", got=got, expected=expected, fix=f"Use --sink {special.bos}, or auto.")
        return option.tokens
    if special.bos is not None:
        return (special.bos,)
    if checkpoint.chat is not None and (opening := _opening(checkpoint)) is not None:
        return (opening,)
    return special.eos[:1]


def is_sink(outlier: Outlier, option: SinkRequest, tokens: Sequence[int]) -> bool:
    """Whether the first tokens of all texts become a sink: they are wanted, or they span the ranges of all others.

    Args:
        outlier: how far they exceed the others.
        option: what `--sink` asks for.
        tokens: those at the start of every text; see `sink_candidates`.
    """
    if option.mode == "none" or not tokens:
        return False
    return option.mode == "tokens" or outlier.ratio > SPANS


def _opening(checkpoint: Checkpoint) -> int | None:
    """The token with which the chat template begins every conversation; None if it fails."""
    assert checkpoint.chat is not None
    try:
        text = checkpoint.chat.render([{"role": "user", "content": "Hello"}])
        return next(iter(checkpoint.encode(text)), None)
    except UsageError:
        return None
