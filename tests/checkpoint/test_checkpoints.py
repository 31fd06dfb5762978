"""Checkpoints: whole or not at all, verified before they are believed."""

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands import rng
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.checkpoint.paths import AnyPath, RemotePath
from manyhands.comm.group import Group
from manyhands.comm.solo import SoloGroup
from manyhands.errors import ManyhandsError
from manyhands.testing.threads import together
from manyhands.worker import Worker
from refusals import refused


def save(folder: AnyPath, tick: int) -> AnyPath:
    return checkpoints.save(folder, tick, SoloGroup(), {"w": torch.full((3,), float(tick))}, {"tick": tick})


def never(message: str) -> None:
    pytest.fail(message)


def newest(folder: AnyPath, complain: Callable[[str], object] = never) -> Checkpoint:
    found = checkpoints.newest(folder, complain)
    assert found is not None
    return found


def save_of(worker: Worker, folder: AnyPath, tick: int = 7, w: torch.Tensor | None = None) -> None:
    w = torch.tensor([worker.rank]) if w is None else w
    checkpoints.save(folder, tick, worker.group, {"w": w}, {"rank": worker.rank})


def check(found: Checkpoint, tick: int, ranks: int) -> None:
    """It is whole, and each rank's own."""
    assert (found.tick, found.ranks) == (tick, ranks)
    assert [int(found.tensors(rank)["w"]) for rank in range(ranks)] == list(range(ranks))
    assert [found.values(rank)["rank"] for rank in range(ranks)] == list(range(ranks))


def check_passed_over(folder: AnyPath) -> str:
    """The one of step 2 is damaged, and named; the one of step 1 is found. The complaint."""
    output: list[str] = []
    assert newest(folder, output.append).tick == 1
    (message,) = output
    assert "step-00000002" in message
    return message


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[RemotePath]:
    folder = RemotePath(f"memory:/{tmp_path}/checkpoints")
    yield folder
    folder.remove()


def names(folder: AnyPath) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_two_are_kept_and_the_newest_is_found(elsewhere: RemotePath, tmp_path: Path) -> None:
    """Of one rank on a disk; elsewhere, every rank puts its own part there."""
    for folder, ranks in ((tmp_path / "here", 1), (elsewhere, 3)):
        for tick in (1, 5, 30, 200):
            together(ranks, lambda worker, tick=tick, folder=folder: save_of(worker, folder, tick))
        assert names(folder) == ["step-00000030", "step-00000200"]
        found = newest(folder)
        check(found, 200, ranks)
        with checkpoints.within_reach(found, SoloGroup()) as there:
            assert there == found


def test_every_rank_writes_its_own_part_or_sends_it_where_it_does_not_see_the_folder(
    tmp_path: Path, far: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    together(3, lambda worker: save_of(worker, tmp_path / "seen"))
    check(newest(tmp_path / "seen"), 7, 3)

    def send(worker: Worker, folder: str, w: torch.Tensor | None = None) -> None:
        far(worker.rank > 0)
        save_of(worker, tmp_path / folder, w=w)

    together(3, lambda worker: send(worker, "far"))
    check(newest(tmp_path / "far"), 7, 3)
    together(2, lambda worker: send(worker, "servers", torch.zeros(100 if worker.rank else 5_000_000)))
    assert newest(tmp_path / "servers").ranks == 2  # rank 0 holds the server's vectors, one for each worker
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 1000)  # large parts come in pieces
    values = torch.arange(999.0)
    together(2, lambda worker: send(worker, "large", values + worker.rank))
    assert torch.equal(newest(tmp_path / "large").tensors(1)["w"], values + 1)


def test_a_checkpoint_comes_to_ranks_that_do_not_see_it(
    tmp_path: Path,
    far: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    copies = tmp_path_factory.mktemp("copies")
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    saved = _saved_by_two(tmp_path)

    def read(worker: Worker, hidden: bool) -> tuple[bool, list[int]]:
        far(hidden and worker.rank > 0)
        with checkpoints.within_reach(saved, worker.group) as found:
            return found.path == saved.path, [int(found.tensors(rank)["w"]) for rank in range(found.ranks)]

    assert together(2, lambda worker: read(worker, True)) == [(True, [0, 1]), (False, [0, 1])]
    assert together(2, lambda worker: read(worker, False)) == [(True, [0, 1])] * 2
    assert list(copies.iterdir()) == []


# -- what other ranks send ---------------------------------------------------------------------------------------------


class Forger:
    """A group whose rank says of its part of a checkpoint what `forge` makes of it."""

    def __init__(self, group: Group, forge: Callable[[Any], Any]) -> None:
        self._group, self._forge = group, forge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_gather_json(self, value: Any) -> list[Any]:
        return self._group.all_gather_json(self._forge(value))


def attacked(folder: Path, far: Callable[[bool], None], forge: Callable[[Any], Any], forger: int = 1) -> str:
    """The error of a checkpoint for which one rank forged what it says."""

    def write(worker: Worker) -> None:
        far(worker.rank > 0)
        group = Forger(worker.group, forge) if worker.rank == forger else worker.group
        checkpoints.save(folder, 7, group, {"w": torch.zeros(100)}, {})

    with pytest.raises(ManyhandsError) as raised:
        together(2, write)
    assert not folder.exists() or checkpoints.newest(folder, never) is None, "a forged checkpoint counts"
    return str(raised.value)


DIGEST = "0" * 64
PART = {"bytes": 3, "sha256": DIGEST}


def test_a_rank_decides_neither_names_nor_lengths(tmp_path: Path, far: Callable[[bool], None]) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for output in (
        {"../../escaped": [DIGEST, 3]},
        {"seen": False, "parts": {"../../escaped": PART}},
        {"seen": False, "parts": [PART]},
        *({"seen": False, "parts": [PART | {"bytes": wrong}] * 2} for wrong in (1 << 50, -1, True)),
        {"seen": False, "parts": [PART | {"sha256": "../escaped"}] * 2},
        {"seen": False, "parts": [PART | {"name": "/escaped"}] * 2},
        {"seen": "no", "parts": [PART] * 2},
        ["seen", []],
        None,
    ):
        error = attacked(folder, far, lambda own, output=output: own if own == "" else output)
        assert "worker 1 sent" in error, output
        assert "part of a checkpoint" in error, output
        assert [path.name for path in tmp_path.iterdir()] == ["run"], output
    for token in ("../../x", "/tmp/x", "", "ABCDEF0123456789", 7, None, "0" * 17):  # nor rank 0 folders of others
        error = attacked(tmp_path / "other", far, lambda own, token=token: token, forger=0)
        assert "as the name of a new checkpoint" in error, token

    def other_digest(own: Any) -> Any:
        return own if own == "" else {**own, "parts": [part | {"sha256": DIGEST} for part in own["parts"]]}

    assert "arrived changed from worker 1" in attacked(folder, far, other_digest)


def test_a_copy_is_what_the_driver_verified(tmp_path: Path, far: Callable[[bool], None]) -> None:
    """A rank that sends another file than the one of the plan is named."""
    saved = _saved_by_two(tmp_path)

    def read(worker: Worker) -> None:
        far(worker.rank > 0)
        with checkpoints.within_reach(saved, worker.group):
            pass

    whole = (saved.path / "rank-00000.json").read_bytes()
    for data, words in [(whole.replace(b"0", b"1"), "arrived changed from worker 0"), (b"{}", "became shorter")]:
        (saved.path / "rank-00000.json").write_bytes(data)
        refused(f"rank-00000.json {words}", together, 2, read, kind=ManyhandsError, case=words)


def test_a_checkpoint_that_no_host_sees_and_different_ones_are_errors(tmp_path: Path) -> None:
    saved = _saved_by_two(tmp_path / "here")
    gone = Checkpoint(tmp_path / "nowhere", saved.tick, saved.ranks, saved.parts)
    other = Checkpoint(saved.path, 8, saved.ranks, saved.parts)
    for of, words in [([gone, gone], "no host of this run can read"), ([saved, other], "steps by rank: 7, 8")]:

        def read(worker: Worker, of: list[Checkpoint] = of) -> None:
            with checkpoints.within_reach(of[worker.rank], worker.group):
                pytest.fail("it is not there")

        refused(words, together, 2, read, kind=ManyhandsError)


def _saved_by_two(folder: Path) -> Checkpoint:
    together(2, lambda worker: save_of(worker, folder))
    return newest(folder)


def test_what_is_no_regular_file_is_damage(tmp_path: Path) -> None:
    """Nobody waits for a FIFO, and a link does not bring another file of this user to other hosts."""
    for kind in ("link", "fifo", "directory", "manifest link"):
        path = save(folder := tmp_path / kind, 1)
        file = path / ("manifest.json" if kind == "manifest link" else "rank-00000.json")
        moved = file.replace(tmp_path / f"{kind} elsewhere")
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "directory":
            file.mkdir()
        else:
            file.symlink_to(moved)
        output: list[str] = []
        refused("every checkpoint", checkpoints.newest, folder, output.append)
        assert file.name in output[0] or kind == "directory"


def test_a_damaged_one_is_named_and_the_older_one_used(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path, never) is None
    assert checkpoints.newest(tmp_path / "nothing", never) is None
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    tensors, manifest = path / "rank-00000.safetensors", path / "manifest.json"
    for file in (tensors, manifest):
        data = file.read_bytes()
        for damaged in (data[:-3], data[:-1] + bytes([data[-1] ^ 1]), None):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            check_passed_over(tmp_path)
        file.write_bytes(data)
    assert newest(tmp_path).tick == 2
    for folder in (path, tmp_path / "step-00000001"):
        (folder / "manifest.json").unlink()
    refused("every checkpoint .* is damaged", checkpoints.newest, tmp_path, lambda message: None)


def test_a_manifest_that_says_something_else_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    known = json.loads(manifest.read_text())
    for text in ("[]", "7", '{"format": 1, "sha256": []}', '{"format": 1}'):
        manifest.write_text(text)
        check_passed_over(tmp_path)
    for name, values in {
        "tick": (1, "2", None, -2, 2.0, 10**30, [2]),
        "ranks": (2, 0, "1", None, 10**30, True),
        "launch": ("1", -1, 1.5, None, []),
        "sha256": (None, [], {}, {"rank-00000.json": 7}, "text"),
        "format": (1, "2", None),
    }.items():
        for value in values:
            manifest.write_text(json.dumps(known | {name: value}))
            check_passed_over(tmp_path)
    for name in ("../../secret", "/etc/hostname", "rank-00001.json", "notes.txt"):
        for names in (known["sha256"] | {name: DIGEST}, {name: DIGEST, "rank-00000.json": DIGEST}):
            manifest.write_text(json.dumps(known | {"sha256": names}))
            message = check_passed_over(tmp_path)
            assert "files listed: 3" in message or "files listed: 2" in message
    manifest.write_text(json.dumps(known))
    assert newest(tmp_path).tick == 2


def test_of_two_launches_at_once_the_later_ones_checkpoint_is_the_newer(tmp_path: Path) -> None:
    """On a file system without locks the earlier launch may have gone further before it noticed."""
    for tick, launch in ((4, 2), (9, 1)):
        manifest = save(tmp_path, tick) / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"launch": launch}))
    assert newest(tmp_path).tick == 4
    assert checkpoints.last_launch(tmp_path) == 2


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
    assert newest(tmp_path).tick == 1
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_what_is_kept_and_what_is_discarded(tmp_path: Path) -> None:
    """What was passed over as damaged does not count, and a copy of the user's own is left alone."""
    shutil.copytree(save(tmp_path, 1), tmp_path / "step-00000001-good")
    for tick in (2, 9):
        save(tmp_path, tick)
    (tmp_path / "step-00000009" / "manifest.json").unlink()
    save(tmp_path, 3)  # by the run resumed from 2
    kept = ["step-00000001-good", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    checkpoints.discard_newer(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept[:2]
    whole = torch.zeros(1_000_000)  # a view is saved without the rest of its memory
    path = checkpoints.save(tmp_path, 4, SoloGroup(), {"w": whole[5:9]}, {})
    assert (path / "rank-00000.safetensors").stat().st_size < 1000


def test_random_state_comes_back_whole() -> None:
    def draw() -> tuple[float, float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), float(np.random.randn()), random.gauss(0, 1)

    with rng.kept():
        draw()  # leaves a cached normal draw of each
        state, first = rng.capture(), draw()
        assert draw() != first
        rng.restore(*state)
        assert draw() == first
        of_ranks = [(rng.seed_all(0, rank), draw()) for rank in (0, 1, 1)]
        assert of_ranks[0] != of_ranks[1] == of_ranks[2]  # so that dropout draws apart on each rank


def test_elsewhere_it_counts_once_its_manifest_is_there_and_a_damaged_one_is_replaced(elsewhere: RemotePath) -> None:
    save(elsewhere, 9)
    (elsewhere / "step-00000009" / "manifest.json").remove()
    assert checkpoints.newest(elsewhere, never) is None
    save(elsewhere, 1)
    assert names(elsewhere) == ["step-00000001"]  # what was never finished is gone
    save(elsewhere, 2)
    (elsewhere / "step-00000002" / "rank-00000.safetensors").write_bytes(b"something else")
    message = check_passed_over(elsewhere)
    assert "memory://" in message
    assert "rank-00000.safetensors was changed or cut off" in message
    save(elsewhere, 2)
    assert newest(elsewhere).tick == 2


def test_a_silent_file_system_is_no_damage(elsewhere: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ManyhandsError, match=r"worker 1 wrote rank-00001.json \(\d+ bytes\) to .*, and worker 0 sees no bytes"
    ):
        together(2, lambda worker: save_of(worker, elsewhere))
    assert checkpoints.newest(elsewhere, never) is None
