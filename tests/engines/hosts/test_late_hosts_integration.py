"""Hosts that join a run under way, come back to it, and leave it in order: several "hosts" of one machine."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import Script, wait_until
from host_process import HostProcess, agent
from joined_run import ADDRESS, EPOCHS, Joiner, Run, RunWithAgent, check_trained

import manyhands as mh
import plain
from manyhands.engines.hosts import roster
from manyhands.engines.hosts.engine import Hosts
from manyhands.events import Event
from manyhands.worker import Worker

pytestmark = pytest.mark.usefixtures("credentials", "nothing_is_left")
Process = Callable[..., HostProcess]


@dataclass
class WaitsFor:
    """A loss in which a worker waits, from its so manieth step on, until `seen(worker)`."""

    seen: Callable[[Worker], object]
    call: int = 6
    calls: int = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        worker = mh.worker()
        if worker is not None and model.training:
            self.calls += 1
            if self.calls >= self.call:
                wait_until(lambda: self.seen(worker), 60)
        return plain.cross_entropy(model, batch)


def alone_or_about_to(worker: Worker, size: int) -> bool:
    return worker.size == size or worker.interrupted


def lost_and_back(mark: Path, worker: Worker) -> bool:
    """In generation 0 until somebody was lost, which `mark` says; then until somebody is about to take the place."""
    return mark.exists() if worker.generation == 0 else worker.generation >= 2 or worker.interrupted


class AtStep(mh.Callback):
    """Does something once, at the second step of the run, in a thread of its own; remembers what changed."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.kinds = list[str]()
        self.thread = threading.Thread(target=act)

    def on_step(self, event: Event) -> None:
        if event.step >= 2 and self.thread.ident is None:
            self.thread.start()

    def on_end(self, event: Event) -> None:
        self.thread.join(30)

    def on_notice(self, event: Event) -> None:
        if event.type == "change":
            self.kinds.append(event.values["kind"])


def train(run: Run, loss: Any = plain.cross_entropy, **options: Any) -> mh.Run:
    task = plain.task(epochs=EPOCHS, loss=loss)
    return run.during(lambda: mh.train(task, engine=run.engine, threads_per_worker=1, **options))


@pytest.mark.slow
def test_a_host_joins_a_run_under_way_and_who_may_not_is_refused(
    alone: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First come other versions, and the credentials of another run, which the run does not notice; then a host that takes
    a place that is free: nobody is lost."""
    run_at, other = Run(Hosts(local_workers=1, tls=False), lambda address: []), tmp_path / "other.pem"
    other.write_bytes(b"x" * 64)
    other.chmod(0o600)
    true_hello = roster.hello

    def joiner() -> Joiner:
        run_at.joined.append(Joiner(run_at.address, 1, tls=False))
        return run_at.joined[-1]

    def come() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(roster, "hello", lambda *given: {**true_hello(*given), "versions": {"torch": "0.1"}})
            joiner().join(30)
        with monkeypatch.context() as patch:
            patch.setenv("MANYHANDS_CREDENTIALS", str(other))
            joiner().join(30)
        joiner()

    joins, loss = AtStep(come), WaitsFor(partial(alone_or_about_to, size=2))
    run = train(run_at, loss, workers=1, survive="max_workers=2", callbacks=[joins])
    check_trained(run, alone, [])
    assert run.generations == 2
    assert set(joins.kinds) <= {"joined"}  # it is reported with its first step, unless the run is over before
    versions, stranger, late = run_at.joined
    assert "versions differ" in str(versions.error)
    assert "it does not have this run's token" in str(stranger.error)
    assert late.error is None
    assert any("the run is under way" in line for line in late.output)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_host(process: Process, alone: torch.Tensor, tmp_path: Path) -> None:
    """Also where no process is started on a host that has lost one."""
    run_at, mark = RunWithAgent(process, 1, 1), tmp_path / "lost"

    def lose() -> None:
        run_at.joined.append(Joiner(run_at.address, 1, tls=False))
        wait_until(lambda: any("has joined with 1 worker" in line for line in run_at.output), 30)
        os.kill(run_at.agent.pid, signal.SIGKILL)
        mark.touch()

    callback, loss = AtStep(lose), WaitsFor(partial(lost_and_back, mark))
    run = train(run_at, loss, workers=2, survive="max_losses=1,replace=false,silence_s=5", callbacks=[callback])
    check_trained(run, alone, [(1, "host")])
    assert callback.kinds[0] == "lost"
    assert run.generations == 3  # without it, and with it again
    assert run_at.joined[0].error is None


@pytest.mark.slow
def test_a_host_that_is_asked_to_end_leaves_in_order(process: Process, alone: torch.Tensor) -> None:
    """It is no loss, and eats no budget (ray#41285); the others go on. Exit code 75."""
    run_at = RunWithAgent(process, 1, 1)
    callback = AtStep(lambda: os.kill(run_at.agent.pid, signal.SIGTERM))
    loss = WaitsFor(partial(alone_or_about_to, size=1))
    run = train(run_at, loss, workers=2, survive="max_losses=0,max_workers=3", callbacks=[callback])
    check_trained(run, alone, [])
    assert run.generations == 2
    assert callback.kinds == ["leaves"]
    code, said = run_at.agent.end(20)
    assert code == 75
    assert "has left the run" in said
    assert run_at.agent.processes() == []


@pytest.mark.slow
def test_a_host_that_was_lost_comes_back(process: Process, alone: torch.Tensor, tmp_path: Path) -> None:
    """Its connection is cut: it ends its workers, connects again, and gets its place once its cooldown is over
    (hivemind#455). The loss counts: no budget is new (pytorch#147064)."""
    run_at, mark = RunWithAgent(process, 1, 1), tmp_path / "lost"

    def stop() -> None:
        stopped = run_at.agent.processes()
        run_at.agent.signal(signal.SIGSTOP)
        mark.touch()
        time.sleep(9)  # longer than silence_s
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    callback, loss = AtStep(stop), WaitsFor(partial(lost_and_back, mark))
    run = train(run_at, loss, workers=2, survive="max_losses=1,silence_s=6,cooldown_s=0.5", callbacks=[callback])
    check_trained(run, alone, [(1, "host")])
    assert callback.kinds[0] == "lost"
    assert run.generations == 3  # without it, and with it again
    code, said = run_at.agent.end(20)
    assert code == 0
    assert "connects again" in said


# -- the whole run starts again -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hosts_come_again_where_the_run_starts_again(process: Process, alone: torch.Tensor, tmp_path: Path) -> None:
    """A worker of a joined host is lost: all of it is ended, and it connects again, at the same port."""
    run_at = RunWithAgent(process, 1, 1, faults="kill=1@step:9")
    run = train(run_at, workers=2, survive="max_restarts=1", run_dir=tmp_path / "run")
    check_trained(run, alone, [])
    assert [one["cause"] for one in run.restarts] == ["death"]
    # The newest checkpoint is dropped where the worker had not written its part.
    assert run.restarts[0]["step"] in (8, 4)
    code, said = run_at.agent.end(20)
    assert code == 0
    assert "starts again" in said
    assert "the run is done" in said
    assert run_at.agent.processes() == []


DRIVER = """
    import os, sys
    from manyhands.__main__ import main
    os.dup2(1, 2)
    sys.argv += ["--run-dir", "run", "--listen", "127.0.0.1", "--local-workers", "1", "--threads-per-worker", "1"]
    main()
"""


@pytest.mark.nightly
def test_hosts_come_again_where_the_driver_was_killed(
    script: Callable[..., Script], process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its supervisor starts it again: the loss of the driver's process is not fatal (pytorch#67742)."""
    monkeypatch.chdir(tmp_path)
    options = "train digits -n 2 --epochs 2 --checkpoint-every 5 --max-restarts 1"
    driver = script(DRIVER, *options.split())
    while not (found := ADDRESS.search(driver.line())):
        assert driver.process.poll() is None, driver.end()
    joined = process(agent, found[1], 1)
    wait_until(lambda: any((tmp_path / "run/checkpoints").glob("step-*[0-9]")), 60)
    children = Path(f"/proc/{driver.process.pid}/task/{driver.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    code, out, _ = driver.end(100)
    assert code == 0, out
    assert "restart 1 of 1" in out
    code, said = joined.end(20)
    assert code == 0, said
    assert "connects again" in said
