"""Stages on simulated workers: the seconds that a schedule takes on virtual clocks, faults, and what is refused."""

import copy
import functools
import json
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import TASKS
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.driver_client import SimDriverClient
from manyhands.engines.sim.engine import Sim
from manyhands.errors import NotFinite, PeerLost, UnknownName, WorkerFailed
from manyhands.worker import Worker
from refusals import refused

ROW_S = 0.75  # seconds of the whole model for a row


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def chain(length: int, rows: int, **fields: Any) -> mh.Task:
    """So many equal layers; each step is over `rows` rows."""
    draws = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2 * rows, 4, generator=draws) for _ in range(2))
    given = {
        "model": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(length))),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return mh.Task(loss=squares, train_data=torch.utils.data.TensorDataset(x, y), batch_size=rows, **given | fields)


def train(task: mh.Task, engine: str, plan: str = "stages=2", workers: int = 2, **options: Any) -> mh.Run:
    return mh.train(task, workers=workers, engine=engine, model_parallel=plan, threads_per_worker=1, **options)


@dataclass(frozen=True)
class Passed:
    """One pass of a stage, on its worker's clock."""

    rank: int
    forward: bool
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Passed]:
    """Of the runs of this test, as the clocks have them."""
    found: list[Passed] = []
    plain = SimDriverClient.begin_passes

    def begin_passes(self: SimDriverClient, *given: Any) -> Any:
        passed, timeline = plain(self, *given), self._lease_server.timeline

        def noted(forward: bool, share: float) -> None:
            began = timeline.now
            passed(forward, share)
            found.append(Passed(self._rank, forward, began, timeline.now))

        return noted

    monkeypatch.setattr(SimDriverClient, "begin_passes", begin_passes)
    return found


def steps_of(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["type"] == "step"]


# -- time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "micro_batches", "bubble"), [(2, 4, 1 / 5), (4, 8, 3 / 11)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_share_of_a_step_in_which_a_stage_waits(
    stages: int, micro_batches: int, bubble: float, schedule: str, passes: list[Passed], tmp_path: Path
) -> None:
    """Equal stages on a network that costs nothing: (K - 1) / (M + K - 1), and as many micro-batches in flight as there are
    stages from this one to the end."""
    run = train(
        chain(stages, 32),
        f"sim:compute='row={ROW_S}'",
        f"stages={stages},micro_batches={micro_batches},schedule={schedule}",
        workers=stages,
        run_dir=tmp_path / "run",
    )
    assert run.steps == 2
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2 * stages
    for event in steps:
        parts = [event["values"][f"{part}_s"] for part in ("input", "compute", "exchange", "wait")]
        assert parts[1] == pytest.approx(32 * ROW_S / stages, rel=1e-12)
        assert parts[3] / sum(parts) == pytest.approx(bubble, rel=1e-12)
    ticks = [sorted((one for one in passes if one.rank == rank), key=lambda one: one.ended) for rank in range(stages)]
    for tick in range(2):
        of_tick = [own[2 * micro_batches * tick : 2 * micro_batches * (tick + 1)] for own in ticks]
        step_s = max(own[-1].ended for own in of_tick) - min(own[0].began for own in of_tick)
        for rank, own in enumerate(of_tick):
            assert all(one.ended <= later.began for one, later in pairwise(own))
            assert 1 - sum(one.seconds for one in own) / step_s == pytest.approx(bubble, rel=1e-12)
            held = list(accumulate(1 if one.forward else -1 for one in own))
            assert held[-1] == 0
            assert max(held) == (min(stages - rank, micro_batches) if schedule == "1f1b" else micro_batches)


def test_messages_and_sums_take_the_networks_seconds(tmp_path: Path) -> None:
    """Two stages, one micro-batch: forward, a message, forward and back, a message, back, and two sums that end a step."""
    latency, gradient_s = 2.0, 8 * ROW_S / 2
    run = train(
        chain(2, 8),
        f"sim:compute='row={ROW_S}',network='latency={latency}'",
        "stages=2,micro_batches=1",
        run_dir=tmp_path / "run",
    )
    assert run.steps == 2
    for event in steps_of(tmp_path / "run"):
        values = event["values"]
        assert values["compute_s"] == pytest.approx(gradient_s, rel=1e-12)
        assert values["exchange_s"] == pytest.approx(
            3 * latency, rel=1e-12
        )  # a message, the sum, one before the optimizer
        forward_s, back_s = gradient_s / 3, 2 * gradient_s / 3
        waits = [latency + forward_s + back_s, forward_s + latency + back_s]
        assert values["wait_s"] == pytest.approx(waits[event["rank"]], rel=1e-12)


@pytest.mark.parametrize(
    ("compute", "seconds"),
    [
        ("row=0.75", [(0.5, 1), (0.5, 1)]),  # 3 s of the whole model, a half on each stage
        ("row=0.75,stages=equal,forward=0.5", [(0.75, 0.75), (0.75, 0.75)]),
        ("row=0.75,stages=3/1,forward=0.5", [(1.125, 1.125), (0.375, 0.375)]),
        ("row=0,step=6", [(0.5, 1), (0.5, 1)]),  # a step's own seconds, too
        ("row=0.75,1=5x", [(0.5, 1), (2.5, 5)]),
    ],
)
def test_what_a_pass_takes(compute: str, seconds: list[tuple[float, float]], passes: list[Passed]) -> None:
    """(forward, back) of each stage over a micro-batch of 4 rows, of 8."""
    run = train(chain(2, 8), f"sim:compute='{compute}'", "stages=2,micro_batches=2")
    assert run.steps == 2
    for rank, own in enumerate(seconds):
        for forward, expected in zip((True, False), own, strict=True):
            found = [one.seconds for one in passes if (one.rank, one.forward) == (rank, forward)]
            assert found == pytest.approx([expected] * 4)


def test_unequal_stages_and_micro_batches(passes: list[Passed]) -> None:
    """By parameters, each stage's share; of 39 rows three micro-batches have 10, and one has 9. Where units are computed
    again, going back takes a forward more."""
    run = train(
        TASKS["mlp"].with_fields(max_steps=1, validation_data=None), "sim:compute='row=0.6'", "stages=2,recompute=units"
    )
    sizes = [one["parameters"] for one in run.info["stages"]]
    assert sizes[0] != sizes[1]
    for rank, size in enumerate(sizes):
        forward = [0.6 * rows / 3 * size / sum(sizes) for rows in (10, 10, 10, 9)]
        own = [one for one in passes if one.rank == rank]
        back = [one.seconds for one in own if not one.forward]
        assert back == pytest.approx([2 * seconds for seconds in forward])
        again = [one.seconds for one, later in pairwise(own) if one.forward and not later.forward]
        assert sorted(one.seconds for one in own if one.forward) == pytest.approx(sorted(2 * forward))
        assert again[-1] == pytest.approx(forward[-1])


def test_jitter_is_drawn_once_a_step_by_each_worker(passes: list[Passed]) -> None:
    train(chain(2, 8), "sim:compute='row=1,jitter=lognormal:0.5'", "stages=2,micro_batches=4")
    drawn = set()
    for rank in range(2):
        own = [one.seconds for one in passes if one.rank == rank and one.forward]
        assert own[:4] == pytest.approx([own[0]] * 4)
        assert own[4:] == pytest.approx([own[4]] * 4)
        drawn |= {round(own[0], 9), round(own[4], 9)}
    assert len(drawn) == 4


# -- faults --------------------------------------------------------------------------------------------------------------


def test_a_killed_worker_ends_the_run_and_it_starts_again_from_its_checkpoint(tmp_path: Path) -> None:
    """Worker 3 is the second stage of the second replica. With dropout, whose draws go on where they were."""
    task = chain(
        2,
        8,
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))),
        epochs=4,
    )

    def run(faults: str, **options: Any) -> mh.Run:
        return train(task, f"sim:faults='{faults}'" if faults else "sim", workers=4, checkpoint_every=2, **options)

    for at, phase in (("", "compute"), (":exchange", "exchange")):
        with pytest.raises(WorkerFailed, match=f"worker 3 .* was killed, .* in phase {phase}") as error:
            run(f"kill=3@step:5{at}")
        assert error.value.rank == 3
    restarted = run("kill=3@step:5", run_dir=tmp_path / "run", survive="max_restarts=1")
    assert len(restarted.restarts) == 1
    assert torch.equal(restarted.parameters, run("").parameters)


def test_a_paused_worker_holds_up_its_replica() -> None:
    """And with it, in step, the others; bits stay."""
    seconds, parameters = [], []
    for faults in ("", "pause=1@step:1+100"):
        run = train(chain(2, 8), f"sim:faults='{faults}'" if faults else "sim", workers=4)
        seconds.append(run.seconds)
        parameters.append(run.parameters)
    assert seconds[1] == pytest.approx(seconds[0] + 100)
    assert torch.equal(*parameters)


def test_a_gradient_that_is_not_finite_names_its_replicas_workers() -> None:
    with pytest.raises(NotFinite, match="the own gradients of workers 2 and 3 are not finite"):
        train(chain(2, 8), "sim:faults='nan=3@step:1'", workers=4)


def test_a_link_that_breaks_is_seen_in_groups_of_some_workers() -> None:
    def program(worker: Worker) -> str:
        group = worker.make_group([0, 2] if worker.rank != 1 else [1])
        if worker.rank == 1:
            return ""
        for _ in range(3):
            group.barrier()
            worker.driver.computed(1)  # a second
        return str(refused("", group.barrier, kind=PeerLost))

    engine = Sim(compute="row=1", faults="cut=host2@2.5s+100")
    found = engine.launch(program, LaunchSpec(workers=3, threads_per_worker=1))
    assert "worker 2" in found[0]
    assert "worker 0" in found[2]


def test_a_member_that_ends_is_seen_in_groups_of_some_workers() -> None:
    def program(worker: Worker) -> str:
        if worker.rank == 1:
            return ""
        group = worker.make_group([0, 2])
        return "" if worker.rank == 2 else str(refused("left the group", group.barrier, kind=PeerLost))

    assert "worker 2" in Sim().launch(program, LaunchSpec(workers=3, threads_per_worker=1))[0]


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_parts_that_make_no_sense() -> None:
    for compute, said in (
        ("stages=1/2/3", "stages=1/2/3 gives the parts of 3 stages, and this run's replicas have 2"),
        ("stages=half", "stages must be parameters, equal, or a number above 0 for each stage"),
        ("stages=1/0", "stages must be"),
        ("stages=1/nan", "stages must be"),
        ("forward=2", "forward must be at most 1"),
        ("forward=-1", "forward .* must be at least 0"),
        ("forward=much", "forward must be a number"),
    ):
        refused(said, train, chain(2, 8), f"sim:compute='{compute}'")


def test_what_takes_replicas_of_one_worker_says_so() -> None:
    words = "model_parallel is an option of mh.train .*: compare, check and estimate"
    for call in (mh.compare, mh.check, functools.partial(mh.estimate, profile="none.json")):
        refused(words, functools.partial(call, workers=2, model_parallel="stages=2"), chain(2, 8), kind=UnknownName)


def test_parts_of_stages_are_read_as_they_are_written() -> None:
    compute = Compute.parse("row=1,forward=0.4,stages=2/1/1")
    assert Compute.parse(str(compute)) == compute
    assert [compute.stage_share(stage, [7, 7, 7]) for stage in range(3)] == [0.5, 0.25, 0.25]
    compute.check(workers=4)  # without stages they have no effect
    assert Compute.parse("stages=2/1").stage_share(0, [5]) == 1


def test_workers_do_not_share_a_module_that_the_task_gives() -> None:
    """Itself, or from a function each time."""

    def run(model: Any) -> mh.Run:
        return mh.train(
            chain(2, 8, model=model), workers=4, engine="sim", model_parallel="stages=2", threads_per_worker=1
        )

    whole = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    given, returned = copy.deepcopy(whole), copy.deepcopy(whole)
    expected = run(lambda: copy.deepcopy(whole))
    assert torch.equal(run(given).parameters, expected.parameters)
    assert torch.equal(run(lambda: returned).parameters, expected.parameters)


def test_a_function_that_gives_parameters_of_an_earlier_call() -> None:
    part = nn.Linear(4, 4)
    kept = functools.cache(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for model in (lambda: nn.Sequential(part, nn.Linear(4, 4)), kept):
        refused("parameters of an earlier call, such as .*inside of model", train, chain(2, 8, model=model), "sim")
