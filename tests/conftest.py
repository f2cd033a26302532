"""Fixtures that many tests share; what is costly is made once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from devices import find
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe
from tests.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from tests.aihub_server import AiHub

# A busy machine is no failure, and CI looks at the same examples each time: searching for new ones is for people.
settings.register_profile("edgekv", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("edgekv")


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory of its own for everything that the tests run."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKV_CACHE_DIR", str(folder))
        yield folder


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


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of two layers, exported with a context of 64."""
    folder = tmp_path_factory.mktemp("small")
    options = ExportOptions(
        device=find("SM8650"), recipe=find_recipe("w8a16"), context=64, ar=(1, 8), check_on_htp=False
    )
    checkpoint = write_checkpoint(folder / "checkpoint")
    export_bundle(Checkpoint.open(str(checkpoint)), folder / "bundle", options)
    return folder / "bundle"


@pytest.fixture
def small(small_export: Path, tmp_path: Path) -> Path:
    """A copy of it to write into."""
    return shutil.copytree(small_export, tmp_path / "bundle")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AiHub]:
    """An AI Hub on this machine, for which the client of this process is configured. Nothing else can be reached."""
    from qai_hub.util import session

    from tests.aihub_server import AiHub, configure

    hub = AiHub()
    for name, value in configure(tmp_path / "client.ini", hub.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "BACKOFF_FACTOR", 0.001)  # the client waits so long before its second try
    yield hub
    hub.close()
