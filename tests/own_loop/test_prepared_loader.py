"""Shares of the user's own loader: who reads which rows, stand-ins, what happens at the end and after a break."""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import loader_of, prepared
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

import manyhands as mh
import plain
from manyhands.data.open_source import open_source
from manyhands.data.sharding import slice_of
from manyhands.errors import BadInput, Unsupported
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.prepared_loader import PreparedLoader, share
from manyhands.own_loop.session import Session
from manyhands.testing.threads import together
from manyhands.worker import Worker


class Count(IterableDataset[Any]):
    """A stream of range(n)."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Batches:
    """Not a DataLoader: any iterable of batches."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in (0, 4, 8):
            part = list(range(start, min(start + 4, 10)))
            yield {"x": torch.tensor(part), "name": [str(i) for i in part], "flag": True}


def shares(worker: Worker, plain_loader: Any, passes: int = 1) -> list[tuple[list[int], float]]:
    """(rows, weight) of each batch that this worker gets."""
    session = Session(worker)
    loader = PreparedLoader(plain_loader, session)
    return [
        (torch.as_tensor(batch).tolist(), session.next_backward().weight) for _ in range(passes) for batch in loader
    ]


def rows_used(everybody: list[list[tuple[list[int], float]]]) -> list[list[int]]:
    """Each tick's rows of all workers, in rank order, stand-ins left out."""
    return [[row for rows, weight in tick for row in rows if weight] for tick in zip(*everybody, strict=True)]


def test_one_worker_gets_what_the_plain_loader_gives() -> None:
    """CASE 1: the same batches and the same random numbers after them, through iter() and next() as well."""
    loader = loader_of(shuffle=True)
    torch.manual_seed(0)
    expected = [*loader, torch.rand(3), next(iter(loader)), torch.rand(3)]
    torch.manual_seed(0)
    shared = PreparedLoader(loader, Session(Worker()))
    got = [*shared, torch.rand(3), next(iter(shared)), torch.rand(3)]
    assert repr(expected) == repr(got)
    assert (len(shared), shared.batch_size, shared.dataset, shared.sampler) == (4, 12, loader.dataset, loader.sampler)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = shared.nonsense


# -- several workers -------------------------------------------------------------------------------------------------


def test_every_row_is_handed_out_once_in_its_global_batch() -> None:
    """CASES 2 and 18: each rank has its slice of each batch; a rank without rows gets two rows of weight 0.

    Of a batch of one row they are twice that row: batch norm cannot train on one.
    """
    for make, size in ((range, 4), (Count, 3)):
        everybody = together(size, lambda worker: shares(worker, DataLoader(make(39), batch_size=12)))  # noqa: B023
        for rank, mine in enumerate(everybody):
            for start, found in zip((0, 12, 24, 36), mine, strict=True):
                begin, end = slice_of(min(12, 39 - start), rank, size)
                own = list(range(start + begin, start + end))
                assert found == ((own, len(own)) if own else ([start, start + 1], 0))
    everybody = together(3, lambda worker: shares(worker, DataLoader(range(7), batch_size=6)))
    assert [mine[-1] for mine in everybody] == [([6, 6], 0.0), ([6, 6], 0.0), ([6], 1.0)]


def seeded_loader(seed: int) -> DataLoader[Any]:
    return DataLoader(range(12), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_the_users_own_order_is_kept() -> None:
    """Its samplers, and of a generator that each rank has seeded apart rank 0's; a new order each pass."""
    batches = BatchSampler(SequentialSampler(range(8)), 3, drop_last=False)
    for make, expected in (
        (lambda rank: DataLoader(range(15), batch_size=6, drop_last=True), [[*range(6)], [*range(6, 12)]] * 2),
        (lambda rank: DataLoader(range(6), batch_size=4, sampler=range(5, -1, -1)), [[5, 4, 3, 2], [1, 0]] * 2),
        (lambda rank: DataLoader(range(8), batch_sampler=batches), [[0, 1, 2], [3, 4, 5], [6, 7]] * 2),
        (lambda rank: DataLoader([torch.arange(4), torch.arange(3)], batch_size=None), [[0, 1, 2, 3], [0, 1, 2]] * 2),
        (lambda rank: seeded_loader(7 + rank), [one.tolist() for loader in [seeded_loader(7)] * 2 for one in loader]),
    ):
        everybody = together(2, lambda worker: shares(worker, make(worker.rank), passes=2))  # noqa: B023
        assert rows_used(everybody) == expected


def passes_left_early(prepared: Callable[[DataLoader[Any]], Any], options: dict[str, Any], processes: int) -> list[Any]:
    """(batches, state of the user's generator) of passes that are left after so many batches, or held."""
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(range(40), generator=generator, **options)
    loader = prepared(DataLoader(range(40), batch_size=8, sampler=sampler, generator=generator, num_workers=processes))
    found: list[Any] = []
    for last in (2, 1, 99, 3):
        batches = [batch for _, batch in zip(range(last), loader, strict=False)]  # asks for one more than it takes
        found.append((batches, generator.get_state()))
    held = iter(loader)
    found.append(([], generator.get_state()))  # a pass that has begun, and gave nothing yet
    found.append(([next(held)], generator.get_state()))
    return found


@pytest.mark.parametrize(
    ("options", "processes"),
    [({}, 0), ({"replacement": True, "num_samples": 100}, 0), pytest.param({}, 1, marks=pytest.mark.slow)],
    ids=["permuted", "replaced", "loader processes"],
)
def test_a_pass_that_is_left_early_leaves_the_users_generator_where_one_process_does(
    options: dict[str, Any], processes: int
) -> None:
    """Its next pass has the same order, and so has a pass that is held and never left."""
    alone = passes_left_early(lambda loader: loader, options, processes)

    def program(worker: Worker | None = None) -> list[Any]:
        session = Session(worker or mh.worker())
        return passes_left_early(lambda loader: PreparedLoader(loader, session), options, processes)

    both = mh.launch(program, workers=2) if processes else together(2, program)
    for (batches, state), *halves in zip(alone, *both, strict=True):
        assert all(torch.equal(state, own) for _, own in halves)
        assert [batch.tolist() for batch in batches] == [
            [*first.tolist(), *second.tolist()] for first, second in zip(*(own for own, _ in halves), strict=True)
        ]


def test_any_iterable_of_batches_is_cut() -> None:
    """Dicts, strings and what belongs to the whole batch; NumPy's arrays and nested batches."""

    def program(worker: Worker) -> list[dict[str, Any]]:
        return list(PreparedLoader(Batches(), Session(worker)))

    everybody = together(4, program)
    assert [[len(batch["x"]) for batch in mine] for mine in everybody] == [[1, 1, 2], [1, 1, 1], [1, 1, 2], [1, 1, 1]]
    for number, rows in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
        ranks = everybody if number < 2 else (everybody[1], everybody[3])
        assert [row for mine in ranks for row in mine[number]["x"].tolist()] == rows
    for batch in (batch for mine in everybody for batch in mine):
        assert batch["name"] == [str(i) for i in batch["x"].tolist()]
        assert batch["flag"]
    nested = (np.arange(6).reshape(3, 2), {"y": torch.arange(3)})
    got = together(2, lambda worker: list(PreparedLoader([nested], Session(worker))))
    assert [(part[0].shape, part[1]["y"].tolist()) for (part,) in got] == [((1, 2), [0]), ((2, 2), [1, 2])]


class Doubled(DataLoader[Any]):
    """Iterates in a way of its own, as accelerate's and torchdata's do: other values, another type, one batch more."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield {"x": 2 * batch}
        yield {"x": torch.arange(100, 104)}

    def __len__(self) -> int:
        return super().__len__() + 1


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter([torch.arange(4), torch.arange(4, 8)])


def test_a_loader_with_an_iter_of_its_own_is_iterated() -> None:
    def program(worker: Worker) -> list[list[int]]:
        doubled = PreparedLoader(Doubled(range(8), batch_size=4), Session(worker))
        own = PreparedLoader(OwnIterator(range(8), batch_size=4), Session(worker))
        assert (len(doubled), len(own)) == (3, 2)
        return [*(batch["x"].tolist() for batch in doubled), *(batch.tolist() for batch in own)]

    expected = [[0, 2, 4, 6], [8, 10, 12, 14], [100, 101, 102, 103], [0, 1, 2, 3], [4, 5, 6, 7]]
    for size in (1, 3):
        everybody = together(size, program)
        assert [sum(tick, []) for tick in zip(*everybody, strict=True)] == expected


def test_batches_that_differ_by_rank_are_named_before_they_are_cut() -> None:
    """From the first pass's first batch, or from its second, which comes after a backward, or of which one rank has none."""

    def program(worker: Worker, differs: int) -> list[Any]:
        batches = [torch.arange(4), torch.arange(4)]
        batches[differs] = batches[differs] + worker.rank
        return list(PreparedLoader(batches, Session(worker)))

    for differs in (0, 1):
        with pytest.raises(BadInput, match="workers 0 and 1 read different batches.*seed .* alike"):
            together(2, lambda worker: program(worker, differs))  # noqa: B023
    with pytest.raises(BadInput, match="0 and 1 read different batches .digests .* and None"):
        together(2, lambda worker: list(PreparedLoader([torch.arange(4)] * (2 - worker.rank), Session(worker))))


# -- stand-ins -------------------------------------------------------------------------------------------------------


def test_buffers_leave_out_a_stand_in_and_are_averaged_at_the_end_of_a_pass() -> None:
    """Batch-norm statistics: in the last batch rank 0 has no rows, runs its loop body, and keeps what it had."""

    def program(worker: Worker) -> tuple[list[bool], Tensor]:
        session, norm = Session(worker), nn.BatchNorm1d(1, momentum=None).double()
        norm, optimizer, loader = prepare_slices(
            session, norm, torch.optim.SGD(norm.parameters(), lr=0.1), loader_of(7, 6)
        )
        moved = []
        for inputs, _ in loader:
            before = norm.running_mean.clone()
            norm(inputs[:, None]).square().mean().backward()
            moved.append(not torch.equal(norm.running_mean, before))
            optimizer.step()
            norm(inputs[:, None])  # as a discriminator's, once more after its step
            moved.append(not torch.equal(norm.running_mean, before))
        return moved, torch.cat([norm.running_mean, norm.num_batches_tracked[None]])

    x = plain.rows(7)[0]
    own = [x[:3].mean(), torch.stack([x[3:6].mean(), x[6].mean()]).mean()]
    (first, mean), (second, other) = together(2, program)
    assert second == [True] * 4
    assert first[:2] == [True, True]
    assert mean.tolist() == other.tolist() == pytest.approx([float(torch.stack(own).mean()), 4.0])


class Fancy(DataLoader[Any]):
    """A library's own."""

    def rows(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def test_a_dataloader_is_shared_in_place() -> None:
    """Whoever holds it gets the share, in its own class; `plain` gives all rows."""

    def program(worker: Worker) -> list[Any]:
        loader = Fancy(range(8), batch_size=4)
        held, session = loader, Session(worker)
        assert share(loader, session) is loader
        assert share(loader, session) is loader
        assert isinstance(held, Fancy)
        assert (type(held).__name__, held.rows(), len(held), held.batch_size) == ("Fancy", 8, 2, 4)
        alone = pickle.loads(pickle.dumps(held))
        assert type(alone) is type(held.plain) is Fancy
        assert (
            [batch.tolist() for batch in alone]
            == [batch.tolist() for batch in held.plain]
            == [[0, 1, 2, 3], [4, 5, 6, 7]]
        )
        return [batch.tolist() for batch in held]

    assert together(2, program) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_dataloader_of_an_earlier_session_is_shared_anew_and_others_of_its_class_are_nobodys() -> None:
    loader = DataLoader(range(4), batch_size=2)
    first, second = Session(Worker()), Session(Worker())
    share(loader, first)
    kind = type(loader)
    assert share(loader, second) is loader
    assert (type(loader)._prepared.session, type(loader)) == (second, kind)  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    other = kind(range(2), batch_size=1)
    assert type(other) is DataLoader
    assert [batch.tolist() for batch in other] == [[0], [1]]


class Remembers(DataLoader[Any]):
    """Keeps where it is, as torchdata's StatefulDataLoader does; and has an order of its own by epoch."""

    begun, epoch = 0, 0

    def __iter__(self) -> Any:
        self.begun += 1
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_the_loader_its_dataset_and_what_is_iterated_have_one_state() -> None:
    loader: Any = Remembers(range(4), batch_size=2)
    share(loader, Session(Worker()))
    assert len(list(loader)) == 2
    assert (loader.begun, loader.plain.begun) == (1, 1)
    loader.set_epoch(3)
    assert (loader.epoch, loader.plain.epoch) == (3, 3)
    loader.begun = 7
    assert loader.plain.begun == 7
    heard = []

    class Knows(list[int]):
        def set_epoch(self, epoch: int) -> None:
            heard.append(epoch)

    PreparedLoader(DataLoader(Knows(range(4))), Session(Worker())).set_epoch(3)
    assert heard == [3]


def test_what_cannot_be_shared_in_place_gets_a_wrapper() -> None:
    """A class that cannot be derived from, and what several workers of a process hold. As data it is the loader it was."""

    class Strict(DataLoader[Any]):
        def __init_subclass__(cls, *, name: str) -> None:
            raise AssertionError("nobody names it")

    loader: Any = Strict(range(4), batch_size=2)
    assert isinstance(share(loader, Session(Worker())), PreparedLoader)
    assert type(loader) is Strict
    loader = DataLoader(range(6), batch_size=2, shuffle=True)
    assert isinstance(share(loader, Session(Worker(shares_process=True))), PreparedLoader)
    assert type(loader) is DataLoader
    share(loader, Session(Worker(size=2)))
    assert open_source(loader).rows == 6
    assert type(open_source(loader)) is type(open_source(DataLoader(range(6), batch_size=2, shuffle=True)))
    shared = share(loader, Session(Worker(shares_process=True)))
    assert isinstance(shared, PreparedLoader)
    assert type(shared.plain) is DataLoader


def test_weights_of_what_follows_a_stand_in_and_of_a_loop_inside_the_loop() -> None:
    def program(worker: Worker) -> list[float]:
        session = Session(worker)
        weights = []
        for index, _ in enumerate(PreparedLoader(DataLoader(range(5), batch_size=4), session)):
            weights.append(session.next_backward().weight)
            if index == 1:
                break
        weights.append(session.next_backward().weight)  # the batch is at hand until another one comes
        outer, inner = (PreparedLoader(DataLoader(range(8), batch_size=size), session) for size in (4, 2))
        for _ in outer:
            weights += [session.next_backward().weight for _ in inner]
            weights.append(session.next_backward().weight)
        return weights

    assert together(2, program) == [[2.0, own, own, *[1.0, 1.0, 1.0, 1.0, 2.0] * 2] for own in (0.0, 1.0)]


# -- the end of a pass -----------------------------------------------------------------------------------------------


def test_a_break_leaves_the_round_open_until_the_next_pass_or_finish() -> None:
    def program(worker: Worker, then: Callable[[Any], Any]) -> Tensor:
        model, rule, loader = prepared(worker, "local-sgd:period=10", loader_of())
        for index, batch in enumerate(loader):
            plain.cross_entropy(model, batch).backward()
            rule.step()
            rule.zero_grad()
            if index == 1:
                break
        then(loader)
        return plain.flat(model).clone()

    for then, equal in ((lambda loader: (loader.finish(), loader.finish()), True), (iter, True), (len, False)):
        first, second = together(2, lambda worker: program(worker, then))  # noqa: B023
        assert torch.equal(first, second) is equal


@pytest.mark.filterwarnings("ignore:no optimizer took a step")
def test_only_pairs_that_stepped_in_a_pass_are_finished() -> None:
    """A validation loop inside the training loop closes nothing."""

    def program(worker: Worker) -> bool:
        model, rule, loader, other = prepared(worker, "local-sgd:period=10", loader_of(24), loader_of(24))
        for batch in loader:
            plain.cross_entropy(model, batch).backward()
            rule.step()
            before = plain.flat(model).clone()
            list(other)
            unchanged = torch.equal(before, plain.flat(model))
        return unchanged

    assert together(2, program) == [True, True]


# -- backwards whose rows nobody knows -------------------------------------------------------------------------------


def ahead(rank: int, loader: Any, other: Any) -> Iterator[Any]:
    batches = iter(loader)
    coming = next(batches)
    while coming is not None:
        batch, coming = coming, next(batches, None)
        yield batch


def looked_at(rank: int, loader: Any, other: Any) -> Iterator[Any]:
    next(iter(loader))
    yield from loader


SEVERAL, OTHER = "several batches came since the backward before", "the batch has another number"
UNKNOWN = {
    SEVERAL: [
        ahead,
        looked_at,
        lambda rank, loader, other: (batch for batch, _ in zip(loader, other, strict=True)),
        lambda rank, loader, other: (batch for number, batch in enumerate(loader) if number != 1),
        lambda rank, loader, other: (batch for number, batch in enumerate(loader) if number != rank),
    ],
    OTHER: [lambda rank, loader, other: loader],
}


@pytest.mark.filterwarnings("ignore:no optimizer took a step")
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=2"])
def test_a_backward_of_which_nobody_knows_the_rows(strategy: str) -> None:
    """It is refused where it begins, unless its weight is stated; then workers must be at the same batch."""

    def program(worker: Worker, batches: Any, stated: bool, options: Any) -> None:
        session = Session(worker)
        model, rule, *loaders = prepared(
            worker, strategy, *(loader_of(32, 8, **options) for _ in "ab"), session=session
        )
        for batch in batches(worker.rank, *loaders):
            if stated:
                session.state_weight(4.0)
            plain.cross_entropy(model, batch).backward()
            rule.step()

    for message, loops in UNKNOWN.items():
        options = {"collate_fn": lambda items: default_collate(items[1:])} if message == OTHER else {}
        for batches in loops:
            with pytest.raises(Unsupported, match=message):
                together(2, partial(program, batches=batches, stated=False, options=options))
            if batches is not loops[-1] or message == OTHER:
                together(2, partial(program, batches=batches, stated=True, options=options))
    with pytest.raises(Unsupported, match="the workers are at different batches"):
        together(2, partial(program, batches=UNKNOWN[SEVERAL][-1], stated=True, options={}))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_loaders_that_cannot_be_shared_out() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    for size, wrong, message in (
        (1, DataLoader(range(8), sampler=sampler), "DistributedSampler"),
        (1, iter(loader_of()), "can be read only once"),
        (1, 3, "a loader must be a DataLoader"),
        (1, torch.zeros(3), "a loader must be a DataLoader"),
        (4, loader_of(batch_size=3), "some of the 4 workers without a row"),
    ):
        with pytest.raises(BadInput, match=message):
            PreparedLoader(wrong, Session(Worker(size=size)))


def test_what_cannot_be_read_alike_is_named() -> None:
    class Endless(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from super().__iter__()

    class Unsized:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1]])

    for make, message in (
        (lambda rank: DataLoader(range(8 + 4 * rank), 4), "rank 0: rows 8, batches 2; rank 1: rows 12, batches 3"),
        (lambda rank: DataLoader(range(8), 4, sampler=Endless(range(8))), "batch sampler is 2, and it gave more"),
        (lambda rank: DataLoader(range(8), batch_sampler=Unsized()), "no len"),
        (lambda rank: [torch.zeros(0, 2)], "an empty batch"),
    ):
        with pytest.raises(BadInput, match=message):
            together(2, lambda worker: shares(worker, make(worker.rank)))  # noqa: B023
