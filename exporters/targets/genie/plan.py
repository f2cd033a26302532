"""Which graphs go into a folder for Genie, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import onnx_ir as ir

from devices import Device, find
from edgekv.bundle import Bundle, CompiledBinary, GraphRecord
from edgekv.engine.sink import read_sink
from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.kv import Sink
from exporters.graphs.models import load_model, save_model
from exporters.targets.genie.options import GenieOptions
from exporters.targets.graph_names import GraphName

_PLACES = 3  # places of a graph's name in a binary of the tested compiler


def name_graphs(folder: Path, binary: CompiledBinary, *, pads_number: bool = False) -> dict[str, str]:
    """Give the graphs of a binary, and its wrappers, the names under which the wrappers are listed.

    Args:
        folder: has the binary and its wrappers.
        binary: the binary.
        pads_number: pad the context's number with zeros in front, which is read as the same number.

    Returns:
        The full names, which end in the part and are padded to the length of those they replace: with underscores
        before the part, unless the number is padded.

    Raises:
        EngineError: a name is not where the tested compiler puts it.
    """
    names: dict[str, str] = {}
    with (folder / binary.file).open("r+b") as file, mmap(file.fileno(), 0) as content:  # gigabytes
        for graph, wrapper_file in binary.wrappers.items():
            wrapper = load_model(folder / wrapper_file)
            (node,) = wrapper.graph
            placeholder = node.attributes["partition_name"].as_string()
            new_name = GraphName.parse(graph)
            assert new_name is not None, "wrappers are listed by such names"
            name = new_name.padded(len(placeholder), pads_number=pads_number)
            places = _places(content, placeholder.encode())
            if len(places) != _PLACES or len(name) != len(placeholder):
                raise EngineError(
                    f"{binary.file}: name of {graph}",
                    got=f"{placeholder} in {len(places)} places",
                    expected=f"a name of {len(name)} characters in {_PLACES}",
                    fix='Use the tested onnxruntime-qnn: pip install "edgekv[htp]"',
                )
            for place in places:
                content[place : place + len(placeholder)] = name.encode()
            node.name = name
            node.attributes.add(ir.AttrString("partition_name", name))
            save_model(wrapper, folder / wrapper_file)
            names[graph] = name
    return names


def _places(content: mmap, text: bytes) -> list[int]:
    """The offsets of a text in a file."""
    offsets: list[int] = []
    while (place := content.find(text, offsets[-1] + len(text) if offsets else 0)) >= 0:
        offsets.append(place)
    return offsets


@dataclass(frozen=True, slots=True)
class GeniePlan:
    """How Genie runs a bundle.

    Attributes:
        device: the target.
        graphs: those that Genie runs, by the stems of their names.
        context: the longest to use, in tokens.
        bos: token in front of the first query; None for none.
        sink: the tokens that every conversation is restored from, instead of bos; None if the graphs compute them.
        has_states: whether layers have states.
    """

    device: Device
    graphs: dict[str, GraphRecord]
    context: int
    bos: int | None
    sink: Sink | None
    has_states: bool

    @classmethod
    def of(cls, bundle: Bundle, options: GenieOptions) -> GeniePlan:
        """The plan for a bundle.

        Raises:
            BundleError: Genie cannot express something of the bundle.
            UsageError: an option does not fit the bundle.
        """
        options.target.check(bundle)
        manifest, sink = bundle.manifest, read_sink(bundle)
        device = find(manifest.device)
        if options.device not in (None, device):
            raise UsageError(
                "--device",
                got=options.device.soc if options.device else None,
                expected=f"{device.soc} (V{device.arch}), for which the bundle was exported and checked",
                fix=f"Leave it out, or export the bundle with --device {options.device.soc}.",
            )
        graphs = {GraphName.of("genie", g).stem: g for g in manifest.graphs if g.role != "score"}
        _check_past(graphs.values())
        largest = manifest.context
        context = largest if options.context is None else options.context
        if sink is not None and not options.bos:
            raise UsageError(
                "--no-bos",
                got=f"it with a bundle whose token {sink.tokens[0]} is restored",
                expected="prompts without the first token",
                fix="Leave --no-bos out, and leave that token out of what the chat template writes.",
            )
        first = 0 if sink is None else len(sink.tokens)
        least = 1 + first + max(graph.ar for graph in graphs.values())
        if not least <= context <= largest:
            raise UsageError(
                "--context",
                got=context,
                expected=f"{least} to {largest}, the longest context of the bundle's graphs",
                fix=f"Leave it out for {largest}, or export the bundle with a longer --context.",
            )
        has_states = manifest.model.convolution is not None
        if has_states and sink is not None:
            raise BundleError(
                f"bundle {bundle.path}: sink",
                got="a first token that is restored, of a model with states",
                expected="graphs that compute it: the states that Genie saves are in no format known here",
                fix="Export it with --sink none.",
            )
        bos = _bos(bundle) if options.bos and sink is None else None
        if manifest.vision is not None and (sink is not None or bos is not None):
            raise BundleError(
                f"bundle {bundle.path}: first token",
                got="one that is restored" if sink is not None else "a BOS token that Genie would add",
                expected="none: a pipeline with pictures begins with what it is given",
                fix="Export it with --sink none, and write the folder with --no-bos.",
            )
        return cls(device, graphs, context, bos, sink, has_states)

    @property
    def first(self) -> list[int]:
        """The tokens that every conversation begins with."""
        if self.sink is not None:
            return list(self.sink.tokens)
        return [] if self.bos is None else [self.bos]

    @property
    def parts(self) -> int:
        """Number of parts of each graph."""
        return len(next(iter(self.graphs.values())).parts)

    def named(self, number: int) -> list[tuple[str, GraphRecord]]:
        """The graphs, by the names of their parts with this number, counted from 1.

        A separate head is the same for all contexts: Genie takes one for each AR.
        """
        named = {
            (graph.ar, graph.context if graph.parts[number - 1].layers else None): graph
            for graph in self.graphs.values()
        }
        return [(GraphName.of("genie", graph, number).file, graph) for graph in named.values()]

    def compiled(self, bundle: Bundle, wrappers: Mapping[str, Path]) -> dict[Path, Path]:
        """The wrappers, given by name, keyed by the bundle's graphs with the same inputs and outputs.

        Genie's prefill graphs return the logits of every row, as edgekv's scoring graphs do.
        """
        rows = {(graph.ar, graph.context): graph for graph in bundle.manifest.graphs if graph.role != "prefill"}
        return {
            bundle.part_path(rows[graph.ar, graph.context].parts[number - 1]): wrappers[name]
            for number in range(1, self.parts + 1)
            for name, graph in self.named(number)
            if (graph.ar, graph.context) in rows
        }


def _check_past(graphs: Iterable[GraphRecord]) -> None:
    """Refuse graphs with as many past rows as new ones.

    Genie 1.21 copies their new keys `[D, AR]` byte by byte into the past `[D, S-1]` of the decode graph, without moving
    the columns to their places.
    """
    if wrong := next((graph for graph in graphs if graph.context == 2 * graph.ar), None):
        raise BundleError(
            "context",
            got=f"{wrong.context} with AR {wrong.ar}, so as many past rows as new ones",
            expected="no context of twice an AR: Genie mistakes the one for the other",
            fix=f"Export the bundle with --context {3 * wrong.ar} or more, or with a smaller --ar.",
        )


def _bos(bundle: Bundle) -> int | None:
    """The token that the tokenizer adds before a text. Genie tokenizes without it and adds it itself."""
    tokenizer = bundle.tokenizer()
    plain = list(tokenizer.encode("a", add_special_tokens=False).ids)
    whole = list(tokenizer.encode("a").ids)
    if whole == plain:
        return None
    if whole[1:] == plain:
        return int(whole[0])
    raise BundleError(
        f"bundle {bundle.path}: tokenizer",
        got=f"a text of {len(plain)} tokens becomes {whole}",
        expected="at most one token in front of a text",
        fix="Genie can add no more: remove it from the post-processor, and export with that tokenizer.json.",
    )
