"""Engine hosts without a second process: what is refused, and what is said."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from manyhands import spec
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts.engine import Hosts, _common_address
from manyhands.engines.survive import Survive
from manyhands.errors import BadInput, ManyhandsError
from refusals import all_refused


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


def test_what_cannot_be_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"local_workers": 0}, "local_workers must be a whole number of at least 1"),
        ({"wait_s": 0}, "wait_s must be a positive number"),
        ({"ports": "70-7"}, 'ports must be one port or a range such as "7000-7100"'),
        ({"ports": "0"}, "ports must be"),
        ({"ports": "7000-70000"}, "ports must be"),
        ({"plain_network": True}, "plain_network works only with tls=off"),
    ]
    all_refused(lambda fields: Hosts(**fields), cases)
    with pytest.raises(BadInput, match="workers must be a whole number of at least 1, not 0"):
        Hosts().launch(print, LaunchSpec(workers=0))
    with pytest.raises(BadInput, match="local_workers=3 is more than workers=2"):
        Hosts(local_workers=3).launch(print, LaunchSpec(workers=2))
    with pytest.raises(BadInput, match="silence_s must be at least 4 on engine hosts"):  # which live every 2 s
        Hosts().check(LaunchSpec(workers=2, survive=Survive(silence_s=3)))


def test_one_worker_runs_in_this_process() -> None:
    assert Hosts().launch(lambda worker: worker.size, LaunchSpec(workers=1)) == [1]


def missed(output: list[str], words: str = "still missing: ", workers: int = 2, **fields: Any) -> None:
    """Nobody joins a launch, and what it says goes to `output`."""
    engine = Hosts(local_workers=1, wait_s=0.1, **fields)
    engine.announcer.say = output.append
    with pytest.raises(ManyhandsError, match=words):
        engine.launch(print, LaunchSpec(workers=workers))


def test_whoever_does_not_come_is_missed(credentials: Path) -> None:
    output: list[str] = []
    words = r"waited 0 s for the other hosts; .* 1 of 3 .*; start `manyhands join` .*missing: 2\)"
    missed(output, words, workers=3)
    assert f"MANYHANDS_CREDENTIALS={credentials} manyhands join 127.0.0.1:" in output[0]
    assert "--workers 2\n" in output[0]
    assert credentials.stat().st_mode & 0o777 == 0o600  # the user named it: it stays


def test_the_command_can_be_pasted_whatever_the_paths_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my run; touch $(x)'s.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    for listen, name in (("127.0.0.1", str(path)), ("0.0.0.0", path.name)):
        output: list[str] = []
        missed(output, listen=listen)
        lines = output[0].splitlines()
        *_, command = [line for line in lines if "manyhands join" in line]
        assert shlex.split(command)[:3] == [f"MANYHANDS_CREDENTIALS={name}", "manyhands", "join"]
    (copy,) = [line for line in lines if "scp" in line]
    assert shlex.split(copy)[2].endswith(f":{path}")


def test_credentials_of_the_run_alone_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[list[str]] = []
    engine = Hosts(local_workers=1, wait_s=0.1)
    engine.announcer.say = lambda text: seen.append([path.name for path in tmp_path.rglob("*.pem")])
    with pytest.raises(ManyhandsError, match="still missing: 1"):
        engine.launch(print, LaunchSpec(workers=2))
    assert len(seen[0]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("credentials")
def test_without_tls_only_loopback_unless_said_twice() -> None:
    words = r"without TLS anybody on that network .*add --plain-network .plain_network=on."
    far = [(address, words) for address in ("0.0.0.0", "10.0.0.1", "::", "somewhere", "")]
    all_refused(lambda address: Hosts(listen=address, tls=False), far)
    for address in ("127.0.0.1", "::1", "localhost"):
        assert not Hosts(listen=address, tls=False).tls
    output: list[str] = []
    missed(output, listen="0.0.0.0", tls=False, plain_network=True)
    for said in ("WITHOUT TLS", "can replace the program that joining hosts run", "--no-tls --plain-network"):
        assert said in output[0]


def test_credentials_that_others_may_read_are_refused(credentials: Path) -> None:
    credentials.write_text("x" * 64)
    credentials.chmod(0o644)
    for tls in (True, False):
        with pytest.raises(BadInput, match="has mode 0644"):
            Hosts(tls=tls).launch(print, LaunchSpec(workers=2))


def test_the_address_that_workers_of_other_hosts_are_told_where_it_listens_on_all() -> None:
    """The first by which a host came; who came over loopback is reached by nobody else."""
    for came_by, expected in (
        ({"beta": "10.0.0.1", "gamma": "10.1.0.1"}, "10.0.0.1"),
        ({"alpha (2)": "127.0.0.1", "alpha (3)": "127.0.0.1"}, "127.0.0.1"),
        ({"beta": "fd00::1"}, "fd00::1"),
    ):
        assert _common_address(came_by) == expected, came_by
    words = r"^alpha \(2\) joined over loopback, .*: on that host, join with the address 10\.0\.0\.1 too"
    mixed = [({"alpha (2)": loopback, "beta": "10.0.0.1"}, words) for loopback in ("127.0.0.1", "::1")]
    all_refused(_common_address, mixed)
