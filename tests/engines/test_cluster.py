import json
import os
import socket
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from manyhands.engines import cluster as module
from manyhands.engines.cluster import NAMES, Cluster, HandedOut, Member, met, variables
from manyhands.engines.nested import Nested
from manyhands.engines.roles import ROLES, Roles
from manyhands.engines.sim.engine import Sim
from manyhands.engines.torchrun.engine import Torchrun
from manyhands.errors import BadInput, Unsupported
from manyhands.testing.threads import together
from manyhands.worker import Worker

COUNTS = [dict(zip(ROLES, counts, strict=True)) for counts in product((0, 1), (1, 2), (0, 1, 2), (0, 1))]


def cluster_of(counts: dict[str, int], role: str, index: int) -> Cluster:
    """Role r's i-th process is at r:7000+i, where the role's name stands for a host."""
    addresses = {r: tuple(f"{r}:{7000 + i}" for i in range(counts[r])) for r in ROLES if counts[r]}
    return Cluster(role=role, index=index, addresses=addresses)


def test_rows_go_to_those_who_train() -> None:
    """Every row once an epoch; or whole batches alone, and equally many. 22 rows, 4 a batch, two epochs."""
    counts = {"chief": 1, "worker": 2, "ps": 1, "evaluator": 0}
    numbers = np.arange(22)
    trainers = [
        replace(cluster_of(counts, role, index), data=(numbers * 2.0, numbers))
        for role, index in (("chief", 0), ("worker", 0), ("worker", 1))
    ]
    whole = [list(trainer.rows(4, epochs=2, drop_remainder=True)) for trainer in trainers]
    assert [[len(label) for _, label in batches] for batches in whole] == [[4, 4]] * 3
    batches = [batch for trainer in trainers for batch in trainer.rows(4, epochs=2)]
    assert Counter(int(n) for _, label in batches for n in label) == Counter(dict.fromkeys(range(22), 2))
    assert all(type(x) is np.ndarray and (x == 2 * label).all() for x, label in batches)
    with pytest.raises(BadInput, match="was given no rows"):
        next(cluster_of(counts, "worker", 0).rows(4))
    with pytest.raises(BadInput, match="can read rows, and this process is ps"):
        next(replace(cluster_of(counts, "ps", 0), data=np.arange(4)).rows(4))


def test_answers_are_numbered_as_their_rows_were_handed_out() -> None:
    """Trainer 1 of 3: its batch k has the number 3k + 1, however the answers are batched."""
    handed = HandedOut()
    assert handed.begin(1, 3) == []
    for rows in (4, 0, 4, 2):
        handed.hand(rows)
    assert handed.answer(3) == [(1, 0, 3, False)]
    assert handed.answer(4) == [(1, 1, 1, True), (4, 0, 0, True), (7, 0, 3, False)]
    assert handed.end() == (7, 1, 3)
    assert handed.answer(3) == [(7, 1, 1, True), (10, 0, 2, True)]
    assert handed.end() == (13, 0, 3)
    with pytest.raises(BadInput, match="emit got 1 rows, and 0 are left"):
        handed.answer(1)


def test_answers_are_of_the_newest_pass() -> None:
    """Rows that were for training have none; of an earlier pass that had some, those that are missing are given up."""
    handed = HandedOut()
    handed.begin(0, 2)
    handed.hand(4)
    assert handed.begin(0, 2) == []
    handed.hand(3)
    handed.hand(3)
    assert handed.answer(4) == [(0, 0, 3, True), (2, 0, 1, False)]
    assert handed.begin(0, 2) == [(2, 1)]
    handed.hand(5)
    assert handed.answer(5) == [(4, 0, 5, True)]


def test_variables_of_every_process_of_every_cluster_of_which_one_is_the_chief() -> None:
    for counts in COUNTS:
        spec = {r: [f"{r}:{7000 + i}" for i in range(counts[r])] for r in ("chief", "worker", "ps") if counts[r]}
        first, size, chiefs = ("chief" if counts["chief"] else "worker"), counts["chief"] + counts["worker"], []
        for role, index in ((role, index) for role, count in counts.items() for index in range(count)):
            cluster = cluster_of(counts, role, index)
            chiefs += [(role, index)] if cluster.is_chief else []
            found = variables(cluster, local_rank=5, local_size=6)
            config = json.loads(found.pop("TF_CONFIG"))
            assert config == {"cluster": spec, "task": {"type": role, "index": index}}, counts
            rank = str(index + (counts["chief"] if role == "worker" else 0))
            expected = {
                "MASTER_ADDR": first,
                "MASTER_PORT": "7000",
                "RANK": rank,
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": "5",
                "LOCAL_WORLD_SIZE": "6",
                "JAX_COORDINATOR_ADDRESS": f"{first}:7000",
                "JAX_NUM_PROCESSES": str(size),
                "JAX_PROCESS_ID": rank,
            }
            assert found == ({} if role in ("ps", "evaluator") else expected), (counts, role, index)
        assert chiefs == [(first, 0)], counts
    found = variables(Cluster(role="worker", index=0, addresses={"worker": ("[::1]:7000",)}), 0, 1)
    assert (found["MASTER_ADDR"], found["JAX_COORDINATOR_ADDRESS"]) == ("::1", "[::1]:7000")


def meet_all(roles: Roles, hosts: list[int]) -> list[tuple[Cluster, dict[str, str]]]:
    """All processes as threads; `hosts` is the first rank of each one's host."""

    def one(worker: Worker) -> tuple[Cluster, dict[str, str]]:
        return met(replace(worker, local_rank=worker.rank - hosts[worker.rank]), roles)

    return together(len(hosts), one)


def test_all_hear_the_same_addresses_and_their_ports_are_free_again() -> None:
    roles = Roles(workers=2, others={"ps": 1})
    found = meet_all(roles, [0, 0, 0])
    addresses = found[0][0].addresses
    assert all(cluster.addresses == addresses for cluster, _ in found)
    assert [(cluster.role, cluster.index) for cluster, _ in found] == roles.members
    flat = [address for held in addresses.values() for address in held]
    assert len(set(flat)) == 3
    for address in flat:
        host, _, port = address.rpartition(":")
        with socket.socket() as sock:
            sock.bind((host, int(port)))


def test_local_ranks_are_of_a_hosts_own_trainers() -> None:
    """Hosts of 2, 3 and 1 processes: chief and worker 0; workers 1 and 2 and ps 0; ps 1."""
    found = meet_all(Roles(workers=3, others={"chief": 1, "ps": 2}), [0, 0, 2, 2, 2, 5])
    local = [(own.get("LOCAL_RANK"), own.get("LOCAL_WORLD_SIZE")) for _, own in found]
    assert local == [("0", "2"), ("1", "2"), ("0", "2"), ("1", "2"), (None, None), (None, None)]


def test_ports_lie_where_the_system_gives_none_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, known in (("32768\t60999\n", True), ("1024\t65535\n", False)):
        (tmp_path / "range").write_text(text)
        monkeypatch.setattr(module, "_RANGE", tmp_path / "range")
        found = module._quiet_ports()
        assert (found is not None) is known
        if found is not None:
            assert 10_000 <= found[0] < found[1] < 32_768
    monkeypatch.setattr(module, "_RANGE", tmp_path / "missing")
    assert module._quiet_ports() is None


def test_the_ports_and_the_address_that_a_worker_is_given() -> None:
    """Listening is at an address of this machine, which a container's published address is not."""
    cluster, _ = met(Worker(address="203.0.113.5"), Roles(workers=1, others={}))
    assert cluster.address.startswith("203.0.113.5:")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    cluster, _ = met(Worker(ports=(port, port)), Roles(workers=1, others={}))
    assert cluster.address == f"127.0.0.1:{port}"


def test_the_environment_is_the_callers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error; and what a launcher set before does not reach a process that has no rank."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "17")

    def fails(cluster: Cluster) -> None:
        seen.update({name: os.environ.get(name) for name in NAMES})
        raise KeyError

    seen: dict[str, str | None] = {}
    with pytest.raises(KeyError):
        Member(fails, (), Roles(workers=1, others={}), None)(Worker())
    assert (seen["RANK"], seen["WORLD_SIZE"]) == ("0", "1")
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == {"RANK": "17"}
    with module._environment({"TF_CONFIG": "{}"}):
        assert [name for name in NAMES if name in os.environ] == ["TF_CONFIG"]


def test_engines_that_start_no_process() -> None:
    for engine in (Sim(), Torchrun(), Nested(worker=Worker())):
        with pytest.raises(Unsupported, match=f"engine {engine.name} starts no processes.*local, hosts or spark"):
            engine.run(print, workers=1)
