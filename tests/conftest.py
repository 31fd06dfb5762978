"""Shared by all tests: one warm fork server, so that starting workers costs milliseconds."""

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: tests share the cores, and OpenMP's threads spin

import faulthandler
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
import warm_servers
from driver_script import Script, signal_all

from manyhands.engines.local import fork_client
from manyhands.engines.local.engine import Local

# Tests start hundreds of interpreters: where bytecode is not kept, each of them compiles the package once more.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started in the background: the commands that tests interrupt would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


STDERR = pytest.StashKey[IO[str]]()
GROUPS = {  # of a folder or file: its tests share what takes seconds to start
    "spark_": "spark",
    "keras_": "keras",
    "hosts": "hosts",
    "torchrun": "hosts",
    "test_site.py": "site",
    "test_report_integration.py": "browser",
    "test_compare_integration.py": "compare",
    "test_release_integration.py": "release",
    **{  # each kernel is compiled by one process, the first time; others load what it has left
        f"test_{name}.py": name
        for name in ("cuts", "factors", "ffm", "fm", "glove", "kmeans", "linear", "skip_gram", "csr", "cooccurrence")
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=1_000, help="inputs that each fuzzed format gets")
    parser.addoption("--schedules", type=int, default=2_000, help="schedules of each search over trainings (nightly)")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A group's tests run in one process of pytest-xdist (--dist loadgroup), and first, since a group is not split.

    So do the commands of the documentation: each of them takes minutes, and the last to start would run alone.
    """
    for item in items:
        for group in filter(None, map(GROUPS.get, item.path.relative_to(item.config.rootpath).parts)):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(
        key=lambda item: not (item.get_closest_marker("xdist_group") or item.path.name.startswith("test_readme"))
    )


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():  # else it is a test's own
        config.stash[STDERR] = os.fdopen(os.dup(2), "w")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that not even its timeout ends, since compiled code does not return, ends its process and shows all stacks.

    pytest-xdist then names the test, and goes on with another process.
    """
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(2 * limit_s + 60, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same for what is left at the end: threads that do not return."""
    if hasattr(session.config, "workerinput"):  # a process of pytest-xdist
        faulthandler.dump_traceback_later(300, exit=True, file=session.config.stash[STDERR])


def pytest_collection_finish() -> None:
    """Collections of garbage, which some tests and `prepare` ask for, need not look at what was imported and collected."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def host_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What shards keep of files lies among the tests' files."""
    os.environ["MANYHANDS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Whatever is launched here uses the tests' warm fork servers, which have loaded torch already.

    To start a fork server takes ten times the seconds of a small run. A test of the start itself uses fixture `cold`.
    """
    prestart = Local.prestart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "prestart", lambda self: prestart(self) if warm_servers.COLD or self._slot.keep else self)
        patch.setattr(fork_client, "Spawner", warm_servers.lend)
        yield
    warm_servers.close_all()


@pytest.fixture(scope="session")
def local() -> Local:
    """Engine `local`, whose fork server starts with the first launch of the session."""
    return Local()


@pytest.fixture
def cold(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each launch starts a fork server, as it does for users."""
    warm_servers.COLD.append(request.node.nodeid)
    yield
    warm_servers.COLD.clear()


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused, is refused before engine `local` starts anything."""
    monkeypatch.setattr(Local, "prestart", lambda self: pytest.fail("a process was started"))
    monkeypatch.setattr(Local, "launch", lambda *_: pytest.fail("workers were started"))


@pytest.fixture
def inputs(pytestconfig: pytest.Config) -> int:
    """How many inputs a fuzzed format gets (--fuzz=N)."""
    return int(pytestconfig.getoption("--fuzz"))


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Start a driver script; afterwards nothing of it may live."""
    started: list[Script] = []

    def start(text: str, *arguments: str, stdin: str | None = None) -> Script:
        started.append(Script(tmp_path, text, *arguments, stdin=stdin))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        signal_all(one.processes(), signal.SIGKILL)
        one.process.communicate(timeout=10)  # an end of its pipes is with each of them
