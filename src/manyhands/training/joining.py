"""How a loop joins its worker's group, and how the members of a newly formed one agree on where to go on.

The furthest of them is the truth: whoever completed a step or a phase has seen all arrive at its last collective, so
that the others are behind by one at most. Whoever is behind, differs, or has just started gets the state of the lowest
rank that is furthest; the others keep theirs, and nothing of it is copied.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manyhands import rng
from manyhands.checkpoint import run_state
from manyhands.data.slice_ledger import Carried, Place, SliceLedger
from manyhands.data.source import EMPTY
from manyhands.errors import PeerLost
from manyhands.replica import fingerprint
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.base import Change
from manyhands.training.loop import Loop, Regroup
from manyhands.training.plan import TrainingPosition
from manyhands.worker import LastPushes, Refused


def join(loop: Loop) -> None:
    """Take part in the worker's group: all that must be alike is compared, and all go on from one place. A collective."""
    worker = loop.worker
    loop.join_parts()
    for feed in (loop.train_feed, loop.validator.validation, loop.validator.test):
        if feed is not None:
            feed.set_shard(*worker.mesh.rows)
    goes_on = _goes_on
    if not loop.lockstep:
        goes_on = _goes_on_at_own_pace
    elif loop.rounds_at_server:
        goes_on = _goes_on_in_step_at_server
    elif loop.has_rounds:
        goes_on = _goes_on_from_rounds
    if not worker.elastic or not goes_on(loop):
        _begin(loop)
        if loop.has_rounds:
            open_steps = loop.plan.strategy.steps_since_round(loop.state)  # of a run that is resumed
            loop.begin_round(max(0, loop.position.epoch_tick - open_steps))
    loop.blank, loop.generation = False, worker.generation


def _begin(loop: Loop) -> None:
    """Nobody has trained yet: start, or go on from a checkpoint."""
    worker, strategy = loop.worker, loop.plan.strategy
    loop.replica.completed = 0
    fingerprint.compare(worker, lambda: loop.program_facts)
    strategy.synchronize(loop.replica, worker, loop.state, Change(generation=worker.generation))
    loop.create_callback()
    loop.began = worker.clock()
    loop.members_before = worker.size
    loop.saver.held = frozenset(loop.state.tensors())
    if loop.plan.resume_from is not None:
        loop.state, loop.position = loop.saver.resume(loop.plan.resume_from, loop.state)
    loop.compare_settings()
    if loop.plan.resume_from is not None and worker.elastic and not loop.lockstep:
        _push_windows(loop)
    loop.announce()


def _push_windows(loop: Loop) -> None:
    """At their own pace: what each had trained before the checkpoint, and not pushed, would be lost with it."""
    server = loop.worker.server
    if server is not None:
        server.activate()
    loop.plan.strategy.finish(loop.replica, loop.worker, loop.state)
    if server is not None:
        server.deactivate()
    loop.worker.group.barrier()


def _goes_on(loop: Loop) -> bool:
    """Whether anybody has trained; then all are where the furthest was when this returns."""
    _align_replica(loop)
    gathered, read = _compared(loop)
    completed = {one[0] for one in read.values()}
    loop.catch_up(0 if loop.blank else max(completed))
    if len(completed) > 1:  # some have made the step only now
        gathered, read = _compared(loop)
    loop.forget_step()
    if not read:
        return False
    everyone = [one for one, _ in gathered]
    furthest = max(progress for _, progress, _ in read.values())
    source = next(rank for rank, one in enumerate(everyone) if one is not None and read[one][1] == furthest)
    if None in everyone:
        _refuse_others(loop, source, [rank for rank, one in enumerate(everyone) if one is None])
    behind = [rank for rank, one in enumerate(everyone) if one != everyone[source]]
    if behind and (snapshot := _bring(loop, source, behind, _captured)):
        model = {one: (progress[:2], checksum) for one, (_, progress, checksum) in read.items()}
        own, theirs = everyone[loop.worker.mesh.data.rank], everyone[source]
        _take(loop, snapshot, keeps_own=own is not None and theirs is not None and model[own] == model[theirs])
    _share_anew(loop)
    _agreed(loop, repeated=gathered[source][1])  # the furthest worker has committed what the others had under way
    return True


def _compared(loop: Loop) -> tuple[list[tuple[str | None, int]], dict[str, tuple[int, list[int], list[int]]]]:
    """Of each member: (rounds it completed, its progress, a checksum of its parameters) as text, and the rows of the step
    under way; and what these texts are. Few are different: what a thousand members say is read once."""
    replica = loop.replica
    own = None
    if not loop.blank:
        own = json.dumps([replica.completed, loop.progress(), _checksum(replica.parameters)])
    gathered = loop.worker.mesh.data.all_gather_json([own, loop.under_way])
    return gathered, {one: tuple(json.loads(one)) for one in {one for one, _ in gathered} - {None}}


def _align_replica(loop: Loop) -> None:
    """Where several workers hold a replica: all are where the one of them is that is furthest behind, blank where one is.

    A step that one has made all make, of what they have computed: see `Replica.complete`. Then they differ in what comes
    between two steps alone, and that is done again.
    """
    worker, replica = loop.worker, loop.replica
    if worker.mesh.model.size == 1:
        return
    completed = worker.group.all_gather_json(None if loop.blank else replica.completed)
    if not loop.blank:
        loop.catch_up(max(one for one in completed if one is not None))
    own = None if loop.blank else [loop.progress(), loop.own_values(), vars(loop.position)]
    members = worker.mesh.model.all_gather_json(own)
    if any(one is None for one in members):
        loop.blank = True
        return
    progress, values, position = min(members, key=lambda one: one[0])
    if progress != loop.progress():
        assert progress[0] == loop.progress()[0], f"a step was made by some alone: {members}"
        loop.position = TrainingPosition(**position)
        loop.take_values(values)


def _share_anew(loop: Loop) -> None:
    """A mean is of other members: what each has yet to send is to have the same effect."""
    if loop.members_before:
        loop.state.share_anew(loop.members_before, loop.worker.size)
    loop.members_before = loop.worker.size


def _agreed(loop: Loop, repeated: int) -> None:
    """All are where the furthest was. repeated: rows that were trained on in vain."""
    worker = loop.worker
    change = Change(generation=worker.generation, first=False)
    loop.plan.strategy.synchronize(loop.replica, worker, loop.state, change)
    loop.saver.held = frozenset(loop.state.tensors())
    rng.seed_all(rng.mixed((loop.task.seed, worker.generation)), worker.rank)
    loop.announce_membership(repeated)
    loop.under_way = 0


# -- where replicas differ between rounds ------------------------------------------------------------------------------


def _goes_on_from_rounds(loop: Loop) -> bool:
    """The same, where each member has parameters of its own.

    A round that one has completed is completed by all. Then whoever is behind makes the ticks that others have made;
    the slices of those who are lost are trained by those who are left; and a round takes all of it in.
    """
    worker, replica = loop.worker, loop.replica
    replica.optimizer_state.regroup()
    own = None
    if not loop.blank and loop.ledger is not None:
        own = [[replica.completed, *loop.progress()], loop.done(), loop.under_way, loop.ledger.as_json()]
    everyone = worker.group.all_gather_json(own)
    trained = {rank: one for rank, one in enumerate(everyone) if one is not None}
    blank = [rank for rank, one in enumerate(everyone) if one is None]
    loop.catch_up(0 if loop.blank else max(one[0][0] for one in trained.values()))
    loop.forget_step()
    if not trained:
        return False
    furthest = max(one[0] for one in trained.values())
    source = next(rank for rank, one in trained.items() if one[0] == furthest)
    _, done, under_way, _ = everyone[source]
    if blank:
        _refuse_others(loop, source, blank)
    newest = max((SliceLedger.of_json(one[3]) for one in trained.values()), key=lambda ledger: ledger.age)
    ledger, orphaned = newest.reassign(done, [worker.members[rank] for rank in trained])
    if blank and (snapshot := _bring(loop, source, blank, _captured)):
        _take(loop, snapshot)
    behind = [rank for rank, one in trained.items() if one[0] != furthest]
    snapshot = _bring(loop, source, behind, _captured_loop) if behind else None
    if not loop.blank:
        loop.take_ledger(ledger)
        _make_ticks(loop, newest.members, done)
    loop.plan.strategy.forget_exchange(replica, worker, loop.state)
    _share_anew(loop)
    if not loop.blank:
        _train_extra(loop)
    if snapshot is not None:
        unused = loop.position.unused  # of its own rows
        _take_loop(loop, snapshot)
        loop.position.unused = unused
    loop.close_round()
    _agreed(loop, under_way + loop.train_feed.rows_of(ledger.epoch, orphaned))
    return True


def _make_ticks(loop: Loop, members: Sequence[int], until: int) -> None:
    """The ticks that other members of that generation have made without this worker: each alone, as between rounds."""
    assert loop.ledger is not None
    worker = loop.worker
    if worker.worker_id not in members or loop.position.epoch != loop.ledger.epoch:
        return  # all of the epoch is made
    rank, size = members.index(worker.worker_id), len(members)
    places = [Place(tick, rank, size) for tick in range(loop.done(), until)]
    with worker.apart(loop.generation, rank, size):
        for part in loop.train_feed.read(loop.ledger.epoch, places):
            with suppress(PeerLost):  # after the step, for the round in which all will meet
                loop.turn(part, loop.position.tick)
        loop.flush()  # as a report of that generation
    assert loop.done() == until, f"{loop.done()} global batches were stepped on instead of {until}"


def _train_extra(loop: Loop) -> None:
    """The slices of lost workers that this one got, and has not trained in an earlier generation."""
    assert loop.ledger is not None
    places = [place for place in loop.ledger.dealt.get(loop.worker.worker_id, ()) if place not in loop.extra]
    for place, part in zip(places, loop.train_feed.read(loop.ledger.epoch, places), strict=True):
        loop.step_extra(place, part)


# -- where all are in step at a server -----------------------------------------------------------------------------------


def _goes_on_in_step_at_server(loop: Loop) -> bool:
    """The same, where pushes go to a server, which completes each step for those who are left.

    So all have made the same steps. The server knows how far a lost worker's slices are in its pushes. The others are
    trained by those who are left, who push them before they go on.
    """
    worker, replica, server = loop.worker, loop.replica, loop.worker.server
    assert server is not None
    loop.forget_step()
    server.deactivate()
    own = None
    if not loop.blank and loop.ledger is not None:
        where = {"done": loop.done(), "activated_at": loop.activated_at, "unpushed": loop.unpushed}
        where["generation"] = loop.generation
        own = [loop.progress(), replica.completed, server.pushes, where, loop.ledger.as_json()]
    everyone = worker.group.all_gather_json(own)
    trained = {rank: one for rank, one in enumerate(everyone) if one is not None}
    blank = [rank for rank, one in enumerate(everyone) if one is None]
    if not trained:
        return False
    furthest = max(one[0] for one in trained.values())
    source = next(rank for rank, one in trained.items() if one[0] == furthest)
    assert all(one[0][0] == furthest[0] for one in trained.values()), f"not in step: {list(trained.values())}"
    if blank:
        _refuse_others(loop, source, blank)
    ledgers = {rank: SliceLedger.of_json(one[4]) for rank, one in trained.items()}
    owner = max(ledgers, key=lambda rank: ledgers[rank].age)
    newest, where = ledgers[owner], everyone[owner][3]
    done, activated_at = where["done"], where["activated_at"]
    survivors = [worker.members[rank] for rank in trained]
    pushes = worker.driver.pushes_of_lost(where["generation"]) if worker.rank == source else {}
    told = worker.group.all_gather_json([[worker_id, *found] for worker_id, found in pushes.items()])[source]
    of_lost = {worker_id: LastPushes(numbers, ticks) for worker_id, numbers, ticks in told}

    def carried(worker_id: int, of: Callable[[Sequence[int]], int]) -> Carried:
        """of: several shards may have different ones."""
        if worker_id not in of_lost:
            return Carried(newest.first, 0)  # it never came to the server
        numbers, ticks = of_lost[worker_id]
        if newest.losses:  # it was lost after it had come to this place, where pushes have what was dealt
            made = of(numbers) - newest.pushed[worker_id]
            dealt = loop.plan.strategy.extras_of(made, len(newest.dealt.get(worker_id, ())))
            return Carried(newest.first if made <= 0 else done, dealt)
        tick = of(ticks)
        has = -where["unpushed"] if tick < 0 else tick + loop.plan.strategy.push_has_step
        return Carried(activated_at + has, 0)

    ledger, orphaned = newest.reassign(done, survivors, {one: carried(one, max) for one in newest.lost(survivors)})
    _, without = newest.reassign(done, survivors, {one: carried(one, min) for one in newest.lost(survivors)})
    partial = [[ledger.epoch, *place] for place in without if place not in orphaned]
    if blank and (snapshot := _bring(loop, source, blank, _captured)):
        _take(loop, snapshot, members=2)  # with a new window
    behind = [rank for rank, one in trained.items() if one[0] != furthest]
    if behind and (snapshot := _bring(loop, source, behind, _captured_loop)):
        unused = loop.position.unused  # of its own rows
        _take_loop(loop, snapshot)
        loop.position.unused = unused
    loop.take_ledger(replace(ledger, pushed={worker.members[rank]: one[2] for rank, one in trained.items()}))
    loop.partial = [*loop.partial, *partial]
    _push_extra(loop)
    replica.completed = 1 + max(one[1] for one in trained.values())
    loop.begin_round()
    _see_center(loop)
    if worker.rank == 0 and partial:
        loop.note_partial(loop.partial)
    _agreed(loop, loop.train_feed.rows_of(ledger.epoch, orphaned))
    return True


def _see_center(loop: Loop) -> None:
    """Whoever is the first one saves the server's state, and may never have seen it."""
    if loop.worker.rank == 0 and loop.worker.server is not None:
        loop.worker.server.center(loop.replica.parameters.empty_like().joined())


def _push_extra(loop: Loop) -> None:
    """The slices of lost workers, and all that was not pushed before them. Where a push waits for all, it is of all: those
    who have fewer slices step on none."""
    assert loop.ledger is not None
    worker, server = loop.worker, loop.worker.server
    assert server is not None
    places = [place for place in loop.ledger.dealt.get(worker.worker_id, ()) if place not in loop.extra]
    most = max(
        worker.group.all_gather_json(len(places))
    )  # all have the ledger: who is lost from here on has come so far
    loop.activate()
    worker.group.barrier()
    for place, part in zip(places, loop.train_feed.read(loop.ledger.epoch, places), strict=True):
        loop.step_extra(place, part)
    for _ in range(most - len(places)):
        loop.step_extra(None, EMPTY)
    loop.plan.strategy.finish(loop.replica, worker, loop.state)
    server.deactivate()
    worker.group.barrier()
    loop.position.rounds = loop.replica.rounds


def _refuse_others(loop: Loop, source: int, blank: list[int]) -> None:
    """Whoever is blank and has another program than `source` raises Refused, and then the others Regroup. source, blank: by
    their ranks in `mesh.data`."""
    members = loop.worker.mesh.model.size
    found = fingerprint.differing(loop.worker, lambda: loop.program_facts, source * members)
    if loop.worker.rank in found and loop.blank:
        raise Refused(f"{found[loop.worker.rank]}. {fingerprint.REMEDY}")
    if {rank // members for rank in found} & set(blank):
        raise Regroup


def _checksum(parameters: FlatVector) -> list[int]:
    """Of the bits, by shard. It tells replicas apart that a defect has moved, not an adversary's."""
    return [int(part.view(_WHOLE[part.dtype.itemsize]).sum(dtype=torch.int64)) for part in parameters.parts]


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- where each worker goes at its own pace ----------------------------------------------------------------------------


def _goes_on_at_own_pace(loop: Loop) -> bool:
    """The same, where the model is at the server: each member keeps its replica, and a new one begins at the center."""
    loop.forget_step()
    everyone = loop.worker.group.all_gather_json(None if loop.blank else loop.progress())
    trained = {rank: progress for rank, progress in enumerate(everyone) if progress is not None}
    if not trained:
        return False
    furthest = max(trained.values())
    source = next(rank for rank, progress in trained.items() if progress == furthest)
    blank = [rank for rank in range(len(everyone)) if rank not in trained]
    if blank:
        _refuse_others(loop, source, blank)
        if snapshot := _bring(loop, source, blank, _captured):
            _take(loop, snapshot, members=2)  # as if it were resumed by more workers than there were: with a new window
    behind = [rank for rank, progress in trained.items() if progress != furthest]
    if behind and (snapshot := _bring(loop, source, behind, _captured_loop)):
        own = {name: getattr(loop.position, name) for name in ("local_steps", "unused", "rounds")}
        _take_loop(loop, snapshot)
        vars(loop.position).update(own)
    _see_center(loop)
    _agreed(loop, 0)
    return True


# -- a member's state --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InMemorySnapshot:
    """A member's state, as another takes it over; see `run_state.Snapshot`."""

    own_tensors: dict[str, Tensor]
    own_values: dict[str, Any]
    ranks: int = 1

    def reader(self, rank: int) -> dict[str, Tensor]:
        return self.own_tensors

    def values(self, rank: int) -> dict[str, Any]:
        return self.own_values


def _bring(
    loop: Loop, source: int, targets: list[int], capture: Callable[[Loop], tuple[dict[str, Tensor], dict[str, Any]]]
) -> InMemorySnapshot | None:
    """What `capture` gives on rank `source` of `mesh.data`, tensor by tensor in memory of their own, on `targets`. A
    collective."""
    group, rank = loop.worker.mesh.data, loop.worker.mesh.data.rank
    loop.worker.driver.progress("bring", loop.replica.step)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] | None = None
    if rank == source:
        tensors, values = capture(loop)
    form = [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()]
    form, values = group.all_gather_json([form, values] if rank == source else None)[source]
    if rank == source:
        for target in targets:
            for tensor in tensors.values():
                group.send(tensor.contiguous(), target)
    if rank not in targets:
        return None
    for name, shape, dtype in form:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        group.receive_(tensors[name], source)
    assert values is not None
    return InMemorySnapshot(tensors, values)


def _captured(loop: Loop) -> tuple[dict[str, Tensor], dict[str, Any]]:
    position = {**vars(loop.position), "total": loop.total_ticks()}
    tensors, values = run_state.capture(loop.replica, loop.state, position, loop.saver.declared)
    kept, others = _captured_loop(loop)
    return {**tensors, **kept}, {**values, **others}


def _take(loop: Loop, snapshot: InMemorySnapshot, members: int = 1, keeps_own: bool = False) -> None:
    """keeps_own: it has made the same steps, and only a phase is missing: what it has yet to send is still to be sent."""
    own = {name: copy.deepcopy(getattr(loop.state, name)) for name in (loop.state.own if keeps_own else ())}
    state, _ = run_state.restore(snapshot, loop.replica, loop.state, 0, members, loop.total_ticks())
    loop.state = state.taken_over()
    for name, value in own.items():
        if isinstance(value, Tensor):
            getattr(loop.state, name).copy_(value)
        else:
            setattr(loop.state, name, value)
    _take_loop(loop, snapshot)


def _captured_loop(loop: Loop) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where it is, without what is the replica's own."""
    kept, values = loop.validator.best.capture(loop.replica)
    return kept, {"keep": values, "loop": loop.own_values(), "at": vars(loop.position)}


def _take_loop(loop: Loop, snapshot: InMemorySnapshot) -> None:
    values = snapshot.values(0)
    loop.position = TrainingPosition(**values["at"])
    loop.validator.best.restore(loop.replica, snapshot.reader(0), values["keep"])
    loop.take_values(values["loop"])
