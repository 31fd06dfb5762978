from __future__ import annotations

import signal
from typing import Any

import pytest

from manyhands import signals
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec
from manyhands.engines.torchrun import engine
from manyhands.engines.torchrun.engine import LauncherRank, Torchrun
from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec

VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def test_the_place_comes_from_the_environment() -> None:
    assert LauncherRank.from_environment() == LauncherRank(rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(BadInput, match=f"needs the variable {name}: start with torchrun"):
        LauncherRank.from_environment()


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("RANK", "4"), ("WORLD_SIZE", "-1"), ("RANK", "²")])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=name):
        LauncherRank.from_environment()


def test_a_wrong_variable_is_bad_input_also_before_the_workers_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(BadInput, match="WORLD_SIZE must be a whole number, not 'two'"):
        Torchrun().default_workers()
    monkeypatch.setenv("RANK", "²")
    with pytest.raises(BadInput, match="RANK must be a whole number, not '²'"):
        Torchrun().own_rank()


def test_another_number_of_workers_is_refused() -> None:
    with pytest.raises(BadInput, match="workers=2 under torchrun with WORLD_SIZE=4"):
        Torchrun().launch(lambda worker: None, LaunchSpec(workers=2))


def test_sigterm_ends_a_rank_that_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler of Python's would be called in the launcher's rendezvous."""

    def rendezvous(*_: Any) -> None:
        raise RuntimeError(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(engine, "_process_group", rendezvous)
    before = signal.getsignal(signal.SIGTERM)
    try:
        signals.end_by_sigterm()
        with pytest.raises(RuntimeError) as raised:
            Torchrun().launch(lambda worker: None, LaunchSpec(workers=4, device="cpu"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.args == (signal.SIG_DFL,)


def test_the_number_of_shards_is_that_of_hosts() -> None:
    spec = LaunchSpec(workers=4, server=ServerSpec(rule="add"), servers=2)
    with pytest.raises(BadInput, match="servers=2 under torchrun, where the first worker of each host holds one shard"):
        Torchrun().launch(lambda worker: None, spec)


def test_auto_is_torchrun_under_torchrun() -> None:
    assert engine_of("auto") == Torchrun()
