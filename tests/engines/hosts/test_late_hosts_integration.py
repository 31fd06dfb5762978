"""Hosts that join a run under way, come back to it, and leave it in order: several "hosts" of one machine."""

from __future__ import annotations

import os
import signal
import sys
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
from joined_run import ADDRESS, Joiner

import manyhands as mh
import plain
from manyhands.engines.hosts import roster
from manyhands.engines.hosts.engine import Hosts
from manyhands.events import Event
from manyhands.worker import Worker

slow = pytest.mark.slow
EPOCHS, STEPS = 6, 24
pytestmark = pytest.mark.usefixtures("credentials", "nothing_is_left")


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """What one worker trains."""
    return mh.train(plain.task(epochs=EPOCHS), workers=1).parameters


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


def two_take_part(worker: Worker) -> bool:
    """Or they are about to."""
    return worker.size >= 2 or worker.interrupted


def lost_and_back(mark: Path, worker: Worker) -> bool:
    """In generation 0 until somebody was lost, which `mark` says; then until somebody is about to take the place."""
    return mark.exists() if worker.generation == 0 else worker.generation >= 2 or worker.interrupted


class AtStep(mh.Callback):
    """Does something once, at a step of the run, in a thread of its own; remembers what changed."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.kinds = step, list[str]()
        self.thread = threading.Thread(target=act)

    def on_step(self, event: Event) -> None:
        if event.step >= self.step and self.thread.ident is None:
            self.thread.start()

    def on_end(self, event: Event) -> None:
        self.thread.join(30)

    def on_notice(self, event: Event) -> None:
        if event.type == "change":
            self.kinds.append(event.values["kind"])


class Listening:
    """An engine, and the hosts that join at the address that it says."""

    def __init__(self, local_workers: int = 1, **fields: Any) -> None:
        self.engine = Hosts(local_workers=local_workers, tls=False, **fields)
        self.engine.announcer.say = self._hear
        self.address, self.output, self.joiners = "", list[str](), list[Joiner]()
        self.at_address: Callable[[str], None] = lambda address: None

    def _hear(self, text: str) -> None:
        self.output.append(text)
        if (found := ADDRESS.search(text)) and not self.address:
            self.address = found[1]
            self.at_address(self.address)

    def join(self, workers: int = 1) -> Joiner:
        joiner = Joiner(self.address, workers, tls=False)
        joiner.start()
        self.joiners.append(joiner)
        return joiner

    def train(self, **options: Any) -> mh.Run:
        given = {"task": plain.task(epochs=EPOCHS), "threads_per_worker": 1, **options}
        try:
            return mh.train(given.pop("task"), engine=self.engine, **given)
        finally:
            for joiner in self.joiners:
                joiner.join(30)
                assert not joiner.is_alive()


def check(run: mh.Run, alone: torch.Tensor) -> None:
    assert (run.parameters - alone).abs().max() < 1e-10
    assert run.rows["total"] == EPOCHS * 39
    assert [row["step"] for row in run.history] == list(range(1, STEPS + 1))


@slow
def test_a_host_joins_a_run_under_way_and_who_may_not_is_refused(
    alone: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First come other versions, and the credentials of another run, which the run does not notice; then a host that takes
    a place that is free: nobody is lost."""
    run_at, other = Listening(), tmp_path / "other.pem"
    other.write_bytes(b"x" * 64)
    other.chmod(0o600)
    true_hello = roster.hello

    def come() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(roster, "hello", lambda *given: {**true_hello(*given), "versions": {"torch": "0.1"}})
            run_at.join().join(30)
        with monkeypatch.context() as patch:
            patch.setenv("MANYHANDS_CREDENTIALS", str(other))
            run_at.join().join(30)
        run_at.join()

    joins = AtStep(2, come)
    task = plain.task(epochs=EPOCHS, loss=WaitsFor(two_take_part))
    run = run_at.train(task=task, workers=1, survive="max_workers=2", callbacks=[joins])
    check(run, alone)
    assert (run.losses, run.generations) == ([], 2)
    assert set(joins.kinds) <= {"joined"}  # it is reported with its first step, unless the run is over before
    versions, stranger, joiner = run_at.joiners
    assert "versions differ" in str(versions.error)
    assert "it does not have this run's token" in str(stranger.error)
    assert joiner.error is None
    assert any("the run is under way" in line for line in joiner.output)


# -- hosts in processes of their own ------------------------------------------------------------------------------------

AGENT = f"""
    import sys
    sys.path += {[path for path in sys.path if "/tests" in path]!r}
    from manyhands.engines.hosts.join import Join, join
    from manyhands.errors import ManyhandsError
    try:
        join(Join(address=sys.argv[1], workers=int(sys.argv[2]), wait_s=60, tls=False), lambda line: print(line, flush=True))
    except ManyhandsError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""


@slow
def test_a_spare_takes_the_place_of_a_lost_host(
    script: Callable[..., Script], alone: torch.Tensor, tmp_path: Path
) -> None:
    """Also where no process is started on a host that has lost one."""
    run_at, agents, mark = Listening(), list[Script](), tmp_path / "lost"
    run_at.at_address = lambda address: agents.append(script(AGENT, address, "1"))

    def lose() -> None:
        run_at.join()
        wait_until(lambda: any("has joined with 1 worker" in line for line in run_at.output), 30)
        os.kill(agents[0].process.pid, signal.SIGKILL)
        mark.touch()

    callback = AtStep(2, lose)
    lost = WaitsFor(partial(lost_and_back, mark))
    run = run_at.train(
        task=plain.task(epochs=EPOCHS, loss=lost),
        workers=2,
        survive="max_losses=1,replace=false,silence_s=5",
        callbacks=[callback],
    )
    check(run, alone)
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == [(1, "host")]
    assert callback.kinds[0] == "lost"
    assert run.generations == 3  # without it, and with it again
    assert run_at.joiners[0].error is None
    agents[0].end(10)


@slow
def test_a_host_that_is_asked_to_end_leaves_in_order(script: Callable[..., Script], alone: torch.Tensor) -> None:
    """It is no loss, and eats no budget (ray#41285); the others go on. Exit code 75."""
    run_at, agents = Listening(), list[Script]()
    run_at.at_address = lambda address: agents.append(script(AGENT, address, "1"))
    callback = AtStep(2, lambda: os.kill(agents[0].process.pid, signal.SIGTERM))
    left = WaitsFor(lambda worker: worker.size == 1 or worker.interrupted)
    run = run_at.train(
        task=plain.task(epochs=EPOCHS, loss=left), workers=2, survive="max_losses=0,max_workers=3", callbacks=[callback]
    )
    check(run, alone)
    assert (run.losses, run.generations) == ([], 2)
    assert callback.kinds == ["leaves"]
    code, out, _ = agents[0].end(20)
    assert code == 75
    assert "has left the run" in out
    assert agents[0].processes() == []


@slow
def test_a_host_that_was_lost_comes_back(script: Callable[..., Script], alone: torch.Tensor, tmp_path: Path) -> None:
    """Its connection is cut: it ends its workers, connects again, and gets its place once its cooldown is over
    (hivemind#455). The loss counts: no budget is new (pytorch#147064)."""
    run_at, agents, mark = Listening(), list[Script](), tmp_path / "lost"
    run_at.at_address = lambda address: agents.append(script(AGENT, address, "1"))

    def stop() -> None:
        stopped = agents[0].processes()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        mark.touch()
        time.sleep(9)  # longer than silence_s
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    callback = AtStep(2, stop)
    again = WaitsFor(partial(lost_and_back, mark))
    run = run_at.train(
        task=plain.task(epochs=EPOCHS, loss=again),
        workers=2,
        survive="max_losses=1,silence_s=6,cooldown_s=0.5",
        callbacks=[callback],
    )
    check(run, alone)
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == [(1, "host")]
    assert callback.kinds[0] == "lost"
    assert run.generations == 3  # without it, and with it again
    code, out, _ = agents[0].end(20)
    assert code == 0
    assert "connects again" in out


# -- the whole run starts again -----------------------------------------------------------------------------------------


@slow
def test_hosts_come_again_where_the_run_starts_again(
    script: Callable[..., Script], alone: torch.Tensor, tmp_path: Path
) -> None:
    """A worker of a joined host is lost: all of it is ended, and it connects again, at the same port."""
    run_at, agents = Listening(faults="kill=1@step:9"), list[Script]()
    run_at.at_address = lambda address: agents.append(script(AGENT, address, "1"))
    run = run_at.train(workers=2, survive="max_restarts=1", run_dir=tmp_path / "run")
    check(run, alone)
    assert [one["cause"] for one in run.restarts] == ["death"]
    assert run.restarts[0]["step"] in (
        8,
        4,
    )  # the newest checkpoint is dropped where the worker had not written its part
    code, out, _ = agents[0].end(20)
    assert code == 0
    assert "starts again" in out
    assert "the run is done" in out
    wait_until(lambda: not agents[0].processes(), 5)


@slow
def test_hosts_come_again_where_the_driver_was_killed(
    script: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its supervisor starts it again: the loss of the driver's process is not fatal (pytorch#67742)."""
    monkeypatch.chdir(tmp_path)
    driver = script(DRIVER, "train", "digits", "-n", "2", "--epochs", "2", "--checkpoint-every", "5", "--max-restarts")
    address = ""
    while not address:
        line = driver.line()
        assert driver.process.poll() is None, driver.end()
        address = found[1] if (found := ADDRESS.search(line)) else ""
    agent = script(AGENT.replace("tls=False", "tls=True"), address, "1")
    checkpoints = Path(driver.process.args[1]).parent / "run/checkpoints"  # type: ignore[index]
    wait_until(lambda: any(checkpoints.glob("step-*[0-9]")), 60)
    children = Path(f"/proc/{driver.process.pid}/task/{driver.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    code, out, _ = driver.end(100)
    assert code == 0, out
    assert "restart 1 of 1" in out
    code, out, err = agent.end(20)
    assert code == 0, out + err
    assert "connects again" in out


DRIVER = """
    import os, sys
    from manyhands.__main__ import main
    os.dup2(1, 2)
    sys.argv += ["1", "--run-dir", "run", "--listen", "127.0.0.1", "--local-workers", "1", "--threads-per-worker", "1"]
    main()
"""
