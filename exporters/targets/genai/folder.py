"""The folder that onnxruntime-genai loads, with a record by which edgekv verifies it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.errors import BundleError
from edgekv.spec.text import open_tokenizer
from exporters.targets.genai.config import TOKENIZER
from exporters.targets.record import TargetRecord, open_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENAI_MANIFEST = "genai_bundle.json"


class GenaiManifest(TargetRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`genai_bundle.json`. `checked` says whether the stacked graphs computed the bundle's integers.

    Attributes:
        context: S; prompt, padding and answer must fit.
        window: tokens per step of the prompt.
        pad_token: the id that no prompt may contain.
        shared_weights: both graphs are in one binary.
        sink: the tokens that the graphs begin every text with; prompts leave them out.
        left_out: names of verify graphs: onnxruntime-genai decodes one token a step.
    """

    context: int
    window: int
    pad_token: int
    shared_weights: bool
    sink: list[int]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class GenaiFolder:
    """A verified folder.

    Attributes:
        path: the folder, absolute.
        manifest: its `genai_bundle.json`.
    """

    path: Path
    manifest: GenaiManifest

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint.

        Raises:
            BundleError: `tokenizers` cannot read it.
        """
        fix = f"Write the folder again: edgekv bundle genai BUNDLE -o {self.path} --force"
        return open_tokenizer(self.path / TOKENIZER, BundleError, fix)


def open_genai_folder(path: Path) -> GenaiFolder:
    """Read a folder of `edgekv bundle genai`; every file is checked against its hash.

    Raises:
        BundleError: the folder is something else, or a file is missing or changed.
    """
    folder = path.absolute()
    return GenaiFolder(folder, open_for("genai", GenaiManifest, folder, GENAI_MANIFEST))
