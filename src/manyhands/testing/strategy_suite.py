"""The conformance suite of strategies: what `Strategy` promises, as checks that any implementation can take.

    for name, check in STRATEGY_SUITE.items():
        check(strategy)                  # or check(strategy, sizes=(1,)) for a strategy of one worker

A check raises ConformanceFailed. Workers are threads with a tiny float64 model, AdamW, rows from seeds, and a clock that
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
    on_workers,
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
        members = on_workers(strategy, size, lambda member: (member.replica.parameters.clone(), member.consensus()))
        expect_same_on_all([parameters for parameters, _ in members], strategy, "the start")
        expect_same_on_all([consensus for _, consensus in members], strategy, "the consensus before the first tick")


def check_consensus(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After every tick it is finite and the same on all ranks; asking for it moves nothing."""

    def program(member: StrategyWorker) -> list[Tensor]:
        answers = []
        for tick in range(len(ROWS)):
            member.train(1)
            member.barrier()
            before = member.holds()
            answers += [member.consensus(), member.consensus()]
            expect_unchanged(before, member.holds(), f"asked for the consensus after tick {tick}")
            expect(torch.equal(answers[-1], answers[-2]), f"two consensuses after tick {tick} differ")
            member.barrier()
        member.finish()
        return [*answers, member.consensus()]

    for size in sizes:
        for i, vectors in enumerate(zip(*on_workers(strategy, size, program), strict=True)):
            expect_same_on_all(list(vectors), strategy, f"the consensus after tick {min(i // 2, len(ROWS) - 1)}")


def check_agreed(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After each tick what `agreed` gives is the same on all ranks, or None on all of them; asking for it moves nothing."""

    def program(member: StrategyWorker) -> list[Tensor | None]:
        answers = []
        for tick in range(len(ROWS)):
            member.train(1)
            member.barrier()
            before = member.holds()
            agreed = member.strategy.agreed(member.replica, member.state)
            answers.append(None if agreed is None else agreed.clone())
            expect_unchanged(before, member.holds(), f"asked for what is agreed after tick {tick}")
            member.barrier()
        member.finish()
        return answers

    for size in _in_step(strategy, sizes):
        for tick, answers in enumerate(zip(*on_workers(strategy, size, program), strict=True)):
            vectors = [answer for answer in answers if answer is not None]
            expect(
                len(vectors) in (0, size),
                f"{strategy} on {size} workers: after tick {tick} some ranks promise equal replicas and some do not",
            )
            expect_same_on_all(vectors, strategy, f"what is agreed after tick {tick}")


def check_finish(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """After windows of 0, 1, 2, … ticks: a second `finish` changes nothing, nor does the first where there was no tick."""

    def program(member: StrategyWorker) -> None:
        before = member.holds()
        for ticks in range(5):
            member.train(ticks)
            member.finish()
            after = member.holds()
            if not ticks:
                expect_unchanged(before, after, "finish before the first tick")
            member.finish()
            expect_unchanged(after, member.holds(), f"a second finish after a window of {ticks} ticks")

    for size in sizes:
        on_workers(strategy, size, program)


def check_round_of_nothing(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Ticks and rounds in which nobody has a row change nothing, now or later: outer momentum included. (CASE 27)

    In step only. Where a server holds the center, that is what must not change: workers may take it over meanwhile.
    """

    def what_stays(member: StrategyWorker) -> Held:
        return member.holds() if member.worker.server is None else {"the consensus": member.consensus()}

    def program(member: StrategyWorker, empty: bool) -> tuple[Held, Held]:
        member.train(9)
        member.finish()
        before = what_stays(member)
        for _ in range(9):
            if empty:
                member.turn(None)
            else:
                member.tick += 1
        member.finish()
        expect_unchanged(before, what_stays(member), "9 ticks without any rows")
        member.train(9)
        member.finish()
        return before, member.holds()

    for size in _in_step(strategy, sizes):
        with_them = on_workers(strategy, size, lambda member: program(member, empty=True))
        without = on_workers(strategy, size, lambda member: program(member, empty=False))
        for rank, (a, b) in enumerate(zip(with_them, without, strict=True)):
            expect_unchanged(
                b[1], a[1], f"{strategy} on {size} workers, rank {rank}: training after 9 ticks without rows"
            )


def check_worker_without_rows(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Its ticks are empty: nobody hangs, it moves in rounds only, and it takes the others' answer; in step only. (CASES 18, 27)"""

    def program(member: StrategyWorker) -> tuple[Tensor, int]:
        last = member.worker.rank == member.worker.size - 1
        for tick in range(len(ROWS)):
            before, rounds = member.replica.parameters.clone(), member.replica.rounds
            member.turn(None if last else global_batch(tick), idle=last)
            alone = last and member.replica.rounds == rounds and not torch.equal(member.replica.parameters, before)
            expect(not alone, f"rank {member.worker.rank} moved at tick {tick}, without rows and outside of a round")
        member.finish()
        return member.consensus(), member.replica.rounds

    for size in _in_step(strategy, sizes):
        expect_same_on_all(
            [end for end, _ in on_workers(strategy, size, program)], strategy, "the end beside empty ticks"
        )


def check_streams(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Streams of 3, 7, 11, … batches: all ranks hear at one tick that nobody has rows, once nobody has; in step only. (CASE 18)"""

    def program(member: StrategyWorker) -> list[bool]:
        mine, longest = (3 + 4 * rank for rank in (member.worker.rank, member.worker.size - 1))
        return [
            member.turn(global_batch(tick) if tick < mine else None, idle=mine <= tick < longest, more=tick + 1 < mine)
            for tick in range(longest + EXTRA_TICKS)
        ]

    for size in _in_step(strategy, sizes):
        ends = [answers.index(False) if False in answers else None for answers in on_workers(strategy, size, program)]
        last = 3 + 4 * (size - 1) - 1
        expect_one_tick(ends, last, f"{strategy} on {size} workers: the last rows were of tick {last}; first False at")


def check_stop(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """A stop that one rank sets is heard by all at one tick, soon, and not before; in step only."""

    def program(member: StrategyWorker) -> int | None:
        last = member.worker.rank == member.worker.size - 1
        for tick in range(5 + EXTRA_TICKS):
            member.turn(global_batch(tick), stop=last and tick >= 5)
            if member.replica.control_bits & STOP:
                stopped_at.setdefault(member.worker.rank, tick)
        return stopped_at.get(member.worker.rank)

    for size in _in_step(strategy, sizes):
        stopped_at: dict[int, int] = {}
        ends = on_workers(strategy, size, program)
        expect_one_tick(ends, 5, f"{strategy} on {size} workers: rank {size - 1} set STOP from tick 5 on; heard at")


def check_repeat(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Two runs of the same give the same bits; one worker's, where each goes at its own pace."""
    for size in _alike(strategy, sizes):
        first, again = (on_workers(strategy, size, whole_run) for _ in range(2))
        for rank, (a, b) in enumerate(zip(first, again, strict=True)):
            expect_unchanged(a, b, f"{strategy} on {size} workers, rank {rank}: the same run twice")


def check_resume(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Written after any tick and read into a fresh replica and server, it ends bit for bit as if never interrupted. (CASE 19)

    One worker's, where each goes at its own pace.
    """

    def written(member: StrategyWorker) -> list[Checkpoint]:
        saved = []
        for tick in range(1, len(ROWS)):
            member.train(1)
            tensors, values = run_state.capture(member.replica, member.state, {"total": None})
            member.barrier()
            if member.worker.server is not None and member.worker.rank == 0:
                shared, values["server"] = run_state.capture_server(member.worker.server, member.replica)
                tensors |= shared
            path = checkpoints.save(Path(folder) / str(tick), tick, member.worker.group, tensors, values)
            saved.append(Checkpoint(path, tick, member.worker.size))
        return saved

    def resumed(member: StrategyWorker, saved: Checkpoint) -> Held:
        rank, size = member.worker.rank, member.worker.size
        member.state, _ = run_state.restore(saved, member.replica, member.state, rank, size, None)
        if member.worker.server is not None and rank == 0:
            run_state.restore_server(saved, member.worker.server, member.replica)
        member.tick, member.replica.tick = saved.tick, saved.tick - 1
        return whole_run(member)

    for size in _alike(strategy, sizes):
        wanted = on_workers(strategy, size, whole_run)
        with tempfile.TemporaryDirectory() as folder:
            for saved in on_workers(strategy, size, written)[0]:
                ends = on_workers(strategy, size, lambda member, saved=saved: resumed(member, saved))  # type: ignore[misc]
                for rank, (a, b) in enumerate(zip(wanted, ends, strict=True)):
                    what = f"{strategy} on {size} workers, rank {rank}: resumed after {saved.tick} ticks"
                    expect_unchanged(a, b, what)


def check_pushes(strategy: Strategy, sizes: Sequence[int] = SIZES) -> None:
    """Who steps, pushes; who does not, does not; a second `finish` pushes nothing; each push is one version of the server.

    At one's own pace only: at bound 0 a version is everybody's.
    """

    def program(member: StrategyWorker) -> tuple[list[list[int] | None], int]:
        server, pushes = member.worker.server, []
        assert server is not None
        for ticks in (0, 1, 2, len(ROWS)):
            for _ in range(ticks):
                part = None if member.worker.rank == idle else global_batch(member.tick)
                member.turn(part)
                member.tick += 1
            member.finish()
            member.finish()
            pushed = server.drain_journal().get("pushes", [])
            wanted = ticks > 0 and member.worker.rank != idle
            problem = f"rank {member.worker.rank} pushed {len(pushed)} times in {ticks} ticks"
            expect(bool(pushed) == wanted, f"{problem}, expected {'some' if wanted else 'none'}")
            expect(len(pushed) <= ticks, f"{problem}, expected one a tick at most")
            pushes += pushed
        return pushes, member.replica.step

    for size in sizes if strategy.leasing() is not None and strategy.server() is not None else []:
        idle = size - 1 if size > 1 else None
        everybody = [push for pushes, _ in on_workers(strategy, size, program) for push in pushes]
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

    def program(member: StrategyWorker) -> Held:
        member.train(len(ROWS))
        member.finish()
        return member.holds()

    ends = on_workers(strategy, 1, program)
    expect_unchanged(wanted, ends[0], f"{strategy} with one worker beside a plain loop")


STRATEGY_SUITE: dict[str, StrategyCheck] = checks_of(globals())
"""All checks by name, in the order in which they are written above."""
