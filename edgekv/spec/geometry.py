"""What layers keep of past tokens, in integers: `RowSpec | ConvSpec | DeltaSpec`; used by all of `edgekv.kv`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

KvDtype = Literal["u8", "s8", "s16", "u16"]
"""Type of a cache tensor. `u16` is for states alone: no product of matrices reads it as its second operand."""
Kind = Literal["key", "value", "conv", "delta_key", "delta_value", "decay", "recurrent"]
KeyLayout = Literal["rows", "columns"]

_ELEMENT_BYTES: dict[KvDtype, int] = {"u8": 1, "s8": 1, "s16": 2, "u16": 2}
ZERO_POINTS: dict[KvDtype, int] = {"u8": 128, "s8": 0, "s16": 0, "u16": 32768}
KINDS: tuple[Kind, Kind] = ("key", "value")
"""Of layers with attention: a row per token and head."""
DeltaKind = Literal["delta_key", "delta_value", "decay", "recurrent"]
DELTA_KINDS: tuple[DeltaKind, ...] = ("delta_key", "delta_value", "decay", "recurrent")
"""Of layers with a gated delta rule or Mamba-2: rows of keys and of corrections of all heads, or of values, and of the
decays of one head; and the matrices S of all heads, beside each other. The convolution before it has a state too."""
CHECKPOINT_TOKENS = 64
"""Tokens between two checkpoints of such a layer, and P, the rows that a step reads of its tail. No step crosses
a checkpoint: results would depend on how a text is divided into steps."""
CacheResult = Literal["cache", "state", "tail"]


@dataclass(frozen=True, slots=True)
class KvTensor:
    """A cache tensor of one head, or a state, and the names of its input and output in every graph (Genie's names)."""

    layer: int
    kind: Kind
    head: int

    @property
    def past(self) -> str:
        """The graph input `[1, 1, S-AR, D]`, or `[1, 1, D, S-AR]` for keys as columns; `[1, 1, K-1, H]` for states."""
        return f"{self._stem}_in"

    @property
    def new(self) -> str:
        """The graph output `[1, 1, AR, D]`, or `[1, 1, D, AR]` for keys as columns."""
        return f"{self._stem}_out"

    @property
    def others(self) -> str:
        """The input `[1, 1, (K-1) * AR, H]` of a verify graph: states of other sequences, K-1 rows for each token."""
        return f"{self._stem}_others"

    @property
    def result(self) -> CacheResult:
        """The kind of result whose rows it holds: of all tokens, before the next token, or since a checkpoint."""
        return "cache" if self.kind in KINDS else "tail" if self.kind in DELTA_KINDS else "state"

    @property
    def is_written(self) -> bool:
        """Whether graphs write rows of it; the matrices of a gated delta rule follow from rows."""
        return self.kind != "recurrent"

    @property
    def has_heads(self) -> bool:
        """Whether each head has a tensor of its own."""
        return self.kind in KINDS or self.kind == "decay"

    @property
    def _stem(self) -> str:
        return _stem(self.kind, self.layer, self.head if self.has_heads else None)


@lru_cache(maxsize=1 << 14)
def _stem(kind: Kind, layer: int, head: int | None) -> str:
    stem = f"past_{kind}_{layer}" if kind in KINDS else f"{kind}_state_{layer}"
    return stem if head is None else f"{stem}_h{head}"


class _Tensors:
    """What follows from the sizes of any layers."""

    __slots__ = ()
    layers: int
    heads: int
    width: int
    kv_dtype: KvDtype
    numbers: tuple[int, ...]
    kinds: tuple[Kind, ...]

    def _check(self, *names: str) -> None:
        for name in ("layers", *names):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; expected at least 1")
        if self.kv_dtype not in _ELEMENT_BYTES:
            raise ValueError(f"kv_dtype: got {self.kv_dtype!r}; expected one of {', '.join(_ELEMENT_BYTES)}")
        if self.numbers and (len(self.numbers) != self.layers or min(self.numbers) < 0):
            raise ValueError(f"numbers: got {self.numbers}; expected those of {self.layers} layers, from 0 on")

    @property
    def tensors(self) -> int:
        """N = layers x kinds x heads."""
        return self.layers * len(self.kinds) * self.heads

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self.kv_dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one tensor."""
        return self.width * self.element_bytes

    @property
    def zero_point(self) -> int:
        """The integer that represents 0.0, which fills unused rows."""
        return ZERO_POINTS[self.kv_dtype]

    def shape(self, kind: Kind, rows: int) -> tuple[int, int, int, int]:
        """Shape of a graph's input or output: `rows` rows of a tensor."""
        return 1, 1, rows, self.width

    def names(self) -> Iterator[KvTensor]:
        """All tensors in the order of the arena: by layer, keys before values, by head."""
        for layer in self.numbers or range(self.layers):
            for kind in self.kinds:
                for head in range(self.heads):
                    yield KvTensor(layer, kind, head)


@dataclass(frozen=True, slots=True)
class RowSpec(_Tensors):
    """Layers with attention: `layers x 2 x kv_heads` tensors of a row per token, of `head_dim` elements.

    Attributes:
        layers: decoder layers.
        kv_heads: key/value heads of a layer.
        head_dim: D, elements of one head's row.
        window: the tokens that a token attends to, including itself; at least 2.
        kv_dtype: `u8` (zero point 128), `s8` or `s16` (zero point 0).
        key_layout: how graphs read and write keys: `rows` `[1, 1, S-AR, D]` as values, or `columns`
            `[1, 1, D, S-AR]`, as Genie requires. Values are always rows.
        numbers: the numbers of these layers in the model; empty for all, from 0 on.
        context: S of the largest graphs, the context length; 0 if `window` is all of it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int
    kv_dtype: KvDtype = "u8"
    key_layout: KeyLayout = "rows"
    numbers: tuple[int, ...] = ()
    context: int = 0

    def __post_init__(self) -> None:
        self._check("kv_heads", "head_dim")
        if self.window < 2:
            raise ValueError(f"window: got {self.window}; expected at least 2 tokens")
        if self.context == 0:
            object.__setattr__(self, "context", self.window)
        if self.context < self.window:
            raise ValueError(f"context: got {self.context}; expected at least the window of {self.window} tokens")
        if self.kv_dtype == "u16":
            raise ValueError("kv_dtype: got 'u16' of keys and values; expected u8, s8 or s16")
        if self.key_layout not in ("rows", "columns"):
            raise ValueError(f"key_layout: got {self.key_layout!r}; expected rows or columns")

    @property
    def kinds(self) -> tuple[Kind, ...]:  # type: ignore[override]
        """Of the tensors of a layer and head."""
        return KINDS

    @property
    def heads(self) -> int:  # type: ignore[override]
        """Tensors of each kind in a layer."""
        return self.kv_heads

    @property
    def width(self) -> int:  # type: ignore[override]
        """Elements of a row."""
        return self.head_dim

    @property
    def read_rows(self) -> int:
        """Rows that the result of a token depends on, its own included."""
        return self.window

    def in_context(self, context: int) -> RowSpec:
        """The same layers for graphs of another S."""
        window = context if self.window == self.context else min(self.window, context)
        return replace(self, window=window, context=context)

    def past_rows(self, ar: int, context: int | None = None) -> int:
        """The rows that a graph for AR new tokens reads of each tensor.

        S-AR, or the W-1 rows that the first new token attends to if these layers' window is smaller.

        Args:
            ar: tokens per inference.
            context: S of the graph; None for the window of these layers.
        """
        seen = min(self.window, context or self.window)
        if not 1 <= ar < seen:
            raise ValueError(f"ar: got {ar}; expected 1 to {seen - 1}, below the context of {seen}")
        return min(self.window - 1, (context or self.window) - ar)

    def shape(self, kind: Kind, rows: int) -> tuple[int, int, int, int]:
        """Shape of a graph's input or output: `rows` rows of a tensor; keys may be columns."""
        if kind == "key" and self.key_layout == "columns":
            return 1, 1, self.head_dim, rows
        return 1, 1, rows, self.head_dim

    def groups(self) -> tuple[LayerSpec, ...]:
        """Groups of equal layers: one with all layers; see `LayeredGeometry`."""
        return (self,)

    def rows(self) -> tuple[RowSpec, ...]:
        """The groups with attention."""
        return (self,)


@dataclass(frozen=True, slots=True)
class ConvSpec(_Tensors):
    """Layers with a short convolution: the rows before the next token that its kernel reads, of all channels.

    Attributes:
        layers: number of layers.
        width: H, channels.
        kernel: K, the tokens that the convolution reads, including the current one: K-1 rows are the state.
        kv_dtype: `u16` (zero point 32768), or as of keys and values.
        numbers: the numbers of these layers in the model; empty for all, from 0 on.
    """

    layers: int
    width: int
    kernel: int
    kv_dtype: KvDtype = "u16"
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check("width")
        if self.kernel < 2:
            raise ValueError(f"kernel: got {self.kernel}; expected at least 2 tokens")

    @property
    def kinds(self) -> tuple[Kind, ...]:  # type: ignore[override]
        """Of the only tensor of a layer."""
        return ("conv",)

    @property
    def heads(self) -> int:  # type: ignore[override]
        """Tensors in a layer."""
        return 1

    @property
    def read_rows(self) -> int:
        """Rows that the result of a token depends on, its own included."""
        return self.kernel

    @property
    def state_rows(self) -> int:
        """K-1."""
        return self.kernel - 1

    def past_rows(self, ar: int, context: int | None = None) -> int:
        """The rows that a graph reads of each tensor: K-1, whatever its AR and context are."""
        return self.state_rows


@dataclass(frozen=True, slots=True)
class DeltaSpec(_Tensors):
    """One kind of tensors of layers with a gated delta rule or Mamba-2: rows since a checkpoint, or S at it.

    Attributes:
        layers: number of layers.
        kind: of the tensors; see `DELTA_KINDS`.
        heads: tensors in a layer: 1, but for decays, which have one for each head.
        width: elements of a row.
        rows: that a step reads: 64 of a tail, or those of a matrix.
        numbers: the numbers of these layers in the model; empty for all, from 0 on.
        kv_dtype: `u16` (zero point 32768).
        corrects: of matrices, whether they add up corrections; or values times their decays, see `DeltaRule`.
    """

    layers: int
    kind: DeltaKind
    heads: int
    width: int
    rows: int = CHECKPOINT_TOKENS
    numbers: tuple[int, ...] = ()
    kv_dtype: KvDtype = "u16"
    corrects: bool = True

    def __post_init__(self) -> None:
        self._check("heads", "width", "rows")
        if self.kind not in DELTA_KINDS or (self.heads != 1 and self.kind != "decay"):
            got = f"{self.kind!r} of {self.heads} heads"
            raise ValueError(f"kind: got {got}; expected one of {', '.join(DELTA_KINDS)}, of 1 head but for decays")

    @property
    def kinds(self) -> tuple[Kind, ...]:  # type: ignore[override]
        """`kind` alone."""
        return (self.kind,)

    @property
    def read_rows(self) -> int:
        """Rows that the result of a token depends on, its own included."""
        return self.rows + 1

    def past_rows(self, ar: int, context: int | None = None) -> int:
        """The rows that a graph reads of each tensor, whatever its AR and context are."""
        return self.rows


LayerSpec = RowSpec | ConvSpec | DeltaSpec
"""What equal layers keep: the tensors, their names, shapes and bytes."""
