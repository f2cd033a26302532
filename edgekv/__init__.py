"""Language models on mobile NPUs, with a KV cache that does not copy.

    import edgekv

    with edgekv.load("BUNDLE", engine="htp") as model:
        for token in model.generate("def main(", max_new_tokens=64):
            print(token.text, end="")

`load` opens a bundle (made with `edgekv export`) on an engine and returns a `Model`. `Model.generate` continues a
prompt and yields tokens; `SamplingParams` says how they are chosen, `BeamParams` asks for beam search,
`Speculation` for drafts, `Tools` for functions that the model may call. `Conversation` keeps the turns of a chat.
`Model.score` gives the logits of a text. `HtpOptions` tunes the engine `htp`. `estimate` simulates the speed of a
bundle on a chip. Every error is an `EdgeKVError` that names what was found, what was expected and the fix.
`edgekv --help` lists the commands.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekv.conversation import Conversation
    from edgekv.draft import Speculation
    from edgekv.errors import EdgeKVError
    from edgekv.loading import load, load_drafter
    from edgekv.model import Model
    from edgekv.plan.estimate import Estimate, estimate
    from edgekv.runtime import HtpOptions
    from edgekv.text.grammar import Grammar
    from edgekv.text.params import BeamParams, SamplingParams
    from edgekv.text.tools import Tools

    __version__: str

__all__ = [
    "BeamParams",
    "Conversation",
    "EdgeKVError",
    "Estimate",
    "Grammar",
    "HtpOptions",
    "Model",
    "SamplingParams",
    "Speculation",
    "Tools",
    "__version__",
    "estimate",
    "load",
    "load_drafter",
]

_HOMES = {
    "BeamParams": "edgekv.text.params",
    "Conversation": "edgekv.conversation",
    "EdgeKVError": "edgekv.errors",
    "Estimate": "edgekv.plan.estimate",
    "Grammar": "edgekv.text.grammar",
    "HtpOptions": "edgekv.runtime",
    "Model": "edgekv.model",
    "SamplingParams": "edgekv.text.params",
    "Speculation": "edgekv.draft",
    "Tools": "edgekv.text.tools",
    "estimate": "edgekv.plan.estimate",
    "load": "edgekv.loading",
    "load_drafter": "edgekv.loading",
}

# ONNX Runtime and onnxruntime-genai write files and upload events unless this is set before they are loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("ORT_GENAI_TELEMETRY_DISABLED", "1")


def __getattr__(name: str) -> Any:
    # The runtime takes a while to import; commands that need none should not wait for it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("edgekv")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
