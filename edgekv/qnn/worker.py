"""Sessions of the HTP compiler, in a child process. It imports little: most of its time would be that."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from devices import find, find_proxy
from edgekv.machine.graph_file import WEIGHTS_FOLDER, is_compressed
from edgekv.machine.system import peak_bytes


class HtpStep(msgspec.Struct, frozen=True, kw_only=True):
    """One session to create: an ONNX file, and options of ONNX Runtime and of its QNN provider.

    Attributes:
        model: the file, which may be compressed.
        folder: the current folder, where the provider leaves files of some options; None for that of the model.
    """

    model: str
    folder: str | None = None
    session_config: dict[str, str] = {}
    provider_options: dict[str, str] = {}


class HtpJob(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions to create in order. All stay open until the last is created, which shared weights require.

    Attributes:
        soc: part number of the target.
        is_proxy: whether that is a `Proxy`.
        steps: the sessions.
    """

    soc: str
    is_proxy: bool = False
    steps: list[HtpStep]


def context_config(wrapper: Path) -> dict[str, str]:
    """The session configuration that writes a context binary beside its wrapper, an absolute path."""
    return {"ep.context_enable": "1", "ep.context_embed_mode": "0", "ep.context_file_path": str(wrapper)}


def create_sessions(job: HtpJob) -> int:
    """Create the sessions of a job.

    Returns:
        Peak RAM of this process, in bytes.

    Raises:
        EngineError: the compiler is missing or refused a graph.
    """
    from edgekv.qnn.provider import create_session  # with ONNX Runtime, which who asks for a job may not need

    device = find_proxy(job.soc) if job.is_proxy else find(job.soc)
    alive = []
    models = [Path(step.model).absolute() for step in job.steps]
    for number, (step, model) in enumerate(zip(job.steps, models, strict=True), 1):
        # ONNX Runtime names a compiled graph after a hash of the path it is given: a bare file name gives the same
        # bytes in every folder. That of content is the folder of its weights, which each graph spells in its own way.
        os.chdir(step.folder or model.parent)
        weights = "/".join([str(model.parent) if step.folder else ".", *"." * number])
        alive.append(
            create_session(
                model if step.folder else Path(model.name),
                device,
                session_config={**step.session_config, **({WEIGHTS_FOLDER: weights} if is_compressed(model) else {})},
                provider_options=step.provider_options,
            )
        )
    return peak_bytes()
