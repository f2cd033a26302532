"""The child process behind `exporters.htp.check`: creates the sessions of a job and replies into a file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from devices import find
from edgekv.errors import EdgeKVError
from edgekv.runtime import qnn
from edgekv.system import peak_bytes
from exporters.htp.check import HtpJob, HtpReply


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=HtpJob)
    device = find(job.soc)
    alive = []
    error = None
    try:
        for step in job.steps:
            alive.append(
                qnn.create_session(
                    Path(step.model),
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
