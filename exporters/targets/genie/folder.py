"""A folder for Genie: its files and records, its states, and its adapters."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from edgekv.bundle import Bundle, Manifest, lora_adapters
from edgekv.engine import LoraChoice
from edgekv.engine.adapters import Adapters
from edgekv.errors import UsageError
from edgekv.kv import Sink
from edgekv.machine.decoding import DECODERS
from edgekv.pictures import Picture, Tile, TiledPicture, encoder_inputs, expand, open_tiles
from edgekv.spec import EncoderSpec, PictureSpec
from exporters.targets.genie.config import CONFIG, SHARED_CONFIG, GenieConfig, Nodes
from exporters.targets.record import TargetRecord, open_for
from quant import Encoding

GENIE_MANIFEST = "genie_bundle.json"
_ABOVE = 0.25  # of a step


class GenieGraph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a graph: its name in the binaries, its own binary, its number, AR and context.

    If there are no binaries of single graphs, the binary has that part of all graphs.
    """

    name: str
    file: str
    part: int
    ar: int
    context: int


class GenieSink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokens that every conversation begins with and no graph computes.

    Attributes:
        tokens: ids.
        text: what they are in a prompt, which must not repeat them.
        state: the folder that `GenieDialog_restore` reads before the first query and after a reset.
    """

    tokens: list[int]
    text: str
    state: str


class GenieAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter that Genie can apply.

    Attributes:
        name: in the configuration.
        path: the folder with a float32 file for each input of the graphs for adapters.
        state: as `GenieSink.state`, with this adapter; null without a sink.
    """

    name: str
    path: str
    state: str | None = None


class GenieVision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program needs to give pictures to Genie.

    Attributes:
        encoder: sizes of the graph in `vision_encoder.bin`.
        pictures: how pictures become tiles, and where their rows stand in a prompt.
        pixels: the encoding of its input.
    """

    encoder: EncoderSpec
    pictures: PictureSpec
    pixels: Encoding

    def input_of(self, tile: NDArray[np.uint8]) -> NDArray[np.float32]:
        """A tile `[image, image, 3]` as the image encoder's node takes it: patches `[inputs, 3 * patch**2]`.

        Genie divides by the scale, adds the zero point and truncates, so each is a quarter of a step above its integer.
        """
        integers = self.pixels.quantize(encoder_inputs(tile, self.encoder, self.pictures).patches).astype(np.float64)
        pixels: NDArray[np.float32] = ((integers - self.pixels.zero_point + _ABOVE) * self.pixels.scale).astype(
            np.float32
        )
        return pixels

    def pieces_of(self, text: str, pictures: Sequence[TiledPicture]) -> list[str | NDArray[np.uint8]]:
        """A prompt as the texts and tiles that a pipeline is given one after the other.

        Args:
            text: with the picture's token where each stands, or with none to have them in front.
            pictures: in order.

        Raises:
            UsageError: the text has another number of these tokens.
        """
        token, grid = self.pictures.token, self.encoder.grid_of(self.encoder.image, self.encoder.image)
        opened = [Picture(tuple(Tile(tile, grid) for tile in picture.tiles), picture.grid) for picture in pictures]
        tiles = iter([tile for picture in pictures for tile in picture.tiles])
        pieces = list[str | NDArray[np.uint8]]()
        for part in re.split(f"((?:{re.escape(token)})+)", expand(text, opened, self.pictures)):
            if part.startswith(token):
                pieces += [next(tiles) for _ in range(part.count(token) // self.encoder.rows)]
            elif part:
                pieces.append(part)
        return pieces

    def prompt_of(self, text: str, files: Sequence[Path]) -> list[str | NDArray[np.float32]]:
        """A prompt with pictures from files, as `GeniePipeline.query` takes it.

        Raises:
            UsageError: a picture cannot be read, or the text has another number of tokens for pictures.
        """
        pictures = [open_tiles(file, "--image", self.pictures, self.encoder.image) for file in files]
        pieces = self.pieces_of(text, pictures)
        return [piece if isinstance(piece, str) else self.input_of(piece) for piece in pieces]


class GenieManifest(TargetRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`genie_bundle.json`. `checked` says whether Genie loaded the binaries of single graphs and chose edgekv's tokens.

    Attributes:
        soc: part number of the chip that the binaries target.
        arch: its HTP version.
        compiler: the package that compiled the binaries, with its version; Genie of this package loads them.
        context: S of the largest graphs.
        graphs: all graphs; if they are split, the first parts of all, then the second parts, and so on.
        shared: for each part, the binary of all graphs over one copy of the weights; empty if `graphs` names it.
        sink: the state to restore; null if the graphs compute every token.
        adapters: that Genie can apply; absent if there are none.
        vision: for pictures; absent in folders for text alone.
    """

    soc: str
    arch: int
    compiler: str
    context: int
    graphs: list[GenieGraph]
    shared: list[str]
    sink: GenieSink | None = None
    adapters: list[GenieAdapter] | UnsetType = UNSET
    vision: GenieVision | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class GenieFolder:
    """A verified folder.

    Attributes:
        path: the folder, absolute.
        manifest: its `genie_bundle.json`.
    """

    path: Path
    manifest: GenieManifest

    def config(self, *, shared: bool = False) -> GenieConfig:
        """The configuration that names the binaries of single graphs, or the shared one."""
        name = SHARED_CONFIG if shared else CONFIG
        return DECODERS[GenieConfig].decode((self.path / name).read_bytes())

    def nodes(self, *, shared: bool = False) -> Nodes:
        """The nodes of a pipeline that reads pictures.

        Raises:
            UsageError: the folder reads text alone.
        """
        self.vision()
        return Nodes.of(self.config(shared=shared).dialog)

    def vision(self) -> GenieVision:
        """What pictures need.

        Raises:
            UsageError: the folder reads text alone.
        """
        if isinstance(vision := self.manifest.vision, UnsetType):
            fix = "Leave pictures out, or write the folder of a bundle with a vision encoder."
            raise UsageError("--image", got="a folder that reads text alone", expected="text", fix=fix)
        return vision

    @property
    def state(self) -> Path | None:
        """The saved state with which every conversation begins, if there is one."""
        return None if self.manifest.sink is None else self.path / self.manifest.sink.state

    def adapter(self, name: str) -> GenieAdapter:
        """An adapter of this name.

        Raises:
            UsageError: there is none.
        """
        held = {record.name: record for record in self.manifest.adapters or ()}
        if name not in held:
            raise UsageError(
                "--lora",
                got=repr(name),
                expected=", ".join(held) or "an adapter; the folder has none",
                fix="Add it to the bundle with edgekv lora add, and write the folder again.",
            )
        return held[name]

    def adapter_state(self, adapter: GenieAdapter) -> Path | None:
        """The saved state with which conversations with this adapter begin, if there is one."""
        return None if adapter.state is None else self.path / adapter.state

    def query(self, prompt: str) -> str:
        """What is asked for a prompt: the text behind the tokens that are restored.

        Raises:
            UsageError: nothing is left.
        """
        text = prompt if self.manifest.sink is None else prompt.removeprefix(self.manifest.sink.text)
        if not text:
            raise UsageError(
                "--prompt", got="no text", expected="some, after the first token", fix="Give a longer prompt."
            )
        return text


def open_genie_folder(path: str | Path) -> GenieFolder:
    """Read a folder of `edgekv bundle genie`; every file is checked against its hash.

    Raises:
        BundleError: the folder is something else, or a file is missing or changed.
    """
    folder = Path(path).absolute()
    return GenieFolder(folder, open_for("genie", GenieManifest, folder, GENIE_MANIFEST))


STATE = "sink"
"""The folder, within the one that Genie loads."""

_DIALOG, _CACHE, _HISTORY = "dialog.json", "kv-slot-0.primary.qnn-htp", "token-history-slot-0"
_MAGIC = 0xC0DE
_HEADER = struct.Struct("<IIHHHH")  # tensors, magic, 0, heads of a tensor, D, tokens


class _Conversation(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """`dialog.json`, of a conversation that begins with tokens that nobody asked.

    After a query `last_tok` is the last token of the answer, which Genie runs before the next query; here it is none.
    """

    last_tok: int = -1
    n_generated: int = 0
    n_past: int
    n_prompt: int
    n_queries: int = 0
    prefill_only: bool = False
    process_state: int = 0
    unprocessed_embedding_size: int = 0
    unprocessed_tokens_size: int = 0


def write_state(folder: Path, manifest: Manifest, sink: Sink) -> None:
    """Write a folder from which Genie restores the sink.

    The cache file has a header, the keys of all heads `[D, tokens]`, their values `[tokens, D]`, and the scales of both
    as float64; heads are ordered by their layers.
    """
    folder.mkdir()
    count = len(sink.tokens)
    tensors = list(manifest.geometry.names())
    keys, values = ([tensor.past for tensor in tensors if tensor.kind == kind] for kind in ("key", "value"))
    with (folder / _CACHE).open("wb") as file:
        file.write(_HEADER.pack(len(tensors), _MAGIC, 0, 1, manifest.model.head_dim, count))
        for name in keys:
            file.write(sink.rows[name].T.tobytes())
        for name in values:
            file.write(sink.rows[name].tobytes())
        scales = [np.float32(manifest.encodings[name].scale) for name in (*keys, *values)]
        file.write(np.array(scales, np.float64).tobytes())
    # With these, queries that rewind to a common prefix may begin with the sink.
    (folder / _HISTORY).write_bytes(np.array(sink.tokens, np.uint32).tobytes())
    (folder / _DIALOG).write_bytes(msgspec.json.encode(_Conversation(n_past=count, n_prompt=count)))


_FOLDER = "lora"


def reads_adapters(bundle: Bundle) -> bool:
    """Whether Genie writes the inputs for adapters. It fills those that it does not know with zeros."""
    return bundle.manifest.lora is not None and bool(lora_adapters(bundle))


def write_adapters(bundle: Bundle, folder: Path) -> list[GenieAdapter]:
    """Write the adapters of a bundle, each into folders of its own; none are written for a bundle without slots.

    `lora/NAME/TENSOR.raw` has the float32 values of an input. Genie divides them by the scale, adds the zero point and
    truncates, so each is a quarter of a step above its integer, which rounding would find too. `sink-NAME` has the
    state that conversations with the adapter begin with.
    """
    if not reads_adapters(bundle):
        return []
    opener, written = Adapters(bundle), []
    for adapter in lora_adapters(bundle):
        name = adapter.record.name
        bound, path = opener.open([LoraChoice(name)]), Path(_FOLDER, name)
        (folder / path).mkdir(parents=True)
        for tensor, values, scale in bound.memory.floats():
            (values + np.float32(_ABOVE * scale)).tofile(folder / path / f"{tensor}.raw")
        state = None
        if bound.sink is not None:
            state = f"{STATE}-{name}"
            write_state(folder / state, bundle.manifest, bound.sink)
        written.append(GenieAdapter(name=name, path=path.as_posix(), state=state))
    return written
