"""Strategies in a prepared loop, beside the same on the loop of `mh.train`: workers are threads."""

from functools import partial
from typing import Any

import pytest
import torch
from own_loops import assert_all_are, loader_of, on, prepared, seeded, trained
from torch import Tensor, nn

import plain
from manyhands.data.sharding import slice_of
from manyhands.errors import BadInput, Unsupported
from manyhands.own_loop.session import Session
from manyhands.replica.replica import Replica
from manyhands.strategies import strategy_of
from manyhands.testing.threads import together
from manyhands.worker import Worker

CASES = [
    *(
        (strategy, 1)
        for strategy in ("local-sgd:period=3", "downpour:bound=0", "downpour", "agn:window=2", "easgd:period=2")
    ),
    *(("gossip", 2), ("diloco:period=4,streaming=2,overlap=1", 2), ("easgd:bound=0,period=2", 2)),
    *(
        (f"allreduce:{option}", 4)
        for option in ("overlap=true", "combine=adasum", "compress=topk:0.2", "compress=powersgd:2")
    ),
    *((strategy, 4) for strategy in ("local-sgd:period=3", "update-sharing:bound=0", "easgd:via=group,period=2")),
    *(("quorum", 4), ("downpour:bound=0,push_every=2,pull_every=3", 4), ("downpour:bound=0,rule=adagrad", 4)),
    *(("agn:bound=0,window=2", 4), ("distance:bound=0,window=2", 4), ("diloco:via=server,bound=0,period=2", 4)),
]
"""In step, and one worker also at its own pace."""


def train_with_loss(worker: Worker, strategy: str) -> Tensor:
    """The answer after the loss was computed where `mh.train` computes it."""
    chosen, server = strategy_of(strategy), worker.server
    chosen.check_workers(worker.size)
    replica = Replica.of(seeded(), plain.OPTIMIZERS["adamw"], group=worker.group, loss=plain.cross_entropy)
    state = plain.started(chosen, replica, worker)
    for _ in range(2):
        if server is not None:
            server.activate()
            worker.group.barrier()
        for x, y in loader_of():
            start, stop = slice_of(len(x), worker.rank, worker.size)
            replica.begin_tick()
            chosen.before_backward(replica, worker, state)
            replica.backward((x[start:stop], y[start:stop]) if start < stop else None)
            chosen.exchange(replica, worker, state)
            if server is not None:
                worker.tick(0)
            replica.tick += 1
        chosen.finish(replica, worker, state)
        if server is not None:
            server.deactivate()
        answer = chosen.consensus(replica, worker, state)
    return torch.cat([view.reshape(-1) for view in replica.named(answer).values()]).clone()


def train_prepared_with(worker: Worker, strategy: str) -> Tensor:
    return plain.flat(trained(worker, "adamw", strategy=strategy, epochs=2)[0])


@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_a_prepared_loop_is_mh_train(strategy: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """39 rows in batches of 12, the last of 3: one worker of four has none of it."""
    monkeypatch.setattr(Session, "begin", lambda session: None)  # threads have one random state, which none seeds alone
    monkeypatch.setattr(torch, "initial_seed", lambda: 0)  # else that of a model which another thread builds
    expected = on(size, strategy, lambda worker: train_with_loss(worker, strategy))
    assert_all_are(on(size, strategy, lambda worker: train_prepared_with(worker, strategy)), expected[0])


def test_what_several_backwards_add_is_exchanged_once() -> None:
    """What a backward gave the mean is not sent again with what the next one adds, which is 0 here."""

    def program(worker: Worker, option: str, zeros: int) -> Tensor:
        model, rule, shares = prepared(worker, f"allreduce:{option}", loader_of(60))
        for batch in shares:
            rule.zero_grad()
            plain.cross_entropy(model, batch).backward()
            for _ in range(zeros):
                (plain.cross_entropy(model, batch) * 0.0).backward()
            rule.step()
        return plain.flat(model)

    for option in ("overlap=true", "combine=adasum", "compress=onebit,feedback=false"):
        once, again = (together(2, partial(program, option=option, zeros=zeros)) for zeros in (0, 2))
        assert_all_are(again, once[0], 1e-12)


def test_slices_are_sent_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not in the first steps, in which the workers' own gradients are compared."""
    monkeypatch.setattr("manyhands.replica.executor.BUCKET_BYTES", 1)

    def program(worker: Worker) -> list[int]:
        model, rule, shares = prepared(worker, "allreduce:overlap=true", loader_of(60))
        begun, start = 0, worker.group.start_mean_
        seen: list[int] = []  # by step: means begun when the first layer's gradient comes

        def counted(*arguments: Any) -> Any:
            nonlocal begun
            begun += 1
            return start(*arguments)

        worker.group.start_mean_ = counted  # type: ignore[method-assign]
        model[0].weight.register_hook(lambda _: seen.append(begun))
        for batch in shares:
            loss, begun = plain.cross_entropy(model, batch), 0
            loss.backward()
            rule.step()
            rule.zero_grad()
        return seen

    assert together(2, program) == [[0, 0, 0, 3, 3]] * 2  # the other three parameters are on their way


def test_adasum_leaves_out_what_a_worker_without_weight_computed() -> None:
    """NaN of a loss over nothing included."""
    strategy = strategy_of("allreduce:combine=adasum")

    def program(worker: Worker) -> tuple[Tensor, Tensor]:
        replica = Replica.of(seeded(), plain.OPTIMIZERS["sgd"], group=worker.group, loss=plain.cross_entropy)
        state = plain.started(strategy, replica, worker)
        replica.begin_tick()
        replica.backward(plain.rows(8, seed=worker.rank))
        own = replica.gradients.joined().clone()
        if worker.rank == 1:
            replica.weight = 0.0
            replica.gradients.fill_(float("nan"))
        strategy.mean_gradients(replica, worker, state)
        return own, replica.gradients.joined()

    (wanted, first), (_, second) = together(2, program)
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match=r"takes 1, 2, 4, 8, … workers, and workers=3"):
        together(3, lambda worker: prepared(worker, "allreduce:combine=adasum"))

    def two(worker: Worker) -> Any:
        session = Session(worker)
        return [prepared(worker, "allreduce:overlap=true", session=session) for _ in range(2)]

    with pytest.raises(Unsupported, match="with a second prepared model"):
        together(2, two)


def test_a_backward_that_failed_after_a_part_was_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.replica.executor.BUCKET_BYTES", 1)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def program(worker: Worker) -> None:
        model, rule, shares = prepared(worker, "allreduce:overlap=true", loader_of(60))
        for number, batch in enumerate(shares):
            if number == 4:
                hook = model[0].weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    plain.cross_entropy(model, batch).backward()
                hook.remove()
            nn.Module.zero_grad(model)
            plain.cross_entropy(model, batch).backward()
            rule.step()

    with pytest.raises(Unsupported, match="of which overlap=true had sent a part"):
        together(2, program)
