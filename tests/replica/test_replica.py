"""The replica against a plain PyTorch loop, alone and together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import F64, Hand, hands, quadratic
from torch import Tensor, nn
from torch.nn import functional as F

import plain
from manyhands.comm.solo import SoloGroup
from manyhands.data.sharding import slice_of
from manyhands.errors import BadInput, ManyhandsError, Unsupported
from manyhands.replica.replica import Replica
from manyhands.strategies import strategy_of
from manyhands.testing.threads import together
from manyhands.worker import Worker


def train_alone(replica: Replica, strategy_spec: str, batches: Any) -> None:
    strategy, worker = strategy_of(strategy_spec), Worker()
    state = plain.started(strategy, replica, worker)
    for tick, batch in enumerate(batches):
        replica.begin_tick()
        replica.tick = tick
        replica.backward(batch)
        strategy.exchange(replica, worker, state)
    strategy.finish(replica, worker, state)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state.get(p, {}) for p in optimizer.param_groups[0]["params"]]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce:overlap=true", "local-sgd:period=3"])
def test_one_worker_is_a_plain_loop_bit_for_bit(strategy: str) -> None:
    """CASE 1: tied and frozen weights, parameters unused on some steps, optimizer state included."""
    cases = [(torch.float64, name) for name in plain.OPTIMIZERS] + [(torch.float32, "adamw")]
    for dtype, name in cases:
        data, optimizer = plain.rows(30, dtype), plain.OPTIMIZERS[name]
        make = lambda dtype=dtype: plain.Branches().to(dtype)  # noqa: E731
        expected, expected_optimizer = plain.plain_loop(make, optimizer, data, batch_size=8, epochs=2)
        torch.manual_seed(0)
        replica = Replica.of(make(), optimizer, group=SoloGroup(), loss=plain.cross_entropy)
        train_alone(replica, strategy, plain.batches(data, 8, 0, 2))
        assert torch.equal(plain.flat(replica.model), plain.flat(expected)), (dtype, name)
        theirs, ours = optimizer_tensors(expected_optimizer), optimizer_tensors(replica.optimizer)
        assert len(theirs) == len(ours)
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), (dtype, name)


def run_together(
    size: int,
    batch_size: int,
    n: int,
    optimizer: str,
    strategy_spec: str = "allreduce",
    loss: Callable[..., Any] = plain.cross_entropy,
    make: Callable[[], nn.Module] = plain.mlp,
    epochs: int = 3,
) -> list[torch.Tensor]:
    data = plain.rows(n)
    models = []
    for _ in range(size):
        torch.manual_seed(0)
        models.append(make())

    def program(worker: Worker) -> torch.Tensor:
        strategy = strategy_of(strategy_spec)
        replica = Replica.of(models[worker.rank], plain.OPTIMIZERS[optimizer], group=worker.group, loss=loss)
        state = plain.started(strategy, replica, worker)
        for tick, (x, y) in enumerate(plain.batches(data, batch_size, 0, epochs)):
            start, stop = slice_of(len(x), worker.rank, size)
            replica.begin_tick()
            replica.tick = tick
            replica.idle = start == stop
            replica.backward((x[start:stop], y[start:stop]) if stop > start else None)
            strategy.exchange(replica, worker, state)
        strategy.finish(replica, worker, state)
        return replica.layout.unpadded(strategy.consensus(replica, worker, state).joined())

    return together(size, program)


def test_four_workers_equal_one() -> None:
    """CASE 2: also 39 rows on 4 workers, and a last batch of 3 rows, where one worker has none."""
    for n, batch_size, name, strategy in (
        (64, 32, "momentum", "allreduce"),
        (35, 32, "adamw", "allreduce:overlap=true"),
        *((39, 12, name, "allreduce") for name in plain.OPTIMIZERS),
    ):
        optimizer = plain.OPTIMIZERS[name]
        expected, _ = plain.plain_loop(plain.mlp, optimizer, plain.rows(n), batch_size=batch_size, epochs=2)
        parts = run_together(4, batch_size, n, name, strategy, epochs=2)
        assert all(torch.equal(part, parts[0]) for part in parts), (n, name)
        assert (parts[0] - plain.flat(expected)).abs().max() < 1e-10, (n, name)


def test_four_workers_equal_one_with_a_class_weighted_loss() -> None:
    """CASE 2: the mean is weighted by what the loss counts, not by rows."""
    options: dict[str, Any] = {"batch_size": 12, "epochs": 3, "loss": plain.class_weighted}
    expected, _ = plain.plain_loop(plain.mlp, plain.OPTIMIZERS["sgd"], plain.rows(39), **options)
    for loss, equal in ((plain.class_weighted, True), (lambda m, b: plain.class_weighted(m, b)[0], False)):
        parts = run_together(4, 12, 39, "sgd", loss=loss)
        assert bool((parts[0] - plain.flat(expected)).abs().max() < 1e-12) is equal


def test_unused_parameters_together_are_as_alone() -> None:
    """CASE 1 and 2: a branch used on some workers only; what any worker touched moves everywhere, as in one process."""
    parts = run_together(3, 12, 24, "adamw", make=lambda: plain.Branches().double())
    assert all(torch.equal(part, parts[0]) for part in parts)


def test_averaging_after_one_step_is_a_large_batch_step_for_sgd_only() -> None:
    """CASE 3; uneven slices (10 rows on 4 workers), so the average must be weighted."""
    for name, same in (("sgd", True), ("adamw", False)):
        expected, _ = plain.plain_loop(plain.mlp, plain.OPTIMIZERS[name], plain.rows(10), batch_size=10, epochs=1)
        parts = run_together(4, 10, 10, name, "local-sgd:period=1", epochs=1)
        assert bool((parts[0] - plain.flat(expected)).abs().max() < 1e-14) is same, name


def test_local_sgd_options_for_the_optimizer_state_differ() -> None:
    """CASE 20: no option is silently another; all end equal on all ranks. Warmup is all-reduce."""
    ends = []
    for state in ("averaged", "kept", "reset"):
        parts = run_together(3, 12, 39, "momentum", f"local-sgd:period=2,optimizer_state={state}")
        assert all(torch.equal(part, parts[0]) for part in parts), state
        ends.append(parts[0])
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])
    assert torch.equal(run_together(3, 12, 39, "adamw", "local-sgd:warmup=100")[0], run_together(3, 12, 39, "adamw")[0])


def test_local_sgd_on_a_shared_hessian_follows_large_batch_sgd() -> None:
    """CASE 4: quadratics with one A and different b; the workers' mean is large-batch SGD at any period."""
    a = [1.0, 2.0, 5.0]
    b = torch.randn(3, 3, generator=torch.Generator().manual_seed(3), dtype=F64)

    def program(hand: Hand) -> Tensor:
        for _ in range(20):
            hand.tick()
        return hand.x

    w = torch.ones(3, dtype=F64)
    for _ in range(20):
        w = w - 0.1 * torch.tensor(a, dtype=F64) * (w - b.mean(0))
    ends = hands("local-sgd:period=5", [quadratic(a, row.tolist()) for row in b], program, start=[1.0] * 3)
    assert (ends[0] - w).abs().max() < 4e-15


def test_micro_batches_make_the_gradient_of_the_whole_batch() -> None:
    for loss in (plain.cross_entropy, plain.class_weighted):
        gradients = []
        for micro in (None, 4, 1):
            torch.manual_seed(0)
            replica = alone(plain.mlp(), loss, micro_batch_size=micro)
            value = replica.backward(plain.rows(10))
            gradients.append((replica.gradients.parts[0].clone(), value, replica.weight))
        for gradient, value, weight in gradients[1:]:
            assert (gradient - gradients[0][0]).abs().max() < 1e-14
            assert value == pytest.approx(gradients[0][1], abs=1e-14)
            assert weight == pytest.approx(gradients[0][2])


def test_ready_slices_cover_the_gradient_in_one_order_and_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.replica.executor.BUCKET_BYTES", 200)
    for micro in (None, 3):
        torch.manual_seed(0)
        replica = alone(plain.mlp(), micro_batch_size=micro)
        seen: list[tuple[int, torch.Tensor]] = []
        replica.on_ready(lambda part, seen=seen: seen.append((part.storage_offset(), part.clone())))  # type: ignore[misc]
        replica.backward(plain.rows(10))
        assert len(seen) > 1
        assert torch.equal(
            torch.cat([part for _, part in sorted(seen, key=lambda s: s[0])]), replica.gradients.parts[0]
        )
        order = [offset for offset, _ in seen]
        seen.clear()
        replica.begin_tick()
        replica.backward(None)
        assert order == [offset for offset, _ in seen]
        assert not replica.gradients.parts[0].any()


def test_slices_of_a_backward_that_was_cut_off_are_not_handed_out_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost peer ends a backward; the step is repeated by fewer, in pieces."""
    monkeypatch.setattr("manyhands.replica.executor.BUCKET_BYTES", 200)
    gradients, seen, lost = [], list[torch.Tensor](), [False]

    def take(part: torch.Tensor) -> None:
        if lost[0]:
            raise RuntimeError("a peer is gone")
        seen.append(part.clone())

    for cut_off in (False, True):
        torch.manual_seed(0)
        replica = alone(plain.mlp())
        replica.on_ready(take)
        lost[0] = cut_off
        if cut_off:
            with pytest.raises(RuntimeError):
                replica.backward(plain.rows(10))
        lost[0] = False
        replica.executor.limit_rows(3)
        replica.begin_tick()
        seen.clear()
        replica.backward(plain.rows(10))
        gradients.append(torch.cat(seen))
    assert torch.equal(*gradients)


def alone(model: nn.Module, loss: Any = plain.cross_entropy, **options: Any) -> Replica:
    return Replica.of(model, plain.OPTIMIZERS["sgd"], group=SoloGroup(), loss=loss, **options)


def test_what_counts_nothing_changes_nothing() -> None:
    """CASE 27: a tick without rows does not call the model; every token masked: the mean of nothing, NaN, must not enter."""
    for loss, batch in (
        (lambda m, b: pytest.fail("called"), None),
        (lambda m, b: (plain.cross_entropy(m, b) * float("nan"), 0.0), plain.rows(4)),
    ):
        replica = alone(plain.mlp(), loss)
        before = replica.parameters.clone()
        train_alone(replica, "allreduce", [batch])
        assert replica.weight == 0.0
        assert replica.parameters.equal(before)


def test_a_gradient_that_is_not_finite_raises_or_is_skipped() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain.cross_entropy(model, batch) * float("inf")

    with pytest.raises(ManyhandsError, match=r"not finite in .*0\.weight"):
        train_alone(alone(plain.mlp(), loss), "solo", [plain.rows(4)])
    replica = alone(plain.mlp(), loss, nonfinite="skip")
    before = replica.parameters.clone()
    train_alone(replica, "solo", [plain.rows(4)])
    assert replica.parameters.equal(before)
    assert replica.step == 0
    replica = alone(nn.Linear(4, 1, bias=False), lambda m, b: (m.weight * 3e38).sum())  # finite, but not its sum
    train_alone(replica, "solo", [torch.zeros(2, 4)])
    assert replica.step == 1


def test_an_own_gradient_is_computed_again_and_given_to_nobody() -> None:
    """In the place of a mean that is not finite."""
    replica = alone(plain.mlp())
    slices: list[torch.Tensor] = []
    replica.on_ready(slices.append)
    replica.begin_tick()
    replica.backward(plain.rows(4))
    own, handed_out = replica.gradients.clone(), len(slices)
    replica.gradients.mul_(float("nan"))
    assert replica.computes_finite(plain.rows(4))
    assert replica.gradients.equal(own)
    assert len(slices) == handed_out > 0
    assert not replica.computes_finite((plain.rows(4)[0] * float("inf"), plain.rows(4)[1]))


def test_each_dtype_has_a_shard_and_channels_last_weights_stay_so() -> None:
    """Whether it trains: tests/training/test_mixed_dtypes.py."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3).double(), nn.Linear(3, 1))
    replica = Replica.of(model, plain.OPTIMIZERS["sgd"], group=SoloGroup())
    wanted = [
        (torch.float32, ["0.weight", "0.bias", "2.weight", "2.bias"], [0, 1, 4, 5]),
        (torch.float64, ["1.weight", "1.bias"], [2, 3]),
    ]
    assert [(s.layout.dtype, s.layout.names, s.layout.numbers) for s in replica.shards] == wanted
    assert replica.layout.dtype == replica.parameters.joined().dtype == torch.float64
    for name, view in replica.named(replica.parameters.joined()).items():
        assert torch.equal(view, model.get_parameter(name).double())
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    replica = alone(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(replica.layout.unpadded(replica.parameters.joined()), plain.flat(model))


def test_models_and_losses_that_cannot_be_trained_are_refused() -> None:
    of_two_devices = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("meta"))
    for model, problem in (
        (of_two_devices, r"several devices.*cpu: 0\.weight.*meta: 1\.weight"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (nn.LazyLinear(2), "lazy"),
    ):
        with pytest.raises(BadInput, match=problem):
            alone(model)
    for loss, problem in (
        (lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), r"one number.*shape \[4\]"),
        (lambda m, b: 3.0, "one number.*not 3.0"),
        (lambda m, b: plain.cross_entropy(m, b).detach(), "does not depend"),
    ):
        with pytest.raises(BadInput, match=problem):
            alone(plain.mlp(), loss).backward(plain.rows(4))
    with pytest.raises(Unsupported, match="weight has a sparse gradient"):
        alone(nn.Embedding(5, 2, sparse=True), lambda m, b: m(b).sum()).backward(torch.tensor([1, 2]))
    replica = alone(plain.mlp())
    replica.check()
    replica.model.load_state_dict({k: v.clone() for k, v in replica.model.state_dict().items()}, assign=True)
    with pytest.raises(Unsupported, match=r"0\.weight"):  # which moved
        replica.check()


def test_bf16_mixed_trains_float32_weights() -> None:
    seen = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        seen.append(outputs.dtype)
        return F.cross_entropy(outputs.float(), batch[1])

    replica = alone(plain.mlp(torch.float32), loss, precision="bf16-mixed")
    train_alone(replica, "solo", [plain.rows(4, torch.float32)])
    assert seen == [torch.bfloat16]
    assert replica.parameters.parts[0].dtype == torch.float32
