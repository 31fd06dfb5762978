"""Who gives workers to a run on several hosts: pure, no clock, no socket."""

from __future__ import annotations

import platform
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count
from typing import Any

from manyhands.engines.cores import usable_cores
from manyhands.errors import is_whole
from manyhands.units import printable

JOIN = "join"
"""The purpose of a hello that offers workers."""


def versions() -> dict[str, str]:
    """What must be equal on all hosts of a run: the program travels as Python code, and results must not differ."""
    from manyhands import __version__

    major, minor, _ = platform.python_version_tuple()
    return {"python": f"{major}.{minor}", "torch": version("torch").partition("+")[0], "manyhands": __version__}


def hello(workers: int, order: int = 0) -> dict[str, Any]:
    """What a host says that offers its workers; `order` is for an engine whose hosts have one of their own."""
    return {
        "purpose": JOIN,
        "workers": workers,
        "order": order,
        "host": socket.gethostname(),
        "versions": versions(),
        "cores": usable_cores(),
    }


@dataclass(frozen=True)
class Offer:
    """A host, and how many workers it gives."""

    host: str
    workers: int
    order: int = 0


@dataclass
class Roster:
    """Offers in order of arrival, the driver's own first where it has workers; a host's ranks are contiguous."""

    workers: int  # of the whole run
    offers: list[Offer] = field(default_factory=list)
    takes_part_of_offers: bool = False  # where members may change: a host that offers more than are missing gives those

    @property
    def missing(self) -> int:
        return self.workers - sum(offer.workers for offer in self.offers)

    @staticmethod
    def name_of(fields: dict[str, Any]) -> str:
        """A host's own name as messages and logs show it."""
        return printable(fields["host"], 64)

    def refusal(self, fields: dict[str, Any]) -> str:
        """Why whoever says this hello cannot join before the run begins, or "" """
        if reason := refusal(fields):
            return reason
        if not self.missing:
            return f"this run has all of its workers already ({self.workers}), so no more hosts can join"
        if fields["workers"] > self.missing and not self.takes_part_of_offers:
            return (
                f"this run needs {self.missing} more of its {self.workers} workers, and this host offers "
                f"{fields['workers']}: join with --workers {self.missing}"
            )
        return ""

    def process_indices(self) -> list[list[int]]:
        """Ranks by host."""
        process_indices, first = [], 0
        for offer in self.offers:
            process_indices.append(list(range(first, first + offer.workers)))
            first += offer.workers
        return process_indices

    def names(self) -> list[str]:
        """Hosts, as messages name them: by their own name, numbered where several have the same."""
        own = [offer.host for offer in self.offers]
        return [name if own.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(own)]

    def text(self) -> str:
        """`workers that are here: 2 of 4 (alpha 2)`"""
        who = ", ".join(f"{name} {offer.workers}" for name, offer in zip(self.names(), self.offers, strict=True))
        return f"workers that are here: {self.workers - self.missing} of {self.workers}{f' ({who})' if who else ''}"


def refusal(fields: dict[str, Any]) -> str:
    """Why whoever says this hello cannot join any run of this program, or "" """
    if fields.get("purpose") != JOIN or not isinstance(fields.get("host"), str) or not fields["host"]:
        return "this is the driver of a run, and only `manyhands join` can connect to it"
    if not is_whole(fields.get("workers")):
        return f"a host must join with at least one worker, not {fields.get('workers')!r}"
    if not is_whole(fields.get("order"), least=0):
        return f"a host's place in the order must be a whole number, not {fields.get('order')!r}"
    if fields.get("versions") != versions():
        return (
            f"versions differ: the driver has {listed(versions())}, and this host has "
            f"{listed(fields.get('versions'))}. Install the same versions"
        )
    return ""


def free_name(own: str, names: Collection[str]) -> str:
    """What messages call a host that joins those of these names: its own name, numbered where that is taken."""
    taken = {own, *names} if any(name.startswith(f"{own} (") for name in names) else set(names)
    return own if own not in taken else next(name for i in count(2) if (name := f"{own} ({i})") not in taken)


def listed(found: Any) -> str:
    """Versions, as messages name them; of what somebody else says the first letters."""
    if not isinstance(found, dict):
        return "unknown versions"
    return ", ".join(f"{printable(name, 20)} {printable(value, 20)}" for name, value in found.items())
