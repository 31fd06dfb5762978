"""Rule `staleness`: DynSGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.server.pushes import Push
from manyhands.server.rules.base import Rule


@dataclass(kw_only=True)
class StalenessRule(Rule):
    """center += update / (staleness + 1). Heterogeneity-aware Distributed Parameter Servers, Jiang et al., 2017."""

    adds_steps: ClassVar[bool] = True
    divides_by_staleness: ClassVar[bool] = True

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            torch.add(old, push.update, alpha=1 / (push.staleness + 1), out=new)
            old = new
