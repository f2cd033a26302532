"""The memory of results within graphs, which all sessions of a process share."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime as ort

from edgekv.graphs.onnx_session import PROVIDERS
from edgekv.machine.system import return_freed_memory

_SAME_AS_REQUESTED = 1  # instead of twice as much each time
_SHARED = "session.use_env_allocators"
_IDENTITY = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a"
    "0a08080112040a020801620f0a0179120a0a08080112040a02080142040a00100d"
)
"""An ONNX model of one node, y = Identity(x), of one float: only a run can shrink the memory."""


def share_results(options: ort.SessionOptions) -> None:
    """Let a session take memory for what its nodes compute from the process's.

    Sessions that each have their own keep what their largest run needed. Here graphs use the same memory one after the
    other.
    """
    _register()
    options.add_session_config_entry(_SHARED, "1")


def release_results() -> None:
    """Give shared memory that no run uses back to the system."""
    session, options = _shrinking()
    session.run(None, {"x": np.zeros(1, np.float32)}, options)
    return_freed_memory()


@cache
def _register() -> None:
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(info, ort.OrtArenaCfg({"arena_extend_strategy": _SAME_AS_REQUESTED}))


@cache
def _shrinking() -> tuple[ort.InferenceSession, ort.RunOptions]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    share_results(options)
    run = ort.RunOptions()
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return ort.InferenceSession(_IDENTITY, options, providers=PROVIDERS), run
