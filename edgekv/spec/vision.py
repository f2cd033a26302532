"""A vision encoder: its sizes, how pictures become its inputs, and how a prompt names its outputs."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
_Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Pixels = Annotated[int, msgspec.Meta(ge=1, le=1 << 13)]
_Token = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_Tiles = Annotated[int, msgspec.Meta(ge=1, le=64)]

PATCHES, POSITIONS, PROJECTOR = "vision.patches.weight", "vision.positions.weight", "vision.projector.weight"
PROJECTOR_BIAS = "vision.projector.bias"
PROJECTOR_OUT, PROJECTOR_OUT_BIAS = "vision.projector_out.weight", "vision.projector_out.bias"
MERGED_MEANS = "vision.merged_means.weight"
"""Takes from the mean of each patch that of all patches that are merged with it."""
CENTER = "vision.center.weight"
"""Takes from merged patches their mean."""
PATCHES_BIAS, TABLE = "vision.patches.bias", "vision.table.weight"
"""Of an encoder whose pictures have shapes of their own: `POSITIONS` of the others is both."""
LAST_NORM, LAST_NORM_BIAS = "vision.last_norm.weight", "vision.last_norm.bias"
"""Of a norm behind the layers that another follows; else they are in the matrix that reads it."""
LAYER_ROWS, LAYER_ROWS_BIAS = "vision.layer_rows.weight", "vision.layer_rows.bias"
LAYER_ROWS_NORM = "vision.layer_rows_norm.weight"
"""Of what the layers of the decoder read of rows, `[layers * width]`; see `LayerRows`."""
PIXELS_PORT, ROWS_PORT = "pixel_values", "image_features"
"""Input `[1, 1, inputs, 3 * patch**2]` and output `[1, 1, rows, output]` of an encoder's graph."""
LAYER_ROWS_PORT = "layer_rows"
"""Output `[1, 1, rows, layers * width]`: what layers of the decoder read of rows; see `LayerRows`."""
PLACES_PORT, PADDING_PORT = "position_weights", "padding_mask"
"""Further inputs of an encoder whose pictures have shapes of their own: how much of each row of its table, if it has
one, each patch gets, `[1, 1, inputs, table_side**2]`, and what lowers the scores of inputs that are no patches,
`[1, 1, 1, inputs]`."""
COS_PORT, SIN_PORT = "position_ids_cos", "position_ids_sin"
"""Inputs of an encoder with a rotary embedding, `[1, 1, inputs, head_dim]`; the first half of the sines is negative."""

MAX_SLOTS = 1 << 14
"""Inputs of an encoder at most."""


def deepstack_port(number: int) -> str:
    """Output `[1, 1, rows, output]` of an encoder: what the decoder adds to the residual behind its layer `number`."""
    return f"deepstack_features_{number}"


def deepstack_fc1(number: int) -> str:
    """The first of the two matrices that make such rows of merged patches."""
    return f"vision.deepstack.{number}.fc1.weight"


def deepstack_fc2(number: int) -> str:
    """The second one."""
    return f"vision.deepstack.{number}.fc2.weight"


def bias_of(name: str) -> str:
    """The name of the bias of a matrix."""
    return name.removesuffix("weight") + "bias"


def low_of(name: str) -> str:
    """The name of the lower 8 bits of a matrix of 16 bits; see `EncoderSpec.wide`."""
    return name.replace(".weight", "_low.weight")


def mean_of(name: str) -> str:
    """The name of the mean of a tensor's outputs, which is stored by itself; see `EncoderSpec.keeps_means`."""
    return name.replace(".weight", "_mean.weight").replace(".bias", "_mean.bias")


class Bound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between which numbers a result is clipped."""

    name: _Text
    low: float
    high: float


class LayerRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the layers of a decoder with inputs of their own read of rows of pictures: a projection of each row, with a
    norm for each layer, and a bias, which has what they read of the token that stands for pictures.

    Attributes:
        layers: of the decoder.
        width: of what each reads.
        eps: of the norm.
        token: that stands for pictures.
    """

    layers: _Count
    width: _Width
    eps: _Epsilon
    token: _TokenId

    @property
    def elements(self) -> int:
        """Of all layers."""
        return self.layers * self.width


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vision transformer for pictures of one square, or of shapes of at most its area, and a projector to embeddings.

    Attributes:
        hidden: width of the residual.
        heads: of an attention.
        intermediate: width of the feed-forward.
        image: edge of a picture, in pixels; with shapes of their own, of the largest square.
        patch: edge of a patch, in pixels.
        merge: edge of the squares of patches that become one row of the output (pixel shuffle), in patches.
        output: width of the rows: that of the decoder's residual.
        eps: of the norms.
        has_class: whether a row of its own, which is no patch, takes part in attention. It is the last input, of zeros.
        exact_gelu: whether GELU has the error function; else its approximation with tanh.
        table_side: edge of the table of positions, from which those of a picture's shape are interpolated; 0 for
            pictures of one size, of which each patch has a row of its own.
        interpolation: how: bilinear with antialiasing, or bilinear between corners that stay corners. `summed` is none:
            there are two tables, of columns and of rows, and a patch has the sum of its positions in both.
        max_patches: of the largest picture with a shape of its own; None for those of the square.
        window: edge of the windows within which patches attend, in rows of the output; 0 if they attend to all. A
            graph's inputs stand window by window, and those at a picture's edges may not be full.
        windows: of the input.
        full_layers: those whose patches attend to all in spite of windows.
        rotary_theta: base of the rotary embedding of queries and keys, half of whose pairs turn with the row of a patch
            and half with its column; None without one.
        deepstack: layers behind which patches are merged a second time, by a norm and two matrices of their own: the
            decoder adds these rows to the residual behind its first layers (arXiv 2406.04334).
        projector: one matrix, or two with a GELU between them.
        projector_width: of the results of the first of two; None for that of the output.
        feed_forward: `gelu`; `quick`, its approximation `x * sigmoid(1.702 x)`, whose factor is in the matrices; or
            `gated`: SiLU of the results of one matrix, times those of another.
        rms_norms: whether norms take no mean away and have no biases.
        norms: what is normalized behind the layers: each patch, the patches that become one row together, the
            patches and then what they become, or the averages of patches alone.
        pooled: whether the patches that become one row are averaged, and the root mean square of that is its norm;
            else they stand next to each other.
        projector_eps: of the norm of what patches become.
        biased_inputs: whether checkpoints have biases of queries, keys and values. Graphs always do: of norms.
        gemma_layers: whether layers are as in decoders of Gemma: RMS norms before and behind each block and of each
            head, gated feed-forwards, no biases.
        kv_heads: heads of keys and values that checkpoints have; None for one of each query head, as graphs have.
        clipped: whether checkpoints have bounds of what the matrices of layers read and write.
        bounds: these, of results by name; those of a head stand under the name before `.h`.
        layer_rows: what the layers of the decoder read of each row; None for a decoder without inputs of layers.
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
    table_side: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0
    interpolation: Literal["antialiased", "corners", "summed"] = "antialiased"
    max_patches: _Count | None = None
    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 8)] = 0
    windows: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0
    full_layers: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 12)], ...], msgspec.Meta(max_length=64)] = ()
    rotary_theta: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    deepstack: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 12)], ...], msgspec.Meta(max_length=16)] = ()
    projector: Literal["matrix", "mlp"] = "matrix"
    projector_width: _Width | None = None
    feed_forward: Literal["gelu", "quick", "gated"] = "gelu"
    rms_norms: bool = False
    norms: Literal["patches", "merged", "both", "averages"] = "patches"
    pooled: bool = False
    projector_eps: _Epsilon = 1e-5
    biased_inputs: bool = True
    gemma_layers: bool = False
    kv_heads: _Count | None = None
    clipped: bool = False
    bounds: tuple[Bound, ...] = ()
    layer_rows: LayerRows | None = None
    wide: tuple[_Text, ...] = ()

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden: got {self.hidden}; expected a multiple of {self.heads} heads")
        if self.image % (self.patch * self.merge):
            raise ValueError(f"image: got {self.image} pixels; expected a multiple of {self.patch} x {self.merge}")
        if self.has_shapes and self.has_class:
            raise ValueError("table_side: got a class; expected patches alone")
        if (self.window > 0) != (self.windows > 0) or (self.window and (self.rotary_theta is None or self.has_table)):
            raise ValueError(f"window: got {self.window}; expected windows, and a rotary embedding without a table")
        if self.windows and not self.patches <= self.slots <= MAX_SLOTS:
            expected = f"enough for {self.patches:,} patches, and for {MAX_SLOTS:,} at most"
            raise ValueError(f"windows: got {self.windows}; expected {expected}")
        if (not self.has_table or self.rms_norms) and self.has_shapes and (self.norms != "patches" or self.deepstack):
            raise ValueError(f"norms: got {self.norms}; expected those of patches alone, without a table of positions")
        if self.max_patches is not None and (not self.has_shapes or self.max_patches % self.merged):
            expected = f"squares of {self.merged}, of pictures with shapes"
            raise ValueError(f"max_patches: got {self.max_patches}; expected {expected}")
        if self.pooled != (self.norms == "averages") and self.norms != "both":
            raise ValueError(f"norms: got {self.norms}; expected averages where pooled is true")
        if self.kv_heads is not None and (not self.gemma_layers or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads: got {self.kv_heads}; expected a divisor of {self.heads} heads of gemma_layers")
        if self.gemma_layers and (self.rotary_theta is None or not self.pooled or self.norms != "averages"):
            raise ValueError("gemma_layers: got true; expected a rotary embedding, and norms of averages")
        if self.pooled and (self.deepstack or self.projector != "matrix"):
            raise ValueError("pooled: got true; expected both norms, one matrix, and no deepstack")
        if self.layer_rows is not None and (self.deepstack or not self.gemma_layers):
            raise ValueError("layer_rows: got some; expected gemma_layers, and no deepstack")
        if self.rotary_theta is not None and (self.head_dim % 4 or not self.has_shapes):
            raise ValueError("rotary_theta: got it; expected heads of a multiple of 4, and patches without a class")
        if (self.deepstack and self.deepstack[-1] >= self.layers) or [*self.deepstack] != sorted({*self.deepstack}):
            raise ValueError(f"deepstack: got {self.deepstack}; expected ascending numbers below {self.layers}")

    def bound_of(self, name: str) -> Bound | None:
        """The bounds of a result; None without."""
        plain = name.partition(".h")[0]
        return next((bound for bound in self.bounds if bound.name == plain), None)

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
        """Patches of a picture; of the largest, if they have shapes of their own."""
        return self.side**2 if self.max_patches is None else self.max_patches

    @property
    def keeps_means(self) -> bool:
        """Whether the means of the residual's rows are needed: by a norm of merged patches alone."""
        return self.mean_layers > 0

    @property
    def mean_layers(self) -> int:
        """The first layers that write the means of the residual's rows: those before the last that reads them."""
        return self.layers if self.norms == "merged" else max(self.deepstack, default=-1) + 1

    @property
    def has_shapes(self) -> bool:
        """Whether pictures have shapes of their own."""
        return self.has_table or self.rotary_theta is not None

    @property
    def has_table(self) -> bool:
        """Whether the positions of a picture's shape are interpolated."""
        return self.table_side > 0

    @property
    def table_rows(self) -> int:
        """Rows of the table of positions of pictures with shapes of their own."""
        return 2 * self.table_side if self.interpolation == "summed" else self.table_side**2

    @property
    def slots(self) -> int:
        """Places for patches in the input: those of the largest picture, or of windows."""
        return self.windows * self.window**2 * self.merged if self.window else self.patches

    @property
    def inputs(self) -> int:
        """Rows of the input: places for patches, and a class."""
        return self.slots + self.has_class

    def is_windowed(self, layer: int) -> bool:
        """Whether the patches of a layer attend within windows."""
        return self.window > 0 and layer not in self.full_layers

    @property
    def patch_values(self) -> int:
        """Values of a patch: channels times pixels."""
        return 3 * self.patch**2

    @property
    def merged(self) -> int:
        """Patches that become one row."""
        return self.merge**2

    @property
    def merged_width(self) -> int:
        """Width of what the projector reads."""
        return self.hidden if self.pooled else self.hidden * self.merged

    @property
    def rows(self) -> int:
        """Rows of a picture; of the largest, if they have shapes of their own."""
        return self.patches // self.merged

    @property
    def output_rows(self) -> int:
        """Rows of the output of its graph."""
        return self.slots // self.merged

    @property
    def input_shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """The shapes of the inputs of its graph, by name."""
        shapes = {PIXELS_PORT: (1, 1, self.inputs, self.patch_values)}
        if self.has_shapes:
            if self.has_table:
                shapes[PLACES_PORT] = 1, 1, self.inputs, self.table_rows
            shapes[PADDING_PORT] = 1, 1, 1, self.inputs
        if self.rotary_theta is not None:
            shapes |= dict.fromkeys((COS_PORT, SIN_PORT), (1, 1, self.inputs, self.head_dim))
        return shapes

    @property
    def outputs(self) -> dict[str, tuple[int, int, int, int]]:
        """The shapes of the outputs of its graph, by name: what is embedded, and what layers of the decoder read."""
        ports = ROWS_PORT, *map(deepstack_port, range(len(self.deepstack)))
        shapes = dict.fromkeys(ports, (1, 1, self.output_rows, self.output))
        if self.layer_rows is not None:
            shapes[LAYER_ROWS_PORT] = 1, 1, self.output_rows, self.layer_rows.elements
        return shapes

    def grid_of(self, width: int, height: int) -> tuple[int, int]:
        """How many rows of the output are below each other, and beside each other, of a tile of so many pixels."""
        return height // self.patch // self.merge, width // self.patch // self.merge

    def rows_of(self, width: int, height: int) -> int:
        """Rows of a tile of so many pixels."""
        down, across = self.grid_of(width, height)
        return down * across

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of every matrix, by name."""
        matrices = {PATCHES: (self.hidden, self.patch_values)}
        for layer in range(self.layers):
            at = f"vision.layers.{layer}."
            matrices |= {f"{at}{name}_proj.weight": (self.hidden, self.hidden) for name in "qkvo"}
            matrices[at + "fc1.weight"] = self.intermediate, self.hidden
            if self.gemma_layers or self.feed_forward == "gated":
                matrices[at + "up.weight"] = self.intermediate, self.hidden
            matrices[at + "fc2.weight"] = self.hidden, self.intermediate
        inner = self.output if self.projector_width is None else self.projector_width
        matrices[PROJECTOR] = inner, self.merged_width
        if self.projector == "mlp":
            matrices[PROJECTOR_OUT] = self.output, inner
        if self.has_table:
            matrices[TABLE] = self.hidden, self.table_rows
        if self.norms == "both" and not self.pooled:
            matrices[CENTER] = 1, self.hidden * self.merged
        if self.keeps_means:
            ends = [f"vision.layers.{layer}.{end}" for layer in range(self.mean_layers) for end in ("o_proj", "fc2")]
            writers = [name for name in matrices if name in (PATCHES, TABLE) or name.removesuffix(".weight") in ends]
            matrices |= {mean_of(name): (1, matrices[name][1]) for name in writers}
            matrices[MERGED_MEANS] = self.merged, self.merged
        if self.layer_rows is not None:
            matrices[LAYER_ROWS] = self.layer_rows.elements, self.output
        for number in range(len(self.deepstack)):
            width = self.hidden * self.merged
            matrices |= {deepstack_fc1(number): (width, width), deepstack_fc2(number): (self.output, width)}
        return matrices | {low_of(name): matrices[name] for name in self.wide}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that are no matrices of products, by name."""
        if self.gemma_layers:
            return self._gemma_tensors
        inner = self.output if self.projector_width is None else self.projector_width
        tensors: dict[str, tuple[int, ...]] = {PROJECTOR_BIAS: (inner,)}
        if self.has_table:
            tensors[PATCHES_BIAS] = (self.hidden,)
        elif not self.has_shapes:
            tensors[POSITIONS] = self.inputs, self.hidden
        if self.norms == "both":
            tensors |= {LAST_NORM: (self.hidden,), LAST_NORM_BIAS: (self.hidden,)}
        if self.projector == "mlp":
            tensors[PROJECTOR_OUT_BIAS] = (self.output,)
        for layer in range(self.layers):
            at = f"vision.layers.{layer}."
            biased = "q" if self.rotary_theta is None else "qk"
            tensors |= {
                f"{at}{kind}_proj.bias.h{head}": (self.head_dim,) for kind in biased for head in range(self.heads)
            }
            tensors |= {f"{at}o_proj.bias": (self.hidden,), f"{at}fc2.bias": (self.hidden,)}
            tensors[at + "fc1.bias"] = (self.intermediate,)
            if self.feed_forward == "gated":
                tensors[at + "up.bias"] = (self.intermediate,)
            if layer < self.mean_layers:
                tensors |= {f"{at}o_proj_mean.bias": (1,), f"{at}fc2_mean.bias": (1,)}
        if self.keeps_means:
            tensors |= {mean_of(PATCHES_BIAS): (1,)} if self.has_shapes else {mean_of(POSITIONS): (self.inputs, 1)}
        for number in range(len(self.deepstack)):
            tensors[bias_of(deepstack_fc1(number))] = (self.hidden * self.merged,)
            tensors[bias_of(deepstack_fc2(number))] = (self.output,)
        return tensors

    @property
    def _gemma_tensors(self) -> dict[str, tuple[int, ...]]:
        widths = {"q_norm": self.head_dim, "k_norm": self.head_dim}
        widths |= {"attention_out_norm": self.hidden, "mlp_out_norm": self.hidden}
        if self.clipped:  # else they are in the matrices that read what is normalized
            widths |= {"attention_norm": self.hidden, "mlp_norm": self.hidden}
        tensors: dict[str, tuple[int, ...]] = {
            f"vision.layers.{layer}.{name}.weight": (width,)
            for layer in range(self.layers)
            for name, width in widths.items()
        }
        if self.layer_rows is not None:
            tensors |= {LAYER_ROWS_NORM: (self.layer_rows.width,), LAYER_ROWS_BIAS: (self.layer_rows.elements,)}
        return tensors


class PictureShapes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How large the whole picture is for an encoder: as it was, within limits of its area.

    Attributes:
        patch: edge of a patch, in pixels.
        merge: edge of the squares of patches that become one row, in patches.
        least: rows that it has at least.
        most: rows that it has at most.
        split_above: a picture of more than so many times `most` is split.
        fills: whether smaller pictures are enlarged to the greatest area too, and edges rounded down.
        window: edge of an encoder's windows, in rows of its output; 0 without.
        windows: that a picture has at most, those at its edges that are not full too.
    """

    patch: _Pixels
    merge: _Count
    least: _Count
    most: _Count
    split_above: Annotated[float, msgspec.Meta(gt=0, le=1 << 12)]
    fills: bool = False
    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 8)] = 0
    windows: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0

    def windows_of(self, width: int, height: int) -> int:
        """Windows of a picture of so many pixels; 0 without any."""
        edge = self.window * self.step
        return -(-width // edge) * -(-height // edge) if edge else 0

    @property
    def square(self) -> int:
        """Edge of the largest square, in pixels."""
        edge = math.isqrt(self.most)
        while self.windows_of(edge * self.step, edge * self.step) > self.windows:
            edge -= 1
        return edge * self.step

    @property
    def step(self) -> int:
        """Width and height are multiples of it, in pixels."""
        return self.patch * self.merge


class PictureSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a picture becomes tiles of the encoder's size, and tokens of a prompt.

    Attributes:
        tiling: into how many tiles a picture is split, with the whole picture as the last one: `none`, `multiples` of
            the tile's edge that hold it, or the grid of the nearest `aspect` ratio.
        resample: the filter.
        longest: the longer edge is resized to this many pixels before all else; None for no such step.
        min_tiles: of a grid of the nearest aspect ratio.
        max_tiles: of it.
        mean: of each channel, subtracted from values of 0 to 1.
        deviation: of each channel, divides what is left.
        token: the text that stands for one row of the encoder's output.
        token_id: its id.
        begin: the text before a picture.
        whole: the text before the whole picture.
        end: the text behind it.
        layout: how a prompt has the rows of tiles: all `joined`; in `lines`, each with the text before it and one with
            its row and column; or `marked`, each with a text that has its row and column.
        shapes: of the whole picture; None for the encoder's square.
        sizes: width and height that the whole picture may have, in pixels: it gets the nearest; empty for any within
            `shapes`.
        written: what a picture is in a prompt that has no place for it: its mark, and texts around it that templates
            write; empty for the mark alone.
        own_mark: the text that stands for a picture in a prompt; empty if it is the one of a row.
    """

    tiling: Literal["none", "multiples", "aspect"]
    resample: Literal["lanczos", "bicubic", "bilinear"]
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    token: _Token
    token_id: _TokenId
    begin: _Text
    whole: _Text
    end: _Text
    layout: Literal["joined", "lines", "marked"]
    shapes: PictureShapes | None = None
    sizes: Annotated[tuple[tuple[_Pixels, _Pixels], ...], msgspec.Meta(max_length=16)] = ()
    written: _Text = ""
    own_mark: _Text = ""
    longest: _Pixels | None = None
    min_tiles: _Tiles = 1
    max_tiles: _Tiles = 12

    @property
    def mark(self) -> str:
        """The text that stands for a picture in a prompt."""
        return self.own_mark or self.token
