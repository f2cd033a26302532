"""`quantization_config` of a checkpoint: which format its matrices are stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from edgekv.errors import CheckpointError
from edgekv.spec import CONFIG, Config
from exporters.checkpoint.quantized.awq import Awq
from exporters.checkpoint.quantized.compressed import Compressed
from exporters.checkpoint.quantized.fp8 import Fp8
from exporters.checkpoint.quantized.gptq import Gptq
from exporters.checkpoint.stored import Stored, StoredTensor


class Quantization(Protocol):
    """A format of quantized checkpoints."""

    @property
    def name(self) -> str:
        """For reports, such as `gptq, int4 in groups of 128`."""

    def matrices(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Stored]:
        """The tensors with each matrix under the name that it has unquantized.

        Raises:
            CheckpointError: a part of a matrix is missing or of another shape.
        """


_METHODS: Mapping[str, Callable[[Config], Quantization]] = {
    "gptq": Gptq.of,
    "awq": Awq.of,
    "compressed-tensors": Compressed.of,
    "fp8": Fp8.of,
    "fbgemm_fp8": Fp8.of,
}
_DEQUANTIZE = (
    "Take the checkpoint before quantization, or load this one in transformers, call dequantize(), remove "
    "quantization_config from its config and save_pretrained(FOLDER)."
)


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """How the matrices are stored; None if they are floats.

    Raises:
        CheckpointError: naming the field of `quantization_config` that cannot be read.
    """
    nested = config.get("text_config")
    tables = [config, nested if isinstance(nested, dict) else {}]
    names = ("quantization_config", "compression_config")
    name, given = next(
        ((name, each[name]) for each in tables for name in names if each.get(name) is not None), ("", None)
    )
    if given is None:
        return None
    if not isinstance(given, dict):
        raise Config(config).refusal(name, "a JSON object")
    quantization = Config(_without_ones(given), f"{CONFIG}: {name}")
    method = quantization.text("quant_method", "compressed-tensors" if "config_groups" in quantization else None)
    if method not in _METHODS:
        raise _unknown(quantization)
    return _METHODS[method](quantization)


def _unknown(quantization: Config) -> CheckpointError:
    return quantization.refusal("quant_method", " or ".join(_METHODS), fix=_DEQUANTIZE)


def _without_ones(fields: Mapping[str, Any], depth: int = 3) -> dict[str, Any]:
    """Null where a group size is -1, all inputs of a channel; `weights` of groups of modules lie three objects deep."""
    return {
        name: None
        if name == "group_size" and value == -1
        else _without_ones(value, depth - 1)
        if isinstance(value, dict) and depth
        else value
        for name, value in fields.items()
    }
