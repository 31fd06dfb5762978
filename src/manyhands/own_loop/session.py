"""The prepared models, optimizers and loaders of one process: batch weights, and who exchanges when."""

from __future__ import annotations

import gc
import math
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from manyhands import rng
from manyhands.engines.driver.run_monitor import USER
from manyhands.errors import BadInput, Unsupported
from manyhands.own_loop.argument_checks import (
    check_arguments,
    check_equal,
    check_step,
    facts_of,
    late_parameters,
    named_tensors,
    root_of,
)
from manyhands.own_loop.backward_watch import Roots, watch
from manyhands.own_loop.first_step_checks import FirstSteps, checksum
from manyhands.own_loop.loss_graph import SUM
from manyhands.own_loop.loss_kinds import LossKinds
from manyhands.own_loop.own_pace_schedule import OwnPaceSchedule, PassProgress
from manyhands.own_loop.whole.script import WholeScript
from manyhands.replica import evaluation, fingerprint
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica
from manyhands.replica.sync_batch_norm import buffers_of_all_rows
from manyhands.strategies.base import Change, Strategy
from manyhands.worker import Worker

_SLOT = "_manyhands_stepper"
_OWN_SCHEDULE = (
    "the learning rate has changed between two steps of this worker's own, and workers that go at their own pace make different numbers of them. "
    "Give the scheduler, too: mh.prepare(model, optimizer, loader, scheduler). It is then stepped by the rows that all workers have had"
)


class Iteration:
    """One pass over a prepared loader, under way."""

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        """pairs: whose models it is expected to train."""
        self.pairs = set(pairs)
        self.used: set[Pair] = set()  # the pairs that took a step during it
        self.stepped: set[Pair] = set()  # since its newest batch
        self.progress: PassProgress | None = None  # at their own pace
        self.is_open = True
        self.mark = object()


@dataclass
class Backward:
    """One backward under way, or about to begin: what its gradients count, and the pairs that they belong to."""

    weight: float
    """In the mean over the workers: as stated, else the batch's rows, else 1; of a stand-in batch 0, of a sum 1."""
    scale: float
    """Its gradients are multiplied by this before the mean: the workers' number where the loss is a sum over rows, whose
    sum is that mean, and 0 on a stand-in batch."""
    known: bool
    """Whether a prepared loader or the user says what it counts."""
    pairs: set[Pair] = field(default_factory=set)


@dataclass(frozen=True)
class AtHand:
    """A batch that a prepared loader gave, until its pass has had all, or another one comes."""

    of: object  # its pass's mark
    number: int  # of all batches that this worker was given
    rows: float | None  # of this worker's; None: nobody counts them
    clear: bool  # whether the batch has as many rows
    stand_in: bool  # it is there only so that the loop body runs


class SlicedLoop(Protocol):
    """A script that knows of no workers, and whose loop sees slices."""

    def prepare(self) -> None:
        """The optimizers that it has made since become pairs. A collective."""

    def begins_backward(self, at_hand: AtHand | None) -> None:
        """A backward begins. Raises Unsupported where nobody knows which rows it is of."""

    def stepped(self, pair: Pair) -> None:
        """A pair has made a step."""


class Session:
    """Shared by all pairs and loaders that were prepared for one Worker.

    Pairs and iterations are held weakly: what the user drops is gone. Only an open iteration keeps its pairs, so that
    which rounds are finished, a collective, never depends on when a process collects its garbage.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pairs: WeakSet[Pair] = WeakSet()
        self.iterations: WeakSet[Iteration] = WeakSet()
        self.counts_weights = worker.size > 1 or worker.shares_process
        """Alone, a weight matters once the user states one; in simulated time, rows are the cost of a gradient."""
        self.loss_kinds = LossKinds(worker)
        self.alike_warned = False  # by any `FirstSteps`
        self.prepared = 0  # pairs so far, gone or not: a pair's place in the order of preparation
        self.schedules: list[OwnPaceSchedule] = []
        self.schedule_told = False
        self.passes = 0  # over any loader, with workers at their own pace
        self._began = False
        self._at_hand: dict[Iteration, AtHand] = {}  # of each open pass, the newest last
        self._left: AtHand | None = None  # of the pass that was left last, until another batch comes
        self._fresh = deque[AtHand](maxlen=2)  # of those since the last backward
        self.batches = 0  # that loaders gave so far
        self._stated: float | str | None = None  # by `mh.weight`; "sum": the loss is a sum over rows
        self._stated_used = False
        self._pending: dict[int, Backward] = {}  # those under way, by autograd's number
        self._under_way: Backward | None = None  # where its loss says what it counts
        self.sliced: SlicedLoop | None = None
        self.whole: WholeScript | None = None  # every worker has the whole batch: see `run_whole`
        self.unchanged = False  # the script knows of no workers
        if worker.size > 1:
            watch(self)

    @property
    def own_pace(self) -> Pair | None:
        """The pair whose workers go at their own pace, if that is so; there is no other then."""
        return next((pair for pair in self.pairs if pair.leasing is not None), None)

    @property
    def pass_under_way(self) -> PassProgress | None:
        """Of the loader whose batch is at hand, where workers go at their own pace: they may exchange through no group."""
        return next((one.progress for one in reversed(self._at_hand) if one.progress is not None), None)

    def run_whole(self, read: str | None = None) -> WholeScript:
        """From now on every worker computes with whole batches, and calls of modules are cut by rows. A collective, once.

        read: `rows` or `whole`, of a DataLoader's batches; None: rows where they are known to make the batch."""
        if self.whole is None:
            self.whole = WholeScript(self.worker, read)
            self.whole.install()
        return self.whole

    def end_whole(self) -> None:
        """The part of the program that computed with whole batches is over. Nothing where there was none."""
        if self.whole is not None:
            self.whole.leave()
            self.whole = None

    def begin(self) -> None:
        """Training begins: from here on other ranks than the first draw numbers of their own (dropout, noise)."""
        if not self._began and self.worker.rank and self.sliced is None and self.whole is None:
            rng.seed_all(torch.initial_seed(), self.worker.rank)
        self._began = True

    # -- weights -----------------------------------------------------------------------------------------------------

    @property
    def _newest(self) -> AtHand | None:
        """The batch that a backward is of that begins now."""
        return next(reversed(self._at_hand.values()), self._left)

    @property
    def _has_stand_in(self) -> bool:
        return any(one.stand_in for one in self._at_hand.values())

    def next_backward(self) -> Backward:
        """What a backward counts that begins now."""
        if self.whole is not None:
            return Backward(1.0, 1.0, known=True)
        if self._under_way is not None:
            return replace(self._under_way, pairs=set())
        known = self._stated is not None or self._newest is not None
        if isinstance(self._stated, str):  # of no rows it is 0, and counts as the others' do
            return Backward(1.0, 0.0 if self._has_stand_in else float(self.worker.size), known)
        newest = self._newest
        rows = 1.0 if newest is None or newest.rows is None else newest.rows
        weight = 0.0 if self._has_stand_in else rows if self._stated is None else self._stated
        return Backward(weight, 1.0 if weight else 0.0, known)

    @property
    def has_weight(self) -> bool:
        """Whether `mh.weight` or `mh.share` says what the next backward counts."""
        return self._stated is not None

    def state_weight(self, weight: float | str) -> None:
        """What `mh.weight` says; holds until the next step or batch."""
        if isinstance(weight, str):
            if weight != "sum":
                raise BadInput(f'mh.weight takes a number, or "sum" for a loss that is a sum over rows; not {weight!r}')
        elif not 0 <= weight < math.inf:
            raise BadInput(
                f"mh.weight takes a finite number of at least 0, not {weight}: give the number by which the loss's "
                "mean divides"
            )
        if self.whole is not None:
            return  # the loss is the whole batch's
        self._stated, self._stated_used = weight, False
        if not self.counts_weights:
            self.counts_weights = True
            for pair in self.pairs:
                pair.watch()
        self._scale_gradients()

    def begin_batch(
        self, iteration: Iteration, rows: float | None, *, clear: bool = True, stand_in: bool = False
    ) -> None:
        """A loader is about to yield a batch of so many rows of this worker's; None: nobody counts them. See `AtHand`."""
        self._at_hand.pop(iteration, None)
        self._left = None
        self.batches += 1
        for pair in self.pairs:
            pair.replica.control.place = self.batches
        self._at_hand[iteration] = AtHand(iteration.mark, self.batches, rows, clear, stand_in)
        self._fresh.append(self._at_hand[iteration])
        self._stated = None
        iteration.stepped.clear()
        for pair in in_order(iteration.pairs | iteration.used):
            pair.look_ahead()
        if stand_in:
            for pair in self.pairs:
                pair.gradient_scale.keep_buffers()
        self._scale_gradients()

    def end_batch(self, iteration: Iteration) -> None:
        """The loop body is done with the batch: what a stand-in did to buffers is undone."""
        at_hand = self._at_hand.get(iteration)
        if at_hand is not None and at_hand.stand_in:
            self._at_hand[iteration] = replace(at_hand, stand_in=False)
            for pair in self.pairs:
                pair.gradient_scale.forget_buffers()
            self._scale_gradients()

    def end_pass(self, iteration: Iteration) -> None:
        """A loop has had all batches: its last one weighs no longer."""
        self._at_hand.pop(iteration, None)
        kept = [one for one in self._fresh if one.of is not iteration.mark]
        self._fresh.clear()
        self._fresh.extend(kept)
        self._scale_gradients()

    def leave_pass(self, iteration: Iteration) -> None:
        """A pass is over, by `break` or an error too: then its last batch is at hand until another one comes."""
        iteration.is_open = False
        self.end_batch(iteration)
        self._left = self._at_hand.pop(iteration, self._left)
        self._scale_gradients()

    def _scale_gradients(self) -> None:
        scale = self.next_backward().scale
        for pair in self.pairs:
            pair.gradient_scale.set(scale)

    # -- backward ----------------------------------------------------------------------------------------------------

    @contextmanager
    def backward_of(self, roots: Roots) -> Iterator[float]:
        """See `BackwardWatcher`."""
        if self.whole is not None:
            yield 1.0
            return
        if self.sliced is not None:
            self.sliced.begins_backward(self._newest)
        if not self.pairs:
            yield 1.0
            return
        fresh = list(self._fresh)
        self._fresh.clear()
        newest = self._newest
        if newest is None or newest.rows is None or self._stated is not None:
            yield 1.0
            return
        _check_at_hand(newest, fresh)
        rows, exact = 0.0 if self._has_stand_in else newest.rows, all(pair.averages for pair in self.pairs)
        kind = self.loss_kinds.of(roots, rows, together=self.own_pace is None, exact=exact)
        counted = rows if kind.divisor is None or not rows else kind.divisor  # 0: no target counts, and the loss is NaN
        weight = 1.0 if kind.name == SUM else counted
        self._under_way = Backward(weight, 1.0 if rows and weight else 0.0, known=True)
        self._scale_gradients()
        try:
            yield float(self.worker.size) if kind.name == SUM else 1.0
        finally:
            self._under_way = None
            self._scale_gradients()

    def reached(self, task: int, pair: Pair) -> None:
        """Backward number `task` gave a gradient to a parameter of `pair`; at its end the pair is notified."""
        if task not in self._pending:
            self._pending[task] = self.next_backward()
            self._stated_used = True
            self.worker.driver.after_backward(lambda: self._after_backward(task))
        self._pending[task].pairs.add(pair)

    def _after_backward(self, task: int) -> None:
        self.begin()
        backward = self._pending.pop(task)
        pairs = in_order(backward.pairs)
        if self.worker.shares_process:  # of simulated workers, computing a gradient takes virtual time here
            driver, step, newest = self.worker.driver, pairs[0].replica.step, self._newest
            driver.progress("compute", step)
            rows = 1 if newest is None or newest.rows is None else round(newest.rows)
            driver.computed(0 if self._has_stand_in else rows)
            driver.progress(USER, step)
        with torch.no_grad():
            for pair in pairs:
                pair.after_backward(backward)

    # -- step --------------------------------------------------------------------------------------------------------

    def check_weight_used(self) -> None:
        """Raise BadInput if a stated weight came too late for its backward."""
        if self._stated is not None and not self._stated_used:
            raise BadInput(
                "mh.weight(...) was called after backward(), when the gradient had its weight already: call it before"
            )

    def after_step(self, pair: Pair) -> None:
        """A pair has stepped: stated weights end, open iterations remember it."""
        self._stated = None
        self._pending.clear()  # of a backward that raised
        self._scale_gradients()
        if self.sliced is not None:
            self.sliced.stepped(pair)
        another_comes = any(pair not in iteration.stepped for iteration in self._at_hand)
        for iteration in self.iterations:
            iteration.used.add(pair)
            iteration.stepped.add(pair)
        if not another_comes:
            pair.look_ahead()


def _check_at_hand(newest: AtHand, fresh: Sequence[AtHand]) -> None:
    """Unsupported where nobody knows how many rows a backward is of."""
    if len({one.number for one in (*fresh, newest)}) > 1:
        raise Unsupported(
            "several batches came since the backward before this one, so nobody knows whose rows its loss counts (a batch fetched ahead or left out, two loaders "
            'in one loss): give --batches whole (batches="whole"), or call mh.weight(rows) before backward. To look at a batch, iterate the loader as it '
            "was before prepare (its `plain`)"
        )
    if not newest.clear:
        raise Unsupported(
            f"the loader read {newest.rows:g} rows for this worker, and the batch has another number (a collate_fn drops or packs rows), so nobody knows what its "
            'loss counts: give --batches whole (batches="whole"), or call mh.weight(what the loss divides by) before backward'
        )


def in_order(pairs: Iterable[Pair]) -> list[Pair]:
    """As they were prepared, the same on all ranks."""
    return sorted(pairs, key=lambda pair: pair.number)


class Pair:
    """One prepared (model or models, optimizer): a replica, its strategy and what this worker knows since its last step.

    Where the strategy applies the mean gradient, the mean is taken at the end of each backward: clipping, logging and
    editing `.grad` before `step()` then see what one worker would see. Gradients of several backwards stay exact: the
    mean of (mean before + own new gradient) is the mean before + the mean of the new ones, whatever the weights.
    """

    def __init__(
        self,
        session: Session,
        given: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
    ) -> None:
        """Replaces earlier pairs of the same model or optimizer. A collective of all workers.

        given: the model, or several that one optimizer steps.
        """
        self._given = given
        model = root_of(given)
        check_arguments(model, optimizer, strategy, session.worker)
        self.session, self.worker, self.strategy = session, session.worker, strategy
        self.together = self.worker.size > 1
        self.leasing = strategy.leasing() if self.together else None
        self._server = self.worker.server if strategy.server() is not None else None
        looks = self._server is not None or strategy.needs.before_gradient
        self._agrees = self.together or looks  # alone, other strategies do nothing at an epoch's end
        self._stepper = Stepper.of(optimizer)
        if self.together and session.prepared:
            gc.collect()  # an earlier pair that the user dropped refers to itself, and its shared memory is this one's
        first_steps = FirstSteps(session, compares=self.leasing is None and session.whole is None)
        group = self.worker.mesh.data
        self._first_steps = first_steps
        self.replica = Replica.of(
            model,
            optimizer,
            group=group,
            nonfinite="raise" if self.together and session.whole is None else "apply",
            take_step=self._stepper.plain_step,
            compares_places=self.leasing is None and session.whole is None,
            # alone nothing is sent, and the first gradients are compared before they are
            weigh=lambda: None if first_steps.left or group.size == 1 else session.next_backward().weight,
        )
        self.own = {id(p) for p in self.replica.trainable}
        self.gradient_scale = GradientScale(model, self.replica.trainable)
        self.averages = strategy.needs.mean_gradient and self.together
        self._keeps = self.averages and not strategy.averages_exactly
        self._before: dict[int, Tensor] = {}  # by parameter: the gradient to which the backward under way adds its own
        self._weight = 0.0  # behind the gradients since the last step
        self._own_weight = 0.0  # of it, this worker's
        self._backwards = 0  # since the last step
        self._task = -1  # the last backward that reached this pair
        self._open = False  # stepped since the last `finish`
        self._inside = self._active = False  # between `enter` and `finish`; the server counts this worker
        self._looked = False  # `before_backward` was called for the gradient that comes next
        self._replaced: tuple[FlatVector, int] | None = None  # by the answer: this replica's parameters, its checksum
        self._rates: tuple[PassProgress | None, list[float]] | None = None  # at their own pace: those of the last step
        self._hooks: list[Any] = []
        with self._exchanging():
            kinds = [type(model).__name__, *named_tensors(model), type(optimizer).__name__, repr(strategy)]
            check_equal(group, kinds, "prepare the same model, optimizer and strategy, in the same order")
            fingerprint.compare(self.worker, partial(facts_of, model, optimizer, strategy))
            self.state = strategy.start(self.replica, self.worker)
            strategy.synchronize(self.replica, self.worker, self.state, Change(generation=self.worker.generation))
        self.replica.control.place = session.batches
        self._addresses = [p.data_ptr() for p in self.replica.trainable]
        self._take_over(optimizer)

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        earlier = [pair for pair in self.session.pairs if not self.own.isdisjoint(pair.own)]
        both = {self, *self.session.pairs} - {*earlier}
        if self.together and len(both) > 1 and any(pair.replica.executor.hands_out_slices for pair in both):
            raise Unsupported(
                "overlap=true sends slices of a model's gradient while its backward runs, and with a second prepared model "
                "the workers could send them in different orders: leave overlap out"
            )
        apart = [pair for pair in both if pair.leasing is not None or pair._server is not None]
        if apart and self.session.prepared and self.together:
            name = apart[0].strategy.name
            reason = (
                "whose server holds one model" if apart[0]._server is not None else "whose workers go at their own pace"
            )
            raise Unsupported(
                f"strategy {name}, {reason}, takes one prepared model, once: prepare several modules together "
                "(mh.prepare([first, second], optimizer)), or use allreduce or local-sgd"
            )
        for pair in earlier:
            pair.release()
        if self._stepper.pair is not None:
            self._stepper.pair.release()
        self.session.pairs.add(self)
        self.session.prepared += 1
        self.number = self.session.prepared
        self._stepper.bind(optimizer, self)
        if self.together:  # where gradients are no means, a GradScaler shows itself to `step`: see `check_step`
            optimizer._step_supports_amp_scaling = not self.averages  # type: ignore[attr-defined]
        if self.session.counts_weights:
            self.watch()
        self.gradient_scale.set(self.session.next_backward().scale)

    def release(self) -> None:
        self.gradient_scale.set(1.0)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stepper.pair = [], None
        self.session.pairs.discard(self)
        for iteration in self.session.iterations:
            iteration.used.discard(self)

    # -- backward ----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on, be notified of every backward that reaches a parameter."""
        own = ref(self)  # whoever keeps the model does not keep the optimizer

        def arrived(_: Tensor) -> None:
            if (pair := own()) is not None:
                pair._arrived()

        def arriving(number: int) -> None:
            if (pair := own()) is not None and number not in pair._before:
                pair._keep(number)

        parameters = self.replica.trainable
        self._hooks = [p.register_post_accumulate_grad_hook(arrived) for p in parameters]
        if self._keeps:
            self._hooks += [p.register_hook(lambda _, i=i: arriving(i)) for i, p in enumerate(parameters)]

    def _keep(self, number: int) -> None:
        if (gradient := self.replica.trainable[number].grad) is not None:
            self._before[number] = gradient.detach().clone()

    def _arrived(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.session.reached(task, self)

    def after_backward(self, backward: Backward) -> None:
        """Backward is over, and every gradient is at its parameter."""
        self.gradient_scale.after_backward()
        self._weight += self._average(backward) if self.averages else backward.weight
        self._own_weight += backward.weight
        self._backwards += 1

    def _average(self, backward: Backward) -> float:
        replica = self.replica
        self.collect()
        replica.weight = backward.weight
        self._first_steps.collected(replica.gradients.joined(), backward.known)
        with self.without_earlier(), self._exchanging():
            total = self.strategy.mean_gradients(replica, self.worker, self.state)
        self._before = {}
        self._check_place()
        return total.weight

    def _check_place(self) -> None:
        """Unsupported where workers have exchanged what they computed from different batches."""
        if self.replica.control.apart:
            raise Unsupported(
                f"the workers are at different batches: this one, worker {self.worker.rank}, exchanged after {self.session.batches}, and another one after more or "
                'fewer. One of them left a batch out, or a loop: let all do so alike, or give --batches whole (batches="whole"), where all see the same'
            )

    def collect(self) -> None:
        """Gather every `.grad` into the replica's gradients."""
        replica = self.replica
        if any(p.grad is not None and p.grad.requires_grad for p in replica.trainable):
            raise Unsupported(
                "backward(create_graph=True) gives gradients with a graph, which manyhands cannot average: compute "
                "them with torch.autograd.grad(loss, parameters, create_graph=True), and call backward() on the result"
            )
        try:
            replica.collect()
        except RuntimeError:  # of torch, where a gradient does not fit its parameter any more
            replica.check()
            raise

    @contextmanager
    def without_earlier(self) -> Iterator[None]:
        """Within, the collected gradients are what the newest backward added, where what was before is kept."""
        views = list(self.replica.named(self.replica.gradients).values()) if self._before else []
        for number, gradient in self._before.items():
            views[number].sub_(gradient)
        try:
            yield
        finally:
            for number, gradient in self._before.items():
                views[number].add_(gradient)

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> Any:
        """The strategy's exchange, in which the optimizer's own step happens. Alone, `closure` is passed to it, and what
        it returns comes back."""
        if closure is not None and (not self._agrees or self._steps_alone):
            value = self._stepper.plain_step(closure)
            self._stepped()
            return value
        self._check_step(closure)
        late = late_parameters(self.replica.optimizer, self.own) if self.together else []
        if late and (self.leasing is not None or self._server is not None):
            raise Unsupported(
                f"parameters were unfrozen, and strategy {self.strategy.name} cannot take them in: unfreeze them before prepare "
                "(their learning rate may be 0 until they are to train), or use allreduce or local-sgd"
            )
        if late:
            self._step_with(late)
            return None
        self._exchange()
        return None

    def _step_with(self, late: list[nn.Parameter]) -> None:
        """A step in which parameters have a gradient that were frozen, or not there, when the model was prepared.

        It is made with their mean gradient, then their mean; from then on they are parameters like the others. All
        workers unfreeze the same ones, which is compared.
        """
        weight = self._own_weight if self._backwards else self.session.next_backward().weight
        shapes = [f"a parameter of shape {list(p.shape)}" for p in late]
        check_equal(self.worker.group, shapes, "unfreeze the same parameters in the same step")
        if self.averages:
            for p in late:
                p.grad = self._mean_of(p.grad, weight)
        self._exchange()
        self.finish()
        with torch.no_grad():
            for p in late:
                p.copy_(self._mean_of(p, 1.0))
        steps, optimizer = self.replica.step, self.replica.optimizer
        again = Pair(self.session, self._given, optimizer, self.strategy)
        again.replica.step, again.replica.tick = steps, self.replica.tick
        again._open = True
        self.session.after_step(again)

    def _mean_of(self, tensor: Tensor | None, weight: float) -> Tensor:
        """Over the workers, by weight; where one has none it counts nothing."""
        assert tensor is not None
        flat = tensor.detach().reshape(-1).clone()
        self.worker.mesh.data.mean_(flat, weight, 0)
        return flat.reshape(tensor.shape)

    def _exchange(self) -> None:
        replica = self.replica
        if not (self.averages and self._backwards):  # gradients set by hand have had no exchange yet
            replica.collect()
            self._first_steps.collected(replica.gradients.joined(), self.session.next_backward().known)
        weight = self._weight if self._backwards else self.session.next_backward().weight
        if not self._inside:  # of a loop without a prepared loader, or with one that has not trained before
            self._refuse_warmup()
            self.enter()
        self.look_ahead()
        self._watch_rates()
        replica.weight = weight
        with torch.no_grad(), self._exchanging():
            self._first_steps.stepped(replica.step)
            self.strategy.exchange(replica, self.worker, self.state)
            if self._server is not None:
                self.worker.tick(0)
        self._check_place()
        self._stepped()

    def _stepped(self) -> None:
        self.replica.tick += 1
        self.replica.reset_flags()
        self._weight, self._own_weight, self._backwards, self._open, self._looked = 0.0, 0.0, 0, True, False
        self._before.clear()  # of a backward that raised
        self.gradient_scale.restore_buffers()
        self.session.after_step(self)

    def _check_step(self, closure: Any) -> None:
        if closure is not None:
            raise Unsupported(
                'step(closure) evaluates the model several times a step, which no exchange of slices can follow: give --batches whole (batches="whole"), or call '
                "backward() yourself and step() without one (in a LightningModule by self.automatic_optimization = False and self.manual_backward(loss))"
            )
        if torch._C._current_graph_task_id() != -1:
            raise Unsupported(
                "step() was called inside backward(), before the gradients are complete: call it afterwards"
            )
        if self._backwards:
            self.session.check_weight_used()
        if self.together:
            check_step(self.replica.optimizer)
            if [p.data_ptr() for p in self.replica.trainable] != self._addresses:
                self.replica.check()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Tell the driver, and the group for its errors, where this worker is."""
        step = self.replica.step
        self.worker.group.step = step
        self.worker.driver.progress("exchange", step)
        try:
            yield
        finally:
            self.worker.driver.progress(USER, self.replica.step)

    @property
    def _steps_alone(self) -> bool:
        """Whether a step after a mean gradient is the optimizer's own, so that it may compute gradients several times."""
        return self.session.whole is not None and self.replica.executor.sharded is None

    # -- a pass --------------------------------------------------------------------------------------------------------

    def enter(self, warmup: int = 0) -> None:
        """Training begins, or goes on after `finish`: from this replica's own parameters, unless the user has changed the
        answer. A collective where there is a server or workers go at their own pace.

        warmup: so many slices worker 0 trains alone, before the others `activate`.
        """
        self._inside = True
        if self._replaced is not None:
            own, answer = self._replaced
            if checksum(self.replica.parameters.joined()) == answer:
                self.replica.set_parameters(own)
            self._replaced = None
        if not warmup or self.worker.rank == 0:
            self.activate()
        if (self._server is not None or self.leasing is not None) and self.session.pass_under_way is None:
            self.worker.group.barrier()  # nobody's first step is made before all take part

    def activate(self) -> None:
        """Take part at the server, if there is one."""
        if self._server is not None and not self._active:
            self._server.activate()
            self._active = True

    def deactivate(self) -> None:
        """Nobody waits for this worker at the server any more."""
        if self._server is not None:
            self._server.deactivate()
            self._active = False

    def warmup(self) -> int:
        """So many slices worker 0 has yet to train alone; for worker 0 alone to say."""
        return 0 if self.leasing is None else max(0, self.leasing.rank0_warmup_ticks - self.replica.tick)

    def look_ahead(self) -> None:
        """The next gradient is about to be computed: the strategy's `before_backward`, once a step."""
        if self._looked or not self._inside or not self.strategy.needs.before_gradient:
            return
        self._looked = True
        with torch.no_grad(), self._exchanging():
            self.strategy.before_backward(self.replica, self.worker, self.state)
        self.replica.skip = False  # a gradient that comes too late is computed all the same

    def _refuse_warmup(self) -> None:
        if self.leasing is not None and self.leasing.rank0_warmup_ticks:
            raise Unsupported(
                f"warmup={self.leasing.rank0_warmup_ticks} of strategy {self.strategy.name} lets worker 0 train alone at first, "
                "for which rows must come from a prepared loader: leave warmup out, or prepare the loader, too"
            )

    def _watch_rates(self) -> None:
        """At their own pace: warn once of a schedule that counts this worker's own steps."""
        if self.leasing is None or self.session.schedules or self.session.schedule_told:
            return
        now = self.session.pass_under_way, [float(group["lr"]) for group in self.replica.optimizer.param_groups]
        before, self._rates = self._rates, now
        if before is not None and before[0] is now[0] and before[1] != now[1]:
            self.session.schedule_told = True
            if self.worker.rank == 0:
                warnings.warn(_OWN_SCHEDULE, stacklevel=5)  # the user's step()

    def finish(self) -> None:
        """Close the open round; the model then holds the consensus, buffers included. A collective; idempotent.

        At their own pace all meet here, whether they have stepped or not. What this replica held is kept for `enter`.
        """
        if not self._agrees or not (self._open or self.leasing is not None):
            return
        replica, group = self.replica, self.worker.group
        replica.check()
        with torch.no_grad(), self._exchanging():
            if self._looked:
                self.strategy.forget_step(replica, self.worker, self.state)
            if self.leasing is not None:
                self.worker.driver.progress("wait", replica.step)
                self.deactivate()
                group.barrier()
            self.activate()
            self.strategy.finish(replica, self.worker, self.state)
            self.deactivate()
            if self.strategy.needs.one_model:
                self._take_answer(self.strategy.consensus(replica, self.worker, self.state))
                evaluation.load(replica.model, {}, evaluation.mean_buffers(replica.model, group))
                self._compare()
        self._open = self._inside = self._looked = False
        replica.reset_flags()

    def _take_answer(self, answer: FlatVector) -> None:
        replica = self.replica
        if not answer.equal(replica.parameters):
            own = replica.parameters.clone()
            replica.set_parameters(answer)
            self._replaced = own, checksum(replica.parameters.joined())

    def _compare(self) -> None:
        """A collective at the end of a pass: ManyhandsError where what should be equal on all workers is not, BadInput
        for other rates where every step must be the same."""
        replica, rates = self.replica, partial(fingerprint.of_optimizer, self.replica.optimizer)
        fingerprint.compare_replicas(self.worker, replica.parameters, replica.norm, rates(), replica.step)
        if self.strategy.needs.mean_gradient:
            fingerprint.compare(self.worker, rates)


class Stepper:
    """What an optimizer's rebound `step` calls: the pair that it belongs to now, and the step that it had before."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.plain_step: Callable[..., Any] = optimizer.step
        self.pair: Pair | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Stepper:
        """The one that the optimizer has, if it was prepared before, else a new one that waits to be bound."""
        found = vars(optimizer).get(_SLOT)
        return found if isinstance(found, Stepper) else cls(optimizer)

    def bind(self, optimizer: torch.optim.Optimizer, pair: Pair) -> None:
        """From now on `optimizer.step()` is the pair's.

        It is a bound method of the instance: PyTorch's schedulers wrap its `__func__`. It says that one wrapped it, and
        sets what the wrapper would set, so that a scheduler may be built before or after.
        """
        self.pair = pair
        if _SLOT in vars(optimizer):
            return
        vars(optimizer)[_SLOT] = self

        def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
            value = self._step(closure)
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return value

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, closure: Any) -> Any:
        if self.pair is None:
            raise Unsupported(
                "this optimizer's model was prepared again with another optimizer: use one optimizer for each model "
                "(with several parameter groups), or prepare the parts one by one: mh.prepare(model.encoder, first), "
                "mh.prepare(model.decoder, second)"
            )
        return self.pair.step(closure)


class GradientScale:
    """What a model's gradients are multiplied by in a backward; costs nothing while it is 1."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._scale = 1.0
        self._hooks: list[Any] = []
        self._fresh: set[int] = set()  # parameters whose `.grad` is nothing but zeros of a backward that counts nothing
        self._buffers: list[tuple[Tensor, Tensor]] = []  # (buffer, what it was before the stand-in)

    def set(self, scale: float) -> None:
        """From now on; existing graphs included, `torch.autograd.grad` of the parameters too. At 0 backward adds zeros,
        whatever it computed, NaN too."""
        self._scale = scale
        self._fresh.clear()
        if scale != 1.0 and not self._hooks:
            self._hooks = [
                p.register_hook(lambda gradient, i=i: self._scaled(gradient, i)) for i, p in enumerate(self._parameters)
            ]
        elif scale == 1.0:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _scaled(self, gradient: Tensor, i: int) -> Tensor:
        if self._scale:
            return gradient * self._scale
        if self._parameters[i].grad is None:
            self._fresh.add(i)
        return torch.zeros_like(gradient)

    def after_backward(self) -> None:
        """A gradient that only a backward made that counts nothing is none."""
        for i in self._fresh:
            self._parameters[i].grad = None
        self._fresh.clear()

    def keep_buffers(self) -> None:
        """A stand-in batch is coming. Statistics of all workers' rows have nothing of it."""
        others = buffers_of_all_rows(self._model)
        self._buffers = [(one, one.detach().clone()) for one in self._model.buffers() if id(one) not in others]

    def restore_buffers(self) -> None:
        """Undo what forward did to them since `keep_buffers`."""
        for buffer, before in self._buffers:
            buffer.data.copy_(before)  # .data: a graph that is still alive may have saved the buffer

    def forget_buffers(self) -> None:
        self.restore_buffers()
        self._buffers = []
