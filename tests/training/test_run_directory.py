"""A run directory, on a disk and elsewhere: opened, refused, resumed, damaged, and written by drivers that are killed."""

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from typing_extensions import override

import manyhands as mh
import plain
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.paths import RemotePath
from manyhands.events import Event

URL = "mortal://bucket/run"


class Killed(BaseException):
    """No handler of errors takes it, as none takes a kill."""


class Mortal(MemoryFileSystem):
    """Its process is killed at a counted write: half the data is there, and nothing is written any more."""

    protocol = "mortal"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its parent has them
    pseudo_dirs = [""]  # noqa: RUF012
    left = 0  # writes until then
    done = 0

    @classmethod
    def begin(cls, files: dict[str, Any], writes: int = 10**9) -> None:
        cls.store.clear()
        cls.store.update(files)
        cls.pseudo_dirs[:] = [""]
        cls.left, cls.done = writes, 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(path.removeprefix("mortal://"))

    def _write(self) -> None:
        Mortal.left, Mortal.done = self.left - 1, self.done + 1
        if self.left < 0:
            raise Killed

    def put(self, path: str, data: bytes) -> None:
        path = self._strip_protocol(path)
        self._open(path, "wb", data=data[: len(data) // 2])
        self._write()
        self._open(path, "wb", data=data)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.put(path, value)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super().open(path, mode, **options) if mode == "rb" else Growing(self, path)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._write()
        super().cp_file(path1, path2, **options)

    def rm_file(self, path: str) -> None:
        self._write()
        super().rm_file(path)


class Growing(io.BytesIO):
    def __init__(self, system: Mortal, path: str) -> None:
        super().__init__()
        self.system, self.path = system, path

    def __exit__(self, *_: object) -> None:
        self.system.put(self.path, self.getvalue())


fsspec.register_implementation("mortal", Mortal, clobber=True)


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    Mortal.begin({})
    yield
    Mortal.begin({})


def train(**options: Any) -> mh.Run:
    given = plain.task(train_data=plain.rows(36), batch_size=12, epochs=3)
    return mh.train(given, engine="local", workers=1, threads_per_worker=1, **options)


def losses(run: mh.Run) -> dict[int, float]:
    return {row["tick"]: row["loss"] for row in run.history}


def assert_same(resumed: mh.Run, whole: mh.Run, alive: int) -> None:
    """With the history of all ticks that its checkpoint counts: their events are there before its manifest is."""
    assert torch.equal(resumed.parameters, whole.parameters), alive
    assert resumed.rows == whole.rows, alive
    assert losses(resumed) == losses(whole), alive


def test_a_url_holds_everything_and_resumes_as_the_same_run(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for folder in (RemotePath(URL), tmp_path / ("deep" * 50) / "run"):
        run = train(run_dir=folder)
        files = ["checkpoints", "config.json", "events.jsonl", "launch.json", "model.safetensors", "result.json"]
        assert sorted(path.name for path in folder.iterdir()) == files
        found = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert found == ["step-00000006", "step-00000009"]
        kinds = {json.loads(line)["type"] for line in (folder / "events.jsonl").read_text().splitlines()}
        assert kinds == {"start", "step", "epoch", "checkpoint", "end"}
        assert json.loads((folder / "result.json").read_text())["info"]["versions"]["torch"] == torch.__version__
        assert run.directory == folder
        assert str(folder) in run.summary()
        for again in (train(run_dir=folder, resume=True), pickle.loads(pickle.dumps(run))):  # with its models
            assert torch.equal(again.parameters, run.parameters)
            assert (again.steps, again.metrics, again.history) == (run.steps, run.metrics, run.history)
    request.getfixturevalue("nothing_starts")
    for url, problem in ((URL, rf"run directory {URL} exists: resume it"), (f"{URL}/config.json", "is a file")):
        with pytest.raises(mh.BadInput, match=problem):
            mh.train(plain.task(), run_dir=url, workers=2)


def killed_and_resumed(files: dict[str, Any], alive: int, **options: Any) -> mh.Run:
    """Where these files are, a launch is killed after so many writes; what the next one returns."""
    Mortal.begin(files, alive)
    with pytest.raises(Killed):
        train(run_dir=URL, resume=True, **options)
    Mortal.left = 10**9
    return train(run_dir=URL, resume=True, **options)


@pytest.mark.slow
def test_killed_at_any_write_it_is_resumed_as_if_never_interrupted() -> None:
    whole = train(run_dir=URL, resume=True)
    writes = Mortal.done
    assert writes > 30
    for alive in range(writes):
        resumed = killed_and_resumed({}, alive)
        assert_same(resumed, whole, alive)
        assert resumed.info["warnings"] == [], alive
        there = (RemotePath(URL) / "checkpoints").sizes().keys() - {"step-00000003"}  # the killed one's goes next
        assert there == {"step-00000006", "step-00000009"}, alive


def test_killed_while_it_goes_on_the_finished_run_or_a_longer_one_is_there() -> None:
    """Its files are replaced one by one."""
    whole = train(epochs=2)
    train(run_dir=URL, epochs=1)
    before = dict(Mortal.store)
    Mortal.begin(before)
    train(run_dir=URL, resume=True, epochs=2)
    for alive in range(Mortal.done):
        assert_same(killed_and_resumed(before, alive, epochs=2), whole, alive)


# -- on a disk: two drivers, and damage ------------------------------------------------------------------------------


class Meanwhile(mh.Callback):
    """Does something once, at a step or when the run begins."""

    def __init__(self, action: Callable[[], object], at: int = 1) -> None:
        self.action, self.at = action, at

    @override
    def on_step(self, event: Event) -> None:
        if event.step == self.at:
            self.action()


def test_a_second_driver_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    def second() -> None:
        for resume in (False, True):
            with pytest.raises(mh.BadInput, match=rf"another run uses .*launch 1, process {os.getpid()}"):
                train(run_dir=tmp_path / "run", resume=resume)

    run = train(run_dir=tmp_path / "run", callbacks=[Meanwhile(second)])
    assert torch.equal(run.parameters, train().parameters)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [one["values"]["launch"] for one in events if one["type"] == "start"] == [1]
    for path in (tmp_path / "run/checkpoints").iterdir():
        assert json.loads((path / "manifest.json").read_text())["launch"] == 1


def test_without_locks_the_earlier_driver_ends_and_the_later_ones_run_is_whole(tmp_path: Path) -> None:
    """At a URL nobody can lock: the number in launch.json decides, and its host and process are named."""
    later: list[mh.Run] = []
    callbacks = [Meanwhile(lambda: later.append(train(run_dir=URL, resume=True)), at=5)]
    with pytest.raises(mh.ManyhandsError, match=rf"another run now uses .*launch 2, process {os.getpid()}"):
        train(run_dir=URL, callbacks=callbacks)
    assert torch.equal(later[0].parameters, train().parameters)
    assert torch.equal(train(run_dir=URL, resume=True).parameters, later[0].parameters)
    found = checkpoints.newest(RemotePath(URL) / "checkpoints", pytest.fail)
    assert found is not None
    assert checkpoints.last_launch(RemotePath(URL) / "checkpoints") == 2


def test_events_that_a_checkpoint_counts_and_that_are_gone_are_told(tmp_path: Path) -> None:
    train(run_dir=tmp_path / "run", epochs=2)
    events = tmp_path / "run/events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"tick":3,"step":4' not in line]
    assert len(kept) < len(lines)
    events.write_bytes(b"".join(kept))
    resumed = train(run_dir=tmp_path / "run", resume=True)
    (warning,) = resumed.info["warnings"]
    assert "60 rows of data before step 6, and the checkpoint has 72" in warning
    assert torch.equal(resumed.parameters, train().parameters)
    assert [row["step"] for row in resumed.history][-3:] == [7, 8, 9]


def _without(path: Path) -> None:
    """One line, or one field of the JSON, less."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    if len(lines) == 1:
        output = json.loads(lines[0])
        output.pop(sorted(output)[0])
        path.write_text(json.dumps(output))
    else:
        path.write_text("".join(lines[:2] + lines[3:]))


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


DAMAGE: dict[str, Callable[[Path], object]] = {  # beside what test_run_directory_fuzzed.py draws
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deep": lambda path: path.write_text("[" * 100_000 + "\n"),
    "less": _without,
    "huge": lambda path: path.write_bytes(re.sub(rb":\s?(\d+)", b":1" + b"0" * 300, path.read_bytes(), count=40)),
    "gone": Path.unlink,
    "pipe": _replaced(os.mkfifo),
    "folder": _replaced(Path.mkdir),
    "link": _replaced(lambda path: path.symlink_to("/dev/zero")),
}
FILES = (
    *("config.json", "events.jsonl", "launch.json", "model.safetensors", "result.json"),
    *(f"checkpoints/step-00000009/{name}" for name in ("manifest.json", "rank-00000.json", "rank-00000.safetensors")),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(run_dir=folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_whatever_is_damaged_the_run_goes_on_with_a_warning_or_one_error_says_what(
    name: str, finished: Path, tmp_path: Path
) -> None:
    epochs = 4 if "check" in name else 3  # a finished run that is asked for no more reads no checkpoint
    whole = train(epochs=epochs)
    for kind, damage in DAMAGE.items():
        folder = tmp_path / kind
        shutil.copytree(finished, folder)
        before = (folder / name).read_bytes()
        damage(folder / name)
        if (folder / name).is_file() and (folder / name).read_bytes() == before:
            continue
        refused = _error_of(lambda folder=folder: mh.replay(folder, task=plain.task()))
        assert str(folder) in refused or "synchronous" in refused, kind
        runs = list[mh.Run]()
        options = {"run_dir": folder, "resume": True, "epochs": epochs}
        refused = _error_of(lambda options=options, runs=runs: runs.append(train(**options)))
        assert not refused or (str(folder) in refused and kind in ("pipe", "folder", "link")), (kind, refused)
        for run in runs:
            assert torch.equal(run.parameters, whole.parameters), kind
            assert run.info["warnings"] or name in ("config.json", "launch.json") or kind in ("gone", "less"), kind


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except mh.BadInput as error:
        return str(error)
    return ""


def test_what_others_left_does_not_stop_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(run_dir=folder, epochs=1)
    checkpoints = folder / "checkpoints"
    (checkpoints / "mine.partial").write_text("a file")
    (checkpoints / "yours.partial").mkdir()
    (checkpoints / "step-00000006").write_text("a file with a checkpoint's name")
    (checkpoints / "step-00000007").symlink_to("/nowhere")
    (checkpoints / f"step-00000004.{'0' * 16}.partial").mkdir()
    (folder / "result.json.partial").mkdir()
    (folder / f"result.json.{'0' * 16}.partial").write_text("of a launch that was killed")
    run = train(run_dir=folder, resume=True)
    assert torch.equal(run.parameters, train().parameters)
    assert {path.name for path in checkpoints.iterdir()} - {"step-00000007"} == {
        *("mine.partial", "yours.partial", "step-00000006", "step-00000009")
    }
    assert not list(folder.glob("result.json.0*"))


class Everything(plain.Branches):
    """Frozen and tied parameters, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def everything(model: Callable[[], nn.Module] = Everything) -> mh.Task:
    return plain.task(model=model, train_data=plain.rows(32, torch.float32), batch_size=8, epochs=1)


def loaded(path: Path) -> nn.Module:
    model = Everything()
    model.load_state_dict(safetensors.torch.load_file(path))  # strict: every name, and no other
    return model


def test_a_models_file_is_its_state_dict(tmp_path: Path) -> None:
    for workers, strategy in ((1, "allreduce"), (2, "allreduce"), (2, "ensemble")):
        folder = tmp_path / f"{strategy}-{workers}"
        engine = "local" if workers == 1 else "sim"
        options = {"engine": engine, "workers": workers, "strategy": strategy, "run_dir": folder}
        run = mh.train(everything(), **options)
        names = ["model-0.safetensors", "model-1.safetensors"] if strategy == "ensemble" else ["model.safetensors"]
        assert sorted(path.name for path in folder.glob("*.safetensors")) == names
        again = mh.train(everything(), **options, resume=True)
        for name, model, later in zip(names, run.models, again.models, strict=True):
            found, wanted = loaded(folder / name).state_dict(), model.state_dict()
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), (strategy, workers)
            assert all(torch.equal(value, wanted[key]) for key, value in later.state_dict().items())
    with pytest.raises(mh.BadInput, match="not this model's"):
        mh.train(everything(model=lambda: nn.Linear(5, 3)), workers=1, run_dir=tmp_path / "allreduce-1", resume=True)
