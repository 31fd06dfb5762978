"""A replica's state through a checkpoint, and back."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import plain
from manyhands.checkpoint import checkpoints, run_state
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput, Unsupported
from manyhands.replica.replica import Replica
from manyhands.strategies.base import State
from manyhands.strategies.ensemble import EnsembleState
from manyhands.strategies.local_sgd import LocalSGDState
from manyhands.testing.threads import together
from manyhands.worker import Worker
from refusals import refused

TOTAL = 12


class Decay:
    """A callable with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**step


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.MultiStepLR(optimizer, [2, 4, 6])], milestones=[2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [3, 5, 9])], optimizer=optimizer
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5, 9]),
    "sequential": sequential,
    "chained": chained,
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=TOTAL + 1),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "callable": lambda o: lr_scheduler.LambdaLR(o, Decay()),
}


def made(optimizer: Any = plain.OPTIMIZERS["momentum"], schedule: Any = None, group: Any = None) -> Replica:
    torch.manual_seed(1)
    return Replica.of(plain.mlp(), optimizer, group=group or SoloGroup(), schedule=schedule)


def step(replica: Replica, times: int = 1) -> list[float]:
    """Steps with a gradient that depends on the step alone; the rates they were taken at."""
    rates = []
    for _ in range(times):
        rates.append(float(replica.optimizer.param_groups[0]["lr"]))
        for i, p in enumerate(replica.trainable):
            p.grad = torch.full_like(p, 0.1 * (replica.step + i + 1))
        replica.weight = 1.0
        replica.apply()
    return rates


def saved(folder: Path, replica: Replica, state: State | None = None) -> Checkpoint:
    tensors, values = run_state.capture(replica, state or State(), {"total": TOTAL})
    path = checkpoints.save(folder, replica.step, SoloGroup(), tensors, values)
    return Checkpoint(path, replica.step, 1)


def resumed(kept: Checkpoint, replica: Replica) -> Replica:
    run_state.restore(kept, replica, State(), 0, 1, TOTAL)
    return replica


def same(a: Replica, b: Replica) -> bool:
    states = [[r.optimizer.state[p] for p in r.trainable] for r in (a, b)]
    return a.parameters.equal(b.parameters) and all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(*states, strict=True)
    )


def test_a_dict_with_keys_that_are_no_strings_comes_back_at_any_depth() -> None:
    value = {"a": [{"b": {1: {(2, "x"): 0.5}}}], "f": len, 3: np.float32(0.5)}
    assert run_state._unpacked(run_state._plain(value)) == {"a": [{"b": {1: {(2, "x"): 0.5}}}], 3: 0.5}


@pytest.mark.parametrize("name", ["adamw", "adagrad", "nadam", "adafactor"])
def test_every_optimizers_state_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """CASE 19"""
    others = {"nadam": torch.optim.NAdam, "adafactor": torch.optim.Adafactor}
    make = plain.OPTIMIZERS.get(name) or (lambda m: others[name](m.parameters()))
    first = made(make)
    step(first, 3)
    again = resumed(saved(tmp_path, first), made(make))
    for _ in range(2):
        assert same(first, again)
        step(first, 3)
        step(again, 3)


def test_group_values_that_json_cannot_hold_do_not_stop_a_checkpoint(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        group = {
            "params": list(model.parameters()),
            "lr": np.float32(0.5),
            "decay": lambda step: step,
            "hooks": [len],
            "limits": np.array([1.0, 2.0]),
        }
        return torch.optim.SGD([group], lr=0.1)

    first = made(make)
    step(first)
    again = made(make)
    decay = again.optimizer.param_groups[0]["decay"]
    again.optimizer.param_groups[0]["lr"] = np.float32(9)
    group = resumed(saved(tmp_path, first), again).optimizer.param_groups[0]
    assert (group["lr"], type(group["lr"])) == (0.5, np.float32)
    assert (group["decay"], group["hooks"]) == (decay, [len])
    assert group["limits"].tolist() == [1.0, 2.0]


def test_state_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    replica = made()
    step(replica)
    state = replica.optimizer.state[replica.trainable[0]]
    state["seen"] = np.float32(0.5)
    assert resumed(saved(tmp_path, replica), made()).optimizer.state[replica.trainable[0]] == {}
    state["history"] = [torch.zeros(1)]
    refused(r"SGD keeps 'history' of 0\.weight as a list", saved, tmp_path, replica, kind=Unsupported)


def test_a_step_that_the_kernel_counts_on_the_device_goes_there() -> None:
    p = torch.empty(2, 3, device="meta")
    count = torch.tensor(3.0)
    assert run_state._placed("step", count, p, True).device.type == "meta"
    assert run_state._placed("step", count, p, False).device.type == "cpu"
    assert run_state._placed("exp_avg", torch.zeros(2, 3), p, False).device.type == "meta"
    fused = made(lambda m: torch.optim.AdamW(m.parameters(), fused=True))
    assert run_state.counts_on_device(fused.optimizer) == set(fused.trainable)


def test_state_lies_in_its_parameters_memory_format(tmp_path: Path) -> None:
    def replica() -> Replica:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return Replica.of(model, plain.OPTIMIZERS["momentum"], group=SoloGroup())

    first = replica()
    step(first)
    again = resumed(saved(tmp_path, first), replica())
    weight = again.trainable[0]
    assert again.optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()


def written(folder: Path, states: list[State], values: list[float]) -> Checkpoint:
    """A checkpoint by len(states) ranks whose parameters are all `values[rank]`."""

    def write(worker: Worker) -> None:
        replica = made(group=worker.group)
        replica.set_parameters(replica.parameters.clone().fill_(values[worker.rank]))
        tensors, numbers = run_state.capture(replica, states[worker.rank], {"total": TOTAL})
        checkpoints.save(folder, 1, worker.group, tensors, numbers)

    together(len(states), write)
    return Checkpoint(folder / "step-00000001", 1, len(states))


def go_on(kept: Checkpoint, state: State, size: int = 1) -> tuple[Replica, Any]:
    replica = made()
    return replica, run_state.restore(kept, replica, state, 0, size, TOTAL)[0]


def test_an_open_window_is_closed_by_the_weighted_mean(tmp_path: Path) -> None:
    for number, (weights, mean) in enumerate(
        [([1.0, 1.0, 2.0], 2.25), ([0.0, 0.0, 0.0], 2.0), ([0.0, 4.0, 0.0], 2.0), ([3.0, 0.0, 1.0], 1.5)]
    ):
        states: list[State] = [LocalSGDState(ticks=2, weight=weight, grad_mask=1) for weight in weights]
        replica, state = go_on(written(tmp_path / str(number), states, [1.0, 2.0, 3.0]), LocalSGDState())
        close = torch.allclose(plain.flat(replica.model), torch.tensor(mean, dtype=torch.float64), atol=1e-15)
        assert close, (weights, mean)
        assert state == LocalSGDState()
    replica, _ = go_on(written(tmp_path / "equal", [State()] * 3, [0.1] * 3), State())  # equal ones as they are
    assert torch.equal(plain.flat(replica.model), torch.full_like(plain.flat(replica.model), 0.1))


def test_an_ensemble_does_not_go_on_with_another_number_and_nothing_has_changed(tmp_path: Path) -> None:
    kept = written(tmp_path, [EnsembleState()] * 3, [1.0, 2.0, 3.0])
    replica = made()
    before = replica.parameters.clone()
    with pytest.raises(Unsupported, match="an ensemble of 3 cannot go on with 2 workers.*workers=3"):
        run_state.restore(kept, replica, EnsembleState(), 0, 2, TOTAL)
    assert replica.parameters.equal(before)


@dataclass(kw_only=True)
class Remembered(State):
    one: Any = None
    many: Any = field(default_factory=lambda: torch.zeros(2, 3))
    ticks: int = 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_state_of_the_strategy_is_named_and_nothing_has_changed(ranks: int, tmp_path: Path) -> None:
    for number, (was, problem) in enumerate(
        [
            (
                Remembered(many=torch.ones(2, 2)),
                r"does not fit the checkpoint: many was \[2, 2\] and is now \[2, 3\]\.",
            ),
            (Remembered(many=5.0, ticks=1), r"many was missing and is now \[2, 3\]"),
            (
                LocalSGDState(ticks=2, weight=1.0),
                r"weight was 1\.0 and does not exist now; .*many was missing and is now \[2, 3\]",
            ),
        ]
    ):
        kept = written(tmp_path / str(number), [was] * ranks, [1.0] * ranks)
        replica, state = made(), Remembered()
        before = replica.parameters.clone()
        refused(problem, run_state.restore, kept, replica, state, 0, 1, TOTAL, case=was)
        assert replica.parameters.equal(before)
        assert (state.ticks, float(state.many.sum())) == (0, 0.0)


def test_what_may_be_none_may_be_missing_where_the_number_of_ranks_is_another(tmp_path: Path) -> None:
    """One worker alone remembers nothing of what it sent."""
    one = torch.ones(1)
    alone = written(tmp_path / "1", [Remembered()], [1.0])
    refused(r"one was missing and is now \[1\]", go_on, alone, Remembered(one=one))
    assert go_on(alone, Remembered(one=one), size=2)[1].one.tolist() == [1.0]
    several = written(tmp_path / "2", [Remembered(one=one)] * 2, [1.0] * 2)
    assert go_on(several, Remembered())[1].one is None
    refused(r"one was \[1\] and is now \[2\]", go_on, several, Remembered(one=torch.ones(2)))


# -- a task that says other hyperparameters than it did ----------------------------------------------------------------


def sgd(**settings: Any) -> Any:
    given = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01} | settings
    return lambda model: torch.optim.SGD(model.parameters(), **given)


def resumed_with(folder: Path, first: Replica, again: Replica, at: int = 4) -> tuple[Replica, list[str]]:
    """`again` as it goes on from where `first` is after so many steps; and what it was warned of."""
    output, told = run_state.declared(first), list[str]()
    step(first, at)
    tensors, values = run_state.capture(first, State(), {"total": TOTAL, "tick": at}, output)
    path = checkpoints.save(folder, at, SoloGroup(), tensors, values)
    run_state.restore(Checkpoint(path, at, 1), again, State(), 0, 1, TOTAL, told.append)
    return again, told


def halving(size: int) -> Any:
    return lambda optimizer: lr_scheduler.StepLR(optimizer, size)


@pytest.mark.parametrize("kind", [None, *SCHEDULES])
def test_a_task_that_says_the_same_goes_on_without_a_warning(kind: str | None, tmp_path: Path) -> None:
    """CASE 19"""
    schedule = SCHEDULES.get(kind or "")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step", UserWarning)  # SequentialLR's own
        for at in (1, 4):
            first = made(sgd(), schedule=schedule)
            again, told = resumed_with(tmp_path / str(at), first, made(sgd(), schedule=schedule), at)
            assert told == []
            rates = step(first, TOTAL - at)
            assert step(again, TOTAL - at) == rates
            assert len(set(rates)) > 1 or schedule is None
            assert same(first, again), at


def test_what_moved_a_rate_while_it_trained_goes_on_where_the_task_says_the_same(tmp_path: Path) -> None:
    """A callback of Keras, say, or an optimizer that counts in its groups."""
    first = made(sgd())
    output = run_state.declared(first)
    first.optimizer.param_groups[0] |= {"lr": 0.125, "k": 7}
    tensors, values = run_state.capture(first, State(), {"total": TOTAL, "tick": 0}, output)
    again = made(sgd(momentum=0.5))
    told: list[str] = []
    kept = Checkpoint(checkpoints.save(tmp_path, 1, SoloGroup(), tensors, values), 1, 1)
    run_state.restore(kept, again, State(), 0, 1, TOTAL, told.append)
    group = again.optimizer.param_groups[0]
    assert (group["lr"], group["k"], group["momentum"]) == (0.125, 7, 0.5)
    assert "momentum was 0.9 and is 0.5" in told[0]


def test_the_tasks_hyperparameters_win_and_a_line_says_which(tmp_path: Path) -> None:
    usual = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "nesterov": False}
    for name, value, line in [
        ("lr", 0.25, "lr was 0.5 and is 0.25"),
        ("momentum", 0.5, "momentum was 0.9 and is 0.5"),
        ("weight_decay", 0.0, "weight_decay was 0.01 and is 0"),
        ("nesterov", True, "nesterov was False and is True"),
    ]:
        first = made(sgd())
        again, (told,) = resumed_with(tmp_path / name, first, made(sgd(**{name: value})))
        assert same(first, again)  # momentum's buffers go on
        group = again.optimizer.param_groups[0]
        assert {key: group[key] for key in usual} == usual | {name: value}
        assert line in told
        assert "To keep the old values" in told


def test_a_schedule_stands_where_it_would_had_the_task_said_so_from_the_start(tmp_path: Path) -> None:
    for number, (before, after, rate, line) in enumerate(
        [
            ((0.5, halving(2)), (0.25, halving(2)), 0.0025, "lr was 0.5 and is 0.25"),
            ((0.5, halving(2)), (0.5, halving(3)), 0.05, "the schedule's step_size was 2 and is 3"),
            ((0.5, halving(2)), (0.5, None), 0.5, "the schedule's type was StepLR and is none"),
            ((0.5, None), (0.5, halving(2)), 0.005, "the schedule's type was none and is StepLR"),
            ((0.5, chained), (0.5, halving(2)), 0.005, "the schedule's type was ChainedScheduler and is StepLR"),
            ((0.5, chained), (0.25, chained), None, "lr was 0.5 and is 0.25"),
        ]
    ):
        first = made(sgd(lr=before[0]), schedule=before[1])
        given = made(sgd(lr=after[0]), schedule=after[1])
        again, told = resumed_with(tmp_path / str(number), first, given)
        fresh = made(sgd(lr=after[0]), schedule=after[1])
        step(fresh, 4)
        assert step(again, 3) == step(fresh, 3), line
        if rate is not None:
            assert fresh.optimizer.param_groups[0]["initial_lr" if after[1] else "lr"] == after[0]
            assert step(fresh)[0] <= rate, line
        assert line in told[0]


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not fit the checkpoint: AdamW .*, and the checkpoint has SGD"):
        resumed_with(tmp_path, made(sgd()), made(plain.OPTIMIZERS["adamw"]))
