"""A process is lost where a server holds the parameters: in step, at their own pace, in pairs, and in memory that all share.
Each row counts once. All pairs of place and victim: test_faults_simulated.py."""

import fcntl
import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numbered_rows
import pytest
import torch
from fault_harness import Patient, Strike, Trial, all_here, fired, kill, one_is_lost, survive
from joined_run import Run as JoinedRun
from joined_run import joined_by
from numbered_rows import counted, each_at_the_server, in_order, partly_trained, trained_once
from torch import nn

import manyhands as mh
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.hosts.engine import Hosts
from manyhands.server.client import ShardConnection
from manyhands.worker import Worker

slow = pytest.mark.slow
BATCH, TICKS, EPOCHS = 6, 12, 2
PUSHES_RARELY = "downpour:push_every=3,pull_every=3"
IN_STEP = "downpour:bound=0"
SLICES = (4, 6, 12)  # rows of a slice of 12 rows, with three workers, two and one


def task(**fields: object) -> mh.Task:
    return numbered_rows.task(BATCH * TICKS, BATCH, **{"epochs": EPOCHS, **fields})


@pytest.mark.parametrize(
    ("strategy", "befalls", "replaced"),
    [
        (PUSHES_RARELY, ["kill=1@step:3"], True),
        *(
            pytest.param(*one, marks=slow)
            for one in (
                ("downpour:bound=2", ["kill=0@step:4,kill=1@step:5"], True),
                ("gossip:graph=pairs,period=3", [Strike(1, "wait")], False),
                ("quorum", ["kill=0@step:4,kill=1@step:5"], True),
            )
        ),
    ],
)
def test_each_row_counts_once(strategy: str, befalls: list[str | Strike], replaced: bool, trial: Trial) -> None:
    in_step = "bound=0" in strategy or strategy == "quorum"
    given = {"of": in_order(12, 13) if in_step else task(), "strategy": strategy, "survive": survive(replaced)}
    run = trial.struck(*befalls, **given)
    if in_step:
        trained_once(run, 12, (12, 8, 6, 4) if strategy == "quorum" else SLICES)
    else:
        each_at_the_server(run, BATCH, EPOCHS, share=3 if "pairs" in strategy else 1)


@slow
def test_in_step_a_replacement_takes_part(trial: Trial) -> None:
    of = in_order(12, 13, loss=Patient(loss=numbered_rows.minus_mean))
    run = trial.train("kill=1@step:3", of=of, strategy=IN_STEP)
    trained_once(run, 12, SLICES)
    assert run.generations >= 3
    assert run.rows["workers"][1] >= 4 * 5


class BetweenShards:
    """A model function: worker 1 passes the place "second shard" between the two messages of a push. It is no phase."""

    def __init__(self, model: Callable[[], nn.Module], push: int) -> None:
        self.model, self.push = model, push

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and worker.elastic and worker.worker_id == 1:
            plain_call, calls = ShardConnection.push, 0

            def push(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 2 * self.push:
                    kill()
                return plain_call(*args, **options)

            ShardConnection.push = push
        return self.model()


@slow
@pytest.mark.parametrize("strategy", [IN_STEP, pytest.param("downpour", marks=pytest.mark.nightly)])
def test_what_one_of_two_shards_has_of_a_slice_is_counted_and_not_repeated(strategy: str, trial: Trial) -> None:
    of, slices = (in_order(12, 13), SLICES) if strategy == IN_STEP else (task(epochs=1), (2, 3, 6))
    of = of.with_fields(model=BetweenShards(of.model, 4))
    run = trial.train(of=of, strategy=strategy, servers=2, run_dir=trial.run_dir)
    partial = slices[0]
    partly_trained(run, of.batch_size, slices, partial=partial)
    assert run.rows["partial"] == partial
    assert json.loads((trial.run_dir / "result.json").read_text())["rows"]["partial"] == partial
    assert f"{partial} rows which only some shards of the server have" in run.summary()


@slow
def test_who_is_the_first_trains_alone_at_first(trial: Trial) -> None:
    """The others wait for it, and not for ever: here one that waits leaves."""
    of, fault = task(loss=Patient(loss=numbered_rows.minus_mean, until=one_is_lost, call=3)), "leave=1@step:2"
    run = trial.struck(fault, of=of, strategy="downpour:bound=1,warmup=8")
    each_at_the_server(run, BATCH, EPOCHS)
    steps = [event for event in trial.events("step") if event.values["lease"][2] < 8 and event.tick < TICKS]
    alone = {(event.generation, event.rank) for event in steps}
    assert len(alone) == len(dict(alone)), "several trained in the warm-up of one generation"


@slow
@pytest.mark.parametrize("strategy", [PUSHES_RARELY, "gossip:graph=pairs,period=3"])
def test_who_leaves_or_is_replaced_in_an_open_window_takes_no_row_along(strategy: str, trial: Trial) -> None:
    """In pairs a replacement stands where the lost one stood; the window of the member whose state it takes is that one's."""
    pairs = "pairs" in strategy
    of = task(loss=Patient(loss=numbered_rows.minus_mean, until=_back if pairs else one_is_lost, call=3))
    fault = "kill=1@step:2" if pairs else "leave=1@step:2"
    run = trial.struck(fault, of=of, strategy=strategy)
    assert len(run.losses) == pairs
    assert run.generations >= 2 + pairs
    each_at_the_server(run, BATCH, EPOCHS, share=3 if pairs else 1)


def _back(worker: Worker) -> bool:
    return worker.broken or (worker.generation > 0 and all_here(worker))


def test_an_interrupted_run_leaves_no_row_out(simulated: Callable[[], Trial]) -> None:
    """Stopped after a loss, and resumed with another number of workers."""
    trial, fault = simulated(), "kill=1@step:0"
    first = trial.struck(fault, of=task(max_steps=7), strategy="downpour")
    assert first.rows["total"] == 7 * BATCH
    run = trial.train(of=task(), strategy="downpour", run_dir=trial.run_dir, resume=True, workers=2)
    each_at_the_server(run, BATCH, EPOCHS)


# -- hogwild ---------------------------------------------------------------------------------------------------------------


def _back_or_over(worker: Worker) -> bool:
    """After a loss: nobody takes all rows before it."""
    return worker.broken or worker.interrupted or (worker.generation > 0 and worker.size >= 3)


class OneWriter(torch.optim.SGD):
    """Of several that write the same memory, each writes all of it, and may undo another's: here one after the other."""

    def __init__(self, parameters: Any, lock: Path) -> None:
        super().__init__(parameters, lr=1.0)
        self._lock = lock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            super().step()


@slow
def test_memory_that_workers_share_stays_and_a_replacement_maps_it(trial: Trial) -> None:
    """Worker 0's, in whose memory the parameters are, too. No slice under way was stepped on: each row is trained once."""
    lock, faults = trial.folder / "lock", "kill=0@step:2,kill=1@step:2"
    of = task(
        epochs=1,
        loss=Patient(loss=numbered_rows.minus_mean, until=_back_or_over),
        optimizer=lambda model: OneWriter(model.parameters(), lock),
    )
    run = trial.struck(faults, of=of, strategy="hogwild")
    trained_once(run, BATCH, (2,))
    assert run.rows["repeated"] == 2 * 2
    assert run.generations >= 3


@slow
def test_memory_that_workers_share_goes_on_with_fewer(trial: Trial) -> None:
    faults = "kill=0@step:3,kill=1@step:9"
    run = trial.struck(faults, of=task(), strategy="hogwild", survive=survive(False))
    counted(run, BATCH, EPOCHS)


# -- on hosts: two workers here, of whom one is worker 0, and one of a host that joins -------------------------------------


@slow
def test_a_worker_of_another_host_and_the_primary_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, plain_call = [], ElasticDriver._inject_faults

    def inject(driver: ElasticDriver) -> None:
        plain_call(driver)
        primary = driver.copies.copy_of(0, "primary")
        if not killed and driver.monitor.processes[0].step >= 3 and driver.copies.copy_of(0, "backup") is not None:
            assert primary is not None
            killed.append(primary)
            driver._signal(primary, signal.SIGKILL)

    monkeypatch.setattr(ElasticDriver, "_inject_faults", inject)
    loss = Patient(until=one_is_lost, call=3, loss=numbered_rows.minus_mean)
    of, fault = numbered_rows.task(12 * 13, 12, epochs=1, loss=loss), "kill=2@step:1"
    hosts = JoinedRun(Hosts(local_workers=2, faults=fault), joined_by(1))
    given: dict[str, Any] = {"survive": "max_losses=3,silence_s=5,copies=2", "threads_per_worker": 1}
    run = hosts.during(lambda: mh.train(of, engine=hosts.engine, workers=3, strategy="downpour", **given))
    assert killed == [-1]
    fired(run, fault)
    trained_once(run, 12, (4, 6, 8, 12))
