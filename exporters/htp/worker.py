"""The child process of `exporters.htp.check`: creates the sessions of a job and writes its reply to a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from devices import find, find_proxy
from edgekv.errors import EdgeKVError
from edgekv.machine.system import peak_bytes
from edgekv.qnn import provider as qnn
from exporters.htp.check import HtpJob, HtpReply


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=HtpJob)
    device = find_proxy(job.soc) if job.is_proxy else find(job.soc)
    alive = []
    error = None
    models = [Path(step.model).absolute() for step in job.steps]
    try:
        for step, model in zip(job.steps, models, strict=True):
            # ONNX Runtime names a compiled graph after a hash of the path it is given: a bare file name gives the
            # same bytes in every folder.
            os.chdir(step.folder or model.parent)
            alive.append(
                qnn.create_session(
                    model if step.folder else Path(model.name),
                    device,
                    session_config=step.session_config,
                    provider_options=step.provider_options,
                )
            )
    except EdgeKVError as failure:
        error = str(failure)
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(HtpReply(error=error, peak_bytes=peak_bytes())))


if __name__ == "__main__":
    main()
