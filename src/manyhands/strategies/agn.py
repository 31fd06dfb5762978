"""AGN: workers step alone for a window, and push the mean of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from manyhands.server.base import ServerSpec
from manyhands.strategies.base import Traits
from manyhands.strategies.server_strategy import OverlapOptions
from manyhands.strategies.window import Windowed


@dataclass(frozen=True, kw_only=True)
class AGN(Windowed, OverlapOptions):
    """Accumulated gradient normalization.

    Source: Accumulated Gradient Normalization, Joeri R. Hermans, Gerasimos Spanakis, Rico Möckel, 2017. dist-keras, by
    the same author, calls it ADAG; his thesis gives that name to another algorithm, which is `distance` here.

    1. Pull the center.
    2. Take `window` steps of the worker's own optimizer from there.
    3. Push what they moved, divided by their number: a window decides the direction, and is as long as one step.
    4. The server adds it to the center.

    Deviations: any optimizer instead of plain SGD, whose momentum or moments stay with the worker when it pulls. A
    window that an epoch's end cuts short is divided by the steps that it had, and enters too. A worker waits for its
    push and its pull; with `overlap` it computes meanwhile, and the first gradient of a window is taken where the one
    before ended.
    """

    window: int = 4
    """Steps between pushes (the paper's λ). Raise it when exchange takes long or training is unstable, lower it when it
    learns slowly: N workers move the center N / window steps for each global batch. The default makes that 1 with four
    workers."""

    name: ClassVar[str] = "agn"
    source: ClassVar[str] = "Accumulated Gradient Normalization, Hermans, Spanakis, Möckel, 2017"
    summary: ClassVar[str] = "the mean step of each `window`"
    divides: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        period="window", behind=("it divides a window's update by its steps", "use window=1")
    )

    @override
    def overlaps(self) -> bool:
        return self.overlap

    @override
    def server(self) -> ServerSpec:
        return ServerSpec(rule="add", bound=self.bound, compress=self.compress)

    @override
    def rate_factor(self, workers: int) -> float:
        return workers / self.window
