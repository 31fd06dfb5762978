"""A model with float32 and bfloat16 parameters: a shard for each, under every kind of exchange that a float32 model has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
import plain
from manyhands.replica.replica import Replica
from manyhands.strategies import strategy_of
from manyhands.testing.threads import together
from manyhands.worker import Worker

BF16, F32 = torch.bfloat16, torch.float32


class Mixed(nn.Module):
    """The layer in the middle has bfloat16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8).to(BF16), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)).to(self.middle.weight.dtype))).float())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.stack([x[:, 0] - x[:, 1], x[:, 2]], dim=1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def task(**fields: object) -> mh.Task:
    given = {"model": Mixed, "loss": loss, "optimizer": momentum, "train_data": rows(), "validation_data": rows()}
    return mh.Task(**{**given, "batch_size": 12, "epochs": 2, "clip_norm": 5.0, "seed": 3, **fields})  # type: ignore[arg-type]


def initial(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return model()


@pytest.mark.parametrize(
    "spec",
    [
        *("allreduce:overlap=true", "allreduce:sharded=true", "allreduce:compress=powersgd:1", "local-sgd:period=3"),
        *("gossip:weights=push-sum,period=2", "diloco:period=4,streaming=2", "diloco:via=server,compress=topk:0.3"),
        *("ensemble", "downpour:push_every=2,pull_every=3,warmup=2", "downpour:rule=adagrad,bound=0", "eamsgd"),
        *("downpour:overlap=true,compress=qsgd:4", "agn", "easgd:period=3,via=group", "quorum:compress=powersgd:1"),
        *("update-sharing", "allreduce:combine=adasum"),
    ],
)
def test_it_trains_as_a_float32_model_does(spec: str) -> None:
    """Up to the precision of bfloat16: in the validation loss of a few dozen steps."""
    workers = 4 if "adasum" in spec else 3
    options = {"strategy": spec, "workers": workers, "engine": "sim", "callbacks": []}
    mixed, wide = (
        mh.train(task(model=model), **options)  # type: ignore[arg-type]
        for model in (Mixed, lambda: Mixed().float())
    )
    before = initial(Mixed)
    start = float(loss(before, rows()).detach())
    assert abs(mixed.metrics["validation_loss"] - wide.metrics["validation_loss"]) < 0.15 * start
    for model in mixed.models:
        assert [p.dtype for p in model.parameters()] == [F32, F32, BF16, BF16, F32, F32]
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_on_worker_processes(local: mh.Local) -> None:
    run = mh.train(task(epochs=4), strategy="hogwild", workers=2, engine=local, callbacks=[])
    assert run.model.middle.weight.dtype == BF16
    assert run.metrics["validation_loss"] < 0.6 * float(loss(initial(Mixed), rows()).detach()), run.metrics


def test_one_worker_is_a_plain_loop_bit_for_bit_and_four_are_one_up_to_bfloat16() -> None:
    run = mh.train(task(clip_norm=None), workers=1, callbacks=[])
    model = initial(Mixed)
    optimizer = momentum(model)
    x, y = rows()
    for epoch in range(2):
        order = torch.as_tensor(mh.epoch_order(60, seed=3, epoch=epoch))
        for part in order.split(12):
            optimizer.zero_grad()
            loss(model, (x[part], y[part])).backward()
            optimizer.step()
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    one, four = (mh.train(task(), workers=n, engine="sim" if n > 1 else "local", callbacks=[]) for n in (1, 4))
    for ours, theirs in zip(four.model.parameters(), one.model.parameters(), strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 0.02


@pytest.mark.parametrize("spec", ["diloco:period=3", "downpour:bound=0"])
def test_resumed_is_uninterrupted(spec: str, tmp_path: Path) -> None:
    options = {"strategy": spec, "workers": 2, "engine": "sim", "callbacks": []}
    whole = mh.train(task(), **options)  # type: ignore[arg-type]
    mh.train(task(epochs=1), run_dir=tmp_path, **options)  # type: ignore[arg-type]
    again = mh.train(task(), run_dir=tmp_path, resume=True, **options)  # type: ignore[arg-type]
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Three(nn.Module):
    """Between two float32 parameters one in bfloat16: in the joined vector it comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (F32, BF16, F32))


@pytest.mark.parametrize("codec", ["topk:0.5", "int8"])
def test_a_codec_sends_the_parameter_that_has_a_gradient(codec: str) -> None:
    def moved(worker: Worker, used: str) -> dict[str, bool]:
        model, strategy = Three(), strategy_of(f"allreduce:compress={codec}")
        sgd = torch.optim.SGD([model.a, model.b, model.c], lr=0.5)
        replica = Replica.of(model, sgd, group=worker.mesh.data, loss=lambda m, batch: getattr(m, used).float().sum())
        state = plain.started(strategy, replica, worker)
        replica.begin_tick()
        replica.backward(torch.ones(2))
        strategy.exchange(replica, worker, state)
        return {name: bool((p != 1).any()) for name, p in model.named_parameters()}

    for used in "abc":
        assert (
            together(2, lambda worker, used=used: moved(worker, used)) == [{name: name == used for name in "abc"}] * 2
        )
