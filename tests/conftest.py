"""Fixtures that many tests share; what is costly is made once."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnxruntime as ort
import pytest
from hypothesis import settings

from edgekv.machine import child
from edgekv.machine.child import TIMEOUT_VARIABLE
from edgekv.machine.graph_file import WEIGHTS_FOLDER
from edgekv.runtime.htp import HtpEngine
from tests.support import exports
from tests.support.checkpoints import NEWER, WIDE, write_checkpoint, write_sinking, write_tokenizer
from tests.support.exports import export_options, exported
from tests.support.thorough import spread
from tests.support.warm_children import WarmChildren, can_fork

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from exporters.targets.genie.folder import GenieFolder
    from tests.support.aihub_server import AiHub

# A busy machine is no failure, and CI looks at the same examples each time: searching for new ones is for people.
settings.register_profile("edgekv", deadline=None, derandomize="CI" in os.environ)
settings.register_profile("few", settings.get_profile("edgekv"), max_examples=25)
settings.load_profile("edgekv")


WORKER = os.environ.get("PYTEST_XDIST_WORKER")
VARIANTS = "EDGEKV_TEST_VARIANTS"

# Vendor libraries hang now and then: a test then fails with the error of the command before its own time limit ends.
os.environ.setdefault(TIMEOUT_VARIABLE, "200")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each core, at most four: while a test waits for a child or a browser, another one computes."""
    return min(4, 2 * len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)))


WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def use_own_cores(item: pytest.Item) -> None:
    """Divide the cores among workers for tests of the HTP: threads of its emulator that wait spin on all they may use.

    Others take the core that is idle.
    """
    if WORKER is not None and CORES:
        number = int(WORKER.removeprefix("gw"))
        own = CORES[number::WORKERS] or [CORES[number % len(CORES)]]
        os.sched_setaffinity(0, own if item.get_closest_marker("htp") else CORES)


class OneThread(ort.SessionOptions):  # type: ignore[misc]
    """For workers of a parallel run, which take all cores together: threads that wait would spin."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 1


MAX_SESSIONS = 8
_make_session = ort.InferenceSession
_sessions: OrderedDict[tuple[object, ...], ort.InferenceSession] = OrderedDict()


def shared_session(model: str | bytes, options: ort.SessionOptions | None = None, **more: Any) -> ort.InferenceSession:
    """A session of a graph in memory whose weights are those of a shared export: the one that was made before."""
    folder = _entry(options, WEIGHTS_FOLDER)
    # Sessions of the HTP fail where one with other options has been made and freed in between.
    is_on_htp = bool(_entry(options, "session.disable_cpu_ep_fallback"))
    if isinstance(model, str) or is_on_htp or not Path(folder).is_relative_to(exports.CACHE):
        return _make_session(model, options, **more)
    chosen = options.intra_op_num_threads, options.enable_mem_pattern, options.enable_mem_reuse
    key = (sha256(model).digest(), folder, *chosen)
    _sessions[key] = _sessions.pop(key, None) or _make_session(model, options, **more)
    if len(_sessions) > MAX_SESSIONS:
        _sessions.popitem(last=False)
    return _sessions[key]


def _entry(options: ort.SessionOptions | None, name: str) -> str:
    """An entry of a session's configuration; empty if it has none."""
    found = ""
    with suppress(AttributeError, RuntimeError):  # without options, or without the entry
        found = options.get_session_config_entry(name)
    return found


children = WarmChildren()
_compile_graph = HtpEngine._compiled_in


def compiled_once(engine: HtpEngine, folder: Path, graph: Path) -> Path:
    """The binary of a graph of a shared export that is not compiled: made by whichever process loads it first."""
    if not graph.is_relative_to(exports.CACHE):
        return _compile_graph(engine, folder, graph)
    key = graph.relative_to(exports.CACHE), engine.device.soc, dict(engine.options.provider_options)
    code = (HtpEngine.__module__,)
    return exports.kept("binary", code, lambda own: _compile_graph(engine, own, graph), *key) / "compiled.onnx"


def pytest_configure(config: pytest.Config) -> None:
    ort.InferenceSession = shared_session
    HtpEngine._compiled_in = compiled_once  # type: ignore[method-assign]
    if WORKER is None:
        exports.prune()
    else:
        ort.SessionOptions = OneThread
    if VARIANTS in os.environ:
        config.pluginmanager.register(FewVariants())
    if WORKERS > 1:
        config.pluginmanager.register(LongestFirst())
    selected = config.getoption("markexpr")
    if "not thorough" in selected:
        settings.load_profile("few")
    if can_fork():
        child.started = children.started
    if "not htp" in selected:
        sys.modules["onnxruntime_qnn"] = None  # type: ignore[assignment]  # a test that needs it must say so


def pytest_runtest_setup(item: pytest.Item) -> None:
    use_own_cores(item)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among thousands of modules and tests, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of each engine need the compiler for one of them."""
    for item in items:
        parameters = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        if any(isinstance(value, str) and value == "htp" for value in parameters):
            item.add_marker(pytest.mark.htp)


class FewVariants:
    """Leaves EDGEKV_TEST_VARIANTS variants of each test, among them the first and the last."""

    @pytest.hookimpl(trylast=True)  # of those that are selected
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        variants: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            variants[item.nodeid.partition("[")[0]].append(item)
        left = {item for alike in variants.values() for item in spread(alike, int(os.environ[VARIANTS]))}
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = [item for item in items if item in left]


class LongestFirst:
    """Gives each worker as many tests, those that take seconds first.

    The workers divide the list evenly and take each other's last tests: those that are left at the end are short.
    """

    SECONDS: ClassVar = {"thorough": 2.0, "htp": 1.0, "slow": 0.7}
    """Of a test with the mark, about."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        modules: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if self._seconds(item):
                modules[item.nodeid.partition("::")[0]].append(item)
        taken = [(0.0, list[pytest.Item]()) for _ in range(WORKERS)]
        for module in sorted(modules.values(), key=lambda module: -sum(map(self._seconds, module))):
            seconds, share = min(taken, key=itemgetter(0))
            taken[taken.index((seconds, share))] = seconds + sum(map(self._seconds, module)), share + module
        short, left, ordered = [item for item in items if not self._seconds(item)], len(items), list[pytest.Item]()
        for number, (_, share) in enumerate(taken):
            size = left // (WORKERS - number)  # as the workers divide them
            added = max(0, size - len(share))
            ordered += [*share, *short[:added]]
            short, left = short[added:], left - size
        items[:] = ordered + short

    def _seconds(self, item: pytest.Item) -> float:
        return max((self.SECONDS.get(mark.name, 0.0) for mark in item.iter_markers()), default=0.0)


def pytest_unconfigure(config: pytest.Config) -> None:
    children.close()
    if WORKER is None:
        exports.forget_layers()


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


@pytest.fixture(scope="session", autouse=True)
def shared_exports_stay_as_they_are() -> Iterator[None]:
    """A test that writes into a shared bundle makes others pass or fail by their order."""
    yield
    assert exports.changed() == []


@pytest.fixture(scope="session")
def bundle(embedded: Path) -> Path:
    """The embedded checkpoint for SM8650 with a context of 128, keys as rows; shared, so not to be written to."""
    given = os.environ.get("EDGEKV_TEST_BUNDLE")
    return Path(given) if given else exported(embedded, export_options(context=128, ar=(1, 32), key_layout="rows"))


@pytest.fixture(scope="session")
def embedded_on_htp(embedded: Path) -> Path:
    """The same, checked and compiled for the HTP; for tests that need a trained model there. Shared likewise."""
    options = export_options(context=128, ar=(1, 32), key_layout="rows", check_on_htp=True)
    return exported(embedded, options, compiled=True)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with rows of 64 bytes, whose tokenizer has a token for each id and adds BOS."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("wide") / "checkpoint", WIDE)
    write_tokenizer(checkpoint / "tokenizer.json", WIDE["vocab_size"] - 256, special=False, adds_first=True)
    return checkpoint


@pytest.fixture(scope="session")
def wide_on_htp(wide: Path) -> Path:
    """Its export with a context of 128, checked and compiled for the HTP; shared, so not to be written to."""
    return exported(wide, export_options(key_layout="rows", context=128, ar=(1, 32), check_on_htp=True), compiled=True)


@pytest.fixture(scope="session")
def wide_columns(wide: Path) -> Path:
    """The same with keys in columns; shared, so not to be written to."""
    options = export_options(context=128, ar=(1, 32), key_layout="columns", check_on_htp=True)
    return exported(wide, options, compiled=True)


@pytest.fixture(scope="session")
def genie_folder(wide_columns: Path) -> GenieFolder:
    """What Genie loads of it, which no test has run yet; shared, so not to be written to."""
    return _genie_folder(wide_columns)


@pytest.fixture(scope="session")
def sinking_genie_folder(tmp_path_factory: pytest.TempPathFactory) -> GenieFolder:
    """The same of a random model whose first token is restored from a state."""
    checkpoint = write_sinking(tmp_path_factory.mktemp("sink") / "checkpoint", NEWER)
    options = export_options(context=128, ar=(1, 16), key_layout="columns", calibration_tokens=512)
    return _genie_folder(exported(checkpoint, options))


def _genie_folder(bundle: Path) -> GenieFolder:
    from edgekv.bundle import open_bundle
    from exporters.targets.genie.folder import open_genie_folder
    from exporters.targets.genie.options import GenieOptions
    from exporters.targets.genie.write import write_genie

    options, opened = GenieOptions(check=False), open_bundle(bundle)
    code = ("exporters.targets.genie.write",)
    made = exports.kept("genie", code, lambda folder: write_genie(opened, folder / "genie", options), bundle, options)
    return open_genie_folder(made / "genie")


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of two layers, exported with a context of 64; shared, so not to be written to."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint")
    return exported(checkpoint, export_options(context=64, ar=(1, 8), key_layout="rows"))


@pytest.fixture(scope="session")
def small_on_htp(small_export: Path) -> Path:
    """The same, checked and compiled for the HTP; shared, so not to be written to."""
    options = export_options(context=64, ar=(1, 8), key_layout="rows", check_on_htp=True)
    return exported(small_export.parent / "checkpoint", options, compiled=True)


@pytest.fixture
def small(small_export: Path, tmp_path: Path) -> Path:
    """A copy of it to write into."""
    return shutil.copytree(small_export, tmp_path / "bundle")


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template and a context of 512; shared, so not to be written to."""
    from tests.support.serving import talking_bundle

    return talking_bundle(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    from tests.support.serving import CHROMIUM, browser

    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with browser() as chromium:
        yield chromium


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AiHub]:
    """An AI Hub on this machine, for which the client of this process is configured. Nothing else can be reached."""
    from qai_hub.util import session

    from tests.support.aihub_server import AiHub, configure

    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))  # pieces of other tests are not counted
    hub = AiHub()
    for name, value in configure(tmp_path / "client.ini", hub.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "BACKOFF_FACTOR", 0.001)  # the client waits so long before its second try
    yield hub
    hub.close()
