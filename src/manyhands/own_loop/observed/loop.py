"""A script's own loop under observation: its loaders, optimizers and backwards become those of a prepared loop."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from manyhands import rng
from manyhands.errors import BadInput, Line, ManyhandsError, Unsupported, calling_line
from manyhands.own_loop import loss_graph
from manyhands.own_loop.backward_watch import Roots
from manyhands.own_loop.batches import SLICES
from manyhands.own_loop.launch import launched_strategy
from manyhands.own_loop.observed.drift import DriftCheck
from manyhands.own_loop.observed.loops import KEPT, Fed, Loops, Pass, PassDeal, Scale, Site
from manyhands.own_loop.observed.modules import outermost_modules, replaced, stepped_by
from manyhands.own_loop.observed.probe import judged
from manyhands.own_loop.prepare import DEFAULT, prepare_on
from manyhands.own_loop.prepared_loader import Dealer, PreparedLoader, Share, check_loader, part_of
from manyhands.own_loop.session import Backward, Pair, Session, in_order
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Strategy

_FIRST_PARTS = 3  # parts of a batch after which an error is not the parts'


@dataclass(frozen=True)
class UnderWay:
    """A backward that runs."""

    fed: Fed
    roots: Roots
    rows: float  # what its loss counts here
    factor: float  # of its gradients


class PassDealer(Dealer):
    """One pass of the script over a loader."""

    def __init__(self, observed: ObservedLoop, one: Pass, trains: bool, loader: DataLoader[Any] | None) -> None:
        """loader: None of rows that no loader gave."""
        self.observed, self.one, self.trains, self.loader = observed, one, trains, loader
        self.checked = loader is None  # that each of its batches has a row for each worker
        self.shares: deque[Share] = deque(maxlen=KEPT)
        self.marks: deque[int] = deque(maxlen=KEPT)  # autograd's number when each came

    @override
    def next_deal(self) -> PassDeal:
        return self.observed.deal(self)

    @override
    def dealt(self, share: Share) -> None:
        if torch.is_grad_enabled():  # else no backward is of it
            self.shares.append(share)
            if self.observed.loops.sites[self.one.site].ahead is None:
                self.marks.append(loss_graph.next_number())
        if self.one.deals and self.one.deals[-1] is PassDeal.PROBE:
            self.observed.lend()

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
        self.paused = False  # what is iterated now is not the script's iterating
        self.leave: Callable[[], None] = lambda: None  # watch no longer
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # not prepared yet
        self._dealers: dict[Pass, PassDealer] = {}
        self._loaders: dict[Pass, PreparedLoader] = {}  # whose rounds may be open yet
        self._earlier: dict[Site, tuple[WeakSet[Pair], int]] = {}  # the pairs that trained there, and passes so far
        self._datasets: dict[int, tuple[Any, int]] = {}  # by address: (what holds it, its number)
        self._drift = DriftCheck(self.group)
        self._own: dict[Pair, FlatVector] = {}  # of pairs that compute with worker 0's parameters: their own
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

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """The script has made an optimizer."""
        self._optimizers.append(weakref.ref(optimizer))
        if self.own_batches and self._alike:  # models are made alike, batches are not
            self._draw_own()

    def finish(self) -> None:
        """What passes left by `break` have open is finished. A collective."""
        for one in [one for one in self._loaders if not one.open]:
            self._loaders.pop(one).finish()

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

    def iterate(self, loader: DataLoader[Any], plain: Callable[[DataLoader[Any]], Iterator[Any]]) -> Iterator[Any]:
        """The script begins a pass over a loader. plain: what iterates it for one process."""
        line = calling_line()
        if self.own_batches:
            return self._iterate_own(plain(loader), line)
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
        shared = self._loaders[one] = PreparedLoader(loader, self.session, dealer)
        shared.pairs, shared.passes = self._earlier.get(site, (shared.pairs, 0))
        self.paused = True
        try:
            passing = iter(shared)
        finally:
            self.paused = False
        return self._walk(passing, one)

    def _iterate_own(self, batches: Iterator[Any], line: Line) -> Iterator[Any]:
        """With own batches a loader is for evaluation."""
        self._given = line if torch.is_grad_enabled() else self._given
        try:
            yield from batches
        finally:
            self._given = None

    def _walk(self, batches: Iterator[Any], one: Pass) -> Iterator[Any]:
        """The batches; what loads them is not the script's iterating."""
        try:
            while True:
                self.paused = True
                try:
                    batch = next(batches, _OVER)
                finally:
                    self.paused = False
                if batch is _OVER:
                    done = self._loaders.pop(one)
                    self._earlier[one.site] = done.pairs, done.passes
                    if self.session.pass_under_way is None:
                        self._take_first_draws()
                    return
                yield batch
        finally:
            batches.close()  # type: ignore[attr-defined]

    def deal(self, dealer: PassDealer) -> PassDeal:
        """How the workers get the batch that the script asks for now."""
        if self._optimizers and self.session.pass_under_way is None:
            self._prepare()
        deal = self.loops.fetched(dealer.one, torch.is_grad_enabled())
        if deal is PassDeal.SLICE and self._alike:
            self._draw_own()
        self._drawn = rng.generator_states() if deal is PassDeal.PROBE else None
        if deal is PassDeal.SLICE and self.note:
            self.say(self.note)
            self.note = ""
        if deal is not PassDeal.WHOLE:
            self._parts += 1
            if not dealer.checked:
                check_loader(dealer.loader, self.worker.size)
                dealer.checked = True
        return deal

    def lend(self) -> None:
        """For a probe all compute with worker 0's parameters, where replicas may differ; each steps its own. A collective."""
        for pair in in_order(self.session.pairs):
            if pair.strategy.needs.one_host:
                self.group.barrier()  # all write to one copy: nobody's step is under way
            elif not pair.averages and pair not in self._own:
                self._own[pair] = pair.replica.parameters.clone()
                pair.replica.parameters.broadcast_(self.group, 0)

    def stepping(self, pair: Pair) -> None:
        """A pair is about to step: its own parameters are back."""
        if (own := self._own.pop(pair, None)) is not None:
            pair.replica.set_parameters(own)

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
        if not self._optimizers:
            return
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
            prepare_on(
                self.session, given, optimizer, *self._schedulers_of(optimizer), strategy=self.strategy, batches=SLICES
            )
            held.update(id(p) for module in modules for p in module.parameters())
            self.say(f"{type(optimizer).__name__} steps {', '.join(type(module).__name__ for module in modules)}")
        self._drift.watch(module for module in roots if any(id(p) not in held for p in module.parameters()))

    def _schedulers_of(self, optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
        """Where workers go at their own pace, and schedulers are stepped by the rows of all."""
        if strategy_of(self.strategy or launched_strategy() or DEFAULT).leasing() is None:
            return []
        found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
        return [one for one in found if one.optimizer is optimizer]

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Unsupported(
                "LBFGS's step(closure) evaluates the model several times a step, which no exchange of slices can follow: give --batches whole, or use "
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
        fed = None if self.own_batches else self.loops.backward(roots.line, lambda one: self._ahead(roots, one))
        if fed is None:
            with self._without_loader(roots):
                yield 1.0
            return
        if not self.session.prepared:
            raise Unsupported(
                "no torch.optim.Optimizer steps what this backward computes gradients for, and workers agree where an optimizer steps: use one, "
                "torch.optim.SGD say, in place of updates by hand, or give --batches whole"
            )
        dealer = self._dealers[fed.passes[0]]
        share = dealer.shares[-1 - min(fed.ahead, len(dealer.shares) - 1)]
        stated = self.session._stated
        rows = float(share.rows or 0) if not isinstance(stated, float) else stated
        divisor = None if stated is not None else loss_graph.divisor_of(roots.loss) if roots.loss is not None else None
        weight = rows if divisor is None or share.stand_in else divisor
        scale = fed.scale if stated != "sum" else Scale.SUM
        factor = 1.0
        if fed.deal is not PassDeal.SLICE:
            self.backward = Backward(1.0, 1.0, True, of_first=True)
        else:
            scale = scale or self._by_graph(roots, rows)
            summed = scale is Scale.SUM
            self.backward = Backward(1.0 if summed else weight, 0.0 if share.stand_in else 1.0, True)
            factor = float(self.worker.size) if summed and stated != "sum" else 1.0
        self.session._stated_used = self.session._stated_used or stated is not None
        self._now = UnderWay(fed, roots, weight, factor)
        of_first = list(self.session.pairs) if self.backward.of_first else []
        for pair in of_first:
            pair.keep_earlier()
        try:
            yield factor
        finally:
            self.backward = self._now = None
            for pair in of_first:
                pair.forget_earlier()

    @contextmanager
    def _without_loader(self, roots: Roots) -> Iterator[None]:
        for optimizer in [one for reference in self._optimizers if (one := reference()) is not None]:
            self._check_optimizer(optimizer)
        if not self.own_batches:
            raise Unsupported(
                "a backward follows no DataLoader's batch, so nobody knows which rows it is of: give --batches whole. Or share the batch "
                "(rows = mh.share(rows), of one process's batch), or give --own-batches: each worker then draws its own, and the batch is "
                f"{self.worker.size} times as large"
            )
        if self._given is not None:
            raise BadInput(
                f"--own-batches is for a loop that draws its batches itself, and the DataLoader of {self._given} feeds this backward: leave it out"
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
            terms = loss_graph.terms_of(roots.loss)
            if terms.scale(rows):
                return Scale.SUM
            if loss_graph.is_mean(roots.loss):
                return Scale.MEAN
        raise Unsupported(
            "this backward comes for the first time after the rows were shared, and its loss does not show whether it is a mean or a "
            'sum over rows: give --batches whole, or call mh.weight(len(rows)) before it if it is a mean, mh.weight("sum") if it is a sum'
        )

    def _ahead(self, roots: Roots, one: Pass) -> int:
        """How many batches of a pass were fetched after the loss was begun: a script may fetch the next one before backward."""
        record, dealer = self.loops.sites[one.site], self._dealers.get(one)
        if record.ahead is None:
            if dealer is None or roots.tensors[0].grad_fn is None:
                return 0
            began = loss_graph.first_number(roots.tensors[0])
            record.ahead = sum(mark > began for mark in dealer.marks)
        return record.ahead

    def before_exchange(self, backward: Backward, pairs: Sequence[Pair]) -> None:
        """Of a probe: whether the loss is a mean or a sum. A collective. Else the loss goes along with the gradients."""
        if self._now is None:
            return
        if not backward.of_first:
            loss, factor = self._now.roots.loss, self._now.factor if backward.scale else 0.0
            if loss is not None and (carried := _carried(pairs)) is not None:
                carried.copy_(loss.detach().view(())) if factor else carried.zero_()
                if factor not in (0.0, 1.0):
                    carried.mul_(factor)
            return
        fed, roots = self._now.fed, self._now.roots
        batch = fed.passes[0], fed.passes[0].fetches
        known = fed.scale is not None and self._decided_in.get(roots.line) != batch
        if fed.deal is not PassDeal.PROBE or known or self.session._stated == "sum":
            return
        own = []
        for pair in pairs:
            pair.collect()
            with pair.without_earlier():
                own += [part.detach().clone() for part in pair.replica.gradients.parts]
        if roots.loss is not None and loss_graph.rows_meet(roots.loss):
            raise Unsupported(
                f"rows of a batch look at each other in the loss (a product or a variance over the batch), so {self.worker.size} workers that have their own "
                "rows alone cannot compute it: give --batches whole"
            )
        found = judged(self.group, own, roots, self._now.rows, self._is_noisy())
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
            where = fed.passes[0].site.where
            self.say(
                f"{roots.line}: the loss is a {found.value} over rows; the rows of {where} are shared by {self.worker.size} workers"
            )
        elif not again:
            raise Unsupported(
                f"the loss is neither a mean nor a sum over rows ({found.reason}), so {self.worker.size} workers cannot share them. If rows "
                "of a batch look at each other (contrast, normalisation over the batch), give --batches whole; if the loss is a mean over something "
                'else, call mh.weight(what it divides by) before backward, or mh.weight("sum")'
            )

    def _is_noisy(self) -> bool:
        """Whether numbers were drawn since the newest probe was asked for, or may have been where processes load rows; or
        rows meet in batch normalisation, whose statistics are of a part then, unless the part is the batch twice."""
        if self._drawn is not None and rng.generator_states() != self._drawn:
            return True
        if any(dealer.loader is not None and dealer.loader.num_workers > 0 for dealer in self._dealers.values()):
            return True
        if self.worker.size == 2:
            return False
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
            loss.data.view(()).copy_(carried)
            return
        elif pairs and all(pair.averages for pair in pairs):
            value = torch.tensor([float(loss.detach()) * self._now.factor], dtype=torch.float64)
            self.group.mean_(value, backward.weight if backward.scale else 0.0, 0)
        else:
            return
        loss.data.copy_(value.reshape(loss.shape))

    def stepped(self, pair: Pair) -> None:
        """A pair has made a step."""
        self._drift.stepped(pair)

    # -- rows that no DataLoader gave ----------------------------------------------------------------------------------

    def share(self, rows: Any) -> Any:
        """`mh.share` in an observed loop."""
        line = calling_line()
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
