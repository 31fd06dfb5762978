"""Rule `add`: Downpour."""

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
class AddRule(Rule):
    """center += update. Large Scale Distributed Deep Networks, Dean et al., 2012 (Downpour)."""

    adds_steps: ClassVar[bool] = True

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            torch.add(old, push.update, out=new)
            old = new
