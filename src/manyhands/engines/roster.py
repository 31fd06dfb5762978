"""Who gives workers to a run on several hosts: pure, no clock, no socket."""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from manyhands.engines.cores import usable_cores
from manyhands.errors import is_whole

JOIN = "join"
"""The purpose of a hello that offers workers."""


def versions() -> dict[str, str]:
    """What must be the same on all hosts of a run: the program travels as Python's own code, and results must not differ."""
    from manyhands import __version__

    major, minor, _ = platform.python_version_tuple()
    return {"python": f"{major}.{minor}", "torch": version("torch").partition("+")[0], "manyhands": __version__}


def hello(workers: int) -> dict[str, Any]:
    """What a host says that offers its workers."""
    return {
        "purpose": JOIN,
        "workers": workers,
        "host": socket.gethostname(),
        "versions": versions(),
        "cores": usable_cores(),
    }


@dataclass(frozen=True)
class Guest:
    """A host that joined."""

    host: str
    workers: int


@dataclass
class Roster:
    """The driver's host first, then guests in the order of their coming; each host's ranks are contiguous."""

    workers: int  # of the whole run
    host: str  # the driver's
    here: int  # workers that it gives itself
    guests: list[Guest] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.workers - self.here - sum(guest.workers for guest in self.guests)

    def refusal(self, said: dict[str, Any]) -> str:
        """Why whoever says this hello cannot join, or "" """
        if said.get("purpose") != JOIN or not isinstance(said.get("host"), str):
            return "this is the driver of a run, which takes hosts that join: start `manyhands join`"
        if not is_whole(said.get("workers")):
            return f"a host joins with at least one worker, not {said.get('workers')!r}"
        if said.get("versions") != versions():
            return f"versions differ: the driver has {_text(versions())}, this host {_text(said.get('versions'))}; install the same"
        if not self.missing:
            return f"all {self.workers} workers are here already"
        if said["workers"] > self.missing:
            return (
                f"{self.missing} of {self.workers} workers {'is' if self.missing == 1 else 'are'} missing, "
                f"not {said['workers']}: join with --workers {self.missing}"
            )
        return ""

    def seats(self) -> list[list[int]]:
        """Ranks by host."""
        counts, seats, first = [self.here, *(guest.workers for guest in self.guests)], [], 0
        for count in counts:
            seats.append(list(range(first, first + count)))
            first += count
        return seats

    def names(self) -> list[str]:
        """Hosts, as messages name them: by their own name, numbered where several have the same."""
        own = [self.host, *(guest.host for guest in self.guests)]
        return [name if own.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(own)]

    def text(self) -> str:
        """`2 of 4 workers are here: alpha 2`"""
        counts = [self.here, *(guest.workers for guest in self.guests)]
        who = ", ".join(f"{name} {count}" for name, count in zip(self.names(), counts, strict=True))
        return f"{self.workers - self.missing} of {self.workers} workers are here: {who}"


def _text(found: Any) -> str:
    if not isinstance(found, dict):
        return "none that it says"
    return ", ".join(f"{str(name)[:20]} {str(value)[:20]}" for name, value in found.items())
