"""The decoder's operations for a CPU."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekv.bundle import MANIFEST, BundleWeights, Extent
from edgekv.bundle.manifest_file import export_again
from edgekv.errors import BundleError
from edgekv.graphs.decoder import layer_result
from edgekv.graphs.source import PartSource, built_manifest
from edgekv.graphs.stacked_delta import StackedDelta
from edgekv.graphs.stacks import View
from edgekv.spec import (
    CONV_ROWS,
    EMBEDDING,
    EMBEDDING_COLUMNS,
    FLOAT,
    LAST_HIDDEN,
    LAYER_INPUTS_PORT,
    LOGITS,
    LOGITS_INDEX,
    OPEN_ROWS,
    OPEN_TOKENS,
    STACK,
    TARGET_HIDDEN,
    ConvolutionStates,
    KvTensor,
    LoraTarget,
    Port,
    head_width,
    lora_a,
    lora_added,
    lora_b,
    lora_group,
    lora_reach,
    part_name,
    table_key,
)
from quant import Encoding

_HEAD = re.compile(r"\.h\d+")
_GROUP = re.compile(r"(?<=\.g)\d+")
_LAYER = re.compile(r"(?<=^layers\.)\d+")
_ROWS = 2  # axis of [1, 1, rows, width]
_MAX_INDEX = np.iinfo(np.int64).max
_AXES_OF_TOKENS = {"ids": 1} | dict.fromkeys(
    ("embeddings", "layer_inputs", "hidden", "mask", "cos", "sin", "borrowed", "new", "target_hidden", "last_hidden"),
    _ROWS,
)


class StackedOps(StackedDelta):
    """A part of a graph for AR new tokens in a context of S, under construction; see `EmulatedOps` and `FloatOps`.

    Inputs and outputs are those of the exported graph, but for keys, which are rows, and for adapters: their floats,
    and the B's of all heads of a projection as one input.
    """

    def __init__(self, source: PartSource, weights: BundleWeights, *, batch_invariant: bool) -> None:
        """Start with the inputs that all layers share.

        Args:
            source: the part to build.
            weights: of the bundle.
            batch_invariant: whether the bits of a row must not depend on how many others there are.
        """
        manifest, graph = built_manifest(source.manifest), source.graph
        super().__init__(
            manifest.model, graph, weights, takes_fewer=source.takes_fewer, batch_invariant=batch_invariant
        )
        self._source = source
        self._part = source.part
        self._decoder = manifest.interface
        self._ports = self._decoder.graph(graph, source.part)
        self._adapters: list[onnx.ValueInfoProto] = []
        self._rows = self._ar
        self._integers: set[str] = set()
        """Keys and values, past and new."""

    # ------------------------------------------------------------------ what the two forms do each in their own way

    @abstractmethod
    def _product(self, x: View, keys: Sequence[str], name: str) -> str:
        """`[1, AR, out]`, the product with one matrix or with several beside each other."""

    @abstractmethod
    def _by_group(self, weights: View, values: View) -> tuple[str, int]:
        """The weights of attention as a product with the values that groups share reads them, and its rows."""

    def _table(self) -> tuple[str, Extent, Extent]:
        """The file of the embedding table, and the places of its integers and scales there."""
        place = self._weights.places.matrices[table_key(self.spec)]
        integers, scales = place.extents
        return place.file, integers, scales

    # ------------------------------------------------------------------ projections

    def linear(
        self, x: View, weight: str, name: str, *, bias: str | None = None, head: int | None = None, gain: float = 1.0
    ) -> View:
        if head is None:
            return self._once(("linear", weight), lambda: self._whole(x, weight, name, bias, gain))
        stack = self._once(("linear", weight), lambda: self._by_head(x, weight, name, bias, gain))
        return replace(stack, head=head)

    def _whole(self, x: View, weight: str, name: str, bias: str | None, gain: float) -> View:
        product = self._product(x, [weight], name)
        if bias is None:
            return self._rounded(product, name)
        unbiased = self._rounded(product, name + ".unbiased")
        return self._rounded(self._nodes.add("Add", [unbiased.tensor, self._floats(bias, gain)], name), name)

    def _by_head(self, x: View, weight: str, name: str, bias: str | None, gain: float) -> View:
        place = self._weights.places.matrices[weight]
        heads = place.columns // head_width(self.spec, weight)
        product = self._to_heads(self._product(x, [weight], name), heads)
        if bias is None:
            return self._rounded(product, name, heads)
        unbiased = self._rounded(product, name + ".unbiased", heads)
        added = self._nodes.add("Add", [unbiased.tensor, self._biases(bias, heads, gain)], name)
        return self._rounded(added, name, heads)

    def adapt(self, y: View, x: View, layer: int, target: LoraTarget, name: str, *, head: int | None = None) -> View:
        if (lora := self._decoder.lora) is None or target not in lora:
            return y
        width = lora[target].outputs

        def adapt() -> View:
            product = self._multiply(self._reduced(x, layer, target), self._adapter(pieces), self._ar)
            added = self._rounded(product, lora_added(layer, target)).tensor
            if not y.heads:
                added = self._nodes.reshape(added, [1, -1, width])
            return self._as(self._nodes.add("Add", [y.tensor, added], name + ".adapted"), y)

        pieces = [lora_b(layer, target, head) for head in range(y.heads)] or [lora_b(layer, target)]
        return replace(self._once(("adapted", layer, target), adapt), head=y.head)

    def _reduced(self, x: View, layer: int, target: LoraTarget) -> str:
        """`x A`, `[1, 1, AR, R]`, for all projections of a group."""
        group = lora_group(target)

        def reduce() -> str:
            product = self._multiply(self._tensor(x), self._adapter([lora_a(layer, group)]), self._ar)
            return self._rounded(product, lora_reach(layer, group)).tensor

        return self._once(("reduced", layer, group), reduce)

    def _adapter(self, names: Sequence[str]) -> str:
        """An input for parts of adapters, stacked along the first axis, as floats."""
        name = STACK.join(names)
        shape = (len(names), *self._ports[names[0]].shape[1:])
        self._adapters.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    # ------------------------------------------------------------------ operations on each element or row

    def rms_norm(self, x: View, weight: str, name: str, *, gain: float = 1.0) -> View:
        attributes = {"axis": -1, "epsilon": self.spec.eps}
        return self._each("RMSNormalization", [x], name, [self._floats(weight, gain)], **attributes)

    def normalize(self, x: View, width: int, name: str) -> View:
        attributes = {"axis": -1, "epsilon": self.spec.eps}
        return self._each("RMSNormalization", [x], name, [self._unit_weights(width)], **attributes)

    def scale_by(self, x: View, weight: str, name: str) -> View:
        return self._each("Mul", [x], name, [self._floats(weight)])

    def shift_by(self, x: View, weight: str, name: str) -> View:
        return self._each("Add", [x], name, [self._floats(weight)])

    def chosen(self, x: View, count: int, name: str) -> View:
        assert self.spec.experts is not None, "experts are chosen"
        nodes, indices = self._nodes, self._nodes.unique(f"{name}.indices")
        # Of equal elements, onnxruntime takes those with the least index.
        nodes.write("TopK", [self._tensor(x), nodes.integers([count])], [f"{indices}.values", indices], axis=-1)
        ends = nodes.constant(np.array([0, 1], np.float32))
        one_hot = nodes.add("OneHot", [indices, nodes.integers([self.spec.experts.count]), ends], f"{name}.each")
        return self._rounded(nodes.add("ReduceSum", [one_hot, nodes.integers([-2])], name, keepdims=0), name)

    def shares(self, x: View, name: str) -> View:
        total = self._rounded(
            self._nodes.add("ReduceSum", [self._tensor(x), self._nodes.integers([-1])], f"{name}.sum"), f"{name}.sum"
        )
        least = self._nodes.number(self._encoding(f"{name}.sum").scale)
        positive = self._as(self._nodes.add("Max", [total.tensor, least], f"{name}.positive"), total)
        return self._each("Div", [x, positive], name)

    def layer_input(self, layer: int) -> View:
        width = self.spec.input_width
        tensor = self._once(
            ("layer inputs",),
            lambda: self._nodes.reshape(self._input(LAYER_INPUTS_PORT), [1, -1, self.spec.gathered_width]),
        )
        return self.slice(View(tensor, encodings=(self._encoding(LAYER_INPUTS_PORT),)), layer * width, width)

    def masked(self, scores: View, layer: int, name: str) -> View:
        return self._each("Add", [scores, View(self._input(self._decoder.mask(layer)))], name)

    def rotation(self, layer: int, heads: int) -> tuple[View, View]:
        rotary = self._decoder.rotary_of(layer)
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        return self._once(("rotation", rotary.names), lambda: self._for_both_elements(*rotary.names))

    def _for_both_elements(self, cos_name: str, sin_name: str) -> tuple[View, View]:
        """The tables of pairs for the first and the second element of each."""
        cos, sin = self._input(cos_name), self._input(sin_name)
        like = View(sin, encodings=(self._encoding(sin_name),))
        negative = self._as(self._nodes.add("Neg", [sin], f"{sin}.negative"), like).tensor
        parts = (cos, cos), (negative, sin)
        both = [View(self._nodes.add("Concat", pair, f"{pair[1]}.both", axis=-1)) for pair in parts]
        return both[0], both[1]

    # ------------------------------------------------------------------ attention

    def append_to_cache(self, new: View, tensor: KvTensor) -> View:
        append = {"cache": self._appended, "state": self._appended_state, "tail": self._appended_tail}[tensor.result]
        if tensor.kind == "decay":
            append = self._appended_decays
        stack = self._once(("cache", tensor.layer, tensor.kind), lambda: append(new, tensor))
        return replace(stack, head=new.head)

    def cached(self, tensor: KvTensor) -> View:
        # Another part has computed the new rows, if none are made here.
        stack = self._once(("cache", tensor.layer, tensor.kind), lambda: self._borrowed(tensor))
        return replace(stack, head=tensor.head)

    def _appended_state(self, new: View, tensor: KvTensor) -> View:
        """The floats of the rows of a state, past and new, `[1, 1, K-1+AR, H]`."""
        nodes, encodings = self._nodes, (self._encoding(tensor.past),)
        rows = nodes.reshape(self._tensor(new), [1, 1, -1, self._states.width])
        nodes.quantize(rows, encodings, tensor.new)
        parts = [tensor.past, tensor.new, *([tensor.others] if tensor.others in self._ports else [])]
        together = nodes.add("Concat", parts, f"{tensor.past}.all", axis=2)
        return View(nodes.dequantize(together, encodings, f"{together}.floats"), encodings=encodings)

    def tap(self, rows: View, weight: str, tap: int, name: str) -> View:
        past_rows = self._states.kernel - 1
        source, start, end = rows.tensor, tap, _MAX_INDEX if tap == past_rows else tap - past_rows
        if CONV_ROWS in self._ports and tap < past_rows:
            gathered = [source, CONV_ROWS]
            source = self._once(
                ("gathered", rows.tensor),
                lambda: self._nodes.add("Gather", gathered, f"{rows.tensor}.gathered", axis=_ROWS),
            )
            start, end = tap * self._ar, (tap + 1) * self._ar
        elif CONV_ROWS in self._ports:
            end = tap + self._ar
        bounds = [self._nodes.integers([at]) for at in (start, end, _ROWS)]
        read = self._nodes.add("Slice", [source, *bounds], f"{rows.tensor}.rows")
        flat = View(self._nodes.reshape(read, [1, -1, self._states.width]))
        return self._each("Mul", [flat], name, [self._floats(part_name(weight, tap=tap))])

    def _appended(self, new: View, tensor: KvTensor) -> View:
        """The integers of past and new rows of all heads."""
        nodes, heads = self._nodes, [replace(tensor, head=head) for head in range(new.heads)]
        encodings = tuple(self._encoding(head.past) for head in heads)
        integers = nodes.quantize(new.tensor, encodings, tensor.new if new.heads == 1 else f"{tensor.new}.of_all")
        names = [head.new for head in heads]
        if new.heads > 1:
            nodes.split(integers, [1] * len(heads), 0, names)
        return self._together_rows(heads)

    def _borrowed(self, tensor: KvTensor) -> View:
        """The same of a layer of an earlier part, whose new rows are inputs."""
        kv_heads = self.spec.of_layer(tensor.layer).kv_heads
        return self._together_rows([replace(tensor, head=head) for head in range(kv_heads)])

    def _together_rows(self, heads: Sequence[KvTensor]) -> View:
        """Past and new rows of all heads, which are inputs or results."""
        nodes, tensor = self._nodes, heads[0]
        encodings = tuple(self._encoding(head.past) for head in heads)
        pairs = [name for head in heads for name in ((head.past, head.new) if self._decoder.is_cached else (head.new,))]
        # One copy of the past: the rows of the heads follow each other.
        together = nodes.add("Concat", pairs, f"{tensor.past}.all", axis=2)
        if len(heads) > 1:
            together = nodes.reshape(together, [len(heads), 1, -1, self.spec.of_layer(tensor.layer).head_dim])
        self._integers.add(together)
        return View(together, len(heads), 0, encodings)

    def attend(self, weights: View, values: View, name: str) -> View:
        if self._is_cached(values):
            return super().attend(weights, values, name)
        return self._stack_product(weights, self._operand(values), name)

    def _by_values(self, weights: View, values: View) -> str:
        left, rows = self._by_group(weights, values)
        return self._apart(self._multiply(left, self._dequantized(values), rows), weights.heads)

    def _is_cached(self, values: View) -> bool:
        """Whether these are integers of keys or values."""
        return values.tensor in self._integers

    def _apart(self, product: str, heads: int) -> str:
        """A product of the rows of groups as a stack of heads."""
        return self._nodes.reshape(product, [heads, 1, -1, 0])

    def _dequantized(self, cached: View) -> str:
        """The floats of past and new rows."""
        name = f"{cached.tensor}.floats"
        return self._once((name,), lambda: self._nodes.dequantize(cached.tensor, cached.encodings, name))

    # ------------------------------------------------------------------ entry and exit

    def entry(self) -> View:
        """The hidden state before the part's first layer, or the rows that a head reads."""
        port = self._ports.entry
        self._rows = port.shape[1] if self._part.embeds else port.shape[2]
        if self._part.embeds:
            return self._rounded(self._embedded(port.name), "embedding")
        if port.dtype == FLOAT:
            return View(self._nodes.reshape(port.name, [1, -1, self.spec.hidden]))
        encoding = self._port_encoding(port)
        floats = self._nodes.dequantize(port.name, [encoding], f"{port.name}.floats")
        return View(self._nodes.reshape(floats, [1, -1, self.spec.hidden]), encodings=(encoding,))

    def target_hidden(self) -> View:
        encodings = (self._encoding(TARGET_HIDDEN),)
        floats = self._nodes.reshape(self._input(TARGET_HIDDEN), [1, -1, self._decoder.given_hidden])
        return View(floats, encodings=encodings)

    def give_hidden(self, x: View) -> None:
        port = self._ports[LAST_HIDDEN]
        floats = self._nodes.reshape(self._tensor(x), [1, 1, -1, self._decoder.given_hidden])
        self._nodes.quantize(floats, [self._port_encoding(port)], port.name)

    def _embedded(self, ids: str) -> str:
        """The rows of the embedding table for ids, `[1, AR, hidden]`."""
        nodes, spec, (file, *extents) = self._nodes, self.spec, self._table()
        sizes = (TensorProto.INT8, spec.hidden, "integers"), (TensorProto.FLOAT, 1, "scales")
        tables = [
            nodes.external(f"{EMBEDDING}.{name}", element, [spec.vocab, width], file, extent)
            for (element, width, name), extent in zip(sizes, extents, strict=True)
        ]
        integers, scales = (nodes.add("Gather", [table, ids], f"{table}.rows", axis=0) for table in tables)
        rows = nodes.add("Cast", [integers], "embedding.floats", to=TensorProto.FLOAT)
        if EMBEDDING_COLUMNS in self._weights.places.tensors:
            scaled = nodes.add("Mul", [rows, self._floats(EMBEDDING_COLUMNS)], "embedding.columns")
            rows = self._rounded(scaled, "embedding.columns").tensor
        return nodes.add("Mul", [rows, scales], "embedding")

    def select(self, hidden: View) -> View:
        """The row of `hidden` that `logits_index` selects, `[1, 1, hidden]`."""
        self._rows = 1
        tensor = self._nodes.add("Gather", [self._tensor(hidden), LOGITS_INDEX], "selected", axis=1)
        return replace(hidden, tensor=tensor)

    def give(self, result: View) -> None:
        """Make a result the last output, `[1, rows, vocab]` or `[1, 1, AR, hidden]`."""
        port, floats = self._ports.exit, self._tensor(result)
        if port.name == LOGITS:
            self._nodes.quantize(floats, [self._encoding("head")], port.name)
            return
        shape = [1, 1, -1, self.spec.hidden]
        if port.dtype == FLOAT:
            self._nodes.write("Reshape", [floats, self._nodes.integers(shape)], [port.name])
        else:
            self._nodes.quantize(self._nodes.reshape(floats, shape), [self._port_encoding(port)], port.name)

    def _port_encoding(self, port: Port) -> Encoding:
        assert port.encoding is not None, "hidden states are integers"
        if port.kind == "embeddings":
            return self._encoding("embedding")
        if port.kind == "hidden":
            layer = int(port.name.removeprefix("hidden_"))
            return self._encoding(layer_result(self.spec, layer - 1))
        return self._encoding(port.encoding)

    def finish(self) -> onnx.ModelProto:
        """The model."""
        inputs = [self._value_info(port) for port in self._ports.inputs if port.kind != "lora"]
        outputs = [self._value_info(port) for port in self._ports.outputs]
        return self._nodes.model(self._part.name, [*inputs, *self._adapters], outputs)

    @property
    def _reads_used_rows(self) -> bool:
        """Whether past rows and masks may be fewer than the most."""
        return self._batch_invariant

    def _value_info(self, port: Port) -> onnx.ValueInfoProto:
        shape: list[int | str] = [*port.shape]
        if self._takes_fewer and port.kind in _AXES_OF_TOKENS and (self._part.layers or port.kind != "hidden"):
            axis = _AXES_OF_TOKENS[port.kind]
            shape[axis] = f"{OPEN_TOKENS}{shape[axis]}"
        if self._reads_used_rows and port.kind in ("past", "mask"):
            axis = 2 if port.kind == "past" else 3
            shape[axis] = f"{OPEN_ROWS}{shape[axis]}"
        dtype = np.dtype(np.float32 if port.dtype == FLOAT else port.dtype)
        element = helper.np_dtype_to_tensor_dtype(dtype)
        info: onnx.ValueInfoProto = helper.make_tensor_value_info(port.name, element, shape)
        return info

    # ------------------------------------------------------------------ helpers

    @property
    def _states(self) -> ConvolutionStates:
        states = self.spec.convolution_states
        assert states is not None, "a layer has some"
        return states

    def _encoding(self, name: str) -> Encoding:
        """The encoding of a result, input or output.

        Raises:
            BundleError: the manifest has none.
        """
        if (encoding := self._source.manifest.encodings.get(name)) is None:
            folder = self._source.folder
            raise BundleError(
                f"{folder / MANIFEST}: encodings",
                got=f"none of {name}",
                expected="one for each result of the decoder",
                fix=export_again(folder),
            )
        return encoding

    def _tokens(self) -> str:
        entry = self._ports.entry
        axis = _AXES_OF_TOKENS[entry.kind or "hidden"]
        return self._once(
            ("tokens",), lambda: self._nodes.add("Shape", [entry.name], "tokens", start=axis, end=axis + 1)
        )

    def _name_of_head(self, name: str, head: int) -> str:
        """The name of another head's result, which heads with the same keys may share."""
        if (layer := _LAYER.search(name)) is not None and _GROUP.search(name):
            return _GROUP.sub(str(head // self.spec.group(int(layer[0]))), name)
        return _HEAD.sub(f".h{head}", name)

    def _input(self, name: str) -> str:
        """The floats of an input."""
        port = self._ports[name]
        encoding = self._encoding(port.encoding or name)
        return self._once(("input", name), lambda: self._nodes.dequantize(name, [encoding], f"{name}.floats"))
