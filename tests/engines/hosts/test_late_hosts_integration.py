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


AGENT = f"""
    import sys
    sys.path += {[path for path in sys.path if "/tests" in path]!r}
    from manyhands.engines.hosts.join import Join, join
    from manyhands.errors import ManyhandsError
    try:
        offer = Join(address=sys.argv[1], workers=1, wait_s=60, tls=len(sys.argv) > 2)
        join(offer, lambda line: print(line, flush=True))
    except ManyhandsError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""


class Listening:
    """An engine, and the hosts that join at the address that it says: in a process of its own with `script`, else threads."""

    def __init__(self, script: Callable[..., Script] | None = None, **fields: Any) -> None:
        self.engine = Hosts(local_workers=1, tls=False, **fields)
        self.engine.announcer.say = self._hear
        self.address, self.output, self.joiners, self.agents = "", list[str](), list[Joiner](), list[Script]()
        self._script = script

    def _hear(self, text: str) -> None:
        self.output.append(text)
        if (found := ADDRESS.search(text)) and not self.address:
            self.address = found[1]
            if self._script is not None:
                self.agents.append(self._script(AGENT, self.address))

    def join(self) -> Joiner:
        joiner = Joiner(self.address, 1, tls=False)
        joiner.start()
        self.joiners.append(joiner)
        return joiner

    def train(self, alone: torch.Tensor, loss: Any = plain.cross_entropy, **options: Any) -> mh.Run:
        try:
            task = plain.task(epochs=EPOCHS, loss=loss)
            run = mh.train(task, engine=self.engine, threads_per_worker=1, **options)
        finally:
            for joiner in self.joiners:
                joiner.join(30)
                assert not joiner.is_alive()
        assert (run.parameters - alone).abs().max() < 1e-10
        assert run.rows["total"] == EPOCHS * 39
        assert [row["step"] for row in run.history] == list(range(1, STEPS + 1))
        return run


@pytest.mark.slow
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

    joins, loss = AtStep(come), WaitsFor(partial(alone_or_about_to, size=2))
    run = run_at.train(alone, loss, workers=1, survive="max_workers=2", callbacks=[joins])
    assert (run.losses, run.generations) == ([], 2)
    assert set(joins.kinds) <= {"joined"}  # it is reported with its first step, unless the run is over before
    versions, stranger, joiner = run_at.joiners
    assert "versions differ" in str(versions.error)
    assert "it does not have this run's token" in str(stranger.error)
    assert joiner.error is None
    assert any("the run is under way" in line for line in joiner.output)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_host(
    script: Callable[..., Script], alone: torch.Tensor, tmp_path: Path
) -> None:
    """Also where no process is started on a host that has lost one."""
    run_at, mark = Listening(script), tmp_path / "lost"

    def lose() -> None:
        run_at.join()
        wait_until(lambda: any("has joined with 1 worker" in line for line in run_at.output), 30)
        os.kill(run_at.agents[0].process.pid, signal.SIGKILL)
        mark.touch()

    callback, loss = AtStep(lose), WaitsFor(partial(lost_and_back, mark))
    survive = "max_losses=1,replace=false,silence_s=5"
    run = run_at.train(alone, loss, workers=2, survive=survive, callbacks=[callback])
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == [(1, "host")]
    assert callback.kinds[0] == "lost"
    assert run.generations == 3  # without it, and with it again
    assert run_at.joiners[0].error is None
    run_at.agents[0].end(10)


@pytest.mark.slow
def test_a_host_that_is_asked_to_end_leaves_in_order(script: Callable[..., Script], alone: torch.Tensor) -> None:
    """It is no loss, and eats no budget (ray#41285); the others go on. Exit code 75."""
    run_at = Listening(script)
    callback = AtStep(lambda: os.kill(run_at.agents[0].process.pid, signal.SIGTERM))
    loss = WaitsFor(partial(alone_or_about_to, size=1))
    run = run_at.train(alone, loss, workers=2, survive="max_losses=0,max_workers=3", callbacks=[callback])
    assert (run.losses, run.generations) == ([], 2)
    assert callback.kinds == ["leaves"]
    code, out, _ = run_at.agents[0].end(20)
    assert code == 75
    assert "has left the run" in out
    assert run_at.agents[0].processes() == []


@pytest.mark.slow
def test_a_host_that_was_lost_comes_back(script: Callable[..., Script], alone: torch.Tensor, tmp_path: Path) -> None:
    """Its connection is cut: it ends its workers, connects again, and gets its place once its cooldown is over
    (hivemind#455). The loss counts: no budget is new (pytorch#147064)."""
    run_at, mark = Listening(script), tmp_path / "lost"

    def stop() -> None:
        stopped = run_at.agents[0].processes()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        mark.touch()
        time.sleep(9)  # longer than silence_s
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    callback, loss = AtStep(stop), WaitsFor(partial(lost_and_back, mark))
    survive = "max_losses=1,silence_s=6,cooldown_s=0.5"
    run = run_at.train(alone, loss, workers=2, survive=survive, callbacks=[callback])
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == [(1, "host")]
    assert callback.kinds[0] == "lost"
    assert run.generations == 3  # without it, and with it again
    code, out, _ = run_at.agents[0].end(20)
    assert code == 0
    assert "connects again" in out


# -- the whole run starts again -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hosts_come_again_where_the_run_starts_again(
    script: Callable[..., Script], alone: torch.Tensor, tmp_path: Path
) -> None:
    """A worker of a joined host is lost: all of it is ended, and it connects again, at the same port."""
    run_at = Listening(script, faults="kill=1@step:9")
    run = run_at.train(alone, workers=2, survive="max_restarts=1", run_dir=tmp_path / "run")
    assert [one["cause"] for one in run.restarts] == ["death"]
    assert run.restarts[0]["step"] in (
        8,
        4,
    )  # the newest checkpoint is dropped where the worker had not written its part
    code, out, _ = run_at.agents[0].end(20)
    assert code == 0
    assert "starts again" in out
    assert "the run is done" in out
    wait_until(lambda: not run_at.agents[0].processes(), 10)


DRIVER = """
    import os, sys
    from manyhands.__main__ import main
    os.dup2(1, 2)
    sys.argv += ["--run-dir", "run", "--listen", "127.0.0.1", "--local-workers", "1", "--threads-per-worker", "1"]
    main()
"""


@pytest.mark.nightly
def test_hosts_come_again_where_the_driver_was_killed(
    script: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its supervisor starts it again: the loss of the driver's process is not fatal (pytorch#67742)."""
    monkeypatch.chdir(tmp_path)
    options = "train digits -n 2 --epochs 2 --checkpoint-every 5 --max-restarts 1"
    driver = script(DRIVER, *options.split())
    while not (found := ADDRESS.search(driver.line())):
        assert driver.process.poll() is None, driver.end()
    agent = script(AGENT, found[1], "tls")
    wait_until(lambda: any((tmp_path / "run/checkpoints").glob("step-*[0-9]")), 60)
    children = Path(f"/proc/{driver.process.pid}/task/{driver.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    code, out, _ = driver.end(100)
    assert code == 0, out
    assert "restart 1 of 1" in out
    code, out, err = agent.end(20)
    assert code == 0, out + err
    assert "connects again" in out
