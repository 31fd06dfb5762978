"""Engine hosts without a second process: what is refused, and what is said."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from manyhands import spec
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.hosts.engine import Hosts
from manyhands.errors import BadInput, ManyhandsError, Preempted
from manyhands.signals import PREEMPTED


class NoForks:
    """Instead of a fork server: these runs end before they begin."""

    def __init__(self, leftover: Path) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.engines.local.fork_client.Spawner", NoForks)


def test_the_spec_string_makes_the_same_engine() -> None:
    made = engine_of("hosts:listen=10.0.0.1,local_workers=2,tls=off,ports=7000-7100,plain_network=on")
    assert made == Hosts(listen="10.0.0.1", local_workers=2, tls=False, ports="7000-7100", plain_network=True)
    assert engine_of(spec.to_spec(made, "hosts")) == made


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"local_workers": 0}, "local_workers must be a whole number of at least 1"),
        ({"wait_s": 0}, "wait_s must be a positive number"),
        ({"ports": "70-7"}, 'ports must be one port or a range such as "7000-7100"'),
        ({"ports": "0"}, "ports must be"),
        ({"ports": "7000-70000"}, "ports must be"),
        ({"plain_network": True}, "plain_network works only with tls=off"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Hosts(**fields)


def test_no_workers_at_all() -> None:
    with pytest.raises(BadInput, match="workers must be a whole number of at least 1, not 0"):
        Hosts().launch(lambda worker: None, LaunchSpec(workers=0))


def test_more_here_than_there_are() -> None:
    with pytest.raises(BadInput, match="local_workers=3 is more than workers=2"):
        Hosts(local_workers=3).launch(lambda worker: None, LaunchSpec(workers=2))


def test_one_worker_runs_in_this_process() -> None:
    assert Hosts().launch(lambda worker: worker.size, LaunchSpec(workers=1)) == [1]


class Stopped(Observer):
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def stopping(self) -> str:
        return self.reason


def hosts(**fields: Any) -> tuple[Hosts, list[str]]:
    output: list[str] = []
    engine = Hosts(**fields)
    engine.announcer.say = output.append
    return engine, output


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    return path


def test_whoever_does_not_come_is_missed(credentials: Path) -> None:
    engine, output = hosts(local_workers=1, wait_s=0.2)
    with pytest.raises(
        ManyhandsError, match=r"waited 0 s for the other hosts; .* 1 of 3 .*; start `manyhands join` .*missing: 2\)"
    ):
        engine.launch(lambda worker: None, LaunchSpec(workers=3))
    assert f"MANYHANDS_CREDENTIALS={credentials} manyhands join 127.0.0.1:" in output[0]
    assert "--workers 2\n" in output[0]
    assert credentials.stat().st_mode & 0o777 == 0o600  # the user named it: it stays


def test_the_command_can_be_pasted_whatever_the_paths_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my run; touch $(x)'s.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    for listen in ("127.0.0.1", "0.0.0.0"):
        engine, output = hosts(local_workers=1, wait_s=0.1, listen=listen)
        with pytest.raises(ManyhandsError, match="still missing: 1"):
            engine.launch(lambda worker: None, LaunchSpec(workers=2))
        *_, command = [line for line in output[0].splitlines() if "manyhands join" in line]
        name = str(path) if listen == "127.0.0.1" else path.name
        assert shlex.split(command)[:3] == [f"MANYHANDS_CREDENTIALS={name}", "manyhands", "join"]
        if listen != "127.0.0.1":
            (copy,) = [line for line in output[0].splitlines() if "scp" in line]
            assert shlex.split(copy)[2].endswith(f":{path}")


@pytest.mark.parametrize(("reason", "error"), [(PREEMPTED, Preempted), ("callback", ManyhandsError)])
def test_the_wait_can_be_stopped(credentials: Path, reason: str, error: type[Exception]) -> None:
    engine, _ = hosts(local_workers=1, wait_s=60)
    with pytest.raises(error, match=f"asked to stop .{reason}. while waiting for the other hosts"):
        engine.launch(lambda worker: None, LaunchSpec(workers=2, observer=Stopped(reason)))


def test_credentials_of_the_run_alone_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[list[str]] = []
    engine, _ = hosts(local_workers=1, wait_s=0.2)
    engine.announcer.say = lambda text: seen.append([path.name for path in tmp_path.rglob("*.pem")])
    with pytest.raises(ManyhandsError, match="still missing: 1"):
        engine.launch(lambda worker: None, LaunchSpec(workers=2))
    assert len(seen[0]) == 1
    assert list(tmp_path.iterdir()) == []


def test_without_tls_only_loopback_unless_said_twice(credentials: Path) -> None:
    for address in ("0.0.0.0", "10.0.0.1", "::", "somewhere", ""):
        with pytest.raises(
            BadInput, match=r"without TLS anybody on that network .*add --plain-network .plain_network=on."
        ):
            Hosts(listen=address, tls=False)
    for address in ("127.0.0.1", "::1", "localhost"):
        assert not Hosts(listen=address, tls=False).tls
    engine, output = hosts(listen="0.0.0.0", tls=False, plain_network=True, wait_s=0.1)
    with pytest.raises(ManyhandsError, match="still missing: 1"):
        engine.launch(lambda worker: None, LaunchSpec(workers=2))
    assert "WITHOUT TLS" in output[0]
    assert "can replace the program that joining hosts run" in output[0]
    assert "--no-tls --plain-network" in output[0]


def test_credentials_that_others_may_read_are_refused(credentials: Path) -> None:
    credentials.write_text("x" * 64)
    credentials.chmod(0o644)
    for tls in (True, False):
        with pytest.raises(BadInput, match="has mode 0644"):
            hosts(tls=tls)[0].launch(lambda worker: None, LaunchSpec(workers=2))
