"""train() on one worker, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
import plain
from manyhands.callbacks.base import Callback
from manyhands.checkpoint.checkpoints import SavedTensors
from manyhands.events import Event
from plain import task


def train(given: Any, **options: Any) -> mh.Run:
    return mh.train(given, **{"threads_per_worker": 1, **options})


def cosine(optimizer: torch.optim.Optimizer, total: int = 8) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("strategy", ["solo", "allreduce", "local-sgd:period=3"])
def test_one_worker_is_a_plain_loop_bit_for_bit(strategy: str) -> None:
    """CASE 1: through train(), with a schedule and clipping; dropout draws what a plain loop draws."""
    for optimizer, model in (("momentum", plain.mlp), ("adamw", plain.mlp), ("adamw", dropping)):
        make = plain.OPTIMIZERS[optimizer]
        options: dict[str, Any] = {"schedule": cosine, "clip_norm": 0.1, "batch_size": 12, "epochs": 2}
        expected, _ = plain.plain_loop(model, make, plain.rows(39), **options)
        run = train(task(model=model, optimizer=make, validation_data=plain.rows(5), **options), strategy=strategy)
        assert torch.equal(run.parameters, plain.flat(expected)), (optimizer, model)
        assert (run.steps, run.rows) == (8, {"total": 78, "workers": [78], "unused": 0})


def test_a_given_module_holds_the_final_weights_and_memory_of_its_own(tmp_path: Path) -> None:
    """Of the run, and of the finished one; the run's parameters stay, whatever becomes of the model."""
    for options in ({}, {"workers": 2, "engine": "sim", "run_dir": tmp_path / "run", "resume": True}):
        for _ in range(2):
            model = plain.mlp()
            before = plain.flat(model).clone()
            run = train(task(model=model), **options)
            assert run.model is model
            assert torch.equal(plain.flat(model), run.parameters)
            assert not torch.equal(before, run.parameters)
            assert all(p.untyped_storage().nbytes() == p.numel() * 8 for p in model.parameters())
    after = run.parameters.clone()
    train(task(model=model))
    assert torch.equal(run.parameters, after)
    assert not torch.equal(plain.flat(model), after)


def test_one_worker_computes_with_the_callers_threads() -> None:
    """CASE 1: so that bits are those of the caller's own loop. They and the caller's random state are left alone."""
    draws, threads, before = [], [], torch.get_num_threads()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return plain.cross_entropy(model, batch)

    torch.set_num_threads(2)
    for trains in (False, True):
        torch.manual_seed(5)
        np.random.seed(5)
        if trains:
            mh.train(task(loss=loss, validation_data=plain.rows(5)), max_steps=2)
        draws.append((torch.rand(1), np.random.rand()))
    threads.append(torch.get_num_threads())
    torch.set_num_threads(before)
    assert draws[0] == draws[1]
    assert set(threads) == {2}


def test_fields_override_and_no_task_object_is_needed() -> None:
    fields = {"model": plain.mlp, "loss": plain.cross_entropy, "optimizer": plain.OPTIMIZERS["sgd"]}
    assert mh.train(**fields, train_data=plain.rows(20), batch_size=8).steps == 3
    for options, steps in (({"epochs": 3}, 12), ({"batch_size_per_worker": 39}, 2), ({"max_steps": 5}, 5)):
        assert train(task(), **options).steps == steps


def test_metrics_are_means_over_all_rows_of_the_final_parameters() -> None:
    test = plain.rows(17, seed=4)
    run = train(task(test_data=test, validation_data=test))
    with torch.no_grad():
        expected = plain.cross_entropy(run.model, test).item()
    assert run.metrics["test_loss"] == pytest.approx(expected, abs=1e-12)
    assert run.metrics["validation_loss"] == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(run.predict(test[0]), run.model(test[0]).detach())  # in row order


def test_supervised_counts_accuracy_and_what_the_criterion_counts() -> None:
    x, y = plain.rows(20)
    y[:5] = -100
    criterion = nn.CrossEntropyLoss(weight=plain.CLASS_WEIGHTS)
    supervised = mh.Task.supervised(
        model=plain.mlp,
        optimizer=plain.OPTIMIZERS["sgd"],
        criterion=criterion,
        train_data=(x, y),
        test_data=(x, y),
        batch_size=7,
    )
    run = train(supervised)
    assert run.metrics["test_loss"] == pytest.approx(criterion(run.model(x), y).item(), abs=1e-12)
    first = y[torch.as_tensor(mh.epoch_order(len(y), 0, 0)[:7])]
    assert run.history[0]["weight"] == pytest.approx(float(plain.CLASS_WEIGHTS[first[first >= 0]].sum()))


class Watch(Callback):
    """Remembers what it hears, and says stop at an event of a type and number."""

    def __init__(self, at: tuple[str, int] = ("", 0)) -> None:
        self.heard: list[Event] = []
        self.at = at

    def _note(self, event: Event) -> str | None:
        self.heard.append(event)
        return "stop" if (event.type, sum(e.type == event.type for e in self.heard)) == self.at else None

    on_step = on_epoch = on_validation = _note


def test_callbacks_hear_all_and_may_stop() -> None:
    for options, steps, validated in (  # also where max_steps ends the run
        ({}, 8, [3, 7]),
        ({"validate_every": 3}, 8, [2, 5, 7]),
        ({"validate_every": 7, "max_steps": 7}, 7, [6]),
    ):
        watch = Watch()
        train(task(validation_data=plain.rows(5)), callbacks=[watch], **options)
        ticks = {kind: [event.tick for event in watch.heard if event.type == kind] for kind in ("step", "validation")}
        assert ticks == {"step": list(range(steps)), "validation": validated}, options
        assert sum(event.type == "epoch" for event in watch.heard) == 2
    run = train(task(epochs=50), callbacks=[Watch(("epoch", 3))])
    assert (run.steps, run.info["stopped"]) == (12, "callback")
    with pytest.raises(ZeroDivisionError):
        train(task(), callbacks=[Raising("on_epoch", ZeroDivisionError)])


class Raising(Callback):
    """Raises `error` in the method of this name, at step 3 or later."""

    def __init__(self, method: str, error: type[BaseException]) -> None:
        def hear(event: Event) -> None:
            if event.step >= 3:
                raise error("no such registry")

        setattr(self, method, hear)


def test_early_stopping_ends_and_best_is_kept() -> None:
    """The validation loss falls, then rises, with labels that have nothing to do with the rows' own."""
    data, wrong = plain.rows(39), (plain.rows(39)[0], (plain.rows(39)[1] + 1) % 3)
    watch = Watch()
    given = task(train_data=data, validation_data=wrong, epochs=40)
    run = train(given, callbacks=[mh.EarlyStopping(patience=2), watch], keep="best:validation_loss")
    losses = [event.values["metrics"]["validation_loss"] for event in watch.heard if event.type == "validation"]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2 < 40
    assert run.metrics["validation_loss"] == losses[best]
    with torch.no_grad():
        assert plain.cross_entropy(run.model, wrong).item() == pytest.approx(losses[best], abs=1e-12)


def test_skipped_steps_are_counted_and_raising_names_the_step() -> None:
    x, y = plain.rows(36)
    x[3] = float("nan")
    given = task(train_data=(x, y), epochs=1, shuffle=False)
    for workers, engine in ((1, "local"), (3, "sim")):  # whose NaN it is, all see it alike
        options = {"workers": workers, "engine": engine}
        with pytest.raises(mh.ManyhandsError, match="gradient of step 0 is not finite"):
            train(given, **options)
        run = train(given, nonfinite="skip", **options)
        assert (run.steps, run.rows["unused"]) == (2, 12), workers
        assert run.parameters.isfinite().all()


def test_max_seconds_stops_and_resume_goes_on(tmp_path: Path) -> None:
    run = train(task(epochs=10**6), max_seconds=0.2, run_dir=tmp_path / "run")
    assert run.info["stopped"] == "max_seconds"
    assert run.steps > 0
    assert train(task(epochs=10**6), max_seconds=0.2, run_dir=tmp_path / "run", resume=True).steps > run.steps


def test_a_rate_that_is_a_tensor_is_recorded() -> None:
    run = train(task(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1))))
    assert run.history[0]["rate"] == pytest.approx(0.1)


# -- the run directory -----------------------------------------------------------------------------------------------


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_more_epochs_go_on_from_a_finished_run_along_the_new_schedule(tmp_path: Path) -> None:
    """OneCycleLR refuses more steps than it was made for; the new schedule is wound on to the same step instead."""

    def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)

    for number, schedule in enumerate((None, one_cycle, torch.optim.lr_scheduler.CosineAnnealingLR)):
        whole = train(task(epochs=4, schedule=schedule))
        train(task(epochs=2, schedule=schedule), run_dir=tmp_path / f"{number}")
        resumed = train(task(epochs=4, schedule=schedule), run_dir=tmp_path / f"{number}", resume=True)
        ours, theirs = ([row["rate"] for row in run.history[8:]] for run in (resumed, whole))
        assert len(ours) == 8
        assert ours == pytest.approx(theirs, rel=1e-12)
        assert schedule is not None or torch.equal(resumed.parameters, whole.parameters)


def test_another_option_of_the_strategy_or_clipping_is_used_and_told_when_it_is_resumed(tmp_path: Path) -> None:
    """A new rate, too."""

    def given(rate: float, **fields: Any) -> Any:
        return task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), **fields)

    options = {"run_dir": tmp_path / "run", "resume": True}
    train(given(0.5, epochs=1), strategy="local-sgd:period=2", **options)
    resumed = train(given(0.25, epochs=2, clip_norm=0.5), strategy="local-sgd:period=3", **options)
    assert [row["rate"] for row in resumed.history] == [0.5] * 4 + [0.25] * 4
    warnings = " ".join(resumed.info["warnings"])
    assert "lr was 0.5 and is 0.25" in warnings
    assert "From step 4 on" in warnings
    assert "strategy was local-sgd:period=2 and is local-sgd:period=3" in warnings
    assert "clip_norm was None and is 0.5" in warnings
    again = train(given(0.25, epochs=3, clip_norm=0.5), strategy="local-sgd:period=3", **options)
    assert again.info["warnings"] == []


def test_a_callback_that_raises_in_on_end_costs_neither_model_nor_result(tmp_path: Path) -> None:
    whole = train(task())
    with pytest.raises(mh.CallbackFailed, match="RuntimeError in on_end: no such registry") as raised:
        train(task(), run_dir=tmp_path / "run", callbacks=[Raising("on_end", RuntimeError)])
    assert str(tmp_path / "run") in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    for kept in (raised.value.run, train(task(), run_dir=tmp_path / "run", resume=True)):
        assert torch.equal(kept.parameters, whole.parameters)
        assert kept.metrics == whole.metrics


def test_a_callback_that_exits_loses_no_rows(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(task(), run_dir=tmp_path / "run", callbacks=[Raising("on_step", SystemExit)])
    assert [event["tick"] for event in events(tmp_path / "run") if event["type"] == "step"] == [0, 1, 2]
    assert events(tmp_path / "run")[-1]["values"]["error"] == "SystemExit"


def test_replicas_are_compared_where_the_strategy_keeps_them_equal() -> None:
    with pytest.raises(mh.Unsupported, match="gossip does not keep replicas equal"):
        train(task(), strategy="gossip", check_replicas_every=5)
    assert train(task(), check_replicas_every=2).steps  # one worker has nobody to compare with


def test_resuming_something_else_is_refused(tmp_path: Path) -> None:
    train(task(), run_dir=tmp_path / "run")
    other = {"model": lambda: nn.Linear(5, 3).double()}
    for fields, options, message in (
        ({"epochs": 3, "batch_size": 6}, {}, "batch_size was 12 and is 6"),
        ({"epochs": 3, "train_data": plain.rows(38)}, {}, "rows was 39 and is 38"),
        ({"epochs": 3}, {"strategy": "local-sgd"}, "strategy was allreduce and is local-sgd"),
        ({}, {"strategy": "local-sgd"}, "finished run .* used strategy allreduce, not local-sgd"),
        (other, {}, "finished run's parameters are not this model's"),
        ({"epochs": 3, **other}, {}, "parameters are not this model's"),
    ):
        with pytest.raises(mh.BadInput, match=message):
            train(task(**fields), run_dir=tmp_path / "run", resume=True, **options)


def test_bad_input_is_one_clear_error() -> None:
    validated = {"validation_data": plain.rows(3)}
    both = {"partition": "fixed", "workers": 2}
    made = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    rows = torch.utils.data.TensorDataset(*plain.rows(39))
    for options, message in [
        ({"workers": 0}, "workers must be"),
        ({"workers": 13}, "batch_size=12 leaves some of the 13 workers without a row"),
        ({"workers": 2, "strategy": "solo"}, "solo runs on one worker"),
        ({"strategy": "ddp"}, "what others call ddp is 'allreduce'"),
        *(({option: -1}, f"{option} must be") for option in ("validate_every", "max_seconds", "check_replicas_every")),
        ({"engine": "yarn"}, "no engine 'yarn'"),
        ({"keep": "best:max:beauty", **validated}, "no metric 'beauty': give one of validation_loss"),
        ({"keep": "best:validation_loss"}, "keep.*needs validation_data"),
        ({"nonfinite": "ignore"}, "nonfinite must be"),
        ({"partition": "even"}, 'partition must be "none" or "fixed"'),
        ({"partition": "fixed", "order": lambda epoch: range(39)}, "so does the task's order"),
        ({"partition": "fixed", "workers": 4, "train_data": plain.rows(3)}, "there are 3 for 4 workers"),
        ({"partition": "fixed", "train_data": lambda: iter(rows)}, "a stream has no row numbers"),
        (
            {"partition": "fixed", "train_data": torch.utils.data.DataLoader(rows, batch_size=12)},
            "a DataLoader's sampler names them",
        ),
        ({**both, "survive": "max_losses=1"}, "with partition=fixed each worker has rows"),
        ({"resume": True}, "needs a run directory"),
        ({"run_dir": "/proc/none"}, "cannot use the run directory"),
        ({"device": "gpu"}, "no device 'gpu'"),
        *(({"threads_per_worker": threads}, "threads_per_worker must be") for threads in (0, 10**30)),
        *(({"timeout_s": seconds}, "timeout_s must be") for seconds in (1e30, math.nan)),
        *(({"seed": seed}, "seed must be") for seed in (-1, 1 << 64)),
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "LBFGS"),
        ({"epochs": 0}, "epochs must be"),
        ({"batch_size": 4, "batch_size_per_worker": 4}, "both given"),
        ({"precision": "fp8"}, "no precision 'fp8'"),
        ({"learning_rate": 0.1}, "no field 'learning_rate'"),
        ({"optimizer": made}, "SGD that is made already"),
        ({"train_data": (torch.zeros(0, 5), torch.zeros(0))}, "no rows|length 0|empty"),
        ({"train_data": (torch.zeros(3, 5), torch.zeros(4))}, "3.*4"),
        ({"train_data": 7}, "cannot read data"),
        ({"model": nn.Linear(1, 1).requires_grad_(False)}, "no trainable parameters"),
        ({"model": lambda: 3}, "returned int"),
        ({"schedule": cosine, "train_data": lambda: (row for row in [])}, "a schedule needs the number of steps"),
    ]:
        with pytest.raises(mh.BadInput, match=f"(?s){message}") as caught:
            train(task(), **options)
        assert caught.value.exit_code == 2, options


def test_the_model_is_made_at_its_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(plain.mlp())
        return made[-1]

    run = train(task(model=model), run_dir=tmp_path / "run")
    trained = len(made)
    assert run.summary()
    assert len(run.answer.shapes) == len(list(plain.mlp().parameters()))
    assert len(made) == trained
    assert run.model is run.models[0] is made[-1]
    assert len(made) == trained + 1

    read: list[str] = []
    whole = SavedTensors.__getitem__
    monkeypatch.setattr(SavedTensors, "__getitem__", lambda self, name: read.append(name) or whole(self, name))
    again = train(task(model=model), run_dir=tmp_path / "run", resume=True)
    before = len(read)
    assert torch.equal(again.parameters, run.parameters)
    assert len(read) > before
    assert again.summary() == run.summary()
