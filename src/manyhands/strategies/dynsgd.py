"""DynSGD: an update counts the less, the more others have moved the center since it was begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from manyhands.server.base import ServerSpec
from manyhands.strategies.base import Traits
from manyhands.strategies.server_strategy import OverlapOptions
from manyhands.strategies.window import Windowed


@dataclass(frozen=True, kw_only=True)
class DynSGD(Windowed, OverlapOptions):
    """Learning rates that follow staleness.

    Source: Heterogeneity-aware Distributed Parameter Servers, Jiawei Jiang, Bin Cui, Ce Zhang, Lele Yu, 2017.

    1. Pull the center.
    2. Take `window` steps of the worker's own optimizer from there.
    3. Push what they moved.
    4. The server adds it, divided by staleness + 1: the versions that others made since step 1, and its own.

    Deviations: staleness is counted in versions between this worker's pull and its push; the paper's server also takes
    back a part of what other workers of the same clock added before. Any optimizer instead of plain SGD, whose momentum
    or moments stay with the worker when it pulls. A window that an epoch's end cuts short enters as it is. A worker
    waits for its push and its pull; with `overlap` it computes meanwhile, and staleness counts from the center on which
    the window's first gradient was based.
    """

    window: int = 1
    """Steps between pushes. Raise it when exchange takes long; lower it when accuracy falls."""
    bound: int | None = None
    """How many steps the fastest may be ahead; `none`: any. Lower it when much is scaled down (see the histogram of
    staleness); at 0 nothing is stale, so that N workers move N times as far as one."""

    name: ClassVar[str] = "dynsgd"
    source: ClassVar[str] = "Heterogeneity-aware Distributed Parameter Servers, Jiang, Cui, Zhang, Yu, 2017"
    summary: ClassVar[str] = "updates of each `window`, scaled by 1/(staleness + 1)"
    divides: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(
        period="window", behind=("it divides updates by how late they are", "use downpour"), behind_at_once=True
    )

    @override
    def overlaps(self) -> bool:
        return self.overlap

    @override
    def server(self) -> ServerSpec:
        return ServerSpec(rule="staleness", bound=self.bound, compress=self.compress)

    @override
    def rate_factor(self, workers: int) -> float:
        """Workers of equal speed see a staleness of N - 1: their updates weigh 1/N; at bound 0 they weigh 1."""
        return float(workers) if self.bound == 0 else 1.0
