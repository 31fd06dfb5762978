"""Two hosts in two network namespaces, with addresses and names of their own; skipped where namespaces are not allowed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_hosts import ADDRESSES, CABLE, TwoHosts, programs, source, two_hosts

from pages import PAGES, TWO_HOSTS, snippets, write_scripts

WORK = """
import json, os, sys
import torch
from manyhands.engines.base import LaunchSpec

def agree(worker):
    vector = torch.full((100_000,), worker.rank + 1.0, dtype=torch.float64)
    worker.group.mean_(vector, weight=worker.rank + 1.0)
    return {"rank": worker.rank, "host": worker.host, "folder": os.getcwd(), "mean": vector[-1].item(),
            "group": type(worker.group).__name__}
"""
DRIVER = (
    WORK
    + """
from manyhands.engines.hosts.engine import Hosts
engine = Hosts(listen="10.77.0.1", local_workers=2)
engine.announcer.say = lambda text: print(text, flush=True)
print(json.dumps(engine.launch(agree, LaunchSpec(workers=3, timeout_s=60))), flush=True)
"""
)
TORCHRUN = (
    WORK
    + """
from manyhands.engines.torchrun.engine import Torchrun
values = Torchrun().launch(agree, LaunchSpec(workers=2, timeout_s=60))
print(json.dumps([value for value in values if value is not None]), flush=True)
"""
)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


def first(process: subprocess.Popen[str], pattern: str) -> tuple[re.Match[str], str]:
    """What matches in the output so far, and that."""
    assert process.stdout is not None
    output = ""
    while not (found := re.search(pattern, output)):
        line = process.stdout.readline()
        assert line, output
        output += line
    return found, output


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    return {**os.environ, "PYTHONPATH": source(), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_printed_command_joins_from_another_host(
    hosts: TwoHosts, environment: dict[str, str], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    driver = hosts.python(0, "-c", DRIVER, env=environment, cwd=folders[0])
    printed = r"scp -p 10\.77\.0\.1:(\S+) \.\n\s+MANYHANDS_CREDENTIALS=(\S+) manyhands (join .*)"
    found, _ = first(driver, printed)
    credentials = folders[1] / found[2]
    credentials.touch(0o600)  # what scp -p does
    credentials.write_bytes(Path(found[1]).read_bytes())
    command = "import sys; from manyhands.cli.commands import main; main()"
    environment["MANYHANDS_CREDENTIALS"] = found[2]
    joiner = hosts.python(1, "-c", command, *found[3].split(), env=environment, cwd=folders[1])
    output, _ = driver.communicate(timeout=60)
    heard, _ = joiner.communicate(timeout=20)
    assert (driver.returncode, joiner.returncode) == (0, 0), output + heard
    values = json.loads(output.splitlines()[-1])
    assert [(value["host"], value["folder"]) for value in values] == [
        ("alpha", str(folders[0])),
        ("alpha", str(folders[0])),
        ("beta", str(folders[1])),
    ]
    assert [value["mean"] for value in values] == pytest.approx([14 / 6] * 3, abs=1e-12)
    assert "workers that are here: 3 of 3 (alpha 2, beta 1)" in output
    assert not Path(found[1]).parent.exists()


@pytest.mark.slow
def test_torchrun_over_two_hosts(hosts: TwoHosts, environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    environment["GLOO_SOCKET_IFNAME"] = CABLE
    options = ["--nnodes=2", "--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=7077"]
    launcher = ["-m", "torch.distributed.run", *options]
    processes = [
        hosts.python(host, *launcher, f"--node-rank={host}", str(script), env=environment, cwd=tmp_path)
        for host in range(2)
    ]
    output = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    # By what it begins with: the agent that ends last tells, after the result, that the other one's store is gone.
    values = [json.loads(line)[0] for text in output for line in text.splitlines() if line.startswith("[{")]
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
    driver = hosts.start(0, "bash", "-ec", shown("clusters.md")[0], env=known, cwd=tmp_path)
    found, output = first(driver, r"manyhands (join .*)")
    joiner = hosts.start(1, "manyhands", *found[1].split(), env=known, cwd=tmp_path)
    rest, _ = driver.communicate(timeout=100)
    heard, _ = joiner.communicate(timeout=20)
    assert (driver.returncode, joiner.returncode) == (0, 0), output + rest + heard
    assert (output + rest + heard).count("ranks: 4") == 4
