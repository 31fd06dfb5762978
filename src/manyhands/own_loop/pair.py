"""A prepared model and optimizer: the user's `backward()` and `step()` as a strategy sees them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from manyhands.engines.driver.run_monitor import USER
from manyhands.errors import Unsupported
from manyhands.own_loop.checks import check_alike, check_arguments, check_step, facts_of
from manyhands.own_loop.first_steps import FirstSteps
from manyhands.own_loop.session import Session
from manyhands.own_loop.silence import Silence
from manyhands.own_loop.stepper import Stepper
from manyhands.replica import evaluation, fingerprint
from manyhands.replica.replica import Replica
from manyhands.strategies.base import Strategy


class Pair:
    """One prepared (model, optimizer): a replica, its strategy and what this worker knows since its last step.

    Where the strategy applies the mean gradient, the mean is taken at the end of each backward: clipping, logging and
    editing `.grad` before `step()` then see what one worker would see. Gradients that several backwards accumulate stay
    exact: the mean of (mean before + own new gradient) is the mean before + the mean of the new ones, whatever the weights.
    """

    def __init__(
        self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
    ) -> None:
        """Replaces earlier pairs of the same model or optimizer. A collective of all workers."""
        check_arguments(model, optimizer, strategy)
        self.session, self.worker, self.strategy = session, session.worker, strategy
        self.together = self.worker.size > 1
        self._stepper = Stepper.of(optimizer)
        if self.together and session.prepared_before:
            gc.collect()  # an earlier pair that the user dropped refers to itself, and its shared memory is this one's
        self.replica = Replica(
            model,
            optimizer,
            group=self.worker.group,
            nonfinite="raise" if self.together else "apply",
            take_step=self._stepper.plain_step,
        )
        self._addresses = [p.data_ptr() for p in self.replica.layout.parameters]
        self.own = {id(p) for p in self.replica.layout.parameters}
        self.silence = Silence(model, self.replica.layout.parameters)
        self._first_steps = FirstSteps(session)
        self._averages = strategy.needs.mean_gradient and self.together
        self._weight = 0.0  # behind the gradients since the last step
        self._backwards = 0  # since the last step
        self._task = -1  # the last backward that reached this pair
        self._open = False  # stepped since the last `finish`
        self._hooks: list[Any] = []
        with self._exchanging():
            check_alike(self.replica, strategy, self.worker.group)
            fingerprint.compare(self.worker, partial(facts_of, self.replica, strategy))
            self.state = strategy.start(self.replica, self.worker)
        self._take_over(optimizer)

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        for pair in list(self.session.pairs):
            if not self.own.isdisjoint(pair.own):
                pair.release()
        if self._stepper.pair is not None:
            self._stepper.pair.release()
        self.number = self.session.add(self)
        self._stepper.bind(optimizer, self)
        if self.together:  # a GradScaler then shows itself to `step`, see `check_step`
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if self.session.counts_weights:
            self.watch()

    def release(self) -> None:
        """Let go of the model and the optimizer."""
        self.silence.turn(False)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stepper.pair = [], None
        self.session.remove(self)

    # -- backward ----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on, hear of every backward that reaches a parameter."""
        own = ref(self)  # whoever keeps the model does not keep the optimizer

        def arrived(_: Tensor) -> None:
            if (pair := own()) is not None:
                pair._arrived()

        self._hooks = [p.register_post_accumulate_grad_hook(arrived) for p in self.replica.layout.parameters]

    def _arrived(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.session.reached(task, self)

    def after_backward(self, weight: float) -> None:
        """Backward is over, every gradient is at its parameter, and they count with `weight`."""
        self.silence.after_backward()
        if self._averages:
            weight = self._average(weight)
        self._weight += weight
        self._backwards += 1

    def _average(self, weight: float) -> float:
        replica = self.replica
        if any(p.grad is not None and p.grad.requires_grad for p in replica.layout.parameters):
            raise Unsupported(
                "backward(create_graph=True) leaves gradients with a graph of their own, which a mean over workers cannot keep: take them with "
                "torch.autograd.grad(loss, parameters, create_graph=True), and call backward() on what depends on them"
            )
        replica.grad_mask = 0
        replica.collect()
        replica.weight = weight
        self._first_steps.collected(replica.gradients)
        with self._exchanging():
            return replica.mean_gradients(self.worker.group).weight

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """The strategy's exchange, in which the optimizer's own step happens."""
        self._check_step(closure)
        replica = self.replica
        if not (self._averages and self._backwards):  # gradients set by hand have had no exchange yet
            replica.grad_mask = 0
            replica.collect()
            self._first_steps.collected(replica.gradients)
        replica.weight = self._weight if self._backwards else self.session.weight
        with torch.no_grad(), self._exchanging():
            self._first_steps.stepped(replica.step)
            self.strategy.exchange(replica, self.worker, self.state)
        replica.tick += 1
        replica.reset_flags()
        self._weight, self._backwards, self._open = 0.0, 0, True
        self.silence.restore_buffers()
        self.session.after_step(self)

    def _check_step(self, closure: Any) -> None:
        if closure is not None:
            raise Unsupported(
                "step(closure) evaluates the model several times a step, which no exchange can follow: call backward() yourself and step() without one"
            )
        if torch._C._current_graph_task_id() != -1:
            raise Unsupported(
                "step() was called inside backward(), before the gradients are complete: call it afterwards"
            )
        if self._backwards:
            self.session.check_weight_used()
        if self.together:
            check_step(self.replica.optimizer, self.own)
            if [p.data_ptr() for p in self.replica.layout.parameters] != self._addresses:
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
            self.worker.driver.progress(USER, step)

    # -- between epochs ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Close the open round; the model then holds the consensus, buffers included. A collective; idempotent."""
        if not self._open:
            return
        self._open = False
        replica, group = self.replica, self.worker.group
        replica.check()
        with torch.no_grad(), self._exchanging():
            self.strategy.finish(replica, self.worker, self.state)
            if self.strategy.needs.one_model and self.together:
                replica.set_parameters(self.strategy.consensus(replica, self.worker, self.state))
                evaluation.load(replica.model, {}, evaluation.mean_buffers(replica.model, group))
        replica.reset_flags()
