"""Simulated runs that go on when workers are lost, by the same decisions as real ones."""

from pathlib import Path
from typing import Any

import numbered_rows
import pytest
import torch
from sim_world import Changes
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.errors import WorkerFailed
from manyhands.recording import event_log

ROWS, BATCH, EPOCHS = 200, 39, 3
STEPS = EPOCHS * 6  # 5 whole batches and one of 5 rows
STEP_S = "compute=step=100ms"


@pytest.fixture(scope="module")
def task() -> mh.Task:
    return plain.task(
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        train_data=plain.rows(ROWS),
        validation_data=plain.rows(ROWS),
        batch_size=BATCH,
        epochs=EPOCHS,
    )


@pytest.fixture(scope="module")
def alone(task: mh.Task) -> mh.Run:
    return mh.train(task, workers=1)


def train(task: mh.Task, faults: str, survive: str = "max_losses=any", workers: int = 3, **options: Any) -> mh.Run:
    engine = f"sim:{STEP_S},faults='{','.join(filter(None, ('notice=10ms', faults)))}'"
    return mh.train(task, workers=workers, engine=engine, survive=survive, **options)


def check_exact(run: mh.Run, alone: mh.Run) -> None:
    assert (run.parameters - alone.parameters).abs().max() < 1e-10
    assert run.metrics["validation_loss"] == pytest.approx(alone.metrics["validation_loss"], abs=1e-10)
    assert run.rows["total"] == EPOCHS * ROWS
    assert [row["step"] for row in run.history] == list(range(1, STEPS + 1))
    assert [row["tick"] for row in run.history] == list(range(STEPS))
    assert [row["rows"] for row in run.history] == [row["rows"] for row in alone.history]


CHANGES = {  # and how many are lost; all places of a death are struck by test_faults_simulated.py
    "kill=2@0.73s": 1,
    "kill=0@step:7,kill=1@step:8,kill=2@step:11": 3,
    "kill=2@0s": 1,
    "leave=1@0.5s,kill=0@step:9": 1,
    "kill=1@step:3,back=0.5": 1,
    "kill=2@step:0:join": 1,
    "pause=1@step:7:exchange+0.5": 0,
    "pause=0@step:7:exchange+30": 1,
    "pause=1@0.73s+9,pause=1@9s+9": 1,
    "restart=1@step:7:commit+0.35": 1,
}


@pytest.mark.parametrize("faults", CHANGES)
def test_whoever_is_lost_or_leaves_the_result_is_one_workers(task: mh.Task, alone: mh.Run, faults: str) -> None:
    run = train(task, faults)
    check_exact(run, alone)
    planned = [one for one in faults.split(",") if not one.startswith("back")]
    assert run.info["faults"] == dict.fromkeys(planned, 1)
    assert len(run.losses) == CHANGES[faults]
    assert run.generations > 1 or faults in ("kill=2@0s", "kill=2@step:0:join", "pause=1@step:7:exchange+0.5")


def test_a_long_pause_is_silence_which_is_a_loss(task: mh.Task) -> None:
    for second, lost_at in ("5.02", 1.03 + 5), ("5.04", 5.04 + 5):  # within the first pause, after it
        run = train(task, f"pause=1@1.03s+4,pause=1@{second}s+9", "max_losses=any,silence_s=5")
        (lost,) = run.losses
        assert (lost["cause"], lost["seconds"]) == ("silence", pytest.approx(lost_at))


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("local-sgd:period=5", "kill=1@step:9"),
        ("downpour:bound=0,push_every=4,pull_every=4", "kill=1@step:7"),
        ("downpour:push_every=3,pull_every=3", "kill=1@step:8"),
        ("quorum", "kill=0@step:9"),
    ],
)
def test_what_a_lost_worker_had_trained_before_the_checkpoint_counts(strategy: str, fault: str, tmp_path: Path) -> None:
    """The run goes on from its checkpoint after step 7, in the middle of a round, and loses a worker in that round."""
    batch, ticks = 12, 10
    numbered = numbered_rows.task(batch * ticks, batch, epochs=1, order=lambda epoch: range(batch * ticks))
    all_of_them, kept = "kill=0@step:8,kill=1@step:8,kill=2@step:8", {"strategy": strategy, "run_dir": tmp_path}
    with pytest.raises(WorkerFailed):
        train(numbered, all_of_them, checkpoint_every=7, **kept)
    run = train(numbered, fault, resume=True, **kept)
    assert run.info["faults"] == {fault: 1}
    assert run.rows["total"] == batch * ticks
    if not strategy.startswith("local-sgd"):
        numbered_rows.trained_once(run, batch, (12, 8, 6, 4) if strategy == "quorum" else (4,))
        return
    changes = [event for event in event_log.read(tmp_path / event_log.FILE) if event.type == "membership"]
    members = {0: 3, **{event.tick: event.values["workers"] for event in changes}}
    assert numbered_rows.rounds_problem(run.model.of.detach(), run.history, members, batch) == ""


@pytest.mark.parametrize(
    ("faults", "survive", "workers", "size", "losses"),
    [
        ("kill=3@step:2,kill=0@step:5,kill=1@step:5,join=3@0.9s", "max_losses=3,replace=false,max_workers=4", 4, 4, 3),
        ("join=2@step:4", "max_losses=0,max_workers=5", 3, 5, 0),
        ("kill=1@step:7,join=1@5s", "max_losses=1,min_workers=3,replace=false,wait_s=20", 3, 3, 1),  # too few wait
    ],
)
def test_some_join(
    faults: str, survive: str, workers: int, size: int, losses: int, task: mh.Task, alone: mh.Run
) -> None:
    run = train(task, faults, survive, workers)
    check_exact(run, alone)
    assert (len(run.rows["workers"]), len(run.losses)) == (size, losses)
    assert (run.seconds > 5.0) == ("wait_s" in survive)


def test_each_killed_again_and_again_with_the_same_bits_and_times_for_a_seed(task: mh.Task, alone: mh.Run) -> None:
    one, other = (train(task, "mtbf=1.5s", workers=5) for _ in range(2))
    check_exact(one, alone)
    assert len(one.losses) == one.info["faults"]["mtbf"] > 2
    assert torch.equal(one.parameters, other.parameters)
    assert (one.losses, one.goodput, one.seconds) == (other.losses, other.goodput, other.seconds)


def test_what_a_loss_costs_in_virtual_time(task: mh.Task) -> None:
    """One of two is killed as its step begins: the other waits until it is noticed, and repeats the step."""
    free = train(task, "", workers=2)
    run = train(task, "kill=1@step:7", "max_losses=1,replace=false", workers=2)
    assert run.seconds == pytest.approx(free.seconds + 0.1, abs=0.03)  # it was computing while the end was noticed
    assert run.rows["repeated"] == BATCH
    left_s = run.seconds - 0.7 - 0.1
    assert run.goodput["absent_s"] == pytest.approx(left_s, rel=0.1)
    assert run.goodput["goodput"] < 0.7
    for back_s in (0.1, 0.9):  # a replacement joins between two steps: one is under way, one brings the wish
        run = train(task, f"kill=1@step:3,back={back_s}")
        assert back_s < run.goodput["absent_s"] < back_s + 2 * 0.1 + 0.05


def test_an_exception_is_a_loss_and_the_same_one_twice_is_the_programs(task: mh.Task, alone: mh.Run) -> None:
    raised: list[int] = []

    def fails(times: int) -> Any:
        def checked(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            if len(raised) < times and len(batch[0]) == 1:  # of the last batch's 5 rows
                raised.append(1)
                raise ValueError("a bad row")
            return plain.cross_entropy(net, batch)

        return checked

    run = train(task.with_fields(loss=fails(1)), "")
    check_exact(run, alone)
    assert [one["cause"] for one in run.losses] == ["error"]
    raised.clear()
    with pytest.raises(WorkerFailed, match="raised the same ValueError at test_sim_survive.py"):
        train(task.with_fields(loss=fails(100)), "")


def test_checkpoints_of_changing_members_resume(task: mh.Task, alone: mh.Run, tmp_path: Path) -> None:
    first = train(task, "kill=0@step:4", "max_losses=1,replace=false", run_dir=tmp_path / "run", epochs=2)
    assert first.steps == 12
    run = mh.train(task, workers=2, engine=f"sim:{STEP_S}", run_dir=tmp_path / "run", resume=True)
    assert run.rows["total"] == EPOCHS * ROWS
    rows = list(mh.read_history(tmp_path / "run"))
    assert sorted(row["tick"] for row in rows) == list(range(STEPS))
    assert sum(row["rows"] for row in rows) == EPOCHS * ROWS


@pytest.mark.parametrize("fault", ["kill=1@step:6:save", "disk=1@step:6"])
def test_a_checkpoint_that_is_not_whole_is_dropped(task: mh.Task, alone: mh.Run, tmp_path: Path, fault: str) -> None:
    """As on real workers: it is named, the older one is kept, and the next one is whole."""
    run = train(task, fault, run_dir=tmp_path, checkpoint_every=3)
    check_exact(run, alone)
    assert run.info["faults"] == {fault: 1}
    assert len(run.losses) == fault.startswith("kill")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000015", "step-00000018"]
    if fault.startswith("disk"):
        (warning,) = run.info["warnings"]
        assert "worker 1: No space left on device" in warning


# -- a link between hosts is cut -----------------------------------------------------------------------------------------


def test_after_a_cut_the_same_members_go_on(task: mh.Task, alone: mh.Run) -> None:
    """They connect again once messages pass."""
    seen, free = Changes(), train(task, "")
    run = train(task, "cut=host1@0.75s+3", "max_losses=any,replace=false", callbacks=[seen])
    check_exact(run, alone)
    assert run.info["faults"] == {"cut=host1@0.75s+3": 1}
    assert (run.losses, run.generations) == ([], 2)
    assert {kind for kind, _ in seen.changes} == {"accused"}
    assert all("lost its connection to worker" in message for _, message in seen.changes)
    assert run.seconds == pytest.approx(free.seconds + 3.0, abs=0.11)  # the step under way is made again


def test_the_same_pair_again_within_a_minute_parts_it(task: mh.Task, alone: mh.Run) -> None:
    for more, workers, who in (
        ("faults='cut=host0@0.75s+3,cut=host0@4s+1'", 3, [0]),  # the others accuse it
        ("faults='cut=host1@0.75s+20'", 3, [1]),  # longer than they try to connect
        ("network=workers_per_host=2,faults='cut=host1@0.75s+1,cut=host1@2.2s+1'", 4, [0, 1, 2, 3]),  # hosts of several
    ):
        engine = f"sim:{STEP_S},{more}"
        run = mh.train(task, workers=workers, engine=engine, survive="max_losses=any,replace=false")
        check_exact(run, alone)
        (lost,) = run.losses
        assert lost["cause"] == "link"
        assert lost["worker_id"] in who
        assert run.generations == 3


# -- how long it takes -----------------------------------------------------------------------------------------------------


def test_a_recovery_takes_seconds_however_many_there_are(task: mh.Task) -> None:
    """torchft#329: 948 s to recover. Here: until it is noticed, and the step under way once more."""
    free = train(task, "", workers=8)
    run = train(task, "kill=7@0.75s,notice=0.3", "max_losses=1,replace=false", workers=8)
    assert len(run.losses) == 1
    assert run.seconds - free.seconds <= 0.3 + 0.1 + 0.01


def slowed(task: mh.Task, survive: str, factor: int = 5) -> tuple[mh.Run, list[tuple[str, str]]]:
    """Worker 1 takes so many times as long for a step; the run, and what changed."""
    seen, engine = Changes(), f"sim:compute='step=100ms,1={factor}x'"
    run = mh.train(task.with_fields(epochs=5), workers=3, engine=engine, survive=survive, callbacks=[seen])
    return run, seen.changes


def test_a_slow_worker_leaves(task: mh.Task) -> None:
    """Once 20 steps of each are reported; nobody takes its place on its host."""
    run, changes = slowed(task, "max_losses=1,slow=3")
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == [(1, "slow")]
    assert 20 <= run.losses[0]["step"] <= 22
    assert run.generations == 2
    assert (run.parameters - mh.train(task.with_fields(epochs=5), workers=1).parameters).abs().max() < 1e-10
    assert run.rows["total"] == 5 * ROWS
    assert [kind for kind, _ in changes] == ["lost"]
    assert "5.0 times as long for a step as the others" in changes[0][1]


def test_a_slow_worker_that_stays_is_named_once(task: mh.Task) -> None:
    """If it is more than twice as slow."""
    run, changes = slowed(task, "max_losses=1,min_workers=3,slow=3")
    assert run.losses == []
    assert [kind for kind, _ in changes] == ["slow"]
    assert "worker 1 on host" in changes[0][1]
    assert slowed(task, "max_losses=1", factor=2)[1] == []
