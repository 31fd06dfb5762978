"""One prepared pair in the user's own loop, alone and on workers that are threads."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from own_loops import COSINE, loader_of, loop, seeded, tensors_of, train_plain, train_prepared
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import plain
from manyhands.errors import BadInput, ManyhandsError, Unsupported
from manyhands.own_loop.prepare import prepare_on
from manyhands.own_loop.session import Session
from manyhands.testing.threads import together
from manyhands.worker import Worker

ALIKE = "ignore:all . workers computed the same:UserWarning"
"""Of tests whose workers train on the same rows."""
SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 5, 0.5),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, 12, cycle_momentum=False),
    "cosine": COSINE,
}


def prepared(worker: Worker, model: nn.Module, *loaders: Any, optimizer: str = "sgd", **options: Any) -> Any:
    return prepare_on(Session(worker), model, plain.OPTIMIZERS[optimizer](model), *loaders, **options)


# -- one worker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", [True, False])
def test_one_worker_is_the_plain_script_bit_for_bit(optimizer: str, schedule: str, first: bool) -> None:
    """CASE 1: with a schedule built before or after prepare, tied, frozen and sometimes unused parameters."""
    make = lambda: plain.Branches().double()  # noqa: E731
    options = {"schedule": SCHEDULES[schedule], "clip": 0.5}
    expected, rule = train_plain(optimizer, make, **options)
    got, own_rule = train_prepared(Worker(), optimizer, make, schedule_first=first, **options)
    assert torch.equal(plain.flat(got), plain.flat(expected))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(own_rule), tensors_of(rule), strict=True))


ALONE = ["solo", "allreduce", "allreduce:overlap=true", "allreduce:compress=topk:0.1", "allreduce:combine=adasum"]


@pytest.mark.parametrize("strategy", [*ALONE, "local-sgd:period=3", "local-sgd:period=end"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_strategy_alone_is_the_plain_script(strategy: str, shuffle: bool) -> None:
    """CASE 1: the random order included, and what is drawn after it."""
    torch.manual_seed(3)
    expected, rule = train_plain("adamw", loader=loader_of(shuffle=shuffle), accumulate=2)
    number = torch.rand(())
    torch.manual_seed(3)
    got, own_rule = train_prepared(
        Worker(), "adamw", loader=loader_of(shuffle=shuffle), accumulate=2, strategy=strategy
    )
    assert torch.equal(plain.flat(got), plain.flat(expected))
    assert torch.equal(torch.rand(()), number)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(own_rule), tensors_of(rule), strict=True))


@pytest.mark.filterwarnings(ALIKE)
def test_a_parameter_unused_on_a_step_does_not_move() -> None:
    """CASE 1: its `.grad` stays None where nobody used it, and AdamW leaves it alone."""

    def program(worker: Worker) -> tuple[bool, bool]:
        model, optimizer = prepared(worker, seeded(lambda: plain.Branches().double()), optimizer="adamw")
        x, y = plain.rows(8)
        for sign, zeros in ((1.0, True), (-1.0, True)):
            optimizer.zero_grad(set_to_none=zeros)
            before = model.sometimes.weight.detach().clone()
            plain.cross_entropy(model, (torch.cat([x[:1].abs() * sign, x[1:]]), y)).backward()
            optimizer.step()
        return model.sometimes.weight.grad is None, torch.equal(before, model.sometimes.weight)

    for size in (1, 2):
        assert together(size, program) == [(True, True)] * size


def test_what_only_one_worker_used_moves_on_all() -> None:
    """CASE 1: touched anywhere is touched everywhere, with the mean over all rows."""

    def program(worker: Worker) -> Tensor:
        model, optimizer = prepared(worker, seeded(lambda: plain.Branches().double()), optimizer="adamw")
        x, y = plain.rows(8)
        x[0, 0] = 1.0 if worker.rank == 0 else -1.0
        plain.cross_entropy(model, (x, y)).backward()
        assert model.sometimes.weight.grad is not None
        optimizer.step()
        return plain.flat(model)

    first, second = together(2, program)
    assert torch.equal(first, second)


# -- several workers equal one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_four_workers_equal_one(optimizer: str, accumulate: int, set_to_none: bool) -> None:
    """CASE 2: 39 rows in batches of 12 (the last of 3 rows), a cosine schedule and clipping in between."""
    options: dict[str, Any] = {
        "schedule": COSINE,
        "clip": 0.05,
        "accumulate": accumulate,
        "set_to_none": set_to_none,
        "epochs": 3,
    }
    expected, _ = train_plain(optimizer, **options)
    for got in together(4, lambda worker: plain.flat(train_prepared(worker, optimizer, **options)[0])):
        assert (got - plain.flat(expected)).abs().max() < 1e-10


def test_gradients_that_are_never_zeroed_add_up_as_in_a_plain_loop() -> None:
    """CASE 26's mirror: what the plain script leaves in `.grad` stays there."""
    expected, _ = train_plain(accumulate=10**6)
    model = seeded()
    rule = plain.OPTIMIZERS["sgd"](model)
    for batch in loader_of():
        plain.cross_entropy(model, batch).backward()
        rule.step()

    def program(worker: Worker) -> Tensor:
        model, optimizer, loader = prepared(worker, seeded(), loader_of())
        for batch in loader:
            plain.cross_entropy(model, batch).backward()
            optimizer.step()
        return plain.flat(model)

    assert not torch.equal(plain.flat(model), plain.flat(expected))
    for got in together(4, program):
        assert (got - plain.flat(model)).abs().max() < 1e-10


def test_gradients_set_by_hand_are_averaged_at_the_step() -> None:
    """torch.autograd.grad reaches no hook: step() finds gradients that had no exchange, and averages them."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Tensor:
        for batch in loader:
            gradients = torch.autograd.grad(plain.cross_entropy(model, batch), list(model.parameters()))
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
        return plain.flat(model)

    plain_model = seeded()
    expected = train(plain_model, plain.OPTIMIZERS["adamw"](plain_model), loader_of())
    for got in together(4, lambda w: train(*prepared(w, seeded(), loader_of(), optimizer="adamw"))):
        assert (got - expected).abs().max() < 1e-10


def test_a_gradient_penalty_equals_one_worker() -> None:
    """Double backward through torch.autograd.grad(create_graph=True), and a retained graph walked twice."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        both = F.cross_entropy(out, batch[1]) + slope.square().sum(1).mean()
        both.backward(retain_graph=True)
        return both

    expected, _ = train_plain("momentum", loss=loss)
    for got in together(4, lambda w: plain.flat(train_prepared(w, "momentum", loss=loss)[0])):
        assert (got - plain.flat(expected)).abs().max() < 1e-10


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_are_refused_together_and_kept_alone() -> None:
    def program(worker: Worker) -> bool:
        model, _ = prepared(worker, seeded())
        plain.cross_entropy(model, plain.rows(6)).backward(create_graph=True)
        found = all(p.grad is not None and p.grad.requires_grad for p in model.parameters())
        model.zero_grad()  # ends the cycle that such a graph is
        return found

    assert together(1, program) == [True]
    with pytest.raises(Unsupported, match="autograd.grad.*create_graph=True"):
        together(2, program)


# -- weights ---------------------------------------------------------------------------------------------------------


def weighted(worker: Worker, late: bool = False) -> Tensor:
    """A class-weighted mean, which does not divide by rows; a batch of nothing but class 0 weighs little."""
    session = Session(worker)
    model = seeded()
    model, optimizer, loader = prepare_on(session, model, plain.OPTIMIZERS["momentum"](model), loader_of())
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            mean, weight = plain.class_weighted(model, batch)
            if not late:
                session.state_weight(float(weight))
            mean.backward()
            if late:
                session.state_weight(float(weight))
            optimizer.step()
    return plain.flat(model)


def test_stated_weights_equal_one_worker() -> None:
    """CASE 2: a loss that counts class weights; a stand-in batch weighs nothing whatever is stated."""
    expected = plain_weighted()
    assert torch.equal(weighted(Worker()), expected)
    for got in together(4, weighted):
        assert (got - expected).abs().max() < 1e-10


def plain_weighted() -> Tensor:
    model = seeded()
    rule = plain.OPTIMIZERS["momentum"](model)
    for _ in range(2):
        for batch in loader_of():
            rule.zero_grad()
            plain.class_weighted(model, batch)[0].backward()
            rule.step()
    return plain.flat(model)


def test_a_weight_stated_too_late_is_refused() -> None:
    with pytest.raises(BadInput, match="after backward"):
        together(2, lambda worker: weighted(worker, late=True))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_backward_has_a_weight_and_a_scale_of_its_own(size: int) -> None:
    """Of two backwards before a step one is of a sum over rows, one of a mean; `.grad` is one process's after each."""

    def program(worker: Worker | None) -> list[Tensor]:
        session, model, loader = Session(worker or Worker()), seeded(), loader_of()
        optimizer = plain.OPTIMIZERS["momentum"](model)
        if worker is not None:
            model, optimizer, loader = prepare_on(session, model, optimizer, loader)
        found = []
        for batch in loader:
            optimizer.zero_grad()
            rows = len(batch[0])
            summed, mean = plain.cross_entropy(model, batch) * rows, plain.cross_entropy(model, batch)
            if worker is not None:
                session.state_weight("sum")
            summed.backward()
            found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone())
            if worker is not None:
                session.state_weight(rows)
            (mean * 3).backward()
            found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone())
            optimizer.step()
        return found

    expected = program(None)
    for got in together(size, program):
        for one, other in zip(got, expected, strict=True):
            assert (one - other).abs().max() < 1e-10


def test_what_was_stated_before_a_pair_was_prepared_counts_for_it() -> None:
    def program(worker: Worker) -> Tensor:
        session, model = Session(worker), seeded()
        session.state_weight("sum")
        model, optimizer = prepare_on(session, model, plain.OPTIMIZERS["momentum"](model))
        (plain.cross_entropy(model, plain.rows(4)) * 4).backward()
        optimizer.step()
        return plain.flat(model)

    model = seeded()
    optimizer = plain.OPTIMIZERS["momentum"](model)
    (plain.cross_entropy(model, plain.rows(4)) * 8).backward()  # both workers' rows
    optimizer.step()
    for got in together(2, program):
        assert (got - plain.flat(model)).abs().max() < 1e-12


def test_a_weight_must_be_a_finite_number() -> None:
    for wrong in (-1.0, float("nan"), float("inf"), float("-inf")):
        with pytest.raises(BadInput, match="finite number of at least 0"):
            Session(Worker()).state_weight(wrong)


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_of_weight_zero_changes_nothing(size: int) -> None:
    """CASE 27: NaN of zero tokens included; the gradient accumulated before it stays."""

    def program(worker: Worker) -> list[bool]:
        session, model = Session(worker), seeded()
        model, optimizer = prepare_on(session, model, plain.OPTIMIZERS["adamw"](model))
        before = plain.flat(model).clone()
        session.state_weight(0)
        (model(plain.rows(4)[0]).sum() * float("nan")).backward()
        alone = all(p.grad is None for p in model.parameters())
        optimizer.step()
        unchanged = torch.equal(plain.flat(model), before)
        plain.cross_entropy(model, plain.rows(4)).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        nothing = model(plain.rows(4)[0]).sum() * float("nan")
        session.state_weight(0)  # after forward
        nothing.backward()
        kept = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        optimizer.step()
        return [alone, unchanged, kept, not torch.equal(plain.flat(model), before)]

    assert together(size, program) == [[True] * 4] * size


# -- other strategies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["local-sgd:period=3", "local-sgd:period=end", "local-sgd:period=3,warmup=2"])
def test_local_sgd_ends_a_pass_with_all_workers_equal(strategy: str) -> None:
    """CASE 4's frame: the last, shorter window is closed when the loader is exhausted; the stand-in counts for nothing."""

    def program(worker: Worker) -> Tensor:
        model, rule = train_prepared(worker, "adamw", strategy=strategy, schedule=COSINE, clip=0.5)
        assert all(torch.equal(*worker.group.all_gather(state.reshape(-1))[:2]) for state in tensors_of(rule))
        return plain.flat(model)

    first, *others = together(4, program)
    assert all(torch.equal(first, other) for other in others)
    assert not torch.allclose(first, plain.flat(train_plain("adamw", schedule=COSINE, clip=0.5)[0]), atol=1e-6)


def test_averaging_after_every_sgd_step_is_one_large_batch() -> None:
    """CASE 3, through prepare, with uneven slices and an accumulation of two."""
    expected, _ = train_plain(loader=loader_of(48), accumulate=2)
    run = lambda w: plain.flat(train_prepared(w, loader=loader_of(48), accumulate=2, strategy="local-sgd:period=1")[0])  # noqa: E731
    for got in together(4, run):
        assert (got - plain.flat(expected)).abs().max() < 1e-10


def test_an_ensemble_stays_several_models() -> None:
    models = together(2, lambda w: plain.flat(train_prepared(w, strategy="ensemble")[0]))
    assert not torch.equal(*models)


def test_workers_start_equal() -> None:
    """CASE 25: rank 0's parameters and buffers."""

    def program(worker: Worker) -> Tensor:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            for tensor in [*model.parameters(), model[1].running_mean]:
                tensor.fill_(worker.rank + 1)
        prepared(worker, model)
        return torch.cat([plain.flat(model), model[1].running_mean])

    first, second = together(2, program)
    assert torch.equal(first, second)
    assert first.eq(1).all()


# -- several pairs ---------------------------------------------------------------------------------------------------


def gan(worker: Worker | None) -> Tensor:
    """Two models that train against each other; noise comes with the data, so that it is the same for any number of workers."""
    generator, critic = seeded(lambda: nn.Linear(2, 5).double()), seeded(lambda: nn.Linear(5, 1).double())
    rules = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (generator, critic)]
    noise = torch.randn(39, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    loader: Any = DataLoader(TensorDataset(plain.rows(39)[0], noise), batch_size=12)
    if worker is not None:
        session = Session(worker)
        generator, rules[0] = prepare_on(session, generator, rules[0])
        critic, rules[1], loader = prepare_on(session, critic, rules[1], loader)
    for _ in range(2):
        for real, z in loader:
            fake = generator(z)
            rules[1].zero_grad()
            F.softplus(-critic(real)).mean().backward()
            F.softplus(critic(fake.detach())).mean().backward()
            rules[1].step()
            rules[0].zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            rules[0].step()
    return torch.cat([plain.flat(generator), plain.flat(critic)])


@pytest.mark.slow
def test_a_gan_on_four_workers_equals_one() -> None:
    """CASE 2 with two pairs: one backward reaches both, and each exchanges its own."""
    expected = gan(None)
    assert torch.equal(gan(Worker()), expected)
    for got in together(4, gan):
        assert (got - expected).abs().max() < 1e-10


def test_preparing_again_replaces_and_does_not_stack() -> None:
    """A notebook's cell run twice: the same objects, one exchange a backward."""

    def program(worker: Worker) -> Tensor:
        session, model = Session(worker), seeded()
        rule = plain.OPTIMIZERS["momentum"](model)
        schedule = COSINE(rule)
        model, rule, loader = prepare_on(session, model, rule, loader_of())
        model, rule, loader = prepare_on(session, model, rule, loader)
        loop(model, rule, loader, schedule=schedule)
        (pair,) = session.pairs
        assert pair.replica.rounds == (12 if worker.size > 1 else 0)
        return plain.flat(model)

    expected = plain.flat(train_plain("momentum", schedule=COSINE)[0])
    assert torch.equal(program(Worker()), expected)
    for got in together(2, program):
        assert (got - expected).abs().max() < 1e-10


def test_a_pass_that_a_break_left_forgets_a_model_that_was_prepared_again() -> None:
    """The old pair's memory is the model's no more: finishing its round would average what nobody trains."""

    def program(worker: Worker) -> list[int]:
        session, model = Session(worker), seeded()
        model, optimizer, loader = prepare_on(session, model, plain.OPTIMIZERS["sgd"](model), loader_of())
        for batch in loader:
            plain.cross_entropy(model, batch).backward()
            optimizer.step()
            break
        (open_pass,) = session.iterations
        remembered = [len(open_pass.used)]
        prepare_on(session, model, plain.OPTIMIZERS["sgd"](model))
        return [*remembered, len(open_pass.used)]

    assert together(2, program) == [[1, 0]] * 2


def test_a_second_optimizer_for_the_same_model_takes_over_and_the_first_says_so() -> None:
    model = seeded()
    session, first, second = Session(Worker()), *(plain.OPTIMIZERS["sgd"](model) for _ in range(2))
    prepare_on(session, model, first)
    prepare_on(session, model, second)
    second.step()
    with pytest.raises(Unsupported, match="one optimizer for each model"):
        first.step()


def test_nothing_outlives_what_the_user_drops() -> None:
    session, model = Session(Worker()), seeded()
    rule = plain.OPTIMIZERS["sgd"](model)
    prepare_on(session, model, rule)
    session.state_weight(1)  # hooks at the parameters, which the user keeps
    gone = weakref.ref(rule)
    del rule
    gc.collect()
    assert gone() is None
    assert not session.pairs


def test_copies_are_plain() -> None:
    """A deep copy (an averaged model, say) has memory and a loop of its own."""
    model, optimizer = prepared(Worker(), seeded())
    twin = copy.deepcopy(model)
    plain.cross_entropy(model, plain.rows(4)).backward()
    optimizer.step()
    assert not torch.equal(plain.flat(model), plain.flat(twin))
    assert "step" not in vars(copy.deepcopy(optimizer))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_step_with_a_closure_is_refused() -> None:
    def program(worker: Worker) -> Any:
        _, optimizer = prepared(worker, seeded())
        return optimizer.step(lambda: torch.zeros(()))

    with pytest.raises(Unsupported, match="closure"):
        together(2, program)
    assert program(Worker()) == 0


def test_step_inside_backward_is_refused() -> None:
    model, optimizer = prepared(Worker(), seeded())
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(Unsupported, match="inside backward"):
        plain.cross_entropy(model, plain.rows(4)).backward()


@pytest.mark.filterwarnings(ALIKE)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_grad_scaler(fused: bool, unscale: bool) -> None:
    """Where gradients are averaged all workers leave the same step out; elsewhere it is refused."""

    def program(worker: Worker, strategy: str = "allreduce") -> Tensor:
        model = seeded(lambda: plain.mlp(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        if worker.size:
            model, optimizer = prepare_on(Session(worker), model, optimizer, strategy=strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            overflows = step == 1 and worker.rank == max(0, worker.size - 1)
            loss = plain.cross_entropy(model, plain.rows(4, torch.float32)) * (float("inf") if overflows else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        return plain.flat(model)

    alone = program(Worker(size=0))
    assert torch.equal(program(Worker()), alone)
    one, other = together(2, program)
    assert torch.equal(one, other)
    assert (one - alone).abs().max() < 1e-6
    with pytest.raises(Unsupported, match="GradScaler.*bfloat16"):
        together(2, lambda worker: program(worker, "local-sgd"))


@pytest.mark.filterwarnings(ALIKE)
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd"])
def test_a_gradient_that_is_not_finite_raises_together(strategy: str) -> None:
    def program(worker: Worker) -> None:
        model, optimizer = prepared(worker, seeded(), strategy=strategy)
        (model(plain.rows(4)[0]).sum() * float("nan")).backward()
        optimizer.step()

    with pytest.raises(ManyhandsError, match="step 0 is not finite in 0.weight.*skip step"):
        together(2, program)
    program(Worker())


def test_a_module_that_is_wrapped_afterwards_is_refused() -> None:
    """Its parameters have other names now."""

    def program(worker: Worker) -> None:
        model, optimizer = prepared(worker, seeded(lambda: plain.Branches().double()))
        model.extra = nn.Linear(3, 3).double()
        optimizer.add_param_group({"params": list(model.extra.parameters())})
        model.last = nn.Sequential(model.last, model.extra)
        plain.cross_entropy(model, plain.rows(4)).backward()
        optimizer.step()

    with pytest.raises(Unsupported, match="before training begins"):
        together(2, program)


def test_a_module_that_is_added_afterwards_trains_too() -> None:
    """Two workers hold one model, which is one worker's."""
    added = nn.Linear(3, 3).double()  # here: the workers are threads, which share torch's generator

    def program(worker: Worker) -> Tensor:
        model, optimizer = prepared(worker, seeded())
        model.extra = copy.deepcopy(added)
        optimizer.add_param_group({"params": list(model.extra.parameters())})
        inputs, targets = plain.rows(8)
        own = slice(8 // worker.size * worker.rank, 8 // worker.size * (worker.rank + 1))
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.extra(model(inputs[own])), targets[own]).backward()
            optimizer.step()
        return plain.flat(model)

    (one,), both = together(1, program), together(2, program)
    assert torch.equal(*both)
    torch.testing.assert_close(both[0], one, atol=1e-10, rtol=0)


def test_parameters_that_moved_are_named() -> None:
    def program(worker: Worker) -> None:
        model, optimizer = prepared(worker, seeded())
        model.float()
        optimizer.step()

    with pytest.raises(Unsupported, match="moved or replaced after training began: 0.weight"):
        together(2, program)


def test_workers_must_prepare_the_same() -> None:
    """CASE 25: named on every rank, before anything is exchanged."""
    with pytest.raises(BadInput, match="rank 0: Linear of 4 parameters.*rank 1: Linear of 6"):
        together(2, lambda worker: prepared(worker, nn.Linear(3 + 2 * worker.rank, 1)))


def test_what_prepare_does_not_take() -> None:
    model, session = seeded(), Session(Worker())
    rule = plain.OPTIMIZERS["sgd"](model)
    other = seeded()
    for arguments, message in (
        ((lambda: model, rule), "model must be an nn.Module"),
        ((model, lambda m: rule), "optimizer must be a torch.optim.Optimizer"),
        ((nn.DataParallel(model), rule), "leave the wrapper out"),
        ((other, rule), "4 trainable parameters not of the model"),
    ):
        with pytest.raises(BadInput, match=message):
            prepare_on(session, *arguments)
    assert "step" not in vars(rule)


def test_a_backward_that_failed_leaves_no_trace() -> None:
    """An error inside backward (memory, a hook of the user's) must not stop the next exchange."""

    def program(worker: Worker) -> Tensor:
        model, optimizer = prepared(worker, seeded())
        out = model(plain.rows(4)[0])
        out.register_hook(lambda g: g)
        hook = model[0].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        hook.remove()
        optimizer.zero_grad()
        plain.cross_entropy(model, plain.rows(4, seed=worker.rank)).backward()
        optimizer.step()
        return plain.flat(model)

    first, second = together(2, program)
    assert torch.equal(first, second)


def fail(_: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd"])
def test_a_rate_of_a_workers_own_is_named_where_all_steps_are_to_be_equal(strategy: str) -> None:
    """Another copy of the script on one host; where workers step alone for a while it may be meant so."""

    def program(worker: Worker) -> str:
        model = plain.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + worker.rank))
        try:
            prepare_on(Session(worker), model, optimizer, strategy=strategy)
        except BadInput as error:
            return str(error)
        return ""

    for output in together(2, program):
        assert ("the optimizer's lr is 0.2, and on worker 0" in output) == (strategy == "allreduce")
