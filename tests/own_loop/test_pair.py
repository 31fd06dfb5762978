"""One prepared pair in the user's own loop, alone and on workers that are threads."""

import copy
import gc
import threading
import weakref
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from own_loops import COSINE, assert_all_are, begun, loader_of, loop, seeded, tensors_of, trained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import plain
from manyhands.errors import BadInput, ManyhandsError, Unsupported
from manyhands.own_loop import backward_watch
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.session import Session
from manyhands.testing.threads import together
from manyhands.worker import Worker

ALIKE = "ignore:all . workers computed the same:UserWarning"
"""Of tests whose workers train on the same rows."""
SGD = plain.OPTIMIZERS["sgd"]


def prepared(worker: Worker, model: nn.Module, *loaders: Any, optimizer: str = "sgd", **options: Any) -> Any:
    return prepare_slices(Session(worker), model, plain.OPTIMIZERS[optimizer](model), *loaders, **options)


def branches() -> nn.Module:
    """With tied, frozen and sometimes unused parameters."""
    return plain.Branches().double()


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_a_pair_may_be_collected_while_another_one_begins() -> None:
    """Python's garbage collector runs anywhere, also where a watcher of backward passes is being added."""

    class Watcher:
        def __init__(self) -> None:
            self.worker, self.itself = Worker(), self

    def begins() -> None:
        with backward_watch._changing:
            gc.collect()

    backward_watch.watch(Watcher())  # type: ignore[arg-type]
    thread = threading.Thread(target=begins, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


# -- one worker ------------------------------------------------------------------------------------------------------


ALONE: list[tuple[str, str, Any, bool]] = [  # strategy, optimizer, schedule, which is built before `prepare`
    ("allreduce", "momentum", lambda optimizer: StepLR(optimizer, 5, 0.5), True),
    ("local-sgd:period=3", "adamw", lambda optimizer: OneCycleLR(optimizer, 0.1, 12, cycle_momentum=False), False),
]


def test_one_worker_is_the_plain_script_bit_for_bit() -> None:
    """CASE 1"""
    for strategy, optimizer, schedule, early in ALONE:
        how: dict[str, Any] = {"clip": 0.5, "accumulate": 1 + early, "epochs": 2}
        expected, rule = trained(None, optimizer, branches, schedule=schedule, **how)
        model = seeded(branches)
        own_rule = plain.OPTIMIZERS[optimizer](model)
        first = schedule(own_rule) if early else None
        model, own_rule, loader = prepare_slices(Session(Worker()), model, own_rule, loader_of(), strategy=strategy)
        loop(model, own_rule, loader, schedule=first or schedule(own_rule), **how)
        assert torch.equal(plain.flat(model), plain.flat(expected)), strategy
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(own_rule), tensors_of(rule), strict=True)), strategy


@pytest.mark.filterwarnings(ALIKE)
def test_a_parameter_unused_on_a_step_does_not_move() -> None:
    """CASE 1: its `.grad` stays None where nobody used it, and AdamW leaves it alone."""

    def program(worker: Worker) -> tuple[bool, bool]:
        model, optimizer = prepared(worker, seeded(branches), optimizer="adamw")
        x, y = plain.rows(8)
        for sign in (1.0, -1.0):
            optimizer.zero_grad()
            before = model.sometimes.weight.detach().clone()
            plain.cross_entropy(model, (torch.cat([x[:1].abs() * sign, x[1:]]), y)).backward()
            optimizer.step()
        return model.sometimes.weight.grad is None, torch.equal(before, model.sometimes.weight)

    for size in (1, 2):
        assert together(size, program) == [(True, True)] * size


def test_what_only_one_worker_used_moves_on_all() -> None:
    """CASE 1: touched anywhere is touched everywhere, with the mean over all rows."""

    def program(worker: Worker) -> Tensor:
        model, optimizer = prepared(worker, seeded(branches), optimizer="adamw")
        x, y = plain.rows(8)
        x[0, 0] = 1.0 if worker.rank == 0 else -1.0
        plain.cross_entropy(model, (x, y)).backward()
        assert model.sometimes.weight.grad is not None
        optimizer.step()
        return plain.flat(model)

    assert torch.equal(*together(2, program))


# -- several workers equal one ---------------------------------------------------------------------------------------


def test_four_workers_equal_one() -> None:
    """CASE 2: 39 rows in batches of 12 (the last of 3 rows), a cosine schedule and clipping in between."""
    for optimizer, accumulate, set_to_none in (("sgd", 1, True), ("momentum", 2, False), ("adamw", 2, True)):
        how: dict[str, Any] = {"schedule": COSINE, "clip": 0.05, "accumulate": accumulate, "set_to_none": set_to_none}
        expected, _ = trained(None, optimizer, **how)
        found = together(4, lambda worker: plain.flat(trained(worker, optimizer, **how)[0]))  # noqa: B023
        assert_all_are(found, plain.flat(expected))


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """Gradients that are never zeroed add up (CASE 26's mirror)."""
    for batch in loader:
        plain.cross_entropy(model, batch).backward()
        optimizer.step()


def set_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """torch.autograd.grad reaches no hook: step() finds gradients that had no exchange, and averages them."""
    for batch in loader:
        gradients = torch.autograd.grad(plain.cross_entropy(model, batch), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()


def penalized(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """Double backward through torch.autograd.grad(create_graph=True), and a retained graph walked twice."""
    for x, y in loader:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        both = F.cross_entropy(out, y) + slope.square().sum(1).mean()
        both.backward(retain_graph=True)
        both.backward()
        optimizer.step()


def test_gradients_made_in_other_ways_equal_one_worker() -> None:
    def program(worker: Worker | None, train: Any) -> Tensor:
        _, model, optimizer, loader = begun(worker, optimizer="adamw")
        train(model, optimizer, loader)
        return plain.flat(model)

    for train in (accumulated, set_by_hand, penalized):
        assert_all_are(together(3, partial(program, train=train)), program(None, train))


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


def test_stated_weights_equal_one_worker() -> None:
    """CASE 2: class weights, which do not divide by rows; a batch of nothing but class 0 weighs little, a stand-in nothing."""

    def weighted(worker: Worker | None, late: bool = False) -> Tensor:
        session, model, optimizer, loader = begun(worker, optimizer="momentum")
        for batch in loader:
            optimizer.zero_grad()
            mean, weight = plain.class_weighted(model, batch)
            if worker is not None and not late:
                session.state_weight(float(weight))
            mean.backward()
            if late:
                session.state_weight(float(weight))
            optimizer.step()
        return plain.flat(model)

    expected = weighted(None)
    assert torch.equal(weighted(Worker()), expected)
    assert_all_are(together(4, weighted), expected)
    with pytest.raises(BadInput, match="after backward"):
        together(2, lambda worker: weighted(worker, late=True))


def test_each_backward_has_a_weight_and_a_scale_of_its_own() -> None:
    """Of two backwards before a step one is of a sum over rows, one of a mean; `.grad` is one process's after each."""

    def program(worker: Worker | None) -> Tensor:
        session, model, optimizer, loader = begun(worker, optimizer="momentum")
        found = []
        for batch in loader:
            optimizer.zero_grad()
            rows = len(batch[0])
            summed, mean = plain.cross_entropy(model, batch) * rows, plain.cross_entropy(model, batch)
            for loss, weight in ((summed, "sum"), (mean * 3, rows)):
                if worker is not None:
                    session.state_weight(weight)
                loss.backward()
                found.append(flat_gradient(model).clone())
            optimizer.step()
        return torch.stack(found)

    for size in (1, 5):
        assert_all_are(together(size, program), program(None))


def test_a_step_of_weight_zero_changes_nothing() -> None:
    """CASE 27: NaN of zero tokens included; the gradient accumulated before it stays."""

    def program(worker: Worker) -> list[bool]:
        session, model = Session(worker), seeded()
        session.state_weight(0)  # also before the pair is prepared
        model, optimizer = prepare_slices(session, model, plain.OPTIMIZERS["adamw"](model))
        before = plain.flat(model).clone()
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

    for size in (1, 2):
        assert together(size, program) == [[True] * 4] * size


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


def test_preparing_again_replaces_and_does_not_stack() -> None:
    """A notebook's cell run twice: the same objects, one exchange a backward."""

    def program(worker: Worker) -> Tensor:
        session, model = Session(worker), seeded()
        rule = plain.OPTIMIZERS["momentum"](model)
        schedule = COSINE(rule)
        model, rule, loader = prepare_slices(session, model, rule, loader_of())
        model, rule, loader = prepare_slices(session, model, rule, loader)
        loop(model, rule, loader, schedule=schedule)
        (pair,) = session.pairs
        assert pair.replica.rounds == (12 if worker.size > 1 else 0)
        return plain.flat(model)

    expected = plain.flat(trained(None, "momentum", schedule=COSINE)[0])
    assert torch.equal(program(Worker()), expected)
    assert_all_are(together(2, program), expected)


def test_a_pass_that_a_break_left_forgets_a_model_that_was_prepared_again() -> None:
    """The old pair's memory is the model's no more: finishing its round would average what nobody trains."""

    def program(worker: Worker) -> list[int]:
        session, model, optimizer, loader = begun(worker)
        plain.cross_entropy(model, next(iter(loader))).backward()
        optimizer.step()
        (open_pass,) = session.iterations
        remembered = [len(open_pass.used)]
        prepare_slices(session, model, SGD(model))
        return [*remembered, len(open_pass.used)]

    assert together(2, program) == [[1, 0]] * 2


def test_a_second_optimizer_for_the_same_model_takes_over_and_the_first_says_so() -> None:
    model = seeded()
    session, first, second = Session(Worker()), SGD(model), SGD(model)
    prepare_slices(session, model, first)
    prepare_slices(session, model, second)
    second.step()
    with pytest.raises(Unsupported, match="one optimizer for each model"):
        first.step()


def test_nothing_outlives_what_the_user_drops() -> None:
    session, model = Session(Worker()), seeded()
    rule = SGD(model)
    prepare_slices(session, model, rule)
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


@pytest.mark.filterwarnings(ALIKE)
def test_grad_scaler() -> None:
    """Where gradients are averaged all workers leave the same step out; elsewhere it is refused."""

    def program(worker: Worker, fused: bool, strategy: str = "allreduce") -> Tensor:
        model = seeded(lambda: plain.mlp(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        if worker.size:
            model, optimizer = prepare_slices(Session(worker), model, optimizer, strategy=strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            overflows = step == 1 and worker.rank == max(0, worker.size - 1)
            loss = plain.cross_entropy(model, plain.rows(4, torch.float32)) * (float("inf") if overflows else 1.0)
            scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        return plain.flat(model)

    for fused in (True, False):
        alone = program(Worker(size=0), fused)
        assert torch.equal(program(Worker(), fused), alone)
        one, other = together(2, partial(program, fused=fused))
        assert torch.equal(one, other)
        assert_all_are([one], alone, 1e-6)
    with pytest.raises(Unsupported, match="GradScaler.*bfloat16"):
        together(2, partial(program, fused=False, strategy="local-sgd"))


# -- one optimizer over several modules ------------------------------------------------------------------------------


def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    encoder, decoder = seeded(lambda: nn.Linear(5, 4).double()), seeded(lambda: nn.Linear(4, 3).double())
    return encoder, decoder, torch.optim.AdamW(chain(encoder.parameters(), decoder.parameters()), lr=0.01)


def train_parts(encoder: nn.Module, decoder: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Tensor:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(decoder(torch.tanh(encoder(x))), y).backward()
        optimizer.step()
    return torch.cat([plain.flat(encoder), plain.flat(decoder)])


def test_an_optimizer_over_several_modules() -> None:
    """One plain loop on any number of workers; under another strategy replicas are equal after the pass."""

    def program(worker: Worker, wrap: Any, strategy: str = "allreduce") -> Tensor:
        encoder, decoder, optimizer = parts()
        modules = wrap([encoder, decoder])
        back, _, loader = prepare_slices(Session(worker), modules, optimizer, loader_of(), strategy=strategy)
        assert back is modules
        return train_parts(encoder, decoder, optimizer, loader)

    alone = train_parts(*parts(), loader_of())
    assert torch.equal(program(Worker(), list), alone)
    assert_all_are(together(3, partial(program, wrap=tuple)), alone)
    assert torch.equal(*together(2, partial(program, wrap=list, strategy="local-sgd:period=3")))


# -- modules that change, and what is refused ------------------------------------------------------------------------


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
            F.cross_entropy(model.extra(model(inputs[own])), targets[own]).backward()
            optimizer.step()
        return plain.flat(model)

    (one,), both = together(1, program), together(2, program)
    assert torch.equal(*both)
    assert_all_are(both, one)


def wrapped_afterwards(worker: Worker) -> None:
    """Its parameters have other names now."""
    model, optimizer = prepared(worker, seeded(branches))
    model.extra = nn.Linear(3, 3).double()
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    model.last = nn.Sequential(model.last, model.extra)
    plain.cross_entropy(model, plain.rows(4)).backward()
    optimizer.step()


def stepped_inside_backward(worker: Worker) -> None:
    model, optimizer = prepared(worker, seeded())
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    plain.cross_entropy(model, plain.rows(4)).backward()


def not_finite(worker: Worker, strategy: str = "allreduce") -> None:
    model, optimizer = prepared(worker, seeded(), strategy=strategy)
    (model(plain.rows(4)[0]).sum() * float("nan")).backward()
    optimizer.step()


def other_models(worker: Worker) -> None:
    """CASE 25: named on every rank, before anything is exchanged."""
    prepared(worker, nn.Linear(3 + 2 * worker.rank, 1))


@pytest.mark.filterwarnings(ALIKE)
def test_what_cannot_be_is_named() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (wrapped_afterwards, Unsupported, "before training begins"),
        (stepped_inside_backward, Unsupported, "inside backward"),
        (not_finite, ManyhandsError, "step 0 is not finite in 0.weight.*skip step"),
        (partial(not_finite, strategy="local-sgd"), ManyhandsError, "step 0 is not finite in 0.weight.*skip step"),
        (other_models, BadInput, "worker 0 has weight .1, 3. .* where worker 1 has weight .1, 5."),
    ]
    for program, error, message in cases:
        with pytest.raises(error, match=message):
            together(2, program)


def test_alone_a_gradient_that_is_not_finite_is_as_in_a_plain_script() -> None:
    for strategy in ("allreduce", "local-sgd"):
        not_finite(Worker(), strategy)


def test_what_prepare_does_not_take() -> None:
    """Arguments of other types: tests/test_mistakes.py."""
    encoder, _, optimizer = parts()
    for model, message in (
        (nn.DataParallel(encoder), "leave the wrapper out"),
        (seeded(), "4 trainable parameters not of the model"),
        (encoder, r"prepare all modules together, mh\.prepare\(\[first, second\], optimizer\)"),
        *((modules, r"must be an nn\.Module, or a list of several, not") for modules in ([], [nn.Linear(1, 1), 3], {})),
    ):
        with pytest.raises(BadInput, match=message):
            prepare_slices(Session(Worker()), model, optimizer)
    assert "step" not in vars(optimizer)


def test_a_backward_that_failed_leaves_no_trace() -> None:
    """An error inside backward (memory, a hook of the user's) must not stop the next exchange."""

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

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

    assert torch.equal(*together(2, program))


def test_a_rate_of_a_workers_own_is_named_where_all_steps_are_to_be_equal() -> None:
    """Another copy of the script on one host; where workers step alone for a while it may be meant so."""

    def program(worker: Worker, strategy: str) -> None:
        model = plain.mlp()
        prepare_slices(
            Session(worker), model, torch.optim.SGD(model.parameters(), 0.1 * (1 + worker.rank)), strategy=strategy
        )

    with pytest.raises(BadInput, match="the optimizer's lr is 0.2, and on worker 0"):
        together(2, partial(program, strategy="allreduce"))
    together(2, partial(program, strategy="local-sgd"))
