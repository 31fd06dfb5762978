from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from manyhands.engines.spark.stage import Busy, Neighbours, process_space, wait_until_over

ADDRESSES = ["10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.1:7002", "10.0.0.2:7001"]


def test_a_machine_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_ID", raising=False)
    found = Neighbours.of(ADDRESSES)
    assert found.agents == [0, 1]
    assert [found.here(i) for i in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_container_of_yarn_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_ID", "container_1")
    found = Neighbours.of(ADDRESSES)
    assert found.agents == [0, 1, 2]
    assert found.here(3) == [1, 3]


def test_containers_in_the_hosts_network_cannot_work_together() -> None:
    found = Neighbours(("a", "b", "a"))
    assert found.apart(["x", "y", "x"]) == ""
    assert found.apart(["x", "y", "z"]).startswith(
        "executors share the address a, and cannot see each other's processes"
    )
    assert process_space() == process_space()


def test_neighbours_wait_until_the_agent_lets_go() -> None:
    busy, over = Busy(), threading.Event()

    def neighbour() -> None:
        wait_until_over(busy.place)
        over.set()

    place = busy.place
    thread = threading.Thread(target=neighbour)
    thread.start()
    assert not over.wait(0.2)
    busy.close()
    thread.join(10)
    assert over.is_set()
    wait_until_over(place)  # nothing is there any more


@pytest.mark.slow
def test_neighbours_do_not_wait_for_a_dead_agent() -> None:
    script = "from manyhands.engines.spark.stage import Busy\nbusy = Busy()\nprint(busy.place, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        thread = threading.Thread(target=wait_until_over, args=(agent.stdout.readline().decode().strip(),))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        agent.kill()
        thread.join(10)
        assert not thread.is_alive()
