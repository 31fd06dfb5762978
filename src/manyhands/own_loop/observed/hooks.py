"""What watches a script: its loaders, optimizers and backwards, which become those of a prepared loop."""

from __future__ import annotations

import gc
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from manyhands import rng
from manyhands.errors import BadInput, ManyhandsError, Unsupported
from manyhands.own_loop import summed_loss
from manyhands.own_loop.backward_watch import Line, Roots, shown, user_line
from manyhands.own_loop.first_step_checks import checksum
from manyhands.own_loop.launch import launched_strategy
from manyhands.own_loop.observed.loops import KEPT, Deal, Fed, Loops, Pass, Scale, Site
from manyhands.own_loop.observed.loss_scale import EXACT, LOW_PRECISION, Unclear, loss_scale
from manyhands.own_loop.observed.modules import outermost_modules, replaced, stepped_by
from manyhands.own_loop.prepare import DEFAULT, prepare_on
from manyhands.own_loop.prepared_loader import Dealer, PreparedLoader, Share, check_loader, part_of
from manyhands.own_loop.session import Backward, Pair, Session
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Strategy

_CHECKED = (1, 10, 100)  # steps after which replicas are compared; then each so many
_CHECKED_EVERY = 1000
_FIRST_PARTS = 3  # parts of a batch after which an error is not the parts'
_LOW = ("ToCopy",)  # in a loss's graph: what autocast leaves
_plain_iter = DataLoader.__iter__
_plain_optimizer = torch.optim.Optimizer.__init__
_plain_start = BaseProcess.start


@dataclass(frozen=True)
class UnderWay:
    """A backward that runs."""

    fed: Fed
    roots: Roots
    rows: float  # what its loss counts here
    factor: float  # of its gradients


class PassDealer(Dealer):
    """One pass of the script over a loader."""

    def __init__(self, observed: ObservedLoop, one: Pass, trains: bool, unchecked: DataLoader[Any] | None) -> None:
        """unchecked: the loader, whose batches must have a row for each worker once they are shared."""
        self.observed, self.one, self.trains, self.unchecked = observed, one, trains, unchecked
        self.shares: deque[Share] = deque(maxlen=KEPT)
        self.marks: deque[int] = deque(maxlen=KEPT)  # autograd's number when each came
        self.drew = False  # numbers were drawn where the newest batch was loaded

    @override
    def next_deal(self) -> Deal:
        return self.observed.deal(self)

    @override
    def dealt(self, share: Share) -> None:
        if torch.is_grad_enabled():  # else no backward is of it
            self.shares.append(share)
            self.marks.append(_autograd_number())

    @override
    def left(self) -> None:
        self.observed.left(self)


class ObservedLoop:
    """A script's own loop on the workers of a session.

    Optimizers and the modules that they step become prepared pairs at the first pass over a loader. Passes over loaders
    become those of prepared loaders, whose batches are whole until a backward has followed one. See `Loops`.
    """

    def __init__(
        self, session: Session, strategy: Strategy | str | None, *, own_batches: bool = False, note: str = ""
    ) -> None:
        """own_batches: each worker draws batches of its own, which together are one; there is no DataLoader. note: said
        once rows are shared."""
        self.session, self.strategy, self.own_batches = session, strategy, own_batches
        self.worker, self.group = session.worker, session.worker.group
        self.loops = Loops()
        self.backward: Backward | None = None
        self.paused = False  # another part of manyhands iterates
        self.steps = 0
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # not prepared yet
        self._dealers: dict[Pass, PassDealer] = {}
        self._loaders: dict[Site, PreparedLoader] = {}  # of the newest pass of each
        self._datasets: dict[int, tuple[Any, int]] = {}  # by address: (what holds it, its number)
        self._watched: list[weakref.ref[nn.Module]] = []  # modules that no optimizer steps: averages of others, say
        self._alike = True  # all ranks draw worker 0's numbers
        self._diverged = 0
        self._drawn: dict[str, str] | None = None  # the generators before the newest probe was loaded
        self._now: UnderWay | None = None
        self._said: set[str] = set()
        self.begins: Callable[[], None] = lambda: None  # called once the first optimizers are prepared
        self._given: Line | None = None  # with own batches: where a loader is iterated
        self._decided_in: dict[
            Line, tuple[Pass, int]
        ] = {}  # by the line of a backward: the batch that showed its scale
        self._parts = 0  # batches so far of which a worker got a part
        self.note = note
        session.observed = self
        self._take_first_draws()
        self._seed = int(self.group.all_gather_json(torch.initial_seed())[0])

    # -- hooks -------------------------------------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the script is watched."""
        observed = self

        def iterate(loader: DataLoader[Any]) -> Any:
            if observed.paused or observed.worker.size == 1:
                return _plain_iter(loader)
            return observed.iterate_own(loader) if observed.own_batches else observed.iterate(loader)

        @wraps(_plain_optimizer)
        def made(optimizer: torch.optim.Optimizer, *given: Any, **named: Any) -> None:
            _plain_optimizer(optimizer, *given, **named)
            observed._optimizers.append(weakref.ref(optimizer))
            if observed.own_batches and observed._alike:  # models are made alike, batches are not
                observed._draw_own()

        @wraps(_plain_start)
        def started(process: Any) -> None:
            if not observed.paused and _holds_model([process._args, process._kwargs]):
                raise Unsupported(
                    "the script trains in processes of its own, each of which would belong to one worker: run it with python, or leave its processes out"
                )
            _plain_start(process)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign,assignment]
        BaseProcess.start = started  # type: ignore[method-assign,assignment]
        in_child = weakref.WeakMethod(self.remove)
        os.register_at_fork(after_in_child=lambda: (remove := in_child()) is not None and remove())
        try:
            yield
            self.finish()
        finally:
            self.remove()

    def remove(self) -> None:
        """Nothing is watched any more; in a process that the script starts, from its beginning."""
        DataLoader.__iter__ = _plain_iter  # type: ignore[method-assign]
        torch.optim.Optimizer.__init__ = _plain_optimizer  # type: ignore[method-assign]
        BaseProcess.start = _plain_start  # type: ignore[method-assign]
        self.session.observed = None

    def finish(self) -> None:
        """What passes left by `break` have open is finished. A collective."""
        for loader in self._loaders.values():
            dealer = loader.dealer
            if isinstance(dealer, PassDealer) and not dealer.one.open:
                loader.finish()

    def say(self, text: str) -> None:
        """One line of worker 0 on standard error, once."""
        if self.worker.rank == 0 and text not in self._said:
            sys.stderr.write(f"manyhands: {text}\n")
        self._said.add(text)

    def explain(self, error: Exception) -> str | None:
        """Why an error of the script is a refusal, if it is one that the parts of a batch made."""
        shapes = (RuntimeError, ValueError, IndexError, AssertionError)
        if isinstance(error, ManyhandsError) or not (0 < self._parts <= _FIRST_PARTS) or not isinstance(error, shapes):
            return None
        return (
            f"the script failed on a part of a batch ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}), and on the "
            "whole batch before it did not: with several workers each gets its rows, so the batch size must not be fixed (use len(rows), or view(-1, ...))"
        )

    # -- passes ------------------------------------------------------------------------------------------------------

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The script begins a pass over a loader."""
        line = user_line()
        site = Site(*line[:2], self._number_of(loader.dataset))
        together = self.session.pass_under_way is None  # else each worker is at a batch of its own
        if together:
            self.finish()
            self._prepare()
            self._take_first_draws()
        one = self.loops.iterated(site)
        record = self.loops.sites[site]
        trains = record.training or (together and not record.evaluating)
        _check_dataset(loader.dataset)
        check_loader(loader, 1)
        dealer = self._dealers[one] = PassDealer(self, one, trains, loader)
        before = self._loaders.get(site)
        shared = self._loaders[site] = PreparedLoader(loader, self.session, dealer)
        if before is not None:
            shared.pairs, shared._passes = before.pairs, before._passes
        self.paused = True
        try:
            passing = iter(shared)
        finally:
            self.paused = False
        return self._walk(passing)

    def iterate_own(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """With --own-batches a loader is for evaluation."""
        self._given = user_line() if torch.is_grad_enabled() else self._given
        try:
            yield from _plain_iter(loader)
        finally:
            self._given = None

    def _walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; what loads them is not the script's iterating."""
        try:
            while True:
                self.paused = True
                try:
                    batch = next(batches, _OVER)
                finally:
                    self.paused = False
                if batch is _OVER:
                    if self.session.pass_under_way is None:
                        self._take_first_draws()
                    return
                yield batch
        finally:
            batches.close()  # type: ignore[attr-defined]

    def deal(self, dealer: PassDealer) -> Deal:
        """How the workers get the batch that the script asks for now."""
        if self.session.pass_under_way is None:
            self._prepare()
        deal = self.loops.fetched(dealer.one, torch.is_grad_enabled())
        if deal is Deal.SLICE and self._alike:
            self._draw_own()
        self._drawn = rng.generator_states() if deal is Deal.PROBE else None
        if deal is Deal.SLICE and self.note:
            self.say(self.note)
            self.note = ""
        if deal is not Deal.WHOLE:
            self._parts += 1
            if dealer.unchecked is not None:
                check_loader(dealer.unchecked, self.worker.size)
                dealer.unchecked = None
        return deal

    def left(self, dealer: PassDealer) -> None:
        """A pass is over."""
        self.loops.ended(dealer.one)
        self._dealers = {one: held for one, held in self._dealers.items() if one.open or one is dealer.one}

    def _number_of(self, dataset: Any) -> int:
        """The same for the same dataset; another one that lies where an earlier one did has a number of its own."""
        held = self._datasets.get(id(dataset))
        if held is not None and (held[0]() if isinstance(held[0], weakref.ref) else held[0]) is dataset:
            return held[1]
        try:
            holder: Any = weakref.ref(dataset)
        except TypeError:
            holder = dataset
        number = 1 + max((number for _, number in self._datasets.values()), default=0)
        self._datasets[id(dataset)] = holder, number
        return number

    # -- pairs -------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """The optimizers that were made since become pairs. A collective where there are any, of all ranks alike."""
        fresh = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        self._optimizers = []
        for optimizer in replaced(fresh):
            fresh.remove(optimizer)
            optimizer.register_step_pre_hook(_refuse_second)
        if not fresh:
            return
        if not self.session.prepared:
            self.begins()
        roots, held = outermost_modules(), set[int]()
        for optimizer, modules in zip(fresh, stepped_by(fresh, roots), strict=True):
            self._check_optimizer(optimizer)
            given = modules[0] if len(modules) == 1 else modules
            prepare_on(self.session, given, optimizer, *self._schedulers_of(optimizer), strategy=self.strategy)
            held.update(id(p) for module in modules for p in module.parameters())
            self.say(f"{type(optimizer).__name__} steps {', '.join(type(module).__name__ for module in modules)}")
        others = (module for module in roots if any(id(p) not in held for p in module.parameters()))
        self._watched = [weakref.ref(module) for module in others]

    def _schedulers_of(self, optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
        """Where workers go at their own pace, and schedulers are stepped by the rows of all."""
        if strategy_of(self.strategy or launched_strategy() or DEFAULT).leasing() is None:
            return []
        found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
        return [one for one in found if one.optimizer is optimizer]

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Unsupported(
                "LBFGS's step(closure) evaluates the model several times a step, which no exchange can follow: run the script with python, or use "
                "another optimizer"
            )

    # -- draws -------------------------------------------------------------------------------------------------------

    def _take_first_draws(self) -> None:
        """From here on all ranks draw worker 0's numbers. A collective."""
        rng.take_first(self.group)
        self._alike = True

    def _draw_own(self) -> None:
        """From here on other ranks draw noise of their own."""
        self._alike, self._diverged = False, self._diverged + 1
        if self.worker.rank:
            rng.seed_all(self._seed, self.worker.rank * 1_000_003 + self._diverged)

    # -- backward ----------------------------------------------------------------------------------------------------

    @contextmanager
    def backward_of(self, roots: Roots) -> Iterator[float]:
        fed = None if self.own_batches else self.loops.backward(roots.line, self._ahead(roots))
        if fed is None:
            with self._without_loader(roots):
                yield 1.0
            return
        if not self.session.prepared:
            raise Unsupported(
                "no torch.optim.Optimizer steps what this backward computes gradients for, and workers agree where an optimizer steps: use one, "
                "torch.optim.SGD say, in place of updates by hand"
            )
        dealer = self._dealers[fed.passes[0]]
        share = dealer.shares[-1 - min(fed.ahead, len(dealer.shares) - 1)]
        stated = self.session._stated
        rows = float(share.rows or 0) if not isinstance(stated, float) else stated
        divisor = None if stated is not None else summed_loss.divisor_of(roots.loss) if roots.loss is not None else None
        weight = rows if divisor is None or share.stand_in else divisor
        scale = fed.scale if stated != "sum" else Scale.SUM
        factor = 1.0
        if fed.deal is not Deal.SLICE:
            self.backward = Backward(1.0, 1.0, True, of_first=True)
        else:
            scale = scale or self._by_graph(roots, rows)
            summed = scale is Scale.SUM
            self.backward = Backward(1.0 if summed else weight, 0.0 if share.stand_in else 1.0, True)
            factor = float(self.worker.size) if summed and stated != "sum" else 1.0
        self.session._stated_used = self.session._stated_used or stated is not None
        self._now = UnderWay(fed, roots, weight, factor)
        try:
            yield factor
        finally:
            self.backward = self._now = None

    @contextmanager
    def _without_loader(self, roots: Roots) -> Iterator[None]:
        for optimizer in [one for reference in self._optimizers if (one := reference()) is not None]:
            self._check_optimizer(optimizer)
        if not self.own_batches:
            raise Unsupported(
                "a backward follows no DataLoader's batch, so nobody knows which rows it is of. Share the batch "
                "(rows = mh.share(rows), of one process's batch), or give --own-batches: each worker then draws its own, and the batch is "
                f"{self.worker.size} times as large"
            )
        if self._given is not None:
            raise BadInput(
                f"--own-batches is for a loop that draws its batches itself, and the DataLoader of {shown(self._given)} feeds this backward: leave it out"
            )
        self._prepare()
        self.backward = Backward(1.0, 1.0, True)
        try:
            yield
        finally:
            self.backward = None

    def _by_graph(self, roots: Roots, rows: float) -> Scale:
        """Of a backward that was in no probe: what its loss's graph shows."""
        if roots.loss is not None:
            terms = summed_loss.terms_of(roots.loss)
            if terms.scale(rows):
                return Scale.SUM
            if summed_loss.is_mean(roots.loss):
                return Scale.MEAN
        raise Unsupported(
            "this backward comes for the first time after the rows were shared, and its loss does not show whether it is a mean or a "
            'sum over rows: call mh.weight(len(rows)) before it if it is a mean, or mh.weight("sum")'
        )

    def _ahead(self, roots: Roots) -> int:
        """How many batches were fetched after the loss was begun: a script may fetch the next one before backward."""
        passes = self.loops._feeding()
        dealer = self._dealers.get(passes[0]) if passes else None
        if dealer is None or not dealer.marks or roots.tensors[0].grad_fn is None:
            return 0
        record = self.loops.sites[passes[0].site]
        if record.ahead is None or record.tried or not record.training:
            record.ahead = _fetched_since(roots.tensors[0], list(dealer.marks))
        return record.ahead

    def before_exchange(self, backward: Backward, pairs: Sequence[Pair]) -> None:
        """Of a probe: whether the loss is a mean or a sum. A collective. Else the loss goes along with the gradients."""
        if self._now is None:
            return
        if not backward.of_first:
            if self._now.roots.loss is not None and (carried := _carried(pairs)) is not None:
                carried.fill_(self._now.roots.loss.detach() * self._now.factor)
            return
        fed, roots = self._now.fed, self._now.roots
        batch = fed.passes[0], fed.passes[0].fetches
        known = fed.scale is not None and self._decided_in.get(roots.line) != batch
        if fed.deal is not Deal.PROBE or known or self.session._stated == "sum":
            return
        own = []
        for pair in pairs:
            pair.collect()
            with pair.without_earlier():
                own += [part.detach().clone() for part in pair.replica.gradients.parts]
        if roots.loss is not None and summed_loss.rows_meet(roots.loss):
            raise Unsupported(
                f"rows of a batch look at each other in the loss (a product or a variance over the batch), so {self.worker.size} workers that have their own "
                "rows alone cannot compute it: train in one process, or gather what the loss compares from all workers"
            )
        found = self._judge(own, roots, self._now.rows)
        scale = found if isinstance(found, Scale) else None
        if fed.scale is not None:
            if scale is not None and scale is not fed.scale:
                raise Unsupported(
                    "this line calls backward() several times for a batch, of a loss that is a mean over rows and of one that is a sum: write one line for each"
                )
            return
        self._decided_in[roots.line] = batch
        again = self.loops.decided(fed, roots.line, scale)
        if isinstance(found, Scale):
            where = shown(fed.passes[0].site.where)
            self.say(
                f"{shown(roots.line)}: the loss is a {found.value} over rows; the rows of {where} are shared by {self.worker.size} workers"
            )
        elif not again:
            raise Unsupported(
                f"the loss is neither a mean nor a sum over rows ({found.reason}), so {self.worker.size} workers cannot share them. If rows "
                "of a batch look at each other (contrast, normalisation over the batch), train in one process; if the loss is a mean over something "
                'else, call mh.weight(what it divides by) before backward, or mh.weight("sum")'
            )

    def _judge(self, own: list[Tensor], roots: Roots, rows: float) -> Scale | Unclear:
        """The same answer on all ranks."""
        loss = float(roots.tensors[0].detach()) if roots.loss is not None else 0.0
        noisy = self._drawn is not None and rng.generator_states() != self._drawn
        noisy = noisy or self._loads_apart() or (self.worker.size > 2 and self._normalizes())
        low = any(part.dtype in (torch.float16, torch.bfloat16) for part in own) or _has_low(roots.tensors[0])
        everyone = self.group.all_gather_json([loss, rows, noisy, low])
        total, parts = everyone[0][1], everyone[1:]
        covered = sum(one[1] for one in parts)
        predictions = []  # as loss_scale.predictions has them: for a mean, and for a sum
        for counted in (rows, total):
            factor = counted / covered if self.worker.rank and rows and covered else 0.0
            predictions.append([part * factor for part in own])
            for part in predictions[-1]:
                self.group.all_reduce_(part)
        exact = LOW_PRECISION if any(one[3] for one in everyone) else EXACT
        found: Scale | Unclear | None = None
        if self.worker.rank == 0:
            whole, mean, added = (torch.cat([part.reshape(-1) for part in one]) for one in (own, *predictions))
            losses = everyone[0][0], [one[0] for one in parts]
            noisy = any(one[2] for one in everyone)
            found = loss_scale(whole, mean, added, [one[1] for one in parts], total, losses, noisy, exact)
        packed = found.value if isinstance(found, Scale) else vars(found) if found is not None else None
        told = self.group.all_gather_json(packed)[0]
        return Scale(told) if isinstance(told, str) else Unclear(**told)

    def _loads_apart(self) -> bool:
        """Whether processes load rows, and may draw numbers there."""
        return any(getattr(loader.plain, "num_workers", 0) > 0 for loader in self._loaders.values())

    def _normalizes(self) -> bool:
        """Whether rows meet in batch normalisation, whose statistics are of a part then."""
        modules = (module for pair in self.session.pairs for module in pair.replica.model.modules())
        return any(isinstance(module, _BatchNorm) and module.training for module in modules)

    def after_exchange(self, backward: Backward, pairs: Sequence[Pair]) -> None:
        """The loss's tensor becomes that of the whole batch. A collective."""
        loss = None if self._now is None else self._now.roots.loss
        if self._now is None or loss is None:
            return
        if backward.of_first:
            value = torch.tensor([float(loss.detach())], dtype=torch.float64)
            self.group.broadcast_(value, 0)
        elif (carried := _carried(pairs)) is not None:
            value = carried.clone()
            carried.zero_()
        elif pairs and all(pair.averages for pair in pairs):
            value = torch.tensor([float(loss.detach()) * self._now.factor], dtype=torch.float64)
            self.group.mean_(value, backward.weight if backward.scale else 0.0, 0)
        else:
            return
        loss.data.copy_(value.reshape(loss.shape))

    # -- step --------------------------------------------------------------------------------------------------------

    def stepped(self, pair: Pair) -> None:
        """Replicas that are to be equal are compared now and then. A collective."""
        step = pair.replica.step
        if not pair.averages or not (step in _CHECKED or step % _CHECKED_EVERY == 0):
            return
        own = {name: [checksum(value)] for name, value in pair.replica.named(pair.replica.parameters).items()}
        for module in [module for reference in self._watched if (module := reference()) is not None]:
            own.setdefault(f"a {type(module).__name__}", []).append(_checksum_of(module))
        first, *others = self.group.all_gather_json({name: sorted(found) for name, found in own.items()})
        for rank, theirs in enumerate(others, start=1):
            for name, found in first.items():
                other = theirs.get(name, found)
                if other != found and len(other) == len(found):  # of garbage one worker may have more left
                    raise ManyhandsError(
                        f"after step {step} {name} of worker {rank} is not what it is on worker 0. Something other than the optimizer's step changes it on each "
                        "worker by its own rows: change it by what all workers have (parameters, gradients after backward), or train in one process"
                    )

    # -- rows that no DataLoader gave ----------------------------------------------------------------------------------

    def share(self, rows: Any) -> Any:
        """`mh.share` in an observed loop."""
        line = user_line()
        site = Site(*line[:2], 0)
        found = next((one for one in self._dealers if one.site == site), None)
        if found is None:
            self._prepare()
            found = self.loops.iterated(site)
            self._dealers[found] = PassDealer(self, found, True, None)
        dealer = self._dealers[found]
        deal = self.deal(dealer)
        share = part_of(rows, deal, self.worker.rank, self.worker.size)
        dealer.dealt(share)
        return share.batch


_OVER = object()


def _check_dataset(dataset: Any) -> None:
    """Unsupported for data that is shared out already: its rows would be shared twice."""
    library = type(dataset).__module__.partition(".")[0]
    if library in ("webdataset", "streaming") or getattr(dataset, "_distributed", None) is not None:
        raise Unsupported(
            f"the dataset {type(dataset).__name__} gives each worker a part of its rows already, and manyhands shares the batches: iterate a plain "
            "DataLoader over all rows"
        )


def _carried(pairs: Sequence[Pair]) -> Tensor | None:
    """Where a loss goes along with gradients; those that are sent while backward computes have left before it is known."""
    replica = pairs[0].replica if pairs else None
    return None if replica is None or replica.executor.hands_out_slices else replica.carried


def _refuse_second(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise Unsupported(
        f"two optimizers step the same parameters, and {type(optimizer).__name__} was made before the other one: give each optimizer parameters of its "
        "own, or make the second one where the first is done"
    )


def _holds_model(value: Any) -> bool:
    """Whether arguments of a process have a module in them."""
    if isinstance(value, dict):
        return _holds_model(list(value.values()))
    return isinstance(value, nn.Module) or (isinstance(value, list | tuple) and any(map(_holds_model, value)))


def _checksum_of(module: nn.Module) -> int:
    found = 0
    for p in module.parameters():
        found = checksum(p, found)
    return found


def _autograd_number() -> int:
    """Greater than those of all autograd nodes so far, less than those to come."""
    with torch.enable_grad():
        return int((torch.zeros((), requires_grad=True) * 1).grad_fn._sequence_nr())  # type: ignore[union-attr]


def _fetched_since(loss: Tensor, marks: Sequence[int]) -> int:
    """How many of these marks were set after the first node of the loss's graph was made."""
    oldest, seen, ahead = math.inf, set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not hasattr(node, "variable"):
            oldest = min(oldest, node._sequence_nr())
        ahead += [part for part, _ in node.next_functions]
    return sum(mark > oldest for mark in marks)


def _has_low(loss: Tensor) -> bool:
    """Whether autocast was on where the loss was computed, as far as its graph shows it."""
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(_LOW):
            return True
        ahead += [part for part, _ in node.next_functions]
    return False
