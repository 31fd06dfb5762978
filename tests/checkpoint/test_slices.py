"""Which copy of a parameter counts in a checkpoint, and what a resume with other workers or another plan reads."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.by_replica import ByReplica
from manyhands.checkpoint.checkpoints import Checkpoint, SavedTensors
from manyhands.testing.threads import together
from manyhands.worker import Worker

WIDE = 64
Reads = list[tuple[str, str, int]]  # (file, tensor, bytes)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, 3)).double()


def train(folder: Path, workers: int, strategy: str = "allreduce", epochs: int = 1, **options: Any) -> mh.Run:
    fields = {"model": model, "optimizer": plain.OPTIMIZERS["momentum"], "train_data": plain.rows(48)}
    task = plain.task(**fields, epochs=epochs)
    return mh.train(task, engine="sim", workers=workers, strategy=strategy, run_dir=folder, callbacks=[], **options)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """All that was read one by one, in order."""
    found: Reads = []
    init, get = SavedTensors.__init__, SavedTensors.__getitem__

    def opened(self: Any, path: Any) -> None:
        init(self, path)
        self.file = Path(path).name

    def taken(self: Any, name: str) -> torch.Tensor:
        before = self.bytes_read
        tensor = get(self, name)
        found.append((self.file, name, self.bytes_read - before))
        return tensor

    monkeypatch.setattr(SavedTensors, "__init__", opened)
    monkeypatch.setattr(SavedTensors, "__getitem__", taken)
    return found


def counted(folder: Path) -> list[bool]:
    """Of each rank, whether its copy of the first weight counts."""
    newest = checkpoints.newest(folder / "checkpoints", lambda message: pytest.fail(message))
    assert newest is not None
    slices = [newest.values(rank)["slices"]["0.weight"] for rank in range(newest.ranks)]
    for one in slices:
        assert (one["shape"], one["start"], one["stop"]) == ([WIDE, 5], [0, 0], [WIDE, 5])
    return [one["counted"] for one in slices]


def test_of_equal_replicas_one_counts_and_is_read(tmp_path: Path, read: Reads) -> None:
    train(tmp_path, 4)
    assert counted(tmp_path) == [True, False, False, False]
    resumed = train(tmp_path, 2, epochs=2, resume=True)
    assert resumed.rows["total"] == 96
    whole_run = train(tmp_path / "whole", 1, epochs=2)
    assert (resumed.parameters - whole_run.parameters).abs().max() < 1e-10
    assert {file for file, name, _ in read if name.startswith(("parameters/", "optimizer/"))} == {min(read)[0]}
    whole = sum(p.nbytes for p in model().parameters())
    assert sum(n for _, name, n in read if name.startswith("parameters/")) == 2 * whole, "by each of two"


def test_replicas_that_differ_are_read_one_tensor_at_a_time(tmp_path: Path, read: Reads) -> None:
    """The next one is asked for when the mean of the one before, over all ranks, is made."""
    train(tmp_path, 4, strategy="gossip")
    assert counted(tmp_path) == [True] * 4
    train(tmp_path, 1, strategy="gossip", epochs=2, resume=True)
    names = [name for _, name, _ in read if name.startswith("parameters/")]
    assert names == [name for name in dict.fromkeys(names) for _ in range(4)]
    whole = sum(p.nbytes for p in model().parameters())
    assert sum(n for _, name, n in read if name.startswith("parameters/")) == 4 * whole


def test_a_resume_with_another_number_is_what_it_was(tmp_path: Path) -> None:
    """The parameters with which it goes on: those with which the first launch ended."""
    for strategy in ("allreduce", "local-sgd:period=3", "diloco:period=2"):
        first = train(tmp_path / strategy, 3, strategy=strategy)
        again = train(tmp_path / strategy, 2, strategy=strategy, epochs=2, resume=True, max_steps=4)
        assert (first.parameters - again.parameters).abs().max() < 1e-12, strategy


# -- by_replica.py: two replicas of three stages, as a worker of another plan reads them ---------------------------------


HELD = [["a", "tied"], ["b", "c"], ["d", "tied"]]  # by stage
SIZE = 1000


def value(name: str, replica: int) -> Tensor:
    return torch.full((SIZE,), float(100 * replica + ord(name[0])))


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    def program(worker: Worker) -> None:
        replica, stage = divmod(worker.rank, 3)
        tensors = {f"parameters/{name}": value(name, replica) for name in HELD[stage]}
        tensors |= {f"optimizer/exp_avg/{name}": -value(name, replica) for name in HELD[stage]}
        tensors |= {f"buffers/{name}": torch.full((3,), float(stage)) for name in ("count", "mask")}
        tensors |= {f"random/{worker.rank}": torch.zeros(5), "strategy/center/": torch.zeros(2)}
        whole = {"shape": [SIZE], "start": [0], "stop": [SIZE]}
        values = {
            "members": 3,
            "slices": {name: whole | {"counted": (name, stage) != ("tied", 2)} for name in HELD[stage]},
            "buffers": ["count"] if stage == 1 else ["mask"] if stage == 0 else [],
            "optimizer": {"values": {name: {"step": stage} for name in HELD[stage]}, "groups": []},
            "position": {"tick": 4},
        }
        checkpoints.save(tmp_path, 4, worker.group, tensors, values)

    together(6, program)
    found = checkpoints.newest(tmp_path, lambda message: pytest.fail(message))
    assert found is not None
    return found


def test_it_reads_and_parses_once(saved: Checkpoint, read: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#149640, torchtitan#811: only what overlaps is read, of whichever workers wrote it."""
    parsed, values = Counter[int](), Checkpoint.values

    def counted_values(self: Checkpoint, rank: int) -> dict[str, Any]:
        parsed[rank] += 1
        return values(self, rank)

    monkeypatch.setattr(Checkpoint, "values", counted_values)
    snapshot = ByReplica(saved, {"b", "tied"})
    assert snapshot.ranks == 2
    for replica in range(2):
        tensors, known = snapshot.reader(replica), snapshot.values(replica)
        assert set(tensors) == {
            *("parameters/b", "parameters/tied", "optimizer/exp_avg/b", "optimizer/exp_avg/tied"),
            *("buffers/count", "buffers/mask", "strategy/center/"),
        }
        assert known["optimizer"]["values"] == {"b": {"step": 1}, "tied": {"step": 2}}
        assert known["slices"]["tied"]["counted"]
        assert known["random"] is None
        assert not read, "nothing is read before it is asked for"
        for name in ("b", "tied"):
            assert torch.equal(tensors[f"parameters/{name}"], value(name, replica))
            assert torch.equal(tensors[f"optimizer/exp_avg/{name}"], -value(name, replica))
        assert sum(n for *_, n in read) == 4 * SIZE * 4
        assert tensors["buffers/count"].tolist() == [1.0] * 3  # of the stage that writes it
        assert tensors["buffers/mask"].tolist() == [0.0] * 3
        read.clear()
    assert parsed == dict.fromkeys(range(6), 1)
