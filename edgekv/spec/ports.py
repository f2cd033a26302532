"""Inputs and outputs of a graph: what they are, and how those of a loaded graph are checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from edgekv.errors import BundleError
from edgekv.spec.lora import STACK

FLOAT = "float"
"""The type of inputs for adapters that a CPU's graph reads dequantized, and of hidden states between parts into which
an engine has divided a graph; ONNX Runtime's name."""

OPEN_ROWS, OPEN_TOKENS = "rows_", "tokens_"
"""Names of a graph's sizes that can be smaller, past rows and new tokens; behind each is the most that it can be."""

PortKind = Literal[
    "ids", "embeddings", "layer_inputs", "hidden", "mask", "cos", "sin", "past", "borrowed", "state", "conv_rows",
    "others", "lora", "logits_index", "new", "logits", "target_hidden", "last_hidden", "expert",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a graph.

    Attributes:
        name: as in the graph.
        dtype: name of the numpy type.
        shape: all dimensions; graphs are static.
        kind: kind of port; None if it was read from a file. Not compared.
        encoding: the name of its encoding in the manifest; None for plain integers and if it was read from a file.
            Not compared.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: PortKind | None = field(default=None, compare=False)
    encoding: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class GraphInterface:
    """The inputs and outputs of a graph, or of one part of it, in the order of its file.

    Attributes:
        inputs: as `DecoderInterface.graph` orders them.
        outputs: in the same order.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def __getitem__(self, name: str) -> Port:
        """The port of this name.

        Raises:
            KeyError: there is none.
        """
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def entry(self) -> Port:
        """The first input: token ids, embeddings, or the hidden state from the previous part."""
        return self.inputs[0]

    @property
    def exit(self) -> Port:
        """The last output: logits, or the hidden state for the next part."""
        return self.outputs[-1]

    def check(self, loaded: GraphInterface, file: str) -> None:
        """Compare with a loaded graph, named `file` in errors. The order does not matter.

        Raises:
            BundleError: an input or output is missing, unknown, or of another type or shape.
        """
        _compare(file, "input", self.inputs, loaded.inputs)
        _compare(file, "output", self.outputs, loaded.outputs)

    @property
    def adapter_ports(self) -> tuple[Port, ...]:
        """The inputs for adapters."""
        return tuple(port for port in self.inputs if port.kind == "lora")

    def with_adapters_like(self, rewritten: GraphInterface) -> GraphInterface:
        """The same with inputs for adapters as a rewritten graph reads them: of another type, and some as one stack.

        Args:
            rewritten: the rewritten graph. What it does not stack or retype stays as it is, so that `check` names it.
        """
        own = {port.name: port for port in self.adapter_ports}
        stacks = {port.name: port.name.split(STACK) for port in rewritten.inputs if STACK in port.name}
        known = {name: parts for name, parts in stacks.items() if all(part in own for part in parts)}
        stacked = {part for parts in known.values() for part in parts}
        alone = [
            replace(port, dtype=_rewritten_dtype(rewritten, port)) for port in own.values() if port.name not in stacked
        ]
        together = [
            replace(own[parts[0]], name=name, dtype=rewritten[name].dtype, shape=(len(parts), *own[parts[0]].shape[1:]))
            for name, parts in known.items()
        ]
        others = [port for port in self.inputs if port.kind != "lora"]
        return GraphInterface((*others, *alone, *together), self.outputs)

    def with_float_hidden(self, names: Iterable[str]) -> GraphInterface:
        """The same with hidden states of these names as floats."""
        chosen = {*names}

        def retyped(port: Port) -> Port:
            return replace(port, dtype=FLOAT) if port.kind == "hidden" and port.name in chosen else port

        return GraphInterface(tuple(map(retyped, self.inputs)), tuple(map(retyped, self.outputs)))

    def with_hidden_like(self, rewritten: GraphInterface) -> GraphInterface:
        """The same with hidden states of the type that a rewritten graph has."""
        ports = (*rewritten.inputs, *rewritten.outputs)
        return self.with_float_hidden(port.name for port in ports if port.dtype == FLOAT)

    def with_cache_stacks(self, names: Iterable[str]) -> GraphInterface:
        """The same of a graph that appends to the cache in its memory: it gives all rows, past and new.

        Args:
            names: of its ports. What stacks do not name stays as it is, so that `check` names it.
        """
        parts = {name: name.split(STACK)[1:] for name in names if name.startswith(STACK)}
        stacks = {heads[0]: (name, heads) for name, heads in parts.items() if all(head in self for head in heads)}
        others = {head for _, heads in stacks.values() for head in heads[1:]}

        def stacked(port: Port) -> Port:
            if port.name not in stacks:
                return port
            name, heads = stacks[port.name]
            return replace(port, name=name, shape=(1, len(heads), *self[port.encoding or port.name].shape[2:]))

        inputs, outputs = (
            tuple(stacked(port) for port in ports if port.name not in others) for ports in (self.inputs, self.outputs)
        )
        return GraphInterface(inputs, outputs)

    @property
    def appends(self) -> bool:
        """Whether a graph with these ports appends to the cache in its memory."""
        return any(port.name.startswith(STACK) for port in self.outputs)

    @cached_property
    def _by_name(self) -> dict[str, Port]:
        return {port.name: port for port in (*self.inputs, *self.outputs)}


def cache_stack(names: Iterable[str]) -> str:
    """The name of a port for the tensors of several heads; see `GraphInterface.with_cache_stacks`."""
    return STACK + STACK.join(names)


def _rewritten_dtype(rewritten: GraphInterface, port: Port) -> str:
    """The type of a port in a rewritten graph, which may read floats instead of integers."""
    return FLOAT if port.name in rewritten and rewritten[port.name].dtype == FLOAT else port.dtype


def _compare(file: str, kind: str, own: Iterable[Port], loaded: Iterable[Port]) -> None:
    ports = {port.name: port for port in loaded}
    names = [port.name for port in own]
    fix = "Export the bundle again with this edgekv."
    for port in own:
        if (other := ports.get(port.name)) != port:
            raise BundleError(f"{file}: {kind}", got=other or "none", expected=port, fix=fix)
    if unknown := sorted(ports.keys() - set(names)):
        raise BundleError(f"{file}: {kind}", got=ports[unknown[0]], expected="no further one", fix=fix)
