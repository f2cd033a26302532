"""What a bundle says of its graphs: each is one file, or several parts that run one after the other."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["decode", "prefill", "score"]

IDS, EMBEDDINGS, LOGITS = "input_ids", "inputs_embeds", "logits"


class PartRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a graph: a run of layers, and what stands in front of them and behind.

    Attributes:
        name: of the graph in the file. Graphs that list a part of the same name share it.
        file: the ONNX file, relative to the bundle; or the `.tflite` file, in which the part is the signature `name`.
        first_layer: the first of its layers.
        stop_layer: one behind the last; the same number in a part that is a head alone.
        embeds: it begins with token ids, and looks their embeddings up.
        head: it ends with the last norm and the head.
    """

    name: str
    file: str
    first_layer: int
    stop_layer: int
    embeds: bool
    head: bool

    @property
    def layers(self) -> range:
        """Its layers, by number."""
        return range(self.first_layer, self.stop_layer)

    @property
    def entry(self) -> str:
        """What it goes on from: `input_ids` [1, AR], `inputs_embeds` [1, 1, AR, hidden], or what a part left."""
        if self.embeds:
            return IDS
        return EMBEDDINGS if self.first_layer == 0 else hidden_name(self.first_layer)

    @property
    def exit(self) -> str:
        """What it leaves: `logits`, or the residual [1, 1, AR, hidden] for the next part."""
        return LOGITS if self.head else hidden_name(self.stop_layer)


class GraphRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One static graph.

    Attributes:
        name: unique in the bundle, such as `ar32_cl512`.
        parts: its files, in the order in which they run.
        ar: tokens per inference.
        context: S.
        role: `decode` (AR-1, logits [1, 1, V]); `prefill` (logits [1, 1, V] of the row that the input
            `logits_index` selects, or that a head by itself is bound to); `score` (logits [1, AR, V] of all rows).
    """

    name: str
    parts: list[PartRecord]
    ar: int
    context: int
    role: Role

    @classmethod
    def whole(cls, name: str, file: str, *, layers: int, ar: int, context: int, role: Role) -> GraphRecord:
        """A graph of one part that holds everything."""
        part = PartRecord(name=name, file=file, first_layer=0, stop_layer=layers, embeds=True, head=True)
        return cls(name=name, parts=[part], ar=ar, context=context, role=role)

    @property
    def is_whole(self) -> bool:
        """Whether one file takes token ids and gives logits."""
        return len(self.parts) == 1 and self.part.embeds

    @property
    def part(self) -> PartRecord:
        """The only part; see `Bundle.require_whole` for who needs one.

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
    """Name of the residual in front of a layer, where a graph is divided there."""
    return f"hidden_{layer}"


def mask_name(window: int | None) -> str:
    """Name of the attention mask of layers that attend to so many tokens, itself included; None for all."""
    return "attention_mask" if window is None else f"attention_mask_w{window}"


def rope_inputs(suffix: str) -> tuple[str, str]:
    """Names of the graph inputs for cosines and sines."""
    return "position_ids_cos" + suffix, "position_ids_sin" + suffix
