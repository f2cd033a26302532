"""Genie's tokens beside edgekv's own; what its binaries dump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.errors import BundleError, EngineError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.scratch import scratch_folder
from edgekv.pictures import Tile, TiledPicture, TileGrid
from edgekv.runtime import HtpEngine
from edgekv.spec import MASK
from exporters.inspect.trace import Trace
from exporters.quantize.pictures import drawn_picture
from exporters.quantize.reference import Floats
from exporters.targets.genie.config import Debug, Dialog, GenieConfig, Nodes, Sampler
from exporters.targets.genie.dialog import GenieDialog, GeniePipeline
from exporters.targets.genie.folder import GenieVision
from exporters.targets.genie.ports import GeniePort, GeniePorts
from exporters.targets.prove import own_tokens, prove
from quant import DTYPES, Dtype, Encoding

_DTYPES: dict[str, Dtype] = {
    "QNN_DATATYPE_UFIXED_POINT_8": "u8",
    "QNN_DATATYPE_SFIXED_POINT_8": "s8",
    "QNN_DATATYPE_UFIXED_POINT_16": "u16",
    "QNN_DATATYPE_SFIXED_POINT_16": "s16",
}
_GREEDY = Sampler(seed=0, temp=1.0, top_k=1, top_p=1.0, greedy=True)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt that Genie and edgekv continue greedily.

    Attributes:
        first: the tokens that every conversation begins with.
        state: that Genie restores them from, see `GenieDialog`; None if there are none or they are its `bos-token`.
        prompt: the tokens after them.
        max_new_tokens: number of tokens to compare.
        adapters: to compare too, by name, each with the state that Genie restores.
    """

    first: Sequence[int]
    state: Path | None
    prompt: Sequence[int]
    max_new_tokens: int
    adapters: Mapping[str, Path | None]


def prove_in_genie(
    folder: Path,
    config: GenieConfig,
    graphs: Mapping[str, GeniePorts],
    bundle: Bundle,
    engine: HtpEngine,
    continuation: Continuation,
) -> Dialog:
    """Let Genie load a folder and continue a prompt greedily, and compare with edgekv's own loop.

    Genie leaves inputs of layers 0 for prompts of token ids, so a model with some is given the prompt as a text.

    Args:
        folder: the folder.
        config: the folder's.
        graphs: what each graph must have, by its name in the binaries.
        bundle: the source of the folder.
        engine: for edgekv's own loop.
        continuation: what is compared.

    Returns:
        The configuration of a greedy dialog that no token of these ends.

    Raises:
        BundleError: a binary has other inputs or outputs than Genie drives.
        EngineError: Genie refused the folder, crashed, or chose other tokens.
    """
    prompt, max_new_tokens, adapters = continuation.prompt, continuation.max_new_tokens, continuation.adapters
    tokenizer, is_text = bundle.tokenizer(), bool(bundle.manifest.model.layer_inputs)
    text = tokenizer.decode(list(prompt), skip_special_tokens=False) if is_text else ""
    whole = [*continuation.first, *(tokenizer.encode(text, add_special_tokens=False).ids if is_text else prompt)]
    expected: dict[str, list[Any]] = {"tokens": own_tokens(bundle, engine, whole, max_new_tokens)}
    expected |= {f"tokens with {name}": own_tokens(bundle, engine, whole, max_new_tokens, name) for name in adapters}
    with scratch_folder("genie") as scratch:
        debug = Debug(path=str(scratch), dump_specs=True)
        # Genie does not report a token that ends a text, so another one does.
        end = next(
            token for token in range(bundle.manifest.model.vocab) if token not in set().union(*expected.values())
        )
        context = msgspec.structs.replace(config.dialog.context, eos_token=[end])
        dialog = msgspec.structs.replace(config.dialog, context=context, sampler=_GREEDY, debug=debug)
        computed: dict[str, list[Any]] = {}
        with GenieDialog(folder, GenieConfig(dialog=dialog), continuation.state) as genie:
            if is_text:
                computed["text"] = _whole_characters("".join(genie.query(text, max_new_tokens)))
            else:
                computed["tokens"] = list(genie.token_query(prompt, max_new_tokens))
            for adapter, begin in adapters.items():
                genie.apply_lora(adapter, begin)
                computed[f"tokens with {adapter}"] = list(genie.token_query(prompt, max_new_tokens))
        read = read_specs(scratch)
    for name, ports in graphs.items():
        if name not in read:
            raise EngineError(
                "graphs that Genie loaded",
                got=", ".join(sorted(read)) or "none",
                expected=name,
                fix="Write the folder again.",
            )
        ports.compare(f"{name} in the binary", read[name])
    if is_text:
        expected = {"text": _whole_characters(tokenizer.decode(expected["tokens"]))}
    prove("Genie", computed, expected)
    return msgspec.structs.replace(dialog, debug=msgspec.UNSET)


def prove_pictures(
    folder: Path, generator: Dialog, vision: GenieVision, bundle: Bundle, engine: HtpEngine, count: int, context: int
) -> None:
    """Let Genie continue a prompt with a drawn tile greedily, and compare with edgekv's own loop.

    Args:
        folder: the folder.
        generator: what ends no text, and chooses greedily.
        vision: its encoder.
        bundle: the source of the folder.
        engine: for edgekv's own loop.
        count: of tokens to compare.
        context: that Genie uses.

    Raises:
        BundleError: the context has no room for a tile and some text.
        EngineError: Genie refused the folder, crashed, or chose other tokens.
    """
    tile, edge, tokenizer = drawn_picture(0, vision.encoder.image), vision.encoder.image, bundle.tokenizer()
    shown = TiledPicture((tile,), TileGrid((edge, edge)))
    pieces = vision.pieces_of(f"See {vision.pictures.token} and say:", [shown])
    ids = list[int]()
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
        else:
            ids += Tile(piece, vision.encoder.grid_of(edge, edge)).ids
    largest = max(graph.ar for graph in bundle.manifest.graphs)
    if (needed := len(ids) + count + largest) > context:
        raise BundleError(
            "context",
            got=context,
            expected=f"at least {needed}, for a tile of {vision.encoder.rows} rows and some text",
            fix=f"Export the bundle with --context {needed} or more.",
        )
    expected = own_tokens(bundle, engine, ids, count, tiles=[tile])
    told = list[int]()
    dialog = msgspec.structs.replace(generator, max_num_tokens=count)
    with GeniePipeline(folder, Nodes.of(dialog), as_tokens=True) as genie:
        for tokens in genie.query(
            [
                piece_or_tile if isinstance(piece_or_tile, str) else vision.input_of(piece_or_tile)
                for piece_or_tile in pieces
            ]
        ):
            told += map(int, tokens)
    prove("Genie", {"tokens behind a picture": told}, {"tokens behind a picture": expected})


def _whole_characters(text: str) -> list[str]:
    """The characters before a byte that is none: Genie's texts end there."""
    return list(text.partition("\N{REPLACEMENT CHARACTER}")[0])


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    dims: list[int]
    dtype: str
    scale: list[float]
    offset: list[int]


class _Spec(msgspec.Struct, frozen=True):
    graph_name: str
    inputs: list[_Tensor]
    outputs: list[_Tensor]


def read_specs(folder: Path) -> dict[str, GeniePorts]:
    """Genie's specifications of the graphs in the binaries, by name, from its dump."""
    specs = {}
    for path in sorted(folder.rglob("spec.*.json")):
        spec = DECODERS[_Spec].decode(path.read_bytes())
        inputs, outputs = ([_port(record) for record in part] for part in (spec.inputs, spec.outputs))
        specs[spec.graph_name] = GeniePorts(tuple(inputs), tuple(outputs))
    return specs


def _port(tensor: _Tensor) -> GeniePort:
    dtype = _DTYPES.get(tensor.dtype)
    encoding = None if dtype is None else Encoding(dtype, tensor.scale[0], -tensor.offset[0])
    return GeniePort.of(tensor.name, tuple(tensor.dims), encoding)


_STEP = "000"


def read_dump(folder: Path) -> Trace:
    """Keys, values and logits of the prompt's first tokens: those of Genie's first step, `[T, width]`.

    Names are those of `edgekv trace`.

    Args:
        folder: what Genie wrote with `dump-tensors` and `dump-specs`.

    Raises:
        EngineError: there is no first step, or a file has another size than its specification.
    """
    trace: dict[str, Floats] = {}
    steps = {path.parent.name: path.parent for path in sorted(folder.rglob(f"{_STEP}_out_*"))}
    specs = {name: ports for name, ports in sorted(read_specs(folder).items()) if name in steps}
    used = 0
    for name, ports in specs.items():
        if name.split("_")[0] != next(iter(specs)).split("_")[0]:
            break  # later steps, of single tokens
        for port in ports.inputs:
            if port.name == MASK:  # a part without layers has the rows of the part before
                used = int(np.count_nonzero(_integers(steps[name], "in", port)[0, 0].any(axis=1)))
        for port in ports.outputs:
            if port.encoding is None:
                continue
            values = port.encoding.dequantize(_integers(steps[name], "out", port))
            rows = values.reshape(-1, values.shape[-1])
            if port.name.startswith("past_key"):
                rows = values.reshape(values.shape[-2:]).T
            trace[port.name.removesuffix("_out") + ("_in" if port.name.startswith("past_") else "")] = rows[:used]
    if not trace:
        raise EngineError(str(folder), got="no dump of a first step", expected="Genie's dump", fix="Run again.")
    return trace


def _integers(folder: Path, side: str, port: GeniePort) -> NDArray[np.generic]:
    assert port.encoding is not None, "of integers with an encoding"
    path = folder / f"{_STEP}_{side}_{port.name}"
    content = path.read_bytes()
    dtype = np.dtype(DTYPES[port.encoding.dtype])
    if len(content) != np.prod(port.shape) * dtype.itemsize:
        got, expected = f"{len(content)} bytes", f"{list(port.shape)} of {port.encoding.dtype}"
        raise EngineError(str(path), got=got, expected=expected, fix="Run again.")
    return np.frombuffer(content, dtype).reshape(port.shape)
