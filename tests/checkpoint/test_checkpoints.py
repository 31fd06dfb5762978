"""Checkpoints: whole or not at all, verified before they are believed."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands import rng
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.paths import AnyPath, RemotePath
from manyhands.comm.group import Group
from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput, ManyhandsError
from manyhands.testing.threads import together
from manyhands.worker import Worker


def save(folder: AnyPath, tick: int) -> AnyPath:
    return checkpoints.save(folder, tick, SoloGroup(), {"w": torch.full((3,), float(tick))}, {"tick": tick})


def never(message: str) -> None:
    pytest.fail(message)


def test_the_newest_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    for tick in (1, 5, 30, 200):
        save(tmp_path, tick)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000200"]
    found = checkpoints.newest(tmp_path, never)
    assert found is not None
    assert (found.tick, found.ranks) == (200, 1)
    assert torch.equal(found.tensors(0)["w"], torch.full((3,), 200.0))
    assert found.values(0) == {"tick": 200}


def test_every_rank_writes_its_own_part(tmp_path: Path) -> None:
    together(3, lambda w: checkpoints.save(tmp_path, 7, w.group, {"w": torch.tensor([w.rank])}, {"rank": w.rank}))
    found = checkpoints.newest(tmp_path, never)
    assert found is not None
    assert [int(found.tensors(rank)["w"]) for rank in range(3)] == [0, 1, 2]
    assert [found.values(rank)["rank"] for rank in range(3)] == [0, 1, 2]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Call it with its rank: in the threads of other ranks than 0, nothing below tmp_path is seen from then on."""
    seen = threading.local()
    is_dir, is_file = Path.is_dir, Path.is_file

    def visible(path: Path) -> bool:
        return not (getattr(seen, "rank", 0) and path.is_relative_to(tmp_path))

    monkeypatch.setattr(Path, "is_dir", lambda path: visible(path) and is_dir(path))
    monkeypatch.setattr(Path, "is_file", lambda path: visible(path) and is_file(path))
    return lambda rank: setattr(seen, "rank", rank)


def test_a_rank_that_does_not_see_the_folder_sends_its_part(tmp_path: Path, far: Callable[[int], None]) -> None:
    def write(worker: Worker) -> None:
        far(worker.rank)
        checkpoints.save(tmp_path, 7, worker.group, {"w": torch.tensor([worker.rank])}, {"rank": worker.rank})

    together(3, write)
    found = checkpoints.newest(tmp_path, never)
    assert found is not None
    assert [int(found.tensors(rank)["w"]) for rank in range(3)] == [0, 1, 2]
    assert [found.values(rank)["rank"] for rank in range(3)] == [0, 1, 2]


def test_a_checkpoint_comes_to_ranks_that_do_not_see_it(
    tmp_path: Path,
    far: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    copies = tmp_path_factory.mktemp("copies")
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    together(2, lambda w: checkpoints.save(tmp_path, 7, w.group, {"w": torch.tensor([w.rank])}, {"rank": w.rank}))
    saved = checkpoints.newest(tmp_path, never)
    assert saved is not None

    def read(worker: Worker) -> tuple[bool, list[int]]:
        far(worker.rank)
        with checkpoints.within_reach(saved, worker.group) as found:
            return found.path == saved.path, [int(found.tensors(rank)["w"]) for rank in range(found.ranks)]

    assert together(2, read) == [(True, [0, 1]), (False, [0, 1])]
    assert list(copies.iterdir()) == []


def test_a_checkpoint_that_all_see_is_read_where_it_is(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    saved = checkpoints.newest(tmp_path, never)
    assert saved is not None

    def read(worker: Worker) -> Path:
        with checkpoints.within_reach(saved, worker.group) as found:
            return found.path

    assert together(2, read) == [path, path]


# -- what other ranks send ---------------------------------------------------------------------------------------------


class Forger:
    """A group whose rank says of its part of a checkpoint what `forge` makes of it."""

    def __init__(self, group: Group, forge: Callable[[Any], Any]) -> None:
        self._group, self._forge = group, forge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_gather_json(self, value: Any) -> list[Any]:
        return self._group.all_gather_json(self._forge(value))


def attacked(folder: Path, far: Callable[[int], None], forge: Callable[[Any], Any], forger: int = 1) -> str:
    """The error of a checkpoint for which one rank forged what it says."""

    def write(worker: Worker) -> None:
        far(worker.rank)
        group = Forger(worker.group, forge) if worker.rank == forger else worker.group
        checkpoints.save(folder, 7, group, {"w": torch.zeros(100)}, {})  # type: ignore[arg-type]

    with pytest.raises(ManyhandsError) as raised:
        together(2, write)
    return str(raised.value)


DIGEST = "0" * 64


@pytest.mark.parametrize(
    "output",
    [
        {"../../escaped": [DIGEST, 3]},
        {"seen": False, "parts": {"../../escaped": {"bytes": 3, "sha256": DIGEST}}},
        {"seen": False, "parts": [{"bytes": 3, "sha256": DIGEST}]},
        {"seen": False, "parts": [{"bytes": 1 << 50, "sha256": DIGEST}] * 2},
        {"seen": False, "parts": [{"bytes": -1, "sha256": DIGEST}] * 2},
        {"seen": False, "parts": [{"bytes": True, "sha256": DIGEST}] * 2},
        {"seen": False, "parts": [{"bytes": 3, "sha256": "../escaped"}] * 2},
        {"seen": False, "parts": [{"bytes": 3, "sha256": DIGEST, "name": "/escaped"}] * 2},
        {"seen": "no", "parts": [{"bytes": 3, "sha256": DIGEST}] * 2},
        ["seen", []],
        None,
    ],
)
def test_a_rank_decides_neither_names_nor_lengths(tmp_path: Path, far: Callable[[int], None], output: Any) -> None:
    folder = tmp_path / "run" / "checkpoints"
    error = attacked(folder, far, lambda own: own if own == "" else output)
    assert "worker 1 sent" in error
    assert "part of a checkpoint" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert checkpoints.newest(folder, never) is None or pytest.fail("a forged checkpoint counts")


@pytest.mark.parametrize("token", ["../../x", "/tmp/x", "", "ABCDEF0123456789", 7, None, "0" * 17])
def test_rank_0_decides_no_folder_of_other_ranks(tmp_path: Path, far: Callable[[int], None], token: Any) -> None:
    assert "as the name of a new checkpoint" in attacked(tmp_path, far, lambda own: token, forger=0)


def test_rank_0_may_hold_many_times_what_others_do(tmp_path: Path, far: Callable[[int], None]) -> None:
    """The server's vectors, one for each worker."""

    def write(worker: Worker) -> None:
        far(worker.rank)
        own = {"w": torch.zeros(100 if worker.rank else 20_000_000)}
        checkpoints.save(tmp_path, 7, worker.group, own, {})

    together(2, write)
    assert checkpoints.newest(tmp_path, never) is not None


def test_a_part_that_is_not_what_was_announced_is_refused(tmp_path: Path, far: Callable[[int], None]) -> None:
    def forge(own: Any) -> Any:
        return own if own == "" else {**own, "parts": [{**part, "sha256": DIGEST} for part in own["parts"]]}

    assert "arrived changed from worker 1" in attacked(tmp_path, far, forge)
    assert checkpoints.newest(tmp_path, never) is None or pytest.fail("a forged checkpoint counts")


def test_a_copy_is_what_the_driver_verified(tmp_path: Path, far: Callable[[int], None]) -> None:
    """A rank that sends another file than the one of the plan is named."""
    saved = _saved_by_two(tmp_path)
    (saved.path / "rank-00000.json").write_bytes(b'{"r": 1}')

    def read(worker: Worker) -> None:
        far(worker.rank)
        with checkpoints.within_reach(saved, worker.group):
            pass

    with pytest.raises(ManyhandsError, match="rank-00000.json arrived changed from worker 0"):
        together(2, read)
    (saved.path / "rank-00000.json").write_bytes(b"{}")
    with pytest.raises(ManyhandsError, match="rank-00000.json became shorter"):
        together(2, read)


def test_a_checkpoint_that_no_host_sees_and_different_ones_are_errors(tmp_path: Path) -> None:
    saved = _saved_by_two(tmp_path / "here")
    gone = checkpoints.Checkpoint(tmp_path / "nowhere", saved.tick, saved.ranks, saved.parts)
    other = checkpoints.Checkpoint(saved.path, 8, saved.ranks, saved.parts)

    def read(worker: Worker, of: list[checkpoints.Checkpoint]) -> None:
        with checkpoints.within_reach(of[worker.rank], worker.group):
            pytest.fail("it is not there")

    with pytest.raises(BadInput, match="no host of this run can read"):
        together(2, lambda worker: read(worker, [gone, gone]))
    with pytest.raises(ManyhandsError, match=r"steps by rank: 7, 8"):
        together(2, lambda worker: read(worker, [saved, other]))


def _saved_by_two(folder: Path) -> checkpoints.Checkpoint:
    together(2, lambda w: checkpoints.save(folder, 7, w.group, {"w": torch.tensor([w.rank])}, {"r": 0}))
    saved = checkpoints.newest(folder, never)
    assert saved is not None
    return saved


def test_large_parts_come_in_pieces(
    tmp_path: Path, far: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 1000)
    values = torch.arange(999.0)

    def write(worker: Worker) -> None:
        far(worker.rank)
        checkpoints.save(tmp_path, 7, worker.group, {"w": values + worker.rank}, {})

    together(2, write)
    found = checkpoints.newest(tmp_path, never)
    assert found is not None
    assert torch.equal(found.tensors(1)["w"], values + 1)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "manifest link"])
def test_what_is_no_regular_file_is_damage(tmp_path: Path, kind: str) -> None:
    """Nobody waits for a FIFO, and a link does not bring another file of this user to other hosts."""
    path = save(tmp_path, 1)
    file = path / ("manifest.json" if kind == "manifest link" else "rank-00000.json")
    moved = file.replace(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to(moved)
    output: list[str] = []
    with pytest.raises(BadInput, match="every checkpoint"):
        checkpoints.newest(tmp_path, output.append)
    assert file.name in output[0] or kind == "directory"


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "rank-00001.json", "notes.txt"])
def test_a_manifest_that_names_other_files_is_damage(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    for names in (manifest["sha256"] | {name: DIGEST}, {name: DIGEST, "rank-00000.json": DIGEST}):
        (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": names}))
        output: list[str] = []
        with pytest.raises(BadInput, match="every checkpoint"):
            checkpoints.newest(tmp_path, output.append)
        assert "files listed: 3" in output[0] or "files listed: 2" in output[0]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_one_is_named_and_the_older_one_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file = newest / ("manifest.json" if damage == "manifest" else "rank-00000.safetensors")
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data[:-3] if damage in ("truncate", "manifest") else data[:-1] + bytes([data[-1] ^ 1]))
    output: list[str] = []
    found = checkpoints.newest(tmp_path, output.append)
    assert found is not None
    assert found.tick == 1
    assert len(output) == 1
    assert newest.name in output[0]


def test_all_damaged_is_an_error_and_none_is_none(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path, never) is None
    assert checkpoints.newest(tmp_path / "nothing", never) is None
    (save(tmp_path, 1) / "manifest.json").unlink()
    with pytest.raises(BadInput, match="every checkpoint .* is damaged"):
        checkpoints.newest(tmp_path, lambda message: None)


def test_a_save_that_fails_leaves_the_older_one_and_is_cleaned_up_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 2)
    found = checkpoints.newest(tmp_path, never)
    assert found is not None
    assert found.tick == 1
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_view_is_saved_without_the_rest_of_its_memory(tmp_path: Path) -> None:
    whole = torch.zeros(1_000_000)
    path = checkpoints.save(tmp_path, 1, SoloGroup(), {"w": whole[5:9]}, {})
    assert (path / "rank-00000.safetensors").stat().st_size < 1000


def test_random_state_comes_back_whole() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), float(np.random.randn()), random.gauss(0, 1)

    with rng.kept():
        rng.seed_all(3)
        np.random.randn()  # leaves a cached normal draw
        random.gauss(0, 1)
        tensors, values = rng.capture()
        first = draw()
        assert draw() != first
        rng.restore(tensors, values)
        assert draw() == first


def test_what_was_passed_over_as_damaged_does_not_count_as_kept(tmp_path: Path) -> None:
    for tick in (1, 2, 9):
        save(tmp_path, tick)
    (tmp_path / "step-00000009" / "manifest.json").unlink()
    save(tmp_path, 3)  # by the run resumed from 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_copy_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 1), tmp_path / "step-00000001-good")
    for tick in (2, 3):
        save(tmp_path, tick)
    assert (tmp_path / "step-00000001-good" / "manifest.json").exists()


def test_a_resumed_run_may_discard_what_is_newer(tmp_path: Path) -> None:
    for tick in (1, 2):
        save(tmp_path, tick)
    checkpoints.discard_newer(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("manifest", ["[]", "7", '{"format": 1, "sha256": []}', '{"format": 1}'])
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, manifest: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").write_text(manifest)
    output: list[str] = []
    found = checkpoints.newest(tmp_path, output.append)
    assert found is not None
    assert (found.tick, len(output)) == (1, 1)


# -- elsewhere than on a disk ----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[RemotePath]:
    folder = RemotePath(f"memory:/{tmp_path}/checkpoints")
    yield folder
    folder.remove()


def names(folder: RemotePath) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_elsewhere_every_rank_puts_its_own_part_and_the_newest_two_are_kept(elsewhere: RemotePath) -> None:
    for tick in (1, 5, 30):
        together(
            3,
            lambda w, t=tick: checkpoints.save(elsewhere, t, w.group, {"w": torch.tensor([w.rank])}, {"rank": w.rank}),
        )
    assert names(elsewhere) == ["step-00000005", "step-00000030"]
    found = checkpoints.newest(elsewhere, never)
    assert found is not None
    assert (found.tick, found.ranks) == (30, 3)
    assert [int(found.tensors(rank)["w"]) for rank in range(3)] == [0, 1, 2]
    assert [found.values(rank)["rank"] for rank in range(3)] == [0, 1, 2]
    with checkpoints.within_reach(found, SoloGroup()) as there:
        assert there == found


def test_elsewhere_it_counts_once_its_manifest_is_there(elsewhere: RemotePath) -> None:
    save(elsewhere, 9)
    (elsewhere / "step-00000009" / "manifest.json").remove()
    assert checkpoints.newest(elsewhere, never) is None
    save(elsewhere, 3)
    assert names(elsewhere) == ["step-00000003"]  # what was never finished is gone
    found = checkpoints.newest(elsewhere, never)
    assert found is not None
    assert found.tick == 3


def test_elsewhere_a_damaged_one_is_named_and_replaced(elsewhere: RemotePath) -> None:
    for tick in (1, 2):
        save(elsewhere, tick)
    (elsewhere / "step-00000002" / "rank-00000.safetensors").write_bytes(b"something else")
    output: list[str] = []
    found = checkpoints.newest(elsewhere, output.append)
    assert found is not None
    assert found.tick == 1
    assert "memory://" in output[0]
    assert "rank-00000.safetensors was changed or cut off" in output[0]
    save(elsewhere, 2)
    found = checkpoints.newest(elsewhere, never)
    assert found is not None
    assert found.tick == 2


def test_a_file_system_that_does_not_answer_is_no_damage(
    elsewhere: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint would be taken, and the newer ones removed."""
    for tick in (1, 2):
        save(elsewhere, tick)

    def silent(*_: object, **options: object) -> None:
        raise ConnectionError("it does not answer")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem._open", silent)
    with pytest.raises(ManyhandsError, match="cannot read .*step-0000000[12].*ConnectionError: it does not answer"):
        checkpoints.newest(elsewhere, never)


def test_a_part_that_rank_0_does_not_find_is_an_error(elsewhere: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each host has a file system of its own under this URL."""
    create = RemotePath.create
    monkeypatch.setattr(RemotePath, "create", lambda path: io.BytesIO() if "00001.json" in path.url else create(path))
    with pytest.raises(
        ManyhandsError, match=r"worker 1 wrote rank-00001.json \(2 bytes\) to .*, and worker 0 sees no bytes"
    ):
        together(2, lambda w: checkpoints.save(elsewhere, 7, w.group, {"w": torch.zeros(1)}, {}))
    assert checkpoints.newest(elsewhere, never) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("tick", value) for value in (1, "2", None, -2, 2.0, 10**30, [2])],
        *[("ranks", value) for value in (2, 0, "1", None, 10**30, True)],
        *[("launch", value) for value in ("1", -1, 1.5, None, [])],
        *[("sha256", value) for value in (None, [], {}, {"rank-00000.json": 7}, "text")],
        *[("format", value) for value in (1, "2", None)],
    ],
)
def test_a_manifest_with_another_field_is_damage(tmp_path: Path, name: str, value: object) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {name: value}))
    output: list[str] = []
    found = checkpoints.newest(tmp_path, output.append)
    assert found is not None
    assert (found.tick, len(output)) == (1, 1)
    assert "step-00000002" in output[0]


def test_of_two_launches_at_once_the_later_ones_checkpoint_is_the_newer(tmp_path: Path) -> None:
    """On a file system without locks the earlier launch may have gone further before it noticed."""
    for tick, launch in ((4, 2), (9, 1)):
        manifest = save(tmp_path, tick) / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"launch": launch}))
    found = checkpoints.newest(tmp_path, never)
    assert found is not None
    assert found.tick == 4
    assert checkpoints.last_launch(tmp_path) == 2
