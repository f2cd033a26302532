"""Language models on mobile NPUs, with a KV cache that does not copy.

    import edgekv

    with edgekv.load("BUNDLE", engine="htp") as model:
        for token in model.generate("def main(", max_new_tokens=64):
            print(token.text, end="")

`load` opens a bundle (made with `edgekv export`) on an engine and returns a `Model`. `Model.generate` continues a
prompt and yields tokens; `SamplingParams` says how they are chosen, `BeamParams` asks for beam search,
`Speculation` for drafts, `Tools` for functions that the model may call. `Conversation` keeps the turns of a chat.
`Model.score` gives the logits of a text, `Model.embed` the embeddings of texts, `Model.rerank` documents in the order
of a query. `HtpOptions` tunes the engine `htp`. `estimate` simulates the speed of a bundle on a chip. Every error is an
`EdgeKVError` that names what was found, what was expected and the fix. `edgekv --help` lists the commands.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.conversation import Conversation as Conversation
    from edgekv.draft import Speculation as Speculation
    from edgekv.errors import EdgeKVError as EdgeKVError
    from edgekv.loading import load as load, load_drafter as load_drafter
    from edgekv.model import Model as Model
    from edgekv.plan.estimate import Estimate as Estimate, estimate as estimate
    from edgekv.qnn.options import HtpOptions as HtpOptions
    from edgekv.text.grammar import Grammar as Grammar
    from edgekv.text.params import BeamParams as BeamParams, SamplingParams as SamplingParams
    from edgekv.text.tools import Tools as Tools

    __version__: str

# ONNX Runtime and onnxruntime-genai write files and upload events unless this is set before they are loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("ORT_GENAI_TELEMETRY_DISABLED", "1")


_find, __all__ = lazy(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("edgekv")
    return _find(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
