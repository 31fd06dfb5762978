"""Runs over several "hosts" of one machine that go on without a worker, or without a host: the result is one worker's.

Each fault fires once, where it is asked for; every row is trained once, and each step is once in the history.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import Script, wait_until
from joined_run import ADDRESS, JOINER, Run, joined_by

import manyhands as mh
import plain
from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.survive import Survive
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.worker import current

EPOCHS, STEPS, ROWS = 6, 24, 6 * 39
SURVIVE = "max_losses=9,silence_s=5"


pytestmark = pytest.mark.usefixtures("credentials", "nothing_is_left")


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """What one worker trains."""
    return mh.train(plain.task(epochs=EPOCHS), workers=1).parameters


def train(layout: Sequence[int], faults: str = "", *, tls: bool = False, **options: Any) -> mh.Run:
    """So many workers here, and so many of each host that joins."""
    run = Run(Hosts(local_workers=layout[0], tls=tls, faults=faults), joined_by(*layout[1:], tls=tls))
    fields = {"engine": run.engine, "workers": sum(layout), "threads_per_worker": 1, "survive": SURVIVE, **options}
    return run.during(lambda: mh.train(plain.task(epochs=EPOCHS, validation_data=plain.rows(12)), **fields))


def check(run: mh.Run, alone: torch.Tensor, lost: list[tuple[int, str]], host: str) -> None:
    """lost: the worker ids, and why; host: where, as the end of its name."""
    assert (run.parameters - alone).abs().max() < 1e-10
    assert run.rows["total"] == ROWS
    assert [row["step"] for row in run.history] == list(range(1, STEPS + 1))
    assert [row["rows"] for row in run.history] == [12, 12, 12, 3] * EPOCHS
    assert sorted((loss["worker_id"], loss["cause"]) for loss in run.losses) == lost
    assert all(loss["host"].endswith(host) for loss in run.losses)


# -- a ring of three hosts with a worker each --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_of_another_host_is_killed_inside_an_exchange(alone: torch.Tensor) -> None:
    fault = "kill=1@step:5:exchange"
    run = train([1, 1, 1], fault, tls=True)
    assert run.info["faults"] == {fault: 1}
    check(run, alone, [(1, "death")], "(2)")


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize(("phase", "step"), [("", 5), (":exchange", 5), (":commit", 5), (":save", 8), (":join", 0)])
def test_a_worker_is_killed_in_each_phase(
    phase: str, step: int, worker: int, alone: torch.Tensor, tmp_path: Path
) -> None:
    fault = f"kill={worker}@step:{step}{phase}"
    run = train([1, 1, 1], fault, tls=worker == 0, run_dir=tmp_path / "run")
    assert run.info["faults"] == {fault: 1}
    check(run, alone, [(worker, "death")], f"({worker + 1})")


@pytest.mark.slow
def test_two_of_three_are_killed_at_one_step(alone: torch.Tensor) -> None:
    run = train([1, 1, 1], "kill=0@step:5:exchange,kill=2@step:5")
    check(run, alone, [(0, "death"), (2, "death")], ")")


# -- shared memory on each of two hosts, and a ring between them -------------------------------------------------------


@pytest.mark.slow
def test_a_leader_of_its_host_is_killed(alone: torch.Tensor) -> None:
    check(train([2, 2], "kill=2@step:5"), alone, [(2, "death")], "(2)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "lost", "host"),
    [
        ("kill=0@step:5:exchange", [0], "(1)"),
        ("kill=1@step:5:exchange", [1], "(1)"),
        ("kill=2@step:5:exchange", [2], "(2)"),
        ("kill=3@step:5", [3], "(2)"),
        ("kill=2@step:5,kill=3@step:5:exchange", [2, 3], "(2)"),
        ("kill=1@step:4,kill=2@step:4:exchange", [1, 2], ")"),
    ],
)
def test_a_member_is_killed_anywhere(faults: str, lost: list[int], host: str, alone: torch.Tensor) -> None:
    check(train([2, 2], faults, tls=True), alone, [(worker_id, "death") for worker_id in lost], host)


# -- while a group is formed -------------------------------------------------------------------------------------------

MARK = "MANYHANDS_TEST_FORMING"


def dying_while_it_meets() -> torch.nn.Module:
    """Worker 1 dies, once, when the others wait for its address."""
    if once(1):
        from manyhands.engines.hosts.network import Network

        Network.listener = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return plain.mlp()


def dying_while_it_connects() -> torch.nn.Module:
    """Worker 1 dies, once, when worker 0 waits for it at its port, and worker 2 knocks at the one that it had."""
    if once(1):
        from manyhands.comm.ring import links

        links.connect_all = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return plain.mlp()


class FirstStep(mh.Callback):
    at = 0.0

    def on_step(self, event: Event) -> None:
        self.at = self.at or time.time()


def once(worker_id: int) -> bool:
    worker = current()
    if worker is None or worker.worker_id != worker_id:  # None: the driver, which gets the result
        return False
    mark = Path(os.environ[MARK])
    first = not mark.exists()
    mark.touch()
    return first


@pytest.mark.slow
@pytest.mark.parametrize("model", [dying_while_it_meets, dying_while_it_connects])
def test_a_peer_dies_while_others_form_a_group_with_it(
    model: Callable[[], torch.nn.Module],
    alone: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody waits for the end of a timeout: 15 s of connecting, 60 s of silence."""
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    run = Run(Hosts(local_workers=1), joined_by(1, 1))
    task, first = plain.task(epochs=EPOCHS, model=model), FirstStep()
    fields = {"engine": run.engine, "workers": 3, "threads_per_worker": 1, "survive": SURVIVE, "timeout_s": 200}
    fields["callbacks"] = [first]
    found = run.during(lambda: mh.train(task, **fields))
    check(found, alone, [(1, "death")], "(2)")
    (lost,) = [record for record in caplog.records if "worker 1 on " in record.message and " lost " in record.message]
    assert first.at - lost.created < 10


# -- a whole host ------------------------------------------------------------------------------------------------------

PLAIN = f"""
    import sys
    sys.path.append({str(Path(plain.__file__).parent)!r})
    {JOINER.replace("wait_s=30", "wait_s=30, tls=False")}
"""


class Agents(mh.Callback):
    """Hosts that join in processes of their own; at a step something befalls the first of them."""

    def __init__(self, script: Callable[..., Script], layout: Sequence[int], number: int) -> None:
        self.scripts: list[Script] = []
        self._script, self._layout, self._number, self._done = script, layout, number, False

    def say(self, text: str) -> None:
        """One after the other: a host's ranks are those of its turn."""
        if (found := ADDRESS.search(text)) and len(self.scripts) < len(self._layout):
            workers = self._layout[len(self.scripts)]
            self.scripts.append(self._script(PLAIN, found[1], str(workers)))

    def on_step(self, event: Event) -> None:
        if event.step >= 5 and not self._done:
            self._done = True
            pids = [self.scripts[0].process.pid] if self._number == signal.SIGKILL else self.scripts[0].processes()
            for pid in pids:
                os.kill(pid, self._number)


@pytest.mark.slow
def test_an_agent_is_killed_and_its_host_is_lost(script: Callable[..., Script], alone: torch.Tensor) -> None:
    agents = Agents(script, [2], signal.SIGKILL)
    engine = Hosts(local_workers=1, tls=False)
    engine.announcer.say = agents.say
    run = mh.train(
        plain.task(epochs=EPOCHS), engine=engine, workers=3, threads_per_worker=1, survive=SURVIVE, callbacks=[agents]
    )
    check(run, alone, [(1, "host"), (2, "host")], "(2)")
    assert run.info["warnings"]  # that it ran without TLS
    wait_until(lambda: not agents.scripts[0].processes(), 5)
    agents.scripts[0].end(5)


@pytest.mark.slow
def test_a_host_falls_silent_and_is_lost_though_its_connections_are_open(
    script: Callable[..., Script], alone: torch.Tensor
) -> None:
    """As with a cut cable, within silence_s and not half an hour (pytorch#111646). What wakes up finds itself given up, and
    ends, for the run is over."""
    agents = Agents(script, [2], signal.SIGSTOP)
    engine = Hosts(local_workers=2, tls=False)
    engine.announcer.say = agents.say
    run = mh.train(
        plain.task(epochs=EPOCHS), engine=engine, workers=4, threads_per_worker=1, survive=SURVIVE, callbacks=[agents]
    )
    check(run, alone, [(2, "host"), (3, "host")], "(2)")
    (agent,) = agents.scripts
    for pid in agent.processes():
        os.kill(pid, signal.SIGCONT)
    code, _, err = agent.end(10)
    assert code == 1
    assert "the driver at 127.0.0.1:" in err
    assert "is gone" in err
    wait_until(lambda: not agent.processes(), 10)


@pytest.mark.slow
def test_a_silent_driver_is_given_up_by_the_hosts(script: Callable[..., Script], tmp_path: Path) -> None:
    """Rule 3: workers elsewhere end themselves after silence_s, so that whoever goes on is alone. Their host comes again,
    until it finds that no driver is there."""
    driver = script(DRIVER)
    while not (found := ADDRESS.search(driver.line())):
        assert driver.process.poll() is None, driver.end()
    agent = script(PLAIN, found[1], "1")
    while driver.line() != "step":
        assert driver.process.poll() is None, driver.end()
    for pid in driver.processes():
        os.kill(pid, signal.SIGSTOP)
    while not (line := agent.line()).endswith("connects again, for up to 30 s"):
        assert agent.process.poll() is None, agent.end()
    assert "is gone (nothing came for 5 s): this host's workers were ended" in line
    for pid in driver.processes():
        os.kill(pid, signal.SIGKILL)
    driver.end()
    code, _, err = agent.end(15)
    assert code == 1
    assert "no run listens there any more" in err
    wait_until(lambda: not agent.processes(), 5)


DRIVER = """
    import time
    import torch
    import manyhands as mh
    from manyhands.engines.hosts.engine import Hosts

    def loss(model, batch):
        time.sleep(0.01)
        return model(batch[0]).square().mean()

    class Say(mh.Callback):
        def on_step(self, event):
            print("step", flush=True)

    engine = Hosts(local_workers=1, tls=False)
    engine.announcer.say = lambda text: print(text.replace("\\n", " "), flush=True)
    data = (torch.randn(32, 3), torch.randn(32, 1))
    mh.train(
        model=lambda: torch.nn.Linear(3, 1), loss=loss, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        train_data=data, batch_size=4, epochs=100000, engine=engine, workers=2, callbacks=[Say()],
        survive="max_losses=9,silence_s=5",
    )
"""


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_hosts_that_live_every_2_s_are_not_lost_within_less_than_4() -> None:
    spec = LaunchSpec(workers=2, survive=Survive(silence_s=3))
    with pytest.raises(BadInput, match="silence_s must be at least 4 on engine hosts"):
        Hosts().check(spec)
