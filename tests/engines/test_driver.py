from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

from manyhands.engines.base import Launch
from manyhands.engines.control import Message, Wire
from manyhands.engines.coordinator import Coordinator, Failed
from manyhands.engines.driver import Driver, Line, tidy
from manyhands.engines.spawner import Spawner
from manyhands.engines.status import Status, create


def test_a_workers_last_words_come_before_the_news_of_its_end() -> None:
    """CASE 21: both lie unread; the exit alone would say that it died without a reason."""
    exited = Message({"type": "exited", "rank": 0, "status": 1}, [])
    spawner = cast(Spawner, SimpleNamespace(receive=lambda: [exited]))
    driver = Driver(spawner, Launch(workers=1), clock=lambda: 0.0, host="alpha")
    driver.coordinator = Coordinator(1, 10.0, now=0.0)
    wire, there = Wire.pair()
    driver.lines.append(Line(wire, os.memfd_create("stacks"), Status(create())))
    worker = Wire(there)
    worker.send(error(message="weights", error="KeyError"))
    worker.close()
    driver._hear_server()
    driver.lines[0].close()
    verdict = driver.coordinator.verdict(0.0)
    assert isinstance(verdict, Failed)
    assert verdict.failure.message == "worker 0 on alpha failed in phase compute at step 3: KeyError: weights"


def error(**fields: Any) -> dict[str, Any]:
    return {"type": "error", "rank": 0, "phase": "compute", "step": 3, "detail": "", "family": "", **fields}


DUMP = """\
Thread 0x1 (most recent call first):
  File "src/manyhands/engines/heartbeat.py", line 93 in _serve
  File "threading.py", line 982 in run

Thread 0x2 (most recent call first):
  File "loader.py", line 3 in fetch

Current thread 0x3 (most recent call first):
  File "mine.py", line 7 in program
  File "src/manyhands/engines/worker_process.py", line 144 in _value
  File "src/manyhands/engines/fork_server.py", line 123 in _receive

Extension modules: numpy, torch (total: 2)
"""


def test_stacks_show_the_program_and_its_own_threads() -> None:
    assert tidy(DUMP) == (
        "Thread 0x2 (most recent call first):\n"
        '  File "loader.py", line 3 in fetch\n'
        "\n"
        "Current thread 0x3 (most recent call first):\n"
        '  File "mine.py", line 7 in program'
    )
