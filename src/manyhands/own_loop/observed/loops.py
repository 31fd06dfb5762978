"""Which lines of a script feed a backward, and how the workers get the batches of these lines. Pure: events in, decisions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from manyhands.errors import Line

KEPT = 4  # of a pass's newest batches; a script may fetch some ahead of the backward
PROBES = 4  # so many batches are tried at most until a loss is known to be a mean or a sum
UNSEEN = 32  # so many batches are whole on worker 0 because of a backward that was seen once, and does not come again


class PassDeal(Enum):
    """How the workers get a batch."""

    WHOLE = "each gets all of it, and worker 0's gradient counts"
    PROBE = "worker 0 gets all of it, and its gradient counts; the others get parts, which show how the loss adds up"
    SLICE = "each gets its rows"


class Scale(Enum):
    """What a loss is over its rows."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class Site:
    """A line that iterates a loader, and the number of the dataset that it gives."""

    file: str
    line: int
    dataset: int

    @property
    def where(self) -> Line:
        return Line(self.file, self.line, 0)


@dataclass
class SiteRecord:
    """What is known of a site."""

    training: bool = False  # a backward followed one of its batches
    evaluating: bool = False  # one of its batches was followed by none
    scales: dict[Line, Scale] = field(default_factory=dict)  # by the line of the backward
    tried: dict[Line, int] = field(default_factory=dict)  # backwards whose scale is not known yet: probes so far
    probes: int = 0  # since one of these was seen first
    ahead: int | None = None  # so many batches are fetched before the backward of an earlier one; None: not known yet

    def next_deal(self) -> PassDeal:
        if not self.training:
            return PassDeal.WHOLE
        return PassDeal.PROBE if self.tried and self.probes < UNSEEN else PassDeal.SLICE


@dataclass(eq=False)
class Pass:
    """One iteration over a loader, under way or left."""

    site: Site
    began: int  # all times are numbers of events
    fetches: int = 0
    fetched: int = -1  # when the newest batch came; -1: none can feed a backward
    deals: deque[PassDeal] = field(default_factory=lambda: deque(maxlen=KEPT))
    fed: bool = False  # a backward followed the newest batch
    open: bool = True


@dataclass(frozen=True)
class Fed:
    """What a backward is of."""

    passes: tuple[Pass, ...]  # whose batches it is computed from; the newest first
    deal: PassDeal
    scale: Scale | None  # None: not known
    ahead: int  # so many batches were fetched since the one that it is of


class Loops:
    """The passes of a script, nested in any order.

    A batch goes whole to every worker until a backward has followed one of its site. The next one is a probe, and once
    the scale of each of the site's backwards is known, rows are shared. What is fetched without autograd is whole.
    """

    def __init__(self) -> None:
        self.sites: dict[Site, SiteRecord] = {}
        self._passes: list[Pass] = []  # open ones, and the one that was left last
        self._now = 0
        self._backward = -1  # when the newest one was

    def iterated(self, site: Site) -> Pass:
        """A pass begins."""
        self._now += 1
        self.sites.setdefault(site, SiteRecord())
        begun = Pass(site, self._now)
        self._passes.append(begun)
        return begun

    def fetched(self, one: Pass, autograd: bool = True) -> PassDeal:
        """The script asks a pass for its next batch. autograd: whether gradients are computed where it asks."""
        self._now += 1
        record = self.sites[one.site]
        if not autograd:
            record.evaluating = True
            return PassDeal.WHOLE
        if one.fetched >= 0 and not one.fed:
            record.evaluating = True
        one.fed, one.fetches, one.fetched = False, one.fetches + 1, self._now
        self._passes = [other for other in self._passes if other.open]
        deal = record.next_deal()
        record.probes += deal is PassDeal.PROBE
        one.deals.append(deal)
        return deal

    def backward(self, line: Line, ahead_of: Callable[[Pass], int] = lambda one: 0) -> Fed | None:
        """A backward begins at this line. None: it is of no batch.

        ahead_of: says how many batches of a pass were fetched after the loss was begun.
        """
        self._now += 1
        passes = self._feeding()
        self._backward = self._now
        if not passes:
            return None
        ahead = ahead_of(passes[0])
        deals = [one.deals[-1 - min(ahead, len(one.deals) - 1)] for one in passes]
        deal = next(deal for deal in (PassDeal.SLICE, PassDeal.PROBE, PassDeal.WHOLE) if deal in deals)
        for one in passes:
            one.fed = True
            record = self.sites[one.site]
            record.training = True
            if line not in record.scales and line not in record.tried:
                record.tried[line] = record.probes = 0
        return Fed(tuple(passes), deal, self.sites[passes[0].site].scales.get(line), ahead)

    def decided(self, fed: Fed, line: Line, scale: Scale | None) -> bool:
        """A probe's backward is over. None: unclear. Whether there is another probe, or none is needed."""
        for one in fed.passes:
            record = self.sites[one.site]
            if scale is not None:
                record.scales[line] = scale
                record.tried.pop(line, None)
            else:
                record.tried[line] = record.tried.get(line, 0) + 1
        return scale is not None or self.sites[fed.passes[0].site].tried[line] < PROBES

    def ended(self, one: Pass) -> None:
        """A pass is over: exhausted, left by `break`, or dropped."""
        self._now += 1
        if one.fetched >= 0 and not one.fed and one.fetches > 1:
            self.sites[one.site].evaluating = True
        one.open = False
        self._passes = [other for other in self._passes if other.open or other is one]

    @property
    def training(self) -> Pass | None:
        """The innermost open pass whose site feeds a backward."""
        return next((one for one in reversed(self._passes) if one.open and self.sites[one.site].training), None)

    def _feeding(self) -> list[Pass]:
        """The passes whose batches a backward is of that begins now: the one that gave the newest batch, and those that
        go along with it. A pass that was left (`next(iter(loader))`) counts where no other is open."""
        with_batch = [one for one in self._passes if one.fetched >= 0]
        candidates = [one for one in with_batch if one.open] or with_batch
        if not candidates:
            return []
        newest = max(candidates, key=lambda one: one.fetched)
        return [newest, *(one for one in candidates if one is not newest and self._goes_along(one, newest))]

    def _goes_along(self, one: Pass, newest: Pass) -> bool:
        """Whether both are iterated side by side: by one line (`zip`), or batch by batch since the last backward. A pass
        that began after the other's batch came lies within it."""
        if one.site.where == newest.site.where:
            return True
        known = self.sites[one.site]
        if known.evaluating and not known.training:
            return False
        return one.fetched > self._backward and newest.began < one.fetched
