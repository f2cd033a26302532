"""Options of speculation: drafts that one pass checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from edgekv.errors import UsageError

if TYPE_CHECKING:
    from edgekv.engine import Speculate
    from edgekv.model import Model

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

SpeculateOption = Annotated[
    Optional[str],
    typer.Option(
        help="Draft tokens that one pass checks; the text is the same. lookup copies from prompt and text, corpus from "
        "--draft-corpus, draft asks --draft; auto asks all of them, and none where it does not pay; off.",
        show_default="off; auto with --draft-corpus or --draft",
    ),
]
DraftCorpusOption = Annotated[
    Optional[Path],
    typer.Option(help="A UTF-8 text or source file to copy drafts from; indexed once.", show_default=False),
]
DraftOption = Annotated[
    Optional[Path],
    typer.Option("--draft", help="Bundle of a smaller model with the same tokenizer.", show_default=False),
]
DraftTokensOption = Annotated[
    Optional[int],
    typer.Option(help="Drafts of a pass at most.", show_default="as many as the largest verify graph has room for"),
]

DraftTreeOption = Annotated[
    bool,
    typer.Option(
        "--draft-tree", help="Let drafts of lookup and corpus branch where a text has gone on in several ways; htp."
    ),
]


@dataclass(frozen=True, slots=True)
class SpeculateOptions:
    """The options as the user gave them; None is not given.

    Raises:
        UsageError: options that exclude each other.
    """

    mode: str | None
    corpus: Path | None
    draft: Path | None
    tokens: int | None
    tree: bool

    def __post_init__(self) -> None:
        from edgekv.engine.speculate import check_choice  # imports the runtime, which --help does not need

        fields = {"mode": "--speculate", "corpus": "--draft-corpus", "draft": "--draft"}
        check_choice(self.chosen, corpus=self.corpus is not None, draft=self.draft is not None, fields=fields)
        for name, is_given in (("--draft-tokens", self.tokens is not None), ("--draft-tree", self.tree)):
            if is_given and self.chosen == "off":
                fix = "Add --speculate auto, or leave it out."
                raise UsageError(name, got="no --speculate", expected="a way to draft", fix=fix)

    @property
    def chosen(self) -> str:
        """The mode."""
        if self.mode is not None:
            return self.mode
        return "off" if self.corpus is None and self.draft is None else "auto"

    @contextmanager
    def opened(self, model: Model, **options: Any) -> Iterator[Speculate | None]:
        """What `Model.generate` takes; None without speculation. A draft bundle is closed when the block ends.

        If the bundle has no verify graphs, `auto` is off and says so on standard error.

        Args:
            model: the target.
            options: of `load`, for the draft bundle.

        Raises:
            EdgeKVError: a corpus or a draft bundle that cannot be used.
        """
        from edgekv.engine import Speculate
        from edgekv.engine.speculate import EXPORT_FIX, check_speculate
        from edgekv.loading import load

        mode: Any = self.chosen
        if mode == "off":
            yield None
            return
        with ExitStack() as stack:
            corpus = None if self.corpus is None else model.open_corpus(self.corpus, "--draft-corpus")
            draft = None if self.draft is None else stack.enter_context(load(self.draft, **options))
            wanted = Speculate(mode, corpus, draft, self.tokens, self.tree)
            check_speculate(model, wanted)
            if not model.verify_rows:
                typer.echo(f"[no speculation: the bundle has no verify graphs. {EXPORT_FIX}]", err=True)
            yield wanted
