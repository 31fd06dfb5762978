"""The public names of the user's own loop, in a process that no engine started."""

import pickle
from collections.abc import Iterator
from dataclasses import replace

import cloudpickle
import pytest
import torch

import manyhands as mh
import plain
from manyhands.engines.torchrun.launchers import LOCAL_RANK, MEETING, RANK, SIZE
from manyhands.errors import BadInput, UnknownName
from manyhands.own_loop import prepare
from manyhands.own_loop.prepared_loader import PreparedLoader
from manyhands.replica.replica import Replica
from manyhands.worker import Worker, set_current


@pytest.fixture(autouse=True)
def nobody_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process as it begins."""
    monkeypatch.setattr(prepare, "_outside", None)
    for name in (RANK, SIZE, LOCAL_RANK, *MEETING, "MANYHANDS_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    yield
    set_current(None)


def pair() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = plain.mlp()
    return model, plain.OPTIMIZERS["sgd"](model)


def test_a_process_alone_and_one_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (mh.worker().rank, mh.worker().size, mh.is_first()) == (0, 1, True)
    assert mh.worker() is mh.worker()
    monkeypatch.setattr(prepare, "_outside", None)
    with monkeypatch.context() as patch:
        patch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        patch.setenv("OMPI_COMM_WORLD_RANK", "1")
        with pytest.raises(BadInput, match="start with mpirun"):  # it does not know where the others are
            mh.worker()
    monkeypatch.setenv("RANK", "1")  # half of torchrun's variables are none
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert mh.worker().size == 1
    set_current(worker := Worker(rank=1, size=1))  # an engine's
    assert mh.worker() is worker
    assert not mh.is_first()


def test_prepare_gives_back_the_users_own() -> None:
    model, optimizer = pair()
    loader = torch.utils.data.DataLoader(torch.arange(4))
    batches = [1, 2]
    whole = mh.prepare(model, optimizer, loader, batches)
    assert all(one is given for one, given in zip(whole, (model, optimizer, loader, batches), strict=True))
    assert type(loader) is torch.utils.data.DataLoader
    got, rule, first, second = mh.prepare(model, optimizer, loader, batches, batches="slices")
    assert got is model
    assert rule is optimizer
    assert first is loader
    assert list(first) == list(first.plain) == [torch.tensor([i]) for i in range(4)]
    assert isinstance(second, PreparedLoader)
    assert list(second) == batches
    assert mh.prepare(model, optimizer) == (model, optimizer)
    assert mh.prepare(model, optimizer, first, batches="slices")[2] is first


def test_the_strategy_is_the_argument_else_the_variable_else_allreduce(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**options: str) -> str:
        mh.prepare(*pair(), **options, batches="slices")
        newest = max(prepare.session().pairs, key=lambda pair: pair.number)
        return newest.strategy.name

    assert chosen() == "allreduce"
    monkeypatch.setenv("MANYHANDS_STRATEGY", "local-sgd:period=3")
    assert chosen() == "local-sgd"
    assert chosen(strategy="solo") == "solo"
    with pytest.raises(UnknownName, match="ddp"):
        chosen(strategy="ddp")


def test_weight_is_the_sessions() -> None:
    model, optimizer = mh.prepare(*pair(), batches="slices")
    before = plain.flat(model).clone()
    mh.weight(torch.tensor(0))
    plain.cross_entropy(model, plain.rows(4)).backward()
    optimizer.step()
    assert torch.equal(plain.flat(model), before)
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(BadInput, match="finite"):
            mh.weight(wrong)
    with pytest.raises(BadInput, match="\"sum\" for a loss that is a sum over rows; not 'mean'"):
        mh.weight("mean")  # type: ignore[arg-type]


def test_before_each_gradient_a_strategy_may_act() -> None:
    """In a loop without a loader as a step ends; the first time with the first step."""
    calls = []

    class LooksAhead(mh.AllReduce):
        name = "looks-ahead"
        needs = replace(mh.AllReduce.needs, before_gradient=True)

        def before_backward(self, replica: Replica, worker: object, state: object) -> None:
            calls.append(replica.step)

    model, rule = mh.prepare(*pair(), strategy=LooksAhead())
    for _ in range(3):
        plain.cross_entropy(model, plain.rows(4)).backward()
        rule.step()
    assert calls == [0, 1, 2, 3]
    with pytest.raises(BadInput, match=r"Hidden overrides before_backward.* needs = Needs\(before_gradient=True\)"):
        type("Hidden", (mh.AllReduce,), {"before_backward": LooksAhead.before_backward})


def test_alone_what_a_strategy_needs_is_in_this_process() -> None:
    """Also when a notebook's cell runs again."""
    for strategy in ("downpour", "downpour", "hogwild", "quorum", "easgd"):
        model, rule = mh.prepare(*pair(), strategy=strategy)
        before = plain.flat(model).clone()
        plain.cross_entropy(model, plain.rows(4)).backward()
        rule.step()
        assert not torch.equal(plain.flat(model), before), strategy


def test_a_function_that_refers_to_the_package_travels() -> None:
    """A notebook's cell: cloudpickle takes functions of `__main__`, and the modules they use, by name."""
    assert pickle.loads(pickle.dumps(mh)) is mh
    namespace = {"mh": mh, "__name__": "__main__"}
    exec("def function(): return mh.is_first()", namespace)
    assert pickle.loads(cloudpickle.dumps(namespace["function"]))() is True
