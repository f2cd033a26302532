"""A bundle's graph with every result as an output: what it computes for a few tokens, value by value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekv.bundle import Bundle, GraphRecord
from edgekv.engine import Engine
from edgekv.engine.rope import RopeTable
from edgekv.engine.signature import Signature
from edgekv.errors import UsageError
from edgekv.kv import KvTensor
from exporters.diagnose.trace import Trace
from exporters.reference import Floats
from quant import DTYPES, Dtype, Encoding

Integers = NDArray[Any]

_ATTEND = 65535
_DTYPES: dict[str, Dtype] = {np.dtype(integer).name: name for name, integer in DTYPES.items()}
# Results that have no row for each token, or are parts of others.
_OTHER = re.compile(r"\.(scores|masked)\.|^probabilities|^(key|value)_\d|\.(t|first|second)(\.\d+)?_q$")


class Probe:
    """The graph of a bundle that gives the logits of every token, run step by step on plain arrays.

    Nothing is bound or shared: the past is copied from step to step. That is slow, and independent of all that makes
    the loop fast.
    """

    def __init__(self, bundle: Bundle, engine: Engine) -> None:
        """Make the session.

        Raises:
            UsageError: the bundle's graphs cannot be probed.
            EngineError: the engine refused the graph.
        """
        manifest = bundle.manifest
        record = manifest.graph("score")
        assert record is not None, "a bundle without a score graph is not opened"
        self._bundle = bundle
        self._record = record
        model = onnx.load(bundle.graph_path(record), load_external_data=False)
        self._results = _results(model)
        with TemporaryDirectory(dir=bundle.path.parent, prefix=".edgekv-probe-") as scratch:
            self._session = engine.session(_with_outputs(bundle, model, record, self._results, Path(scratch)))
        self._inputs = Signature.of(manifest, record).inputs

    def run(self, tokens: Sequence[int]) -> Trace:
        """The values of every result `[T, width]` for tokens that begin at position 0.

        Raises:
            UsageError: more tokens than the context has, or none.
        """
        context, ar = self._record.context, self._record.ar
        if not 1 <= len(tokens) <= context:
            raise UsageError(
                "tokens", found=len(tokens), wanted=f"1 to {context}, the context", way_out="Trace fewer tokens."
            )
        manifest = self._bundle.manifest
        past = {
            tensor: np.full((0, manifest.geometry.head_dim), manifest.geometry.zero_point, DTYPES[manifest.kv_dtype])
            for tensor in manifest.geometry.names()
        }
        rows: dict[str, list[NDArray[Any]]] = {name: [] for name in (*self._results, "logits")}
        for start in range(0, len(tokens), ar):
            chunk = tokens[start : start + ar]
            outputs = self._step(chunk, start, past)
            for name in rows:
                rows[name].append(_tokens_first(outputs[name])[: len(chunk)])
            for tensor in past:
                new = outputs[tensor.new][0, 0]
                new = new.T if self._is_turned(tensor) else new
                past[tensor] = np.concatenate((past[tensor], new[: len(chunk)]))
        encodings = {**self._results, "logits": manifest.encodings["logits"].encoding()}
        trace: dict[str, Floats] = {
            name.removesuffix("_q"): encodings[name].dequantize(np.concatenate(parts)) for name, parts in rows.items()
        }
        for tensor, values in past.items():
            trace[tensor.past] = manifest.encodings[tensor.past].encoding().dequantize(values)
        return trace

    def _step(
        self, tokens: Sequence[int], position: int, past: dict[KvTensor, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        manifest, record, n = self._bundle.manifest, self._record, len(tokens)
        feeds = {port.name: np.zeros(port.shape, port.dtype) for port in self._inputs}
        feeds["input_ids"][0, :n] = tokens
        cos, sin = (manifest.encodings[f"position_ids_{part}"].encoding() for part in ("cos", "sin"))
        table = RopeTable(manifest.rope.inverse_frequencies, cos, sin, positions=record.context)
        feeds["position_ids_cos"][0, 0, :n], feeds["position_ids_sin"][0, 0, :n] = table.rows(position, n)
        past_rows = record.context - record.ar
        mask = feeds["attention_mask"][0, 0]
        mask[:n, past_rows:] = np.tril(np.full((n, record.ar), _ATTEND, mask.dtype))
        mask[:n, max(0, past_rows - position) : past_rows] = _ATTEND
        for tensor, rows in past.items():
            target = feeds[tensor.past][0, 0]
            target[:] = manifest.geometry.zero_point
            target = target.T if self._is_turned(tensor) else target
            held = rows[-past_rows:]
            target[past_rows - len(held) :] = held
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, feeds), strict=True))

    def _is_turned(self, tensor: KvTensor) -> bool:
        return tensor.kind == "key" and self._bundle.manifest.key_layout == "columns"


def _results(model: onnx.ModelProto) -> dict[str, Encoding]:
    """The quantized results of a graph that have a row for each token, in order, by the name of their integers."""
    constants = {each.name: each for each in model.graph.initializer if not each.external_data}
    found = {}
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear" or not node.output[0].endswith("_q") or _OTHER.search(node.output[0]):
            continue
        scale, zero_point = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
        found[node.output[0]] = Encoding(_DTYPES[zero_point.dtype.name], float(scale), int(zero_point))
    return found


def _with_outputs(
    bundle: Bundle, model: onnx.ModelProto, record: GraphRecord, results: Mapping[str, Encoding], folder: Path
) -> Path:
    """The graph with further outputs, in `folder`, beside links to the weights that it points to."""
    for name, encoding in results.items():
        element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[encoding.dtype]))
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, element, None))
    for shard in bundle.path.glob("*.safetensors"):
        (folder / shard.name).hardlink_to(shard)
    path = folder / record.file
    onnx.save(model, path)
    return path


def _tokens_first(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(-1, values.shape[-1])
