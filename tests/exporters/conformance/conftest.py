"""The kit that tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices import find
from edgekv.conformance.kit import Kit, open_kit
from exporters.conformance.make import make_kit
from tests.support import kits
from tests.support.exports import kept


@pytest.fixture(scope="session")
def kit(wide: Path) -> Kit:
    """A kit of one family, one operation of it, and a small model; shared, so not to be written to."""
    parts = ("family/llama", "operation/lpbq-product", "decode")

    def make(folder: Path) -> None:
        make_kit(folder / "kit", find(kits.SOC), parts=parts, model=wide)

    return open_kit(kept("kit", kits.CODE, make, parts, wide.name) / "kit")
