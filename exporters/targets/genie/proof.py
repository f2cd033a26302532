"""Checks that Genie runs a folder: its view of the binaries, and the tokens it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from edgekv.bundle import Bundle
from edgekv.errors import EngineError
from edgekv.kv import KVCache
from edgekv.runtime import HtpEngine
from edgekv.scratch import scratch_folder
from edgekv.session import Graphs, Session
from exporters.targets.genie.config import Debug, GenieConfig, Sampler
from exporters.targets.genie.dialog import GenieDialog
from exporters.targets.genie.ports import GeniePort, GeniePorts
from quant import Dtype, Encoding

_DTYPES: dict[str, Dtype] = {
    "QNN_DATATYPE_UFIXED_POINT_8": "u8",
    "QNN_DATATYPE_SFIXED_POINT_8": "s8",
    "QNN_DATATYPE_UFIXED_POINT_16": "u16",
    "QNN_DATATYPE_SFIXED_POINT_16": "s16",
}
_GREEDY = Sampler(seed=0, temp=1.0, top_k=1, top_p=1.0, greedy=True)


def prove(
    folder: Path,
    config: GenieConfig,
    graphs: Mapping[str, GeniePorts],
    bundle: Bundle,
    engine: HtpEngine,
    prompt: Sequence[int],
    max_new_tokens: int,
) -> None:
    """Let Genie load a folder and continue a prompt greedily, and compare with edgekv's own loop.

    Args:
        folder: the folder.
        config: the folder's.
        graphs: what each graph must have, by its name in the binaries.
        bundle: the source of the folder.
        engine: for edgekv's own loop.
        prompt: token ids, the BOS token included if the configuration has one.
        max_new_tokens: number of tokens to compare.

    Raises:
        BundleError: a binary has other inputs or outputs than Genie drives.
        EngineError: Genie refused the folder, crashed, or chose other tokens.
    """
    with scratch_folder("genie") as scratch:
        debug = Debug(path=str(scratch), dump_specs=True)
        dialog = msgspec.structs.replace(config.dialog, sampler=_GREEDY, debug=debug)
        with GenieDialog(folder, GenieConfig(dialog=dialog)) as genie:
            own = prompt if dialog.context.bos_token < 0 else prompt[1:]
            found = list(genie.token_query(own, max_new_tokens))
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
    wanted = own_tokens(bundle, engine, prompt, max_new_tokens)
    if found != wanted:
        raise EngineError(
            "tokens that Genie chose",
            got=found,
            expected=f"{wanted}, as edgekv's own loop on the HTP",
            fix="Please report this model; --skip-check writes the folder without this check.",
        )


def own_tokens(bundle: Bundle, engine: HtpEngine, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy continuation by the graphs that have logits for every row, up to the first end-of-sequence token."""
    manifest = bundle.manifest
    cache = KVCache(manifest.cache_geometry, ar={graph.ar for graph in manifest.graphs})
    session = Session(cache, Graphs(bundle, engine, cache))
    tokens = [int(session.score(prompt)[-1].argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in manifest.tokens.eos:
        tokens.append(int(session.feed(tokens[-1:]).argmax()))
    return tokens


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
    found = {}
    for path in sorted(folder.rglob("spec.*.json")):
        spec = msgspec.json.decode(path.read_bytes(), type=_Spec)
        inputs, outputs = ([_port(each) for each in part] for part in (spec.inputs, spec.outputs))
        found[spec.graph_name] = GeniePorts(tuple(inputs), tuple(outputs))
    return found


def _port(tensor: _Tensor) -> GeniePort:
    dtype = _DTYPES.get(tensor.dtype)
    encoding = None if dtype is None else Encoding(dtype, tensor.scale[0], -tensor.offset[0])
    return GeniePort.of(tensor.name, tuple(tensor.dims), encoding)
