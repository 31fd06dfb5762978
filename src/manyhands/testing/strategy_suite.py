"""The conformance suite of strategies: the guarantees of `Strategy`, as checks for any implementation.

    for name, check in checks_for(strategy).items():
        check(strategy)                  # or check(strategy, sizes=(1,)) for a strategy of one worker

A check raises CheckFailed. Workers are threads with a tiny float64 model, AdamW, rows from seeds, and a clock that
counts ticks, so results are the same on every machine. Each rank starts with different parameters, and some ticks have
fewer rows than workers. If the strategy needs a server, it runs in this process.

`checks_for` leaves out what a strategy does not promise. If every worker goes at its own pace (`leasing()` is not
None), runs of several workers are not reproducible: `repeat` and `resume` run with one worker, and checks of ticks that
all workers make do not apply. A check that is called where it does not apply raises BadInput.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from manyhands import spec
from manyhands.checkpoint import checkpoints, run_state
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.comm import threads
from manyhands.data.sharding import slice_of
from manyhands.errors import BadInput
from manyhands.own_loop.session import Pair, Session
from manyhands.replica.control_bits import MORE, STOP
from manyhands.replica.replica import Replica
from manyhands.server.in_process import InProcessServers
from manyhands.strategies import CATALOGUE, spec_of, strategy_of
from manyhands.strategies.base import Change, Strategy
from manyhands.testing.group_suite import CheckFailed, checks_of, expect
from manyhands.testing.threads import together
from manyhands.worker import Worker

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]  # [rows, 3], [rows, 1]
Tensors = dict[str, Tensor]

ROWS = (6, 5, 2, 7, 1, 6, 4, 3, 8, 5, 2)
"""Of the global batch of each tick."""
EXTRA_TICKS = 40
"""Ticks after the last row, or after a stop, within which all ranks must know of it."""
RESUMED_AFTER = (1, 2, 3, 5, len(ROWS) - 1)
"""Ticks after which `resume` saves: within the first windows, between two, and before the last tick."""
SECONDS_A_TICK = 0.4
"""Of the clock. A strategy that exchanges control bits once a second does so every other tick."""
SIZES = (1, 3)


class StrategyWorker:
    """One worker: its replica, the strategy's state, and the ticks of the loop."""

    def __init__(self, strategy: Strategy, worker: Worker) -> None:
        strategy.check_workers(worker.size)
        self.strategy, self.worker, self.tick = strategy, worker, 0
        self.active = False
        self.replica = Replica.of(tiny_model(worker.rank), adamw, group=worker.group, loss=squared_error)
        worker.clock = lambda: SECONDS_A_TICK * (self.replica.tick + 1)
        self.state = strategy.start(self.replica, worker)
        strategy.synchronize(self.replica, worker, self.state, Change())

    def run_tick(self, batch: Batch | None, *, idle: bool = False, more: bool = True, stop: bool = False) -> bool:
        """Run one tick. Returns whether any rank has rows, as `exchange` or the server reports."""
        self._activate()
        replica, step = self.replica, self.replica.step
        replica.begin_tick()
        replica.tick, self.tick = self.tick, self.tick + 1
        replica.control.more, replica.control.stop, replica.idle = more, stop, idle
        self.strategy.before_backward(replica, self.worker, self.state)
        replica.backward(batch)
        answer = self.strategy.exchange(replica, self.worker, self.state).rows_left
        expect(replica.step - step <= 1, f"one exchange applied {replica.step - step} steps, expected one at most")
        return self._pass_gate(answer)

    def _activate(self) -> None:
        """Collective before the first tick: wait until all workers take part."""
        if not self.active:
            if self.worker.server is not None:
                self.worker.server.activate()
            self.barrier()
        self.active = True

    def _pass_gate(self, answer: bool) -> bool:
        served = self.strategy.server()
        if served is None or self.worker.server is None:
            return answer
        bits = self.worker.server.tick(self.replica.control.own)
        if served.bound != 0:
            return answer
        self.replica.control.received |= bits
        return bool(bits & MORE)

    def train(self, ticks: int) -> None:
        """Run the next `ticks` ticks, each with this rank's slice of the global batch."""
        for _ in range(ticks):
            x, y = global_batch(self.tick)
            start, stop = slice_of(len(x), self.worker.rank, self.worker.size)
            self.run_tick((x[start:stop], y[start:stop]) if start < stop else None, idle=start == stop)

    def barrier(self) -> None:
        """Wait until no worker trains."""
        self.worker.group.barrier()

    def finish(self) -> None:
        self.barrier()
        self.strategy.finish(self.replica, self.worker, self.state)
        if self.worker.server is not None:
            self.worker.server.deactivate()
        self.active = False
        self.barrier()

    def consensus(self) -> Tensor:
        """[D'] a copy, joined"""
        return self.strategy.consensus(self.replica, self.worker, self.state).clone().joined()

    def parameters(self) -> Tensor:
        """[D'] a copy, joined"""
        return self.replica.parameters.clone().joined()

    def tensors(self) -> Tensors:
        """Copies of all tensors that training changes, by name: parameters and the optimizer's state."""
        held = {name: view.clone() for name, view in self.replica.named(self.replica.parameters).items()}
        for name, p in zip(self.replica.layout.names, self.replica.trainable, strict=True):
            state = self.replica.optimizer.state.get(p, {})
            held |= {f"the optimizer's {key} of {name}": value.clone() for key, value in state.items()}
        return held


class PreparedWorker(StrategyWorker):
    """One worker in a loop of the user's own, whose model was prepared."""

    def __init__(self, strategy: Strategy, worker: Worker) -> None:
        self.strategy, self.worker, self.tick, self.active = strategy, worker, 0, False
        self.session = Session(worker)
        self.session._began = True  # workers are threads, with one random state: none seeds it for itself
        model = tiny_model(worker.rank)
        worker.clock = lambda: SECONDS_A_TICK * (self.pair.replica.tick + 1)
        self.pair = Pair(self.session, model, adamw(model), strategy)
        self.replica, self.state = self.pair.replica, self.pair.state

    def run_tick(self, batch: Batch | None, *, idle: bool = False, more: bool = True, stop: bool = False) -> bool:
        """As a loop body; a worker without rows has some that count nothing."""
        if not self.active:
            self.pair.enter()
        self.active, rows = True, 0 if batch is None else len(batch[0])
        self.pair.look_ahead()
        step, self.tick = self.replica.step, self.tick + 1
        self.session.state_weight(float(rows))
        squared_error(self.replica.model, global_batch(0) if batch is None else batch).backward()
        self.replica.optimizer.step()
        self.replica.optimizer.zero_grad()
        expect(self.replica.step - step <= 1, f"one step() made {self.replica.step - step} steps, expected one at most")
        return True

    def finish(self) -> None:
        self.barrier()
        self.pair.finish()
        self.active = False
        self.barrier()


_kind: type[StrategyWorker] = StrategyWorker


@contextmanager
def in_a_prepared_loop() -> Iterator[None]:
    """Within, checks train in a loop of the user's own (`mh.prepare`) instead of on that of `mh.train`."""
    global _kind
    before, _kind = _kind, PreparedWorker
    try:
        yield
    finally:
        _kind = before


def tiny_model(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    error: Tensor = model(batch[0]) - batch[1]
    return error.square().mean()


def global_batch(tick: int) -> Batch:
    generator, rows = torch.Generator().manual_seed(1000 + tick), ROWS[tick % len(ROWS)]
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def run_workers(strategy: Strategy, size: int, program: Callable[[StrategyWorker], T]) -> list[T]:
    """Run `program` on every worker; its results in rank order. A failure names the strategy and the workers."""
    served = strategy.server()
    clients = InProcessServers(served, size, timeout_s=threads.DEADLINE_S).clients if served is not None else ()
    try:
        return together(size, lambda worker: program(_kind(strategy, worker)), clients)
    except threading.BrokenBarrierError:
        problem = "hung: some ranks called the group where others did not; expected the same calls on all ranks"
        raise CheckFailed(f"{strategy} on {size} workers {problem}") from None
    except CheckFailed as error:
        raise CheckFailed(f"{strategy} on {size} workers: {error}") from None


def expect_unchanged(before: Tensors, after: Tensors, what: str) -> None:
    both = before.keys() & after.keys()
    names = (before.keys() ^ after.keys()) | {name for name in both if not torch.equal(before[name], after[name])}
    expect(not names, f"{what}: expected the same bits, these differ: {', '.join(sorted(names))}")


def expect_same_on_all(vectors: list[Tensor], strategy: Strategy, what: str) -> None:
    """Expect finite values and, for a strategy of one model, the same bits on all ranks."""
    for rank, vector in enumerate(vectors):
        problem = f"{strategy} on {len(vectors)} workers: {what} of rank {rank}"
        expect(bool(vector.isfinite().all()), f"{problem} is not finite: {vector.tolist()}")
        if strategy.needs.one_model:
            off = float((vector - vectors[0]).abs().max())
            expect(torch.equal(vector, vectors[0]), f"{problem} has other bits than rank 0's, by up to {off}")


def expect_one_tick(ticks: list[int | None], earliest: int, what: str) -> None:
    """Expect the same tick on every rank (None: never), and not before `earliest`."""
    good = ticks[0] is not None and ticks[0] >= earliest and len(set(ticks)) == 1
    problem = f"expected one tick for all ranks, {earliest} to {earliest + EXTRA_TICKS}"
    expect(good, f"{what} ticks {ticks} by rank (None: never), {problem}")


def run_to_end(trainer: StrategyWorker) -> Tensors:
    """Finish the run. Returns all tensors that must have the same bits when a run is repeated or resumed."""
    trainer.train(len(ROWS) - trainer.tick)
    held = {"the consensus in the open window": trainer.consensus()}
    trainer.finish()
    return held | {"the consensus": trainer.consensus()} | trainer.tensors()


class StrategyCheck(Protocol):
    """One check of a strategy, with each number of workers in `sizes`."""

    def __call__(self, strategy: Strategy, sizes: Sequence[int] = SIZES) -> None: ...


def _reproducible_sizes(strategy: Strategy, sizes: Sequence[int]) -> Sequence[int]:
    """The numbers of workers with which a run has the same bits each time; BadInput where it is none of `sizes`."""
    if strategy.leasing() is None:
        return sizes
    _require(1 in sizes, strategy, "every worker goes at its own pace, so only runs of one worker are reproducible")
    return (1,)


def _lockstep_sizes(strategy: Strategy, sizes: Sequence[int]) -> Sequence[int]:
    """`sizes`; BadInput unless all workers make the same ticks, empty ones included."""
    _require(strategy.leasing() is None, strategy, "every worker goes at its own pace")
    return sizes


def _require(applies: bool, strategy: Strategy, why: str) -> None:
    if not applies:
        raise BadInput(f"this check does not apply to {strategy}: {why}; checks_for(strategy) has those that apply")


def check_description(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """The strategy is a frozen dataclass with a description; its spec string makes an equal one."""
    kind = type(strategy)
    parameters = getattr(kind, "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen
    expect(frozen, f"{kind.__name__} must be a frozen dataclass, whose fields are its options")
    for name in ("name", "source", "summary", "consistency"):
        expect(bool(getattr(kind, name)), f"{kind.__name__}.{name} is empty: the table of strategies prints it")
    text = spec_of(strategy)
    made = spec.make(kind, spec.parse(text)[1], f"strategy {text}")
    expect(made == strategy, f"the string {text!r} makes {made}, expected {strategy}")
    if strategy.name in CATALOGUE:
        expect(strategy_of(text) == strategy, f"strategy_of({text!r}) is {strategy_of(text)}, expected {strategy}")


def check_start(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """For a strategy of one model, replicas with different parameters are equal after `start`. (CASE 25)"""
    for size in sizes:
        starts = run_workers(strategy, size, lambda trainer: (trainer.parameters(), trainer.consensus()))
        expect_same_on_all([parameters for parameters, _ in starts], strategy, "the start")
        expect_same_on_all([consensus for _, consensus in starts], strategy, "the consensus before the first tick")


def _after_each_tick(trainer: StrategyWorker, look: Callable[[], T], what: str) -> list[T]:
    """What `look` returns after each tick, where it changes nothing; then the worker is finished."""
    found = []
    for tick in range(len(ROWS)):
        trainer.train(1)
        trainer.barrier()
        before = trainer.tensors()
        found.append(look())
        expect_unchanged(before, trainer.tensors(), f"{what} after tick {tick}")
        trainer.barrier()
    trainer.finish()
    return found


def check_consensus(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After every tick the consensus is finite and the same on all ranks; computing it changes nothing."""

    def program(trainer: StrategyWorker) -> list[Tensor]:
        answers = _after_each_tick(
            trainer, lambda: (trainer.consensus(), trainer.consensus()), "computing the consensus"
        )
        for tick, (first, second) in enumerate(answers):
            expect(torch.equal(first, second), f"two consensuses after tick {tick} differ")
        return [*(first for first, _ in answers), trainer.consensus()]

    for size in sizes:
        for tick, vectors in enumerate(zip(*run_workers(strategy, size, program), strict=True)):
            expect_same_on_all(list(vectors), strategy, f"the consensus after tick {min(tick, len(ROWS) - 1)}")


def check_agreed(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After each tick `agreed` returns the same on all ranks, or None on all of them; calling it changes nothing."""

    def program(trainer: StrategyWorker) -> list[Tensor | None]:
        def agreed() -> Tensor | None:
            found = trainer.strategy.agreed(trainer.replica, trainer.state)
            return None if found is None else found.clone().joined()

        return _after_each_tick(trainer, agreed, "calling agreed()")

    for size in _lockstep_sizes(strategy, sizes):
        for tick, answers in enumerate(zip(*run_workers(strategy, size, program), strict=True)):
            vectors = [answer for answer in answers if answer is not None]
            problem = f"after tick {tick} agreed() is None on some ranks and not on others"
            expect(len(vectors) in (0, size), f"{strategy} on {size} workers: {problem}")
            expect_same_on_all(vectors, strategy, f"what is agreed after tick {tick}")


def check_finish(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After windows of 0, 1, 2, … ticks a second `finish` changes nothing; nor does the first without any tick."""

    def program(trainer: StrategyWorker) -> None:
        before = trainer.tensors()
        for ticks in range(5):
            trainer.train(ticks)
            trainer.finish()
            after = trainer.tensors()
            if not ticks:
                expect_unchanged(before, after, "finish before the first tick")
            trainer.finish()
            expect_unchanged(after, trainer.tensors(), f"a second finish after a window of {ticks} ticks")

    for size in sizes:
        run_workers(strategy, size, program)


def check_round_of_nothing(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Ticks and rounds without any rows change nothing, now or later, including outer momentum. (CASE 27)

    In lockstep only. With a server, its center must not change: workers may adopt it meanwhile.
    """

    def what_stays(trainer: StrategyWorker) -> Tensors:
        return trainer.tensors() if trainer.worker.server is None else {"the consensus": trainer.consensus()}

    def program(trainer: StrategyWorker, empty: bool) -> tuple[Tensors, Tensors]:
        trainer.train(9)
        trainer.finish()
        before = what_stays(trainer)
        for _ in range(9):
            if empty:
                trainer.run_tick(None)
            else:
                trainer.tick += 1
        trainer.finish()
        expect_unchanged(before, what_stays(trainer), "9 ticks without any rows")
        trainer.train(9)
        trainer.finish()
        return before, trainer.tensors()

    for size in _lockstep_sizes(strategy, sizes):
        with_them = run_workers(strategy, size, lambda trainer: program(trainer, empty=True))
        without = run_workers(strategy, size, lambda trainer: program(trainer, empty=False))
        for rank, (a, b) in enumerate(zip(with_them, without, strict=True)):
            what = f"{strategy} on {size} workers, rank {rank}: training after 9 ticks without rows"
            expect_unchanged(b[1], a[1], what)


def check_worker_without_rows(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """A worker without rows makes empty ticks: no rank hangs, its parameters change only in rounds. (CASES 18, 27)

    It has the others' consensus at the end. In lockstep only.
    """

    def program(trainer: StrategyWorker) -> tuple[Tensor, int]:
        last = trainer.worker.rank == trainer.worker.size - 1
        for tick in range(len(ROWS)):
            before, rounds = trainer.parameters(), trainer.replica.rounds
            trainer.run_tick(None if last else global_batch(tick), idle=last)
            alone = last and trainer.replica.rounds == rounds and not torch.equal(trainer.parameters(), before)
            expect(not alone, f"rank {trainer.worker.rank} moved at tick {tick}, without rows and outside of a round")
        trainer.finish()
        return trainer.consensus(), trainer.replica.rounds

    for size in _lockstep_sizes(strategy, sizes):
        ends = [end for end, _ in run_workers(strategy, size, program)]
        expect_same_on_all(ends, strategy, "the consensus with empty ticks on the last rank")


def _first_tick(trainer: StrategyWorker, heard: dict[int, int], run: Callable[[int], bool], ticks: int) -> int | None:
    """The first tick at which `run` is True on this rank; ends when it was on all ranks, each of which is in `heard`."""
    for tick in range(ticks):
        if run(tick):
            heard.setdefault(trainer.worker.rank, tick)
        trainer.barrier()
        if sum(first <= tick for first in list(heard.values())) == trainer.worker.size:  # others may be a tick ahead
            break
    return heard.get(trainer.worker.rank)


def check_streams(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Streams of 3, 7, 11, … batches: all ranks learn at the same tick that no rank has rows left. (CASE 18)

    In lockstep only.
    """

    def program(trainer: StrategyWorker) -> int | None:
        mine, longest = (3 + 4 * rank for rank in (trainer.worker.rank, trainer.worker.size - 1))

        def run(tick: int) -> bool:
            batch = global_batch(tick) if tick < mine else None
            return not trainer.run_tick(batch, idle=mine <= tick < longest, more=tick + 1 < mine)

        return _first_tick(trainer, ended, run, longest + EXTRA_TICKS)

    for size in _lockstep_sizes(strategy, sizes):
        ended: dict[int, int] = {}
        ends, last = run_workers(strategy, size, program), 3 + 4 * (size - 1) - 1
        expect_one_tick(ends, last, f"{strategy} on {size} workers: the last rows were of tick {last}; first False at")


def check_stop(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """A stop that one rank sets reaches all ranks at the same tick, soon, and not before; in lockstep only."""

    def program(trainer: StrategyWorker) -> int | None:
        last = trainer.worker.rank == trainer.worker.size - 1

        def run(tick: int) -> bool:
            trainer.run_tick(global_batch(tick), stop=last and tick >= 5)
            return bool(trainer.replica.control.received & STOP)

        return _first_tick(trainer, received, run, 5 + EXTRA_TICKS)

    for size in _lockstep_sizes(strategy, sizes):
        received: dict[int, int] = {}
        ends = run_workers(strategy, size, program)
        expect_one_tick(ends, 5, f"{strategy} on {size} workers: rank {size - 1} set STOP from tick 5 on; received at")


def check_repeat(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Two runs give the same bits; of one worker, if each goes at its own pace."""
    for size in _reproducible_sizes(strategy, sizes):
        first, again = (run_workers(strategy, size, run_to_end) for _ in range(2))
        for rank, (a, b) in enumerate(zip(first, again, strict=True)):
            expect_unchanged(a, b, f"{strategy} on {size} workers, rank {rank}: the same run twice")


def check_resume(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """A run that is resumed from a checkpoint ends with the bits of an uninterrupted one. (CASE 19)

    Of one worker, if each goes at its own pace. Checkpoints: after each of RESUMED_AFTER.
    """

    def written(trainer: StrategyWorker) -> list[Checkpoint]:
        saved = []
        for tick in RESUMED_AFTER:
            trainer.train(tick - trainer.tick)
            strategy.settle(trainer.replica, trainer.worker, trainer.state)
            tensors, values = run_state.capture(trainer.replica, trainer.state, {"total": None})
            trainer.barrier()
            if trainer.worker.server is not None and trainer.worker.rank == 0:
                shared, values["server"] = run_state.capture_server(trainer.worker.server, trainer.replica)
                tensors |= shared
            path = checkpoints.save(Path(folder) / str(tick), tick, trainer.worker.group, tensors, values)
            saved.append(Checkpoint(path, tick, trainer.worker.size))
        return saved

    def resumed(trainer: StrategyWorker, saved: Checkpoint) -> Tensors:
        rank, size = trainer.worker.rank, trainer.worker.size
        trainer.state, _ = run_state.restore(saved, trainer.replica, trainer.state, rank, size, None)
        if trainer.worker.server is not None and rank == 0:
            run_state.restore_server(saved, 0, trainer.worker.server, trainer.replica)
        trainer.tick, trainer.replica.tick = saved.tick, saved.tick - 1
        return run_to_end(trainer)

    for size in _reproducible_sizes(strategy, sizes):
        wanted = run_workers(strategy, size, run_to_end)
        with tempfile.TemporaryDirectory() as folder:
            for saved in run_workers(strategy, size, written)[0]:
                ends = run_workers(strategy, size, lambda trainer, saved=saved: resumed(trainer, saved))  # type: ignore[misc]
                for rank, (a, b) in enumerate(zip(wanted, ends, strict=True)):
                    what = f"{strategy} on {size} workers, rank {rank}: resumed after {saved.tick} ticks"
                    expect_unchanged(a, b, what)


def check_pushes(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """A worker pushes if and only if it steps; a second `finish` pushes nothing; each push is one server version.

    Only for workers at their own pace: at bound 0 a version has the pushes of all.
    """

    def program(trainer: StrategyWorker) -> tuple[list[list[int] | None], int]:
        server, pushes = trainer.worker.server, []
        assert server is not None
        for ticks in (0, 1, 2, len(ROWS)):
            for _ in range(ticks):
                part = None if trainer.worker.rank == idle else global_batch(trainer.tick)
                trainer.run_tick(part)
                trainer.tick += 1
            trainer.finish()
            trainer.finish()
            pushed = server.drain_journal().get("pushes", [])
            wanted = ticks > 0 and trainer.worker.rank != idle
            problem = f"rank {trainer.worker.rank} pushed {len(pushed)} times in {ticks} ticks"
            expect(bool(pushed) == wanted, f"{problem}, expected {'some' if wanted else 'none'}")
            expect(len(pushed) <= ticks, f"{problem}, expected one a tick at most")
            pushes += pushed
        return pushes, trainer.replica.step

    served = strategy.leasing() is not None and strategy.server() is not None
    _require(served, strategy, "only workers at their own pace push one version each")
    for size in sizes:
        idle = size - 1 if size > 1 else None
        all_pushes = [push for pushes, _ in run_workers(strategy, size, program) for push in pushes]
        versions = sorted(push[0] if push else -1 for push in all_pushes)
        problem = (
            f"{strategy} on {size} workers: pushes made versions {versions}, expected 1 to {len(versions)}, each once"
        )
        expect(versions == list(range(1, len(versions) + 1)), problem)


def check_plain_loop(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """One worker equals a plain PyTorch loop, bit for bit, including optimizer state. (CASE 1)"""
    model = tiny_model(0)
    optimizer = adamw(model)
    for tick in range(len(ROWS)):
        optimizer.zero_grad()
        squared_error(model, global_batch(tick)).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        wanted |= {f"the optimizer's {key} of {name}": value for key, value in optimizer.state[p].items()}

    def program(trainer: StrategyWorker) -> Tensors:
        trainer.train(len(ROWS))
        trainer.finish()
        return trainer.tensors()

    ends = run_workers(strategy, 1, program)
    expect_unchanged(wanted, ends[0], f"{strategy} with one worker, compared with a plain loop")


STRATEGY_SUITE: dict[str, StrategyCheck] = checks_of(globals())
"""All checks by name, in the order in which they are written above. `checks_for` has those that apply to a strategy."""

_OF_LOCKSTEP = ("agreed", "round_of_nothing", "worker_without_rows", "streams", "stop")
_OF_TRAIN_ALONE = ("description", "streams", "stop", "resume")  # an own loop ends, stops and saves by itself


def checks_for(strategy: Strategy, *, plain_loop: bool = False, own_loop: bool = False) -> dict[str, StrategyCheck]:
    """The checks of STRATEGY_SUITE that apply to `strategy`, by name.

    plain_loop: one worker of the strategy promises to be a plain PyTorch loop, bit for bit.
    own_loop: the checks train in a loop of the user's own (`mh.prepare`) instead of on that of `mh.train`.
    """
    others = set(() if strategy.leasing() is None else _OF_LOCKSTEP) | set(_OF_TRAIN_ALONE if own_loop else ())
    if strategy.leasing() is None or strategy.server() is None:
        others.add("pushes")
    if not plain_loop:
        others.add("plain_loop")
    apply = {name: check for name, check in STRATEGY_SUITE.items() if name not in others}
    return {name: _prepared(check) for name, check in apply.items()} if own_loop else apply


def _prepared(check: StrategyCheck) -> StrategyCheck:
    def examine(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
        with in_a_prepared_loop():
            check(strategy, sizes)

    return examine
