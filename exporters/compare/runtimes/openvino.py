"""OpenVINO on a stateful model, as optimum-intel and OpenVINO GenAI write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from exporters.compare.messages import Open

MODEL = "openvino_model.xml"
_EVERYWHERE = ("MatMul", "Convert", "Multiply", "Divide", "Tanh", "Add")  # between the last layer and the logits


class OpenvinoModel:
    """A folder. Logits of all tokens need another graph than generation, where only the last one's are computed."""

    def __init__(self, asked: Open) -> None:
        self._file = Path(asked.path) / MODEL
        self._options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if asked.threads is not None:
            self._options["INFERENCE_NUM_THREADS"] = asked.threads
        self._core = ov.Core()
        self._has_all = True
        self._request = self._compile(all_logits=True)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._ready(all_logits=True)
        return np.array(self._run(tokens, 0)[0])

    def generate(self, tokens: Sequence[int], new: int) -> Iterator[int]:
        self._ready(all_logits=False)
        run, done = tokens, 0
        for _ in range(new):
            token = int(self._run(run, done)[0, -1].argmax())
            yield token
            run, done = [token], done + len(run)

    def _run(self, tokens: Sequence[int], past: int) -> NDArray[np.float32]:
        count = len(tokens)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, past + count), np.int64),
            "position_ids": np.arange(past, past + count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        names = {name for port in self._request.model_inputs for name in port.get_names()}
        results = self._request.infer({name: value for name, value in inputs.items() if name in names})
        logits: NDArray[np.float32] = results["logits"]
        return logits

    def _ready(self, *, all_logits: bool) -> None:
        if all_logits != self._has_all:
            self._request, self._has_all = self._compile(all_logits=all_logits), all_logits
        self._request.reset_state()

    def _compile(self, *, all_logits: bool) -> Any:
        model = self._core.read_model(self._file)
        if not all_logits:
            _keep_last_row(model)
        return self._core.compile_model(model, "CPU", self._options).create_infer_request()


def _keep_last_row(model: Any) -> None:
    """Have the head compute the logits of the last token alone, as OpenVINO GenAI does; else leave the graph alone."""
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() in _EVERYWHERE:
        if node.get_type_name() == "MatMul":
            rows = node.input_value(0)
            last = ops.slice(rows, np.array([-1]), np.array([2**31 - 1]), np.array([1]), np.array([1]))
            node.input(0).replace_source_output(last.output(0))
            model.validate_nodes_and_infer_types()
            return
        node = node.input_value(0).get_node()


def load(asked: Open) -> OpenvinoModel:
    return OpenvinoModel(asked)
