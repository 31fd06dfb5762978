"""Clusters and sessions without a cluster."""

from __future__ import annotations

import os
import re
import signal
import threading
from types import SimpleNamespace

import pytest

from manyhands.engines.base import LaunchSpec
from manyhands.engines.roles import Roles
from manyhands.engines.spark import job, session
from manyhands.engines.spark.engine import Spark
from manyhands.engines.spark.job import why
from manyhands.engines.spark.stage import Busy, Neighbours, check_versions, process_space, wait_until_over
from manyhands.errors import BadInput, Unsupported
from refusals import all_refused


class Conf:
    def __init__(self, **values: str) -> None:
        self.values = {name.replace("__", "."): value for name, value in values.items()}

    def get(self, name: str, default: str = "") -> str:
        return self.values.get(name, default)


class Session:
    """What `check` asks of a Spark session."""

    def __init__(self, slots: int = 0, **conf: str) -> None:
        self.conf, self.slots, self.asked = Conf(**conf), slots, 0
        self.sparkContext = self._jsc = self

    def sc(self) -> Session:
        return self

    resourceProfileManager = sc

    def defaultResourceProfile(self) -> None:
        return None

    def maxNumConcurrentTasks(self, profile: None) -> int:
        self.asked += 1
        return self.slots * (self.asked > 1)  # executors register late


def check(spark: Session, workers: int, *roles: Roles) -> None:
    session.check(spark, workers, *roles)  # type: ignore[arg-type]


def test_clusters_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic allocation; too few slots, though executors may register late; no executor at all."""
    with pytest.raises(Unsupported, match=r"set spark\.dynamicAllocation\.enabled=false"):
        check(Session(8, spark__dynamicAllocation__enabled="true"), 2)
    late = Session(4)
    check(late, 4)
    assert late.asked == 2
    monkeypatch.setattr(session, "_SLOTS_S", 0.3)
    words = r"5 workers need 5 Spark task slots at once, and the cluster has 4: .*\(now 2\)"
    with pytest.raises(BadInput, match=words):
        check(Session(4, spark__task__cpus="2"), 5)
    monkeypatch.setattr(session, "_FIRST_S", 0.3)
    with pytest.raises(BadInput, match=r"no executor started within 0 s: .*spark\.executor\.memory \(4g\)"):
        check(Session(0, spark__executor__memory="4g"), 2)


def test_a_master_on_this_host_is_known_to_have_too_few_at_once() -> None:
    """Without waiting for executors; roles are called by their names."""
    for master in ("local[2]", "local-cluster[2,1,512]"):
        small = Session(2, spark__master=master)
        with pytest.raises(BadInput, match="9 workers need 9 Spark task slots at once, and the cluster has 2"):
            check(small, 9)
        with pytest.raises(BadInput, match="1 chief, 4 worker and 1 ps need 6 Spark task slots"):
            check(small, 6, Roles(workers=4, others={"chief": 1, "ps": 1}))
        assert small.asked == 0


def test_a_client_of_spark_connect_goes_by_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """And listens where it reaches its server."""
    monkeypatch.setattr(session, "is_connect", lambda spark: True)
    cases: list[tuple[dict[str, str], int | None]] = [
        ({"spark__master": "local[4]"}, 4),
        ({"spark__master": "local[4,2]", "spark__task__cpus": "3"}, 1),
        ({"spark__master": "local-cluster[2,3,512]", "spark__task__cpus": "2"}, 2),
        ({"spark__master": "yarn", "spark__executor__instances": "5", "spark__executor__cores": "4"}, 20),
        ({"spark__master": "yarn", "spark__executor__instances": "5"}, None),
        ({"spark__master": "spark://host:7077"}, None),
    ]
    for settings, slots in cases:
        there = Session(**settings)  # type: ignore[arg-type]
        check(there, slots or 1000)
        assert there.asked == 0, settings
        if slots is not None:
            with pytest.raises(BadInput, match=f"and the cluster has {slots}:"):
                check(there, slots + 1)
    there = Session()
    there.client = SimpleNamespace(host="127.0.0.7")  # type: ignore[attr-defined]
    assert session.addresses(there) == ("127.0.0.1", "127.0.0.1")  # type: ignore[arg-type]


def test_the_driver_listens_where_it_is_bound_and_is_called_by_its_name() -> None:
    there = Session(spark__driver__host="edge.example", spark__driver__bindAddress="0.0.0.0")
    assert session.addresses(there) == ("0.0.0.0", "edge.example")  # type: ignore[arg-type]
    listener, stage = Spark()._opened(("0.0.0.0", "edge.example"), LaunchSpec(workers=2))
    listener.close()
    assert stage.address.startswith("edge.example:")
    assert session.addresses(Session(spark__driver__host="10.0.0.5")) == ("10.0.0.5", "10.0.0.5")  # type: ignore[arg-type]


def test_executors_of_other_versions() -> None:
    with pytest.raises(
        BadInput, match=r"the executor on far has torch 2\.6, and the driver has torch 2\.13: install the same"
    ):
        check_versions("far", {"torch": "2.6"}, {"torch": "2.13"})


def test_a_cancelled_job_that_was_still_planned_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_AGAIN_S", 0.01)
    cancelled, over = [], threading.Event()
    made = job.Job.__new__(job.Job)
    made._error, made._tag = None, "tag"
    made._thread = threading.Thread(target=over.wait)

    def cancel() -> None:
        cancelled.append(1)
        if len(cancelled) == 3:
            over.set()
            made._thread.join()  # however late it ends, it is not cancelled once more

    monkeypatch.setattr(made, "_cancel", cancel)
    monkeypatch.setattr(job, "_OWN_WORD_S", 0.01)
    with pytest.raises(KeyError), made:
        raise KeyError
    assert len(cancelled) == 3
    assert not made._thread.is_alive()


def test_options_that_cannot_be() -> None:
    words = "memory_mb must be a whole number of megabytes"
    all_refused(lambda memory: Spark(memory_mb=memory), [(memory, words) for memory in (-1, 1.5, True, "many")])
    with pytest.raises(BadInput, match="wait_s must be a positive number"):
        Spark(wait_s=0)


def test_what_spark_says_in_one_line() -> None:
    aborted = "org.apache.spark.SparkException: Job aborted"
    for output, expected in (
        (
            "java.lang.X: 1\n\tat a.B(C.scala)\nModuleNotFoundError: No module named 'manyhands'\n",
            "ha(ve|s) no manyhands",
        ),
        (f"{aborted}\n\tat a\nKeyError: 'the row'\n\tat b", "^KeyError: 'the row'$"),
        (f"{aborted}: ExecutorLostFailure (executor 1 exited) Reason: killed", "ExecutorLostFailure"),
        ("", "^RuntimeError$"),
    ):
        assert re.search(expected, why(RuntimeError(output))), output


ADDRESSES = ["10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.1:7002", "10.0.0.2:7001"]


def test_a_machine_or_a_container_of_yarn_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_ID", raising=False)
    found = Neighbours.of(ADDRESSES)
    assert found.agents == [0, 1]
    assert [found.here(i) for i in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    monkeypatch.setenv("CONTAINER_ID", "container_1")
    found = Neighbours.of(ADDRESSES)
    assert found.agents == [0, 1, 2]
    assert found.here(3) == [1, 3]


def test_containers_in_the_hosts_network_cannot_work_together() -> None:
    found = Neighbours(("a", "b", "a"))
    assert found.apart(["x", "y", "x"]) == ""
    assert found.apart(["x", "y", "z"]).startswith("executors share the address a, and cannot see each other's process")
    assert process_space() == process_space()


def waiting_for(place: str) -> threading.Thread:
    neighbour = threading.Thread(target=wait_until_over, args=(place,))
    neighbour.start()
    neighbour.join(0.2)
    assert neighbour.is_alive()
    return neighbour


def test_neighbours_wait_until_the_agent_lets_go() -> None:
    busy = Busy()
    neighbour = waiting_for(busy.place)
    busy.close()
    neighbour.join(10)
    assert not neighbour.is_alive()


def test_neighbours_do_not_wait_for_a_dead_agent() -> None:
    told, place = os.pipe()
    if (agent := os.fork()) == 0:
        os.write(place, Busy().place.encode())
        signal.pause()
    there = os.read(told, 1000).decode()
    neighbour = waiting_for(there)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    neighbour.join(10)
    assert not neighbour.is_alive()
    wait_until_over(there)  # nothing is there any more
    os.close(told)
    os.close(place)
