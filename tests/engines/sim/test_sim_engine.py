"""Engine `sim` from outside: the conformance suite, errors, faults, time, and all that `train` and `launch` promise."""

import gc
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import manyhands as mh
from manyhands.callbacks.base import Callback
from manyhands.cli import commands
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.sim import engine as sim_engine
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput, PeerLost, Unsupported, WorkerFailed
from manyhands.events import Event
from manyhands.own_loop.launch import launched_strategy, run_script
from manyhands.replica.replica import Replica
from manyhands.testing.engine_suite import ENGINE_SUITE
from manyhands.worker import Worker, current
from plain import cross_entropy, flat, mlp, rows, task

SECOND_A_ROW = "compute=row=1"


def train(spec: str = "", strategy: str = "allreduce", workers: int = 3, **fields: Any) -> mh.Run:
    given = {"workers": workers, "threads_per_worker": 1, **fields}
    return mh.train(given.pop("task", None) or task(), strategy=strategy, engine=f"sim:{spec}", **given)


def launch(
    program: Callable[[Worker], Any], workers: int = 3, observer: Observer | None = None, **options: Any
) -> list[Any]:
    timeout_s = options.pop("timeout_s", 300.0)
    plan = LaunchSpec(workers=workers, threads_per_worker=1, observer=observer or Observer(), timeout_s=timeout_s)
    return Sim(**options).launch(program, plan)


def same(one: mh.Run, other: mh.Run) -> bool:
    return torch.equal(one.parameters, other.parameters) and one.metrics == other.metrics


@pytest.mark.parametrize("check", ENGINE_SUITE)
@pytest.mark.parametrize("workers", [1, 3])
def test_sim_passes(workers: int, check: str) -> None:
    """CASES 21, 28. What is killed here is a simulated worker: `faults=`, below, stands for SIGKILL."""
    ENGINE_SUITE[check](Sim(), workers=workers)


def test_an_interrupt_ends_all_of_it() -> None:
    """The others' `finally` blocks run, and the next launch works; so does an observer's error, which comes as it was."""
    tidied: list[int] = []

    def program(worker: Worker, error: BaseException) -> None:
        try:
            worker.group.barrier()
            if worker.rank == 1:
                raise error
            worker.group.barrier()
        finally:
            tidied.append(worker.rank)

    for error in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)):
            launch(lambda worker, error=error: program(worker, error))  # type: ignore[misc]
        assert sorted(tidied) == [0, 1, 2]
        tidied.clear()
        assert launch(lambda worker: worker.rank) == [0, 1, 2]

    class Full(Observer):
        def event(self, event: Event) -> None:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        launch(lambda worker: worker.emit("step"), observer=Full())


def test_what_is_refused_before_anything_is_written_or_computed(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("it began")

    for error, words, spec, options in (
        (BadInput, "leaves some of the 40 workers without a row", "", {"workers": 40}),
        (BadInput, "last worker of this run is 2", "faults=kill=3@step:1", {}),
        (BadInput, "last worker of this run is 2", "faults=pause=7@1s+2", {}),
        (BadInput, "has 0 server shards", "faults=kill=shard0@1s", {}),
        (BadInput, "last worker of this run is 2", "compute='3=5x'", {}),
        (BadInput, "host3 does not exist", "network='link0-3=latency:1ms'", {}),
        (BadInput, "the workers' hosts are host0 to host2", "faults='cut=host3@1s+3'", {}),
        *((Unsupported, "survive", f"faults={fault}", {}) for fault in ("leave=1@step:2", "join=1@step:2", "mtbf=5s")),
        (Unsupported, "restarted worker cannot join", "faults='restart=1@step:99+1'", {}),
        (Unsupported, "parameter server can have drop, reorder", "faults='drop=0.1,reorder=0.1'", {}),
        (Unsupported, "computes on the CPU", "", {"device": "cuda"}),
        (Unsupported, "hogwild.*on one machine", "", {"strategy": "hogwild"}),
    ):
        with pytest.raises(error, match=words):
            train(spec, task=task(loss=loss), run_dir=tmp_path / "run", **options)
        assert not (tmp_path / "run").exists(), words
    with pytest.raises(BadInput, match="workers must be a whole number of at least 1, not 0"):
        Sim().launch(lambda worker: None, LaunchSpec(workers=0))
    with pytest.raises(Unsupported, match="parameter server can have delay"):
        launch(counted, faults="delay=0.1:1")
    with pytest.raises(Unsupported, match="worker of engine sim, which shares its process"):
        mh.launch(lambda: mh.train(task()), workers=2, engine="sim")
    (tmp_path / "train.py").write_text("print('here')")
    with pytest.raises(Unsupported, match="all workers in this process.*manyhands.launch"):
        run_script(tmp_path / "train.py", workers=2, engine="sim")


@pytest.mark.parametrize(
    ("strategy", "when", "notice_s"),
    [
        ("downpour", "40s", 2),
        ("quorum", "step:3", 2),
        ("allreduce", "step:3", 100),
        ("downpour:bound=0", "step:3", 100),
    ],
)
def test_a_killed_worker_ends_a_training_by_name(strategy: str, when: str, notice_s: int) -> None:
    """Also where another notices it first: it would be declared lost long after who waits for it has given up."""
    spec = f"{SECOND_A_ROW},faults='kill=1@{when},notice={notice_s}'"
    with pytest.raises(WorkerFailed, match="worker 1 on host1 was killed, as faults= asks for") as raised:
        train(spec, strategy, task=task(epochs=4), timeout_s=10.0 if notice_s == 100 else 300.0)
    assert raised.value.rank == 1
    assert raised.value.step >= 3
    assert when != "40s" or str(raised.value).endswith("lost at 42 s")
    assert notice_s != 100 or isinstance(raised.value.__cause__, PeerLost)


def test_a_pause_takes_exactly_its_time_and_a_straggler_sets_the_pace() -> None:
    """All wait for the one that pauses, and hold the same bits."""
    plain = train(SECOND_A_ROW)
    for pause in ("pause=1@step:2+2.5", "pause=2@5s+1.5,pause=2@5.5s+2"):
        paused = train(f"{SECOND_A_ROW},faults='{pause}'")
        assert same(plain, paused)
        assert paused.seconds - plain.seconds == pytest.approx(2.5, abs=1e-9)
    plain, slow = (train(f"compute='row=1{factor}'", task=task(train_data=rows(36))) for factor in ("", ",2=5x"))
    assert same(plain, slow)
    assert (plain.seconds, slow.seconds) == (6 * 4, 6 * 4 * 5)
    assert slow.timing["wait"] == pytest.approx(2 / 3 * 6 * 4 * 4)
    faults = ",faults='pause=0@step:2+10,pause=0@step:99+1,kill=0@1000s'"
    for strategy, where in (("allreduce", "compute"), ("downpour", "exchange")):  # downpour pulls before it computes
        plain, paused = (train(f"{SECOND_A_ROW}{more}", strategy, workers=1) for more in ("", faults))
        assert paused.seconds == plain.seconds + 10
        assert paused.timing[where] == pytest.approx(plain.timing[where] + 10)
        assert sum(paused.timing.values()) == pytest.approx(paused.seconds)
        unfired = [word for word in paused.info["warnings"] if "did not happen" in word]
        assert [word.split()[1] for word in unfired] == ["pause=0@step:99+1", "kill=0@1000s"]


def counted(worker: Worker) -> tuple[int, int, float]:
    """A program of five steps of a second each."""
    for step in range(5):
        worker.driver.progress("compute", step)
        worker.driver.computed(1)
    return worker.rank, worker.generation, worker.clock()


def test_a_restarted_worker_begins_anew_in_the_next_generation() -> None:
    for faults, generation, end in (
        ("restart=1@step:3+2", 1, 3 + 2 + 5.0),
        ("restart=1@2.5s+2", 1, 2.5 + 2 + 5),
        ("restart=1@step:2", 1, 7.0),
        ("restart=1@1.5s+1,restart=1@4s+1", 2, 10.0),
    ):
        values = launch(counted, compute="row=1", faults=faults)
        assert values == [(0, 0, 5.0), (1, generation, end), (2, 0, 5.0)], faults
    with pytest.raises(WorkerFailed, match="worker 1 on host1 was killed"):
        launch(counted, compute="row=1", faults="restart=1@1.5s+1,kill=1@4s")

    def receives(worker: Worker) -> tuple[int, float]:
        number = torch.zeros(1)
        if worker.rank == 0:
            worker.driver.computed(5)
            worker.group.send(torch.ones(1), 1)
        else:
            worker.group.receive_(number, 0)
        return worker.generation, float(number)

    for seed in range(8):  # back at once it waits for the others again, and what is left of the old one disturbs nobody
        found = launch(receives, workers=2, compute="row=1", faults="restart=1@2.5s", seed=seed)
        assert found == [(0, 0.0), (1, 1.0)]


def test_who_stands_still_for_too_long_ends_the_run() -> None:
    """Whether the others wait in the group, at the gate, for an answer or for rows; or for one that left."""
    for strategy in ("allreduce", "downpour:bound=1", "quorum", "downpour:warmup=3"):
        victim = 0 if "warmup" in strategy else 1
        with pytest.raises(PeerLost, match="worker .*(did not come|made no progress|took no)") as raised:
            train(f"{SECOND_A_ROW},faults='pause={victim}@step:2+1000'", strategy, timeout_s=20.0)
        assert raised.value.rank == victim
    with pytest.raises(PeerLost, match="worker 1 .*did not come for 10 s"):
        train("compute='row=1,1=50x'", timeout_s=10.0)
    with pytest.raises(PeerLost, match="is cut off"):
        train(f"{SECOND_A_ROW},faults='cut=host1@7.5s+3'")
    with pytest.raises(PeerLost, match="worker 0 .*left the group"):
        launch(lambda worker: worker.group.barrier() if worker.rank else None)


def test_replicas_are_gone_when_the_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the interpreter's next search for circles, until which the next run's would lie beside them."""
    monkeypatch.setattr(sim_engine, "COLLECT_AFTER_S", 0.0)
    gc.collect()
    gc.disable()
    before = {id(one) for one in gc.get_objects() if type(one) is Replica}  # another test's, in this process
    try:
        train()
        assert not [one for one in gc.get_objects() if type(one) is Replica and id(one) not in before]
    finally:
        gc.enable()


def test_a_dead_shard_ends_the_run_by_name_and_one_that_comes_back_costs_time_alone() -> None:
    plain = train(SECOND_A_ROW, "downpour:bound=0", servers=2)
    for what in ("restart", "pause"):
        late = train(f"{SECOND_A_ROW},faults='{what}=shard1@3.5s+4'", "downpour:bound=0", servers=2)
        assert same(plain, late)
        assert late.seconds == pytest.approx(plain.seconds + 3.5), what  # asked at 4 s, answered at 7.5 s
    with pytest.raises(PeerLost, match="shard 1.*is gone"):
        train(f"{SECOND_A_ROW},faults='kill=shard1@10s'", "downpour", servers=2)


class StopsAt(Callback):
    def on_step(self, event: Event) -> Any:
        return "stop" if event.step >= 5 else None


def test_max_seconds_are_virtual_and_a_callbacks_stop_is_obeyed_at_the_next_tick() -> None:
    given: dict[str, Any] = {"spec": "compute='row=0,step=1'", "task": task(epochs=100)}
    run = train(**given, max_seconds=9.5)
    assert (run.steps, run.seconds, run.info["stopped"]) == (11, 11.0, "max_seconds")
    for strategy in ("allreduce", "gossip", "downpour"):
        run = train(**given, strategy=strategy, callbacks=[StopsAt()])
        assert run.info["stopped"] == "callback"
        assert run.steps <= 7


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Dropout(0.4), nn.Linear(9, 3)).double()


def result(directory: Path) -> dict[str, Any]:
    """What a run directory says."""
    return dict(json.loads((directory / "result.json").read_text()))


def test_a_run_directory_holds_virtual_time(tmp_path: Path) -> None:
    run = train(f"{SECOND_A_ROW},network='latency=0.5'", run_dir=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    times = [event["time_s"] for event in events]
    assert times == sorted(times)
    assert max(times) == pytest.approx(run.seconds, abs=2.0)
    assert run.seconds > 26
    assert run.info["simulated"] == {"network": "latency=0.5", "compute": "row=1", "seed": "0"}
    assert result(tmp_path / "run")["seconds"] == run.seconds


def state_of_the_process() -> list[Any]:
    generator = np.random.get_state()
    return [
        torch.get_num_threads(),
        current(),
        torch.get_rng_state().tolist(),
        [part if isinstance(part, str | int | float) else part.tolist() for part in generator],
        random.getstate(),
        torch.is_grad_enabled(),
        sys.stdout,
        torch.save,
        open,
        torch.autograd.backward,
    ]


def test_nothing_is_left_and_the_next_run_is_the_same() -> None:
    """As in a notebook, where cells run again in one process; also after a run that failed."""
    threads, given = torch.get_num_threads(), task(model=dropping, train_data=rows(36))
    torch.set_num_threads(3)
    before = state_of_the_process()
    launch(lambda worker: (np.random.rand(worker.rank + 1), random.random(), torch.rand(3), worker.group.barrier()))
    assert state_of_the_process() == before
    first = train(task=given)
    with pytest.raises(WorkerFailed):
        train("faults='kill=1@step:2'")
    np.random.rand(), random.random(), torch.rand(1)
    second = train(task=given)
    assert same(first, second)
    np.random.set_state(("MT19937", np.array(before[3][1], dtype=np.uint32), *before[3][2:]))
    random.setstate(before[4])
    torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
    assert state_of_the_process() == before
    torch.set_num_threads(threads)


def test_a_given_module_holds_the_final_weights() -> None:
    """A function that gives one module to all workers gives each its own, as on engine local."""
    torch.manual_seed(0)
    given, shared = mlp(), mlp()
    shared.load_state_dict(given.state_dict())
    run = train(task=task(model=given))
    assert run.model is given
    assert torch.equal(flat(given), run.parameters)
    assert same(train(), run)
    assert same(train(task=task(model=lambda: shared)), run)


def own_loop() -> tuple[Tensor, float]:
    """A training script: four batches."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = mh.prepare(model, optimizer, [rows(70)] * 4)
    for batch in loader:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
    return flat(model), mh.worker().clock()


def test_prepared_scripts_take_virtual_time_and_many_of_them_end() -> None:
    """None waits inside autograd's engine, which keeps count of who is in it, up to about 60 deep."""
    for workers in (7, 70):
        ends = mh.launch(own_loop, workers=workers, engine=f"sim:{SECOND_A_ROW}")
        assert all(torch.equal(ends[0][0], end) for end, _ in ends)
        assert {seconds for _, seconds in ends} == {4 * 70 / workers}
    with pytest.raises(WorkerFailed, match="worker 2 .*at step 3"):
        mh.launch(own_loop, workers=7, engine=f"sim:{SECOND_A_ROW},faults='kill=2@step:3'")


def test_others_are_quiet_and_the_caller_is_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def program() -> str:
        worker = mh.worker()
        worker.group.barrier()
        print("I am", worker.rank)
        for name in ("saved", f"saved{worker.rank}"):
            torch.save(worker.rank, tmp_path / name)
        return str(worker.rank)

    assert mh.launch(program, workers=3, engine="sim", strategy="local-sgd") == ["0", "1", "2"]
    print("heard")
    torch.save(1, tmp_path / "after")
    shown = capsys.readouterr()
    assert shown.out == "I am 0\nheard\n"
    assert shown.err.count("print nothing to standard output") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "saved", "saved0", "saved1", "saved2"]
    assert torch.load(tmp_path / "saved") == 0


def test_the_strategy_of_a_launch_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is the last to end, and whether it was given as a string or not."""
    monkeypatch.delenv("MANYHANDS_STRATEGY", raising=False)

    def program() -> Any:
        mh.worker().driver.computed(3 - mh.worker().rank)
        return launched_strategy()

    for strategy in ("local-sgd:period=3", mh.LocalSGD(period=3)):
        assert mh.launch(program, workers=3, engine="sim", strategy=strategy) == [strategy] * 3
        assert launched_strategy() is None


def command(*arguments: str) -> Any:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(commands.app, ["train", "digits", *arguments], prog_name="manyhands", env=environment)


def test_the_command(tmp_path: Path) -> None:
    """Options of the command and of the spec string are the same; a profile has them, too."""
    common = ("-n", "3", "--max-steps", "3", "--log", "quiet", "--batch-size", "6")
    spec = "sim:network='latency=1ms,bandwidth=1Gbit',compute='row=1e-3,2=5x',faults='pause=1@step:2+1',seed=3"
    parts = ("--network", "latency=1ms,bandwidth=1Gbit", "--compute", "row=1e-3,2=5x")
    parts += ("--faults", "pause=1@step:2+1", "--sim-seed", "3")
    networks = {"local": SimNetworkSpec.parse("latency=2ms")}
    measured = Profile(networks=networks, compute=Compute.parse("row=0,step=1"), task="digits", workers=2)
    measured.save(tmp_path / "profile.json")
    results = []
    for options in (parts, ("--engine", spec), ("--profile", str(tmp_path / "profile.json"))):
        run_dir = tmp_path / f"{len(results)}"
        done = command(*common, *options, "--run-dir", str(run_dir))
        assert done.exit_code == 0, done.output
        assert "simulated" in done.output
        results.append(result(run_dir))
    apart, together, profiled = results
    assert apart["seconds"] == together["seconds"]
    assert apart["info"]["simulated"] == together["info"]["simulated"]
    assert apart["seconds"] > 1 + 2 * 2 * 5e-3  # worker 2 waits for the pause of worker 1
    assert (profiled["info"]["engine"], round(profiled["seconds"])) == ("sim", 3)
    refused = command("-n", "2", "--faults", "kill=9@step:1", "--run-dir", str(tmp_path / "run"))
    assert refused.exit_code == 2
    assert "the last worker of this run is 1" in refused.output
