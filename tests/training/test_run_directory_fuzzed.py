"""Files of a run directory that were cut, edited or written by somebody else: the older checkpoint with a warning, or one clear error."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import manyhands as mh
import plain
from fuzzing import Damage, bounded, json_bytes, survive, writes_only_in
from manyhands.checkpoint import checkpoints
from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput, ManyhandsError
from manyhands.recording import event_log


def damaged(damage: Damage, data: bytes) -> bytes:
    """As text and numbers where it is JSON, or lines of JSON; else, or one time of three, as bytes."""
    try:
        lines = [json.loads(line) for line in data.splitlines()] if data.count(b"}\n{") else [json.loads(data)]
    except ValueError:
        return damage.of_bytes(data)
    if damage.random() < 0.3:
        return damage.of_bytes(data)
    at = damage.randrange(len(lines))
    lines[at] = damage.of_json(lines[at])
    return b"".join(json_bytes(line) + b"\n" for line in lines)


def test_checkpoints(inputs: int, tmp_path: Path) -> None:
    """Whatever one of the two checkpoints' files holds, what is found holds what was written."""
    folder, damage = tmp_path / "checkpoints", Damage(1)
    for tick in (1, 2):
        checkpoints.save(folder, tick, SoloGroup(), {"w": torch.full((3,), float(tick))}, {"tick": tick})
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def take(change: tuple[Path, bytes]) -> None:
        path, data = change
        path.write_bytes(data)
        warned: list[str] = []
        try:
            found = checkpoints.newest(folder, warned.append)
            assert found is not None
            assert found.values(0) == {"tick": found.tick}
            assert found.tensors(0)["w"].tolist() == [found.tick] * 3
            assert warned or found.tick == 2
        finally:
            path.write_bytes(files[path])

    def drawn() -> Iterator[tuple[Path, bytes]]:
        for _ in range(inputs // 20):
            path = damage.choice(list(files))
            yield path, damaged(damage, files[path])

    with bounded(256), writes_only_in(folder):
        taken, refused = survive(take, drawn(), ())
    assert taken
    assert not refused


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, and one that was interrupted after its second epoch."""
    folder = tmp_path_factory.mktemp("runs")
    mh.train(plain.task(epochs=3), run_dir=folder / "finished")
    shutil.copytree(folder / "finished", folder / "interrupted")
    for name in ("result.json", "model.safetensors"):
        (folder / "interrupted" / name).unlink()
    return {name: folder / name for name in ("finished", "interrupted")}


@pytest.mark.parametrize("kind", ["finished", "interrupted"])
def test_run_directories(kind: str, runs: dict[str, Path], inputs: int, tmp_path: Path) -> None:
    """A run that is resumed in one ends well, or with an error of manyhands' own; and nothing beside it is touched."""
    damage, folder = Damage(kind), tmp_path / "beside" / "run"
    whole = {path.relative_to(runs[kind]): path.read_bytes() for path in runs[kind].rglob("*") if path.is_file()}

    def take(change: tuple[Path, bytes]) -> None:
        name, data = change
        shutil.copytree(runs[kind], folder)
        (folder / name).write_bytes(data)
        try:
            mh.train(plain.task(epochs=3), run_dir=folder, resume=True)
        finally:
            shutil.rmtree(folder)

    def drawn() -> Iterator[tuple[Path, bytes]]:
        for _ in range(inputs // 500):
            name = damage.choice(list(whole))
            yield name, damaged(damage, whole[name])

    folder.parent.mkdir()
    with bounded(1024), writes_only_in(folder):
        taken, _ = survive(take, drawn(), ManyhandsError)
    assert taken


def test_events(inputs: int, runs: dict[str, Path], tmp_path: Path) -> None:
    damage, file = Damage(3), tmp_path / "events.jsonl"
    lines = (runs["finished"] / "events.jsonl").read_bytes()

    def take(data: bytes) -> None:
        file.write_bytes(data)
        warned: list[str] = []
        events = list(event_log.read(file, warned.append))
        assert all(isinstance(event.type, str) for event in events)
        assert list(event_log.steps_that_count([file], warn=warned.append)) is not None

    with bounded(256):
        taken, _ = survive(take, (damaged(damage, lines) for _ in range(inputs // 20)), (BadInput, ManyhandsError))
    assert taken
