"""Server rules as a user writes them, in a file."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

import manyhands as mh

RULE = f"{__file__}:Half"


@dataclass(kw_only=True)
class Half(mh.Rule):
    """center += share * update."""

    share: float = 0.5

    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[mh.Push]) -> None:
        for push in pushes:
            new.copy_(old + self.share * push.update)
            old = new
