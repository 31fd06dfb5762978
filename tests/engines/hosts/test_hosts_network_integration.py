"""Two hosts in two network namespaces, with addresses and names of their own; skipped where namespaces are not allowed."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_process import HostProcess, Say, command
from two_hosts import ADDRESSES, CABLE, TwoHosts, programs, source, two_hosts

from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.torchrun.engine import Torchrun
from pages import PAGES, TWO_HOSTS, snippets, write_scripts


def agree(worker: Any) -> dict[str, Any]:
    vector = torch.full((100_000,), worker.rank + 1.0, dtype=torch.float64)
    worker.group.mean_(vector, weight=worker.rank + 1.0)
    kind = type(worker.group).__name__
    return {"host": worker.host, "folder": os.getcwd(), "mean": vector[-1].item(), "group": kind}


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    return {**os.environ, "PYTHONPATH": source(), "OMP_NUM_THREADS": "1"}


def driver(say: Say, folder: Path) -> None:
    os.chdir(folder)
    engine = Hosts(listen=ADDRESSES[0], local_workers=2)
    engine.announcer.say = say
    say(json.dumps(engine.launch(agree, LaunchSpec(workers=3, timeout_s=60))))


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_the_printed_command_joins_from_another_host(
    hosts: TwoHosts, process: Callable[..., HostProcess], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first = process(driver, here, inside=hosts.pids[0])
    printed = r"scp -p 10\.77\.0\.1:(\S+) \.\n\s+MANYHANDS_CREDENTIALS=(\S+) manyhands (join .*)"
    found = re.search(printed, first.until("manyhands join"))
    assert found
    credentials = there / found[2]
    credentials.touch(0o600)  # what scp -p does
    credentials.write_bytes(Path(found[1]).read_bytes())
    variables = {"MANYHANDS_CREDENTIALS": found[2]}
    second = process(command, there, *found[3].split(), variables=variables, inside=hosts.pids[1])
    (code, said), (joined, heard) = first.end(), second.end(20)
    assert (code, joined) == (0, 0), said + heard
    values = json.loads(said.splitlines()[-1])
    places = [("alpha", str(here)), ("alpha", str(here)), ("beta", str(there))]
    assert [(value["host"], value["folder"]) for value in values] == places
    assert [value["mean"] for value in values] == pytest.approx([14 / 6] * 3, abs=1e-12)
    assert "workers that are here: 3 of 3 (alpha 2, beta 1)" in said
    assert not Path(found[1]).parent.exists()


def rank(say: Say) -> None:
    values = Torchrun().launch(agree, LaunchSpec(workers=2, timeout_s=60))
    say(json.dumps([value for value in values if value is not None]))


@pytest.mark.slow
def test_ranks_of_a_launcher_on_two_hosts(hosts: TwoHosts, process: Callable[..., HostProcess]) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": CABLE}
    place |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "7077"}
    ranks = [process(rank, variables={**place, "RANK": str(i)}, inside=hosts.pids[i]) for i in range(2)]
    ended = [one.end() for one in ranks]
    assert [code for code, _ in ended] == [0, 0], ended
    values = [json.loads(said.splitlines()[-1])[0] for _, said in ended]
    assert [(value["host"], value["group"]) for value in values] == [("alpha", "TorchGroup"), ("beta", "TorchGroup")]
    assert [value["mean"] for value in values] == pytest.approx([5 / 3] * 2, abs=1e-12)


def shown(page: str) -> list[str]:
    """The page's blocks that are run on two hosts, with the address that one of these has."""
    parts = [part for path in PAGES for part in snippets(path) if path.name == page and part.how == TWO_HOSTS]
    assert [part.language for part in parts] == ["bash"] * len(parts)
    return [part.text.replace("10.0.0.1", ADDRESSES[0]) for part in parts]


def test_the_blocks_are_those_that_are_followed_here() -> None:
    pages = {part.page.name for page in PAGES for part in snippets(page) if part.how == TWO_HOSTS}
    assert pages == {"hosts.md", "clusters.md"}
    assert (len(shown("hosts.md")), len(shown("clusters.md"))) == (2, 1)


@pytest.mark.nightly
def test_hosts_joined_by_ssh_as_the_docs_show_it(hosts: TwoHosts, environment: dict[str, str], tmp_path: Path) -> None:
    """ssh and scp are what reaches the other namespace."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there / "project"):
        folder.mkdir(parents=True)
        write_scripts(folder)
    home = shlex.quote(str(there))
    path = programs(
        tmp_path / "bin",
        scp=f'exec cp -p "$2" {home}/"${{3#beta:}}"',
        ssh=f'cd {home} && HOME={home} exec {shlex.join(hosts.inside(1))} sh -c "$2"',
    )
    script = hosts.start(
        0, "bash", "-ec", shown("hosts.md")[0], env={**environment, "PATH": path, "HOME": str(here)}, cwd=here
    )
    output, _ = script.communicate(timeout=100)
    assert script.returncode == 0, output
    assert "workers that are here: 4 of 4 (alpha 2, beta 2)" in output
    assert "Advice: " in output


@pytest.mark.nightly
def test_a_batch_script_of_slurm_as_the_docs_show_it(
    hosts: TwoHosts, environment: dict[str, str], tmp_path: Path
) -> None:
    """srun is what starts three tasks of one host: its driver and two that join it."""
    write_scripts(tmp_path)
    path = programs(
        tmp_path / "bin",
        srun='for i in 0 1 2; do SLURM_PROCID=$i "$@" & pids="$pids $!"; done; for pid in $pids; do wait $pid || exit 1; done',
    )
    known = {**environment, "PATH": path, "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    script = hosts.start(0, "bash", "-ec", shown("hosts.md")[1], env=known, cwd=tmp_path)
    output, _ = script.communicate(timeout=100)
    assert script.returncode == 0, output
    assert "workers that are here: 12 of 12" in output
    assert "Advice: " in output


@pytest.mark.nightly
def test_another_frameworks_script_on_two_hosts_as_the_docs_show_it(
    hosts: TwoHosts, environment: dict[str, str], tmp_path: Path
) -> None:
    write_scripts(tmp_path)
    known = {
        **environment,
        "PATH": programs(tmp_path / "bin"),
        "MANYHANDS_CREDENTIALS": str(tmp_path / "run.pem"),
        "GLOO_SOCKET_IFNAME": CABLE,
    }
    script = hosts.start(0, "bash", "-ec", shown("clusters.md")[0], env=known, cwd=tmp_path)
    output = ""
    assert script.stdout is not None
    while not (found := re.search(r"manyhands (join .*)", output)):
        output += (line := script.stdout.readline())
        assert line, output
    joiner = hosts.start(1, "manyhands", *found[1].split(), env=known, cwd=tmp_path)
    rest, _ = script.communicate(timeout=100)
    heard, _ = joiner.communicate(timeout=20)
    assert (script.returncode, joiner.returncode) == (0, 0), output + rest + heard
    assert (output + rest + heard).count("ranks: 4") == 4
