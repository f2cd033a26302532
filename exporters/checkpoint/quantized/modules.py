"""What GPTQ and AWQ store alike: a module's integers, scales and zero points as tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edgekv.spec import Config
from exporters.checkpoint.quantized.matrix import unreadable
from exporters.checkpoint.stored import Stored, StoredTensor

_PARTS = (".qweight", ".qzeros", ".scales")


def with_matrices(
    tensors: Mapping[str, StoredTensor],
    matrix: Callable[[str, Mapping[str, StoredTensor]], Stored],
    *further: str,
) -> dict[str, Stored]:
    """The tensors of a checkpoint with each matrix under the name that it has unquantized.

    Args:
        tensors: as stored.
        matrix: makes the matrix of a module from them.
        further: endings of parts besides integers, zero points and scales.

    Raises:
        CheckpointError: as `matrix`.
    """
    modules = list(dict.fromkeys(key.rpartition(".")[0] for key in tensors if key.endswith(_PARTS)))
    parts = {module + part for module in modules for part in (*_PARTS, *further)}
    found: dict[str, Stored] = {key: tensor for key, tensor in tensors.items() if key not in parts}
    return found | {f"{module}.weight": matrix(module, tensors) for module in modules}


def read_words(module: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """The packed integers of a module.

    Raises:
        CheckpointError: they are missing, or no matrix of int32.
    """
    words = tensors.get(f"{module}.qweight")
    if words is None or len(words.shape) != 2 or 0 in words.shape or words.dtype != np.int32:
        raise unreadable(f"{module}.qweight", "a matrix of int32", words)
    return words


def read_group(config: Config) -> int | None:
    """`group_size`; None for all inputs of a channel."""
    return config.optional_size("group_size", 128)


def in_groups(group: int | None) -> str:
    """For reports."""
    return " per channel" if group is None else f" in groups of {group}"
