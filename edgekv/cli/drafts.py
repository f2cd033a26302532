"""Drafts that commands make: a corpus and a draft bundle are opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekv.draft.speculation import Speculation
from edgekv.runtime.load_options import EngineOptions

if TYPE_CHECKING:
    from edgekv.model import Model


@contextmanager
def opened_drafts(speculation: Speculation | None, model: Model, engine: EngineOptions) -> Iterator[Speculation | None]:
    """What `Model.generate` takes; None without speculation. A draft bundle is closed when the block ends.

    If the bundle has no verify graphs, `auto` is off and says so on standard error.

    Args:
        speculation: as the options say it: corpus and draft are paths.
        model: the target.
        engine: that of the target, on which the draft bundle runs too.

    Raises:
        EdgeKVError: a corpus or a draft bundle that cannot be used.
    """
    from edgekv.engine.drafting import EXPORT_FIX
    from edgekv.loading import open_draft

    if speculation is None or speculation.mode == "off":
        yield None
        return
    with ExitStack() as stack:
        if isinstance(speculation.corpus, str):
            speculation = replace(speculation, corpus=model.open_corpus(speculation.corpus, "--draft-corpus"))
        if isinstance(speculation.draft, str):
            draft = open_draft(Path(speculation.draft), engine)
            stack.callback(draft.close)
            speculation = replace(speculation, draft=draft)
        model.engine.drafting.check(speculation)
        if not model.verify_rows:
            click.echo(f"[no speculation: the bundle has no verify graphs. {EXPORT_FIX}]", err=True)
        yield speculation
