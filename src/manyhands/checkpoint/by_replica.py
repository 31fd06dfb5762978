"""A checkpoint of replicas that are cut into other parts now: each replica's tensors, of those that a worker holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from manyhands.checkpoint.checkpoints import Checkpoint

_BY_PARAMETER = ("parameters", "strategy", "optimizer", "best", "server")
_BY_BUFFER = ("buffers", "best_buffers")


class ByReplica:
    """A `run_state.Snapshot` whose ranks are replicas, each written by so many workers.

    A tensor is read from the first of these that has it, a buffer from the one whose it is. What belongs to one worker
    alone, its random state, is left out.
    """

    def __init__(self, saved: Checkpoint, held: Collection[str]) -> None:
        """held: the names of this worker's parameters."""
        self._saved, self._held = saved, held
        self._values: dict[int, dict[str, Any]] = {}  # by worker: read once
        self._members = members_of(self._of_member(0))
        self.ranks = saved.ranks // self._members

    def reader(self, rank: int) -> Mapping[str, Tensor]:
        """A replica's tensors by name, each read when it is asked for."""
        found: dict[str, Mapping[str, Tensor]] = {}
        known = self.values(rank)["slices"]
        for member in self._of(rank):
            own, buffers = self._saved.reader(member), set(self._of_member(member).get("buffers", ()))
            for name in own:
                kind, _, rest = name.partition("/")
                parameter = rest if kind in ("parameters", "best") else rest.partition("/")[2]
                if kind in _BY_PARAMETER and (parameter not in known or parameter in self._held):
                    found.setdefault(name, own)  # what a strategy keeps of no parameter is alike on all
                elif kind in _BY_BUFFER and (rest in buffers or name not in found):
                    found[name] = own
        return _Joined(found)

    def values(self, rank: int) -> dict[str, Any]:
        """The first of its workers', with all of their optimizer's, and the newest version of its server; no random state."""
        everyone = [self._of_member(member) for member in self._of(rank)]
        optimizer = dict(everyone[0]["optimizer"])
        optimizer["values"] = {
            name: held for one in everyone for name, held in one["optimizer"]["values"].items() if name in self._held
        }
        slices = {name: part for one in reversed(everyone) for name, part in one["slices"].items()}
        found = everyone[0] | {"optimizer": optimizer, "slices": slices, "random": None}
        if (server := everyone[0].get("server")) is not None:
            version = max(one["server"]["numbers"]["version"] for one in everyone)
            found["server"] = {**server, "numbers": {**server["numbers"], "version": version}}
        return found

    def _of_member(self, member: int) -> dict[str, Any]:
        if member not in self._values:
            self._values[member] = self._saved.values(member)
        return self._values[member]

    def _of(self, replica: int) -> range:
        return range(replica * self._members, (replica + 1) * self._members)


class _Joined(Mapping[str, Tensor]):
    """Of several files as one."""

    def __init__(self, found: dict[str, Mapping[str, Tensor]]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def members_of(values: Mapping[str, Any]) -> int:
    """How many workers held a replica together when these values of one of them were written."""
    return int(values.get("members", 1))
