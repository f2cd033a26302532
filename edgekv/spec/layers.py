"""Models whose layers differ, and their groups of equal layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgekv.spec.geometry import (
    CHECKPOINT_TOKENS,
    DELTA_KINDS,
    ConvSpec,
    DeltaSpec,
    KeyLayout,
    KvDtype,
    KvTensor,
    LayerSpec,
    RowSpec,
)
from edgekv.spec.linear import DeltaRule


@dataclass(frozen=True, slots=True)
class ConvolutionStates:
    """The states of layers with a short convolution.

    Attributes:
        layers: numbers of the layers.
        kernel: K: the K-1 rows before the next token are the state.
        width: H, channels of a row.
        dtype: integer type.
    """

    layers: frozenset[int]
    kernel: int
    width: int
    dtype: KvDtype = "u16"


@dataclass(frozen=True, slots=True)
class LayeredGeometry:
    """A cache whose layers differ in key/value heads, width of a head, or how many tokens they attend to.

    Layers with a short convolution have a state of their own instead of keys and values. Those with a gated delta rule
    have several: each kind of tensor is a group. A layer may have both, and is in groups of each.

    Each list is repeated if it is shorter than the layers, so one number applies to all and (512, 512, 4096) makes
    every third layer global.

    Attributes:
        layers: decoder layers.
        context: S of the largest graphs: the tokens that a layer without a window attends to, including the last one.
        kv_heads: key/value heads by layer.
        head_dim: D by layer.
        windows: tokens that a layer attends to, including the current one; None for all. Values above S mean S.
        kv_dtype: see `RowSpec`.
        key_layout: see `RowSpec`.
        states: the layers with a short convolution, and what their state is, if there are any.
        delta_rule: the layers with a gated delta rule or Mamba-2, which `states` has too, if there are any.
        without: the layers without a cache of their own, which read another layer's.
    """

    layers: int
    context: int
    kv_heads: Sequence[int]
    head_dim: Sequence[int]
    windows: Sequence[int | None] = ()
    kv_dtype: KvDtype = "u8"
    key_layout: KeyLayout = "rows"
    states: ConvolutionStates | None = None
    delta_rule: DeltaRule | None = None
    without: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim"):
            if not getattr(self, name):
                raise ValueError(f"{name}: got an empty list; expected a number at least")
        self.groups()

    def in_context(self, context: int) -> LayeredGeometry:
        """The same layers for graphs of another S."""
        return replace(self, context=context)

    def groups(self) -> tuple[LayerSpec, ...]:
        """Groups of layers with equal heads, width and window, in the order of their first layers."""
        alike: dict[LayerSpec, list[int]] = {}
        for layer in (number for number in range(self.layers) if number not in self.without):
            for spec in self._kept(layer):
                alike.setdefault(spec, []).append(layer)
        groups: list[LayerSpec] = [
            replace(spec, layers=len(numbers), numbers=tuple(numbers)) for spec, numbers in alike.items()
        ]
        if self.delta_rule is not None:
            groups += self._delta_groups(self.delta_rule)
        # One group of all layers equals a plain geometry.
        return tuple(groups) if len(groups) > 1 or self.without else (replace(groups[0], numbers=()),)

    def rows(self) -> tuple[RowSpec, ...]:
        """The groups with attention."""
        return tuple(group for group in self.groups() if isinstance(group, RowSpec))

    @property
    def tensors(self) -> int:
        """N of all groups."""
        return sum(group.tensors for group in self.groups())

    def names(self) -> Iterator[KvTensor]:
        """All tensors in the order of the groups."""
        return (tensor for group in self.groups() for tensor in group.names())

    def _delta_groups(self, rule: DeltaRule) -> Iterator[DeltaSpec]:
        widths = {"delta_key": rule.keys, "delta_value": rule.values, "decay": 1, "recurrent": rule.values}
        for kind in DELTA_KINDS:
            heads = rule.value_heads if kind == "decay" else 1
            rows = rule.key_dim if kind == "recurrent" else CHECKPOINT_TOKENS
            numbers, corrects = tuple(sorted(rule.layers)), rule.corrects or kind != "recurrent"
            yield DeltaSpec(len(numbers), kind, heads, widths[kind], rows, numbers, corrects=corrects)

    def _kept(self, layer: int) -> Iterator[RowSpec | ConvSpec]:
        """What one layer keeps of its tokens, apart from a delta rule: keys and values, a state, or both."""
        if self.states is not None and layer in self.states.layers:
            yield ConvSpec(1, self.states.width, self.states.kernel, self.states.dtype)
            if self.delta_rule is None or not self.delta_rule.attends:
                return
        heads, width = (by_layer[layer % len(by_layer)] for by_layer in (self.kv_heads, self.head_dim))
        yield RowSpec(1, heads, width, self._window(layer), self.kv_dtype, self.key_layout, context=self.context)

    def _window(self, layer: int) -> int:
        window = self.windows[layer % len(self.windows)] if self.windows else None
        return self.context if window is None else min(window, self.context)


Geometry = RowSpec | LayeredGeometry
"""A whole cache: of layers that are all alike, or of groups of layers."""
