"""A graph and its parts: one file, or several that run one after the other."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Role = Literal["decode", "prefill", "score", "verify"]

_Layer = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 27)]

IDS, EMBEDDINGS, LOGITS = "input_ids", "inputs_embeds", "logits"
"""Names of a graph's first inputs and last output; see `hidden_name` for those between parts."""


class PartRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a graph: consecutive layers, with or without the embedding before them and the head after them.

    Attributes:
        name: of the graph in the file. Graphs that list a part of the same name share it.
        file: the ONNX file, relative to the bundle; or the `.tflite` file, in which the part is the signature `name`.
        first_layer: its first layer.
        stop_layer: one past its last layer; equal to `first_layer` if the part is only a head.
        embeds: whether it reads token ids and looks up their embeddings.
        head: whether it ends with the final norm and the head.
    """

    name: str
    file: str
    first_layer: _Layer
    stop_layer: _Layer
    embeds: bool
    head: bool

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.first_layer, self.stop_layer)

    def ends(self, layers: int) -> bool:
        """Whether it has the last of so many layers."""
        return self.first_layer < self.stop_layer == layers

    @property
    def entry(self) -> str:
        """Its first input: `input_ids` [1, AR], `inputs_embeds` [1, 1, AR, hidden], or the hidden state of a part."""
        if self.embeds:
            return IDS
        return EMBEDDINGS if self.first_layer == 0 else hidden_name(self.first_layer)

    @property
    def exit(self) -> str:
        """Its last output: `logits`, or the hidden state [1, 1, AR, hidden] for the next part."""
        return LOGITS if self.head else hidden_name(self.stop_layer)


class GraphRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One static graph.

    Attributes:
        name: unique in the bundle, such as `ar32_cl512`.
        parts: in the order in which they run.
        ar: tokens per inference.
        context: S.
        role: `decode` (AR-1, logits [1, 1, V]); `prefill` (logits [1, 1, V] of the row that the input
            `logits_index` selects, or that a separate head is bound to); `verify` (logits [1, AR, V] of all rows, for
            the last token and drafts); `score` (logits as for `verify`, in the largest context alone, never compiled).
    """

    name: str
    parts: list[PartRecord]
    ar: _Tokens
    context: _Tokens
    role: Role

    @classmethod
    def whole(
        cls, name: str, file: str, *, layers: int, ar: int, context: int, role: Role, embeds: bool = True
    ) -> GraphRecord:
        """A graph of one part."""
        part = PartRecord(name=name, file=file, first_layer=0, stop_layer=layers, embeds=embeds, head=True)
        return cls(name=name, parts=[part], ar=ar, context=context, role=role)

    @property
    def logit_rows(self) -> int:
        """Number of tokens of a step that get logits."""
        return self.ar if self.role in ("score", "verify") else 1

    @property
    def is_whole(self) -> bool:
        """Whether one file takes token ids and gives logits."""
        return len(self.parts) == 1 and self.part.embeds

    @property
    def part(self) -> PartRecord:
        """The only part; see `Bundle.require_whole`.

        Raises:
            ValueError: there are several.
        """
        if len(self.parts) != 1:
            raise ValueError(f"{self.name}: got {len(self.parts)} parts; expected one")
        return self.parts[0]

    @property
    def file(self) -> str:
        """The file of the only part."""
        return self.part.file


def hidden_name(layer: int) -> str:
    """Name of the hidden state before a layer, where a graph is divided."""
    return f"hidden_{layer}"
