"""The two ways through an epoch: all workers make the same ticks, or each goes at its own pace and rows are leased."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

from manyhands.data.feed import Slice
from manyhands.data.leases import End, Lease, Segment
from manyhands.data.slice_ledger import Place
from manyhands.data.source import COMPARED, EMPTY, check_digests
from manyhands.errors import BadInput
from manyhands.strategies.base import Leasing
from manyhands.training.loop import Loop, Phase, Regroup


class LockstepEpochs:
    """The same ticks on all workers, some of them empty; a stop reaches all workers in the same exchange."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._sized = loop.ticks_per_epoch is not None
        self._uncompared = 0  # batches whose digests all workers have yet to compare

    def epoch(self) -> bool:
        """Turn until the epoch's rows are out (True), or until something stops it."""
        loop = self._loop
        loop.anybody = True
        self._uncompared = 0 if self._sized else COMPARED
        if loop.worker.server is not None:
            loop.activate()
            loop.worker.group.barrier()  # nobody's first tick is finished before all take part
        if loop.phase is Phase.BETWEEN and self._last_step():
            return self._complete()
        with closing(loop.train_feed.epoch(loop.position.epoch, loop.position.epoch_tick)) as slices:
            for part in self._turns(slices):
                loop.turn(part, loop.position.tick)
                if loop.stopped():
                    return False
                if self._last_step():
                    return self._complete()
                loop.regroup_if_agreed()
        return True

    def take_back(self) -> bool:
        return False  # see joining.py: what a lost worker had is in the round

    def _last_step(self) -> bool:
        """Do what is due after a step; whether no further one is wanted."""
        loop = self._loop
        loop.between()
        if not loop.finished():
            loop.phase = Phase.STEP
        return loop.finished()

    def _complete(self) -> bool:
        return not self._loop.reason and self._loop.position.epoch_tick == self._loop.ticks_per_epoch

    def _turns(self, slices: Iterator[Slice]) -> Generator[Slice, None, None]:
        """The slices of an epoch, timed; on a stream, empty ones after the last until no rank has any."""
        loop, sized = self._loop, self._sized
        whole = loop.worker.elastic  # each reads all of a stream, and so sees its end with the others
        ahead = self._next(slices)
        while sized or ahead is not None or (loop.anybody and not whole):
            if sized and ahead is None:
                return
            current, loop.input_s = ahead if ahead is not None else (EMPTY, 0.0)
            if not sized:
                ahead = self._next(slices)
            loop.replica.control.more = not sized and ahead is not None
            yield current
            if sized:
                ahead = self._next(slices)
            elif whole and ahead is None and loop.replica.control.any_rank_has_rows:
                raise BadInput(
                    f"the stream ended on worker {loop.worker.worker_id} while others still have rows: each worker must read "
                    "the same whole stream, so do not select rows by rank"
                )

    def _next(self, slices: Iterator[Slice]) -> tuple[Slice, float] | None:
        worker = self._loop.worker
        worker.driver.progress("input", self._loop.replica.step)
        start = worker.clock()
        part = next(slices, None)
        seconds = worker.clock() - start
        if self._uncompared:
            self._uncompared -= 1
            digests = worker.group.all_gather_json(None if part is None else part.digest)
            check_digests(digests)
            # nobody has rows where a run goes on at a stream's very end
            self._loop.anybody = any(digest is not None for digest in digests)
        return None if part is None else (part, seconds)


class AsyncEpochs:
    """Every worker at its own pace. An epoch is cut into segments; at the end of each all meet.

    A segment ends where a validation or checkpoint is due, where `max_steps` are done, or with the epoch. On a stream,
    where nobody knows how many batches there are, it is the whole epoch, and each worker reads its own part.
    """

    def __init__(self, loop: Loop, leasing: Leasing) -> None:
        self._loop, self._leasing = loop, leasing
        self._ticks = loop.ticks_per_epoch if loop.train_feed.leasable else None  # None: as a stream
        self._entered = False
        self._digests: list[str] = []  # of the first batches of a stream, which this worker read for itself
        self._stop_requested = False  # that this worker wants all to stop
        self._answer: Lease | End | None = None  # the newest, of the driver
        if self._ticks is None and leasing.rank0_warmup_ticks:
            raise BadInput(
                f"warmup={leasing.rank0_warmup_ticks} needs data with a length, and a stream has none: leave warmup "
                "out, or give data with a length"
            )
        for name in ("validate_every", "checkpoint_every"):
            every = getattr(loop.plan, name)
            if self._ticks is None and isinstance(every, int):
                raise BadInput(
                    f"{name}={every} counts global batches, and they cannot be counted on a stream with workers at "
                    "their own pace: "
                    f'give {name}="epoch"'
                )

    def epoch(self) -> bool:
        """Segment by segment until the epoch's rows are out (True), or until something stops it."""
        loop = self._loop
        while True:
            self._segment()
            if loop.reason:
                return False
            loop.between()
            if self._ticks is None or loop.position.epoch_tick == self._ticks:
                return not loop.reason
            if loop.finished():
                return False

    def _segment(self) -> None:
        """From one meeting to the next. Where members have changed within it, what is left of it."""
        loop = self._loop
        segment = self._next_segment(self._activate())
        if loop.worker.elastic:
            again, loop.position.parts = loop.position.parts > 0, segment.parts
        else:
            again = False
        with closing(loop.train_feed.leased(segment, lambda: self._take(segment), ahead=not again)) as slices:
            self._turn_all(slices, segment)
        self._meet(segment)

    def take_back(self) -> bool:
        """With the last pushes all is at the server that those who are here have trained, and nobody gets an End as long as
        it is not known what those have who are not."""
        loop = self._loop
        assert loop.closing is not None
        segment, trained = loop.closing, loop.position.local_steps
        with closing(loop.train_feed.leased(segment, lambda: self._take(segment), ahead=False)) as slices:
            self._turn_all(slices, segment)
        return any(loop.worker.group.all_gather_json(loop.position.local_steps > trained))

    def _activate(self) -> int:
        """All activate before the first tick; while worker 0 trains its warm-up ticks alone, the others wait."""
        loop = self._loop
        rank0_warmup_ticks = max(0, self._leasing.rank0_warmup_ticks - self._warmed_up())
        self._entered = False
        if not rank0_warmup_ticks or loop.worker.mesh.rows[0] == 0:
            self._enter()
        elif loop.worker.elastic and loop.worker.server is not None:
            loop.worker.server.deactivate()  # it was the first one until now
        loop.worker.group.barrier()
        return rank0_warmup_ticks

    def _warmed_up(self) -> int:
        """Ticks of worker 0 before this segment, or as many as that at least. Where it may be lost all that was trained is
        counted: before the end of its warm-up it was alone."""
        loop, position = self._loop, self._loop.position
        if not loop.worker.elastic:
            return int(loop.worker.group.all_gather_json(position.local_steps)[0])
        handed = sum(position.until - position.epoch_tick - (back - front) for front, back in position.left or ())
        return self._done() * (position.parts or loop.worker.mesh.rows[1]) + handed

    def _enter(self) -> None:
        if not self._entered and self._loop.worker.server is not None:
            self._loop.worker.server.activate()
        self._entered = True

    def _next_segment(self, rank0_warmup_ticks: int) -> Segment:
        position, plan, worker = self._loop.position, self._loop.plan, self._loop.worker
        goes_on = position.left is not None or (worker.elastic and position.parts > 0)  # with slices as they were
        done, ticks = self._done(), self._ticks or 0
        due = (every for every in (plan.validate_every, plan.checkpoint_every) if isinstance(every, int))
        ends = [(position.epoch + 1) * ticks, *((done // every + 1) * every for every in due)]
        until = min([*ends, plan.task.max_steps] if plan.task.max_steps else ends) - position.epoch * ticks
        if position.left is not None:  # what is left is of the segment as it was, whatever is due now
            until = position.until
        return Segment(
            epoch=position.epoch,
            first=position.epoch_tick,
            until=max(until, position.epoch_tick),
            parts=position.parts if goes_on else worker.mesh.rows[1],
            size=worker.mesh.rows[1],
            left=position.left,
            rank0_warmup_ticks=rank0_warmup_ticks,
            fixed=plan.partition == "fixed",
        )

    def _done(self) -> int:
        """Global batches before this segment."""
        position = self._loop.position
        return int(position.epoch * (self._ticks or 0) + position.epoch_tick)

    # -- a segment ---------------------------------------------------------------------------------------------------

    def _take(self, segment: Segment) -> Lease | End:
        """A lease from the driver; a worker that wants to stop reports it, and the driver ends the segment for all."""
        loop = self._loop
        if loop.wants_stop() and not loop.worker.driver.should_stop() and not self._stop_requested:
            self._stop_requested = True
            loop.worker.emit("stop", step=loop.replica.step, reason=loop.own_reason)
        if loop.worker.interrupted or loop.worker.broken:
            raise Regroup
        loop.worker.driver.progress("wait" if segment.rank0_warmup_ticks else "input", loop.replica.step)
        push, server = None, loop.worker.server
        if loop.worker.elastic and server is not None:
            push = server.pushes + loop.plan.strategy.pushes_until_next(loop.replica, loop.state)
        elif loop.worker.elastic:  # what it has stepped on is in the memory of all
            push = loop.position.local_steps + 1
        answer = loop.worker.lease(segment, push)
        if answer is None:
            raise Regroup
        self._answer = answer
        if isinstance(answer, Lease):
            self._enter()
        elif answer.partial:
            loop.note_partial(answer.partial)
        return answer

    def _turn_all(self, slices: Iterator[Slice], segment: Segment) -> None:
        loop, position = self._loop, self._loop.position
        while not self._stream_is_over():
            loop.worker.driver.progress("input", loop.replica.step)
            start = loop.worker.clock()
            part = next(slices, None)
            loop.input_s = loop.worker.clock() - start
            if part is None:
                return
            if part.digest:
                self._digests.append(part.digest)
            if self._ticks is None:
                loop.turn(part, position.local_steps)
                position.epoch_tick += 1
                continue
            lease = self._answer
            assert isinstance(lease, Lease)
            before = segment.epoch * self._ticks
            loop.replica.follow_schedule(before + segment.first + lease.handed // segment.parts)
            loop.turn(
                part,
                before + lease.index,
                lease=[lease.index, lease.part, lease.handed],
                parts=segment.parts * loop.worker.mesh.model.size,  # of which each has an event of its own
                **({"again": True, "epoch": segment.epoch} if lease.again else {}),
            )

    def _stream_is_over(self) -> bool:
        """On a stream nobody hands out leases: each worker looks for itself whether to stop."""
        loop, max_steps = self._loop, self._loop.task.max_steps
        if self._ticks is not None:
            return False
        stops = loop.wants_stop() or (max_steps is not None and loop.position.local_steps >= max_steps)
        return any(loop.worker.mesh.model.all_gather_json(stops))

    def _meet(self, segment: Segment) -> None:
        """Wait for all; from here to the next segment nobody trains."""
        loop, position = self._loop, self._loop.position
        loop.worker.driver.progress("wait", loop.replica.step)
        if loop.worker.server is not None:
            loop.worker.server.deactivate()
        end = self._answer if isinstance(self._answer, End) else End(reason=loop.own_reason, left=[])
        start = loop.worker.clock()
        everyone = loop.worker.group.all_gather_json([end.reason, position.local_steps, self._digests])
        loop.add_wait(loop.worker.clock() - start)
        loop.reason = next((reason for reason, _, _ in everyone if reason), "")
        self._digests = []
        if self._ticks is None:
            position.tick = max(ticks for _, ticks, _ in everyone)
            read = min(len(digests) for _, _, digests in everyone)  # a worker that stops early has read fewer
            check_digests([digests[:read] for _, _, digests in everyone])
        elif loop.reason:
            self._count_rows(segment, end.left)
            position.left, position.parts, position.until = end.left, segment.parts, segment.until
            position.tick = position.epoch * self._ticks + _begun(segment, end)
        else:
            self._count_rows(segment, [])
            position.left, position.epoch_tick = None, segment.until
            position.tick = self._done()
            if loop.worker.elastic and segment.until == self._ticks:
                position.parts = 0
            loop.closing = replace(segment, first=segment.until, left=None)

    def _count_rows(self, segment: Segment, left: list[list[int]]) -> None:
        """Where workers may be lost, each counts what all have trained of a segment, but for what is left of it."""
        loop = self._loop
        if loop.worker.elastic:
            began = [[segment.first, segment.until]] * segment.parts if segment.left is None else segment.left
            rows_of = loop.train_feed.rows_of
            loop.position.rows += sum(
                rows_of(segment.epoch, [Place(index, part, segment.parts) for index in range(*queue)]) * sign
                for queues, sign in ((began, 1), (left, -1))
                for part, queue in enumerate(queues)
            )


def _begun(segment: Segment, end: End) -> int:
    """Global batches of the epoch up to the last one of which a slice was handed out."""
    if any(back < segment.until for _, back in end.left):
        return segment.until
    return max(front for front, _ in end.left)
