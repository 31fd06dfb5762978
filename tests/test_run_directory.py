"""A run directory elsewhere than on a disk: opened, refused, resumed, and whoever is killed while he writes there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import manyhands as mh
import plain
from manyhands import checkpoint
from manyhands.remote_path import RemotePath

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
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]

    @classmethod
    def live(cls, writes: int) -> None:
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
    Mortal.reset()
    Mortal.live(10**9)
    yield
    Mortal.reset()


def train(**options: Any) -> mh.Run:
    given = plain.task(train_data=plain.rows(36), batch_size=12, epochs=3)
    return mh.train(given, engine="local", workers=1, threads_per_worker=1, **options)


def losses(run: mh.Run) -> dict[int, float]:
    return {row["tick"]: row["loss"] for row in run.history}


def assert_same(resumed: mh.Run, whole: mh.Run, alive: int) -> None:
    """But for the rows of one checkpoint's ticks, where the driver was killed between the checkpoint and its events."""
    assert torch.equal(resumed.parameters, whole.parameters), alive
    assert resumed.rows == whole.rows, alive
    assert losses(resumed).items() <= losses(whole).items(), alive
    assert len(losses(resumed)) >= len(losses(whole)) - 3, alive


def test_a_url_holds_everything_and_resumes_as_the_same_run() -> None:
    run = train(run_dir=URL)
    folder = RemotePath(URL)
    assert sorted(folder.sizes()) == ["asked.json", "checkpoints", "events.jsonl", "model.safetensors", "result.json"]
    assert sorted((folder / "checkpoints").sizes()) == ["step-00000006", "step-00000009"]
    assert run.directory == folder
    assert f"directory  {URL}" in run.summary()
    again = train(run_dir=URL, resume=True)
    assert torch.equal(again.parameters, run.parameters)
    assert (again.steps, again.metrics, again.history) == (run.steps, run.metrics, run.history)


def test_a_url_with_something_in_it_is_refused_before_anything_starts(nothing_starts: None) -> None:
    RemotePath(URL).mkdir()
    (RemotePath(URL) / "mine").write_bytes(b"")
    with pytest.raises(mh.BadInput, match=rf"run directory {URL} exists: resume it"):
        mh.train(plain.task(), run_dir=URL, workers=2)
    with pytest.raises(mh.BadInput, match=rf"run directory {URL}/mine is a file"):
        mh.train(plain.task(), run_dir=f"{URL}/mine", workers=2)


def test_an_empty_one_starts_with_resume_and_more_epochs_go_on() -> None:
    whole = train()
    train(run_dir=URL, resume=True, epochs=2)
    longer = train(run_dir=URL, resume=True)
    assert torch.equal(longer.parameters, whole.parameters)
    assert losses(longer) == losses(whole)


def test_killed_at_any_write_it_is_resumed_as_if_never_interrupted() -> None:
    whole = train(run_dir=URL)
    writes = Mortal.done
    assert writes > 30
    for alive in range(writes):
        Mortal.reset()
        Mortal.live(alive)
        with pytest.raises(Killed):
            train(run_dir=URL)
        Mortal.live(10**9)
        resumed = train(run_dir=URL, resume=True)
        assert_same(resumed, whole, alive)
        assert not any("damaged" in said for said in resumed.info["warnings"]), alive
        there = set((RemotePath(URL) / "checkpoints").sizes())
        assert there - {"step-00000003"} == {"step-00000006", "step-00000009"}, (
            alive
        )  # the killed one's goes with the next


def test_killed_while_it_goes_on_the_finished_run_or_a_longer_one_is_there() -> None:
    """Its files are replaced one by one."""
    whole = train()
    train(run_dir=URL, epochs=2)
    before = dict(Mortal.store)
    Mortal.live(10**9)
    train(run_dir=URL, resume=True)
    for alive in range(Mortal.done):
        Mortal.store.clear()
        Mortal.store.update(before)
        Mortal.live(alive)
        with pytest.raises(Killed):
            train(run_dir=URL, resume=True)
        Mortal.live(10**9)
        resumed = train(run_dir=URL, resume=True)
        assert_same(resumed, whole, alive)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning() -> None:
    whole = train()
    train(run_dir=URL)
    folder = RemotePath(URL)
    (folder / "result.json").remove()
    (folder / "checkpoints/step-00000009/rank-00000.safetensors").write_bytes(b"")
    resumed = train(run_dir=URL, resume=True)
    assert torch.equal(resumed.parameters, whole.parameters)
    assert "step-00000009 is damaged and left out" in resumed.info["warnings"][0]
    found = checkpoint.newest(folder / "checkpoints", pytest.fail)
    assert found is not None
    assert found.tick == 9
