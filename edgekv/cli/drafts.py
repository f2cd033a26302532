"""Options of speculation: drafts that one pass checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from edgekv.errors import UsageError
from edgekv.load_options import EngineOptions
from edgekv.option import Option

if TYPE_CHECKING:
    from edgekv.draft import Speculation
    from edgekv.model import Model


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """How the text is drafted.

    Raises:
        UsageError: options that exclude each other.
    """

    mode: Annotated[
        str | None,
        Option(
            "Draft tokens that one pass verifies; the text is the same. lookup copies from prompt and text, corpus "
            "from --draft-corpus, draft asks --draft; auto asks all of them, and none where it does not pay; off.",
            "--speculate",
            shown="off; auto with --draft-corpus or --draft",
        ),
    ] = None
    corpus: Annotated[
        Path | None, Option("A UTF-8 text or source file to copy drafts from; indexed once.", "--draft-corpus")
    ] = None
    draft: Annotated[Path | None, Option("Bundle of a smaller model with the same tokenizer.")] = None
    tokens: Annotated[
        int | None,
        Option(
            "Drafts of a pass at most.",
            "--draft-tokens",
            shown="as many as the largest verify graph has room for",
        ),
    ] = None
    tree: Annotated[
        bool, Option("Draft a tree of alternative continuations, with lookup and corpus; htp only.", "--draft-tree")
    ] = False

    def __post_init__(self) -> None:
        from edgekv.draft import check_choice

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
    def opened(self, model: Model, engine: EngineOptions) -> Iterator[Speculation | None]:
        """What `Model.generate` takes; None without speculation. A draft bundle is closed when the block ends.

        If the bundle has no verify graphs, `auto` is off and says so on standard error.

        Args:
            model: the target.
            engine: that of the target, on which the draft bundle runs too.

        Raises:
            EdgeKVError: a corpus or a draft bundle that cannot be used.
        """
        from edgekv.draft import Speculation
        from edgekv.engine.speculation import EXPORT_FIX
        from edgekv.loading import open_model

        mode: Any = self.chosen
        if mode == "off":
            yield None
            return
        with ExitStack() as stack:
            corpus = None if self.corpus is None else model.open_corpus(self.corpus, "--draft-corpus")
            draft = None if self.draft is None else stack.enter_context(open_model(self.draft, engine))
            wanted = Speculation(mode, corpus, draft, self.tokens, self.tree)
            model.engine.target.check(wanted)
            if not model.verify_rows:
                click.echo(f"[no speculation: the bundle has no verify graphs. {EXPORT_FIX}]", err=True)
            yield wanted
