"""Distance: a weight of an update counts the less, the farther the center has moved since it was computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.strategies.base import Traits
from manyhands.strategies.window import Windowed


@dataclass(frozen=True, kw_only=True)
class Distance(Windowed):
    """Staleness as a distance in parameter space, weight by weight.

    Source: On Scalable Deep Learning and Parallelizing Gradient Descent, Joeri R. Hermans, 2017, which calls it ADAG.
    dist-keras, by the same author, calls it Experimental, and gives the name ADAG to what is `agn` here.

    1. Pull the center; the server remembers what this worker pulled.
    2. Take `window` steps of the worker's own optimizer from there.
    3. Push what they moved, divided by their number.
    4. The server adds it, each weight divided by 1 + (center - pulled)² / rate.

    Deviations: the server remembers what each worker pulled (memory N·D) where dist-keras sends it along with each
    push. Any optimizer instead of plain SGD, whose momentum or moments stay with the worker when it pulls. A window
    that an epoch's end cuts short is divided by the steps that it had, and enters too.
    """

    window: int = 4
    """Steps between pushes. Raise it when exchange takes long or training is unstable, lower it when it learns slowly:
    N workers move the center up to N / window steps for each global batch. The default makes that 1 with four
    workers."""
    rate: float = 1e-3
    """The scale: a weight that others moved by its square root counts half. Lower it if staleness hurts training."""

    name: ClassVar[str] = "distance"
    source: ClassVar[str] = "On Scalable Deep Learning and Parallelizing Gradient Descent, Hermans, 2017"
    summary: ClassVar[str] = "the mean step of each `window`, scaled per weight by distance from the stale center"
    divides: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        period="window", behind=("it divides a window's update by its steps", "use window=1")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise BadInput(f"strategy distance: rate must be a number above 0, not {self.rate!r}: the default is 0.001")

    @override
    def server(self) -> ServerSpec:
        return ServerSpec(rule="distance", bound=self.bound, options={"rate": self.rate}, compress=self.compress)

    @override
    def rate_factor(self, workers: int) -> float:
        """At most: weights that others have moved count for less."""
        return workers / self.window
