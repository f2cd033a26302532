"""Fixtures that many tests share; what is costly is made once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from devices import find
from exporters.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.recipe import find_recipe

# A busy machine is no failure, and CI looks at the same examples each time: searching for new ones is for people.
settings.register_profile("edgekv", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("edgekv")


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded checkpoint."""
    return Path(__file__).parent.parent / "models" / "stdlib-4m"


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Path:
    """The embedded checkpoint exported for SM8650 with a context of 128, checked on the HTP compiler."""
    given = os.environ.get("EDGEKV_TEST_BUNDLE")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("exported") / "bundle"
    options = ExportOptions(device=find("SM8650"), recipe=find_recipe("w8a16"), context=128, ar=(1, 32))
    export_bundle(Checkpoint.open(str(embedded)), folder, options)
    return folder
