"""The exam of strategies: what `Strategy` promises, as checks that any implementation can take.

    for name, check in STRATEGY_EXAM.items():
        check(strategy)                  # or check(strategy, sizes=(1,)) for a strategy of one worker

A check raises ExamFailed. Workers are threads with a tiny float64 model, AdamW, rows from seeds, and a clock that
counts ticks: the same on every machine. Each rank begins with parameters of its own, and some ticks have fewer rows
than workers. A server that the strategy wants is one of this process. Strategies that do not promise `plain_loop` leave it out.

Where every worker goes at its own pace (`leasing()` is not None), several workers are another run each time: `repeat`
and `resume` are then taken by one worker; and those checks that are about ticks which all make, by none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from manyhands import spec
from manyhands.checkpoint import checkpoints, run_state
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.replica.replica import STOP
from manyhands.strategies import CATALOGUE, spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.testing.group_suite import checks_of, expect
from manyhands.testing.strategy_worker import (
    EXTRA_TICKS,
    ROWS,
    Held,
    StrategyWorker,
    adamw,
    expect_one_tick,
    expect_same_on_all,
    expect_unchanged,
    global_batch,
    seated,
    squared_error,
    tiny_model,
    whole_run,
)

SIZES = (1, 3)


class StrategyCheck(Protocol):
    """One check, taken by a strategy with each number of workers in `sizes`."""

    def __call__(self, strategy: Strategy, sizes: Sequence[int] = SIZES) -> None: ...


def _alike(strategy: Strategy, sizes: Sequence[int]) -> Sequence[int]:
    """The numbers of workers with which a run is the same bits each time."""
    return sizes if strategy.leasing() is None else [size for size in sizes if size == 1]


def _in_step(strategy: Strategy, sizes: Sequence[int]) -> Sequence[int]:
    """The numbers of workers that all make the same ticks, empty ones included."""
    return sizes if strategy.leasing() is None else []


def check_description(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """A frozen dataclass that says what it is; its spec string names an equal one."""
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
    """Replicas that began with different parameters start equal, where there is to be one model. (CASE 25)"""
    for size in sizes:
        seats = seated(strategy, size, lambda seat: (seat.replica.parameters.clone(), seat.consensus()))
        expect_same_on_all([parameters for parameters, _ in seats], strategy, "the start")
        expect_same_on_all([consensus for _, consensus in seats], strategy, "the consensus before the first tick")


def check_consensus(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After every tick it is finite and the same on all ranks; asking for it moves nothing."""

    def program(seat: StrategyWorker) -> list[Tensor]:
        answers = []
        for tick in range(len(ROWS)):
            seat.train(1)
            seat.meet()
            before = seat.holds()
            answers += [seat.consensus(), seat.consensus()]
            expect_unchanged(before, seat.holds(), f"asked for the consensus after tick {tick}")
            expect(torch.equal(answers[-1], answers[-2]), f"two consensuses after tick {tick} differ")
            seat.meet()
        seat.finish()
        return [*answers, seat.consensus()]

    for size in sizes:
        for i, vectors in enumerate(zip(*seated(strategy, size, program), strict=True)):
            expect_same_on_all(list(vectors), strategy, f"the consensus after tick {min(i // 2, len(ROWS) - 1)}")


def check_agreed(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After each tick what `agreed` gives is the same on all ranks, or None on all of them; asking for it moves nothing."""

    def program(seat: StrategyWorker) -> list[Tensor | None]:
        answers = []
        for tick in range(len(ROWS)):
            seat.train(1)
            seat.meet()
            before = seat.holds()
            agreed = seat.strategy.agreed(seat.replica, seat.state)
            answers.append(None if agreed is None else agreed.clone())
            expect_unchanged(before, seat.holds(), f"asked for what is agreed after tick {tick}")
            seat.meet()
        seat.finish()
        return answers

    for size in _in_step(strategy, sizes):
        for tick, answers in enumerate(zip(*seated(strategy, size, program), strict=True)):
            vectors = [answer for answer in answers if answer is not None]
            expect(
                len(vectors) in (0, size),
                f"{strategy} on {size} workers: after tick {tick} some ranks promise equal replicas and some do not",
            )
            expect_same_on_all(vectors, strategy, f"what is agreed after tick {tick}")


def check_finish(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After windows of 0, 1, 2, … ticks: a second `finish` changes nothing, nor does the first where there was no tick."""

    def program(seat: StrategyWorker) -> None:
        before = seat.holds()
        for ticks in range(5):
            seat.train(ticks)
            seat.finish()
            after = seat.holds()
            if not ticks:
                expect_unchanged(before, after, "finish before the first tick")
            seat.finish()
            expect_unchanged(after, seat.holds(), f"a second finish after a window of {ticks} ticks")

    for size in sizes:
        seated(strategy, size, program)


def check_round_of_nothing(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Ticks and rounds in which nobody has a row change nothing, now or later: outer momentum included. (CASE 27)

    In step only. Where a server holds the center, that is what must not change: workers may take it over meanwhile.
    """

    def what_stays(seat: StrategyWorker) -> Held:
        return seat.holds() if seat.worker.server is None else {"the consensus": seat.consensus()}

    def program(seat: StrategyWorker, empty: bool) -> tuple[Held, Held]:
        seat.train(9)
        seat.finish()
        before = what_stays(seat)
        for _ in range(9):
            if empty:
                seat.turn(None)
            else:
                seat.tick += 1
        seat.finish()
        expect_unchanged(before, what_stays(seat), "9 ticks without any rows")
        seat.train(9)
        seat.finish()
        return before, seat.holds()

    for size in _in_step(strategy, sizes):
        with_them = seated(strategy, size, lambda seat: program(seat, empty=True))
        without = seated(strategy, size, lambda seat: program(seat, empty=False))
        for rank, (a, b) in enumerate(zip(with_them, without, strict=True)):
            expect_unchanged(
                b[1], a[1], f"{strategy} on {size} workers, rank {rank}: training after 9 ticks without rows"
            )


def check_worker_without_rows(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Its ticks are empty: nobody hangs, it moves in rounds only, and it takes the others' answer; in step only. (CASES 18, 27)"""

    def program(seat: StrategyWorker) -> tuple[Tensor, int]:
        last = seat.worker.rank == seat.worker.size - 1
        for tick in range(len(ROWS)):
            before, rounds = seat.replica.parameters.clone(), seat.replica.rounds
            seat.turn(None if last else global_batch(tick), idle=last)
            alone = last and seat.replica.rounds == rounds and not torch.equal(seat.replica.parameters, before)
            expect(not alone, f"rank {seat.worker.rank} moved at tick {tick}, without rows and outside of a round")
        seat.finish()
        return seat.consensus(), seat.replica.rounds

    for size in _in_step(strategy, sizes):
        expect_same_on_all([end for end, _ in seated(strategy, size, program)], strategy, "the end beside empty ticks")


def check_streams(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Streams of 3, 7, 11, … batches: all ranks hear at one tick that nobody has rows, once nobody has; in step only. (CASE 18)"""

    def program(seat: StrategyWorker) -> list[bool]:
        mine, longest = (3 + 4 * rank for rank in (seat.worker.rank, seat.worker.size - 1))
        return [
            seat.turn(global_batch(tick) if tick < mine else None, idle=mine <= tick < longest, more=tick + 1 < mine)
            for tick in range(longest + EXTRA_TICKS)
        ]

    for size in _in_step(strategy, sizes):
        ends = [answers.index(False) if False in answers else None for answers in seated(strategy, size, program)]
        last = 3 + 4 * (size - 1) - 1
        expect_one_tick(ends, last, f"{strategy} on {size} workers: the last rows were of tick {last}; first False at")


def check_stop(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """A stop that one rank sets is heard by all at one tick, soon, and not before; in step only."""

    def program(seat: StrategyWorker) -> int | None:
        last = seat.worker.rank == seat.worker.size - 1
        for tick in range(5 + EXTRA_TICKS):
            seat.turn(global_batch(tick), stop=last and tick >= 5)
            if seat.replica.control_bits & STOP:
                heard.setdefault(seat.worker.rank, tick)
        return heard.get(seat.worker.rank)

    for size in _in_step(strategy, sizes):
        heard: dict[int, int] = {}
        ends = seated(strategy, size, program)
        expect_one_tick(ends, 5, f"{strategy} on {size} workers: rank {size - 1} set STOP from tick 5 on; heard at")


def check_repeat(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Two runs of the same give the same bits; one worker's, where each goes at its own pace."""
    for size in _alike(strategy, sizes):
        first, again = (seated(strategy, size, whole_run) for _ in range(2))
        for rank, (a, b) in enumerate(zip(first, again, strict=True)):
            expect_unchanged(a, b, f"{strategy} on {size} workers, rank {rank}: the same run twice")


def check_resume(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Written after any tick and read into a fresh replica and server, it ends bit for bit as if never interrupted. (CASE 19)

    One worker's, where each goes at its own pace.
    """

    def written(seat: StrategyWorker) -> list[Checkpoint]:
        saved = []
        for tick in range(1, len(ROWS)):
            seat.train(1)
            tensors, values = run_state.capture(seat.replica, seat.state, {"total": None})
            seat.meet()
            if seat.worker.server is not None and seat.worker.rank == 0:
                shared, values["server"] = run_state.capture_server(seat.worker.server, seat.replica)
                tensors |= shared
            path = checkpoints.save(Path(folder) / str(tick), tick, seat.worker.group, tensors, values)
            saved.append(Checkpoint(path, tick, seat.worker.size))
        return saved

    def resumed(seat: StrategyWorker, saved: Checkpoint) -> Held:
        rank, size = seat.worker.rank, seat.worker.size
        seat.state, _ = run_state.restore(saved, seat.replica, seat.state, rank, size, None)
        if seat.worker.server is not None and rank == 0:
            run_state.restore_server(saved, seat.worker.server, seat.replica)
        seat.tick, seat.replica.tick = saved.tick, saved.tick - 1
        return whole_run(seat)

    for size in _alike(strategy, sizes):
        wanted = seated(strategy, size, whole_run)
        with tempfile.TemporaryDirectory() as folder:
            for saved in seated(strategy, size, written)[0]:
                ends = seated(strategy, size, lambda seat, saved=saved: resumed(seat, saved))  # type: ignore[misc]
                for rank, (a, b) in enumerate(zip(wanted, ends, strict=True)):
                    what = f"{strategy} on {size} workers, rank {rank}: resumed after {saved.tick} ticks"
                    expect_unchanged(a, b, what)


def check_pushes(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Who steps, pushes; who does not, does not; a second `finish` pushes nothing; each push is one version of the server.

    At one's own pace only: at bound 0 a version is everybody's.
    """

    def program(seat: StrategyWorker) -> tuple[list[list[int] | None], int]:
        server, pushes = seat.worker.server, []
        assert server is not None
        for ticks in (0, 1, 2, len(ROWS)):
            for _ in range(ticks):
                part = None if seat.worker.rank == idle else global_batch(seat.tick)
                seat.turn(part)
                seat.tick += 1
            seat.finish()
            seat.finish()
            pushed = server.said().get("pushes", [])
            wanted = ticks > 0 and seat.worker.rank != idle
            problem = f"rank {seat.worker.rank} pushed {len(pushed)} times in {ticks} ticks"
            expect(bool(pushed) == wanted, f"{problem}, expected {'some' if wanted else 'none'}")
            expect(len(pushed) <= ticks, f"{problem}, expected one a tick at most")
            pushes += pushed
        return pushes, seat.replica.step

    for size in sizes if strategy.leasing() is not None and strategy.server() is not None else []:
        idle = size - 1 if size > 1 else None
        everybody = [push for pushes, _ in seated(strategy, size, program) for push in pushes]
        versions = sorted(push[0] if push else -1 for push in everybody)
        problem = (
            f"{strategy} on {size} workers: pushes made versions {versions}, expected 1 to {len(versions)}, each once"
        )
        expect(versions == list(range(1, len(versions) + 1)), problem)


def check_plain_loop(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """One worker is a plain PyTorch loop, bit for bit, optimizer state included. (CASE 1)"""
    model = tiny_model(0)
    optimizer = adamw(model)
    for tick in range(len(ROWS)):
        optimizer.zero_grad()
        squared_error(model, global_batch(tick)).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        wanted |= {f"the optimizer's {key} of {name}": value for key, value in optimizer.state[p].items()}

    def program(seat: StrategyWorker) -> Held:
        seat.train(len(ROWS))
        seat.finish()
        return seat.holds()

    ends = seated(strategy, 1, program)
    expect_unchanged(wanted, ends[0], f"{strategy} with one worker beside a plain loop")


STRATEGY_EXAM: dict[str, StrategyCheck] = checks_of(globals())
"""All checks by name, in the order in which they are written above."""
