"""Checks that stacking the heads changed no integer: both graphs run on the same numbers, in a child process."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from devices import Device
from edgekv.bundle import Bundle
from edgekv.child import run_in_child
from edgekv.errors import EngineError


class StackedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph with stacked heads and the name of the bundle's graph that it was made from."""

    record: str
    file: str


class ProofJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare, and the part number of the chip to compile for; None for the CPU."""

    bundle: str
    graphs: list[StackedGraph]
    soc: str | None


class ProofReply(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the error that ended the proof; null if all integers are equal."""

    error: str | None = None


def prove_integers(bundle: Bundle, graphs: Sequence[StackedGraph], device: Device | None) -> None:
    """Run every graph for one step on random integers, as it is in the bundle and with stacked heads.

    A compiler that accepts a graph may still miscompile it; onnxruntime-qnn 2.7.0 did.

    Args:
        bundle: with the original graphs.
        graphs: with stacked heads.
        device: the chip to compile for and to emulate; None for the CPU.

    Raises:
        EngineError: an output differs, or a graph did not run.
    """
    job = ProofJob(bundle=str(bundle.path), graphs=list(graphs), soc=device.soc if device else None)
    end = run_in_child("exporters.targets.genai.proof_worker", msgspec.json.encode(job))
    reply = ProofReply() if end.reply is None else msgspec.json.decode(end.reply, type=ProofReply)
    if end.reply is None or reply.error is not None:
        raise EngineError(
            "graphs with stacked heads",
            got=reply.error or end.ending,
            expected="the bundle's integers in one step",
            fix="Try another --ar, and please report this model; --skip-check leaves this check out.",
        )
