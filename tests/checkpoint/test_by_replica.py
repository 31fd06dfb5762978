"""A checkpoint of two replicas of three stages, as a worker of another plan reads it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.by_replica import ByReplica
from manyhands.checkpoint.checkpoints import Checkpoint, SavedTensors
from manyhands.testing.threads import together
from manyhands.worker import Worker

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


def test_it_reads_what_it_holds_once_and_parses_each_file_once(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch#149640, torchtitan#811: only what overlaps is read, of whichever workers wrote it."""
    parsed, read = Counter[int](), Counter[str]()
    values, get = Checkpoint.values, SavedTensors.__getitem__

    def counted_values(self: Checkpoint, rank: int) -> dict[str, Any]:
        parsed[rank] += 1
        return values(self, rank)

    def counted_get(self: SavedTensors, name: str) -> Tensor:
        tensor = get(self, name)
        read[name] += tensor.nbytes
        return tensor

    monkeypatch.setattr(Checkpoint, "values", counted_values)
    monkeypatch.setattr(SavedTensors, "__getitem__", counted_get)
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
        assert sum(read.values()) == 4 * SIZE * 4
        read.clear()
        assert tensors["buffers/count"].tolist() == [1.0] * 3  # of the stage that writes it
        assert tensors["buffers/mask"].tolist() == [0.0] * 3
        read.clear()
    assert parsed == dict.fromkeys(range(6), 1)
