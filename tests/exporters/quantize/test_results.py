"""Encodings follow from what computes a result and the values it had, never from its name."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv.graphs.decoder import Ops, decoder_layer, logits
from edgekv.spec import HEADROOM, PRODUCT_HEADROOM, RULES, DecoderSpec, EncodingTypes, Result, mask_depth
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.encodings import ResultRecorder, choose_encodings, decoder_results
from exporters.quantize.reference import NumpyOps, Weights
from quant import Encoding, Range
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint

TOKENS = np.array([256, 7, 8, 9, 30, 31, 32, 200])
ONNX, TFLITE = EncodingTypes("u16", "u8"), EncodingTypes("s16", "s8")
Rename = Callable[[str], str]


def unchanged(name: str) -> str:
    return name


def other(name: str) -> str:
    """A name in which nothing of the given one can be found."""
    return hashlib.sha256(name.encode()).hexdigest()


class Renaming:
    """Operations whose results have other names."""

    def __init__(self, ops: Any, rename: Rename) -> None:
        self._ops, self._rename = ops, rename

    def __getattr__(self, operation: str) -> Any:
        if operation in ("rotate", "silu"):  # made of others, which are renamed
            return partial(getattr(Ops, operation), self)
        method = getattr(self._ops, operation)
        signature = inspect.signature(method)
        if "name" not in signature.parameters:
            return method

        def renamed(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.arguments["name"] = self._rename(bound.arguments["name"])
            return method(*bound.args, **bound.kwargs)

        return renamed


def carry_out(ops: Any, spec: DecoderSpec, hidden: Any) -> None:
    for layer in range(spec.layers):
        hidden = decoder_layer(ops, spec, layer, hidden)
    logits(ops, spec, hidden)


def observed(checkpoint: Checkpoint, rename: Rename) -> dict[str, Range]:
    ranges: dict[str, Range] = {}

    def observe(name: str, values: np.ndarray) -> None:
        ranges.setdefault(name, Range()).observe(values, keep_sample=name.startswith("past_"))

    spec = checkpoint.spec
    ops = Renaming(NumpyOps(spec, Weights(checkpoint), len(TOKENS), len(TOKENS), observe), rename)
    carry_out(ops, spec, ops.embed(TOKENS, "embedding"))
    return ranges


def recorded(spec: DecoderSpec, rename: Rename) -> Mapping[str, Result]:
    recorder = ResultRecorder()
    ops = Renaming(recorder, rename)
    carry_out(ops, spec, ops.embed("embedding"))
    return recorder.results


@pytest.fixture(scope="module", params=["gemma2", "gemma3", "llama-biased", "phi4-mini"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    return Checkpoint.open(str(write_checkpoint(folder, ARCHITECTURES[request.param])))


@pytest.mark.parametrize("types", [ONNX, TFLITE], ids=["onnx", "tflite"])
def test_renaming_a_result_changes_no_encoding(checkpoint: Checkpoint, types: EncodingTypes) -> None:
    def encodings(rename: Rename) -> dict[str, Encoding]:
        return choose_encodings(recorded(checkpoint.spec, rename), observed(checkpoint, rename), [1.0], types)

    plain, renamed = encodings(unchanged), encodings(other)
    kept = [name for name in plain if name.startswith(("past_", "attention_mask", "position_ids"))]
    assert len(renamed) == len(plain) > 80
    for name, encoding in plain.items():
        new = name if name in kept else other(name.removesuffix(".unbiased"))
        assert renamed[new + ".unbiased" * name.endswith(".unbiased")] == encoding


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_result_that_calibration_sees_is_recorded(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES[name])))
    results = decoder_results(checkpoint.spec)
    unseen = {name for name, result in results.items() if result.kind in ("softmax", "masked")}
    unseen |= {name for name in results if name.startswith("recurrent_state_")}  # 64 tokens read none yet
    assert observed(checkpoint, unchanged).keys() == results.keys() - unseen - {"logits"}


def test_each_kind_has_its_rule() -> None:
    seen = Range(-3.0, 1.0)
    step = np.float32(1 / 65535)
    assert RULES["linear"](seen, ONNX, 64.0) == Encoding.asymmetric(-3.0 * HEADROOM, HEADROOM, "u16")
    assert RULES["linear"](seen, TFLITE, 64.0) == Encoding.symmetric(3.0 * HEADROOM, "s16")
    assert RULES["product"](seen, ONNX, 64.0) == Encoding.asymmetric(-3.0 * PRODUCT_HEADROOM, PRODUCT_HEADROOM, "u16")
    assert RULES["sigmoid"](seen, ONNX, 64.0) == RULES["softmax"](Range(), ONNX, 64.0) == Encoding("u16", step, 0)
    assert RULES["tanh"](seen, TFLITE, 64.0) == Encoding("s16", 1 / 32768, 0)
    assert RULES["masked"](seen, ONNX, 64.0).reach[0] == pytest.approx(-64.0, abs=1e-3)
    assert RULES["masked"](seen, TFLITE, 64.0) == Encoding.symmetric(64.0, "s16")
    assert RULES["cache"](seen, ONNX, 64.0) == Encoding.symmetric(3.0, "u8")
    assert RULES["cache"](seen, EncodingTypes("u16", "s16"), 64.0) == Encoding.symmetric(3.0 * HEADROOM, "s16")


def test_the_mask_reaches_below_scores_in_the_headroom() -> None:
    seen = Range(-100.0, 60.0)
    depth = mask_depth([seen])
    masked = RULES["masked"](seen, ONNX, depth)
    assert masked.reach[1] == pytest.approx(60.0 * HEADROOM, rel=1e-4)
    assert 60.0 * HEADROOM - depth <= -100.0 * HEADROOM - 12.0


def test_one_name_has_one_rule() -> None:
    recorder = ResultRecorder()
    recorder.add("a", "b", "x")
    with pytest.raises(ValueError, match="x: got a result of kind sigmoid; expected the rule of sum"):
        recorder.sigmoid("a", "x")
