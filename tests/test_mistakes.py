"""What people get wrong in their first hour ends in one clear line, before anything starts where that can be known."""

import dataclasses
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Subset, TensorDataset
from typer.testing import CliRunner, Result

import manyhands as mh
from manyhands.cli import commands
from manyhands.engines.local.engine import Local
from manyhands.errors import is_users
from manyhands.own_loop.launch import run_script
from manyhands.recording.run import Run
from manyhands.strategies.base import State

ROWS = (torch.randn(32, 4), torch.arange(32) % 3)


def net() -> nn.Module:
    return nn.Linear(4, 3)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def task(**fields: Any) -> mh.Task:
    given = {"model": net, "loss": loss, "optimizer": sgd, "train_data": ROWS, "batch_size": 8}
    return mh.Task(**(given | fields))


def train(given: mh.Task | None = None, **options: Any) -> Run:
    return mh.train(given or task(), **({"workers": 1} | options))


def one_line(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(mh.BadInput, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


OTHERS = net()
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": torch.optim.SGD}, r"not the class SGD.*SGD\(model.parameters\(\), lr=\.\.\.\)"),
    ({"optimizer": partial(torch.optim.Adam, lr=0.1)}, r"class Adam.*model.parameters\(\), lr=0.1"),
    ({"optimizer": sgd(OTHERS)}, r"made already.*lambda model: torch.optim.SGD\(model.parameters"),
    ({"loss": nn.MSELoss()}, r"MSELoss is a criterion.*model\(batch\[0\]\).*Task.supervised"),
    ({"loss": nn.MSELoss}, "MSELoss is a criterion"),
    ({"loss": F.cross_entropy}, "cross_entropy is a criterion"),
    ({"evaluate": nn.L1Loss()}, "evaluate must be a function of .model, batch."),
    ({"loss": lambda model, x, y: 0}, "the lambda does not take these arguments"),
    ({"model": nn.Linear}, r"the class Linear does not take no arguments.*model=lambda: Linear\("),
    ({"model": "resnet18"}, "model must be an nn.Module, or a function of .., not 'resnet18'"),
    ({"schedule": lambda optimizer: None}, r"schedule must be a function of \(optimizer, total_steps\)"),
    ({"schedule": lr_scheduler.StepLR}, r"class StepLR.*StepLR\(optimizer, \.\.\.\)"),
    ({"schedule": lr_scheduler.StepLR(sgd(OTHERS), 1)}, "StepLR that is made already.*lambda optimizer, total_steps"),
    ({"worker_callback": mh.Progress()}, r"train\(callbacks=\[\.\.\.\]\)"),
    ({"clip_norm": "1.0"}, "clip_norm must be a number above 0, not '1.0'"),
    ({"loader_processes": "2"}, "loader_processes must be a whole number"),
    ({"shuffle": "no"}, "shuffle must be True or False, not 'no'"),
    ({"name": 3}, "name must be a text, not 3"),
    ({"train_data": None}, "train_data is missing"),
    ({"train_data": None, "model": nn.Identity}, "train_data is missing"),
    ({"order": [2, 1, 0]}, r"order must be a function of \(epoch\), not \[2, 1, 0\]"),
    ({"collate": 1}, r"collate must be a function of \(rows\), not 1"),
]


def test_a_field_of_a_task() -> None:
    for fields, says in FIELDS:
        one_line(says, partial(task, **fields))


def test_a_schedulers_class_whose_second_argument_is_the_number_of_steps_is_right() -> None:
    run = train(task(schedule=lr_scheduler.CosineAnnealingLR))
    assert [row["rate"] for row in run.history][-1] == pytest.approx(0, abs=1e-12)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"callbacks": [mh.EarlyStopping]}, r"not the class EarlyStopping: make one, EarlyStopping\("),
    ({"callbacks": [print]}, "objects of manyhands.Callback .*, not the function print"),
    ({"callbacks": 3}, "callbacks must be a list of manyhands.Callback objects, not 3"),
    ({"callbacks": "tensorboard"}, "callbacks must be a list"),
    ({"callbacks": mh.EarlyStopping()}, "EarlyStopping watches.*no validation_data"),
    ({"device": "cuda:1"}, "torch sees .* here"),
    ({"device": "cuda:1", "workers": 2}, "torch sees .* here"),
    ({"workers": "2"}, "workers must be a whole number of at least 1, not '2'"),
    ({"timeout_s": "9"}, "timeout_s must be a positive number of seconds.*not '9'"),
    ({"max_seconds": "9"}, "max_seconds must be a positive number of seconds, not '9'"),
    ({"keep": None}, "keep must be .*, not None"),
    ({"validate_every": [1]}, r"validate_every must be .*, not \[1\]"),
    ({"run_dir": 3}, "a directory must be given as a string or a pathlib.Path, not 3"),
    ({"run_dir": "a" * 300}, "File name too long"),
    ({"run_dir": __file__}, "run directory .*test_mistakes.py is a file"),
]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="cuda:1 is there")
def test_an_option_of_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options, says in OPTIONS:
        one_line(says, partial(train, **({"run_dir": tmp_path / "runs" / "first"} | options)))
        assert not list(tmp_path.iterdir()), says


def plateau(metric: str | None = None, **options: Any) -> Callable[..., Any]:
    def make(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **options)
        return scheduler if metric is None else (scheduler, metric)

    return make


JUDGED = {"validation_data": ROWS}
RETURNS: list[tuple[dict[str, Any], str]] = [
    ({"loss": lambda model, batch: None}, "not None: return what was computed"),
    ({"loss": lambda model, batch: loss(OTHERS, batch)}, "depends on no parameter of the model that it is given"),
    ({"loss": lambda model, batch: model(batch[0]).sum(1)}, r"not a Tensor of shape \[8\]: average"),
    ({"loss": lambda model, batch: loss(model, batch).item()}, r"without \.item\(\)"),
    (
        {"optimizer": lambda model: sgd(OTHERS)},
        r"2 trainable parameters not of the model \(the first of shape \[3, 4\]\)",
    ),
    ({"evaluate": loss} | JUDGED, "must return its metrics by name"),
    ({"evaluate": lambda model, batch: {"right": batch[1].sum()}} | JUDGED, "metric 'right' is a whole number.*mean"),
    (
        {"evaluate": lambda model, batch: {"right": batch[1] == 0}} | JUDGED,
        "'right' must be one number.*Tensor of shape",
    ),
    ({"schedule": lambda optimizer, total_steps: None}, "must return a scheduler"),
    ({"schedule": plateau()}, "stepped on 'validation_loss', and there is no validation"),
    (
        {"schedule": plateau("validation_accuracy")} | JUDGED,
        "'validation_accuracy', and validation reported validation_loss",
    ),
]


def test_what_a_function_of_the_task_returns(tmp_path: Path) -> None:
    """It is known once a worker calls it. The run directory is gone, and the next try may use its name."""
    for workers, cases in ((1, RETURNS), (2, RETURNS[:1])):
        for fields, says in cases:
            one_line(says, partial(train, task(**fields), workers=workers, run_dir=tmp_path / "runs" / "first"))
            assert not list(tmp_path.iterdir()), says


def test_a_refused_run_leaves_what_others_put_beside_it(tmp_path: Path) -> None:
    """Neither a directory that was there, nor a file of the user's, nor a checkpoint goes with it."""

    new, there = tmp_path / "new", tmp_path / "there"

    def noting(model: nn.Module, batch: Any) -> None:
        (new / "notes.txt").write_text("mine\n")

    one_line("not None", lambda: train(task(loss=noting), run_dir=new))
    assert [path.name for path in new.iterdir()] == ["notes.txt"]
    there.mkdir()
    one_line("not None", lambda: train(task(loss=noting), run_dir=there))
    assert there.is_dir()
    calls = []

    def late(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        return loss(model, batch) if len(calls) <= 4 else None

    one_line("not None", lambda: train(task(loss=late, epochs=2), run_dir=tmp_path / "late"))
    assert list((tmp_path / "late" / "checkpoints").iterdir())


def test_one_callback_needs_no_list() -> None:
    given = task(validation_data=ROWS, evaluate=judged([1.0, 2.0, 3.0]), epochs=3, batch_size=32)
    assert train(given, callbacks=mh.EarlyStopping(patience=1)).steps == 2


def test_a_run_is_saved_by_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train().save("run.json")
    assert (tmp_path / "run.json").read_text().startswith("{")


def test_a_traceback_begins_in_the_users_program() -> None:
    """And of one worker, the exception itself is the cause."""

    def odd(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0][:, :3])

    for workers, engine in ((1, "local"), (2, "sim")):
        with pytest.raises(mh.WorkerFailed, match="mat1 and mat2") as caught:
            train(task(loss=odd), workers=workers, engine=engine)
        first = next(line for line in caught.value.detail.splitlines() if line.startswith("  File "))
        assert Path(__file__).name in first
        if workers == 1:
            assert isinstance(caught.value.__cause__, RuntimeError)


# -- a schedule on a validation metric ---------------------------------------------------------------------------------


def judged(values: list[float]) -> Callable[[nn.Module, Any], dict[str, Any]]:
    """Metrics that come in this order, whatever the model."""
    left = iter(values)
    return lambda model, batch: {"loss": next(left), "score": torch.tensor(0.0)}


def test_reduce_on_plateau_steps_at_each_validation() -> None:
    """By hand: the metric gets worse twice, so the rate is halved twice; a step of a step-wise schedule makes none."""
    values = [1.0, 2.0, 0.5, 0.7, 0.4]
    for workers, schedule, wanted in (
        (1, plateau(), [0.1, 0.1, 0.05, 0.05, 0.025]),
        (2, plateau(), [0.1, 0.1, 0.05, 0.05, 0.025]),
        (1, plateau("validation_score", mode="max"), [0.1, 0.1, 0.05, 0.025, 0.0125]),
    ):
        each = [value for value in values for _ in range(workers)]  # of them asks for it
        given = task(schedule=schedule, validation_data=ROWS, epochs=5, batch_size=32, evaluate=judged(each))
        run = train(given, workers=workers, engine="local" if workers == 1 else "sim")
        assert [row["rate"] for row in run.history] == pytest.approx(wanted, rel=1e-12), workers


def test_reduce_on_plateau_goes_on_where_it_was_when_a_run_is_resumed(tmp_path: Path) -> None:
    values = [1.0, 2.0, 0.5, 0.7, 0.4, 0.6]

    def given(epochs: int, start: int = 0) -> mh.Task:
        fields = {"schedule": plateau(), "validation_data": ROWS, "batch_size": 32}
        return task(**fields, epochs=epochs, evaluate=judged(values[start:]))

    whole = train(given(6))
    train(given(3), run_dir=tmp_path / "run")
    resumed = train(given(6, start=3), run_dir=tmp_path / "run", resume=True)
    assert [row["rate"] for row in resumed.history] == [row["rate"] for row in whole.history]
    assert torch.equal(resumed.parameters, whole.parameters)


def test_the_summary_says_which_epoch_was_kept() -> None:
    """And without validation data, which is no result, the training loss."""
    given = task(validation_data=ROWS, epochs=3, evaluate=judged([1.0, 0.5, 0.5, 0.7]))
    run = train(given.with_fields(batch_size=32), keep="best:validation_loss")
    assert run.info["kept"] == {"metric": "validation_loss", "epoch": 2, "step": 2}
    assert "the parameters after 2 epochs (step 2), the best by validation_loss" in run.summary()
    run = train()
    assert "kept" not in run.info
    assert f"training loss {run.history[-1]['loss']:.4g} in the last step" in run.summary()


# -- several workers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shorter", [0, 1])
def test_unequal_steps_say_which_program_ended_and_where_the_other_is(shorter: int) -> None:
    def unequal() -> None:
        model = net()
        model, optimizer = mh.prepare(model, sgd(model))
        for number in range(2 if mh.worker().rank == shorter else 5):
            optimizer.zero_grad()
            loss(model, (ROWS[0][number:], ROWS[1][number:])).backward()
            optimizer.step()

    with pytest.raises(mh.WorkerFailed, match=f"worker {shorter}'s program ended after 2 steps") as caught:
        mh.launch(unequal, workers=2)
    assert f"worker {1 - shorter} waits for it in its step 3" in str(caught.value)
    places = [line for line in caught.value.detail.splitlines() if line.startswith("  File ")]
    assert places
    assert all(__file__ in place for place in places)


def test_a_debugger_or_a_question_in_a_worker_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops() -> None:
        import pdb

        pdb.set_trace()
        input("how many? ")

    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    with pytest.raises(mh.BadInput, match="breakpoint.. needs a terminal.*workers=1"):
        mh.launch(lambda: breakpoint(), workers=2)
    for mistake in (lambda: input("how many? "), stops):
        with pytest.raises(mh.WorkerFailed, match="no standard input.*workers=1"):
            mh.launch(mistake, workers=2)
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")  # a debugger of the user's choice is left alone
    assert mh.launch(lambda: breakpoint(), workers=2) == [None, None]


def script(folder: Path, *lines: str) -> Path:
    path = folder / "script.py"
    path.write_text("\n".join(lines))
    return path


def test_who_calls_sys_exit_is_named(local: Local, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exits = "import sys, manyhands as mh", "if mh.worker().rank == 1: sys.exit(3)", "mh.worker().group.barrier()"
    assert run_script(script(tmp_path, *exits), workers=2, engine=local) == 3
    assert "manyhands: worker 1 called sys.exit(3)" in capfd.readouterr().err


@dataclasses.dataclass(kw_only=True)
class Late(State):
    momentum: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgetful(mh.AllReduce):
    """Makes its tensor in the first step."""

    name = "forgetful"

    def start(self, replica: Any, worker: Any) -> Late:
        return Late()

    def exchange(self, replica: Any, worker: Any, state: Any) -> mh.StepResult:
        state.momentum = torch.zeros(3)
        replica.mean_gradients(worker.mesh.data)
        return mh.StepResult(applied=replica.apply(), rows_left=replica.control.any_rank_has_rows)


def test_a_states_tensor_that_appears_late_is_told_before_the_first_checkpoint(tmp_path: Path) -> None:
    one_line(
        r"Late.momentum of strategy forgetful became a tensor after start\(\)",
        lambda: train(strategy=Forgetful(), run_dir=tmp_path / "run"),
    )
    assert train(strategy=Forgetful()).steps == 4  # where nothing is saved, nothing is lost


# -- the loss, the metrics and the run ---------------------------------------------------------------------------------


def test_servers_of_a_strategy_without_one(caplog: pytest.LogCaptureFixture) -> None:
    """So that a strategy is changed by one word, this is no error."""
    assert train(workers=2, servers=3, engine="sim").steps == 4
    assert "servers=3 has no effect: strategy allreduce has no parameter server" in caplog.text


def test_a_period_that_is_never_due_is_a_warning() -> None:
    for period, warned in (("100", True), ("2", False), ("end", False)):
        run = train(workers=2, engine="sim", strategy=f"local-sgd:period={period}", max_steps=3)
        found = [f"period={period} of strategy local-sgd is more than the 3 steps" in w for w in run.info["warnings"]]
        assert found == [True] * warned, period


def test_resuming_says_where_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "resume": True}
    train(max_steps=2, **options)
    train(max_steps=4, **options)
    train(max_steps=4, **options)
    said = [record.getMessage() for record in caplog.records]
    assert [word in text for word, text in zip(("starts with step 0", "from step 2", "is finished"), said, strict=True)]


def test_a_refused_resumption_changes_nothing(tmp_path: Path) -> None:
    """The finished run stays whole, and what is recorded of it true."""
    train(run_dir=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    one_line("seed was 0 and is 5", partial(train, task(seed=5, epochs=2), run_dir=tmp_path / "run", resume=True))
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    changed = {path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= {"launch.json", "events.jsonl"}
    assert train(run_dir=tmp_path / "run", resume=True).steps == 4


def test_a_directory_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    def fails(model: nn.Module, batch: Any) -> Any:
        raise KeyError("label")

    with pytest.raises(mh.WorkerFailed):
        train(task(loss=fails), run_dir=tmp_path / "run")
    one_line("exists, with no checkpoint in it: resume it", lambda: train(run_dir=tmp_path / "run"))
    assert train(run_dir=tmp_path / "run", resume=True).steps == 4


def test_ctrl_c_says_what_is_left(tmp_path: Path) -> None:
    """In this process; the note stands below the traceback, and in the command's one line."""

    class Interrupts(mh.Callback):
        def on_step(self, event: mh.Event) -> None:
            if event.step == 3:
                raise KeyboardInterrupt

    for every, says in (
        (2, "newest checkpoint is of step 2: go on with resume=True"),
        (99, "there is no checkpoint in "),
    ):
        with pytest.raises(KeyboardInterrupt) as caught:
            train(run_dir=tmp_path / str(every), callbacks=Interrupts(), checkpoint_every=every)
        assert says in caught.value.__notes__[0]


def test_the_names_of_strategies_may_be_one_text() -> None:
    one_line("no strategy 'alreduce'", lambda: mh.compare(task(), strategies="alreduce,local-sgd:period=2,warmup=1"))


# -- files of the command ----------------------------------------------------------------------------------------------

FILE = """
import manyhands as mh, torch
from torch import nn
from torch.nn.functional import cross_entropy
rows = (torch.randn(32, 4), torch.arange(32) % 3)
def make(): return nn.Linear(4, 3)
model = make()
def task(batch_size=8):
    return mh.Task.supervised(model=make, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), train_data=rows, batch_size=batch_size)
def needs(rate):
    return task().with_fields(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=rate + 0.0))
def fails(): raise FileNotFoundError("no train.csv")
"""
NAMES = {
    "tasks.py:fails": r"tasks.py:fails\(\) failed: FileNotFoundError: no train.csv \(tasks.py, line 12\)",
    "tasks.py:needs": "task tasks.py:needs needs rate: .*tasks.py:needs:rate=",
    "tasks.py:model": "neither a Task nor a function that gives one, but Linear; .*manyhands run",
    "tasks.py:tusk": r"has no 'tusk' \(did you mean 'task'\?\): it defines make, task, needs, fails$",
    "tasks.py": "no task in it: write tasks.py:NAME.*manyhands run tasks.py",
    "tasks:task": "a task in a file is named with its ending, tasks.py:task",
    "tasks.py:task:epoch=2": "has no option 'epoch'",
    "ends.py:task": r"ends.py ended while it was imported \(sys.exit\(3\) \(line 1\)\)",
    "broken.py:task": r"failed to import: RuntimeError: no \(line 2\)",
    "nowhere.py:task": "no file 'nowhere.py'",
    "digts": "no task 'digts'.*did you mean 'digits'",
    "mnist": "no task 'mnist'.*choose from digits, chars",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tasks.py").write_text(FILE)
    (tmp_path / "ends.py").write_text("import sys; sys.exit(3)\n")
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('no')\n")
    yield tmp_path
    sys.modules.pop("tasks", None)


def test_what_a_task_is_named_by(folder: Path) -> None:
    for name, says in NAMES.items():
        one_line(says, partial(mh.train, name))
    one_line("nothing to train: model, loss, optimizer, train_data missing", mh.train)


def test_options_of_a_tasks_function_and_fields_of_its_task(folder: Path) -> None:
    run = mh.train("tasks.py:needs:rate=0.5,epochs=2,batch_size=16", workers=1)
    assert (run.info["rate"], run.steps, run.info["batch_size"]) == (0.5, 4, 16)
    assert mh.train("tasks.py:task:batch_size=4,max_steps=5", workers=1).steps == 5


def command(*words: str) -> Result:
    return CliRunner().invoke(commands.app, list(words), prog_name="manyhands", env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_one_command_for_another(folder: Path) -> None:
    for words, says in (
        ("run tasks.py:task", "a task in a file is for `manyhands train tasks.py:task`"),
        ("run tasks", "did you mean tasks.py"),
        ("estimate tasks.py:task", "manyhands calibrate tasks.py:task"),
    ):
        done = command(*words.split())
        assert (done.exit_code, done.stdout) == (2, "")
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_options_behind_a_script_are_its_own_and_told(folder: Path) -> None:
    script(folder)
    done = command("run", "script.py", "-n", "4")
    assert done.exit_code == 0
    assert "manyhands run -n 4 script.py" in done.stderr
    assert not command("run", "script.py", "-n", "text", "--epochs", "4").stderr


def test_what_prepare_is_given() -> None:
    model = net()
    for arguments, says in (
        ((model, sgd(model), "local-sgd:period=8"), "strategy=..."),
        ((model, torch.optim.SGD), "not the class SGD"),
        ((sgd(model), model), "the model must be an nn.Module.*not a SGD"),
    ):
        one_line(says, lambda: mh.prepare(*arguments))  # noqa: B023 - called at once


# -- a loop of one's own -----------------------------------------------------------------------------------------------


def loader_of(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*ROWS) if dataset is None else dataset, **({"batch_size": 8} | options))


def looped(
    passes: int = 1, loader: Any = None, before: Callable[..., None] = lambda *_: None, frozen: bool = False
) -> nn.Module:
    """The model after so many passes; `before` is called with (model, optimizer, epoch) ahead of each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(not frozen)
    optimizer = sgd(model)
    model, optimizer, batches = mh.prepare(model, optimizer, loader_of() if loader is None else loader)
    for epoch in range(passes):
        before(model, optimizer, epoch)
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    return model


def refused(says: str, program: Callable[[], Any], kind: type[Exception] = mh.BadInput, engine: str = "sim") -> None:
    with pytest.raises(kind, match=says):
        mh.launch(program, workers=2, engine=engine)


def test_a_loop_whose_workers_differ_or_whose_model_changes_is_refused() -> None:
    def split() -> None:
        order = list(range(32))
        random.Random(mh.worker().rank).shuffle(order)
        looped(loader=loader_of(Subset(TensorDataset(*ROWS), order[:24])))

    def drawn() -> None:
        draws = np.random.default_rng(mh.worker().rank)
        looped(loader=loader_of(TensorDataset(torch.tensor(draws.normal(size=(32, 4)), dtype=torch.float32), ROWS[1])))

    def rates(model: nn.Module, optimizer: Any, epoch: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 if mh.worker().rank == 0 or not epoch else 0.05

    def loads(model: nn.Module, *_: Any) -> None:
        if mh.is_first():
            model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})

    def doubles(model: nn.Module, *_: Any) -> None:
        model.double()

    def unfreezes(model: nn.Module, *_: Any) -> None:
        model.bias.requires_grad_(mh.worker().rank == 0)

    rows = loader_of(TensorDataset(ROWS[0].double(), ROWS[1]))
    for says, program, kind in (
        ("the training rows of worker 1 are not those of worker 0.*by a seed", split, mh.BadInput),
        ("the training rows of worker 1 are not those of worker 0.*by a seed", drawn, mh.BadInput),
        ("lr is 0.05.*0.1", lambda: looped(2, before=rates), mh.ManyhandsError),  # at the end of the pass
        ("parameters of worker 1.* are off|drifted apart", lambda: looped(before=loads), mh.ManyhandsError),
        ("before training begins", lambda: looped(loader=rows, before=doubles), mh.BadInput),
        ("same operations|unfreeze the same parameters", lambda: looped(before=unfreezes, frozen=True), mh.BadInput),
    ):
        refused(says, program, kind)


def heard(program: Callable[[], Any]) -> set[str]:
    """Its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    return {str(one.message) for one in caught}


def test_what_a_loop_leaves_out_is_a_warning() -> None:
    """An optimizer, the steps over a prepared loader, and rows in batches."""

    def forgets() -> None:
        other = net()
        own = sgd(other)

        def steps(*_: Any) -> None:
            for _ in range(3):
                loss(other, ROWS).backward()
                own.step()

        looped(before=steps)

    def validates() -> None:
        model = net()
        model, _, validation = mh.prepare(model, sgd(model), loader_of())
        for _ in range(2):
            for batch in validation:
                loss(model, batch)

    rows = TensorDataset(torch.randn(4, 8, 4), torch.arange(32).reshape(4, 8) % 3)
    for program, words in (
        (validates, ("no optimizer took a step", "mh.mean")),
        (lambda: looped(loader=DataLoader(rows, batch_size=None)), ("batch_size=None",)),
        (looped, ()),
    ):
        texts = heard(partial(mh.launch, program, workers=2, engine="sim"))
        assert len(texts) == bool(words), texts
        assert all(word in text for text in texts for word in words), texts
    first, _ = mh.launch(heard, forgets, workers=2, batches="slices")  # steps of others are seen in processes alone
    assert any("SGD) took 3 steps and was not prepared" in text for text in first)


def test_torchs_lines_are_nobodys_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/found/by/PYTHONPATH/torch/__init__.py")
    assert not is_users("/found/by/PYTHONPATH/torch/nn/modules/linear.py")
    assert is_users("/found/by/PYTHONPATH/layers.py")


def test_an_error_of_prepare_names_the_scripts_line(local: Local, tmp_path: Path) -> None:
    wrong = script(tmp_path, "import manyhands as mh", "", "mh.prepare(1, 2)")
    for workers in (1, 2):
        with pytest.raises(mh.BadInput, match=r"^script.py, line 3: prepare takes \(model, optimizer, \*loaders\)"):
            run_script(wrong, workers=workers, engine=local)


def test_init_process_group_is_left_out() -> None:
    def joins() -> None:
        torch.distributed.init_process_group("gloo")

    refused("Leave init_process_group out", joins, mh.WorkerFailed, engine="local")


def test_lbfgs_steps_alone_as_in_a_plain_loop() -> None:
    """`mh.prepare` alone changes nothing: a closure is passed on, and its loss comes back."""

    def trained(prepare: Callable[..., Any]) -> tuple[torch.Tensor, list[float]]:
        torch.manual_seed(0)
        model = net()
        model, optimizer = prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model, ROWS)
            found.backward()
            return found

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), losses

    plainly, prepared = trained(lambda *pair: pair), trained(mh.prepare)
    assert torch.equal(plainly[0], prepared[0])
    assert plainly[1] == prepared[1]
    refused("step.closure. evaluates the model several times", lambda: trained(mh.prepare))


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=3"])
def test_parameters_that_are_unfrozen_midway_train_as_on_one_worker(strategy: str) -> None:
    """In float64: two workers equal one to rounding under allreduce, and hold one model under any strategy."""

    def trained() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rows = TensorDataset(ROWS[0].double(), ROWS[1])
        model, optimizer, batches = mh.prepare(model, optimizer, loader_of(rows), strategy=strategy)
        for epoch in range(3):
            model[0].requires_grad_(epoch > 0)
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        return [float(number) for p in model.parameters() for number in p.detach().reshape(-1)]

    (one,), both = mh.launch(trained, workers=1), mh.launch(trained, workers=2, engine="sim")
    assert both[0] == both[1]
    if strategy == "allreduce":
        assert both[0] == pytest.approx(one, abs=1e-10)


def test_mean_of_a_number_over_the_workers() -> None:
    def means() -> list[Any]:
        rank = mh.worker().rank
        tensor = mh.mean(torch.tensor([rank, 3 * rank], dtype=torch.float32), weight=1 + rank)
        nothing = mh.mean(2.5, weight=0)
        return [mh.mean(1.0 + rank), mh.mean(rank, weight=3 - 2 * rank), tensor.tolist(), str(tensor.dtype), nothing]

    expected = [1.5, 0.25, [pytest.approx(2 / 3), 2.0], "torch.float32", 2.5]
    assert mh.launch(means, workers=2, engine="sim") == [expected, expected]
    assert mh.mean(3) == 3
    one_line("takes a number or a tensor, not '3'", lambda: mh.mean("3"))


def test_a_strategy_that_so_many_workers_cannot_run_is_refused_before_the_script_begins(
    local: Local, tmp_path: Path
) -> None:
    path = script(tmp_path, "raise SystemExit('it ran')")
    wrong = {"solo": "solo", "quorum:backups=2": "give at most 1", "allreduce:combine=sum": "mean or adasum"}
    for strategy, says in wrong.items():
        one_line(says, partial(run_script, path, workers=2, strategy=strategy, engine=local))
