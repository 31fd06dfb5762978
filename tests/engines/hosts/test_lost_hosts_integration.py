"""Runs over several "hosts" of one machine that go on without a worker, or without a host: the result is one worker's.

Each fault fires once, where it is asked for; every row is trained once, and each step is once in the history. One run for
each way to go on: places, victims and strategies are crossed where runs cost less, in tests/faults.
"""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until
from host_process import HostProcess, Say, agent
from joined_run import ADDRESS, EPOCHS, Run, RunWithAgent, check_trained, joined_by

import manyhands as mh
import plain
from manyhands.engines.hosts.engine import Hosts
from manyhands.events import Event
from manyhands.worker import current

SURVIVE = "max_losses=9,silence_s=5"
Process = Callable[..., HostProcess]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("credentials", "nothing_is_left")]


def train(layout: Sequence[int], faults: str = "", **options: Any) -> mh.Run:
    """So many workers here, and so many of each host that joins. task: changes of the task."""
    task = plain.task(epochs=EPOCHS, validation_data=plain.rows(12), **options.pop("task", {}))
    run = Run(Hosts(local_workers=layout[0], faults=faults), joined_by(*layout[1:]))
    fields = {"engine": run.engine, "workers": sum(layout), "threads_per_worker": 1, "survive": SURVIVE, **options}
    return run.during(lambda: mh.train(task, **fields))


@pytest.mark.parametrize(
    ("layout", "faults", "lost", "host"),
    [
        ([1, 1, 1], "kill=1@step:5:exchange", [1], "(2)"),  # a ring
        ([1, 1], "kill=0@step:8:save", [0], "(1)"),
        ([2, 2], "kill=1@step:4,kill=2@step:4:exchange", [1, 2], ")"),  # one here, and the leader of the other host
    ],
)
def test_a_worker_is_killed(
    layout: list[int], faults: str, lost: list[int], host: str, alone: torch.Tensor, tmp_path: Path
) -> None:
    run = train(layout, faults, run_dir=tmp_path / "run")
    assert run.info["faults"] == dict.fromkeys(faults.split(","), 1)
    check_trained(run, alone, [(worker_id, "death") for worker_id in lost])
    assert all(loss["host"].endswith(host) for loss in run.losses)


# -- while a group is formed -------------------------------------------------------------------------------------------

MARK = "MANYHANDS_TEST_FORMING"


def dying(connecting: bool) -> torch.nn.Module:
    """Worker 1 dies, once, when the others wait for its address; or (connecting) when worker 0 waits for it at its port,
    and worker 2 knocks at the one that it had."""
    worker, mark = current(), Path(os.environ.get(MARK, os.devnull))
    if worker is not None and worker.worker_id == 1 and not mark.exists():  # None: the driver, which gets the result
        mark.touch()
        from manyhands.comm.ring import links
        from manyhands.engines.hosts.network import Network

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if connecting:
            links.connect_all = die  # type: ignore[assignment]
        else:
            Network.listener = die  # type: ignore[assignment]
    return plain.mlp()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("connecting", [False, True])
def test_a_peer_dies_while_others_form_a_group_with_it(
    connecting: bool, alone: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the end of a timeout, here of 200 s."""
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    run = train([1, 1, 1], task={"model": partial(dying, connecting)}, timeout_s=200)
    check_trained(run, alone, [(1, "death")])


# -- a whole host ------------------------------------------------------------------------------------------------------


def test_a_host_falls_silent_and_is_lost_though_its_connections_are_open(process: Process, alone: torch.Tensor) -> None:
    """As with a cut cable, within silence_s and not half an hour (pytorch#111646). What wakes up finds itself given up, and
    ends, for the run is over."""
    run_at = RunWithAgent(process, 2, 2)

    class Stops(mh.Callback):
        done = False

        def on_step(self, event: Event) -> None:
            if event.step >= 5 and not self.done:
                self.done = True
                run_at.agent.signal(signal.SIGSTOP)

    task = plain.task(epochs=EPOCHS)
    fields: dict[str, Any] = {"engine": run_at.engine, "workers": 4, "threads_per_worker": 1, "survive": SURVIVE}
    run = run_at.during(lambda: mh.train(task, callbacks=[Stops()], **fields))
    check_trained(run, alone, [(2, "host"), (3, "host")])
    assert all(loss["host"].endswith("(2)") for loss in run.losses)
    assert run.info["warnings"]  # that it ran without TLS
    run_at.agent.signal(signal.SIGCONT)
    code, said = run_at.agent.end()
    assert code == 1
    assert "the driver at 127.0.0.1:" in said
    assert "is gone" in said
    assert run_at.agent.processes() == []


def test_a_silent_driver_is_given_up_by_the_hosts(process: Process) -> None:
    """Rule 3: workers elsewhere end themselves after silence_s, so that whoever goes on is alone. Their host comes again,
    until it finds that no driver is there."""
    driver = process(endless)
    found = ADDRESS.search(driver.until("manyhands join"))
    assert found
    joined = process(agent, found[1], 1, False)
    driver.until("a step")
    driver.signal(signal.SIGSTOP)
    line = joined.until("connects again, for up to 30 s")
    assert "is gone (nothing came for 5 s): this host's workers were ended" in line
    driver.signal(signal.SIGKILL)
    code, said = joined.end(15)
    assert code == 1
    assert "no run listens there any more" in said
    wait_until(lambda: not joined.processes(), 5)


def endless(say: Say) -> None:
    """A driver whose run does not end by itself."""

    class Says(mh.Callback):
        def on_step(self, event: Event) -> None:
            if event.step == 1:
                say("a step")

    engine = Hosts(local_workers=1, tls=False)
    engine.announcer.say = say
    fields: dict[str, Any] = {"engine": engine, "workers": 2, "threads_per_worker": 1, "survive": SURVIVE}
    mh.train(plain.task(epochs=100_000), callbacks=[Says()], **fields)
