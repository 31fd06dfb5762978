from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.engines.base import LaunchSpec
from manyhands.engines.roles import Roles
from manyhands.engines.spark import job, session
from manyhands.engines.spark.engine import Spark
from manyhands.engines.spark.job import why
from manyhands.engines.spark.stage import check_versions
from manyhands.errors import BadInput, Unsupported


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


def test_dynamic_allocation_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"set spark\.dynamicAllocation\.enabled=false"):
        session.check(Session(8, spark__dynamicAllocation__enabled="true"), 2)  # type: ignore[arg-type]


def test_executors_may_register_late() -> None:
    late = Session(4)
    session.check(late, 4)  # type: ignore[arg-type]
    assert late.asked == 2


def test_too_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_SLOTS_S", 0.3)
    with pytest.raises(
        BadInput, match=r"5 workers need 5 Spark task slots at once, and the cluster has 4: .*\(now 2\)"
    ):
        session.check(Session(4, spark__task__cpus="2"), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,512]"])
def test_a_master_on_this_host_is_known_to_have_too_few_at_once(master: str) -> None:
    """Without waiting for executors; roles are called by their names."""
    small = Session(2, spark__master=master)
    with pytest.raises(BadInput, match="9 workers need 9 Spark task slots at once, and the cluster has 2"):
        session.check(small, 9)  # type: ignore[arg-type]
    roles = Roles(workers=4, others={"chief": 1, "ps": 1})
    with pytest.raises(BadInput, match="1 chief, 4 worker and 1 ps need 6 Spark task slots"):
        session.check(small, 6, roles)  # type: ignore[arg-type]
    assert small.asked == 0


def test_no_executor_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_FIRST_S", 0.3)
    with pytest.raises(BadInput, match=r"no executor started within 0 s: .*spark\.executor\.memory \(4g\)"):
        session.check(Session(0, spark__executor__memory="4g"), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({"spark__master": "local[4]"}, 4),
        ({"spark__master": "local[4,2]", "spark__task__cpus": "3"}, 1),
        ({"spark__master": "local-cluster[2,3,512]", "spark__task__cpus": "2"}, 2),
        ({"spark__master": "yarn", "spark__executor__instances": "5", "spark__executor__cores": "4"}, 20),
        ({"spark__master": "yarn", "spark__executor__instances": "5"}, None),
        ({"spark__master": "spark://host:7077"}, None),
    ],
)
def test_a_client_of_spark_connect_goes_by_the_settings(
    settings: dict[str, str], slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "is_connect", lambda spark: True)
    there = Session(**settings)  # type: ignore[arg-type]
    session.check(there, slots or 1000)  # type: ignore[arg-type]
    assert there.asked == 0
    if slots is not None:
        with pytest.raises(BadInput, match=f"and the cluster has {slots}:"):
            session.check(there, slots + 1)  # type: ignore[arg-type]


def test_a_client_of_spark_connect_listens_where_it_reaches_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "is_connect", lambda spark: True)
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

    monkeypatch.setattr(made, "_cancel", cancel)
    monkeypatch.setattr(job, "_OWN_WORD_S", 0.01)
    with pytest.raises(KeyError), made:
        raise KeyError
    assert len(cancelled) == 3
    assert not made._thread.is_alive()


@pytest.mark.parametrize("memory", [-1, 1.5, True, "many"])
def test_memory_is_a_number_of_megabytes(memory: Any) -> None:
    with pytest.raises(BadInput, match="memory_mb must be a whole number of megabytes"):
        Spark(memory_mb=memory)


def test_nobody_waits_for_ever() -> None:
    with pytest.raises(BadInput, match="wait_s must be a positive number"):
        Spark(wait_s=0)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "java.lang.X: 1\n\tat a.B(C.scala)\nModuleNotFoundError: No module named 'manyhands'\n",
            "have no manyhands|has no manyhands",
        ),
        ("org.apache.spark.SparkException: Job aborted\n\tat a\nKeyError: 'the row'\n\tat b", "^KeyError: 'the row'$"),
        (
            "org.apache.spark.SparkException: Job aborted: ExecutorLostFailure (executor 1 exited) Reason: killed",
            "ExecutorLostFailure",
        ),
        ("", "^RuntimeError$"),
    ],
)
def test_what_spark_says_in_one_line(output: str, expected: str) -> None:
    import re

    assert re.search(expected, why(RuntimeError(output)))
