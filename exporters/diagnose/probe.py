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

from edgekv.bundle import Bundle, GraphRecord, rope_inputs
from edgekv.engine import CpuEngine, Engine, HtpEngine
from edgekv.engine.rope import rope_tables
from edgekv.engine.signature import Signature
from edgekv.errors import UsageError
from edgekv.kv import KvTensor
from exporters.diagnose.trace import Trace
from exporters.reference import Floats
from quant import DTYPES, Dtype, Encoding

Integers = NDArray[Any]

_ATTEND = 65535  # stands for 0.0 in ONNX graphs

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
            BundleError: the bundle's graphs cannot be probed.
            EngineError: the engine refused the graph.
        """
        bundle.require_onnx("the trace")
        bundle.require_whole("the trace")
        assert isinstance(engine, CpuEngine | HtpEngine), "no other engine runs ONNX graphs"
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
        self._ropes = rope_tables(manifest)

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
        zero, dtype = manifest.geometry.zero_point, DTYPES[manifest.kv_dtype]
        past = {t: np.full((0, manifest.geometry.head_dim), zero, dtype) for t in manifest.geometry.names()}
        rows: dict[str, list[Integers]] = {name: [] for name in (*self._results, "logits")}
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

    def _step(self, tokens: Sequence[int], position: int, past: Mapping[KvTensor, Integers]) -> dict[str, Integers]:
        manifest, n = self._bundle.manifest, len(tokens)
        feeds = {port.name: np.zeros(port.shape, port.dtype) for port in self._inputs}
        feeds["input_ids"][0, :n] = tokens
        for suffix, table in self._ropes.items():
            for name, rows in zip(rope_inputs(suffix), table.rows(position, n), strict=True):
                feeds[name][0, 0, :n] = rows
        for name, mask in feeds.items():
            if name.startswith("attention_mask"):
                _open(mask[0, 0, :n], position, self._record.ar, _window(name))
        for tensor, held in past.items():
            target = feeds[tensor.past][0, 0]
            target[:] = manifest.geometry.zero_point
            target = target.T if self._is_turned(tensor) else target
            newest = held[max(0, len(held) - len(target)) :]
            target[len(target) - len(newest) :] = newest
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, feeds), strict=True))

    def _is_turned(self, tensor: KvTensor) -> bool:
        return tensor.kind == "key" and self._bundle.manifest.key_layout == "columns"


def _window(mask: str) -> int | None:
    """Tokens that the rows of this mask see, themselves included; None for all."""
    window = mask.removeprefix("attention_mask").removeprefix("_w")
    return int(window) if window else None


def _open(mask: Integers, position: int, ar: int, window: int | None) -> None:
    """Let row i of `[n, P + AR]` see the tokens up to its own, the newest `window` of them."""
    rows = np.arange(len(mask))[:, None]
    columns = np.arange(mask.shape[1]) - (mask.shape[1] - ar)  # 0 is the step's first token
    distance = rows - columns
    seen = (distance >= 0) & (columns >= -position)
    mask[seen if window is None else seen & (distance < window)] = _ATTEND


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


def _tokens_first(values: Integers) -> Integers:
    return values.reshape(-1, values.shape[-1])
