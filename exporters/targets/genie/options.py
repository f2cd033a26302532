"""Options of folders for Genie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from devices import Device
from edgekv.errors import UsageError
from edgekv.option import Option, OptionGroup, find_device
from edgekv.text.params import SamplingParams

if TYPE_CHECKING:
    from exporters.capabilities import Capabilities


@dataclass(frozen=True, slots=True)
class GenieOptions:
    """The options of a folder, and how Genie chooses tokens there.

    Attributes:
        stacked: one cache tensor for all heads of a layer, and names of graphs without repeated underscores.
    """

    device: Annotated[
        Device | None,
        Option("Target chip; must be the one that the bundle was exported for.", parse=find_device),
    ] = None
    context: Annotated[int | None, Option("Longest context to use, in tokens.", shown="the longest of the graphs")] = (
        None
    )
    max_new_tokens: Annotated[int | None, Option("Longest answer, in tokens.", shown="the context")] = None
    sampling: Annotated[SamplingParams, OptionGroup("Sampling", only=("temperature", "top_k", "top_p", "seed"))] = (
        field(default_factory=SamplingParams)
    )
    bos: Annotated[
        bool, Option("Do not prepend BOS to a query: for chat templates that write it.", "--no-bos", negates=True)
    ] = True
    embedding_table: Annotated[bool, Option("Let Genie look up embeddings in a file instead of the graphs.")] = False
    per_graph_binaries: Annotated[
        bool,
        Option(
            "Also write one binary per graph. Genie on x86 loads no others; a phone does not need them.",
            "--per-graph-binaries/--no-per-graph-binaries",
        ),
    ] = True
    check: Annotated[
        bool,
        Option(
            "Do not run the result in Genie and compare its tokens; the folder records that it is unchecked.",
            "--skip-check",
            negates=True,
        ),
    ] = True
    stacked: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            fix = "Ask for a token or more."
            raise UsageError("--max-new-tokens", got=self.max_new_tokens, expected="at least 1", fix=fix)
        if self.check and not self.per_graph_binaries:
            raise UsageError(
                "--no-per-graph-binaries",
                got="no binaries of single graphs",
                expected="some for the check: Genie on x86 loads no others",
                fix="Add --skip-check.",
            )

    @property
    def target(self) -> Capabilities:
        """What reads the graphs."""
        from exporters.capabilities import GENIE, GENIEX  # slow to import

        return GENIEX if self.stacked else GENIE
