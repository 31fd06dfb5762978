"""What is to go wrong in a run, and when: in a simulation, or by real signals on engines `local` and `hosts`."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from manyhands.engines.quantities import TIME, expect_number, read_items, read_seconds, shown, unknown
from manyhands.errors import BadInput, Unsupported, is_whole
from manyhands.units import NUMBER, count

if TYPE_CHECKING:
    from manyhands.engines.base import LaunchSpec

What = Literal["kill", "pause", "restart", "leave", "join", "nan", "disk", "cut"]
Phase = Literal["compute", "exchange", "commit", "save", "join"]

ORDERLY = ("leave", "join")
"""They change who takes part, and nothing goes wrong: for runs whose members may change (`survive`)."""
OF_A_STEP = ("nan", "disk")
"""They befall what a worker does at one of its steps, and leave its process alone."""

_PLANNED = (
    r"(?P<kind>shard|backup|host)?(?P<number>\d{1,9})@"
    rf"(?:step:(?P<step>\d{{1,18}})(?::(?P<phase>[a-z]+))?|(?P<time>{TIME}))(?:\+(?P<seconds>{TIME}))?"
)
_PROBABILITIES = ("drop", "duplicate", "delay", "reorder")
_OPTIONS = {"retry": "retry_s", "notice": "notice_s", "back": "back_s", "mtbf": "mtbf_s"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens to one worker, server shard or host. Raises BadInput where it cannot."""

    what: What
    node: int  # rank, or -1 - shard; of a join, how many workers come; of a cut, which host
    backup: bool = False  # of a shard: its backup, whichever process that is then; else its primary
    step: int | None = None  # of this worker's own, counted from 0 (workers only), in `phase` …
    phase: Phase = "compute"
    """compute: as the step begins; exchange: inside its first operation of the group or server; commit: before the
    optimizer's step that follows; save: as the checkpoint at that step begins; join: as training begins (step 0)."""
    time: float | None = None  # … or at this time, seconds
    seconds: float = 0.0  # how long a pause or a cut lasts, or until a restarted one is back

    def __post_init__(self) -> None:
        if self.what not in get_args(What):
            raise BadInput(f"faults: a fault must be one of {', '.join(get_args(What))}; got {self.what!r}")
        if (self.step is None) == (self.time is None):
            raise BadInput(f"faults: {self.what} needs either a step or a time; got step {self.step}, time {self.time}")
        if self.step is not None and not is_whole(self.step, least=0):
            raise BadInput(f"faults: a step must be a whole number of at least 0; got {self.step!r}")
        if self.node < 0 and self.step is not None:
            raise BadInput(
                f"faults: {self} gives a step, and a server shard makes no steps: give a time, as in "
                f"{self.what}=shard0@2.5s"
            )
        if self.phase not in get_args(Phase):
            raise BadInput(f"faults: a phase must be one of {', '.join(get_args(Phase))}; got {self.phase!r}")
        if self.time is not None:
            expect_number(self.time, f"faults: the time of a {self.what} (seconds)", least=0)
        expect_number(self.seconds, f"faults: how long a {self.what} takes (seconds)", least=0)
        if self.what == "cut" and (self.step is not None or self.node < 0):
            raise BadInput(
                f"faults: {self} must be cut=hostNUMBER@TIME+SECONDS, since a host makes no steps: write cut=host1@2s+3"
            )
        if self.what in ("pause", "cut") and not self.seconds:
            raise BadInput(f"faults: {self} does not say for how long: write {self}+3 for 3 seconds")
        if self.what == "kill" and self.seconds:
            raise BadInput(
                f"faults: {self} gives a time to come back, and kill has none: write "
                f"{str(self).replace('kill', 'restart')}"
            )
        if self.what in OF_A_STEP and (self.step is None or self.seconds or self.phase != "compute"):
            raise BadInput(
                f"faults: {self} must be {self.what}=WORKER@step:NUMBER, without a phase or a duration: write "
                f"{self.what}={max(self.node, 0)}@step:100"
            )
        if self.what in ORDERLY and (self.seconds or self.phase != "compute" or self.node < 0):
            raise BadInput(
                f"faults: {self} must be {self.what}=NUMBER@WHEN without a phase or a duration: write {self.what}="
                f"{max(self.node, 1)}@step:100"
            )
        if self.what == "join" and not self.node:
            raise BadInput("faults: join=0 brings nobody: write join=1@step:100 for one more worker")

    def __str__(self) -> str:
        kind = "host" if self.what == "cut" else ""
        node = f"{kind}{self.node}" if self.node >= 0 else f"{'backup' if self.backup else 'shard'}{-1 - self.node}"
        when = f"step:{self.step}" if self.step is not None else f"{shown(self.time or 0.0)}s"
        when += f":{self.phase}" if self.phase != "compute" else ""
        return f"{self.what}={node}@{when}" + (f"+{shown(self.seconds)}" if self.seconds else "")

    def missed(self) -> str:
        """What a run warns of that ended before this happened."""
        return f"faults: {self} did not happen: the run, or the worker or shard that it names, had ended before"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """All that goes wrong. The probabilities are of each message to or from a server.

    `str()` gives what `parse` reads. Raises BadInput where a number makes no sense.
    """

    planned: tuple[Fault, ...] = ()
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0  # mean of an exponential delay
    reorder: float = 0.0  # a message is held back for up to 2 · retry_s: later ones, even its repetition, may pass it
    retry_s: float = 0.2  # a message without answer is sent again after so long
    notice_s: float = 1.0  # a worker that was killed is declared lost after so long
    back_s: float = 0.0  # a process in a lost one's place begins so long after it was asked for
    mtbf_s: float = 0.0  # each worker's process is killed after an exponential time of this mean; 0: never

    def __post_init__(self) -> None:
        for name in _PROBABILITIES:
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < 1:
                raise BadInput(f"faults: {name} must be a probability of at least 0 and below 1; got {value!r}")
        expect_number(self.delay_s, "faults: the mean delay (seconds)", least=0)
        expect_number(self.retry_s, "faults: retry (seconds)", above=0)
        expect_number(self.notice_s, "faults: notice (seconds)", least=0)
        expect_number(self.back_s, "faults: back (seconds)", least=0)
        expect_number(self.mtbf_s, "faults: mtbf (seconds)", least=0)
        if self.delay and not self.delay_s:
            raise BadInput(
                f"faults: delay={shown(self.delay)} does not say for how long: write delay={shown(self.delay)}:0.5 "
                "for 0.5 seconds on average"
            )

    @classmethod
    def of(cls, faults: str | Faults) -> Faults:
        """An engine's option: the text of `parse`, or what it gave."""
        return faults if isinstance(faults, Faults) else cls.parse(faults)

    @classmethod
    def parse(cls, text: str) -> Self:
        """`kill=2@step:100,pause=1@2.5s+3,restart=shard0@4s+0.5,drop=0.01,delay=0.1:0.5,retry=0.2,notice=1`

        kill, pause and restart: of worker 2, or shard0 of the server, and for how long; as many as wanted. Where the
        shard has copies: of its primary, or, as backup0, its backup.
        leave=2: worker 2 leaves in order. join=2: two more workers come.
        cut=host1@2s+3: all connections of host 1 to others break, and for 3 seconds nothing passes between them.
        nan=2: worker 2's gradient of that step is not finite. disk=2: it finds its disk full as it saves at that step.
        When: at a step that the worker begins, later in it (step:100:exchange, see `Fault.phase`), or at a time.
        drop, duplicate, delay (with its mean seconds), reorder: the probability for each message to or from a server.
        Times are seconds, or 2s, 10ms. Raises BadInput or UnknownName.
        """
        planned: list[Fault] = []
        changes: dict[str, Any] = {}
        for name, value in read_items(text, "faults"):
            if name in get_args(What):
                planned.append(_read_fault(name, value))
            elif name in _PROBABILITIES:
                probability, colon, mean = value.partition(":")
                if not re.fullmatch(rf"-?{NUMBER}", probability) or (colon and name != "delay"):
                    by_name = f"a number, as in {name}=0.01"
                    shape = "PROBABILITY:SECONDS, as in delay=0.1:0.5" if name == "delay" else by_name
                    raise BadInput(f"faults: {name} must be {shape}; got {value!r}")
                changes[name] = float(probability)
                if colon:
                    changes["delay_s"] = read_seconds(mean, "faults: the mean delay")
            elif name in _OPTIONS:
                changes[_OPTIONS[name]] = read_seconds(value, f"faults: {name}")
            else:
                raise unknown(name, "faults", [*get_args(What), *_PROBABILITIES, *_OPTIONS])
        return replace(cls(planned=tuple(planned)), **changes)

    def __str__(self) -> str:
        parts = [str(fault) for fault in self.planned]
        for name in _PROBABILITIES:
            mean = self.delay_s if name == "delay" else 0.0
            if (value := getattr(self, name)) or mean:
                parts.append(f"{name}={shown(value)}" + (f":{shown(mean)}" if mean else ""))
        defaults = {entry.name: entry.default for entry in fields(self)}
        for name, attribute in _OPTIONS.items():
            if (value := getattr(self, attribute)) != defaults[attribute]:
                parts.append(f"{name}={shown(value)}")
        return ",".join(parts)

    def check(self, workers: int, shards: int, *, rejoins: bool = True, copies: int = 1) -> None:
        """BadInput or Unsupported for faults that such a run cannot have. rejoins: a restarted worker can take part.
        copies: of each shard."""
        for fault in self.planned:
            if fault.what in ("join", "cut"):
                continue
            if fault.node >= workers or -1 - fault.node >= shards:
                there = (
                    f"the last worker of this run is {workers - 1}"
                    if fault.node >= 0
                    else f"this run has {count(shards, 'server shard')}"
                )
                name = f"worker {fault.node}" if fault.node >= 0 else f"shard {-1 - fault.node}"
                raise BadInput(f"faults: {fault.what} names {name}, and {there}: name one that exists")
            if fault.backup and copies < 2:
                raise Unsupported(
                    f"faults: {fault} is of a shard's backup, and this run keeps none: give survive, such as "
                    'survive="copies=2" (--copies 2)'
                )
            if fault.what == "restart" and fault.node >= 0 and not rejoins:
                raise Unsupported(
                    f"faults: {fault} is not possible, because a restarted worker cannot join a running training: use "
                    "kill or pause, or restart a server shard"
                )
        named = [name for name in _PROBABILITIES if getattr(self, name)]
        if named and not shards:
            raise Unsupported(
                f"faults: only messages to and from a parameter server can have {', '.join(named)}, and this run has "
                "no server: use a strategy with one, such as downpour, or leave this out"
            )

    def check_real(self, engine: str, spec: LaunchSpec, instead: str = "") -> None:
        """As `check`, for an engine whose processes get real signals. instead: of workers that run in this process."""
        self.check(most_workers(spec), spec.shards, copies=spec.copies)
        self.check_changes(spec)
        if self.planned and instead:
            raise Unsupported(f"faults: one worker runs in this process, which they would end: {instead}")
        if simulated := [str(fault) for fault in self.planned if fault.what in ("restart", "cut")]:
            raise Unsupported(
                f"faults: engine {engine} cannot do {', '.join(simulated)}: use kill or pause, or engine sim"
            )
        if of_messages := str(replace(self, planned=(), mtbf_s=0.0)):
            raise Unsupported(
                f"faults: {of_messages} is for messages that are simulated, and engine {engine} sends real ones: use engine "
                "sim, or leave it out"
            )

    def check_changes(self, spec: LaunchSpec) -> None:
        """Unsupported for what needs a run whose members may change."""
        changes = [str(fault) for fault in self.planned if fault.what in ORDERLY]
        changes += [str(Faults(mtbf_s=self.mtbf_s))] if self.mtbf_s else []
        if spec.fixed_members and (orderly := [str(fault) for fault in self.planned if fault.what in ORDERLY]):
            raise Unsupported(
                f"faults: {', '.join(orderly)} needs a run whose workers may change, and this one survives lost shards alone: "
                "give max_losses too (--max-losses 1)"
            )
        if spec.survive is None and changes:
            raise Unsupported(
                f"faults: {', '.join(changes)} needs a run whose members may change: give survive, such as "
                'survive="max_losses=1" (--max-losses 1)'
            )

    def without(self, fired: Collection[str]) -> Faults:
        """Those that have not happened yet: each happens once a run, however often that starts again."""
        return replace(self, planned=tuple(fault for fault in self.planned if str(fault) not in fired))

    def lifetime(self, seed: int, worker_id: int, process: int) -> float:
        """Seconds until this worker's process of this number is killed, by `mtbf`; infinite without."""
        if not self.mtbf_s:
            return math.inf
        return random.Random(f"{seed} lifetime {worker_id} {process}").expovariate(1 / self.mtbf_s)

    def messages(self, seed: int) -> Messages | None:
        """What happens to messages; None where nothing does."""
        return Messages(self, seed) if any(getattr(self, name) for name in _PROBABILITIES) else None


def most_workers(spec: LaunchSpec) -> int:
    """How many workers may take part at a time."""
    return spec.workers if spec.survive is None else spec.survive.max_workers or spec.workers


class Messages:
    """Draws what happens to each message: the same for the same seed, message by message."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults, self._generator = faults, random.Random(f"{seed} messages")

    def copies(self) -> list[float]:
        """How many seconds late each copy of the next message arrives: [0.0] on time; [] it is lost."""
        faults, happens = self._faults, self._happens
        if happens(faults.drop):
            return []
        return [self._late() for _ in range(2 if happens(faults.duplicate) else 1)]

    def _late(self) -> float:
        faults, late = self._faults, 0.0
        if self._happens(faults.delay):
            late += self._generator.expovariate(1 / faults.delay_s)
        if self._happens(faults.reorder):
            late += self._generator.uniform(0, 2 * faults.retry_s)
        return late

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._generator.random() < probability


def _read_fault(what: Any, text: str) -> Fault:
    found = re.fullmatch(_PLANNED, text)
    if found is None:
        raise BadInput(
            f"faults: {what} must be WHO@WHEN or WHO@WHEN+SECONDS (WHO: a rank, shard0 or backup0; WHEN: step:100, "
            "step:100:exchange or 2.5s); got "
            f"{text!r}: write for example {what}={'2@step:100' if what == 'kill' else '2@step:100+3'}"
        )
    number, kind = int(found["number"]), found["kind"]
    if (kind == "host") != (what == "cut"):
        who = "a host: write cut=host1@2s+3" if what == "cut" else "a worker or a server shard, and cut alone a host"
        raise BadInput(f"faults: {what} names {who}; got {text!r}")
    phase: Any = found["phase"] or "compute"
    return Fault(
        what=what,
        node=-1 - number if kind in ("shard", "backup") else number,
        backup=kind == "backup",
        step=None if found["step"] is None else int(found["step"]),
        phase=phase,
        time=None if found["time"] is None else read_seconds(found["time"], f"faults: {what}"),
        seconds=0.0 if found["seconds"] is None else read_seconds(found["seconds"], f"faults: {what}"),
    )
