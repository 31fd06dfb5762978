"""Spark tasks of one host: who they are, and how they wait for the first of them, the host's agent.

A barrier among Spark tasks lasts a second, as Spark looks once a second whether it is over. So nothing is asked by a
barrier that is known otherwise.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Neighbours:
    """The hosts of a stage's Spark tasks, by partition. What has memory in common is a host: a machine, or a container
    of YARN's, whose limit of memory is its own."""

    hosts: tuple[str, ...]

    @classmethod
    def of(cls, addresses: Sequence[str]) -> Neighbours:
        """addresses: HOST:PORT of each Spark task's executor, as the barrier context has them."""
        apart = "CONTAINER_ID" in os.environ
        return cls(tuple(address if apart else address.rpartition(":")[0] for address in addresses))

    @property
    def agents(self) -> list[int]:
        """The first partition of every host."""
        return [self.hosts.index(host) for host in dict.fromkeys(self.hosts)]

    def here(self, partition: int) -> list[int]:
        """The partitions on this one's host, in order."""
        return [i for i, host in enumerate(self.hosts) if host == self.hosts[partition]]

    def apart(self, spaces: Sequence[str]) -> str:
        """Why partitions of one host cannot work together, or "": they have an address in common, and see other
        processes.

        spaces: of each partition (`process_space`).
        """
        for i, host in enumerate(self.hosts):
            if spaces[i] != spaces[self.hosts.index(host)]:
                return (
                    f"executors at {host} have one address and no processes in common, as containers in the host's network have: give each an "
                    "address of its own"
                )
        return ""


def process_space() -> str:
    """Which machine this is since it started, and which of its processes are seen here."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


class Busy:
    """What an agent holds while its host is at work; its neighbours wait until it lets go, or is dead."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("manyhands-busy", os.MFD_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    @property
    def place(self) -> str:
        """Where neighbours find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # children that have a copy hold it no longer, either
        os.close(self._fd)


def wait_until_over(place: str) -> None:
    """Until whoever holds the `Busy` at that place lets go; Spark ends the Spark task if the run is cancelled."""
    with suppress(FileNotFoundError), open(place) as file:  # its process is gone
        fcntl.flock(file, fcntl.LOCK_SH)
