"""Two hosts in two network namespaces, with addresses and names of their own; skipped where namespaces are not allowed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_hosts import ADDRESSES, CABLE, TwoHosts, source, two_hosts

WORK = """
import json, os, sys
import torch
from manyhands.engines.base import Launch

def agree(worker):
    vector = torch.full((100_000,), worker.rank + 1.0, dtype=torch.float64)
    worker.group.mean_(vector, weight=worker.rank + 1.0)
    return {"rank": worker.rank, "host": worker.host, "folder": os.getcwd(), "mean": vector[-1].item(),
            "group": type(worker.group).__name__}
"""
DRIVER = (
    WORK
    + """
from manyhands.engines.hosts import Hosts
engine = Hosts(listen="10.77.0.1", here=2)
engine.voice.say = lambda text: print(text, flush=True)
print(json.dumps(engine.launch(agree, Launch(workers=3, timeout_s=60))), flush=True)
"""
)
TORCHRUN = (
    WORK
    + """
from manyhands.engines.torchrun import Torchrun
values = Torchrun().launch(agree, Launch(workers=2, timeout_s=60))
print(json.dumps([value for value in values if value is not None]), flush=True)
"""
)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    return {**os.environ, "PYTHONPATH": source(), "OMP_NUM_THREADS": "1"}


def test_the_printed_command_joins_from_another_host(
    hosts: TwoHosts, environment: dict[str, str], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    driver = hosts.python(0, "-c", DRIVER, env=environment, cwd=folders[0])
    assert driver.stdout is not None
    said = ""
    while not (
        found := re.search(r"scp -p 10\.77\.0\.1:(\S+) \.\n\s+MANYHANDS_CREDENTIALS=(\S+) manyhands (join .*)", said)
    ):
        line = driver.stdout.readline()
        assert line, said
        said += line
    credentials = folders[1] / found[2]
    credentials.touch(0o600)  # what scp -p does
    credentials.write_bytes(Path(found[1]).read_bytes())
    command = "import sys; from manyhands.cli import main; main()"
    environment["MANYHANDS_CREDENTIALS"] = found[2]
    joiner = hosts.python(1, "-c", command, *found[3].split(), env=environment, cwd=folders[1])
    said, _ = driver.communicate(timeout=60)
    heard, _ = joiner.communicate(timeout=20)
    assert (driver.returncode, joiner.returncode) == (0, 0), said + heard
    values = json.loads(said.splitlines()[-1])
    assert [(value["host"], value["folder"]) for value in values] == [
        ("alpha", str(folders[0])),
        ("alpha", str(folders[0])),
        ("beta", str(folders[1])),
    ]
    assert [value["mean"] for value in values] == pytest.approx([14 / 6] * 3, abs=1e-12)
    assert "3 of 3 workers are here: alpha 2, beta 1" in said
    assert not Path(found[1]).parent.exists()


def test_torchrun_over_two_hosts(hosts: TwoHosts, environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    environment["GLOO_SOCKET_IFNAME"] = CABLE
    options = ["--nnodes=2", "--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=7077"]
    processes = [
        hosts.python(
            host,
            "-m",
            "torch.distributed.run",
            *options,
            f"--node-rank={host}",
            str(script),
            env=environment,
            cwd=tmp_path,
        )
        for host in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    # By what it begins with: the agent that ends last tells, after the result, that the other one's store is gone.
    values = [json.loads(line)[0] for text in said for line in text.splitlines() if line.startswith("[{")]
    assert [(value["host"], value["group"]) for value in values] == [("alpha", "TorchGroup"), ("beta", "TorchGroup")]
    assert [value["mean"] for value in values] == pytest.approx([5 / 3] * 2, abs=1e-12)
