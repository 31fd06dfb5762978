"""A prepared loop whose workers go at their own pace: workers are threads, the server is in this process."""

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from own_loops import loader_of, on, prepared, seeded
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
import plain
from manyhands.errors import BadInput, Unsupported
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.session import Session
from manyhands.strategies import server_strategy
from manyhands.testing.threads import together
from manyhands.worker import Worker, as_current

STRATEGIES = [
    "downpour",
    "easgd:period=2",
    "diloco:via=server,period=2",
    "hogwild",
    "update-sharing",
    "gossip:graph=pairs",
]
WAIT_S = 20.0


def numbered(n: int = 39, batch_size: int = 12, **options: Any) -> DataLoader[Any]:
    """Batches of (x, y, the rows' numbers). Workers that are threads have one random state: it shuffles by its own."""
    options |= {"generator": torch.Generator().manual_seed(1)} if "shuffle" in options else {}
    return DataLoader(TensorDataset(*plain.rows(n), torch.arange(n)), batch_size=batch_size, **options)


def step(model: nn.Module, rule: torch.optim.Optimizer, batch: Any) -> list[int]:
    rule.zero_grad()
    plain.cross_entropy(model, batch[:2]).backward()
    rule.step()
    return [int(row) for row in batch[2]]


def center_of(session: Session) -> Tensor:
    """What the server has; without one, what lies in memory."""
    (pair,) = session.pairs
    replica, server = pair.replica, session.worker.server
    center = replica.parameters if server is None else server_strategy.read_center(replica, session.worker)
    return torch.cat([view.reshape(-1) for view in replica.named(center).values()]).clone()


class Stream:
    """Batches that can only be read one after the other, and by every worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(numbered())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_row_is_trained_once_an_epoch_and_all_end_at_the_center(strategy: str) -> None:
    def program(worker: Worker) -> tuple[list[list[int]], Tensor, Tensor]:
        session = Session(worker)
        model, rule, loader = prepared(worker, strategy, numbered(shuffle=True), session=session)
        assert len(loader) == 4
        passes = [[row for batch in loader for row in step(model, rule, batch)] for _ in range(2)]
        return passes, plain.flat(model), center_of(session)

    found = on(4, strategy, program)
    for number in range(2):
        assert sorted(row for passes, _, _ in found for row in passes[number]) == list(range(39))
    for _, parameters, center in found:
        assert torch.equal(parameters, found[0][1])
        assert torch.equal(parameters, center)
    assert not torch.equal(found[0][1], plain.flat(seeded()))


def test_each_row_once_of_a_stream_and_of_loader_processes() -> None:
    def program(worker: Worker, loader: Any) -> list[int]:
        model, rule, loader = prepared(worker, "downpour", loader())
        return [row for _ in range(2) for batch in loader for row in step(model, rule, batch)]

    for make, shards in ((Stream, 1), (lambda: numbered(shuffle=True, num_workers=1), 3)):
        found = on(2, "downpour", partial(program, loader=make), shards)
        assert Counter(row for rows in found for row in rows) == dict.fromkeys(range(39), 2)


def test_whoever_is_free_takes_what_a_slow_worker_has_not_begun() -> None:
    others_done, slow_began = threading.Event(), threading.Event()

    def program(worker: Worker) -> int:
        model, rule, loader = prepared(worker, "downpour", numbered(48))
        slices = 0
        for batch in loader:
            if worker.rank == 1:
                slow_began.set()
                assert others_done.wait(WAIT_S)
            assert slow_began.wait(WAIT_S)
            step(model, rule, batch)
            slices += 1
            if slices == 7:
                others_done.set()
        return slices

    assert on(2, "downpour", program) == [7, 1]  # of 4 batches of two slices each


def test_worker_0_warms_up_alone() -> None:
    order: list[int] = []
    second_came = threading.Event()

    def program(worker: Worker) -> Tensor:
        model, rule, loader = prepared(worker, "downpour:warmup=3", numbered(48))
        for batch in loader:
            order.append(worker.rank)
            if worker.rank == 1:
                second_came.set()
            elif len(order) > 3:
                assert second_came.wait(WAIT_S)
            step(model, rule, batch)
        return plain.flat(model)

    first, second = on(2, "downpour:warmup=3", program)
    assert order[:3] == [0, 0, 0]
    assert set(order) == {0, 1}
    assert torch.equal(first, second)


def test_a_pass_that_is_left_ends_for_the_others_too() -> None:
    """What nobody has begun is taken by those who go on."""

    def program(worker: Worker) -> list[list[int]]:
        model, rule, loader = prepared(worker, "downpour:bound=1", numbered(48))
        passes: list[list[int]] = []
        for _ in range(2):
            passes.append([])
            for batch in loader:
                passes[-1] += step(model, rule, batch)
                if worker.rank == 1 and len(passes) == 1:
                    break
        return passes

    found = on(2, "downpour:bound=1", program)
    for number in range(2):
        assert sorted(row for passes in found for row in passes[number]) == list(range(48))


# -- evaluation between passes -------------------------------------------------------------------------------------------


def test_replicas_that_differ_go_on_from_where_they_were() -> None:
    """EASGD's workers are drawn to the center and do not take it over; the model shows it between passes."""

    def program(worker: Worker) -> list[tuple[Tensor, Tensor]]:
        model, rule, loader = prepared(worker, "easgd:period=2,via=group", numbered())
        seen = []
        for _ in range(2):
            first = None
            for batch in loader:
                first = plain.flat(model).clone() if first is None else first
                step(model, rule, batch)
            seen.append((first, plain.flat(model).clone()))
        return seen  # type: ignore[return-value]

    mine, other = on(2, "easgd:via=group", program)
    for number in range(2):
        assert torch.equal(mine[number][1], other[number][1])  # the center
        assert torch.equal(mine[number][0], other[number][0]) == (number == 0)


def test_what_the_user_loads_between_passes_stays() -> None:
    def program(worker: Worker, strategy: str) -> None:
        model, rule, loader = prepared(worker, strategy, numbered())
        best = {name: value.clone() for name, value in model.state_dict().items()}
        for number in range(2):
            for batch in loader:
                if number:
                    for name, value in best.items():
                        assert torch.equal(model.state_dict()[name], value)
                    return
                step(model, rule, batch)
            model.load_state_dict(best)

    for strategy in ("easgd:period=2,via=group", "gossip"):
        on(2, strategy, partial(program, strategy=strategy))


def test_a_loader_that_trains_nothing_leaves_the_center_in_place() -> None:
    def program(worker: Worker) -> list[int]:
        model, rule, loader, other = prepared(worker, "easgd:period=2", numbered(), numbered(24))
        rows = list[int]()
        for number in range(2):
            for batch in loader:
                step(model, rule, batch)
            center = plain.flat(model).clone()
            rows = []
            for batch in other:
                assert number == 0 or torch.equal(plain.flat(model), center)
                rows += batch[2].tolist()
        return rows

    with pytest.warns(UserWarning, match="each of the 2 workers got its part of the rows only"):
        one, another = on(2, "easgd:period=2", program)
    assert sorted([*one, *another]) == list(range(24))


# -- schedules -----------------------------------------------------------------------------------------------------------


def scheduled(worker: Worker, make: Any, rate: float = 0.01) -> Any:
    """(model, rule, loader, schedule), prepared."""
    model = seeded()
    rule = torch.optim.SGD(model.parameters(), lr=rate)
    schedule = make(rule)
    *found, same = prepare_slices(Session(worker), model, rule, numbered(48), schedule, strategy="downpour")
    assert same is schedule
    return (*found, schedule)


def test_a_prepared_scheduler_counts_what_all_have_had() -> None:
    def program(worker: Worker, every: int, others_done: threading.Event) -> tuple[list[int], int]:
        # 8 global batches: one step too many is an error
        model, rule, loader, schedule = scheduled(worker, lambda rule: OneCycleLR(rule, max_lr=0.01, total_steps=9))
        assert type(schedule).__name__ == "OneCycleLR"
        steps, slices = [], 0
        for epoch in range(2):
            for number, batch in enumerate(loader):
                if worker.rank == 1 and epoch == 0:
                    assert others_done.wait(WAIT_S)
                step(model, rule, batch)
                slices += 1
                if (number + 1) % every == 0:
                    schedule.step()
                if slices == 7:
                    others_done.set()
            steps.append(schedule.last_epoch)
        assert "_schedule" not in schedule.state_dict()
        return steps, slices

    for every in (1, 2):
        (first, most), (second, _) = on(2, "downpour", partial(program, every=every, others_done=threading.Event()))
        assert first == second
        assert most >= 7
        assert first == [4, 8] if every == 1 else first[-1] <= 4


def test_a_worker_without_rows_is_as_far_with_its_schedule() -> None:
    """Of two slices of a batch the second makes a step. And torch does not say that it was stepped too early."""
    first_done = threading.Event()

    def program(worker: Worker) -> tuple[list[int], int]:
        model, rule, loader, schedule = scheduled(worker, lambda rule: ExponentialLR(rule, 0.9))
        batches, reached = iter(loader), list[int]()
        if worker.rank == 1:
            assert first_done.wait(WAIT_S)
        for batch in batches:
            step(model, rule, batch)
            schedule.step()
            reached.append(schedule.last_epoch)
            if len(reached) == 8:
                first_done.set()
        return reached, schedule.last_epoch

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on(2, "downpour", program) == [([0, 1, 1, 2, 2, 3, 3, 4], 4), ([], 4)]


def test_calls_between_passes_and_with_a_metric_are_one_step() -> None:
    def program(worker: Worker) -> tuple[int, float]:
        model = seeded()
        rule = torch.optim.SGD(model.parameters(), lr=1.0)
        each = ExponentialLR(rule, 0.5)
        on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(rule, patience=0, factor=0.1)
        *_, loader, _, _ = prepare_slices(
            Session(worker), model, rule, numbered(), each, on_plateau, strategy="downpour"
        )
        for _ in range(2):
            for _ in loader:
                pass
            each.step()
            on_plateau.step(1.0)
        return each.last_epoch, rule.param_groups[0]["lr"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loops without a step
        assert on(2, "downpour", program) == [(2, pytest.approx(0.025))] * 2


def with_a_schedule_apart(worker: Worker, strategy: str, each: bool) -> None:
    """A scheduler that was not given to prepare; each: it steps after each batch, else after each pass."""
    model, rule, loader = prepared(worker, strategy, numbered(48))
    schedule = ExponentialLR(rule, 0.9)
    for _ in range(2):
        for batch in loader:
            step(model, rule, batch)
            if each:
                schedule.step()
        if not each:
            schedule.step()


def test_a_scheduler_that_was_not_given_is_named_once_where_it_matters() -> None:
    """Not where it changes the rate between passes, nor in step."""
    with pytest.warns(UserWarning, match="Give the scheduler, too") as caught:
        on(2, "downpour", lambda worker: with_a_schedule_apart(worker, "downpour", each=True))
    assert sum("Give the scheduler" in str(one.message) for one in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on(2, "downpour", lambda worker: with_a_schedule_apart(worker, "downpour", each=False))
        on(2, "allreduce", lambda worker: with_a_schedule_apart(worker, "allreduce", each=True))


def test_in_step_a_scheduler_comes_back_as_it_is_and_one_of_another_optimizer_is_refused() -> None:
    model = seeded()
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ExponentialLR(rule, 0.9)
    *_, same = prepare_slices(Session(Worker()), model, rule, schedule)
    assert same is schedule
    assert type(same) is ExponentialLR
    with pytest.raises(BadInput, match="ExponentialLR is of another optimizer"):
        prepared(Worker(), "allreduce", schedule)


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_without_its_server_it_is_said_how_to_have_one() -> None:
    with pytest.raises(Unsupported, match=r"manyhands run --strategy downpour:bound=2 SCRIPT"):
        together(2, lambda worker: prepared(worker, "downpour:bound=2"))
    with pytest.raises(BadInput, match="server of another strategy"):
        on(2, "easgd", lambda worker: prepared(worker, "downpour"))


def two_models(worker: Worker, strategy: str) -> Any:
    session = Session(worker)
    kept = [prepared(worker, strategy, session=session) for _ in range(2)]
    raise AssertionError(kept)


def nested(worker: Worker, strategy: str) -> None:
    _, _, loader, other = prepared(worker, strategy, numbered(), numbered())
    for _ in loader:
        for _ in other:
            pass


def means(worker: Worker, strategy: str) -> None:
    session = worker.prepared = Session(worker)
    _, _, loader = prepared(worker, strategy, numbered(), session=session)
    for _ in loader:
        with as_current(worker):
            mh.mean(1.0)


def unfrozen(worker: Worker, strategy: str) -> None:
    model = seeded()
    model[0].weight.requires_grad_(False)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = prepare_slices(Session(worker), model, rule, loader_of(), strategy=strategy)
    for batch in loader:
        model[0].weight.requires_grad_(True)
        plain.cross_entropy(model, batch).backward()
        rule.step()


def warmup_alone(worker: Worker, strategy: str) -> None:
    model, rule = prepared(worker, "downpour:warmup=2")
    plain.cross_entropy(model, plain.rows(4)).backward()
    rule.step()


def test_what_cannot_be_names_the_way_out() -> None:
    for program, strategy, message in (
        (two_models, "downpour", "whose server holds one model"),
        (two_models, "hogwild", "whose workers go at their own pace"),
        (two_models, "update-sharing", "whose workers go at their own pace"),
        (two_models, "quorum", "whose server holds one model"),
        (nested, "downpour", "two prepared loaders are under way at once"),
        (means, "downpour", "call it between two passes"),
        (unfrozen, "downpour", "parameters were unfrozen"),
        (warmup_alone, "downpour:warmup=2", "prepare the loader, too"),
    ):
        with pytest.raises(Unsupported, match=message):
            on(2, strategy, partial(program, strategy=strategy))
