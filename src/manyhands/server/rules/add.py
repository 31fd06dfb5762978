"""Rule `add`: Downpour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.server.rules.base import Push, Rule


@dataclass(kw_only=True)
class AddRule(Rule):
    """center += update. Large Scale Distributed Deep Networks, Dean et al., 2012 (Downpour)."""

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            torch.add(old, push.update, out=new)
            old = new
