"""What a run survives: how many workers it may lose, when others take their places, and when it starts again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands import spec
from manyhands.errors import BadInput, Unsupported, is_number, is_whole


@dataclass(frozen=True, kw_only=True)
class Survive:
    """What happens when a worker, a host or a server shard is lost, and who may join while a run goes on.

    `str()` gives what `of` reads. Raises BadInput where a number makes no sense.
    """

    max_losses: int | Literal["any"] = 0
    """How many lost workers the run survives; one more ends it. 0: the first one does. any: as many as there are.
    Raise it where machines are taken away or fail; leave it low where a loss means that the program is wrong."""

    min_workers: int = 1
    """With fewer workers the run waits `wait_s` for others, then starts again or fails. Raise it where a run with so
    few workers would take too long to be worth its machines."""

    max_workers: int | None = None
    """Up to so many workers take part when hosts join; further ones wait as spares. None: as many as at the start."""

    replace: bool = True
    """Whether a process is started in a lost one's place, on the same host. Turn it off where hosts, once they have
    lost a worker, are not to be trusted; spare hosts still take free places."""

    max_restarts: int = 0
    """How often the whole run may start again from its newest checkpoint when it cannot go on. Given alone, workers are
    as without `survive`, whatever the strategy: the first that is lost ends all of them, and the run starts again."""

    copies: int = 1
    """How many copies of each server shard there are. 2: a primary and a backup, so that a lost shard loses no update,
    at the price of sending each update twice."""

    silence_s: float = 10.0
    """A worker or host that sends nothing for so long is lost, and ends itself after as long without its driver.
    Raise it where a network is known to be interrupted for longer."""

    wait_s: float = 600.0
    """How long a run with fewer than `min_workers` waits for others. Raise it where machines take longer to come."""

    cooldown_s: float = 10.0
    """After so long a lost host may join again; doubled each time that it is lost, up to 64 times as long. Raise it
    where a host that fails again and again interrupts the others."""

    slow: float | None = None
    """A worker this many times slower than the others, by medians over 20 steps, leaves, which is a loss; no process takes
    its place on its host. It stays where its loss would end the run, and where slow is None. 3 suits a run whose workers
    are equal; leave it out where they are not."""

    def __post_init__(self) -> None:
        if self.max_losses != "any" and not is_whole(self.max_losses, least=0):
            raise BadInput(
                f"survive: max_losses must be a whole number of at least 0, or any; got {self.max_losses!r}: write for "
                "example max_losses=3"
            )
        self._expect_whole("min_workers", least=1)
        if self.max_workers is not None:
            self._expect_whole("max_workers", least=1)
            if self.max_workers < self.min_workers:
                raise BadInput(
                    f"survive: max_workers must be at least min_workers, which is {self.min_workers}; got "
                    f"{self.max_workers}: raise the one, or lower the other"
                )
        if not isinstance(self.replace, bool):
            raise BadInput(f"survive: replace must be true or false; got {self.replace!r}")
        self._expect_whole("max_restarts", least=0)
        if not is_whole(self.copies) or self.copies > 2:
            raise BadInput(
                f"survive: copies must be 1, or 2 for a primary and a backup of each server shard; got {self.copies!r}"
            )
        for name in ("silence_s", "wait_s", "cooldown_s"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise BadInput(f"survive: {name} must be a positive number of seconds; got {value!r}: write {name}=10")
        if self.slow is not None and not (is_number(self.slow) and 1 < self.slow < math.inf):
            raise BadInput(
                f"survive: slow must be a factor above 1, of the median time of a step; got {self.slow!r}: write "
                "slow=3, or leave it out to keep slow workers"
            )

    def _expect_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not is_whole(value, least):
            raise BadInput(
                f"survive: {name} must be a whole number of at least {least}; got {value!r}: write {name}={least} "
                "or more"
            )

    @classmethod
    def of(cls, given: str | Survive | None) -> Survive | None:
        """The option as it is given: `max_losses=3,replace=false`, or what this made. "" and None: None, a loss ends
        the run. Raises BadInput or UnknownName."""
        return spec.option_of(Survive, given, "survive", "max_losses=3")

    def __str__(self) -> str:
        """The options that differ from their defaults; `max_losses=0` where none does, because "" reads as None."""
        return spec.to_spec(self, "survive").partition(":")[2] or "max_losses=0"

    @property
    def restarts_only(self) -> bool:
        """Whether nothing but the start of the whole run again is asked for: members never change."""
        times = {name: getattr(self, name) for name in ("silence_s", "wait_s", "cooldown_s")}
        return self.max_restarts > 0 and self == Survive(max_restarts=self.max_restarts, **times)

    def check(self, workers: int, batch_size: int | None, server: bool) -> None:
        """BadInput or Unsupported for what such a run cannot have. batch_size: the global one, None where unknown."""
        most = workers if self.max_workers is None else self.max_workers
        if not self.min_workers <= workers <= most:
            side = (
                f"min_workers={self.min_workers} or more"
                if workers < self.min_workers
                else f"max_workers={most} or less"
            )
            raise BadInput(
                f"survive: the run must start with {side}; got {workers} workers: change one of the two numbers"
            )
        if batch_size is not None and most > batch_size:
            raise BadInput(
                f"survive: max_workers must be at most batch_size, which is {batch_size}, so that each worker has a "
                f"row; got {most}: lower it, or raise batch_size"
            )
        if self.copies > 1 and not server:
            raise Unsupported(
                f"survive: copies={self.copies} is of server shards, and this run has no server: use a strategy with "
                "one, such as downpour, or leave it out"
            )
