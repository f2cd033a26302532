"""A vision encoder: its sizes, how pictures become its inputs, and how a prompt names its outputs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
_Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Pixels = Annotated[int, msgspec.Meta(ge=1, le=1 << 13)]
_Token = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Tiles = Annotated[int, msgspec.Meta(ge=1, le=64)]

PATCHES, POSITIONS, PROJECTOR = "vision.patches.weight", "vision.positions.weight", "vision.projector.weight"
PROJECTOR_BIAS = "vision.projector.bias"
PROJECTOR_OUT, PROJECTOR_OUT_BIAS = "vision.projector_out.weight", "vision.projector_out.bias"
MERGED_MEANS = "vision.merged_means.weight"
"""Takes from the mean of each patch that of all patches that are merged with it."""
PIXELS_PORT, ROWS_PORT = "pixel_values", "image_features"
"""Input `[1, 1, inputs, 3 * patch**2]` and output `[1, 1, rows, output]` of an encoder's graph."""


def low_of(name: str) -> str:
    """The name of the lower 8 bits of a matrix of 16 bits; see `EncoderSpec.wide`."""
    return name.replace(".weight", "_low.weight")


def mean_of(name: str) -> str:
    """The name of the mean of a tensor's outputs, which is stored by itself; see `EncoderSpec.keeps_means`."""
    return name.replace(".weight", "_mean.weight").replace(".bias", "_mean.bias")


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vision transformer for square pictures of one size, and a projector of its results to embeddings.

    Attributes:
        hidden: width of the residual.
        heads: of an attention.
        intermediate: width of the feed-forward.
        image: edge of a picture, in pixels.
        patch: edge of a patch, in pixels.
        merge: edge of the squares of patches that become one row of the output (pixel shuffle), in patches.
        output: width of the rows: that of the decoder's residual.
        eps: of the norms.
        has_class: whether a row of its own, which is no patch, takes part in attention. It is the last input, of zeros.
        exact_gelu: whether GELU has the error function; else its approximation with tanh.
        projector: one matrix behind a norm of each patch, or two with a GELU between them behind a norm of merged ones.
        projector_eps: of that norm.
        biased_inputs: whether checkpoints have biases of queries, keys and values. Graphs always do: of norms.
        wide: names of the matrices of 16 bits: each is two of 8, whose products are added. The lower one is what
            rounding the matrix to 8 bits left, rounded to 8 bits.
    """

    model_type: str
    layers: _Count
    hidden: _Width
    heads: _Count
    intermediate: _Width
    image: _Pixels
    patch: _Pixels
    merge: _Count
    output: _Width
    eps: _Epsilon
    has_class: bool = False
    exact_gelu: bool = False
    projector: Literal["matrix", "mlp"] = "matrix"
    projector_eps: _Epsilon = 1e-5
    biased_inputs: bool = True
    wide: tuple[_Text, ...] = ()

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden: got {self.hidden}; expected a multiple of {self.heads} heads")
        if self.image % (self.patch * self.merge):
            raise ValueError(f"image: got {self.image} pixels; expected a multiple of {self.patch} x {self.merge}")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def side(self) -> int:
        """Patches along an edge of a picture."""
        return self.image // self.patch

    @property
    def patches(self) -> int:
        """Patches of a picture."""
        return self.side**2

    @property
    def keeps_means(self) -> bool:
        """Whether the means of the residual's rows are needed: by a norm of merged patches."""
        return self.projector == "mlp"

    @property
    def inputs(self) -> int:
        """Rows of the input: patches, and a class."""
        return self.patches + self.has_class

    @property
    def patch_values(self) -> int:
        """Values of a patch: channels times pixels."""
        return 3 * self.patch**2

    @property
    def merged(self) -> int:
        """Patches that become one row."""
        return self.merge**2

    @property
    def rows(self) -> int:
        """Rows of the output for a picture."""
        return self.patches // self.merged

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of every matrix, by name."""
        found = {PATCHES: (self.hidden, self.patch_values)}
        for layer in range(self.layers):
            at = f"vision.layers.{layer}."
            found |= {f"{at}{name}_proj.weight": (self.hidden, self.hidden) for name in "qkvo"}
            found[at + "fc1.weight"] = self.intermediate, self.hidden
            found[at + "fc2.weight"] = self.hidden, self.intermediate
        found[PROJECTOR] = self.output, self.hidden * self.merged
        if self.projector == "mlp":
            found[PROJECTOR_OUT] = self.output, self.output
        if self.keeps_means:
            writers = [name for name in found if name == PATCHES or name.endswith(("o_proj.weight", "fc2.weight"))]
            found |= {mean_of(name): (1, found[name][1]) for name in writers}
            found[MERGED_MEANS] = self.merged, self.merged
        return found | {low_of(name): found[name] for name in self.wide}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that are no matrices of products, by name."""
        found: dict[str, tuple[int, ...]] = {POSITIONS: (self.inputs, self.hidden), PROJECTOR_BIAS: (self.output,)}
        if self.projector == "mlp":
            found[PROJECTOR_OUT_BIAS] = (self.output,)
        for layer in range(self.layers):
            at = f"vision.layers.{layer}."
            found |= {f"{at}q_proj.bias.h{head}": (self.head_dim,) for head in range(self.heads)}
            found |= {f"{at}o_proj.bias": (self.hidden,), f"{at}fc2.bias": (self.hidden,)}
            found[at + "fc1.bias"] = (self.intermediate,)
            if self.keeps_means:
                found |= {f"{at}o_proj_mean.bias": (1,), f"{at}fc2_mean.bias": (1,)}
        if self.keeps_means:
            found[mean_of(POSITIONS)] = self.inputs, 1
        return found


class PictureSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a picture becomes tiles of the encoder's size, and tokens of a prompt.

    Attributes:
        tiling: into how many tiles a picture is split, with the whole picture as the last one: `none`, `multiples` of
            the tile's edge that hold it, or the grid of the nearest `aspect` ratio.
        resample: the filter.
        longest: the longer edge is resized to this many pixels before all else; None for no such step.
        least_tiles: of a grid of the nearest aspect ratio.
        most_tiles: of it.
        mean: of each channel, subtracted from values of 0 to 1.
        deviation: of each channel, divides what is left.
        token: the text that stands for one row of the encoder's output, and in a prompt for a picture.
        token_id: its id.
        begin: the text before a picture.
        whole: the text before the whole picture.
        end: the text behind it.
        numbered: whether each tile has the text before it and one with its row and column.
    """

    tiling: Literal["none", "multiples", "aspect"]
    resample: Literal["lanczos", "bicubic"]
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    token: _Token
    token_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    begin: _Text
    whole: _Text
    end: _Text
    numbered: bool
    longest: _Pixels | None = None
    least_tiles: _Tiles = 1
    most_tiles: _Tiles = 12
