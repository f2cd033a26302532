"""A folder as GenieX's loader reads it.

The rules are those of its public sources (qualcomm/geniex-qairt-plugin, `core/src/llm/llm_spec_loader.cpp` and
`llm_model.cpp`): names of graphs, one cache tensor for each layer, sizes from shapes, and one pair of AR for all
contexts. What it would read wrong it does not report, so a folder is read by the same rules before it is done.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from edgekv.errors import BundleError
from exporters.targets.genie.config import CONFIG, EXTENSIONS
from exporters.targets.geniex.metadata import METADATA
from exporters.targets.graph_names import GraphName

FAMILIES = ("qwen3_", "qwen2_5_", "falcon_v3_", "llama_v3_", "phi_3_5_")
_PAST = re.compile(r"past_(?:key|value)_(\d+)_(?:in|out)")
_OTHERS = ("attention_mask", "position_ids", "position_ids_cos", "position_ids_sin")
_FIX = "Write the folder again: edgekv bundle geniex BUNDLE -o DIR --force"


class LoadedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What GenieX takes a folder for.

    Attributes:
        model_id: chooses the code that runs it.
        binaries: context binaries, in order.
        prefill: AR of prefill.
        decode: AR of decode.
        contexts: context lengths, ascending.
        layers: number of layers.
        layers_of: numbers of the layers of each part.
        kv_heads: heads of a cache tensor.
        head_dim: width of a head.
        vocab: number of logits.
        bos: put in front of a conversation; -1 for none.
        eos: ids that end an answer.
    """

    model_id: str
    binaries: tuple[str, ...]
    prefill: int
    decode: int
    contexts: tuple[int, ...]
    layers: int
    layers_of: tuple[tuple[int, ...], ...]
    kv_heads: int
    head_dim: int
    vocab: int
    bos: int
    eos: tuple[int, ...]


def read_as_geniex(folder: Path) -> LoadedSpec:
    """Read a folder by the loader's rules.

    Raises:
        BundleError: GenieX would refuse it, or read it as something else.
    """
    metadata, config = (_object(folder / name) for name in (METADATA, CONFIG))
    model_id = str(metadata.get("model_id", ""))
    if not model_id.startswith(FAMILIES) or model_id.startswith("qwen3_vl_") or model_id.endswith("_ssd"):
        raise _wrong("model_id", model_id, f"one that begins with {', '.join(FAMILIES)}")
    graphs: dict[tuple[int, int, int], dict[str, Any]] = {}
    parts = 0
    for name, graph in metadata["model_files"].items():
        read = GraphName.parse(name)
        if read is None or not name.endswith(read.end):
            raise _wrong("model_files", name, "names such as prompt_ar128_cl4096_1_of_2")
        graphs[read.part, read.ar, read.context] = graph
        parts = read.parts
    rows, contexts = sorted({ar for _, ar, _ in graphs}), sorted({context for _, _, context in graphs})
    if len(rows) != 2:
        raise _wrong("graphs", f"AR {', '.join(map(str, rows))}", "one AR for prefill and one for decode")
    for place in ((part, ar, context) for part in range(1, parts + 1) for ar in rows for context in contexts):
        if place not in graphs:
            raise _wrong("graphs", "none of part {}, AR {}, context {}".format(*place), "one for each")
    firsts = [graphs[part, rows[0], contexts[0]] for part in range(1, parts + 1)]
    layers_of = tuple(_layers(graph) for graph in firsts)
    if [*(layer for part in layers_of for layer in part)] != list(range(sum(map(len, layers_of)))):
        raise _wrong("layers", layers_of, "all of them, in order")
    if (entry := _entry(firsts[0])) != "input_ids":
        raise _wrong("the first input", entry, "input_ids")
    dialog = config["dialog"]
    binaries = tuple(dialog["engine"]["model"]["binary"]["ctx-bins"])
    for name in (*binaries, "tokenizer.json", EXTENSIONS):
        if not (folder / name).is_file():
            raise _wrong(name, "no such file", "a file")
    key = next(graph["inputs"]["past_key_0_in"]["shape"] for graph in firsts)
    return LoadedSpec(
        model_id=model_id,
        binaries=binaries,
        prefill=rows[1],
        decode=rows[0],
        contexts=tuple(contexts),
        layers=sum(map(len, layers_of)),
        layers_of=layers_of,
        kv_heads=key[0],
        head_dim=key[2],
        vocab=firsts[-1]["outputs"]["logits"]["shape"][-1],
        bos=dialog["context"]["bos-token"],
        eos=tuple(dialog["context"]["eos-token"]),
    )


def _layers(graph: dict[str, Any]) -> tuple[int, ...]:
    found = sorted({int(match[1]) for name in graph["inputs"] if (match := _PAST.fullmatch(name)) is not None})
    per_head = [name for name in graph["inputs"] if name.startswith("past_") and not _PAST.fullmatch(name)]
    if per_head or not found or found != list(range(found[0], found[-1] + 1)):
        raise _wrong("cache tensors", per_head[:1] or found, "one for each layer of a part, such as past_key_0_in")
    return tuple(found)


def _entry(graph: dict[str, Any]) -> str:
    """The first input that is none of the known ones; names are read in order of the alphabet."""
    names: list[str] = sorted(graph["inputs"])
    return next(name for name in names if name not in _OTHERS and not name.startswith("past_"))


def _object(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise _wrong(path.name, str(error), "a JSON object") from None
    return found


def _wrong(field: str, got: object, expected: str) -> BundleError:
    return BundleError(f"GenieX: {field}", got=got, expected=expected, fix=_FIX)
