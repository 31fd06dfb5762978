"""One shard of the server as a pure state machine: no clock, no thread, no socket. Whoever serves it calls it one call
at a time.

What a call releases besides its own answer (a gate that opens, a round that is complete) lies in `released` afterwards.

Which pushes become one version, and when, is the merge policy's (merging.py); how, is the rule's. A rule may keep what
was merged for a later version (`rounds`). That round is closed when the center is read while nobody takes part, or
after the last pushes before a meeting, so that it has all that was pushed; not when they park, since who parks to meet
the others may push what it has begun. A push of weight 0 changes nothing in any rule, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import check_mean
from manyhands.errors import BadInput, ManyhandsError
from manyhands.server.gate import Gate
from manyhands.server.merging import MergePolicy
from manyhands.server.pushes import Applied, Dropped, Held, Push
from manyhands.server.rules.base import Rule


class InvalidCall(ManyhandsError):
    """A call that cannot be right in this state: nothing was changed. The connection it came over is to be closed."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """This (worker, sequence) was here before: nothing happened; `reply` is the reply of then, or since."""

    reply: Applied | Held | Dropped


@dataclass(frozen=True, slots=True)
class Go:
    """The gate is open."""

    bits: int


@dataclass(frozen=True, slots=True)
class WaitForGate:
    """The gate is closed: a Go for this worker will be in `released`."""


Reply = Applied | Dropped | Go


class _WorkerState:
    """What the store knows of one worker."""

    def __init__(self) -> None:
        self.generation = -1
        self.lost = False
        self.sequence = 0  # of its last push in this generation
        self.reply: Applied | Held | Dropped | None = None  # to that
        self.active_from = 0  # the ticks that it counted as finished when it last became active
        self.pushed_in = -1  # the tick since then in which it last pushed, from 0; -1: in none
        self.pulled = 0  # the version at its last pull
        self.own: list[int] = []  # versions that it had a part in, since the one on which its last push was based
        self.ticks = 0  # the number of its last finished tick, where ticks are numbered
        self.go = Go(0)  # the answer to its last tick that was answered
        self.stale: Tensor | None = None  # [n] that version, for rules that keep it

    def numbers(self) -> dict[str, Any]:
        """All but the vectors, as JSON."""
        numbers = {name: getattr(self, name) for name in _NUMBERS} | {"go": self.go.bits, "own": [*self.own]}
        match self.reply:
            case Applied(version, staleness, _, weight, bits):
                numbers["applied"] = [version, staleness, weight, bits]
            case Held(version, staleness):
                numbers["held"] = [version, staleness]
            case Dropped(version, _, weight, bits, behind):
                numbers["dropped"] = [version, weight, bits, behind]
        return numbers

    def take(self, numbers: dict[str, Any], answer: Tensor | None) -> None:
        """What `numbers` gave, and the answer of the last push."""
        for name in _NUMBERS:
            setattr(self, name, numbers[name])
        self.go, self.own = Go(numbers["go"]), [*numbers["own"]]
        if "applied" in numbers:
            version, staleness, weight, bits = numbers["applied"]
            self.reply = Applied(version, staleness, answer, weight, bits)
        elif "held" in numbers:
            self.reply = Held(*numbers["held"])
        elif "dropped" in numbers:
            version, weight, bits, behind = numbers["dropped"]
            self.reply = Dropped(version, answer, weight, bits, behind)


_NUMBERS = ("generation", "lost", "sequence", "active_from", "pushed_in", "pulled", "ticks")


class Store:
    """Center, version, gate and rule of one shard [n]. Workers are ranks in range(workers)."""

    def __init__(self, rule: Rule, workers: int, bound: int | None = None, policy: MergePolicy | None = None) -> None:
        """policy: by default the rule's own for this bound."""
        self.rule, self.workers, self.bound = rule, workers, bound
        self.policy = rule.policy(workers, bound) if policy is None else policy
        self.version = 0
        self.released: list[tuple[int, Reply]] = []
        """(worker, what it gets) for calls answered Held or Wait before; the server takes and clears it."""
        self.next_buffer: Callable[[], Tensor] = lambda: self.center
        """Where the next version is written: the center itself, or unread memory [n]. The server may set it."""
        self._center: Tensor | None = None
        self._gate = Gate(workers, bound)
        self._states = [_WorkerState() for _ in range(workers)]
        self._spare: list[Tensor] = []  # memory [n] for pushes that wait
        rule.expect(range(workers))

    @property
    def initialized(self) -> bool:
        """Whether there is a center: nobody can pull before."""
        return self._center is not None

    @property
    def center(self) -> Tensor:
        """[n] the newest version, changed in place only where `next_buffer` returns itself. Use `read` to read it."""
        if self._center is None:
            raise InvalidCall("there is no center yet: wait until a worker has offered the first")
        return self._center

    @property
    def slowest(self) -> int | None:
        """The worker that others wait for, for messages: of the active ones the first with the fewest ticks."""
        return self.slowest_but(())

    def slowest_but(self, waiting: Collection[int]) -> int | None:
        """`slowest` of those who do not wait themselves."""
        busy = [worker for worker in self._gate.active if worker not in waiting]
        return min(busy, key=self._gate.finished, default=None)

    def initialize(self, center: Tensor) -> bool:
        """Offer the first center [n], which is the store's from then on; whether it was the first."""
        if self._center is not None:
            return False
        self._center = center
        self.rule.start(center)
        return True

    def activate(self, worker: int, generation: int) -> None:
        """Take part, with as many finished ticks as the slowest (0 alone). Again in the same generation: goes on.

        A newer generation starts with sequence 1, as of a worker that has the current center. Refused: an older one,
        and the generation in which the worker was declared lost.
        """
        state = self._checked(worker)
        if generation < state.generation or (state.lost and generation == state.generation):
            raise InvalidCall(
                f"worker {worker} begins in generation {generation}, expected one after {state.generation}"
                f"{', in which it was declared lost' if state.lost else ''}: a lost worker comes back in a newer generation"
            )
        if generation > state.generation:
            self.deactivate(worker)
            restored = state.stale if state.generation < 0 else None  # what a snapshot says that it pulled
            self._states[worker] = state = _WorkerState()
            state.generation, state.pulled, state.stale = generation, self.version, restored
            self.policy.begin(worker, self.version)
            self.rule.look(worker)
            self._count()
        if worker not in self._gate.active:
            self._gate.activate(worker)
            state.active_from, state.pushed_in = self._gate.finished(worker), -1

    def read(self) -> Tensor:
        """[n] the center for whoever asks now. While nobody takes part, or after last pushes, the open round is closed
        first, without a version of its own: no push is between."""
        if self.rule.open and (self.rule.ended or not self._gate.active):
            self._close()
        return self.center

    def pull(self, worker: int) -> int:
        """The version of `center`, which the caller reads before its next call. Refused before `initialize`."""
        state, center = self._checked(worker), self.read()
        state.pulled = self.version
        self.rule.look(worker)
        if self.rule.keeps_pulled:
            state.stale = center.clone() if state.stale is None else state.stale.copy_(center)
        return self.version

    def push(
        self, worker: int, sequence: int, update: Tensor, weight: float, bits: int, since: int | None = None
    ) -> Applied | Held | Dropped | Duplicate:
        """Merge `update` [n], exactly once: sequence numbers of a generation are 1, 2, 3, …; the last may be sent
        again.

        since: the version from which its staleness counts, not before that of the last push; None: the last pull's.
        `update` is the caller's again afterwards. Refused: a worker that takes no part, an older sequence number, a
        gap.
        """
        state = self._checked(worker)
        if sequence == state.sequence and state.reply is not None:
            return Duplicate(state.reply)
        self._taking_part(worker, "pushes")
        if sequence != state.sequence + 1:
            raise InvalidCall(
                f"worker {worker} pushes number {sequence}, expected {state.sequence + 1}: "
                "each push is sent in order, and again only until it is answered"
            )
        self._check(update, weight, bits)
        if since is not None and not 0 <= since <= self.version:
            raise InvalidCall(f"an update based on version {since} came, and the center is at version {self.version}")
        since = state.pulled if since is None else since
        push = Push(worker=worker, generation=state.generation, update=update, weight=weight, bits=bits)
        state.own = [version for version in state.own if version > since]
        push.staleness = self.version - since - len(state.own)
        reply = self._receive(state, push)
        state.sequence, state.reply = sequence, reply
        state.pushed_in = self._gate.finished(worker) - state.active_from
        self._settle()
        own = self._own(worker)
        return own if isinstance(own, Applied | Dropped) else reply

    def tick(self, worker: int, bits: int, number: int = 0) -> Go | WaitForGate:
        """A tick of this worker is finished. number: 1, 2, 3, … in a generation; the last may be sent again, and counts
        once. 0: it cannot come again."""
        state = self._checked(worker)
        if 0 < number <= state.ticks:
            return WaitForGate() if self._gate.is_waiting(worker) else state.go
        self._taking_part(worker, "finishes a tick")
        state.ticks = number
        self._gate.tick(worker, bits)
        self._settle()
        own = self._own(worker)
        return own if isinstance(own, Go) else WaitForGate()

    def deactivate(self, worker: int) -> None:
        """Inactive until `activate`: frees the gate, and completes a round that waited for this worker. Idempotent."""
        self._checked(worker)
        self._gate.deactivate(worker)
        self._settle()

    def leave(self, worker: int) -> None:
        """For a worker that is lost: as `deactivate`, for good. What it pushed before counts. Idempotent."""
        self._checked(worker).lost = True
        self._count()
        self.deactivate(worker)

    def fence(self, worker: int, generation: int) -> int:
        """As `leave`, of this generation: nothing of it enters any more. The number of its last push that is here."""
        state = self._checked(worker)
        if generation > state.generation:  # it has not begun yet
            self.deactivate(worker)
            self._states[worker] = state = _WorkerState()
            state.generation = generation
        if generation < state.generation:
            return 0
        self.leave(worker)
        return state.sequence

    def pushed_in(self, worker: int, generation: int) -> int:
        """In which tick since it last became active the worker has last pushed, in this generation; -1: in none."""
        state = self._checked(worker)
        return state.pushed_in if state.generation == generation else -1

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Vectors [n] by name, the store's own memory, to be read before the next call; and numbers (JSON). Changes
        nothing.

        Sequence numbers and clocks belong to a launch, and are left out; so does what workers pulled, where no rule
        keeps it.
        """
        if self.policy.held:
            raise InvalidCall(
                "a snapshot is taken while nobody trains, but pushes are held: all workers call `deactivate` first"
            )
        numbers = {"version": self.version, **self.rule.numbers()}
        kept = {f"pulled {worker}": state.stale for worker, state in enumerate(self._states) if state.stale is not None}
        return {"center": self.center, **kept, **self.rule.vectors()}, numbers

    def restore(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on from `capture`'s. The center is then there: later offers of a first one lose."""
        if self.policy.held:
            raise InvalidCall(
                "a snapshot is restored while nobody trains, but pushes are held: all workers call `deactivate` first"
            )
        if self.initialized:
            vectors = {name: vector.to(self.center.device) for name, vector in vectors.items()}
        center = vectors["center"]
        new = self.next_buffer() if self.initialized else torch.empty_like(center)
        if new.shape != center.shape or new.dtype != center.dtype:
            raise BadInput(
                f"the checkpoint's center has {len(center)} elements of {center.dtype}, and this server shard has "
                f"{len(new)} of {new.dtype}: resume with the model that the checkpoint is of"
            )
        self._center = new.copy_(center)
        self.version = numbers["version"]
        self.rule.load(self._center, vectors, numbers)
        self.policy.reset(self.version)
        for worker, state in enumerate(self._states):
            state.pulled, state.own = self.version, []
            kept = vectors.get(f"pulled {worker}")
            state.stale = None if kept is None else kept.clone()

    def image(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the store knows, for a copy that answers every later call as this one: vectors [n] by name, the store's
        own memory, to be read before the next call; and numbers (JSON). Between two calls, `released` was taken."""
        vectors: dict[str, Tensor] = {f"policy {name}": vector for name, vector in self.policy.image()[0].items()}
        numbers: dict[str, Any] = {"version": self.version, "gate": self._gate.image()}
        if self._center is not None:
            vectors["center"] = self._center
            vectors |= {f"rule {name}": vector for name, vector in self.rule.vectors().items()}
            numbers |= {"rule": self.rule.numbers(), "memory": self.rule.memory(), "policy": self.policy.image()[1]}
        numbers["workers"] = [state.numbers() for state in self._states]
        for worker, state in enumerate(self._states):
            kept = {
                "stale": state.stale,
                "answer": None if isinstance(state.reply, Held | None) else state.reply.answer,
            }
            vectors |= {f"{name} {worker}": vector for name, vector in kept.items() if vector is not None}
        numbers["held"] = []
        for index, push in enumerate(self.policy.held):
            numbers["held"].append([push.worker, push.weight, push.generation, push.bits, push.staleness])
            vectors[f"held {index}"] = push.update
            if push.pulled is not None:
                vectors[f"held pulled {index}"] = push.pulled
        return vectors, numbers

    def take_image(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Become the store of which this is the `image`; the vectors are this one's from now on. For a new store of the
        same rule; `next_buffer` may be set, and then the center is copied there."""
        self.version = numbers["version"]
        self._gate.take_image(numbers["gate"])
        for worker, (state, own) in enumerate(zip(self._states, numbers["workers"], strict=True)):
            state.take(own, vectors.get(f"answer {worker}"))
            state.stale = vectors.get(f"stale {worker}")
        self._count()
        self.policy.held = [
            Push(
                worker=worker,
                update=vectors[f"held {index}"],
                weight=weight,
                generation=generation,
                bits=bits,
                staleness=staleness,
                pulled=vectors.get(f"held pulled {index}"),
            )
            for index, (worker, weight, generation, bits, staleness) in enumerate(numbers["held"])
        ]
        if "center" not in vectors:
            return
        self._center = vectors["center"]
        of_rule = {name.removeprefix("rule "): one for name, one in vectors.items() if name.startswith("rule ")}
        self.rule.load(self._center, {**of_rule, "center": self._center}, numbers["rule"])
        self.rule.recall(numbers["memory"])
        of_policy = {name.removeprefix("policy "): one for name, one in vectors.items() if name.startswith("policy ")}
        self.policy.take_image(of_policy, numbers["policy"])

    def _checked(self, worker: int) -> _WorkerState:
        if not 0 <= worker < self.workers:
            raise InvalidCall(f"a worker must be a rank from 0 to {self.workers - 1}; got {worker}")
        return self._states[worker]

    def _taking_part(self, worker: int, what: str) -> _WorkerState:
        state = self._checked(worker)
        if worker not in self._gate.active:
            raise InvalidCall(
                f"worker {worker} {what}, but is not active (deactivated, or lost): it calls `activate` first"
            )
        if self._gate.is_waiting(worker) or (self.rule.answers and isinstance(state.reply, Held)):
            raise InvalidCall(f"worker {worker} {what} before its last call was answered: one call at a time")
        return state

    def _check(self, update: Tensor, weight: float, bits: int) -> None:
        check_mean(update, weight, bits)
        center = self.center
        if update.shape != center.shape or update.dtype != center.dtype:
            raise BadInput(
                f"a push here has {len(center)} elements of {center.dtype}; got {list(update.shape)} of {update.dtype}"
            )

    def _receive(self, state: _WorkerState, push: Push) -> Applied | Held | Dropped:
        push.pulled = state.stale
        reply = self.policy.receive(push, self.version, self._gate.finished(push.worker))
        if isinstance(reply, Held):
            self._keep(push)
        return self._merge([push])[0] if reply is None else reply

    def _keep(self, push: Push) -> None:
        """It outlasts its call: in memory of the store's own."""
        memory = self._spare.pop() if self._spare else torch.empty_like(push.update)
        push.update = memory.copy_(push.update)

    def _settle(self) -> None:
        """Complete what is complete now, and let go who may go: the one place where workers are released."""
        ticks = {worker: self._gate.finished(worker) for worker in self._gate.active}
        while pushes := self.policy.take_complete(ticks, self.version):
            for push, reply in zip(pushes, self._merge(pushes), strict=True):
                if push.update is not reply.answer:
                    self._spare.append(push.update)
                self._remember(push, reply)
        if self.rule.complete:
            self._close()
        for worker, bits in self._gate.opened():
            self._states[worker].go = Go(bits)
            self.released.append((worker, Go(bits)))

    def _close(self) -> None:
        new = self.next_buffer()
        self.rule.close(self.center, new)
        self._center = new

    def _merge(self, pushes: list[Push]) -> list[Applied]:
        """One new version from pushes, if the policy makes one of them; what each of them gets."""
        live = sorted((push for push in pushes if push.weight), key=lambda push: push.worker)
        if live:
            new = self.next_buffer() if self.rule.moves_center else self.center
            self.rule.merge(self.center, new, live)
            self._center = new
        self.version += self.policy.makes_version(pushes)
        for worker in {push.worker for push in live}:
            self._states[worker].own.append(self.version)
        if self.rule.answers:
            for push in pushes:
                push.answer = torch.zeros_like(push.update) if push.answer is None else push.answer
        replies = self.policy.replies(pushes, self.version)
        for push, reply in zip(pushes, replies, strict=True):
            if reply.answer is not None:  # an answer shows the worker the center as a pull does
                self._states[push.worker].pulled = self.version
        return replies

    def _remember(self, push: Push, reply: Applied) -> None:
        """The real answer to a push that was Held, unless the worker that sent it is gone."""
        state = self._states[push.worker]
        if state.generation != push.generation:
            return
        state.reply = reply
        if self.rule.answers and push.worker in self._gate.active:
            self.released.append((push.worker, reply))

    def _count(self) -> None:
        self.rule.expect([worker for worker, state in enumerate(self._states) if not state.lost])

    def _own(self, worker: int) -> Reply | None:
        """Take out what this call released for its own caller."""
        for index, (released, reply) in enumerate(self.released):
            if released == worker:
                del self.released[index]
                return reply
        return None
